"""CASA: clustered federated learning with asynchronous clients.

Liu et al., "CASA: Clustered Federated Learning with Asynchronous Clients", KDD 2024. One
asynchronous round t is one update received. For each, in the order of the paper's Algorithm 1:
a newcomer is given a cluster (eq 15); the C-phase compares the update with the models buffered for
its client (eq 10), splits the cluster if an eigengap says so (eqs 12-14, Algorithm 3) and buffers
the update for others (Algorithm 2); the A-phase mixes it into the cluster's model (eqs 6-9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme import events
from raceme.messages import Vector
from raceme.options import option
from raceme.strategies import spectral
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.buffers import ModelBuffers
from raceme.strategies.decay import client_decay, cluster_decay, omega, staleness_bound
from raceme.strategies.encoding import Code, Encoder, Sketches, WholeModels
from raceme.strategies.fleet import Client
from raceme.strategies.mixing import mix
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Task, Update
from raceme.strategies.split_watch import SplitWatch

_UNASSIGNED = -1


@dataclass(frozen=True)
class CASAParameters:
    """Hyper-parameters of CASA; the defaults are the paper's."""

    alpha0: float = option(2.0, "initial decay α0, eq 6", above=0)
    kappa: float = option(0.001, "speed κ of the slow decay Ω(t)", low=0)
    gamma: float = option(0.15, "exponent γ of the eigengap, eq 14", above=0)
    sketch: int = option(0, "compare models by sketches of this size (0: whole models)", low=0)
    budget: int = option(0, "buffer budget M in items (0: no limit)", low=0)
    gap_range: float = option(0.0, "start gap r_a that is too large (0: r_c)", low=0)
    staleness_unit: str = option(
        "cluster", "τ counts: cluster or global", among=("cluster", "global")
    )
    noise_guard: float = option(0.0, "least gap, in gaps of shuffled similarities (0: any)", low=0)
    clustering: bool = option(True, "split clusters (false: the ablation CASA-C)")
    bi_level: bool = option(True, "bi-level decay (false: the ablation CASA-D)")
    constant_alpha: float = option(0.3, "α where bi-level is false", above=0, high=1)


@dataclass
class CASAState:
    """Everything that CASA knows. Arrays have room for more clients than there are, n.

    Attributes
    ----------
    models : dict[int, Model]
        w_{g,k} and its version, by cluster k.
    reference : Vector
        The initial model, against which sketches are taken. Shape (d,).
    next_cluster : int
        Id of the next new cluster.
    round : int
        t: updates received.
    clients : list[str]
        Client ids; the position of a client is its index i. Length n.
    cluster : NDArray[np.int64]
        Cluster of each client; −1 for a newcomer before its first update.
    present : NDArray[np.bool_]
        Whether it is online; only such clients count for |C_k| and for splits.
    start : NDArray[np.int64]
        Version of the model that it was given last.
    alpha : NDArray[np.float64]
        Its last α_i; 0 before its first update.
    examples : NDArray[np.int64]
        |D_i|.
    similarity : NDArray[np.float32]
        A: symmetric, diagonal 1.
    computed : NDArray[np.bool_]
        Which pairs of A are known.
    buffers : ModelBuffers
        buf_i of every client.
    """

    models: dict[int, Model]
    reference: Vector
    next_cluster: int = 1
    round: int = 0
    clients: list[str] = field(default_factory=list)
    cluster: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    present: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    start: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    alpha: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    examples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    similarity: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    computed: NDArray[np.bool_] = field(default_factory=lambda: np.empty((0, 0), np.bool_))
    buffers: ModelBuffers = field(default_factory=ModelBuffers)

    def add(self, client: str) -> int:
        """Make room for a client, and return its index."""
        index = len(self.clients)
        self.clients.append(client)
        if index == len(self.cluster):
            self._grow(max(16, 2 * index))
        return index

    def _grow(self, capacity: int) -> None:
        """Give every array room for more clients."""
        more = capacity - len(self.cluster)
        for name in ("cluster", "present", "start", "alpha", "examples"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.similarity = np.pad(self.similarity, (0, more))
        self.computed = np.pad(self.computed, (0, more))
        np.fill_diagonal(self.similarity, 1.0)
        np.fill_diagonal(self.computed, True)
        self.buffers.resize(capacity)


class CASA(AsyncStrategy):
    """Asynchronous clustering: bi-level decay, buffered similarity, spectral splits (CASA)."""

    parameters_type = CASAParameters
    state_type = CASAState
    state: CASAState
    parameters: CASAParameters

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.state = self.state_type(models={0: Model(vector)}, reference=vector.copy())
        self._restore()

    def _restore(self) -> None:
        """Derive from the state what makes it quick to work with."""
        self._index = {client: index for index, client in enumerate(self.state.clients)}
        self._watches: dict[int, SplitWatch] = {}
        self._encoder: Encoder = WholeModels()
        if self.parameters.sketch:
            self._encoder = Sketches(self.state.reference, self.parameters.sketch, seed=0)

    @property
    def models(self) -> Mapping[int, Model]:
        """w_{g,k} by cluster k."""
        return self.state.models

    def cluster_of(self, client: str) -> int:
        """Return k; a newcomer trains the model of the largest cluster once."""
        cluster = int(self.state.cluster[self._index[client]])
        return self._largest_cluster() if cluster == _UNASSIGNED else cluster

    def add_client(self, client: Client) -> None:
        """Take a client in: into the only cluster, or as a newcomer; or back into its own."""
        state = self.state
        index = self._index.get(client.client_id)
        if index is None:
            index = self._index[client.client_id] = state.add(client.client_id)
            only = next(iter(state.models)) if len(state.models) == 1 else _UNASSIGNED
            state.cluster[index] = only
        state.present[index] = True
        self._watches.clear()
        state.examples[index] = client.num_examples

    def remove_client(self, client: str) -> None:
        """Leave a client that went offline out of sizes and splits; it keeps its cluster."""
        self.state.present[self._index[client]] = False
        self._watches.clear()

    def on_dispatch(self, task: Task) -> None:
        """Note the version from which a client starts."""
        self.state.start[self._index[task.client]] = task.version

    def on_update(self, update: Update) -> Applied:
        """Algorithm 1, lines 3 to 11."""
        state, w_i = self.state, update.vector
        i = self._index[update.task.client]
        state.round += 1
        code = self._encoder.encode(w_i)
        newcomer = state.cluster[i] == _UNASSIGNED
        if newcomer:
            state.cluster[i] = self._nearest_cluster(i, code)
            self._watches.clear()
            self._observe(
                events.ClientAssigned(self.now(), update.task.client, int(state.cluster[i]))
            )
        self._compare(i, code)
        if self.parameters.clustering:
            self._split_if_due(int(state.cluster[i]))
        k = int(state.cluster[i])
        self._buffer(i, code, update.task.version)

        model = state.models[k]
        # A newcomer's version is another cluster's: its age is what passed since it was asked.
        if self.parameters.staleness_unit == "global" or newcomer:
            staleness = self.progress.updates - update.task.updates
        else:
            staleness = model.version - update.task.version
        alpha = self._alpha(k, staleness)
        state.alpha[i] = alpha
        self._aggregate(k, update, alpha)
        return Applied(cluster=k, staleness=staleness, weight=alpha)

    # A-phase.

    def _aggregate(self, k: int, update: Update, alpha: float) -> None:
        """Mix w_i into the model of cluster k, eq (9)."""
        mix(self.state.models[k], update.vector, alpha)

    def _alpha_c(self, k: int) -> float:
        """Return α_c,k, eq (6)."""
        if not self.parameters.bi_level:
            return self.parameters.constant_alpha
        omega_t = omega(self.state.round, self.parameters.kappa)
        return cluster_decay(len(self._members(k)), omega_t, self.parameters.alpha0)

    def _bound(self, k: int) -> float:
        """Return r_c,k, eq (8)."""
        omega_t = omega(self.state.round, self.parameters.kappa)
        return staleness_bound(len(self._members(k)), omega_t)

    def _alpha(self, k: int, staleness: int) -> float:
        """Return α_i, eq (7)."""
        alpha_c = self._alpha_c(k)
        if not self.parameters.bi_level:
            return alpha_c
        return client_decay(alpha_c, staleness, self._bound(k))

    # C-phase.

    def _compare(self, i: int, code: Code) -> None:
        """Update the similarities of client i from its buffer, and clear it, eq (10)."""
        state = self.state
        owners, cosines = state.buffers.cosines(i, code.query)
        watch = self._watch(int(state.cluster[i]))
        watch.change(i, owners, cosines, state.similarity, state.computed)
        state.similarity[i, owners] = state.similarity[owners, i] = cosines
        state.computed[i, owners] = state.computed[owners, i] = True
        state.buffers.clear(i)

    def _buffer(self, i: int, code: Code, start: int) -> None:
        """Put w_i into the buffers of its cluster where it is not redundant, Algorithm 2.

        Newcomers are given it too: eq (15) compares them with the clients of every cluster.
        """
        state, n = self.state, len(self.state.clients)
        k = int(state.cluster[i])
        gap_range = self.parameters.gap_range or self._bound(k)
        near = np.abs(start - state.start[:n]) < gap_range
        wanted = (state.cluster[:n] == k) & near | (state.cluster[:n] == _UNASSIGNED)
        wanted &= state.present[:n] & ~state.buffers.holds(i)[:n]
        wanted[i] = False
        state.buffers.insert(i, code, np.flatnonzero(wanted))
        if self.parameters.budget:
            state.buffers.enforce(self.parameters.budget, state.computed, state.alpha)

    def _split_if_due(self, k: int) -> None:
        """Split cluster k in R if its largest eigengap says so, Algorithm 3, lines 3 to 8."""
        watch, alpha_c, gamma = self._watch(k), self._alpha_c(k), self.parameters.gamma
        if watch.missing or not spectral.should_split(alpha_c, watch.bound(), gamma):
            return
        members = watch.members
        weights = spectral.affinity(self.state.similarity[np.ix_(members, members)])
        gap = spectral.largest_gap(weights)
        watch.look(weights, gap.size if gap else 0.0)
        if gap is None or not spectral.should_split(alpha_c, gap.size, gamma):
            return
        guard = self.parameters.noise_guard
        if guard and gap.size <= guard * spectral.noise_gap(weights, self.rng):
            return
        labels = spectral.partition(weights, gap.parts, seed=int(self.rng.integers(2**31)))
        if labels.max() == 0:
            return
        self._replace(k, members, labels)
        del self._watches[k]
        self._observe(
            events.ClusterSplit(
                time=self.now(),
                updates=self.state.round,
                parent=k,
                children=self._names_by_cluster(members),
                gap=gap.size**gamma,
                threshold=alpha_c,
            )
        )

    def _replace(self, k: int, members: NDArray[np.intp], labels: NDArray[np.int64]) -> None:
        """Replace cluster k by its parts, each with its model and version.

        Clients that are offline go where the clients are that they are most similar to, as far as
        that is known, or else into the largest part.
        """
        state, n = self.state, len(self.state.clients)
        absent = np.flatnonzero((state.cluster[:n] == k) & ~state.present[:n])
        parts = [members[labels == label] for label in range(int(labels.max()) + 1)]
        largest = int(np.argmax([len(part) for part in parts]))
        for client in absent:
            known = [part[state.computed[client, part]] for part in parts]
            means = [
                state.similarity[client, part].mean() if len(part) else -np.inf for part in known
            ]
            best = int(np.argmax(means)) if np.isfinite(means).any() else largest
            parts[best] = np.append(parts[best], client)
        parent = state.models.pop(k)
        for part in parts:
            state.models[state.next_cluster] = Model(parent.vector.copy(), parent.version)
            state.cluster[part] = state.next_cluster
            state.next_cluster += 1

    # Newcomers.

    def _nearest_cluster(self, i: int, code: Code) -> int:
        """Return argmax_k cos(rep_k, w_i), eq (15).

        rep_k is the mean of the models in buf_i whose owners are in C_k, weighted by their data;
        without any, the cluster's model stands in.
        """
        state = self.state
        owners = state.buffers.owners(i)
        similarity: dict[int, float] = {}
        for k, model in state.models.items():
            inside = owners[state.cluster[owners] == k]
            if len(inside):
                weights = state.examples[inside].astype(np.float64)
                representative = state.buffers.mean_of(i, inside, weights)
            else:
                whole = self._encoder.encode(model.vector)
                representative = whole.stored * np.float32(whole.norm)
            similarity[k] = self._encoder.cosine(code, representative)
        return max(similarity, key=lambda k: similarity[k])

    def _watch(self, k: int) -> SplitWatch:
        """Return what is known of cluster k without looking at its eigenvalues."""
        if k not in self._watches:
            n = len(self.state.clients)
            self._watches[k] = SplitWatch.over(self._members(k), self.state.computed, n)
        return self._watches[k]

    def _members(self, k: int) -> NDArray[np.intp]:
        """Return the clients of C_k that are online, by index."""
        n = len(self.state.clients)
        return np.flatnonzero((self.state.cluster[:n] == k) & self.state.present[:n])

    def _largest_cluster(self) -> int:
        return max(self.state.models, key=lambda k: len(self._members(k)))

    def _names_by_cluster(self, members: NDArray[np.intp]) -> dict[int, tuple[str, ...]]:
        """Return the ids of some clients by the cluster where they are now."""
        names: dict[int, tuple[str, ...]] = {}
        for i in members:
            k = int(self.state.cluster[i])
            names[k] = (*names.get(k, ()), self.state.clients[i])
        return names

    def similarity(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return A, with NaN where a pair has not been compared."""
        state, n = self.state, len(self.state.clients)
        known = np.where(state.computed[:n, :n], state.similarity[:n, :n], np.float32(np.nan))
        return list(state.clients), known

    def load_state_dict(self, tree: Mapping[str, object]) -> None:
        """Continue from a state; see the base class."""
        super().load_state_dict(tree)
        self._restore()
