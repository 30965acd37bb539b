"""Where the clients lay at each evaluation, by how alike they are: ``positions.jsonl``.

A line per snapshot. It names the clients that are new, and holds the positions of all that it has,
in the order in which they were named, as 16-bit integers in base64.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.records.files import atomic_write
from raceme.records.likeness import Points, aligned

FILE_NAME = "positions.jsonl"
SCALE = 2000.0
"""Steps of the integers in one unit: the clients' root mean square distance from the centre."""
_MOST = 500_000
"""Positions that are written before snapshots are twice as far apart, then three times, and on."""
_FIRST = 4
"""Snapshots that are written however soon they come."""


@dataclass(frozen=True)
class Snapshot:
    """Clients on the map.

    Attributes
    ----------
    time : float
        When, in seconds of the run.
    clients : tuple[str, ...]
        Who.
    points : NDArray[np.int16]
        Where, in steps of 1 / `SCALE`. Shape (n, k).
    updates : int
        Applied by then.
    is_last : bool
        Whether the run ended with it, rather than that it was due.
    """

    time: float
    clients: tuple[str, ...]
    points: NDArray[np.int16]
    updates: int = 0
    is_last: bool = False


def updates_between(clients: int) -> int:
    """Return how many updates a snapshot takes: it costs more the more clients there are."""
    return 120 + clients // 4


def steps_of(points: Points) -> NDArray[np.int16]:
    """Return positions in steps of 1 / `SCALE`, as they are written and told."""
    return np.clip(np.rint(points * SCALE), -32767, 32767).astype("<i2")


class PositionsFile:
    """The writer of ``positions.jsonl``. A disk without room for it ends no run.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    after : float, optional
        The run resumes at this time: later snapshots are dropped.
    most : int
        About so many positions are written.
    """

    def __init__(self, folder: Path, after: float | None = None, most: int = _MOST) -> None:
        self._path, self._most = folder / FILE_NAME, most
        self._numbers: dict[str, int] = {}
        self._before: dict[str, Sequence[float]] = {}
        self._told, self._written, self._updates = 0, 0, 0
        if after is not None:
            self._cut(after)

    def wants(self, updates: int) -> bool:
        """Return whether a snapshot is written after so many updates of the run."""
        if self._written < _FIRST:
            return True
        apart = updates_between(len(self._numbers)) * (1 + self._told // self._most)
        return updates - self._updates >= apart

    def write(
        self,
        time: float,
        clients: Sequence[str],
        points: Points,
        updates: int = 0,
        is_last: bool = False,
    ) -> None:
        """Write a snapshot, turned and mirrored so that clients lie near where they were."""
        points = aligned(points, clients, self._before)
        self._before.update(zip(clients, points.tolist(), strict=True))
        line = self._line(Snapshot(time, tuple(clients), steps_of(points), updates, is_last))
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _line(self, one: Snapshot) -> str:
        clients = one.clients
        new = [client for client in clients if client not in self._numbers]
        self._numbers |= {name: len(self._numbers) + index for index, name in enumerate(new)}
        self._told += len(clients)
        self._written, self._updates = self._written + 1, one.updates
        numbers = np.array([self._numbers[client] for client in clients], "<i4")
        order = np.argsort(numbers)
        line: dict[str, Any] = {"time": float(one.time), "updates": one.updates, "new": new}
        if len(clients) < len(self._numbers):
            line["clients"] = numbers[order].tolist()
        line["dimensions"] = one.points.shape[1]
        line["points"] = base64.b64encode(one.points[order].tobytes()).decode()
        if one.is_last:
            line["last"] = True
        return json.dumps(line) + "\n"

    def _cut(self, after: float) -> None:
        """Keep the snapshots until a time, and go on from the last that was due."""
        found = PositionsReader(self._path.parent).read()
        kept = [one for one in found if one.time <= after and not one.is_last]
        lines = []
        for one in kept:
            points = one.points / SCALE
            self._before.update(zip(one.clients, points.tolist(), strict=True))
            lines.append(self._line(one))
        with suppress(OSError), atomic_write(self._path) as path:
            path.write_text("".join(lines), encoding="utf-8")


class PositionsReader:
    """Reads ``positions.jsonl`` bit by bit, while it may grow.

    Parameters
    ----------
    folder : Path
        The folder of the run; the file need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._inode, self._offset = 0, 0
        self._names: list[str] = []
        self._last = -math.inf

    def read(self) -> list[Snapshot]:
        """Return the snapshots that have come since the last time.

        A line that is not whole, or is something else, ends what is read: the run may be at it.
        """
        found: list[Snapshot] = []
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    # Another file: of a run that was resumed, and has cut what came later.
                    self._inode, self._offset, self._names = inode, 0, []
                file.seek(self._offset)
                for line in file:
                    snapshot = self._snapshot(line)
                    self._offset += len(line)
                    if snapshot.time > self._last:
                        self._last = snapshot.time
                        found.append(snapshot)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass
        return found

    def _snapshot(self, line: bytes) -> Snapshot:
        if not line.endswith(b"\n"):
            raise ValueError("the line is not whole")
        told = json.loads(line)
        time, names = float(told["time"]), [*self._names, *map(str, told["new"])]
        points = np.frombuffer(base64.b64decode(told["points"], validate=True), "<i2")
        points = points.reshape(-1, int(told["dimensions"]))
        clients = tuple(names[number] for number in told.get("clients", range(len(names))))
        is_known = min(told.get("clients", (0,)), default=0) >= 0
        fits = len(clients) == len(points) and points.shape[1] >= 2
        if not (fits and is_known and np.isfinite(time)):
            raise ValueError("the line does not fit itself")
        self._names = names
        return Snapshot(time, clients, points, int(told.get("updates", 0)), "last" in told)
