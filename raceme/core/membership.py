"""Which client is in which clusters, followed through the events of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from raceme.core.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    Evaluated,
    Event,
    EventHandler,
)

Composition = Counter[int | None]
"""Number of a cluster's members by true group."""


@dataclass(frozen=True)
class Placement:
    """A client's clusters from a moment on.

    Attributes
    ----------
    time : float
        When, in seconds.
    client : str
        Its id.
    weights : Mapping[int, float]
        Cluster to its weight: positive, sum 1. Empty if its cluster was given up and the client
        was given no other.
    """

    time: float
    client: str
    weights: Mapping[int, float]

    @property
    def home(self) -> int | None:
        """The cluster with the largest weight; None if there is none."""
        return home(self.weights)


def home(weights: Mapping[int, float]) -> int | None:
    """Return the cluster with the largest weight, of equal ones the smallest; None of nothing."""
    if len(weights) == 1:
        return next(iter(weights))
    return min(weights, key=lambda cluster: (-weights[cluster], cluster), default=None)


class Membership(EventHandler):
    """The clusters' members now, an observer of the run.

    A client of several clusters is counted where its weight is largest.

    Attributes
    ----------
    weights : dict[str, Mapping[int, float]]
        Client id to the weights of its clusters, for every client that has one.
    groups : dict[str, int or None]
        Client id to the true group of its data, for every client that joined; where data change,
        that of the latest evaluation.
    composition : dict[int, Counter]
        Cluster to the number of its members of each true group, for every cluster with members;
        the group None counts those whose group is not known.
    existing : set[int]
        Clusters that an event has named and that are not gone, with or without members.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Mapping[int, float]] = {}
        self.groups: dict[str, int | None] = {}
        self.composition: dict[int, Composition] = {}
        self.existing: set[int] = set()
        # Of the clients that have a cluster and a known group: how many, and how many of them are
        # of their cluster's most common group. Kept, since each change touches few clusters.
        self._known = 0
        self._agreeing = 0

    @property
    def clusters(self) -> dict[str, int]:
        """Client id to its cluster, that with the largest weight."""
        homes = ((client, home(weights)) for client, weights in self.weights.items())
        return {client: cluster for client, cluster in homes if cluster is not None}

    def observe(self, event: Event) -> list[Placement]:
        """Take note of an event.

        Returns
        -------
        list[Placement]
            The clients whose clusters or weights are others because of it.
        """
        return self(event) or []

    def on_client_joined(self, event: ClientJoined) -> None:
        """Note the true group of a client."""
        self._observe_group(event.client, event.group)

    def on_evaluated(self, event: Evaluated) -> None:
        """Note the true groups that are others now."""
        for client, group in event.groups.items():
            if group != self.groups.get(client):
                self._observe_group(client, group)

    def purity(self) -> float | None:
        """Return the clusters' purity now; None if no true groups are known."""
        return self._agreeing / self._known if self._known else None

    def sizes(self) -> dict[int, int]:
        """Return the number of members of each cluster that has any, by cluster."""
        return {cluster: self.composition[cluster].total() for cluster in sorted(self.composition)}

    def _observe_group(self, client: str, group: int | None) -> None:
        cluster = home(self.weights.get(client, {}))
        if cluster is not None:
            self._count(cluster, client, -1)
        self.groups[client] = group
        if cluster is not None:
            self._count(cluster, client, +1)

    def on_clusters_changed(self, event: ClustersChanged) -> list[Placement]:
        """Move the clients that it names, and those whose cluster is gone."""
        self.existing.update(event.made)
        placements = [
            self._place(event.time, client, dict(weights))
            for client, weights in event.memberships.items()
            if self.weights.get(client) != weights
        ]
        gone = set(event.gone)
        self.existing -= gone
        # No client can be in a cluster that does not exist.
        if not gone.isdisjoint(self.composition):
            left = [c for c, weights in self.weights.items() if home(weights) in gone]
            placements += [self._place(event.time, client, {}) for client in left]
        return placements

    def _place(self, time: float, client: str, weights: Mapping[int, float]) -> Placement:
        old, new = home(self.weights.get(client, {})), home(weights)
        if old is not None:
            self._count(old, client, -1)
        if new is not None:
            self._count(new, client, +1)
        if weights:
            self.weights[client] = weights
        else:
            # Of a resumed run, events are observed from the middle on: it may not be known yet.
            self.weights.pop(client, None)
        self.existing.update(weights)
        return Placement(time, client, weights)

    def _count(self, cluster: int, client: str, change: int) -> None:
        """Add a client to the composition of a cluster, or take it out."""
        composition = self.composition.setdefault(cluster, Counter())
        group = self.groups.get(client)
        before = _largest(composition)
        composition[group] += change
        if not composition[group]:
            del composition[group]
        if not composition:
            del self.composition[cluster]
        self._known += change if group is not None else 0
        self._agreeing += _largest(composition) - before


def _largest(composition: Composition) -> int:
    """Return the number of members of the most common known group."""
    return max((count for group, count in composition.items() if group is not None), default=0)


# -----------------------------------------------------------------------------
# Changes of clusters in words, for progress lines.
# -----------------------------------------------------------------------------


def is_news(event: ClustersChanged) -> bool:
    """Return whether a change of clusters is told: what a run begins with, and moves, are not."""
    if event.change in (ClusterChange.SPLIT, ClusterChange.MERGE):
        return True
    return event.change in (ClusterChange.FOUND, ClusterChange.RETIRE) and event.updates > 0


def change_line(event: ClustersChanged) -> str:
    """Describe a change of clusters in one line: with clients, where they are named."""
    sizes = Counter(home(weights) for weights in event.memberships.values())
    made = ", ".join(f"{k} ({sizes[k]})" if sizes else str(k) for k in event.made)
    gone = ", ".join(map(str, event.gone))
    # "cluster 2 → clusters 3 (2), 4 (1)", "clusters 3, 4 → cluster 5 (3)", "new cluster 6".
    before = f"cluster{'' if len(event.gone) == 1 else 's'} {gone}"
    after = f"cluster{'' if len(event.made) == 1 else 's'} {made}"
    what = f"{before} → {after}" if gone and made else f"new {after}" if made else f"{before} ended"
    return f"{what} at update {event.updates}"
