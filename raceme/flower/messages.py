"""Flower's messages: creation, replies, encoding, and spilling to disk."""

from __future__ import annotations

import json
import struct
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from functools import lru_cache
from typing import IO, Any, TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

Kind = TypeVar("Kind", ArrayRecord, ConfigRecord, MetricRecord)

SERVER_NODE_ID = 1
"""The node that sends messages (flwr.common.constant: SUPERLINK_NODE_ID)."""

# Codes of error replies (flwr.common.constant: ErrorCode).
UNKNOWN_ERROR = 0
LOAD_APP_EXCEPTION = 1
CLIENT_APP_RAISED_EXCEPTION = 2
MESSAGE_UNAVAILABLE = 3
REPLY_MESSAGE_UNAVAILABLE = 4
NODE_UNAVAILABLE = 5
INVALID_APP = 7


def identify_process(run_id: int = 1, node_id: int = SERVER_NODE_ID, task_id: int = 1) -> None:
    """Set the run, sender and task of messages that this process creates.

    Flower reads them from a process-wide object that its own runtime sets; without it
    ``Message(...)`` raises.
    """
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = node_id
    TaskIdentity.task_id = task_id


def made(
    metadata: Metadata, content: RecordDict | None = None, error: Error | None = None
) -> Message:
    """Return a message with given metadata, an undocumented use of ``Message(...)``."""
    message: Message = Message(  # type: ignore[call-overload]
        metadata=metadata, content=content, error=error
    )
    return message


def without_content(message: Message) -> Message:
    """Return a message with an empty content, or itself if it is an error."""
    return message if message.has_error() else made(message.metadata, RecordDict())


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message, as Flower's SuperLink does."""
    message.metadata.__dict__["_message_id"] = message_id


def start_now(message: Message) -> None:
    """Let a message's time to live begin now, on the wall clock.

    A reply's time to live is the rest of the message's. In the simulator a message waits until it
    is processed, and this wait must not count.
    """
    message.metadata.created_at = time.time()


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Answer a message with Flower's error reply."""
    start_now(message)
    return Message(Error(code, reason), reply_to=message)


def refused(reply: Message, reason: str) -> Message:
    """Return an error reply in place of a reply, as if the client had failed."""
    return made(reply.metadata, error=Error(UNKNOWN_ERROR, reason))


def empty_run(run_id: int = 1) -> Run:
    """Return the run information of a simulation."""
    return Run.create_empty(run_id)


# -----------------------------------------------------------------------------
# Records made without Flower's checks.
#
# Flower checks every name and every value that is put into a record, which for the arrays of one
# small model takes longer than copying their data. Raceme puts in names and arrays of other
# records, or its own, which need no check.
# -----------------------------------------------------------------------------


def array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Return ``Array(dtype, shape, stype, data)``."""
    made = Array.__new__(Array)
    made.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return made


def records_of(content: RecordDict, kind: type[Kind]) -> dict[str, Kind]:
    """Return the records of a kind by name.

    ``content.array_records`` and the like build a view that checks each record twice.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def put(
    record: RecordDict | ArrayRecord | ConfigRecord | MetricRecord, values: Mapping[str, Any]
) -> None:
    """Put values into a record, or records into a content, without checks."""
    record.__dict__["_data"].update(values)


def content_of(records: Mapping[str, ArrayRecord | ConfigRecord | MetricRecord]) -> RecordDict:
    """Put records into a content without checks."""
    content = RecordDict()
    put(content, records)
    return content


def copy_of(content: RecordDict) -> RecordDict:
    """Copy records but not their arrays, since messages may share content.

    Without copies, changes by a client would appear in other messages, and later changes by the
    server in pending work.
    """
    copies = {name: record.copy() for name, record in content.items()}
    for record in copies.values():
        if not isinstance(record, ArrayRecord):
            put(record, {key: list(v) for key, v in record.items() if isinstance(v, list)})
    return content_of(copies)


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Put arrays into a record without checks; ``ArrayRecord(arrays)`` copies each of them."""
    record = ArrayRecord()
    put(record, arrays)
    return record


# -----------------------------------------------------------------------------
# A message as one byte string, and each model in it as one array.
#
# Flower sends a message as a tree of about twenty objects: each array of a model and each record is
# an object, named by its hash. Between Raceme's server and devices a message is sent in Flower's
# serialised form instead, with all arrays of a record concatenated to one. The apps on both sides
# see the same named arrays, bit for bit.
# -----------------------------------------------------------------------------


JOINED = "raceme.joined"
"""Type of an array that stands for all arrays of its record, which its ``dtype`` lists."""

_LONGEST_LAYOUT = 1 << 20
"""Maximum length of the list of a record's arrays, enough for about ten thousand arrays."""
_CACHED_LAYOUT = 1 << 15
"""Longer lists are not cached, as a device may send a different one each time."""

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
        Of any type that Flower and protobuf raise, if the bytes are invalid.
    """
    return parted(message_from_proto(ProtoMessage.FromString(data)))


def joined(message: Message) -> Message:
    """Return a message in which each record's arrays are joined to one."""
    if not message.has_content():
        return message
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord) and len(record) > 1:
            content[name] = _one(record)
        else:
            content[name] = record
    return made(metadata=message.metadata, content=content)


def parted(message: Message) -> Message:
    """Return a message in which joined arrays are separate again.

    Raises
    ------
    ValueError
        The list of a joined array is invalid.
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
    """Return a copy of a message that is independent of changes of its records by the sender."""
    # Flower changes the metadata of the original message.
    return made(metadata=copy(message.metadata), content=copy_of(message.content))


def size_of(message: Message) -> int:
    """Return the bytes of all arrays of a message."""
    if not message.has_content():
        return 0
    arrays = records_of(message.content, ArrayRecord)
    return sum(record.count_bytes() for record in arrays.values())


def _one(record: ArrayRecord) -> ArrayRecord:
    places = tuple((n, a.dtype, tuple(a.shape), a.stype, len(a.data)) for n, a in record.items())
    data = b"".join([one.data for one in record.values()])
    is_ordinary = sum(map(len, record)) <= _CACHED_LAYOUT
    layout = (_written if is_ordinary else _written.__wrapped__)(places)
    return array_record({"": array(layout, (), JOINED, data)})


def _several(one: Array) -> ArrayRecord:
    if len(one.dtype) > _LONGEST_LAYOUT:
        raise ValueError("its arrays have too long names")
    places = (_read if len(one.dtype) <= _CACHED_LAYOUT else _read.__wrapped__)(one.dtype)
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


# -----------------------------------------------------------------------------
# Several byte strings as one.
# -----------------------------------------------------------------------------


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
        The bytes have another form.
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


# -----------------------------------------------------------------------------
# Vectors and arrays that do not fit into memory: beyond a budget they are stored in a temporary
# file.
#
# The server holds a model for each version that a client still trains from, and some methods store
# one per client: for 100,000 clients that is 4 · 100,000 · d bytes. They are rarely read, so a file
# suffices, and are read back bit by bit.
# -----------------------------------------------------------------------------


Vector = NDArray[np.float32]

BUDGET = 1 << 30
"""Default memory budget of each store of models, in bytes."""


class SpillFile:
    """A memory budget, and a temporary file for bytes that do not fit.

    The file is in the system's folder of temporary files (``TMPDIR``), has no name, and disappears
    with the process. Freed space in it is reused.

    Parameters
    ----------
    budget : int
        Bytes in memory at most.

    Attributes
    ----------
    in_memory, in_file : int
        Bytes in memory and in the file.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.in_memory = self.in_file = 0

    def fits(self, size: int) -> bool:
        """Return whether further bytes fit into memory; count them if so."""
        if self.in_memory + size > self._budget:
            return False
        self.in_memory += size
        return True

    def release(self, size: int) -> None:
        """Count so many bytes out of memory."""
        self.in_memory -= size

    def release_with(self, owner: object, size: int) -> None:
        """Release bytes of the memory budget when their owner is deleted."""
        # `weakref.finalize` would take ten times as long.
        reference = weakref.ref(owner, self._release_collected)
        self._sizes[id(reference)] = reference, size

    def _release_collected(self, reference: weakref.ref[Any]) -> None:
        self.release(self._sizes.pop(id(reference))[1])

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
        """Return `size` bytes of the file from an offset on."""
        assert self._file is not None, "something was written"
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise OSError("the temporary file of models was cut short")
        return data

    def free(self, offset: int, size: int) -> None:
        """Free space in the file for reuse."""
        self._free.setdefault(size, []).append(offset)
        self.in_file -= size


class Place:
    """Span of bytes in the file, which is freed with this object."""

    __slots__ = ("_offset", "_size", "_spill")

    def __init__(self, spill: SpillFile, offset: int, size: int) -> None:
        self._spill, self._offset, self._size = spill, offset, size

    def read(self) -> bytes:
        """Return the stored bytes, read from the file."""
        return self._spill.read(self._offset, self._size)

    def __del__(self) -> None:
        self._spill.free(self._offset, self._size)


class VectorStore(MutableMapping[str, Vector]):
    """Vectors by name, in memory within a budget, else in a file. Returned vectors are read-only.

    Parameters
    ----------
    vectors : MutableMapping[str, Vector], optional
        Initial vectors by name; none by default.
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
        """Remove and return a vector; return the default, if given, for a missing name."""
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
# Arrays of messages whose bytes are in the file until they are read.
# -----------------------------------------------------------------------------


class SpilledArray(Array):
    """An array whose bytes are in a file; references to the former ordinary array stay valid."""

    @property
    def data(self) -> bytes:
        """The bytes, read from the file each time."""
        place: Place = self.__dict__["_place"]
        return place.read()

    @data.setter
    def data(self, value: bytes) -> None:
        raise AttributeError("the bytes of a spilled array cannot be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return array, (self.dtype, self.shape, self.stype, self.data)


def spill_arrays(arrays: Iterable[weakref.ref[Array]], spill: SpillFile) -> None:
    """Move the bytes of arrays that are still referenced to the file, unless they fit in memory."""
    for reference in arrays:
        found = reference()
        if found is None or isinstance(found, SpilledArray):
            continue
        data = found.__dict__["data"]
        if spill.fits(len(data)):
            spill.release_with(found, len(data))
            continue
        found.__dict__["_place"] = spill.write(data)
        del found.__dict__["data"]
        found.__class__ = SpilledArray
