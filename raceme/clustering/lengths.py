"""Medians of numbers of which one changes at a time: kept in order, not sorted anew."""

from __future__ import annotations

from bisect import bisect_left, insort


class Lengths:
    """A positive number of each client, in order within its cluster."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float]] = {}
        self._ordered: dict[int, list[float]] = {}

    def put(self, client: str, cluster: int | None, length: float) -> None:
        """Set a client's number in a cluster; with no cluster, or 0, it has none."""
        before = self._of.pop(client, None)
        if before is not None:
            ordered = self._ordered[before[0]]
            del ordered[bisect_left(ordered, before[1])]
        if cluster is not None and length > 0.0:
            self._of[client] = cluster, length
            insort(self._ordered.setdefault(cluster, []), length)

    def median_of_others(self, client: str, cluster: int, fewest: int) -> float:
        """Return the median in a cluster without a client's own; 0 of fewer than `fewest`."""
        ordered = self._ordered.get(cluster, [])
        home, length = self._of.get(client, (None, 0.0))
        own = bisect_left(ordered, length) if home == cluster else len(ordered)
        count = len(ordered) - (home == cluster)
        if count < fewest:
            return 0.0

        def at(place: int) -> float:
            return ordered[place if place < own else place + 1]

        half = count // 2
        return at(half) if count % 2 else (at(half - 1) + at(half)) / 2
