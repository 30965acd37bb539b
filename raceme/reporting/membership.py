"""Which client is in which cluster, followed through the events of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from raceme.events import (
    ClientAssigned,
    ClientJoined,
    ClusterSplit,
    Evaluated,
    Event,
    UpdateApplied,
)

Composition = Counter[int | None]
"""Number of a cluster's members by true group."""


@dataclass(frozen=True)
class Move:
    """A client came into a cluster.

    Attributes
    ----------
    time : float
        When, in seconds.
    client : str
        Who.
    cluster : int
        Its cluster from then on.
    source : int or None
        Its cluster until then; None if this is its first.
    """

    time: float
    client: str
    cluster: int
    source: int | None


class Membership:
    """The clusters' members now, an observer of the run.

    A client's cluster is unknown until an event names it. An update or an evaluation of a model
    that has since been split says nothing about where its client is now.

    Attributes
    ----------
    clusters : dict[str, int]
        Client id to cluster, for every client whose cluster is known.
    groups : dict[str, int or None]
        Client id to the true group of its data, for every client that joined.
    composition : dict[int, Counter]
        Cluster to the number of its members of each true group, for every cluster with members;
        the group None counts those whose group is not known.
    """

    def __init__(self) -> None:
        self.clusters: dict[str, int] = {}
        self.groups: dict[str, int | None] = {}
        self.composition: dict[int, Composition] = {}
        self._split: set[int] = set()

    def observe(self, event: Event) -> list[Move]:
        """Take note of an event.

        Returns
        -------
        list[Move]
            The clients that are in another cluster because of it, or in one for the first time.
        """
        # Most events are updates from clients that stay where they are: they come first.
        if isinstance(event, UpdateApplied):
            if self.clusters.get(event.client) == event.cluster or event.cluster in self._split:
                return []
            return [self._move(event.time, event.client, event.cluster)]
        if isinstance(event, ClusterSplit):
            return self._observe_split(event)
        if isinstance(event, Evaluated):
            return [
                self._move(event.time, client, cluster)
                for client, (cluster, _, _) in event.per_client.items()
                if client not in self.clusters and cluster not in self._split
            ]
        if isinstance(event, ClientJoined):
            self._observe_join(event)
            return []
        if isinstance(event, ClientAssigned) and self.clusters.get(event.client) != event.cluster:
            return [self._move(event.time, event.client, event.cluster)]
        return []

    def sizes(self) -> dict[int, int]:
        """Return the number of members of each cluster that has any, by cluster."""
        return {cluster: self.composition[cluster].total() for cluster in sorted(self.composition)}

    def _observe_join(self, event: ClientJoined) -> None:
        cluster = self.clusters.get(event.client)
        if cluster is not None:
            self._count(cluster, event.client, -1)
        self.groups[event.client] = event.group
        if cluster is not None:
            self._count(cluster, event.client, +1)

    def _observe_split(self, event: ClusterSplit) -> list[Move]:
        moves = []
        for child, clients in event.children.items():
            for client in clients:
                # A member that never sent an update shows only now that it was in the parent.
                if client not in self.clusters:
                    moves.append(self._move(event.time, client, event.parent))
                moves.append(self._move(event.time, client, child))
        # A method may keep the parent's id for one of the children.
        self._split.add(event.parent)
        self._split.difference_update(event.children)
        return moves

    def _move(self, time: float, client: str, cluster: int) -> Move:
        source = self.clusters.get(client)
        if source is not None:
            self._count(source, client, -1)
        self.clusters[client] = cluster
        self._count(cluster, client, +1)
        return Move(time, client, cluster, source)

    def _count(self, cluster: int, client: str, change: int) -> None:
        """Add a client to the composition of a cluster, or take it out."""
        composition = self.composition.setdefault(cluster, Counter())
        group = self.groups.get(client)
        composition[group] += change
        if not composition[group]:
            del composition[group]
        if not composition:
            del self.composition[cluster]


def purity(assignment: Mapping[str, int], groups: Mapping[str, int | None]) -> float | None:
    """Return the share of clients whose cluster's most common true group is theirs.

    Parameters
    ----------
    assignment : Mapping[str, int]
        Client id to cluster.
    groups : Mapping[str, int or None]
        Client id to true group; clients whose group is not known are left out.

    Returns
    -------
    float or None
        None if no client has both a cluster and a known group.
    """
    composition: defaultdict[int, Composition] = defaultdict(Counter)
    for client, cluster in assignment.items():
        composition[cluster][groups.get(client)] += 1
    return composition_purity(composition)


def composition_purity(composition: Mapping[int, Composition]) -> float | None:
    """Return the purity of clusters, given the number of members of each true group."""
    known = [
        [count for group, count in counts.items() if group is not None]
        for counts in composition.values()
    ]
    total = sum(map(sum, known))
    return sum(max(counts, default=0) for counts in known) / total if total else None
