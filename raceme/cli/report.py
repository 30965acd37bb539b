"""`raceme report`, `raceme export` and `raceme watch`: results as pages, models for use."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO
from urllib.parse import quote

import typer

from raceme.core.errors import UserError
from raceme.core.files import check_folder
from raceme.core.options import option

if TYPE_CHECKING:
    from raceme.flower.ports import Access

_Maker = Callable[[Path, str], str]


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="folders of runs, comparisons or simulations"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="file to write, for a single folder",
            show_default="report.html in the folder",
        ),
    ] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="also write the table of a comparison: compare.tex")
    ] = False,
    caption: Annotated[
        str, typer.Option(help="caption of compare-table.tex, in LaTeX", show_default="the title")
    ] = "",
    label: Annotated[
        str, typer.Option(help="label of compare-table.tex", show_default="tab:compare")
    ] = "",
) -> None:
    """Write the results of a run, a comparison or a simulated app as one HTML file."""
    from raceme.records.folder import COMPARISON

    if output is not None and len(folders) > 1:
        raise UserError(f"--output names one file, and there are {len(folders)} folders.")
    for folder in folders:
        if latex and folder.is_dir() and not (folder / COMPARISON).is_file():
            raise UserError(f"--latex writes the table of a comparison, and {folder} is not one.")
    planned = plan(folders, output)
    failed = False
    for folder, target, make in planned:
        try:
            _write(folder, target, make)
            if latex:
                _write_latex(folder, caption, label)
        except UserError as error:
            failed = True
            print(f"raceme: {error}", file=sys.stderr)
        else:
            print(target)
    if failed:
        raise typer.Exit(2)


def plan(folders: Sequence[Path], output: Path | None) -> list[tuple[Path, Path, _Maker]]:
    """Return the page's file and its maker for each folder.

    Raises
    ------
    UserError
        A folder has no results, or its page would replace a foreign file; raised before writing.
    """
    from raceme.records.folder import REPORT
    from raceme.reporting.page import check_writable

    planned = []
    for folder in folders:
        make = _maker(folder)
        target = output or folder / REPORT
        check_writable(target)
        planned.append((folder, target, make))
    return planned


def _maker(folder: Path) -> _Maker:
    """Return the maker of a folder's page."""
    from raceme.records.folder import COMPARISON, MESSAGES, STORE, SUMMARY

    check_folder(folder, "the folder of a run or of a comparison")
    if (folder / COMPARISON).is_file():
        from raceme.experiments.page import comparison_page

        return comparison_page
    if (folder / MESSAGES).is_file():
        from raceme.reporting.waiting import simulation_page

        return simulation_page
    if any((folder / name).is_file() for name in (STORE, SUMMARY)):
        from raceme.reporting.run_page import run_page

        return run_page
    inside = sorted(
        path.parent.name for name in (COMPARISON, STORE) for path in folder.glob(f"*/{name}")
    )
    hint = f" There are some inside: {', '.join(inside[:5])}." if inside else ""
    raise UserError(
        f"{folder} has no results: expected what `raceme run` (run.sqlite), "
        f"`raceme compare` (compare.json) or `raceme simulate` (messages.csv) writes.{hint}"
    )


def _write(folder: Path, target: Path, make: _Maker) -> None:
    from raceme.reporting.page import write_page

    write_page(target, make(folder, _link(folder, target)))


def _write_latex(folder: Path, caption: str, label: str) -> None:
    from raceme.core.files import atomic_write
    from raceme.experiments.results import read_comparison
    from raceme.experiments.tables import latex_table, to_latex

    comparison = read_comparison(folder)
    for name, text in (
        ("compare.tex", to_latex(comparison)),
        ("compare-table.tex", latex_table(comparison, caption, label)),
    ):
        with atomic_write(folder / name) as file:
            file.write_text(text, encoding="utf-8")
        print(folder / name)


def _link(folder: Path, target: Path) -> str:
    """Return the prefix of links from the page to files of the folder."""
    way = os.path.relpath(folder.resolve(), target.parent.resolve())
    return "" if way == "." else quote(Path(way).as_posix()) + "/"


# -----------------------------------------------------------------------------
# `raceme export`: a model for an application without Raceme.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportArguments:
    """Options of `raceme export`."""

    cluster: int | None = option(None, "the model of this cluster", unit="K")
    device: str | None = option(None, "the model that this device uses", unit="ID")
    format: str = option("safetensors", "safetensors or onnx", unit="NAME")
    labels: str = option("", "names of the classes; default: those of the dataset", unit="A,B,…")
    out: Path | None = option(None, "folder to make; default: in the run's, export/MODEL-FORMAT")
    trust: str = option(
        "",
        "folder whose runs may name a model and a dataset (module:name) to import",
        unit="FOLDER",
    )


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    options: ExportArguments,
) -> None:
    """Write a model of a run for use without Raceme, with a program that uses it."""
    from raceme.reporting.artefacts import export_model

    given = vars(options).copy()
    kind, labels = given.pop("format"), given.pop("labels")
    names = [name.strip() for name in labels.split(",")] if labels else []
    made, compared = export_model(folder, kind, labels=names, **given)
    print(f"{made}: checked on {compared}. To use it: python {made / 'predict.py'} INPUT.npy")


# -----------------------------------------------------------------------------
# `raceme watch`: running and finished runs in the browser.
# -----------------------------------------------------------------------------


_HOST, _PORT = "127.0.0.1", 8321
_INTERRUPTED = 130

Watch = Annotated[bool, typer.Option("--watch", help="serve a live dashboard for the browser")]
Address = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="address of the dashboard; port 0: any free port"),
]
ADDRESS = f"{_HOST}:{_PORT}"


@dataclass(frozen=True)
class WatchArguments:
    """Options of `raceme watch`."""

    host: str = option(_HOST, "address to listen on; other machines need the printed token")
    port: int = option(_PORT, "port to listen on; 0: any free port", low=0, high=65535)
    certificates: Path | None = option(
        None,
        "folder made by `raceme certs`: for other machines HTTPS, and its token",
        unit="FOLDER",
    )


def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="folder of a run, of a comparison, or of several runs"
        ),
    ],
    options: WatchArguments,
) -> None:
    """Show a run, a comparison, or all runs of a folder in the browser. Press Ctrl-C to stop."""
    from raceme.flower.ports import is_loopback, new_token
    from raceme.reporting.dashboard.server import address_of, bind, qr_code, serve
    from raceme.reporting.dashboard.source import Watched, check_watchable, is_comparison

    check_watchable(folder)
    access = _access(options.certificates, options.host)
    several = is_comparison(folder)
    # Other users of this machine may see the page, too; changes need the printed address.
    edits = new_token() if several and is_loopback(options.host) and not access.token else ""
    with bind(options.host, options.port) as listening:
        address = address_of(listening, access, edits)
        shown = _shown(address, options.certificates, sys.stdout)
        print(f"{folder}: {shown}  (press Ctrl-C to stop)", flush=True)
        _print_code(qr_code(address), sys.stdout)
        with suppress(KeyboardInterrupt):
            serve(listening, Watched(folder, several), access, _never, edits)


def _access(certificates: Path | None, host: str) -> Access:
    from raceme.fleet.certificates import access_to
    from raceme.flower.ports import new_token

    folder = None if certificates is None else certificates.expanduser()
    return access_to(folder, host, spare=new_token())


def _shown(address: str, certificates: Path | None, output: TextIO) -> str:
    """Return an address for output, without a token from a file in logs."""
    from raceme.fleet.certificates import read_token

    if output.isatty() or certificates is None or not read_token(certificates.expanduser()):
        return address
    return address.partition("#")[0]


async def _never() -> None:
    await asyncio.Event().wait()


@contextmanager
def watched(
    shown: bool,
    folder: Path,
    address: str,
    *,
    comparison: bool = False,
    certificates: Path | None = None,
    is_json: bool = False,
) -> Iterator[None]:
    """Run the dashboard of a folder within the context, if requested.

    On a terminal the page stays afterwards until Ctrl-C; in a script it ends with the context, as
    it does after an error or interruption. If standard output is JSON, the address is printed to
    standard error.

    Raises
    ------
    UserError
        The address is invalid or taken, or given for no dashboard.
    """
    if not shown:
        if address != ADDRESS:
            raise UserError("--watch-address is the address of the dashboard: add --watch.")
        yield
        return
    from raceme.reporting.dashboard.server import qr_code, watching

    host, port = parsed_address("--watch-address", address, ADDRESS, any_port=True)
    access = _access(certificates, host)
    output = sys.stderr if is_json else sys.stdout
    with watching(folder, host, port, comparison=comparison, access=access) as beside:
        address = _shown(beside.address, certificates, output)
        print(f"Dashboard: {address}", file=output, flush=True)
        _print_code(qr_code(beside.address), output)
        ended: typer.Exit | None = None
        try:
            yield
        except typer.Exit as exit_:
            if exit_.exit_code == _INTERRUPTED:
                raise
            ended = exit_
        if sys.stdin.isatty() and output.isatty():
            said = f"The dashboard stays open at {beside.address}. Press Ctrl-C to stop."
            print(said, file=output, flush=True)
            with suppress(KeyboardInterrupt):
                beside.wait()
        if ended is not None:
            raise ended


def _print_code(code: str, output: TextIO) -> None:
    """Print a QR code on a terminal that has its characters."""
    if code and output.isatty() and "utf" in output.encoding.lower():
        print(code, file=output, flush=True)


def parsed_address(
    option: str, address: str, example: str, *, any_port: bool = False
) -> tuple[str, int]:
    """Parse an address HOST:PORT.

    Raises
    ------
    UserError
        It is invalid, or its port is 0 where that is not allowed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not (0 if any_port else 1) <= int(port) < 65536:
        raise UserError(
            f"'{address}' is not an address: expected HOST:PORT, e.g. {option} {example}."
        )
    return host.strip("[]"), int(port)
