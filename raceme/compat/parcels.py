"""Whole messages in one call or one entry of a file: several byte strings as one.

Flower sends every array of a model, and whatever holds it, in a call of its own. Where both ends
are Raceme's the objects of a small message travel together. They are the same objects.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

FETCH, SEND = "Fetch", "Send"
"""Methods of the service: all objects of a message, and a reply with all of its own."""
SERVICE = "raceme.Fleet"
LARGEST = 1024 * 1024
"""Bytes of a message whose objects travel together. One call has to get through a slow link."""

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
