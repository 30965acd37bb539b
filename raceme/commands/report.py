"""`raceme report`: pages of results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from raceme.config.errors import UserError

_Maker = Callable[[Path, str], str]


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="folders of runs, comparisons or simulations"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="file for the page, if there is one folder [default: report.html in the folder]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a page of a run, a comparison or a simulated app: one HTML file, nothing else."""
    if output is not None and len(folders) > 1:
        raise UserError(f"--output names one file, and there are {len(folders)} folders.")
    planned = plan(folders, output)
    failed = False
    for folder, target, make in planned:
        try:
            _write(folder, target, make)
        except UserError as error:
            failed = True
            print(f"raceme: {error}", file=sys.stderr)
        else:
            print(target)
    if failed:
        raise typer.Exit(2)


def plan(folders: Sequence[Path], output: Path | None) -> list[tuple[Path, Path, _Maker]]:
    """Return for each folder the file of its page, and what makes it.

    Raises
    ------
    UserError
        A folder has no results, or its page would replace something else. Nothing is written yet.
    """
    from raceme.reporting.page import FILE_NAME, check_writable

    planned = []
    for folder in folders:
        make = _maker(folder)
        target = output or folder / FILE_NAME
        check_writable(target)
        planned.append((folder, target, make))
    return planned


def _maker(folder: Path) -> _Maker:
    """Return what makes the page of a folder."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; expected the folder of a run or of a comparison.")
    if (folder / "compare.json").is_file():
        from raceme.comparison.page import comparison_page

        return comparison_page
    if (folder / "messages.csv").is_file():
        from raceme.reporting.waiting_page import simulation_page

        return simulation_page
    if any((folder / name).is_file() for name in ("run.sqlite", "summary.json")):
        from raceme.reporting.run_page import run_page

        return run_page
    inside = sorted(
        path.parent.name
        for name in ("compare.json", "run.sqlite")
        for path in folder.glob(f"*/{name}")
    )
    hint = f" There are some inside: {', '.join(inside[:5])}." if inside else ""
    raise UserError(
        f"{folder} has no results: expected what `raceme run` (run.sqlite), "
        f"`raceme compare` (compare.json) or `raceme simulate` (messages.csv) leaves.{hint}"
    )


def _write(folder: Path, target: Path, make: _Maker) -> None:
    from raceme.reporting.page import write_page

    write_page(target, make(folder, _link(folder, target)))


def _link(folder: Path, target: Path) -> str:
    """Return what stands before a file of the folder in a link from the page."""
    way = os.path.relpath(folder.resolve(), target.parent.resolve())
    return "" if way == "." else quote(Path(way).as_posix()) + "/"
