"""How messages travel between the simulator and its worker processes.

What is small goes through a pipe. Arrays' data are written into memory that both processes see, and
are never pickled, unless there is more than fits there.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from raceme import compat
from raceme.config.errors import UserError

Value = str | int | float | bool

Records = list[tuple[str, str, Any]]
"""Records without their arrays' data: name, kind, content."""

_ARRAYS, _METRICS, _CONFIG = "arrays", "metrics", "config"
_FOLDERS = ("/dev/shm", tempfile.gettempdir())
"""Where shared memory is looked for; what lies in the first is never written to a disk."""
_MEGABYTE = 1e6


class Packed(NamedTuple):
    """Records, and the data of their arrays one after the other."""

    records: Records
    data: list[bytes]


class Node(NamedTuple):
    """What a worker has to know of a client: its context but for the state."""

    run_id: int
    node_config: Mapping[str, Value]
    run_config: Mapping[str, Value]


class Request(NamedTuple):
    """A message on its way to a worker.

    Attributes
    ----------
    slot : int
        Of the shared memory; the response uses the same one.
    sender : tuple[int, int]
        Run and node on whose behalf the message was made.
    data : list[bytes] or None
        The arrays' data; None if they are in the slot.
    node : Node or None
        None if the worker knows the client already.
    state : Packed or None
        The client's state; None if it is empty.
    """

    slot: int
    message_id: str
    message_type: str
    node_id: int
    group_id: str
    ttl: float
    sender: tuple[int, int]
    content: Records
    data: list[bytes] | None
    node: Node | None
    state: Packed | None


class Response(NamedTuple):
    """A reply on its way back.

    Attributes
    ----------
    error : tuple[int, str | None] or None
        Code and reason of an error reply.
    state : Packed or None
        The client's state; None if it is what it was.
    """

    message_id: str
    error: tuple[int, str | None] | None
    content: Records
    data: list[bytes] | None
    state: Packed | None


def request_of(
    message: Message,
    context: Context,
    content: Records,
    data: list[bytes] | None,
    node: Node | None,
    slot: int = 0,
) -> Request:
    """Make a request of a message, its client, and what is sent of both."""
    metadata = message.metadata
    return Request(
        slot=slot,
        message_id=metadata.message_id,
        message_type=metadata.message_type,
        node_id=metadata.dst_node_id,
        group_id=metadata.group_id,
        ttl=metadata.ttl,
        sender=(metadata.run_id, metadata.src_node_id),
        content=content,
        data=data,
        node=node,
        state=pack(context.state) if context.state else None,
    )


def node_of(context: Context) -> Node:
    """Return what a worker has to know of a client."""
    return Node(context.run_id, dict(context.node_config), dict(context.run_config))


def pack(records: RecordDict) -> Packed:
    """Take records apart. Arrays' data are not copied."""
    packed = Packed([], [])
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays = [
                (key, array.dtype, array.shape, array.stype, len(array.data))
                for key, array in record.items()
            ]
            packed.records.append((name, _ARRAYS, arrays))
            packed.data.extend(array.data for array in record.values())
        else:
            kind = _METRICS if isinstance(record, MetricRecord) else _CONFIG
            packed.records.append((name, kind, dict(record)))
    return packed


def unpack(packed: Packed) -> RecordDict:
    """Put records together again. Arrays' data are not copied."""
    data = iter(packed.data)
    return RecordDict(
        {name: _record(kind, content, data) for name, kind, content in packed.records}
    )


def sizes(records: Records) -> list[int]:
    """Return the number of bytes of each array's data."""
    return [array[-1] for _, kind, content in records if kind == _ARRAYS for array in content]


class SharedMemory:
    """Memory that two processes see, divided into slots of equal size.

    Parameters
    ----------
    handle : int
        File descriptor of the memory, `slots` times `slot_bytes` long; owned by this object.
    slots : int
        Number of slots.
    slot_bytes : int
        Size of each.
    """

    def __init__(self, handle: int, slots: int, slot_bytes: int) -> None:
        self.handle = handle
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(handle, slots * slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SharedMemory:
        """Set memory aside.

        Raises
        ------
        UserError
            There is not so much.
        """
        size = slots * slot_bytes
        for folder in _FOLDERS:
            if _free(folder) >= size:
                with suppress(OSError):
                    return cls(_reserve(folder, size), slots, slot_bytes)
        free = ", ".join(f"{folder} {_free(folder) / _MEGABYTE:,.0f} MB" for folder in _FOLDERS)
        raise UserError(
            f"Each worker process needs {size / _MEGABYTE:,.0f} MB of shared memory to exchange "
            f"models, and there is less (free: {free}). Make room, or run with --workers 0, which "
            "needs none."
        )

    def write(self, slot: int, data: Sequence[bytes]) -> bool:
        """Write into a slot; return False, with nothing written, if it does not fit."""
        if sum(len(part) for part in data) > self.slot_bytes:
            return False
        start = slot * self.slot_bytes
        for part in data:
            self._memory[start : start + len(part)] = part
            start += len(part)
        return True

    def read(self, slot: int, lengths: Sequence[int]) -> list[bytes]:
        """Copy what was written into a slot, by the length of each part."""
        start, data = slot * self.slot_bytes, []
        for length in lengths:
            data.append(self._memory[start : start + length])
            start += length
        return data

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self.handle)


def _reserve(folder: str, size: int) -> int:
    """Return the descriptor of a new file without a name: it is gone when nobody has it open."""
    with tempfile.TemporaryFile(prefix="raceme-", dir=folder) as file:
        os.ftruncate(file.fileno(), size)
        if hasattr(os, "posix_fallocate"):
            # Without it, room that is missing is found out when it is written to, and that kills.
            os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _free(folder: str) -> int:
    usable = Path(folder).is_dir() and os.access(folder, os.W_OK)
    return shutil.disk_usage(folder).free if usable else 0


def _record(
    kind: str, content: Any, data: Iterator[bytes]
) -> ArrayRecord | MetricRecord | ConfigRecord:
    if kind == _METRICS:
        return MetricRecord(content)
    if kind == _CONFIG:
        return ConfigRecord(content)
    return compat.array_record(
        {
            key: compat.array(dtype, shape, stype, next(data))
            for key, dtype, shape, stype, _ in content
        }
    )
