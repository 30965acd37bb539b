"""ICFL: incremental clustered federated learning.

Yan et al., "Clustered Federated Learning in Heterogeneous Environment", 2023. The paper's text was
unavailable: this is our reading of its description in CASA's paper and others. The server keeps the
mean cosine of the updates of every two clients. A cluster in which some pair is less similar than
α*(t) is bi-partitioned by spectral clustering. A new client, or a client that is now nearer to
another cluster, joins the nearest cluster if their mean similarity is above α*(t); otherwise a new
client founds a cluster. α*(t) = 1 − (1 − α*(0)) e^(−ε t / T) grows towards 1 over the planned T
rounds. ICFL-Async does the same on every update, with time slowed by a factor of 0.01, as in CASA's
paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Model, cosines, parts_of, unit
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Outcomes, Update
from raceme.core.scheduling import InRounds, RoundsParameters, share_of
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies import shared as spectral
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness

# -----------------------------------------------------------------------------
# Similarities of clients, averaged over their comparisons.
# -----------------------------------------------------------------------------


@dataclass
class MeanSimilarity:
    """A running mean for every pair of clients.

    Attributes
    ----------
    position : dict[str, int]
        Row and column of each client in the matrices.
    mean : NDArray[np.float32]
        Symmetric, diagonal 1; 0 for a pair that has never been compared. Shape (n, n).
    count : NDArray[np.int64]
        Number of comparisons of each pair. Shape (n, n).
    """

    position: dict[str, int] = field(default_factory=dict)
    mean: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    count: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))

    def add(self, client: str) -> None:
        """Add a new client."""
        if client not in self.position:
            self.position[client] = len(self.position)
            self.mean = np.pad(self.mean, (0, 1))
            self.count = np.pad(self.count, (0, 1))
            self.mean[-1, -1] = self.count[-1, -1] = 1

    def take(
        self, first: Sequence[str], second: Sequence[str], values: NDArray[np.floating]
    ) -> None:
        """Add new similarities to the means.

        Parameters
        ----------
        first, second : Sequence[str]
            Clients, either the same twice or without repeated pairs.
        values : NDArray[np.floating]
            New similarities of these pairs. Shape (len(first), len(second)).
        """
        rows, columns = self._rows(first), self._rows(second)
        block = np.ix_(rows, columns)
        self.count[block] += 1
        self.mean[block] += (values - self.mean[block]) / self.count[block]
        self.count[np.ix_(columns, rows)] = self.count[block].T
        self.mean[np.ix_(columns, rows)] = self.mean[block].T
        np.fill_diagonal(self.mean, 1.0)

    def among(self, clients: Sequence[str]) -> NDArray[np.float32]:
        """Return the means between some clients; NaN if never compared."""
        block = np.ix_(self._rows(clients), self._rows(clients))
        return np.where(self.count[block] > 0, self.mean[block], np.float32(np.nan))

    def to_group(self, client: str, group: Sequence[str]) -> float | None:
        """Return a client's mean similarity to compared members of a group, if any."""
        row, others = self.position[client], self._rows([name for name in group if name != client])
        known = others[self.count[row, others] > 0]
        return float(self.mean[row, known].mean()) if len(known) else None

    def _rows(self, clients: Sequence[str]) -> NDArray[np.intp]:
        return np.array([self.position[client] for client in clients], np.intp)


# -----------------------------------------------------------------------------
# ICFL: incremental clustered federated learning.
# -----------------------------------------------------------------------------


def alpha_star(t: float, planned: float, start: float, growth: float) -> float:
    """Return α*(t) = 1 − (1 − α*(0)) · exp(−ε t / T).

    Parameters
    ----------
    t, planned : float
        The round, and the number T of rounds planned.
    start, growth : float
        Initial threshold α*(0), and rate ε at which it approaches 1.
    """
    return 1.0 - (1.0 - start) * math.exp(-growth * t / planned)


@dataclass(frozen=True)
class _Comparing:
    """Common parameters of ICFL and ICFL-Async; the defaults are those of CASA's paper."""

    alpha_start: float = option(
        0.85, "α*(0): least similarity in a cluster at the start", low=-1, high=1
    )
    epsilon: float = option(4.0, "ε: rate at which α*(t) grows towards 1", low=0)
    rounds: int = option(0, "T: rounds over which it grows (0: those of the run)", low=0)
    moves: bool = option(True, "clients move to a cluster that has become nearer (our reading)")
    compare: str = option("updates", "compare updates or models", among=("updates", "models"))


@dataclass(frozen=True)
class ICFLParameters(_Comparing, RoundsParameters):
    """Hyper-parameters of ICFL."""


@dataclass(frozen=True)
class ICFLAsyncParameters(_Comparing, MixingParameters):
    """Hyper-parameters of ICFL-Async."""

    time_decay: float = option(0.01, "rounds that one update counts for", low=0)


@dataclass
class ICFLState:
    """State of ICFL besides its clusters.

    Attributes
    ----------
    similarity : MeanSimilarity
        Mean cosine of every two clients.
    latest : dict[str, Vector]
        Normalised vector of each client for comparisons; kept by ICFL-Async only.
    """

    similarity: MeanSimilarity = field(default_factory=MeanSimilarity)
    latest: dict[str, Vector] = field(default_factory=dict)

    def likeness(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return the mean similarities; NaN for pairs not compared."""
        clients = list(self.similarity.position)
        return clients, self.similarity.among(clients)


class DividesBySimilarity(Method):
    """Shared by ICFL, in rounds, and ICFL-Async, at every update."""

    state_type = ICFLState
    needs = Needs(bases=True)
    parameters: ICFLParameters | ICFLAsyncParameters
    state: ICFLState

    def on_join(self, client: Client) -> None:
        """Add a client: to the only cluster, as a newcomer, or back to its own."""
        super().on_join(client)
        self.state.similarity.add(client.client_id)

    def _planned_rounds(self, fraction: float = 1.0) -> float:
        """Return T: as configured, or the equivalent number of synchronous rounds.

        Parameters
        ----------
        fraction : float
            Share of the clients that take part in a round.
        """
        clients = max(1, share_of(len(self.clusters.members), fraction))
        return self.parameters.rounds or max(1.0, self.planned_updates / clients)

    def _compared(self, update: Update) -> Vector:
        """Return the vector that represents a client in comparisons."""
        if self.parameters.compare == "models":
            return self.compared(update.vector)
        return self.compared(update.delta)

    def _place(self, update: Update, threshold: float) -> bool:
        """Place a new or moving client; return whether it was placed.

        A newcomer without a similar cluster founds one from its own model.
        """
        clusters, client = self.clusters, update.task.client
        home = clusters.home(client)
        if home is not None and not self.parameters.moves:
            return False
        similarity = self._by_cluster(client)
        best = max(similarity, key=lambda k: similarity[k], default=home)
        if best is not None and best != home and similarity[best] > threshold:
            if home is None or similarity[best] > similarity.get(home, -math.inf):
                clusters.assign(client, best)
                if home is not None and not clusters.clients(home, online_only=False):
                    clusters.retire(home)
                return True
        elif home is None:
            clusters.found(Model(update.vector.copy()), [client])
            return True
        return False

    def _by_cluster(self, client: str) -> Mapping[int, float]:
        """Return the mean similarity of a client to the members of each cluster."""
        to_group, clients = self.state.similarity.to_group, self.clusters.clients
        means = {cluster: to_group(client, clients(cluster)) for cluster in self.models}
        return {cluster: mean for cluster, mean in means.items() if mean is not None}

    def _divide_if_due(self, cluster: int, threshold: float) -> None:
        """Bi-partition a cluster if some pair in it is less similar than the threshold.

        A division waits until all members have been compared with each other.
        """
        members = self.clusters.clients(cluster)
        similarity = self.state.similarity.among(members)
        if len(members) < 2 or np.isnan(similarity).any():
            return
        smallest = float(similarity.min())
        if smallest >= threshold:
            return
        parts = parts_of(members, _halves(similarity, self.rng))
        self._add_absent(cluster, parts)
        self.clusters.split(cluster, parts, score=1.0 - smallest, threshold=1.0 - threshold)

    def _add_absent(self, cluster: int, parts: list[list[str]]) -> None:
        """Add offline members to the most similar part, or else to the largest."""
        present = {client for part in parts for client in part}
        for client in self.clusters.clients(cluster, online_only=False):
            if client not in present:
                means = [self.state.similarity.to_group(client, part) for part in parts]
                known = {i: mean for i, mean in enumerate(means) if mean is not None}
                largest = max(range(len(parts)), key=lambda i: len(parts[i]))
                parts[max(known, key=lambda i: known[i], default=largest)].append(client)


class ICFL(DividesBySimilarity):
    """Incremental splitting of clusters with dissimilar pairs of clients, in rounds (ICFL)."""

    parameters_type = ICFLParameters
    parameters: ICFLParameters
    scheduling: InRounds

    def threshold(self) -> float:
        """Return α*(t) in round t."""
        options = self.parameters
        planned = self._planned_rounds(options.fraction)
        return alpha_star(
            self.scheduling.state.number, planned, options.alpha_start, options.epsilon
        )

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Compare the clients of the round, place and divide, then average in each cluster."""
        clients = [update.task.client for update in updates]
        compared = np.stack([self._compared(update) for update in updates])
        self.state.similarity.take(clients, clients, cosines(compared, compared))
        threshold = self.threshold()
        for update in updates:
            self._place(update, threshold)
        for cluster in list(self.models):
            self._divide_if_due(cluster, threshold)
        return average_by_cluster(self.clusters, updates)


class ICFLAsync(DividesBySimilarity):
    """ICFL at every arrival: similarity to the latest updates, staleness-weighted mixing."""

    parameters_type = ICFLAsyncParameters
    parameters: ICFLAsyncParameters

    def threshold(self) -> float:
        """Return α*(t): t is the number of updates, at the rate of the time decay."""
        options, updates = self.parameters, self.progress.updates + 1
        t, planned = options.time_decay * updates, self._planned_rounds()
        return alpha_star(t, planned, options.alpha_start, options.epsilon)

    def on_update(self, update: Update) -> Outcome:
        """Compare the client with all others, place and divide, then mix the update in."""
        state, client = self.state, update.task.client
        compared = unit(self._compared(update))
        others = [name for name in state.latest if name != client]
        similar = np.array([[np.dot(state.latest[name], compared) for name in others]])
        state.similarity.take([client], others, similar)
        state.latest[client] = compared
        threshold = self.threshold()
        moved = self._place(update, threshold)
        self._divide_if_due(self.clusters.main(client), threshold)
        home = self.clusters.main(client)
        # The client was moved just now, and versions of different clusters are not comparable.
        staleness = update.age if moved else update.staleness
        return mix_by_staleness(self, update, home, staleness)


def _halves(similarity: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.int64]:
    """Divide clients in two by spectral clustering.

    Cosines of updates may be negative; (1 + cos) / 2 keeps their order as edges of a graph (our
    reading).
    """
    if len(similarity) == 2:
        return np.arange(2)
    weights = np.asarray((1.0 + similarity) / 2.0, np.float64)
    return spectral.partition(weights, 2, seed=int(rng.integers(2**31)))
