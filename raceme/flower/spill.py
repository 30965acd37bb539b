"""Bytes that are too many for memory: beyond a budget they wait in a temporary file.

A fleet at work holds a model for each version that somebody still trains from, and some methods
remember one of each client: of 100,000 clients that is 4 · 100,000 · d bytes. They are rarely
looked at, so that a file serves as well; what is read is what was written, bit by bit.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import IO

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from raceme.flower.messages import array

Vector = NDArray[np.float32]

BUDGET = 1 << 30
"""Bytes of models that are that each holder of many keeps in memory."""


class SpillFile:
    """A budget of memory, and a temporary file for what does not fit.

    The file lies where the system keeps temporary files (``TMPDIR``), has no name, and is gone with
    the process. Room in it is used again.

    Parameters
    ----------
    budget : int
        Bytes in memory at most.

    Attributes
    ----------
    in_memory, in_file : int
        Bytes held there now.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self.in_memory = self.in_file = 0

    def fits(self, size: int) -> bool:
        """Return whether so many bytes more may be held in memory; count them if so."""
        if self.in_memory + size > self._budget:
            return False
        self.in_memory += size
        return True

    def release(self, size: int) -> None:
        """Count so many bytes out of memory."""
        self.in_memory -= size

    def write(self, data: bytes | memoryview) -> Place:
        """Put bytes into the file.

        Raises
        ------
        OSError
            There is no room on the disk.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="raceme-", buffering=0)  # noqa: SIM115
        size = len(data)
        free = self._free.get(size)
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + size)
        self._file.seek(offset)
        done = 0
        while done < size:
            done += self._file.write(data[done:])
        self.in_file += size
        return Place(self, offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the file."""
        assert self._file is not None, "something was written"
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise OSError("the temporary file of models was cut short")
        return data

    def free(self, offset: int, size: int) -> None:
        """Let room in the file be used again."""
        self._free.setdefault(size, []).append(offset)
        self.in_file -= size


class Place:
    """Where some bytes lie in the file; they are given up with this object."""

    __slots__ = ("_offset", "_size", "_spill")

    def __init__(self, spill: SpillFile, offset: int, size: int) -> None:
        self._spill, self._offset, self._size = spill, offset, size

    def read(self) -> bytes:
        """Return the bytes."""
        return self._spill.read(self._offset, self._size)

    def __del__(self) -> None:
        self._spill.free(self._offset, self._size)


class Shelf(MutableMapping[str, Vector]):
    """Vectors by name, in memory as far as a budget goes. What is taken out is read-only.

    Parameters
    ----------
    vectors : Mapping[str, Vector]
        Those to begin with.
    budget : int
        Bytes in memory at most.
    """

    def __init__(
        self, vectors: MutableMapping[str, Vector] | None = None, budget: int = BUDGET
    ) -> None:
        self._spill = SpillFile(budget)
        self._held: dict[str, Vector | Place] = {}
        self.update(vectors or {})

    def __getitem__(self, name: str) -> Vector:
        held = self._held[name]
        return np.frombuffer(held.read(), np.float32) if isinstance(held, Place) else held

    def __setitem__(self, name: str, vector: Vector) -> None:
        self.pop(name, None)
        own = np.ascontiguousarray(vector, np.float32)
        fits = self._spill.fits(own.nbytes)
        self._held[name] = own if fits else self._spill.write(own.data.cast("B"))

    def __delitem__(self, name: str) -> None:
        held = self._held.pop(name)
        if not isinstance(held, Place):
            self._spill.release(held.nbytes)

    def pop(self, name: str, *default: Vector | None) -> Vector | None:  # type: ignore[override]
        """Take a vector out; a default, if one is given, where there is none."""
        if name not in self._held and default:
            return default[0]
        vector = self[name]
        del self[name]
        return vector

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


# -----------------------------------------------------------------------------
# Arrays of messages whose bytes wait in the file until they are read.
# -----------------------------------------------------------------------------


class SpilledArray(Array):
    """An array whose bytes lie in a file. It was an ordinary one: whoever has it has it still."""

    @property
    def data(self) -> bytes:
        """The bytes, read anew each time."""
        place: Place = self.__dict__["_place"]
        return place.read()

    @data.setter
    def data(self, value: bytes) -> None:
        raise AttributeError("the bytes of a spilled array are not to be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return array, (self.dtype, self.shape, self.stype, self.data)


def spill_arrays(arrays: Iterable[weakref.ref[Array]], spill: SpillFile) -> None:
    """Move the bytes of arrays that somebody still has out of memory, as far as they do not fit."""
    for reference in arrays:
        found = reference()
        if found is None or isinstance(found, SpilledArray):
            continue
        data = found.__dict__["data"]
        if spill.fits(len(data)):
            weakref.finalize(found, spill.release, len(data)).atexit = False
            continue
        found.__dict__["_place"] = spill.write(data)
        del found.__dict__["data"]
        found.__class__ = SpilledArray
