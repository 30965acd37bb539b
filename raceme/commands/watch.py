"""`raceme watch`: a run in the browser, while it goes on or when it is over."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from raceme.config.errors import UserError

_HOST, _PORT = "127.0.0.1", 8321
_INTERRUPTED = 130

Watch = Annotated[bool, typer.Option("--watch", help="show it in the browser as it goes on")]
Address = Annotated[
    str,
    typer.Option(
        "--watch-address", metavar="HOST:PORT", help="where the page of --watch is; port 0: any"
    ),
]
ADDRESS = f"{_HOST}:{_PORT}"


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="folder of a run or of a comparison")
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="address to listen at; any but this machine's own needs a token, which is printed",
        ),
    ] = _HOST,
    port: Annotated[
        int, typer.Option("--port", metavar="INTEGER", help="0: any", min=0, max=65535)
    ] = _PORT,
) -> None:
    """Show a run or a comparison in the browser: as it goes on, or replayed. Ctrl-C ends it."""
    from raceme.dashboard.access import is_loopback, new_token
    from raceme.dashboard.folder import Watched, check_watchable, is_comparison
    from raceme.dashboard.serving import address_of, bind, serve

    check_watchable(folder)
    token = "" if is_loopback(host) else new_token()
    with bind(host, port) as listening:
        print(f"{folder}: {address_of(listening, token)}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            serve(listening, Watched(folder, is_comparison(folder)), token, _never)


async def _never() -> None:
    await asyncio.Event().wait()


@contextmanager
def watched(shown: bool, folder: Path, address: str, *, comparison: bool = False) -> Iterator[None]:
    """Show what is being written to a folder meanwhile, if it is to be shown.

    On a terminal the page stays when that is over, until Ctrl-C; in a script it ends with it. What
    cannot begin, or was interrupted, leaves no page.

    Raises
    ------
    UserError
        The address is none, or taken.
    """
    if not shown:
        yield
        return
    from raceme.dashboard.child import watching

    host, port = _parted(address)
    with watching(folder, host, port, comparison=comparison) as beside:
        print(f"Watch it at {beside.address}", flush=True)
        ended: typer.Exit | None = None
        try:
            yield
        except typer.Exit as exit_:
            if exit_.exit_code == _INTERRUPTED:
                raise
            ended = exit_
        if _is_terminal():
            print(f"The page stays at {beside.address} until Ctrl-C.", flush=True)
            with suppress(KeyboardInterrupt):
                beside.wait()
        if ended is not None:
            raise ended


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _parted(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"'{address}' is not an address: expected HOST:PORT, e.g. --watch-address {ADDRESS}"
        )
    return host.strip("[]"), int(port)
