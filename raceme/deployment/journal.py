"""Replies since the last checkpoint, on disk before their devices are told that they arrived.

A reply is an entry of a few byte strings. An entry that was not written wholly, because the power
failed, and whatever comes after it, is not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from raceme.compat.parcels import join, split

log = logging.getLogger("raceme.serve")

_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 32


class Journal:
    """One file for each checkpoint, numbered like them from the first on.

    Parameters
    ----------
    folder : Path
        Where the files are; made when the first is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._failed = False

    def begin(self) -> int:
        """Begin a new file; return its number."""
        number = max(self._numbers(), default=0) + 1
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        # What devices have learned is as private as the models in the checkpoints beside it.
        descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        return number

    def drop(self, before: int) -> None:
        """Remove the files before a number: there is no checkpoint left that they belong to."""
        for number in self._numbers():
            if number < before:
                self._path(number).unlink(missing_ok=True)

    def append(self, parts: Callable[[], Sequence[bytes]]) -> None:
        """Write an entry. If that fails, its reply would not survive a crash, but is used."""
        if self._file is None:
            return
        try:
            self._file.write(_encoded(parts()))
            self._file.flush()
        except OSError as error:
            if not self._failed:
                log.warning("Replies cannot be kept for a restart: %s", error.strerror)
            self._failed = True
        else:
            self._failed = False

    def read(self, first: int) -> Iterator[list[bytes]]:
        """Return the entries of a file and of those after it, in order."""
        for number in self._numbers():
            if number >= first:
                with self._path(number).open("rb") as file:
                    yield from _entries(file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _numbers(self) -> list[int]:
        stems = [path.stem.removeprefix("replies-") for path in self._folder.glob("replies-*.bin")]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _path(self, number: int) -> Path:
        return self._folder / f"replies-{number:08d}.bin"


def _encoded(parts: Sequence[bytes]) -> bytes:
    body = join(parts)
    return _LENGTH.pack(len(body)) + body + hashlib.sha256(body).digest()


def _entries(file: BinaryIO) -> Iterator[list[bytes]]:
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        body = file.read(length)
        if file.read(_DIGEST_BYTES) != hashlib.sha256(body).digest():
            return
        yield split(body)
