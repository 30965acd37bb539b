"""Clusters as streams over time: places, heights, and flows of clients (an alluvial diagram).

The picture in ``clusters.png`` and the one of the dashboard are drawn from this layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from raceme.core.events import Placement

_GAP = 0.03
"""Gap between two streams as a share of all clients."""
_LEAST = 1e-9
"""Tolerance of equal weights."""

Weights = Mapping[int, float]
"""Weights of a client's clusters."""
_Pair = tuple[int | None, int | None]
"""Clusters that clients leave and enter; None for none."""
Bands = dict[int, tuple[float, float]]
"""Start and height of each stream by cluster, from top to bottom."""


class Flow(NamedTuple):
    """Clients that leave a stream for another, or stay.

    Attributes
    ----------
    source, target : int or None
        The clusters, equal for those that stay; the target of clients that leave all is None.
    begins, ends : float
        Positions before and after.
    size : float
        Height: the sum of the clients' weights.
    """

    source: int
    target: int | None
    begins: float
    ends: float
    size: float


class Epoch(NamedTuple):
    """A time from which streams are level, and the flows that lead there."""

    time: float
    bands: Bands
    flows: tuple[Flow, ...]


class Streams:
    """Lays out the streams of a run as clients change their clusters.

    Parameters
    ----------
    room : Callable
        Returns, for a time, the seconds within which later changes count as one.
    """

    def __init__(self, room: Callable[[float], float]) -> None:
        self._room = room
        self._weights: dict[str, Weights] = {}
        self._before: dict[str, Weights] = {}
        self._sizes: dict[int, float] = {}
        self._bands: Bands = {}
        self._since = self._until = 0.0

    def observe(self, placed: Placement) -> Iterator[Epoch]:
        """Process a change of a client's clusters; yield the epoch before it, if complete."""
        yield from self.complete(placed.time)
        if not self._before:
            self._since = placed.time
            # Initial clusters do not count as a change.
            self._until = placed.time + (self._room(placed.time) if self._bands else 0.0)
        self._before.setdefault(placed.client, self._weights.get(placed.client, {}))
        self._weights[placed.client] = placed.weights

    def complete(self, time: float) -> Iterator[Epoch]:
        """Yield the latest epoch, if no change at a time belongs to it any more."""
        if not self._before or time <= self._until:
            return
        moved: defaultdict[_Pair, float] = defaultdict(float)
        for client, before in self._before.items():
            for pair, amount in _moved(before, self._weights[client]).items():
                moved[pair] += amount
        self._before = {}
        if moved:
            yield self._epoch(moved)

    def _epoch(self, moved: Mapping[_Pair, float]) -> Epoch:
        before = self._bands
        staying = {cluster: height for cluster, (_, height) in before.items()}
        for (source, target), amount in moved.items():
            if source is not None:
                self._sizes[source] -= amount
                staying[source] -= amount
            if target is not None:
                self._sizes[target] = self._sizes.get(target, 0.0) + amount
        sizes = {cluster: size for cluster, size in self._sizes.items() if size > _LEAST}
        self._sizes = sizes
        order = self._ordered(moved)
        gap = max(0.4 if len(self._weights) < 20 else 1.0, _GAP * len(self._weights))
        top = -(sum(sizes.values()) + gap * (len(order) - 1)) / 2
        self._bands = {}
        for cluster in order:
            self._bands[cluster] = (top, sizes[cluster])
            top += sizes[cluster] + gap
        parts: dict[tuple[int, int | None], float] = {
            (k, k): size for k, size in staying.items() if size > _LEAST
        }
        parts |= {(s, t): size for (s, t), size in moved.items() if s is not None}
        return Epoch(self._since, self._bands, _flows(parts, before, self._bands))

    def _ordered(self, moved: Mapping[_Pair, float]) -> list[int]:
        """Put new clusters where their clients come from; others keep their order."""
        place: dict[int, float] = {cluster: rank for rank, cluster in enumerate(self._bands)}
        known = dict(place)
        for cluster in sorted(self._sizes.keys() - known.keys()):
            own = {s: n for (s, t), n in moved.items() if t == cluster and s in known}
            total = sum(own.values())
            ranks = sum(
                known[source] * amount for source, amount in own.items() if source is not None
            )
            place[cluster] = ranks / total if total else float(len(known))
        return sorted(self._sizes, key=lambda cluster: (place[cluster], cluster))


def layout(placements: Iterable[Placement], room: float) -> list[Epoch]:
    """Lay out all streams of a run; changes within `room` seconds are one."""
    streams = Streams(lambda time: room)
    found = [epoch for placed in placements for epoch in streams.observe(placed)]
    return [*found, *streams.complete(float("inf"))]


def extent(epochs: Iterable[Epoch]) -> tuple[float, float]:
    """Return the vertical extent of all streams."""
    bands = [band for epoch in epochs for band in epoch.bands.values()]
    low = min((top for top, _ in bands), default=0.0)
    return low, max((top + height for top, height in bands), default=low + 1.0)


def _moved(before: Weights, after: Weights) -> dict[_Pair, float]:
    """Return the weights that a client moves between clusters, with as few moves as possible."""
    surplus: dict[int | None, float] = {
        k: weight - after.get(k, 0.0) for k, weight in before.items()
    }
    deficit: dict[int | None, float] = {
        k: weight - before.get(k, 0.0) for k, weight in after.items()
    }
    if not before:
        surplus = {None: sum(after.values())}
    if not after:
        deficit = {None: sum(before.values())}
    found = {}
    for source in surplus:
        for target in deficit:
            amount = min(surplus[source], deficit[target])
            if amount > _LEAST:
                found[source, target] = amount
                surplus[source] -= amount
                deficit[target] -= amount
    return found


def _flows(
    parts: Mapping[tuple[int, int | None], float], before: Bands, after: Bands
) -> tuple[Flow, ...]:
    """Place flows: they leave and arrive in the order of the other side, so that few cross."""
    starts = {cluster: top for cluster, (top, _) in before.items()}
    stops = {cluster: top for cluster, (top, _) in after.items()}
    left, arrived = dict(starts), dict(stops)
    begins: dict[tuple[int, int | None], float] = {}
    for part in sorted(parts, key=lambda part: stops.get(part[1], 0.0)):  # type: ignore[arg-type]
        begins[part] = left[part[0]]
        left[part[0]] += parts[part]
    found = []
    for part in sorted(parts, key=lambda part: starts[part[0]]):
        source, target = part
        ends = begins[part] if target is None else arrived.get(target, begins[part])
        if target is not None:
            arrived[target] = ends + parts[part]
        found.append(Flow(source, target, begins[part], ends, parts[part]))
    return tuple(found)
