"""Records made without Flower's checks of what goes into them.

Flower checks every name and every value that is put into a record, which for the arrays of one
small model takes longer than copying their data. What Raceme puts in are names and arrays out of
other records or of its own making, so there is nothing to find.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord


def array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Return ``Array(dtype, shape, stype, data)``."""
    made = Array.__new__(Array)
    made.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return made


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Put arrays into a record as they are; ``ArrayRecord(arrays)`` builds each of them anew."""
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record
