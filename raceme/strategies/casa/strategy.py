"""CASA: clustered federated learning with asynchronous clients.

Liu et al., "CASA: Clustered Federated Learning with Asynchronous Clients", KDD 2024. One
asynchronous round t is one update received. For each, in the order of the paper's Algorithm 1:
a newcomer is given a cluster (eq 15); the C-phase compares the update with the models buffered for
its client (eq 10), splits the cluster if an eigengap says so (eqs 12-14, Algorithm 3) and buffers
the update for others (Algorithm 2); the A-phase mixes it into the cluster's model (eqs 6-9).

This compares every client with every other. In a fleet larger than `exact-up-to`, that many random
clients are *landmarks*: only they are compared pairwise, and in a split the others follow their
nearest landmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import COMPUTE_SCALE, MASK, Vector
from raceme.core.options import option, with_defaults
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.core.strategy import Method, Needs, Variant
from raceme.strategies import shared as spectral
from raceme.strategies.casa.buffers import (
    Code,
    Encoder,
    Landmarks,
    ModelBuffers,
    Sketches,
    SplitWatch,
    WholeModels,
    comparable,
    shortener,
    since,
)
from raceme.strategies.shared import Mask, client_decay, cluster_decay, omega, staleness_bound

log = getLogger("raceme")

_UNASSIGNED = -1
_LOG_GAP = math.log(0.02)
"""Logarithm of an eigengap that is rarely reached; the paper's gaps are between 1e-4 and 1e-3. On
the digits in four label groups, ten clients, which need a gap of 0.016, are split; eight clients,
which need 0.024, are not."""
_MOST = 100_000
"""Largest number of clients that the warning about small fleets considers."""


GAP = MeasureSchema(
    "gap",
    "largest eigengap of a cluster",
    ("cluster", "gap", "needed"),
    value="gap",
    summary="none",
    figure="points",
)
"""One event per computation of a cluster's eigengaps, with the gap beyond which it is split."""
SPLITS = MeasureSchema("splits", "splits", ("explanation",), summary="last", figure="none")
"""Reason for the number of clusters."""


@dataclass(frozen=True)
class CASAParameters:
    """Hyper-parameters of CASA; the defaults are the paper's."""

    alpha0: float = option(2.0, "initial decay α0, eq 6", above=0)
    kappa: float = option(0.001, "speed κ of the slow decay Ω(t)", low=0)
    gamma: float = option(0.15, "exponent γ of the eigengap, eq 14", above=0)
    compare: str = option(
        "weights",
        "compare models by weights, or by changes since the received model, for which noise-guard "
        "should be 3",
        among=("weights", "changes"),
    )
    sketch: int = option(0, "compare models by sketches of this size (0: whole models)", low=0)
    budget: int = option(0, "buffer budget M (0: no limit)", low=0)
    budget_counts: str = option(
        "items",
        "the budget counts items of all buffers, or stored models, of which one stands in many "
        "buffers",
        among=("items", "models"),
    )
    gap_range: float = option(0.0, "start gap r_a that is too large (0: r_c)", low=0)
    staleness_unit: str = option(
        "cluster", "τ counts: cluster or global", among=("cluster", "global")
    )
    noise_guard: float = option(0.0, "least gap, in gaps of shuffled similarities (0: any)", low=0)
    missing_pairs: str = option(
        "wait",
        "a cluster with pairs that are not compared yet: wait for them, leave-out clients with "
        "such pairs, or split with a similarity of zero",
        among=("wait", "leave-out", "zero"),
    )
    patience: float = option(
        10.0, "leave-out: updates for each client, t/n, before any client is left out", low=0
    )
    clustering: bool = option(True, "split clusters (false: the ablation CASA-C)")
    bi_level: bool = option(True, "bi-level decay (false: the ablation CASA-D)")
    constant_alpha: float = option(0.3, "α where bi-level is false", above=0, high=1)
    exact_up_to: int = option(
        2000,
        "clients compared pairwise; a larger fleet is represented by so many random ones (0: "
        "compare all)",
        low=0,
    )


@dataclass
class Attempt:
    """A computation of a cluster's eigengaps.

    Attributes
    ----------
    gap : float
        The largest gap; 0 before the first computation.
    needed : float
        α_c^(1/γ): the gap beyond which the cluster is split by eq (14).
    """

    gap: float = 0.0
    needed: float = 1.0


@dataclass
class CASAState:
    """State of CASA besides its clusters. Arrays have spare capacity beyond the n clients.

    The clients here are the landmarks: all clients, up to `exact_up_to`.

    Attributes
    ----------
    reference : Vector
        Weights of the initial model, against which sketches are taken; 0 for changes. Shape (d,).
    round : int
        t: number of updates received so far.
    clients : list[str]
        Client ids; the position of a client is its index i. Length n.
    start : NDArray[np.int64]
        Version of the last received model; with global staleness, the update count then.
    examples : NDArray[np.int64]
        |D_i|: number of training examples. Shape (n,).
    similarity : NDArray[np.float32]
        A: symmetric matrix of cosines, 1 on the diagonal. Shape (n, n).
    computed : NDArray[np.bool_]
        Which pairs of A are known.
    buffers : ModelBuffers
        buf_i: models for comparison with each client.
    landmarks : Landmarks
        Other clients, and their assignment to landmarks.
    watches : dict[int, SplitWatch]
        Bounds of the eigengaps of each cluster since the last computation.
    attempt : Attempt
        The computation since the last split that came nearest to a split.
    alone : int
        Number of clients that were split off alone.
    """

    reference: Vector
    round: int = 0
    clients: list[str] = field(default_factory=list)
    start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    examples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    similarity: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    computed: NDArray[np.bool_] = field(default_factory=lambda: np.empty((0, 0), np.bool_))
    buffers: ModelBuffers = field(default_factory=ModelBuffers)
    landmarks: Landmarks = field(default_factory=Landmarks)
    watches: dict[int, SplitWatch] = field(default_factory=dict)
    attempt: Attempt = field(default_factory=Attempt)
    alone: int = 0

    def add(self, client: str) -> int:
        """Add a client, and return its index."""
        index = len(self.clients)
        self.clients.append(client)
        if index == len(self.start):
            self._grow(max(16, 2 * index))
        return index

    def replace(self, index: int, client: str) -> None:
        """Replace the landmark of an index by a new client."""
        self.landmarks.others[self.clients[index]] = True
        self.clients[index] = client
        self.start[index] = 0
        for matrix, own in ((self.similarity, 1.0), (self.computed, True)):
            matrix[index, :] = matrix[:, index] = 0
            matrix[index, index] = own
        self.buffers.forget(index)

    def likeness(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return A, with NaN for pairs not compared."""
        n = len(self.clients)
        known = np.where(self.computed[:n, :n], self.similarity[:n, :n], np.float32(np.nan))
        return list(self.clients), known

    def _grow(self, capacity: int) -> None:
        """Enlarge all arrays."""
        more = capacity - len(self.start)
        for name in ("start", "examples"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.similarity = np.pad(self.similarity, (0, more))
        self.computed = np.pad(self.computed, (0, more))
        np.fill_diagonal(self.similarity, 1.0)
        np.fill_diagonal(self.computed, True)
        self.buffers.resize(capacity)


class CASA(Method):
    """Asynchronous clustering: bi-level decay, buffered similarity, spectral splits (CASA)."""

    parameters_type = CASAParameters
    state_type = CASAState
    state: CASAState
    parameters: CASAParameters

    @property
    def needs(self) -> Needs:
        """Base models, if changes are compared."""
        return Needs(bases=self._compares_changes)

    @property
    def _compares_changes(self) -> bool:
        return self.parameters.compare == "changes"

    def check(self, clients: int) -> None:
        """Warn of a fleet too small for splits by eq (14)."""
        own = self.parameters
        if not own.clustering or not own.bi_level or clients < 2:
            return

        def log_decay(size: int) -> float:
            return math.log(cluster_decay(size, 1.0, own.alpha0))

        # The least gap that leads to a split, α_c^(1/γ), is at most one that is rarely reached.
        least = next((n for n in range(3, _MOST) if log_decay(n) <= own.gamma * _LOG_GAP), _MOST)
        if clients < least:
            highest = math.floor(100 * log_decay(max(clients, 3)) / _LOG_GAP) / 100
            change = f"Set gamma to at most {highest:g}, take more" if highest > 0 else "Take more"
            getLogger("raceme.run").warning(
                "%d clients are too few for %s, which with gamma=%g tells clusters apart among at "
                "least %d: they may share one model. %s clients, or use --strategy panicle.",
                clients,
                type(self).__name__,
                own.gamma,
                least,
                change if clients > 2 else "Take more",
            )

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.clusters = Clusters({0: Model(vector)})
        reference = since(vector, vector if self._compares_changes else None)
        self.state = self.state_type(reference=self.compared(reference).copy())
        if self.parameters.clustering and not self.parameters.noise_guard and not vector.any():
            # A common start keeps the cosines of networks near 1, and chance gaps below α_c^(1/γ).
            log.warning(
                "The initial model is zero: whole models then have little in common, and %s may "
                "split clients that are alike. Set noise-guard to 2, or start from another model.",
                type(self).__name__,
            )
        self.restored()

    def restored(self) -> None:
        """Derive caches from the state."""
        self._index = {client: index for index, client in enumerate(self.state.clients)}
        capacity = len(self.state.start)
        self._cluster = np.full(capacity, _UNASSIGNED, np.int64)
        self._present = np.zeros(capacity, np.bool_)
        self._locate(self.state.clients)
        for client, index in self._index.items():
            self._present[index] = self.clusters.online[client]
        self._encoder: Encoder = WholeModels()
        if self.parameters.sketch:
            self._encoder = Sketches(self.state.reference, self.parameters.sketch, seed=0)
        self._shortener: Encoder | None = None

    def on_join(self, client: Client) -> None:
        """Add a client: to the only cluster, as a newcomer, or back to its own."""
        super().on_join(client)
        state, name = self.state, client.client_id
        if name not in self._index and name not in state.landmarks.others:
            self._index_new(name)
        if name not in self._index:
            return
        index = self._index[name]
        self._present[index] = True
        self.state.watches.clear()
        state.examples[index] = client.num_examples

    def _index_new(self, name: str) -> None:
        """Add a new client to the compared ones; in a large fleet only if drawn as a landmark."""
        state, most = self.state, self.parameters.exact_up_to
        if most and len(state.clients) >= most:
            drawn = state.landmarks.drawn(name, most, self.rng)
            if drawn is None:
                return
            del self._index[state.clients[drawn]]
            state.replace(drawn, name)
            self._index[name] = drawn
        else:
            self._index[name] = state.add(name)
            more = len(state.start) - len(self._cluster)
            self._cluster = np.pad(self._cluster, (0, more), constant_values=_UNASSIGNED)
            self._present = np.pad(self._present, (0, more))
        self._locate([name])

    def on_leave(self, client: str) -> None:
        """Exclude an offline client from sizes and splits; it keeps its cluster."""
        super().on_leave(client)
        if client in self._index:
            self._present[self._index[client]] = False
            self.state.watches.clear()

    def on_sent(self, task: InFlight) -> None:
        """Record a client's start, in the unit of τ."""
        if task.client in self._index:
            self.state.start[self._index[task.client]] = self._start_of(task)

    def on_update(self, update: Update) -> Outcome:
        """Algorithm 1, lines 3 to 11."""
        client = update.task.client
        self.state.round += 1
        newcomer = not self.clusters.is_placed(client)
        self._note_model(update)
        with self._count_as_member(client):
            if client in self._index:
                self._c_phase(self._index[client], update, newcomer)
            else:
                self._follow_landmarks(client, newcomer)
            return self._a_phase(update, newcomer)

    @contextmanager
    def _count_as_member(self, client: str) -> Iterator[None]:
        """Count a client that sent an update as a member, even if it is reported offline."""
        i = self._index.get(client)
        if i is None or self._present[i]:
            yield
            return
        self._present[i] = True
        self.state.watches.clear()
        yield
        self._present[i] = False
        self.state.watches.clear()

    def _c_phase(self, i: int, update: Update, newcomer: bool) -> None:
        """Place a newcomer, compare, split and buffer: eqs (10) to (15), Algorithms 2 and 3."""
        client = update.task.client
        # The number of examples changes with the data.
        self.state.examples[i] = update.num_examples
        base = update.base if self._compares_changes else None
        code = self._encoder.encode(self.compared(since(update.vector, base)))
        if newcomer:
            self.clusters.assign(client, self._nearest_cluster(i, code, base))
            self._locate([client])
            self.state.watches.clear()
        self._compare(i, code)
        if self.parameters.clustering:
            self._split_if_due(int(self._cluster[i]))
        start = self._start_of(update.task)
        if newcomer and self.parameters.staleness_unit == "cluster":
            # Its version is another cluster's, so it counts as started from here.
            start = self.models[int(self._cluster[i])].version
        self._buffer(i, code, start)

    def _a_phase(self, update: Update, newcomer: bool) -> Outcome:
        """Mix the update into the model of its client's cluster, eqs (6) to (9)."""
        client = update.task.client
        k = self.clusters.main(client)
        counts_all = newcomer or self.parameters.staleness_unit == "global"
        staleness = update.age if counts_all else update.staleness
        (alpha,) = self._alphas(k, [staleness])
        self._mix(k, update, alpha)
        return Outcome(cluster=k, staleness=staleness, weight=alpha)

    def _start_of(self, task: InFlight) -> int:
        """Return start_i of a task, in the unit of τ."""
        return task.updates if self.parameters.staleness_unit == "global" else task.version

    def _locate(self, clients: Iterable[str]) -> None:
        """Record clients' clusters, by index."""
        for client in clients:
            if client not in self._index:
                continue
            placed = self.clusters.is_placed(client)
            self._cluster[self._index[client]] = (
                self.clusters.main(client) if placed else _UNASSIGNED
            )

    # A-phase.

    def _mix(self, k: int, update: Update, alpha: float) -> None:
        """Mix w_i into the model of cluster k, eq (9)."""
        self.models[k].mix(update.vector, alpha)

    def _alpha_c(self, k: int, size: int | None = None) -> float:
        """Return α_c,k, eq (6), optionally for another size.

        Limited to 1, since α0 > 2 would give small clusters a share above 1 (our reading; eqs (7),
        (14) and (17) use the limited α_c,k).
        """
        if not self.parameters.bi_level:
            return self.parameters.constant_alpha
        omega_t = omega(self.state.round, self.parameters.kappa)
        members = self._size(k) if size is None else size
        return min(1.0, cluster_decay(members, omega_t, self.parameters.alpha0))

    def _bound(self, k: int) -> float:
        """Return r_c,k, eq (8)."""
        omega_t = omega(self.state.round, self.parameters.kappa)
        return staleness_bound(self._size(k), omega_t)

    def _alphas(self, k: int, staleness: Iterable[int]) -> list[float]:
        """Return α_i for each staleness in a cluster, eq (7)."""
        alpha_c = self._alpha_c(k)
        bound = self._bound(k) if self.parameters.bi_level else math.inf
        return [client_decay(alpha_c, tau, bound) for tau in staleness]

    def _alphas_now(self) -> NDArray[np.float64]:
        """Return α_i(t) of all clients for eq (11).

        The paper writes α_i at round t, so τ_i is that of the task that a client is busy with, as
        in its test for a large gap (our reading). The α_i of the last update would give the budget
        to stragglers that have just returned, and take it from those that are about to.
        Newcomers come first (0), and offline clients, whose buffers serve no comparison, last (∞).
        """
        state = self.state
        alphas = np.zeros(len(state.start))
        for k, model in self.models.items():
            counts_all = self.parameters.staleness_unit == "global"
            now = self.progress.updates if counts_all else model.version
            inside = self._cluster == k
            alphas[inside] = self._alphas(k, (now - state.start[inside]).tolist())
        return np.where(self._present, alphas, np.inf)

    # C-phase.

    def _compare(self, i: int, code: Code) -> None:
        """Update the similarities of client i from its buffer, and clear it, eq (10)."""
        state = self.state
        owners, cosines = state.buffers.cosines(i, code.query)
        watch = self._watch(int(self._cluster[i]))
        watch.change(i, owners, cosines, state.similarity, state.computed)
        state.similarity[i, owners] = state.similarity[owners, i] = cosines
        state.computed[i, owners] = state.computed[owners, i] = True
        state.buffers.clear(i)

    def _buffer(self, i: int, code: Code, start: int) -> None:
        """Insert w_i into the buffers of its cluster unless redundant, Algorithm 2.

        It also enters the buffers of newcomers, which eq (15) compares with the clients of every
        cluster.
        """
        state, n = self.state, len(self.state.clients)
        k = int(self._cluster[i])
        gap_range = self.parameters.gap_range or self._bound(k)
        near = np.abs(start - state.start[:n]) < gap_range
        wanted = (self._cluster[:n] == k) & near | (self._cluster[:n] == _UNASSIGNED)
        wanted &= self._present[:n] & ~state.buffers.holds(i)[:n]
        wanted[i] = False
        state.buffers.insert(i, code, np.flatnonzero(wanted))
        if self.parameters.budget:
            own, alphas = self.parameters, self._alphas_now()
            state.buffers.enforce(own.budget, state.computed, alphas, self.rng, own.budget_counts)

    def _split_if_due(self, k: int) -> None:
        """Split cluster k in R if its largest eigengap says so, Algorithm 3, lines 3 to 8.

        Algorithm 3 does not mention pairs that are not compared yet; section 4.3 says that "we need
        all the pairwise similarities to make clustering decisions". So a cluster waits for all
        pairs (our reading), as long as its slowest client takes. With ``missing_pairs`` "leave-out"
        (our own), clients with such pairs are left out of the decision once there are `patience`
        updates per client; they join the most similar part, if known. With "zero", Algorithm 3 is
        followed literally: A is 0 for pairs without a value.
        """
        watch, gamma = self._watch(k), self.parameters.gamma
        members, how = watch.members, self.parameters.missing_pairs
        # At first few pairs are known, and splits would be random.
        patient = self.state.round < self.parameters.patience * len(self.state.clients)
        if watch.missing and (how == "wait" or (how == "leave-out" and patient)):
            return
        if leaves_out := bool(watch.missing) and how == "leave-out":
            members = comparable(members, self.state.computed)
        # Random eigengaps shrink with size, as does α_c: both use the compared members.
        alpha_c = self._alpha_c(k, len(members))
        if not (leaves_out or spectral.should_split(alpha_c, watch.bound(), gamma)):
            return
        weights = spectral.affinity(self.state.similarity[np.ix_(members, members)])
        gap = spectral.largest_gap(weights)
        if not leaves_out:
            watch.record_computation(weights, gap.size if gap else 0.0)
        if gap is not None:
            self._record_gap(k, Attempt(gap.size, alpha_c ** (1.0 / gamma)))
        if gap is None or not spectral.should_split(alpha_c, gap.size, gamma):
            return
        guard = self.parameters.noise_guard
        if guard and gap.size <= guard * spectral.noise_gap(weights, self.rng):
            return
        labels = spectral.partition(weights, gap.parts, seed=int(self.rng.integers(2**31)))
        if labels.max() == 0:
            return
        parts = self._parts(k, members, labels)
        names = [[self.state.clients[i] for i in part] for part in parts]
        self.state.landmarks.share_out(self.clusters.clients(k, online_only=False), names)
        self.clusters.split(k, names, score=gap.size**gamma, threshold=alpha_c)
        self._locate(client for part in names for client in part)
        del self.state.watches[k]
        self.state.attempt = Attempt()
        self.state.alone += sum(len(part) == 1 for part in names)
        self._measure(SPLITS, explanation=self._explanation())

    def _record_gap(self, k: int, attempt: Attempt) -> None:
        """Report a cluster's eigengap, and explain the clusters if it is nearest to a split."""
        self._measure(GAP, cluster=k, gap=attempt.gap, needed=attempt.needed)
        nearest = self.state.attempt
        if attempt.gap * nearest.needed > nearest.gap * attempt.needed:
            self.state.attempt = attempt
            self._measure(SPLITS, explanation=self._explanation())

    def _explanation(self) -> str:
        """Return the reason for the number of clusters."""
        count, state, nearest = len(self.models), self.state, self.state.attempt
        text = "one cluster" if count == 1 else f"{count} clusters"
        if nearest.gap:
            text += f": the largest gap was {nearest.gap:.2g}, a split needs {nearest.needed:.2g}"
            text += " (gamma, clients)"
        if state.alone:
            text += f"; clients split off alone: {state.alone} (noise-guard)"
        return text

    def _measure(self, schema: MeasureSchema, **values: Any) -> None:
        self.report(Measured(self.now(), self.progress.updates, schema, values))

    def _parts(
        self, k: int, members: NDArray[np.intp], labels: NDArray[np.int64]
    ) -> list[NDArray[np.intp]]:
        """Return the parts of cluster k, by index.

        Offline and left-out clients join the most similar part, if known, else the largest.
        """
        state, n = self.state, len(self.state.clients)
        absent = np.setdiff1d(np.flatnonzero(self._cluster[:n] == k), members)
        parts = [members[labels == label] for label in range(int(labels.max()) + 1)]
        largest = int(np.argmax([len(part) for part in parts]))
        for client in absent:
            known = [part[state.computed[client, part]] for part in parts]
            means = [
                state.similarity[client, part].mean() if len(part) else -np.inf for part in known
            ]
            best = int(np.argmax(means)) if np.isfinite(means).any() else largest
            parts[best] = np.append(parts[best], client)
        return parts

    # Large fleets.

    def _note_model(self, update: Update) -> None:
        """Store the sketch of every client in a fleet with landmarks."""
        if self.state.landmarks.others:
            if self._shortener is None:
                is_short = self.parameters.sketch > 0
                self._shortener = self._encoder if is_short else shortener(self.state.reference)
            base = update.base if self._compares_changes else None
            code = self._shortener.encode(self.compared(since(update.vector, base)))
            self.state.landmarks.note(update.task.client, self._shortener.sketch_of(code))

    def _follow_landmarks(self, client: str, newcomer: bool) -> None:
        """Place a newcomer that is no landmark; split its cluster by its landmarks."""
        if newcomer:
            near = self.state.landmarks.cluster_near(client, self.state.clients, self.clusters)
            self.clusters.assign(client, near)
        if self.parameters.clustering:
            self._split_if_due(self.clusters.main(client))

    # Newcomers.

    def _nearest_cluster(self, i: int, code: Code, base: Vector | None) -> int:
        """Return argmax_k cos(rep_k, w_i), eq (15).

        rep_k is the mean of the models in buf_i whose owners are in C_k, weighted by their data;
        without any, the cluster's model stands in.
        """
        state = self.state
        owners = state.buffers.owners(i)
        similarity: dict[int, float] = {}
        for k, model in self.models.items():
            inside = owners[self._cluster[owners] == k]
            if len(inside):
                most = self.progress.fleet.largest_plausible()
                weights = np.minimum(state.examples[inside], most).astype(np.float64)
                representative = state.buffers.mean_of(i, inside, weights)
            else:
                whole = self._encoder.encode(self.compared(since(model.vector, base)))
                representative = whole.stored * np.float32(whole.norm)
            similarity[k] = self._encoder.cosine(code, representative)
        return max(similarity, key=lambda k: similarity[k])

    def _watch(self, k: int) -> SplitWatch:
        """Return the split watch of cluster k."""
        if k not in self.state.watches:
            n = len(self.state.clients)
            self.state.watches[k] = SplitWatch.for_members(self._members(k), self.state.computed, n)
        return self.state.watches[k]

    def _size(self, k: int) -> int:
        """Return |C_k|: its online clients, landmarks or not."""
        if self.state.landmarks.others:
            return max(1, self.clusters.size(k))
        return len(self._members(k))

    def _members(self, k: int) -> NDArray[np.intp]:
        """Return the online landmarks of C_k, by index."""
        n = len(self.state.clients)
        return np.flatnonzero((self._cluster[:n] == k) & self._present[:n])


# -----------------------------------------------------------------------------
# CASA+: CASA with sparse training, which reduces the work of slow clients.
#
# Liu et al., "CASA: Clustered Federated Learning with Asynchronous Clients", KDD 2024, section 4.4.
# The staler a client's update was, the larger the share of its smallest weights that it does not
# train next time (eq 17). The mask is sent with the model. The client trains the other weights
# only, which takes less time in proportion, and the server mixes in only these (eq 16). Masked
# weights are frozen at the received values, not set to 0 (our reading): eq (16) does not change the
# server's weights where m = 0, and the paper does not specify the client's.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CASAPlusParameters(CASAParameters):
    """Hyper-parameters of CASA+: those of CASA, and the sparsity of slow clients."""

    sparsity: float = option(
        0.5, "S0: initial sparsity; the paper's figure 9 tries several", low=0, high=1
    )
    rounds: int = option(0, "R_end: updates over which sparsity ends (0: those of the run)", low=0)


@dataclass
class CASAPlusState(CASAState):
    """Additional state of CASA+.

    Attributes
    ----------
    masks : dict[str, NDArray[np.bool_]]
        Mask of the weights that each client trains next; absent for full training.
    sent : dict[int, NDArray[np.bool_]]
        The masks of open tasks, by number.
    """

    masks: dict[str, Mask] = field(default_factory=dict)
    sent: dict[int, Mask] = field(default_factory=dict)


class CASAPlus(CASA):
    """CASA with sparse training: slow clients train only their largest weights (CASA+)."""

    parameters_type = CASAPlusParameters
    state_type = CASAPlusState
    state: CASAPlusState
    parameters: CASAPlusParameters

    # Requests.

    def request_for(self, client: str) -> Request:
        """Add the mask, if any: training then takes 1 − S_i of the time."""
        mask = self.state.masks.get(client)
        if mask is None:
            return Request(client)
        arrays = {MASK: self.spec.pack_mask(mask)}
        return Request(client, arrays=arrays, settings={COMPUTE_SCALE: float(mask.mean())})

    def on_sent(self, task: InFlight) -> None:
        """Record the mask of a client's task."""
        super().on_sent(task)
        mask = self.state.masks.get(task.client)
        if mask is not None:
            self.state.sent[task.number] = mask

    def on_closed(self, task: InFlight) -> None:
        """Drop the mask of a closed task."""
        super().on_closed(task)
        self.state.sent.pop(task.number, None)

    # Updates.

    def _mix(self, k: int, update: Update, alpha: float) -> None:
        """Mix in the trained weights, eq (16), and choose the client's next mask, eq (17)."""
        state, client = self.state, update.task.client
        mask = state.sent.get(update.task.number)
        self.models[k].mix(update.vector, alpha, where=mask)
        end = self.parameters.rounds or self.planned_updates
        s_i = sparsity(self.parameters.sparsity, self._alpha_c(k), alpha, state.round, end)
        following = magnitude_mask(update.vector, s_i, self.trainable)
        if following.all():
            state.masks.pop(client, None)
        else:
            state.masks[client] = following


def sparsity(s0: float, alpha_c: float, alpha_i: float, t: int, end: int) -> float:
    """Return S_i(t) = S0/2 · (α_c,k − α_i) · (1 + cos((t − 1) π / R_end)), eq (17).

    0 beyond R_end, where the cosine would increase again (our reading).
    """
    if t - 1 >= end:
        return 0.0
    return s0 / 2 * (alpha_c - alpha_i) * (1 + math.cos((t - 1) * math.pi / end))


def magnitude_mask(w_i: Vector, share: float, trainable: Mask | None = None) -> Mask:
    """Return m_i: False for the given share of the smallest weights, True for the others.

    Parameters
    ----------
    w_i : Vector
        The client's model. Shape (d,).
    share : float
        S_i: masked share of the weights, from 0 to 1.
    trainable : Mask, optional
        Mask of the weights; other elements are never masked. Shape (d,); None for all.
    """
    mask = np.ones(len(w_i), np.bool_)
    weights = np.arange(len(w_i)) if trainable is None else np.flatnonzero(trainable)
    dropped = int(share * len(weights))
    if dropped > 0:
        smallest = np.argpartition(np.abs(w_i[weights]), dropped - 1)[:dropped]
        mask[weights[smallest]] = False
    return mask


# -----------------------------------------------------------------------------
# CASA without one of its parts: the ablations of CASA's paper, section 5.3.
# -----------------------------------------------------------------------------


CASAC = Variant(
    CASA,
    with_defaults(CASAParameters, clustering=False),
    "CASA without clustering: the ablation CASA-C.",
)
CASAD = Variant(
    CASA,
    with_defaults(CASAParameters, bi_level=False),
    "CASA with a constant decay: the ablation CASA-D.",
)
