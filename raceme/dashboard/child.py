"""The dashboard of a run that has just been started: a process beside it, which ends with it.

Neither a browser nor what it asks for can hold up the run so: it writes its store as always, and
does not know whether anybody reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raceme.dashboard.access import is_loopback, new_token
from raceme.dashboard.folder import Watched
from raceme.dashboard.serving import address_of, bind, serve

_NICE = 10
"""What the run computes comes first."""
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Beside:
    """A dashboard that runs beside.

    Attributes
    ----------
    address : str
        Of the page.
    process : Popen
        What serves it.
    """

    address: str
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Wait until it ends, which it does not do by itself: Ctrl-C ends the waiting."""
        self.process.wait()


@contextmanager
def watching(folder: Path, host: str, port: int, *, comparison: bool = False) -> Iterator[Beside]:
    """Show what is being written to a folder, meanwhile.

    Parameters
    ----------
    folder : Path
        Where a run or a comparison will be; it need not exist yet.
    host, port : str, int
        Where the page is; see :func:`raceme.dashboard.serving.bind`.
    comparison : bool
        Which of the two it is.

    Raises
    ------
    UserError
        The port is taken, or the address is none of this machine's.
    """
    token = "" if is_loopback(host) else new_token()
    with bind(host, port) as listening:
        address = address_of(listening, token)
        process = _start(listening, folder, token, comparison)
    try:
        yield Beside(address, process)
    finally:
        _end(process)


def _start(
    listening: socket.socket, folder: Path, token: str, comparison: bool
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "raceme.dashboard.child"],
        stdin=subprocess.PIPE,
        pass_fds=[listening.fileno()],
    )
    told = {
        "socket": listening.fileno(),
        "folder": str(folder.absolute()),
        # Not among the arguments, which every user of the machine sees.
        "token": token,
        "comparison": comparison,
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(told).encode() + b"\n")
    process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it tell the last of the run, and end."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Serve what the first line of standard input says, until there is no more of it."""
    # Ctrl-C reaches all processes of a terminal; the run ends this one when it has ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICE)
    told = json.loads(_first_line())
    listening = socket.socket(fileno=told["socket"])
    watched = Watched(Path(told["folder"]), told["comparison"])
    with listening:
        serve(listening, watched, told["token"], _until_the_end)


def _first_line() -> bytes:
    """Read byte by byte: what follows is waited for by another."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit
        line += byte
    return line


async def _until_the_end() -> None:
    """Wait until whoever started this closes the pipe, or is gone."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


if __name__ == "__main__":
    main()
