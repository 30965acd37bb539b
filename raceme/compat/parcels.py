"""Several byte strings as one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_COUNT, _LENGTH = struct.Struct(">I"), struct.Struct(">Q")


def join(parts: Sequence[bytes]) -> bytes:
    """Put byte strings into one."""
    lengths = [_LENGTH.pack(len(part)) for part in parts]
    return b"".join([_COUNT.pack(len(parts)), *lengths, *parts])


def split(data: bytes) -> list[bytes]:
    """Return the byte strings that :func:`join` has put into one.

    Raises
    ------
    ValueError
        It is something else.
    """
    if len(data) < _COUNT.size:
        raise ValueError("too short")
    (count,) = _COUNT.unpack_from(data)
    start = _COUNT.size + count * _LENGTH.size
    if len(data) < start:
        raise ValueError("too short")
    parts = []
    for (length,) in _LENGTH.iter_unpack(data[_COUNT.size : start]):
        parts.append(data[start : start + length])
        start += length
    if start != len(data):
        raise ValueError(f"{len(data)} bytes instead of {start}")
    return parts
