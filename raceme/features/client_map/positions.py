"""Client positions by similarity at evaluations: ``positions.jsonl``.

One line per snapshot, with new client names and the positions of all clients in order of naming, as
16-bit integers in base64.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.core.files import atomic_write
from raceme.features.client_map import POSITIONS

# -----------------------------------------------------------------------------
# Clients as points, close for similar models.
#
# Principal components of the clients' unit vectors in four dimensions, rotated and mirrored to
# match the former positions (orthogonal Procrustes), so that the map is steady. This is classical
# multidimensional scaling (Torgerson 1952) of the distances √(2 (1 − cosine)). Four groups at equal
# distances do not fit into a plane; for the screen, the points are therefore projected into a plane
# with distances preserved as far as possible (SMACOF: de Leeuw 1977).
# -----------------------------------------------------------------------------


Points = NDArray[np.float64]
DIMENSIONS = 4
_MOST_FLATTENED = 400
"""Maximum number of clients flattened; more are shown by their first two dimensions."""
_TURNS = 60


def positions_of_rows(rows: NDArray[np.floating]) -> Points:
    """Return a position for each client by principal components of its vector.

    They are computed from the smaller Gram matrix.

    Parameters
    ----------
    rows : ndarray
        Shape (n, s).

    Returns
    -------
    ndarray
        Centred, with a mean square distance from the centre of 1, unless all points coincide. Shape
        (n, 4).
    """
    known = np.asarray(rows, np.float64)
    # Overflowed models have no position and must not affect others.
    known = np.where(np.isfinite(known), known, 0.0)
    lengths = np.linalg.norm(known, axis=1, keepdims=True)
    units = known / np.where(lengths > 0, lengths, 1.0)
    centred = units - units.mean(axis=0) if len(units) else units
    if len(centred) < centred.shape[1]:
        values, vectors = np.linalg.eigh(centred @ centred.T)
        points = vectors[:, -DIMENSIONS:] * np.sqrt(np.maximum(values[-DIMENSIONS:], 0.0))
    else:
        _, directions = np.linalg.eigh(centred.T @ centred)
        points = centred @ directions[:, -DIMENSIONS:]
    return _scaled(_widened(points[:, ::-1]))


def _widened(points: Points) -> Points:
    missing = DIMENSIONS - points.shape[1]
    return np.hstack([points, np.zeros((len(points), missing))]) if missing else points


def _scaled(points: Points) -> Points:
    size = float(np.sqrt((points**2).sum(axis=1).mean())) if len(points) else 0.0
    return points / size if size > 1e-9 else np.zeros_like(points)


def aligned(
    points: Points, clients: Sequence[str], before: Mapping[str, Sequence[float]]
) -> Points:
    """Rotate and mirror points to match the clients' former positions.

    Parameters
    ----------
    points : ndarray
        Shape (n, k).
    clients : Sequence[str]
        Client ids, in the order of the points.
    before : Mapping
        Former positions by client; others are left out.
    """
    shared = [index for index, client in enumerate(clients) if client in before]
    if len(shared) < 2:
        return points
    old = np.array([before[clients[index]] for index in shared], np.float64)
    # Not scipy's function, whose import takes longer than a short run's maps.
    left, _, right = np.linalg.svd(points[shared].T @ (old - old.mean(axis=0)))
    return np.asarray(points @ (left @ right))


def flattened(
    points: Points, clients: Sequence[str], before: Mapping[str, Sequence[float]]
) -> Points:
    """Project points into the plane, preserving distances as far as possible.

    Parameters
    ----------
    points : ndarray
        Shape (n, k).
    clients : Sequence[str]
        Client ids, in the order of the points.
    before : Mapping
        Former position in the plane by client, as a starting point.

    Returns
    -------
    ndarray
        Shape (n, 2).
    """
    points = np.asarray(points, np.float64)
    n = len(points)
    flat = points[:, :2].copy()
    known = [index for index, client in enumerate(clients) if client in before]
    if n > _MOST_FLATTENED or n < 3:
        return aligned(flat, clients, before)
    if 2 * len(known) > n:
        flat = aligned(flat, clients, before)
        flat[known] = [before[clients[index]] for index in known]
    if not (np.ptp(points, axis=0).any() and np.ptp(flat, axis=0).any()):
        return np.zeros_like(flat)  # Coincident points cannot be separated.
    from scipy.spatial.distance import pdist, squareform
    from sklearn.manifold import smacof

    wanted = squareform(pdist(points))
    flat, _ = smacof(wanted, init=flat, n_init=1, max_iter=_TURNS, eps=0.0, normalized_stress=False)
    return aligned(flat, clients, before)


# -----------------------------------------------------------------------------
# Client positions by similarity at evaluations: ``positions.jsonl``.
# -----------------------------------------------------------------------------


SCALE = 2000.0
"""Integer steps per unit, the clients' root mean square distance from the centre."""
_MOST = 500_000
"""Number of positions after which the snapshot interval doubles, then triples, and so on."""
_FIRST = 4
"""Number of initial snapshots written unconditionally."""


@dataclass(frozen=True)
class Snapshot:
    """Clients on the map.

    Attributes
    ----------
    time : float
        Time in seconds of the run.
    clients : tuple[str, ...]
        Ids of the clients, in the order of `points`.
    points : NDArray[np.int16]
        Their positions, in steps of 1 / `SCALE`. Shape (n, k).
    updates : int
        Number of updates applied by then.
    is_last : bool
        Whether it is the final one.
    """

    time: float
    clients: tuple[str, ...]
    points: NDArray[np.int16]
    updates: int = 0
    is_last: bool = False


def steps_of(points: Points) -> NDArray[np.int16]:
    """Return positions in steps of 1 / `SCALE`."""
    return np.clip(np.rint(points * SCALE), -32767, 32767).astype("<i2")


class PositionsFile:
    """Writer of ``positions.jsonl``. A full disk does not end the run.

    Parameters
    ----------
    folder : Path
        Folder of the run.
    after : float, optional
        Time of a resumption; later snapshots are dropped.
    most : int
        Approximate maximum number of positions.
    """

    def __init__(self, folder: Path, after: float | None = None, most: int = _MOST) -> None:
        self._path, self._most = folder / POSITIONS, most
        self._numbers: dict[str, int] = {}
        self._before: dict[str, Sequence[float]] = {}
        self._total, self._written, self._updates = 0, 0, 0
        self._dropped: list[Snapshot] = []
        if after is not None:
            self._truncate(after)

    def wants(self, updates: int) -> bool:
        """Return whether to write a snapshot at an update count."""
        if self._written < _FIRST:
            return True
        # Longer for more clients.
        apart = (120 + len(self._numbers) // 4) * (1 + self._total // self._most)
        return updates - self._updates >= apart

    def write(
        self,
        time: float,
        clients: Sequence[str],
        points: Points,
        updates: int = 0,
        is_last: bool = False,
    ) -> None:
        """Write a snapshot, aligned with the previous one."""
        points = aligned(points, clients, self._before)
        self._before.update(zip(clients, points.tolist(), strict=True))
        self._dropped.clear()
        self._append(Snapshot(time, tuple(clients), steps_of(points), updates, is_last))

    def restore_dropped(self, updates: int) -> None:
        """Restore the snapshots dropped by a resumption, without newer ones.

        A run resumed at its end has no new updates for placing clients.
        """
        for one in self._dropped:
            if one.updates <= updates:
                self._append(one)
        self._dropped.clear()

    def _append(self, one: Snapshot) -> None:
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(self._line(one))

    def _line(self, one: Snapshot) -> str:
        clients = one.clients
        new = [client for client in clients if client not in self._numbers]
        self._numbers |= {name: len(self._numbers) + index for index, name in enumerate(new)}
        self._total += len(clients)
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

    def _truncate(self, after: float) -> None:
        """Keep the snapshots until a time, and continue from the last due one."""
        found = PositionsReader(self._path.parent).read()
        kept = [one for one in found if one.time <= after and not one.is_last]
        self._dropped = [one for one in found if one.time > after or one.is_last]
        lines = []
        for one in kept:
            points = one.points / SCALE
            self._before.update(zip(one.clients, points.tolist(), strict=True))
            lines.append(self._line(one))
        with suppress(OSError), atomic_write(self._path) as path:
            path.write_text("".join(lines), encoding="utf-8")


class PositionsReader:
    """Reads ``positions.jsonl`` incrementally.

    Parameters
    ----------
    folder : Path
        Folder of the run; the file may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / POSITIONS
        self._inode, self._offset = 0, 0
        self._names: list[str] = []
        self._last = -math.inf

    def read(self) -> list[Snapshot]:
        """Return the new snapshots.

        Reading stops at an incomplete or invalid line, which the run may still be writing.
        """
        found: list[Snapshot] = []
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    # A resumed run has truncated the file.
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
            raise ValueError("the line is incomplete")
        told = json.loads(line)
        time, names = float(told["time"]), [*self._names, *map(str, told["new"])]
        flat = np.frombuffer(base64.b64decode(told["points"], validate=True), "<i2")
        points = flat.reshape(-1, int(told["dimensions"]))
        clients = tuple(names[number] for number in told.get("clients", range(len(names))))
        is_known = min(told.get("clients", (0,)), default=0) >= 0
        fits = len(clients) == len(points) and points.shape[1] >= 2
        if not (fits and is_known and np.isfinite(time)):
            raise ValueError("the line contradicts itself")
        self._names = names
        return Snapshot(time, clients, points, int(told.get("updates", 0)), "last" in told)
