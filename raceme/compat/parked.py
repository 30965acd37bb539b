"""Arrays of messages whose bytes wait in a file until somebody reads them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from flwr.app import Array

from raceme.compat.records import array
from raceme.compat.spill import Place, Spill


class ParkedArray(Array):
    """An array whose bytes lie in a file. It was an ordinary one: whoever has it has it still."""

    @property
    def data(self) -> bytes:
        """The bytes, read anew each time."""
        place: Place = self.__dict__["_place"]
        return place.read()

    @data.setter
    def data(self, value: bytes) -> None:
        raise AttributeError("the bytes of a parked array are not to be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return array, (self.dtype, self.shape, self.stype, self.data)


def park(arrays: Iterable[weakref.ref[Array]], spill: Spill) -> None:
    """Move the bytes of arrays that somebody still has out of memory, as far as they do not fit."""
    for reference in arrays:
        found = reference()
        if found is None or isinstance(found, ParkedArray):
            continue
        data = found.__dict__["data"]
        if spill.fits(len(data)):
            weakref.finalize(found, spill.release, len(data)).atexit = False
            continue
        found.__dict__["_place"] = spill.write(data)
        del found.__dict__["data"]
        found.__class__ = ParkedArray
