"""Clients as streams between clusters: where their bands lie, and what flows where.

A client has a band in each of its clusters, as high as its weight there: all of its bands
together are one high. When weights change, what stays in a cluster flows straight on, and the
rest goes over from the clusters that lose to those that gain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from raceme.records.membership import Placement, home
from raceme.records.record import Floats

Weights = Mapping[int, float]
Bands = dict[int, tuple[float, float]]
"""Cluster to where a client's band in it begins, and how high it is."""

_LEAST = 1e-9
"""Weights that differ by less are the same."""


@dataclass(frozen=True)
class Piece:
    """A part of a client's band: a bend, and level from there.

    Attributes
    ----------
    cluster : int
        Where it goes.
    corners : ndarray
        Corners of its outline: time in seconds and height. Shape (n, 2).
    """

    cluster: int
    corners: Floats


@dataclass(frozen=True)
class Flow:
    """What goes from a band to a band: from where, to where, and how high it is at both ends."""

    cluster: int
    begins: float
    height_before: float
    ends: float
    height: float


class Streams:
    """The bands of all clients of a run, at any time.

    Parameters
    ----------
    placements : Sequence[Placement]
        Every change of a client's clusters, in order.
    groups : Mapping[str, int or None]
        Client id to true group, by which clients with the same history are ordered.
    end : float
        When the run ended.

    Attributes
    ----------
    order : list[str]
        The clients from top to bottom.
    gap : float
        Room between two clusters, in heights of a client.
    """

    def __init__(
        self, placements: Sequence[Placement], groups: Mapping[str, int | None], end: float
    ) -> None:
        paths: dict[str, list[tuple[float, Weights]]] = {}
        for placed in placements:
            paths.setdefault(placed.client, []).append((placed.time, placed.weights))
        self._paths = paths
        self.order = sorted(
            paths, key=lambda client: (_homes(paths[client]), _known(groups, client))
        )
        self.gap = max(1.0, 0.03 * len(self.order))
        self._place = self._places(end)

    @property
    def changes(self) -> list[float]:
        """The times at which a client's clusters changed, ascending."""
        return sorted({time for path in self._paths.values() for time, _ in path})

    @property
    def thickness(self) -> int:
        """Number of bands that the clients have at most, all together."""
        return sum(max(len(weights) for _, weights in path) for path in self._paths.values())

    def bands(self, time: float) -> dict[str, Bands]:
        """Return the bands of each client that has a cluster at a time.

        The whole is centred, so that a tree grows to both sides.
        """
        members: dict[int, list[tuple[str, float]]] = {}
        present = 0
        for client in self.order:
            path = self._paths[client]
            index = bisect_right(path, time, key=itemgetter(0))
            weights = path[index - 1][1] if index else {}
            present += bool(weights)
            for cluster, weight in weights.items():
                members.setdefault(cluster, []).append((client, weight))
        found: dict[str, Bands] = {}
        y = (len(self.order) - present - self.gap * max(0, len(members) - 1)) / 2
        for cluster in sorted(members, key=self._place.__getitem__):
            for client, weight in members[cluster]:
                found.setdefault(client, {})[cluster] = (y, weight)
                y += weight
            y += self.gap
        return found

    def pieces(
        self, drawn: Sequence[tuple[float, Mapping[str, Bands]]], width: float, end: float
    ) -> Iterator[Piece]:
        """Yield the outlines of all clients' bands.

        Parameters
        ----------
        drawn : Sequence
            Times, ascending, and the bands from then on.
        width : float
            How long a bend takes, in seconds.
        end : float
            Where the last bands end.
        """
        for client in self.order:
            states = [(time, bands.get(client, {})) for time, bands in drawn]
            # A piece goes on for as long as nothing changes for this client.
            kept = [states[0], *(new for old, new in pairwise(states) if new[1] != old[1])]
            stops = [*(time for time, _ in kept[1:]), end]
            before: Bands = {}
            for (start, bands), stop in zip(kept, stops, strict=True):
                first = start == drawn[0][0]
                turn = 0.0 if first else max(0.0, min(width, stop - start))
                for flow in flows(bands if first else before, bands, self._place):
                    # What leaves the clusters for nowhere has no level part.
                    until = max(stop, start + turn) if flow.height else start + turn
                    yield Piece(flow.cluster, _outline(flow, start, turn, until))
                before = bands

    def _places(self, end: float) -> dict[int, int]:
        """Return for each cluster where it stands among the others: by its members' mean place.

        It stays there all the time, so that clusters do not change places when clients move.
        """
        total: dict[int, float] = {}
        ranks: dict[int, float] = {}
        for rank, client in enumerate(self.order):
            path = self._paths[client]
            stops = [*(time for time, _ in path[1:]), end]
            for (start, weights), stop in zip(path, stops, strict=True):
                # Who was there for a moment only has little say, yet where no other was, it has.
                stay = max(stop - start, 1e-6 * end, _LEAST)
                for cluster, weight in weights.items():
                    total[cluster] = total.get(cluster, 0.0) + stay * weight
                    ranks[cluster] = ranks.get(cluster, 0.0) + stay * weight * rank
        means = {cluster: ranks[cluster] / total[cluster] for cluster in total}
        return {cluster: i for i, cluster in enumerate(sorted(means, key=lambda k: (means[k], k)))}


def flows(before: Bands, after: Bands, place: Mapping[int, int]) -> list[Flow]:
    """Return what flows between the bands of a client, those that it had and those that it has.

    Parameters
    ----------
    before, after : Bands
        Without bands before, each one grows out of nothing; without bands after, each one ends.
    place : Mapping[int, int]
        Order of the clusters, so that what goes up leaves and arrives above what goes down.
    """
    if not before:
        return [Flow(k, y + h / 2, 0.0, y, h) for k, (y, h) in after.items()]
    if not after:
        return [Flow(k, y, h, y + h / 2, 0.0) for k, (y, h) in before.items()]
    amounts = _amounts(before, after, place)
    leaving = {k: y for k, (y, _) in before.items()}
    arriving = {k: y for k, (y, _) in after.items()}
    begins, ends = {}, {}
    for source, target in sorted(amounts, key=lambda pair: place[pair[1]]):
        begins[source, target] = leaving[source]
        leaving[source] += amounts[source, target]
    for source, target in sorted(amounts, key=lambda pair: place[pair[0]]):
        ends[source, target] = arriving[target]
        arriving[target] += amounts[source, target]
    return [
        Flow(pair[1], begins[pair], amount, ends[pair], amount) for pair, amount in amounts.items()
    ]


def _amounts(before: Bands, after: Bands, place: Mapping[int, int]) -> dict[tuple[int, int], float]:
    """Return how much goes from which cluster to which; what can stay stays."""
    stays = {k: min(before[k][1], after[k][1]) for k in before if k in after}
    found = {(k, k): amount for k, amount in stays.items()}
    surplus = {k: h - stays.get(k, 0.0) for k, (_, h) in before.items()}
    deficit = {k: h - stays.get(k, 0.0) for k, (_, h) in after.items()}
    for source in sorted(surplus, key=place.__getitem__):
        for target in sorted(deficit, key=place.__getitem__):
            amount = min(surplus[source], deficit[target])
            if amount > _LEAST:
                found[source, target] = amount
                surplus[source] -= amount
                deficit[target] -= amount
    return found


def _outline(flow: Flow, start: float, turn: float, stop: float) -> Floats:
    """Return the corners around a flow: below from left to right, and back above."""
    ease = np.linspace(0.0, 1.0, 12)
    bend = np.append(ease * ease * (3 - 2 * ease), 1.0)
    x = np.append(start + turn * ease, stop)
    low = flow.begins + (flow.ends - flow.begins) * bend
    high = low + flow.height_before + (flow.height - flow.height_before) * bend
    return np.concatenate([np.column_stack([x, low]), np.column_stack([x, high])[::-1]])


def _homes(path: Sequence[tuple[float, Weights]]) -> list[int]:
    """Return a client's clusters one after another, of several at a time the weightiest."""
    homes = (home(weights) for _, weights in path)
    return [cluster for cluster, _ in groupby(-1 if k is None else k for k in homes)]


def _known(groups: Mapping[str, int | None], client: str) -> int:
    group = groups.get(client)
    return -1 if group is None else group
