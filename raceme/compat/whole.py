"""A message as one byte string, and each model in it as one array.

Flower sends a message as a tree of some twenty objects, each array of a model and each record one
of its own, named by its hash. Where both ends are Raceme's, a message travels in Flower's own
serialised form instead, and the arrays of a record as one array whose data are theirs, end to end.
Both ends' apps see the same named arrays, bit for bit.
"""

from __future__ import annotations

import json
from copy import copy
from functools import lru_cache
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from raceme.compat.records import array, array_record

JOINED = "raceme.joined"
"""Type of an array that stands for all of its record; its ``dtype`` says for which."""

_Place = tuple[str, str, tuple[int, ...], str, int]
"""Name, dtype, shape, type and number of bytes of one of several arrays."""


def encode(message: Message) -> bytes:
    """Return a message with its content as one byte string."""
    return bytes(message_to_proto(joined(message)).SerializeToString())


def decode(data: bytes) -> Message:
    """Return the message that :func:`encode` was given.

    Raises
    ------
    Exception
        Of whatever type Flower and protobuf choose, if it is something else.
    """
    return parted(message_from_proto(ProtoMessage.FromString(data)))


def joined(message: Message) -> Message:
    """Return a message in which each record of several arrays has one array."""
    if not message.has_content():
        return message
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord) and len(record) > 1:
            content[name] = _one(record)
        else:
            content[name] = record
    return make_message(metadata=message.metadata, content=content)


def parted(message: Message) -> Message:
    """Return a message in which each record has its own arrays again.

    Raises
    ------
    ValueError
        An array does not say what it is made of.
    """
    if not message.has_content():
        return message
    content = message.content
    for name, record in content.array_records.items():
        one = next(iter(record.values()), None)
        if one is not None and one.stype == JOINED:
            content[name] = _several(one)
    return message


def copied(message: Message) -> Message:
    """Return a message that does not change when its sender changes the records of the first."""
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            content[name] = array_record(record)
        else:
            content[name] = _like(record)
    # Flower's code notes in the metadata of the first what became of it.
    return make_message(metadata=copy(message.metadata), content=content)


def size_of(message: Message) -> int:
    """Return the bytes of all arrays of a message."""
    if not message.has_content():
        return 0
    return sum(record.count_bytes() for record in message.content.array_records.values())


def _like(record: ConfigRecord | MetricRecord) -> ConfigRecord | MetricRecord:
    made = type(record)()
    # What is in there has been checked when it was put there.
    made.__dict__["_data"].update(
        {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
    )
    return made


def _one(record: ArrayRecord) -> ArrayRecord:
    places = tuple((n, a.dtype, tuple(a.shape), a.stype, len(a.data)) for n, a in record.items())
    data = b"".join([one.data for one in record.values()])
    return array_record({"": array(_written(places), (), JOINED, data)})


def _several(one: Array) -> ArrayRecord:
    places = _read(one.dtype)
    if sum(place[-1] for place in places) != len(one.data):
        raise ValueError("its arrays have another length")
    arrays, start = {}, 0
    for name, dtype, shape, stype, length in places:
        arrays[name] = array(dtype, shape, stype, one.data[start : start + length])
        start += length
    return array_record(arrays)


@lru_cache(maxsize=64)
def _written(places: tuple[_Place, ...]) -> str:
    return json.dumps(places, separators=(",", ":"))


@lru_cache(maxsize=64)
def _read(text: str) -> tuple[_Place, ...]:
    return tuple(_place(*fields) for fields in json.loads(text))


def _place(name: Any, dtype: Any, shape: Any, stype: Any, length: Any) -> _Place:
    sizes = [length, *shape]
    if not all(isinstance(text, str) for text in (name, dtype, stype)):
        raise ValueError("names and types of arrays are texts")
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("lengths of arrays are numbers")
    return name, dtype, tuple(shape), stype, length
