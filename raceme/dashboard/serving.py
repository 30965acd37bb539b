"""The dashboard as a process: at an address, until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from raceme.config.errors import UserError
from raceme.dashboard.folder import Watched
from raceme.dashboard.server import Dashboard

_GRACE_SECONDS = 2
"""So long browsers have to take the last of a run."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that whoever opens the page at once is not refused.

    Parameters
    ----------
    host : str
        Name or address; only this machine reaches 127.0.0.1.
    port : int
        0 for any that is free.

    Raises
    ------
    UserError
        The port is taken, or the address is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(64)
        except BaseException:
            listening.close()
            raise
    except socket.gaierror:
        raise UserError(f"'{host}' is no address of this machine.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {port} is in use: choose another one, or 0 for any that is free."
            ) from None
        raise UserError(f"Cannot listen at {host}, port {port}: {error.strerror}.") from None
    return listening


def address_of(listening: socket.socket, token: str) -> str:
    """Return the address of the page, for a person to open."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def serve(
    listening: socket.socket,
    watched: Watched,
    token: str,
    until: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Serve the page.

    Parameters
    ----------
    listening : socket
        What :func:`bind` returned.
    watched : Watched
        What is shown.
    token : str
        What a browser has to know; empty for nothing.
    until : Callable
        Returns when it is to end.
    """
    asyncio.run(_serve(listening, watched, token, until))


async def _serve(
    listening: socket.socket,
    watched: Watched,
    token: str,
    until: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    dashboard = Dashboard(watched.source, listening.getsockname()[0], token)
    config = uvicorn.Config(
        dashboard.app,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="off",
        ws="none",
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    ending = asyncio.create_task(until())
    try:
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        await dashboard.close()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever started it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
