"""Output that is never a reason to end: what cannot be shown is left out.

A run of days outlives its terminal, the reader of its pipe and the space on the disk of its log.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

_STANDARD = (("stdin", 0), ("stdout", 1), ("stderr", 2))
_CLOSED = (errno.EPIPE, errno.EIO)
"""The reader is gone: `head` has seen enough, or the terminal is closed. That needs no word."""


def keep_output() -> None:
    """Make standard output and error such that writing to them never raises.

    A character that the terminal's encoding lacks is replaced. After a write that failed, whatever
    else is written is dropped; unless the reader is gone, standard error is told so once.
    """
    for name, number in _STANDARD:
        _keep_open(number)
        stream = getattr(sys, name)
        # What captures output, as tests do, has no file behind it, or another one.
        if number and (stream is None or _file_of(stream) == number):
            setattr(sys, name, _lasting(stream, number))


class _Lasting(io.FileIO):
    """A file that drops what it cannot write."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._number = number
        self._lost = False

    def write(self, data: Any, /) -> int:
        """Write, or drop; always return the size of all."""
        whole = memoryview(data).nbytes
        rest = memoryview(data).cast("B")
        while rest and not self._lost:
            try:
                # Another process may have made the terminal one that does not wait.
                while (written := super().write(rest)) is None:
                    select.select([], [self._number], [])
                rest = rest[written:]
            except OSError as error:
                self._lost = True
                self._tell(error)
        return whole

    def _tell(self, error: OSError) -> None:
        if self._number != 2 and error.errno not in _CLOSED:
            with suppress(OSError):
                os.write(2, f"raceme: no more output is shown: {error.strerror}.\n".encode())


def _lasting(stream: Any, number: int) -> io.TextIOWrapper:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
    raw = _Lasting(number)
    # Not buffered twice: the second buffer refuses a signal's handler that writes meanwhile.
    return io.TextIOWrapper(
        raw,
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace" if number == 2 else "replace",
        line_buffering=number == 2 or raw.isatty(),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def _keep_open(number: int) -> None:
    """Open a standard file that was closed: the next file to be opened would take its number."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def _file_of(stream: Any) -> int | None:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return number if isinstance(number, int) else None
