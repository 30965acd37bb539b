"""Clusters of clients, each with a model: the state and the reports of clustered methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme import events
from raceme.messages import Vector
from raceme.strategies.bipartition import cosines
from raceme.strategies.conduct import Conduct
from raceme.strategies.fleet import Client
from raceme.strategies.mixing import average
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update

UNASSIGNED = -1


@dataclass
class Clusters:
    """Who is where.

    Attributes
    ----------
    models : dict[int, Model]
        The model of each cluster.
    of : dict[str, int]
        Cluster of each client that was ever greeted; −1 for one that has none yet.
    online : dict[str, bool]
        Whether it is there now.
    next_cluster : int
        Id of the next new cluster; ids are never used again.
    """

    models: dict[int, Model]
    of: dict[str, int] = field(default_factory=dict)
    online: dict[str, bool] = field(default_factory=dict)
    next_cluster: int = 1

    def join(self, client: str) -> None:
        """Take a client in: into the only cluster, into none yet, or back into its own."""
        if client not in self.of:
            self.of[client] = next(iter(self.models)) if len(self.models) == 1 else UNASSIGNED
        self.online[client] = True

    def members(self, cluster: int) -> list[str]:
        """Return the clients of a cluster that are online, in order of joining."""
        return [client for client in self.of if self.of[client] == cluster and self.online[client]]

    def largest(self) -> int:
        """Return the cluster with the most clients; of equal ones the first."""
        sizes = dict.fromkeys(self.models, 0)
        for cluster in self.of.values():
            if cluster in sizes:
                sizes[cluster] += 1
        return max(sizes, key=lambda cluster: sizes[cluster])

    def place_of(self, client: str) -> int:
        """Return a client's cluster; the largest one for a client that has none yet."""
        cluster = self.of[client]
        return self.largest() if cluster == UNASSIGNED else cluster

    def add(self, model: Model) -> int:
        """Add a cluster without members, and return its id."""
        cluster = self.next_cluster
        self.models[cluster] = model
        self.next_cluster += 1
        return cluster

    def split(self, parent: int, parts: Iterable[Sequence[str]]) -> dict[int, tuple[str, ...]]:
        """Replace a cluster by its parts, each with its model and version; return their members."""
        model = self.models.pop(parent)
        children: dict[int, tuple[str, ...]] = {}
        for part in parts:
            child = self.add(Model(model.vector.copy(), model.version))
            children[child] = tuple(part)
            self.of.update(dict.fromkeys(part, child))
        return children


class Clustered(Conduct):
    """A method that keeps clusters in its state: the answers and reports that follow from them."""

    state: Any

    @property
    def _clusters(self) -> Clusters:
        clusters: Clusters = self.state.clusters
        return clusters

    @property
    def models(self) -> Mapping[int, Model]:
        """The models by cluster."""
        return self._clusters.models

    def cluster_of(self, client: str) -> int:
        """Return a client's cluster; a newcomer trains the model of the largest one once."""
        return self._clusters.place_of(client)

    def add_client(self, client: Client) -> None:
        """Take a client in: into the only cluster, as a newcomer, or back into its own."""
        self._clusters.join(client.client_id)

    def remove_client(self, client: str) -> None:
        """Leave a client that went offline out of splits; it keeps its cluster."""
        self._clusters.online[client] = False

    def _assign(self, client: str, cluster: int) -> None:
        """Put a client into a cluster, and report it if that is news."""
        if self._clusters.of[client] != cluster:
            self._clusters.of[client] = cluster
            self._emit(events.ClientAssigned(self.now(), client, cluster))

    def _split(
        self, parent: int, parts: Iterable[Sequence[str]], gap: float, threshold: float
    ) -> None:
        """Replace a cluster by its parts, and report it."""
        children = self._clusters.split(parent, parts)
        self._emit(
            events.ClusterSplit(self.now(), self.progress.updates, parent, children, gap, threshold)
        )

    def _average(self, updates: Sequence[Update], by_examples: bool = True) -> list[Applied]:
        """Replace the model of each cluster by the mean of its clients' models."""
        together: dict[int, list[tuple[Update, float]]] = {}
        for update in updates:
            weight = float(update.num_examples) if by_examples else 1.0
            together.setdefault(self.cluster_of(update.task.client), []).append((update, weight))
        shares: dict[str, float] = {}
        for cluster, group in together.items():
            weights = [weight for _, weight in group]
            average(self.models[cluster], [update.vector for update, _ in group], weights)
            for update, weight in group:
                shares[update.task.client] = weight / sum(weights)
        return [
            Applied(self.cluster_of(u.task.client), staleness=0, weight=shares[u.task.client])
            for u in updates
        ]

    def _tau(self, update: Update, has_moved: bool) -> int:
        """Return the staleness of an update that goes into the cluster of its client.

        Versions of different clusters say nothing about each other: of a client that has just
        moved all updates are counted that were applied since it received its model.
        """
        if has_moved:
            return self.progress.updates - update.task.updates
        return self.models[self.cluster_of(update.task.client)].version - update.task.version


def nearest(vector: Vector, groups: Mapping[int, Sequence[Vector]]) -> dict[int, float]:
    """Return the mean cosine of a vector with those of each group; empty groups are left out."""
    return {
        name: float(cosines(vector[None, :], np.stack(group)).mean())
        for name, group in groups.items()
        if group
    }


def parts_of(members: Sequence[str], labels: NDArray[np.int64]) -> list[list[str]]:
    """Return clients by label."""
    count = int(labels.max()) + 1
    return [
        [client for client, label in zip(members, labels, strict=True) if label == part]
        for part in range(count)
    ]
