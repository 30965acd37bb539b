"""ICFL: incremental clustered federated learning.

Yan et al., "Clustered Federated Learning in Heterogeneous Environment", 2023. The paper's text was
not at hand: what follows is our reading of how CASA's paper and others describe it. The server
keeps the mean of the cosines of every two clients' updates. A cluster in which some pair is less
similar than α*(t) is bi-partitioned by spectral clustering; a client that is new, or that is now
nearer to another cluster, joins the nearest if their mean similarity is above α*(t); a new one
founds a cluster otherwise. α*(t) = 1 − (1 − α*(0)) e^(−ε t / T) grows towards 1 over the planned T
rounds. ICFL-Async does the same on every update; for it CASA's paper slows time by a factor 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies import spectral
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.bases import Bases
from raceme.strategies.bipartition import cosines
from raceme.strategies.clusters import UNASSIGNED, Clustered, Clusters, parts_of
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.fleet import Client
from raceme.strategies.mixing import unit
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Task, Update
from raceme.strategies.rounds import Rounds, RoundsParameters
from raceme.strategies.similarity import MeanSimilarity


def alpha_star(t: float, planned: float, start: float, growth: float) -> float:
    """Return α*(t) = 1 − (1 − α*(0)) · exp(−ε t / T).

    Parameters
    ----------
    t, planned : float
        The round, and the number T of rounds planned.
    start, growth : float
        α*(0) and ε.
    """
    return 1.0 - (1.0 - start) * math.exp(-growth * t / planned)


@dataclass(frozen=True)
class _Comparing:
    """What ICFL and ICFL-Async can be told in common; the defaults are those of CASA's paper."""

    alpha_start: float = option(
        0.85, "α*(0): similarity that a cluster needs first", low=-1, high=1
    )
    epsilon: float = option(4.0, "ε: how fast α*(t) grows towards 1", low=0)
    rounds: int = option(0, "T: rounds over which it grows (0: those of the run)", low=0)
    moves: bool = option(True, "clients move to a cluster that has become nearer (our reading)")
    compare: str = option("updates", "compare updates or models", among=("updates", "models"))


@dataclass(frozen=True)
class ICFLParameters(_Comparing, RoundsParameters):
    """Hyper-parameters of ICFL."""


@dataclass(frozen=True)
class ICFLAsyncParameters(_Comparing, FedAsyncParameters):
    """Hyper-parameters of ICFL-Async."""

    time_decay: float = option(0.01, "rounds that one update counts for", low=0)


@dataclass
class ICFLState:
    """Everything that ICFL knows.

    Attributes
    ----------
    clusters : Clusters
        Models and members.
    similarity : MeanSimilarity
        Mean cosine of every two clients.
    latest : dict[str, Vector]
        What each client is compared by, at unit length; kept by ICFL-Async only.
    bases : Bases
        What the clients that train now started from.
    """

    clusters: Clusters
    similarity: MeanSimilarity = field(default_factory=MeanSimilarity)
    latest: dict[str, Vector] = field(default_factory=dict)
    bases: Bases = field(default_factory=Bases)


class _ICFL(Clustered):
    """What ICFL and ICFL-Async share: the threshold, who goes where, the bi-partition."""

    state_type = ICFLState
    state: ICFLState
    parameters: ICFLParameters | ICFLAsyncParameters

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.state = ICFLState(Clusters({0: Model(vector)}))

    def add_client(self, client: Client) -> None:
        """Take a client in: into the only cluster, as a newcomer, or back into its own."""
        super().add_client(client)
        self.state.similarity.add(client.client_id)

    def on_dispatch(self, task: Task) -> None:
        """Keep the model that a client starts from."""
        self.state.bases.hold(task, self.models[task.cluster])

    def on_close(self, task: Task) -> None:
        """Forget it once nobody trains from it."""
        self.state.bases.release(task)

    def _compared(self, update: Update) -> Vector:
        """Return what a client is compared by."""
        if self.parameters.compare == "models":
            return update.vector
        return self.state.bases.delta(update)

    def _planned_rounds(self) -> float:
        """Return T: as configured, or the rounds that the run's updates come to."""
        clients = max(1, len(self.state.clusters.of))
        return self.parameters.rounds or max(1.0, self.planned_updates / clients)

    def _place(self, update: Update, threshold: float) -> bool:
        """Let a client that is new or has moved join a cluster; return whether it has.

        A newcomer to which no cluster is similar enough founds one, from its own model.
        """
        clusters, client = self.state.clusters, update.task.client
        home = clusters.of[client]
        if home != UNASSIGNED and not self.parameters.moves:
            return False
        similarity = self._by_cluster(client)
        best = max(similarity, key=lambda k: similarity[k], default=UNASSIGNED)
        if best not in (home, UNASSIGNED) and similarity[best] > threshold:
            if similarity[best] > similarity.get(home, -math.inf):
                self._assign(client, best)
                self._drop_if_empty(home)
                return True
        elif home == UNASSIGNED:
            self._assign(client, clusters.add(Model(update.vector.copy())))
            return True
        return False

    def _by_cluster(self, client: str) -> Mapping[int, float]:
        """Return the mean similarity of a client to the members of each cluster."""
        means = {
            cluster: self.state.similarity.to_group(client, self.state.clusters.members(cluster))
            for cluster in self.models
        }
        return {cluster: mean for cluster, mean in means.items() if mean is not None}

    def _drop_if_empty(self, cluster: int) -> None:
        """Forget the model of a cluster that everybody has left."""
        clusters = self.state.clusters
        if cluster != UNASSIGNED and cluster not in clusters.of.values():
            del clusters.models[cluster]

    def _divide_if_due(self, cluster: int, threshold: float) -> None:
        """Bi-partition a cluster if some pair in it is less similar than the threshold.

        It waits until all its members have been compared with each other.
        """
        members = self.state.clusters.members(cluster)
        similarity = self.state.similarity.among(members)
        if len(members) < 2 or np.isnan(similarity).any():
            return
        smallest = float(similarity.min())
        if smallest >= threshold:
            return
        parts = parts_of(members, self._halves(similarity))
        self._add_absent(cluster, parts)
        self._split(cluster, parts, gap=1.0 - smallest, threshold=1.0 - threshold)

    def _halves(self, similarity: NDArray[np.float32]) -> NDArray[np.int64]:
        """Divide clients in two by spectral clustering.

        Cosines of updates may be negative; (1 + cos) / 2 keeps their order as edges of a graph
        (our reading).
        """
        if len(similarity) == 2:
            return np.arange(2)
        weights = np.asarray((1.0 + similarity) / 2.0, np.float64)
        return spectral.partition(weights, 2, seed=int(self.rng.integers(2**31)))

    def _add_absent(self, cluster: int, parts: list[list[str]]) -> None:
        """Put members that are offline to those whom they are most similar to, or to the most."""
        present = {client for part in parts for client in part}
        for client, home in self.state.clusters.of.items():
            if home == cluster and client not in present:
                means = [self.state.similarity.to_group(client, part) for part in parts]
                known = {i: mean for i, mean in enumerate(means) if mean is not None}
                largest = max(range(len(parts)), key=lambda i: len(parts[i]))
                parts[max(known, key=lambda i: known[i], default=largest)].append(client)

    def similarity(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return the mean similarities, NaN where two clients have not been compared."""
        clients = list(self.state.similarity.position)
        return clients, self.state.similarity.among(clients)


class ICFL(_ICFL, Rounds):
    """Rounds in clusters that are divided while some pair in one is not similar enough (ICFL)."""

    parameters_type = ICFLParameters
    parameters: ICFLParameters

    def threshold(self) -> float:
        """Return α*(t) in round t."""
        options = self.parameters
        rounds = self.progress.rounds
        return alpha_star(rounds, self._planned_rounds(), options.alpha_start, options.epsilon)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Compare the clients of the round, place and divide, then average in each cluster."""
        clients = [update.task.client for update in updates]
        compared = np.stack([self._compared(update) for update in updates])
        self.state.similarity.take(clients, clients, cosines(compared, compared))
        threshold = self.threshold()
        for update in updates:
            self._place(update, threshold)
        for cluster in list(self.models):
            self._divide_if_due(cluster, threshold)
        return self._average(updates)


class ICFLAsync(_ICFL, AsyncStrategy):
    """ICFL on every single update: compared with the latest of all others, mixed by staleness."""

    parameters_type = ICFLAsyncParameters
    parameters: ICFLAsyncParameters

    def threshold(self) -> float:
        """Return α*(t): t is the number of updates, at the rate of the time decay."""
        options, updates = self.parameters, self.progress.updates + 1
        t, planned = options.time_decay * updates, self._planned_rounds()
        return alpha_star(t, planned, options.alpha_start, options.epsilon)

    def on_update(self, update: Update) -> Applied:
        """Compare the client with all others, place and divide, then mix the update in."""
        state, client = self.state, update.task.client
        compared = unit(self._compared(update))
        others = [name for name in state.latest if name != client]
        similar = np.array([[np.dot(state.latest[name], compared) for name in others]])
        state.similarity.take([client], others, similar)
        state.latest[client] = compared
        threshold = self.threshold()
        moved = self._place(update, threshold)
        self._divide_if_due(state.clusters.of[client], threshold)
        home = state.clusters.of[client]
        staleness = self._tau(update, has_moved=moved)
        return mix_by_staleness(self.models[home], update, home, staleness, self.parameters)
