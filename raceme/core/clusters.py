"""Clusters with models and members, and operations on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from raceme.core.events import ClusterChange, ClustersChanged, ignore
from raceme.core.messages import Vector

# -----------------------------------------------------------------------------
# Models on the server.
# -----------------------------------------------------------------------------


_BLOCK = 1 << 16
"""Elements that are mixed per block, so that a block fits into a core's cache."""


class NonFiniteModelError(ValueError):
    """A change would make a model non-finite; the model is unchanged."""


@dataclass(frozen=True, eq=False)
class Model:
    """A versioned model on the server, changed only by its own operations.

    Attributes
    ----------
    vector : Vector
        The flat weights, read-only. A new model takes over its array.
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
        """Return a copy with the same version."""
        return Model(self.vector.copy(), self.version)

    def mix(self, w_i: Vector, alpha: float, where: np.ndarray | None = None) -> None:
        """Mix an update in: w ← α w_i + (1 − α) w.

        Computed as w + α (w_i − w), block by block, in one pass over memory without a temporary
        array of the model's size. Since α is at most 1, the result stays within the bound on
        numbers that :meth:`raceme.core.messages.ModelSpec.unpack` enforces.

        Parameters
        ----------
        w_i : Vector
            The client's model. Shape (d,).
        alpha : float
            Its share α in the new model, in [0, 1].
        where : NDArray[np.bool_], optional
            Mask of the weights to mix. Shape (d,).

        Raises
        ------
        ValueError
            α is out of range.
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
        """Add a step: w ← w + step.

        Raises
        ------
        NonFiniteModelError
            The result is not finite.
        """
        self.replace(self.vector + step)

    def replace(self, vector: Vector) -> None:
        """Replace the weights: w ← vector.

        Raises
        ------
        NonFiniteModelError
            The weights are not finite.
        """
        self._set(vector)
        self._next()

    def average(self, vectors: Sequence[Vector], weights: Sequence[float]) -> None:
        """Set the weighted mean of clients' models."""
        shares = np.asarray(weights, np.float64) / sum(weights)
        self.replace(np.asarray(shares @ np.stack(vectors)))

    def copy_from(self, w_i: Vector, where: np.ndarray) -> None:
        """Copy some elements instead of averaging them, e.g. counters.

        Part of the last change, without a new version.
        """
        self._numbers[where] = w_i[where]

    def amend(self, step: Vector) -> None:
        """Add a step to the last change, without a new version.

        Raises
        ------
        NonFiniteModelError
            The result is not finite.
        """
        self._set(self.vector + step)

    def _set(self, vector: Vector) -> None:
        _check_finite(vector)
        self._numbers[...] = vector


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
_Float = TypeVar("_Float", bound=np.floating)


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 for a zero vector."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0


def unit(vector: Vector) -> Vector:
    """Return a vector at unit length; a zero vector is unchanged."""
    length = np.float32(np.linalg.norm(vector)) or np.float32(1.0)
    return np.asarray(vector / length)


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Matrix:
    """Return the cosines between the rows of two matrices; 0 for zero rows.

    Parameters
    ----------
    first, second : NDArray[np.floating]
        Shapes (a, d) and (b, d).

    Returns
    -------
    Matrix
        Shape (a, b), within [-1, 1].
    """
    products: Matrix = np.asarray(unit_rows(first) @ unit_rows(second).T, np.float64)
    return np.clip(products, -1.0, 1.0, out=products)


def unit_rows(rows: NDArray[_Float]) -> NDArray[_Float]:
    """Return rows at unit length; zero rows are unchanged."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))


# -----------------------------------------------------------------------------
# Clusters with models and members, and operations on them.
# -----------------------------------------------------------------------------


Weights = Mapping[int, float]
"""Cluster weights of a client: positive, sum 1."""
Placement = int | Weights
"""A cluster, or several with weights."""
Report = Callable[[ClustersChanged], None]

_TOLERANCE = 1e-6


@dataclass
class Clusters:
    """The clusters with their models and members.

    Every operation that changes a placement makes one report. Unplaced clients are served by the
    largest cluster.

    Attributes
    ----------
    models : dict[int, Model]
        The model of each cluster.
    members : dict[str, dict[int, float]]
        Cluster weights of each client that ever joined; empty if unplaced.
    online : dict[str, bool]
        Whether each client is online.
    next_id : int
        Id of the next new cluster; ids are never reused.
    heirs : dict[int, list[int]]
        Successors of removed clusters: the parts of a split, or the result of a merge that kept the
        cluster's model. A merge into a mean of models is no successor.
    """

    models: dict[int, Model] = field(default_factory=dict)
    members: dict[str, dict[int, float]] = field(default_factory=dict)
    online: dict[str, bool] = field(default_factory=dict)
    next_id: int = 0
    heirs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_id = max([self.next_id, *(cluster + 1 for cluster in self.models)])
        self._report: Report = ignore
        # Cached per change, as it is needed before every task of unplaced clients.
        self._largest: int | None = None
        # Derived: numbers of clients per cluster, in total and online.
        self._served: Counter[int] = Counter()
        self._present: Counter[int] = Counter()
        self._has_mixtures = False
        # Shared by all members of a cluster: placements are replaced, never modified.
        self._whole: dict[int, dict[int, float]] = {}
        for client in self.members:
            self._count(client, 1)

    def report_to(self, report: Report) -> None:
        """Set the receiver of `ClustersChanged` events; their `time` and `updates` are 0."""
        self._report = report

    # Queries.

    def of(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self.members.get(client) or {self.largest(): 1.0}

    def main(self, client: str) -> int:
        """Return the cluster with a client's largest weight, the first at ties."""
        weights = self.members.get(client)
        if not weights:
            return self.largest()
        if len(weights) == 1:
            return next(iter(weights))
        return max(weights, key=lambda cluster: weights[cluster])

    def is_placed(self, client: str) -> bool:
        """Return whether a client has a cluster."""
        return bool(self.members.get(client))

    def home(self, client: str) -> int | None:
        """Return the cluster with a client's largest weight; None if it has no cluster."""
        return self.main(client) if self.is_placed(client) else None

    def is_alone(self, client: str) -> bool:
        """Return whether a client is the only member of its cluster, online or not."""
        return self.is_placed(client) and self.size(self.main(client), online_only=False) == 1

    def clients(self, cluster: int, online_only: bool = True) -> list[str]:
        """Return the clients of a cluster, in order of joining."""
        return [
            client
            for client, weights in self.members.items()
            if cluster in weights and (self.online[client] or not online_only)
        ]

    def size(self, cluster: int, online_only: bool = True) -> int:
        """Return the number of :meth:`clients` from counters."""
        return (self._present if online_only else self._served)[cluster]

    def largest(self) -> int:
        """Return the cluster with the most online clients by weight, the first at ties."""
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
        """Return the successors of a possibly removed cluster.

        Their versions continue its own. Empty if its model was dropped or averaged.
        """
        if cluster in self.models:
            return [cluster]
        return [kept for heir in self.heirs.get(cluster, ()) for kept in self.continuations(heir)]

    # Changes.

    def join(self, client: str) -> None:
        """Add a client: to the only cluster, unplaced, or back to its own."""
        self._set_online(client, True)
        self._largest = None
        if client not in self.members:
            self.members[client] = {}
            if len(self.models) == 1:
                self.assign(client, next(iter(self.models)))

    def leave(self, client: str) -> None:
        """Mark a client as offline; it keeps its clusters."""
        self._set_online(client, False)
        self._largest = None

    def assign(self, client: str, placement: Placement) -> None:
        """Place a client in one or several clusters instead of its former ones.

        A client's first placement is reported as `ASSIGN`, others as `MOVE`.

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
        """Remove clients from their clusters; the largest serves them until placed."""
        released = [client for client in clients if self.members.get(client)]
        self._place({client: {} for client in released})
        if released:
            self._changed(ClusterChange.MOVE, {client: {} for client in released})

    def found(self, model: Model, clients: Iterable[str] = ()) -> int:
        """Add a cluster with some clients; return its id."""
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

        Absent members in no part become unplaced.

        Parameters
        ----------
        parent : int
            Id of the cluster, which is removed.
        parts : Iterable of Sequence[str]
            Disjoint client ids of each part.
        score, threshold : float
            Measured value and passed bound.
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
            The new cluster's model; by default the mean of the sources', weighted by members.
        score, threshold : float
            Measured value and passed bound.
        keep : int, optional
            The source whose model is kept instead.

        Raises
        ------
        ValueError
            There are fewer than two different clusters, or one does not exist.
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
        """Remove a cluster without members.

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

    # Helpers.

    def _place(self, moved: Mapping[str, dict[int, float]]) -> None:
        """Store placements; unknown clients count as online."""
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
        """Add or subtract a client in the counters of its clusters."""
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
        for cluster in gone:
            for known in (self._served, self._present, self._whole):
                known.pop(cluster, None)
        told = {client: dict(weights) for client, weights in memberships.items()}
        self._report(ClustersChanged(0.0, 0, change, told, gone, made, score, threshold))


def _renamed(weights: Weights, old: int, new: int) -> dict[int, float]:
    return {new if cluster == old else cluster: weight for cluster, weight in weights.items()}


def blended(models: Mapping[int, Model], weights: Weights) -> Vector:
    """Return Σ_k α_k w_k, the model of a client of several clusters. Shape (d,)."""
    vector = np.zeros_like(next(iter(models.values())).vector)
    for cluster, weight in weights.items():
        vector += np.float32(weight) * models[cluster].vector
    return vector


def nearest(vector: Vector, groups: Mapping[int, Sequence[Vector]]) -> dict[int, float]:
    """Return the mean cosine of a vector with each non-empty group."""
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
