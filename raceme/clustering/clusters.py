"""Who belongs where: clusters, their models, and the verbs that change them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.mixing import cosines
from raceme.clustering.model import Model
from raceme.protocol.events import ClusterChange, ClustersChanged
from raceme.protocol.messages import Vector

Weights = Mapping[int, float]
"""Clusters of a client, and how much each counts for it: positive, sum 1."""
Placement = int | Weights
"""A cluster, or several with weights."""
Report = Callable[[ClustersChanged], None]

_TOLERANCE = 1e-6


def ignore(change: ClustersChanged) -> None:
    """Report nothing."""


@dataclass
class Clusters:
    """The clusters with their models, and which of them serve each client.

    Every verb that changes a placement makes one report. A client that no verb has placed yet is
    served by the largest cluster.

    Attributes
    ----------
    models : dict[int, Model]
        The model of each cluster.
    members : dict[str, dict[int, float]]
        Clusters and their weights of each client that ever joined; empty for one that has none
        yet.
    online : dict[str, bool]
        Whether it is there now.
    next_id : int
        Id of the next new cluster; ids are never used again.
    """

    models: dict[int, Model] = field(default_factory=dict)
    members: dict[str, dict[int, float]] = field(default_factory=dict)
    online: dict[str, bool] = field(default_factory=dict)
    next_id: int = 0

    def __post_init__(self) -> None:
        self.next_id = max([self.next_id, *(cluster + 1 for cluster in self.models)])
        self._report: Report = ignore
        # Asked for every client without a cluster, before every task: counted once per change.
        self._largest: int | None = None
        # Derived: how many clients each cluster serves, and of them those online.
        self._served: Counter[int] = Counter()
        self._present: Counter[int] = Counter()
        self._has_mixtures = False
        # One object for all members of a cluster: placements are replaced, never changed.
        self._whole: dict[int, dict[int, float]] = {}
        for client in self.members:
            self._count(client, 1)

    def report_to(self, report: Report) -> None:
        """Let someone know of every change; its `time` and `updates` are still 0 then."""
        self._report = report

    # Questions.

    def of(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self.members.get(client) or {self.largest(): 1.0}

    def main(self, client: str) -> int:
        """Return the cluster that counts most for a client; of equal ones the first."""
        weights = self.members.get(client)
        if not weights:
            return self.largest()
        if len(weights) == 1:
            return next(iter(weights))
        return max(weights, key=lambda cluster: weights[cluster])

    def is_placed(self, client: str) -> bool:
        """Return whether a client has been given a cluster."""
        return bool(self.members.get(client))

    def is_alone(self, client: str) -> bool:
        """Return whether nobody else is in a client's cluster, online or not."""
        return self.is_placed(client) and self.size(self.main(client), online_only=False) == 1

    def clients(self, cluster: int, online_only: bool = True) -> list[str]:
        """Return the clients of a cluster, in order of joining."""
        return [
            client
            for client, weights in self.members.items()
            if cluster in weights and (self.online[client] or not online_only)
        ]

    def size(self, cluster: int, online_only: bool = True) -> int:
        """Return how many clients :meth:`clients` would return, without looking for them."""
        return (self._present if online_only else self._served)[cluster]

    def largest(self) -> int:
        """Return the cluster with the most clients online, by weight; of equal ones the first."""
        if self._largest is None:
            self._largest = self._find_largest()
        return self._largest

    def _find_largest(self) -> int:
        sizes = dict.fromkeys(self.models, 0.0)
        if not self._has_mixtures:
            return max(sizes, key=lambda cluster: self._present[cluster])
        if len(sizes) > 1:
            for client, weights in self.members.items():
                if self.online[client]:
                    for cluster, weight in weights.items():
                        sizes[cluster] += weight
        return max(sizes, key=lambda cluster: sizes[cluster])

    # Verbs.

    def join(self, client: str) -> None:
        """Note that a client is there: in the only cluster, without one, or back in its own."""
        self._set_online(client, True)
        self._largest = None
        if client not in self.members:
            self.members[client] = {}
            if len(self.models) == 1:
                self.assign(client, next(iter(self.models)))

    def leave(self, client: str) -> None:
        """Note that a client went offline; it keeps its clusters."""
        self._set_online(client, False)
        self._largest = None

    def assign(self, client: str, placement: Placement) -> None:
        """Place a client that has no cluster yet; one that has is moved.

        Raises
        ------
        ValueError
            A cluster does not exist, or the weights are not positive or do not sum to 1.
        """
        weights = self._checked(placement)
        before = self.members.get(client, {})
        if weights != before:
            self._place({client: weights})
            verb = ClusterChange.MOVE if before else ClusterChange.ASSIGN
            self._changed(verb, {client: weights})

    move = assign

    def unassign(self, clients: Iterable[str]) -> None:
        """Take clients out of their clusters: the largest serves them until they are placed."""
        released = [client for client in clients if self.members.get(client)]
        self._place({client: {} for client in released})
        if released:
            self._changed(ClusterChange.MOVE, {client: {} for client in released})

    def found(self, model: Model, clients: Iterable[str] = ()) -> int:
        """Add a cluster beside the others, and move clients into it; return its id."""
        cluster = self._add(model)
        moved = {client: {cluster: 1.0} for client in clients}
        self._place(moved)
        self._changed(ClusterChange.FOUND, moved, made=(cluster,))
        return cluster

    def split(
        self,
        parent: int,
        parts: Iterable[Sequence[str]],
        score: float = math.nan,
        threshold: float = math.nan,
    ) -> list[int]:
        """Replace a cluster by its parts, each with its model and version; return their ids.

        Members that no part names, because they were away, are placed nowhere any more.

        Parameters
        ----------
        parent : int
            The cluster.
        parts : Iterable of Sequence[str]
            Its members, divided.
        score, threshold : float
            What was measured, and the bound that it passed.
        """
        model = self.models.pop(parent)
        moved: dict[str, dict[int, float]] = {}
        children = []
        for part in parts:
            child = self._add(model.copy())
            children.append(child)
            for client in part:
                moved[client] = _renamed(self.members.get(client) or {parent: 1.0}, parent, child)
        for client, weights in self.members.items():
            if parent in weights and client not in moved:
                moved[client] = {}
        self._place(moved)
        self._changed(ClusterChange.SPLIT, moved, (parent,), tuple(children), score, threshold)
        return children

    def merge(
        self,
        sources: Sequence[int],
        model: Model | None = None,
        score: float = math.nan,
        threshold: float = math.nan,
    ) -> int:
        """Replace several clusters by one; return its id.

        Parameters
        ----------
        sources : Sequence[int]
            The clusters, at least two.
        model : Model, optional
            The new cluster's; by default the mean of the sources', weighted by their members.
        score, threshold : float
            What was measured, and the bound that it passed.

        Raises
        ------
        ValueError
            There are not two different clusters to merge, or one does not exist.
        """
        unknown = [cluster for cluster in sources if cluster not in self.models]
        if unknown or len(set(sources)) < 2 or len(set(sources)) != len(sources):
            raise ValueError(f"a merge needs at least two clusters that exist, got {sources}")
        if model is None:
            model = self._mean_model(sources)
        for cluster in sources:
            del self.models[cluster]
        target = self._add(model)
        moved = {}
        for client, weights in self.members.items():
            merged = sum(weights.get(cluster, 0.0) for cluster in sources)
            if merged:
                rest = {c: weight for c, weight in weights.items() if c not in sources}
                moved[client] = {**rest, target: merged}
        self._place(moved)
        self._changed(ClusterChange.MERGE, moved, tuple(sources), (target,), score, threshold)
        return target

    def retire(self, cluster: int) -> None:
        """Give a cluster up that serves nobody any more.

        Raises
        ------
        ValueError
            It has members, or is the last one.
        """
        if self._served[cluster]:
            raise ValueError(f"cluster {cluster} has members and cannot be retired")
        if len(self.models) == 1:
            raise ValueError(f"cluster {cluster} is the last one and cannot be retired")
        del self.models[cluster]
        self._changed(ClusterChange.RETIRE, {}, gone=(cluster,))

    # Parts of the verbs.

    def _place(self, moved: Mapping[str, dict[int, float]]) -> None:
        """Write down where clients are; those not heard of before are there."""
        for client, weights in moved.items():
            self._count(client, -1)
            cluster = next(iter(weights), -1)
            if weights == {cluster: 1.0}:
                weights = self._whole.setdefault(cluster, weights)
            self.members[client] = weights
            self.online.setdefault(client, True)
            self._count(client, 1)

    def _set_online(self, client: str, is_online: bool) -> None:
        self._count(client, -1)
        self.online[client] = is_online
        self._count(client, 1)

    def _count(self, client: str, step: int) -> None:
        """Count a client into its clusters, or out of them."""
        weights, is_online = self.members.get(client, {}), self.online.get(client, False)
        self._has_mixtures = self._has_mixtures or len(weights) > 1
        for cluster in weights:
            self._served[cluster] += step
            self._present[cluster] += step * is_online

    def _add(self, model: Model) -> int:
        cluster = self.next_id
        self.models[cluster] = model
        self.next_id += 1
        return cluster

    def _mean_model(self, sources: Sequence[int]) -> Model:
        sizes = dict.fromkeys(sources, 0.0)
        for weights in self.members.values():
            for cluster in sources:
                sizes[cluster] += weights.get(cluster, 0.0)
        shares = list(sizes.values()) if sum(sizes.values()) else [1.0] * len(sizes)
        version = max(self.models[cluster].version for cluster in sources)
        model = Model(self.models[sources[0]].vector.copy(), version)
        model.average([self.models[cluster].vector for cluster in sources], shares)
        return model

    def _checked(self, placement: Placement) -> dict[int, float]:
        weights = {placement: 1.0} if isinstance(placement, int) else dict(placement)
        for cluster, weight in weights.items():
            if cluster not in self.models:
                raise ValueError(f"there is no cluster {cluster}")
            if not weight > 0:
                raise ValueError(f"the weight of cluster {cluster} must be positive, got {weight}")
        total = math.fsum(weights.values())
        if abs(total - 1.0) > _TOLERANCE:
            raise ValueError(f"the weights of a placement must sum to 1, got {total:g}")
        return weights

    def _changed(
        self,
        change: ClusterChange,
        memberships: Mapping[str, Weights],
        gone: tuple[int, ...] = (),
        made: tuple[int, ...] = (),
        score: float = math.nan,
        threshold: float = math.nan,
    ) -> None:
        self._largest = None
        told = {client: dict(weights) for client, weights in memberships.items()}
        self._report(ClustersChanged(0.0, 0, change, told, gone, made, score, threshold))


def _renamed(weights: Weights, old: int, new: int) -> dict[int, float]:
    return {new if cluster == old else cluster: weight for cluster, weight in weights.items()}


def blended(models: Mapping[int, Model], weights: Weights) -> Vector:
    """Return Σ_k α_k w_k: the model that serves a client of several clusters. Shape (d,)."""
    vector = np.zeros_like(next(iter(models.values())).vector)
    for cluster, weight in weights.items():
        vector += np.float32(weight) * models[cluster].vector
    return vector


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
