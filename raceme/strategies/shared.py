"""Parts of methods of several families: steps, decay, splits, regrouping, label counts, queries."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters, Matrix, Model
from raceme.core.errors import UserError, about, plural
from raceme.core.files import check_memory
from raceme.core.messages import ALL_EXAMPLES, LABEL_COUNTS, ModelSpec, Vector, count_of
from raceme.core.options import option
from raceme.core.requests import (
    Answer,
    InFlight,
    InvalidReplyError,
    Outcomes,
    Request,
    Update,
)
from raceme.core.scheduling import InRounds, Scheduler, SelectionContext
from raceme.core.strategy import Method, average_by_cluster

log = getLogger("raceme")

_TRIES = 3
"""Maximum number of queries to an unresponsive client."""

# -----------------------------------------------------------------------------
# Server steps: changes of weights, with statistics averaged.
#
# Methods with own step sizes (cache corrections, adaptive optimisers) must not apply them to the
# running mean and variance of batch normalisation, as an extrapolated variance may be negative. For
# these a step takes the clients' mean.
# -----------------------------------------------------------------------------


Mask = NDArray[np.bool_]


def contribution(delta: Vector, vector: Vector, weights: Mask | None) -> Vector:
    """Return Δ_i, with statistics and counters of the client's model.

    Parameters
    ----------
    delta, vector : Vector
        Δ_i or another change, and w_i. Shape (d,).
    weights : NDArray[np.bool_] or None
        Mask of the weights, shape (d,); None if all are.
    """
    return delta if weights is None else np.where(weights, delta, vector)


def only_weights(vector: Vector, weights: Mask | None) -> Vector:
    """Return a vector with statistics and counters set to zero. Shape (d,)."""
    return vector if weights is None else np.where(weights, vector, np.float32(0.0))


def by_examples(update: Update) -> float:
    """Return the weight of an update in a mean by examples."""
    return float(update.num_examples)


def stepped(
    vector: Vector, step: NDArray[np.floating], mean: NDArray[np.floating], weights: Mask | None
) -> Vector:
    """Return a model after a step, w + step, with statistics and counters of a mean.

    Parameters
    ----------
    vector : Vector
        w: the model before the step. Shape (d,).
    step : NDArray
        Change of the weights. Shape (d,).
    mean : NDArray
        Mean of contributions. Shape (d,).
    weights : NDArray[np.bool_] or None
        Mask of the weights; None if all are. Shape (d,).
    """
    moved = vector + step
    return np.asarray(moved if weights is None else np.where(weights, moved, mean), np.float32)


# -----------------------------------------------------------------------------
# Decay functions of the methods.
# -----------------------------------------------------------------------------


def omega(t: int, kappa: float) -> float:
    """Return Ω(t) = (e / 2.8)^(κ t), CASA's slow decay over asynchronous rounds (section 4.2)."""
    return float((math.e / 2.8) ** (kappa * t))


def cluster_decay(size: int, omega_t: float, alpha0: float) -> float:
    """Return α_c,k = α0 · Ω(t) / log2(|C_k| + 3), CASA's eq (6).

    The logarithm is base 2: the paper adds 3 so that α < 1, which holds for base 2 only, and
    log2(103) gives the 0.3 of all its asynchronous baselines.

    Parameters
    ----------
    size : int
        Clients in the cluster, |C_k|.
    omega_t : float
        Ω(t): decay with the number t of updates, see :func:`omega`.
    alpha0 : float
        α0: factor of the share, the same for all clusters.
    """
    return alpha0 * omega_t / math.log2(size + 3)


def staleness_bound(size: int, omega_t: float) -> float:
    """Return r_c,k = |C_k| · (2 − Ω(t)), CASA's eq (8): the staleness that is not penalised."""
    return size * (2.0 - omega_t)


def client_decay(alpha_c: float, staleness: int, bound: float) -> float:
    """Return α_i, CASA's eq (7): α_c up to the bound r_c, α_c / √τ beyond."""
    return alpha_c if staleness <= bound else alpha_c / math.sqrt(staleness)


def staleness_factor(function: str, staleness: int, a: float, b: float) -> float:
    """Return s(τ) of FedAsync (Xie et al. 2019, section 5.2).

    Parameters
    ----------
    function : {"constant", "hinge", "polynomial"}
        constant: 1. hinge: 1 up to τ = b, then 1 / (a (τ − b) + 1). polynomial: (τ + 1)^(−a).
    staleness : int
        τ, in versions of the model.
    a, b : float
        Slope or exponent, and the hinge's threshold.
    """
    if function == "constant":
        return 1.0
    if function == "hinge":
        return 1.0 if staleness <= b else 1.0 / (a * (staleness - b) + 1.0)
    return float((staleness + 1) ** -a)


@dataclass(frozen=True)
class StalenessParameters:
    """Staleness decay of an update; the defaults are those of CASA's paper."""

    decay: str = option("hinge", "staleness function s", among=("constant", "hinge", "polynomial"))
    a: float = option(1.0, "slope of the hinge, exponent of the polynomial", low=0)
    b: float = option(4.0, "staleness up to which the hinge does nothing", low=0)

    def decay_of(self, staleness: int) -> float:
        """Return s(τ), by which an update of staleness τ is scaled."""
        return staleness_factor(self.decay, staleness, self.a, self.b)


# -----------------------------------------------------------------------------
# Splits of clusters: eigengaps of the Laplacian, spectral clustering.
# -----------------------------------------------------------------------------


_LARGE = 300
"""Size from which computing only the first eigenvalues is faster."""
_RESTARTS = 100
"""Restarts of Lanczos before falling back to all eigenvalues."""
_SHUFFLES = 10
_EIGENVALUES = 10
"""Number of smallest eigenvalues considered."""


@dataclass(frozen=True)
class Gap:
    """The largest eigengap of a cluster.

    Attributes
    ----------
    parts : int
        R: suggested number of parts.
    size : float
        Width of the gap, λ_{R+1} − λ_R.
    """

    parts: int
    size: float


def affinity(similarity: NDArray[np.floating]) -> Matrix:
    """Return a similarity matrix as edge weights: symmetric float64, negative ones as 0.

    Cosines of whole weight vectors are positive in practice; negative ones count as missing edges
    (our reading).
    """
    weights: Matrix = np.maximum(similarity, 0.0, dtype=np.float64)
    return weights


def laplacian(weights: Matrix) -> Matrix:
    """Return L = I − D^(−1/2) S D^(−1/2), CASA's eq (12), with D the row sums of S.

    Parameters
    ----------
    weights : Matrix
        S: similarities inside a cluster, symmetric, not negative, diagonal 1. Shape (m, m).
    """
    scale = _scale(weights)
    return np.asarray(np.eye(len(weights)) - weights * scale[:, None] * scale[None, :])


def largest_gap(weights: Matrix) -> Gap | None:
    """Return R = argmax over k ≥ 2 of λ_{k+1} − λ_k, CASA's eq (13), among the first eigenvalues.

    k = 1 is left out: with dense positive similarities the first gap is always the largest.

    Returns
    -------
    Gap or None
        None for fewer than three clients.
    """
    count = min(_EIGENVALUES, len(weights))
    if count < 3:
        return None
    # Imported late, like scikit-learn below, as most methods need neither.
    from scipy.linalg import eigh
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    if len(weights) < _LARGE:
        values = eigh(laplacian(weights), eigvals_only=True, driver="ev")[:count]
    else:
        # The smallest eigenvalues of L are the largest of I − L, which Lanczos finds without
        # factorisation or a second matrix; a fixed start makes it reproducible.
        scale = _scale(weights)
        shifted = LinearOperator(
            weights.shape, matvec=lambda x: scale * (weights @ (scale * x)), dtype=np.float64
        )
        start = np.random.default_rng(0).normal(size=len(weights))
        how = {"which": "LA", "v0": start, "return_eigenvectors": False, "maxiter": _RESTARTS}
        try:
            values = np.sort(1.0 - eigsh(shifted, k=count, **how))
        except ArpackNoConvergence:
            # For nearly equal clients the eigenvalues coincide, and Lanczos does not converge.
            only = (0, count - 1)
            values = eigh(laplacian(weights), eigvals_only=True, subset_by_index=only)
    gaps = np.diff(values)[1:]
    best = int(np.argmax(gaps))
    return Gap(parts=best + 2, size=float(gaps[best]))


def noise_gap(weights: Matrix, rng: np.random.Generator) -> float:
    """Return the largest eigengap of the similarities without structure.

    The largest gap over several random permutations of the pairs: Horn's parallel analysis
    (Psychometrika 1965).
    """
    pairs = np.triu_indices(len(weights), k=1)
    largest = 0.0
    for _ in range(_SHUFFLES):
        shuffled = np.eye(len(weights))
        shuffled[pairs] = rng.permutation(weights[pairs])
        gap = largest_gap(np.maximum(shuffled, shuffled.T))
        largest = max(largest, gap.size if gap else 0.0)
    return largest


def _scale(weights: Matrix) -> NDArray[np.float64]:
    """Return the diagonal of D^(−1/2), with D the row sums of the affinities."""
    return np.asarray(1.0 / np.sqrt(weights.sum(axis=1)))


def should_split(alpha_c: float, gap: float, gamma: float) -> bool:
    """Return whether α_c,k < (λ_{R+1} − λ_R)^γ, CASA's eq (14).

    γ is an exponent: gaps lie between 1e-4 and 1e-3, and 0.0008^0.15 = 0.34 is comparable to α.
    """
    return bool(alpha_c < max(gap, 0.0) ** gamma)


def partition(weights: Matrix, parts: int, seed: int) -> NDArray[np.int64]:
    """Split clients by spectral clustering on their similarities.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … parts − 1 per client, numbered in order of first appearance. Shape (m,).
    """
    if parts == len(weights):
        # scikit-learn warns of fewer eigenvectors than usual.
        return np.arange(parts)
    from sklearn.cluster import SpectralClustering

    method = SpectralClustering(n_clusters=parts, affinity="precomputed", random_state=seed)
    with warnings.catch_warnings():
        # Unrelated groups of clients are expected here.
        warnings.filterwarnings("ignore", "Graph is not fully connected")
        return numbered(method.fit_predict(weights))


def numbered(labels: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return labels numbered in order of first appearance: 2, 0, 2, 1 becomes 0, 1, 0, 2."""
    _, first, where = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[where])


# -----------------------------------------------------------------------------
# Dividing clients by update directions: CFL's criterion and linkage.
#
# Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
# under Privacy Constraints", 2020, sections III and IV.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Norms:
    """Norms of the updates Δ_i of a cluster.

    Attributes
    ----------
    mean : float
        ‖Σ n_i Δ_i / Σ n_i‖: small when the cluster as a whole has converged.
    largest : float
        max ‖Δ_i‖: large while some client still changes the model.
    """

    mean: float
    largest: float


def norms_of(deltas: NDArray[np.float32], examples: NDArray[np.integer]) -> Norms:
    """Measure the updates of a cluster.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        Δ_i, one row per client. Shape (m, d).
    examples : NDArray[np.integer]
        n_i: number of training examples of each client. Shape (m,).
    """
    shares = examples / examples.sum()
    mean = float(np.linalg.norm(shares @ deltas))
    return Norms(mean, float(np.linalg.norm(deltas, axis=1).max()))


def should_bipartition(norms: Norms, eps1: float, eps2: float) -> bool:
    """Return whether ‖mean Δ‖ < ε1 and max ‖Δ_i‖ > ε2: converged as a whole, but not per client."""
    return norms.mean < eps1 and norms.largest > eps2


LINKAGES = ("complete", "single")
"""Distances of two sets of clients; see `linkage`."""


def linkage(
    distances: NDArray[np.floating],
    parts: int | None,
    how: str = "complete",
    below: float | None = None,
) -> NDArray[np.int64]:
    """Divide clients by agglomerative clustering.

    With distances 1 − cos and two parts, single linkage minimises the largest similarity across the
    parts, as in CFL's paper; complete linkage, which keeps parts compact, is used in the authors'
    code.

    Parameters
    ----------
    distances : NDArray[np.floating]
        Symmetric, finite. Shape (m, m), m at least 2.
    parts : int or None
        Number of parts, at most m; None to use `below`.
    how : str
        One of `LINKAGES`: distance of the farthest or nearest clients of two sets.
    below : float, optional
        Distance from which sets stay separate, instead of a number of parts.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … parts − 1 per client, numbered in order of first appearance. Shape (m,).
    """
    from sklearn.cluster import AgglomerativeClustering

    method = AgglomerativeClustering(
        n_clusters=parts, metric="precomputed", linkage=how, distance_threshold=below
    )
    return numbered(method.fit_predict(distances))


# -----------------------------------------------------------------------------
# Number and first models of the clusters of methods with a given K.
# -----------------------------------------------------------------------------


DEFAULT_K = 4
"""Default number of models or groups of methods that need a number: that of the default fleet's
groups."""
_NOISE = 0.01
"""Standard deviation of the weights of further models if the initial one has only equal weights."""


def log_count(method: Method, count: int, reason: str) -> None:
    """Log the number of models or groups of a run, and the option or samples that determine it."""
    getLogger("raceme.run").info("%s takes K = %d (%s).", type(method).__name__, count, reason)


def models_of(method: Method, stated: int | None) -> tuple[int, str]:
    """Return K and its reason: the stated number, that of pre-trained models, or `DEFAULT_K`."""
    if stated is None and method.starts:
        return len(method.starts), "pre-trained models"
    return stated or DEFAULT_K, "k"


def start_clusters(
    method: Method, vector: Vector, count: int, reason: str, alike: bool = False
) -> Clusters:
    """Return K clusters with pre-trained models if there are any, else equal or different ones."""
    starts = method.starts
    if starts and len(starts) != count:
        raise UserError(
            f"pretrain makes a model for each group of the data, here {len(starts)}, which do not "
            f"fit {plural(count, 'cluster')}."
        )
    if not (starts or alike):
        return different_models(method, vector, count)
    log_count(method, count, reason)
    return Clusters({k: Model((starts[k] if starts else vector).copy()) for k in range(count)})


def different_models(method: Method, vector: Vector, count: int) -> Clusters:
    """Return K clusters with different models; the first is the initial model itself."""
    log_count(method, count, "k")
    check_memory(count * vector.nbytes, f"{plural(count, 'model')} of {vector.size:,} weights")
    spec, rng = method._spec, method.rng
    vectors = [vector, *(redrawn(vector, spec, rng) for _ in range(1, count))]
    return Clusters({cluster: Model(start) for cluster, start in enumerate(vectors)})


def redrawn(vector: Vector, spec: ModelSpec | None, rng: np.random.Generator) -> Vector:
    """Return another initial model: the weights permuted within each array.

    Our reading of "different initialisations": another draw from the same distribution per layer,
    without knowing the network. A model of equal weights, such as zeros, gets noise instead.
    """
    drawn = vector.copy()
    arrays = [drawn] if spec is None else spec.views(drawn).values()
    for values in arrays:
        flat = values.reshape(-1)
        flat[...] = rng.permutation(flat)
    if np.array_equal(drawn, vector):
        noise = rng.normal(0.0, _NOISE, len(drawn)).astype(np.float32)
        drawn += only_weights(noise, None if spec is None else spec.trainable)
    return drawn


# -----------------------------------------------------------------------------
# Groups of clients, and their matching with current clusters.
# -----------------------------------------------------------------------------


def check_groups(count: int, clients: int, what: str = "groups") -> None:
    """Raise UserError if there are more groups than clients."""
    if count > clients:
        raise UserError(
            f"{count} {what} cannot be made of {plural(clients, 'client')}: take fewer {what}, or "
            "more clients."
        )


def kept_homes(
    clients: Sequence[str], labels: NDArray[np.integer], homes: Mapping[str, int]
) -> dict[int, int]:
    """Return the clusters of labels, so that most clients keep theirs.

    Labels are matched one to one with the clients' clusters (Hungarian method); labels without
    common clients are left out.

    Parameters
    ----------
    clients : Sequence[str]
        The clients that were grouped.
    labels : NDArray[np.integer]
        Label of each of them, from 0. Shape (n,).
    homes : Mapping[str, int]
        Cluster of the clients that have one.
    """
    from scipy.optimize import linear_sum_assignment

    clusters = sorted(set(homes.values()))
    common = np.zeros((int(labels.max()) + 1, len(clusters)), np.int64)
    for client, label in zip(clients, labels, strict=True):
        if client in homes:
            common[label, clusters.index(homes[client])] += 1
    rows, columns = linear_sum_assignment(-common)
    return {
        int(row): clusters[column]
        for row, column in zip(rows, columns, strict=True)
        if common[row, column]
    }


def regroup(clusters: Clusters, clients: Sequence[str], labels: NDArray[np.integer]) -> None:
    """Move clients into new groups; add clusters, and remove empty ones.

    A new cluster starts with the model of most of its clients' former cluster, or of the largest.

    Parameters
    ----------
    clusters : Clusters
        The clusters, changed in place.
    clients : Sequence[str]
        The clients that were grouped.
    labels : NDArray[np.integer]
        Label of each of them, from 0. Shape (n,).
    """
    homes = {client: clusters.main(client) for client in clients if clusters.is_placed(client)}
    kept = kept_homes(clients, labels, homes)
    for label in range(int(labels.max()) + 1):
        own = [client for client, other in zip(clients, labels, strict=True) if other == label]
        if not own:
            continue
        if label in kept:
            for client in own:
                clusters.assign(client, kept[label])
            continue
        origins = Counter(homes[client] for client in own if client in homes)
        origin = origins.most_common(1)[0][0] if origins else clusters.largest()
        clusters.found(clusters.models[origin].copy(), own)
    for cluster in list(clusters.models):
        if len(clusters.models) > 1 and not clusters.clients(cluster, online_only=False):
            clusters.retire(cluster)


def kmeans(points: NDArray[np.floating], groups: int, seed: int) -> NDArray[np.int64]:
    """Return labels of points, shape (n, c), by k-means++; of fewer groups if fewer points differ.

    They are numbered in order of first appearance. Shape (n,).
    """
    from sklearn.cluster import KMeans

    # scikit-learn warns of more groups than points that differ.
    count = min(groups, len(np.unique(points, axis=0)))
    return numbered(KMeans(count, n_init=10, random_state=seed).fit_predict(points))


def drop_unusual(found: dict[str, NDArray[Any]], difference: str) -> None:
    """Drop clients whose arrays do not have the most frequent length, with a warning."""
    usual, _ = Counter(map(len, found.values())).most_common(1)[0]
    for client in [client for client, own in found.items() if len(own) != usual]:
        log.warning("%s is left out: %s.", client, difference, extra=about(client))
        del found[client]


# -----------------------------------------------------------------------------
# Label counts: detection of changed data.
#
# Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
# TPDS 2022, section 3.4.
# -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class LabelCounts:
    """Label counts per client, and clients whose counts changed too much.

    Attributes
    ----------
    cold : dict[str, bool]
        Clients to place: without a group or with changed data.
    counts : dict[str, list[int]]
        Each client's last stated training samples per label.
    placed_with : dict[str, list[int]]
        Label counts at placement.
    unanswered : dict[str, int]
        Consecutive unanswered queries per client.
    """

    cold: dict[str, bool] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    placed_with: dict[str, list[int]] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)

    def settle(self, client: str) -> None:
        """Record a client's placement with its current data."""
        self.cold.pop(client, None)
        if client in self.counts:
            self.placed_with[client] = self.counts[client]

    def answers(self, client: str) -> bool:
        """Return whether to query a client for label counts."""
        return self.unanswered.get(client, 0) < _TRIES

    def ask(self, client: str) -> None:
        """Record a query of a client."""
        self.unanswered[client] = self.unanswered.get(client, 0) + 1

    def usual_labels(self, client: str, labels: int) -> int:
        """Return the expected number of labels of a client's counts.

        The majority's number. The first client does not decide: a deviating or lying device would
        exclude all others.
        """
        first, known = next(iter(self.counts.items()), ("", []))
        # Usually true, which avoids scanning a large fleet.
        if first != client and len(known) == labels:
            return labels
        lengths = Counter(len(told) for other, told in self.counts.items() if other != client)
        usual, clients = lengths.most_common(1)[0] if lengths else (labels, 0)
        return usual if clients > lengths[labels] + 1 else labels

    def take(self, answer: Answer, stated: int, tolerance: float, distance: str = "counts") -> None:
        """Process label counts.

        Parameters
        ----------
        stated : int
            Number of training samples in the client's greeting.
        tolerance : float
            Share of the data that may come or go.
        distance : str
            Distance of label counts, one of `DISTANCES`.

        Raises
        ------
        InvalidReplyError
            They are invalid or have another number of labels.
        """
        client = answer.task.client
        counts = answer.numbers.get(LABEL_COUNTS)
        if counts is None or counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu":
            raise InvalidReplyError("it brings no label counts")
        if counts.min() < 0 or not counts.any():
            raise InvalidReplyError("its label counts are negative or all 0")
        labels = self.usual_labels(client, len(counts))
        if len(counts) != labels:
            raise InvalidReplyError(
                f"it counts {plural(len(counts), 'label')}, and others {labels}"
            )
        if answer.num_examples and int(counts.sum()) != answer.num_examples:
            total = int(counts.sum())
            raise InvalidReplyError(
                f"it counts {plural(total, 'label')} of {answer.num_examples} examples"
            )
        # n_i of eq (9): all samples of the client, released or not.
        examples = max(stated, count_of(answer.metrics.get(ALL_EXAMPLES)) or 0)
        self.count(client, counts.tolist(), examples, tolerance, distance)

    def count(
        self,
        client: str,
        counts: Sequence[int],
        examples: int,
        tolerance: float,
        distance: str = "counts",
    ) -> None:
        """Record a client's label counts; it becomes cold if they changed too much.

        Parameters
        ----------
        counts : Sequence[int]
            Training samples per label, now.
        examples : int
            n_i: number of training samples, including unreleased ones.
        tolerance : float
            Share of the data that may come or go.
        """
        self.unanswered.pop(client, None)
        self.counts[client] = list(counts)
        if client in self.cold:
            return
        then = self.placed_with.setdefault(client, self.counts[client])
        if len(then) != len(counts) or has_shifted(counts, then, examples, tolerance, distance):
            self.cold[client] = True


DISTANCES = ("counts", "wasserstein")
"""Distances of label counts; see `has_shifted`."""


def has_shifted(
    now: Sequence[int],
    then: Sequence[int],
    examples: int,
    tolerance: float = 0.2,
    distance: str = "counts",
) -> bool:
    """Return whether label counts moved further than τ_i = tolerance / LabelSize · n_i, eq (9).

    A tolerance of 0.2 is exceeded by the mean difference if more than a fifth of the samples were
    added or removed, or more than a tenth replaced by other labels, which counts twice.

    Parameters
    ----------
    now, then : Sequence[int]
        Samples per label. Shape (labels,).
    examples : int
        n_i: number of all training samples of the client, as in the authors' code.
    tolerance : float
        Share of n_i that may come or go; the paper's value is 0.2.
    distance : str
        ``"counts"``: the mean over the labels of ``|count now − count then|``. ``"wasserstein"``:
        scipy's Wasserstein distance of the two sets of counts, as in the authors' code, for which
        labels with equal counts are exchangeable.
    """
    if distance == "wasserstein":
        from scipy.stats import wasserstein_distance

        moved = float(wasserstein_distance(now, then))
    else:
        moved = float(np.abs(np.asarray(now, np.int64) - np.asarray(then, np.int64)).mean())
    return moved > tolerance / len(now) * examples


# -----------------------------------------------------------------------------
# Rounds of averaging in clusters, preceded by queries about clients' data.
# -----------------------------------------------------------------------------


class AveragingRounds(Method):
    """A method in rounds that averages in each cluster."""

    def scheduler(self) -> Scheduler:
        """Work in rounds, with queries before them if the method has any."""
        return InRounds(
            self.parameters.fraction, sampling=self.parameters.sampling, queries=self._queries
        )

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the current queries; None if the next round may begin."""
        return None

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Average inside each cluster."""
        return average_by_cluster(self.clusters, updates)


@dataclass
class QueryState:
    """State of a method's queries.

    Attributes
    ----------
    asked : dict[str, int]
        Number of queries per client, reset by `on_answer`.
    """

    asked: dict[str, int] = field(default_factory=dict)


class QueriesFirst(AveragingRounds):
    """A method with queries before some rounds, repeated for unresponsive clients."""

    state: QueryState

    @abstractmethod
    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the current queries; None if the next round may begin."""

    def _has_tries(self, client: str) -> bool:
        """Return whether to query an unresponsive client again."""
        return self.state.asked.get(client, 0) < _TRIES

    def on_sent(self, task: InFlight) -> None:
        """Record the queried client."""
        if task.kind in self.needs.kinds:
            self.state.asked[task.client] = self.state.asked.get(task.client, 0) + 1
