"""Arrays that many messages carry, once in Ray's object store."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord

Key = tuple[int, ...]

_BY_VALUE = 100_000
"""Bytes up to which a record travels with its message: Ray keeps less than that in no store."""
_IDLE = 8
"""Versions that are kept although no task has them: the next message may."""


@dataclass
class _Version:
    """What is in the store.

    Attributes
    ----------
    reference : ObjectRef
        Ray's; the store keeps the object as long as there is one.
    data : list[bytes]
        The same here: as long as they are, nothing else has their ids.
    users : int
        Tasks that have it.
    """

    reference: Any
    data: list[bytes]
    users: int = 0


class Versions:
    """Models' data in Ray's object store: each version once, however many clients are sent it.

    Messages with the same version have the very same arrays, by which it is known. A node that has
    fetched it for one of its actors has it for all.
    """

    def __init__(self) -> None:
        self._versions: OrderedDict[Key, _Version] = OrderedDict()
        self.puts = 0

    def hold(self, record: ArrayRecord) -> tuple[Key | None, Any]:
        """Return what to send for a record, and its key to release it by, if it has one."""
        data = [array.data for array in record.values()]
        if sum(map(len, data)) < _BY_VALUE:
            return None, data
        key = tuple(map(id, data))
        if key not in self._versions:
            import ray

            self._versions[key] = _Version(ray.put(data), data)
            self.puts += 1
        version = self._versions[key]
        version.users += 1
        self._versions.move_to_end(key)
        return key, version.reference

    def release(self, key: Key) -> None:
        """Note that a task is over that had a version."""
        self._versions[key].users -= 1
        idle = [key for key, version in self._versions.items() if not version.users]
        for key in idle[: max(0, len(idle) - _IDLE)]:
            del self._versions[key]

    def clear(self) -> None:
        """Let go of all."""
        self._versions.clear()
