"""Clusters, their models and members, and the verbs that change them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.events import ClusterChange, ClustersChanged, ignore
from raceme.core.messages import Vector

# -----------------------------------------------------------------------------
# A model on the server: it owns its numbers and its version.
# -----------------------------------------------------------------------------


_BLOCK = 1 << 16
"""Elements that are mixed at a time: as much as stays in a core's cache between the operations."""


class NonFiniteModelError(ValueError):
    """A change would leave NaN or infinity in a model; the model is as it was before."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model on the server. Only its own verbs change it, and each change is a new version.

    Attributes
    ----------
    vector : Vector
        The weights, flat; read-only. A new model takes the array that it is made from over.
        Shape (d,).
    version : int
        Number of changes since the start, its ancestors' included.
    """

    vector: Vector
    version: int = 0

    def __post_init__(self) -> None:
        own = np.require(self.vector, np.float32, ["W", "C"])
        shown = own.view()
        shown.flags.writeable = False
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "vector", shown)

    @property
    def _numbers(self) -> Vector:
        own: Vector = self.__dict__["_own"]
        return own

    def _next(self) -> None:
        object.__setattr__(self, "version", self.version + 1)

    def copy(self) -> Model:
        """Return a model of its own with the same numbers and version."""
        return Model(self.vector.copy(), self.version)

    def mix(self, w_i: Vector, alpha: float, where: np.ndarray | None = None) -> None:
        """Mix an update in: w ← α w_i + (1 − α) w.

        Written as w + α (w_i − w), block by block, so that memory is gone through once and no
        temporary array of the model's size is needed. A share of at most 1 keeps numbers of the
        size that :meth:`raceme.core.messages.ModelSpec.unpack` lets in at that size.

        Parameters
        ----------
        w_i : Vector
            The client's model. Shape (d,).
        alpha : float
            Its share α in the new model, in [0, 1].
        where : NDArray[np.bool_], optional
            Weights that are mixed; the others stay. Shape (d,).

        Raises
        ------
        ValueError
            α is no share.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"the share of an update must be between 0 and 1, got {alpha:g}")
        w, share = self._numbers, np.float32(alpha)
        step = np.empty(min(_BLOCK, len(w)), np.float32)
        for start in range(0, len(w), _BLOCK):
            block = w[start : start + _BLOCK]
            change = step[: len(block)]
            np.subtract(w_i[start : start + _BLOCK], block, out=change)
            change *= share
            if where is not None:
                change *= where[start : start + _BLOCK]
            block += change
        self._next()

    def move(self, step: Vector) -> None:
        """Take a step: w ← w + step.

        Raises
        ------
        NonFiniteModelError
            The result would not be finite.
        """
        self.replace(self.vector + step)

    def replace(self, vector: Vector) -> None:
        """Take other weights: w ← vector.

        Raises
        ------
        NonFiniteModelError
            They are not finite.
        """
        _check_finite(vector)
        self._numbers[...] = vector
        self._next()

    def average(self, vectors: Sequence[Vector], weights: Sequence[float]) -> None:
        """Become the weighted mean of clients' models."""
        shares = np.asarray(weights, np.float64) / sum(weights)
        self.replace(np.asarray(shares @ np.stack(vectors)))

    def copy_from(self, w_i: Vector, where: np.ndarray) -> None:
        """Take some numbers over as they are: counters, of which a mean has no meaning.

        It belongs to the change that was made last, and is no version of its own.
        """
        self._numbers[where] = w_i[where]


def _check_finite(vector: np.ndarray) -> None:
    # NaN and infinity survive in the squared norm; a finite vector can overflow it.
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = vector.astype(np.float32, copy=False)
        if not np.isfinite(np.dot(numbers, numbers)) and not np.isfinite(numbers).all():
            raise NonFiniteModelError("the model would hold NaN or infinity")


# -----------------------------------------------------------------------------
# Arithmetic on flat models.
# -----------------------------------------------------------------------------


Matrix = NDArray[np.float64]


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0


def unit(vector: Vector) -> Vector:
    """Return a vector at unit length; a zero vector as it is."""
    length = np.float32(np.linalg.norm(vector)) or np.float32(1.0)
    return np.asarray(vector / length)


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Matrix:
    """Return the cosines between the rows of two matrices; 0 where a row is zero.

    Parameters
    ----------
    first, second : NDArray[np.floating]
        Shapes (a, d) and (b, d).

    Returns
    -------
    Matrix
        Shape (a, b), within [-1, 1].
    """
    products = _unit_rows(first) @ _unit_rows(second).T
    return np.clip(np.asarray(products, np.float64), -1.0, 1.0)


def _unit_rows(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))


# -----------------------------------------------------------------------------
# Clusters, their models and members, and the verbs that change them.
# -----------------------------------------------------------------------------


Weights = Mapping[int, float]
"""Clusters of a client, and how much each counts for it: positive, sum 1."""
Placement = int | Weights
"""A cluster, or several with weights."""
Report = Callable[[ClustersChanged], None]

_TOLERANCE = 1e-6


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
    heirs : dict[int, list[int]]
        Clusters that are gone, to those whose models continue theirs: the parts of a split, or what
        a merge has made that kept the model of one. A mean of models continues none of them.
    """

    models: dict[int, Model] = field(default_factory=dict)
    members: dict[str, dict[int, float]] = field(default_factory=dict)
    online: dict[str, bool] = field(default_factory=dict)
    next_id: int = 0
    heirs: dict[int, list[int]] = field(default_factory=dict)

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
        """Set the function that is told of changes, whose `time` and `updates` are still 0 then."""
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
        """Return whether a client is the only one of its cluster, online or not."""
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

    def continuations(self, cluster: int) -> list[int]:
        """Return the clusters whose models continue that of one, which may be gone.

        Their versions count on from its own. None where its model was given up, or became part of
        a mean.
        """
        if cluster in self.models:
            return [cluster]
        return [kept for heir in self.heirs.get(cluster, ()) for kept in self.continuations(heir)]

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
        """Place a client in a cluster, or in several; it leaves those that it was in.

        The first placement of a client is reported as `ASSIGN`, all others as `MOVE`.

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
            Id of the cluster, which exists no longer afterwards.
        parts : Iterable of Sequence[str]
            The client ids of each part; no client may be in two.
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
        self.heirs[parent] = children
        self._place(moved)
        self._changed(ClusterChange.SPLIT, moved, (parent,), tuple(children), score, threshold)
        return children

    def merge(
        self,
        sources: Sequence[int],
        model: Model | None = None,
        score: float = math.nan,
        threshold: float = math.nan,
        *,
        keep: int | None = None,
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
        keep : int, optional
            The source whose model the new cluster has, instead.

        Raises
        ------
        ValueError
            There are not two different clusters to merge, or one does not exist.
        """
        unknown = [cluster for cluster in sources if cluster not in self.models]
        if unknown or len(set(sources)) < 2 or len(set(sources)) != len(sources):
            raise ValueError(f"a merge needs at least two clusters that exist, got {sources}")
        if keep is not None:
            model = self.models[keep].copy()
        elif model is None:
            model = self._mean_model(sources)
        for cluster in sources:
            del self.models[cluster]
        target = self._add(model)
        if keep is not None:
            self.heirs[keep] = [target]
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
        """Give a cluster up that serves no client any more.

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
    """Return the members of each part, in order of the labels from 0."""
    count = int(labels.max()) + 1
    return [
        [client for client, label in zip(members, labels, strict=True) if label == part]
        for part in range(count)
    ]
