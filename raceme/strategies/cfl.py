"""CFL and OCFL: federated averaging in clusters that are divided by the cosines of updates.

Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
under Privacy Constraints", 2020: a cluster that has converged as a whole while some of its clients
still have large updates (Algorithm 1) is bipartitioned by the cosines of the updates. CFL-Async is
its asynchronous form in CASA's paper.

OCFL: Zuziak, Pellungrini and Rinzivillo, "One-Shot Clustering for Federated Learning Under
Clustering-Agnostic Assumption", 2025 (arXiv 2509.01587). The clients are divided once, by a
density-based method, in a round that the temperature determines: the scaled norm of the distances 1
− cos of the round's updates. Only the paper's summary was available. Our readings: it is the first
round whose temperature is not above that of the round before, since updates have then ceased to
diverge; the density-based method is HDBSCAN; a client that it leaves out joins the nearest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import cosines, nearest, parts_of
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Outcomes, Update
from raceme.core.scheduling import InRounds, RoundsParameters
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness
from raceme.strategies.shared import LINKAGES, linkage, norms_of, should_bipartition

log = getLogger("raceme")


@dataclass(frozen=True)
class _Dividing:
    """Criteria of divisions; the defaults are the authors' code, without its initial waiting."""

    linkage: str = option(
        "complete",
        "how a cluster is divided: complete, as in the authors' code, or single, which minimises "
        "the largest similarity across the parts, as in the paper's text",
        among=LINKAGES,
    )
    wait_rounds: int = option(
        0,
        "rounds of the run, or updates per client without rounds, before the first division (the "
        "authors' code: 20)",
        low=0,
    )
    least_members: int = option(
        2, "clients that a cluster must have to be divided (the authors' code: 3)", low=2
    )
    gamma_max: float = option(
        0.0,
        "γ_max: separation of the halves above which a cluster is divided (0, CASA's paper and the "
        "authors' code: any)",
        low=0,
        below=1,
    )


@dataclass(frozen=True)
class CFLParameters(_Dividing, RoundsParameters):
    """Hyper-parameters of CFL; the defaults are those of CASA's paper.

    The bounds are norms of whole updates: they depend on the model and on the learning rate. See
    `docs/research/method-cfl.md` for how to choose them.
    """

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(0.7, "ε2: and is divided if a client's update is above", above=0)


@dataclass(frozen=True)
class CFLAsyncParameters(_Dividing, MixingParameters):
    """Hyper-parameters of CFL-Async; the defaults are those of CASA's paper."""

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(1.0, "ε2: and is divided if a client's update is above", above=0)


@dataclass(frozen=True)
class OCFLParameters(RoundsParameters):
    """Hyper-parameters of OCFL."""

    norm: float = option(2.0, "p: norm of the matrix of distances", low=1)
    least_members: int = option(2, "clients that a part must have", low=2)


@dataclass
class CFLState:
    """State of CFL besides its clusters.

    Attributes
    ----------
    deltas : dict[str, Vector]
        Latest Δ_i of each client; cleared for members of a divided cluster.
    examples : dict[str, int]
        n_i: number of training examples of each client.
    """

    deltas: dict[str, Vector] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)


@dataclass
class OCFLState(CFLState):
    """State of OCFL besides its clusters.

    Attributes
    ----------
    temperature : float
        T of the last round.
    is_divided : bool
        Whether the clients have been divided.
    """

    temperature: float = 0.0
    is_divided: bool = False


class LatestUpdates(Method):
    """Keeps each client's latest update, and places newcomers by it."""

    state_type = CFLState
    needs = Needs(bases=True)
    state: CFLState

    def _take(self, update: Update) -> bool:
        """Store Δ_i; place a newcomer, and return whether it was one.

        Our reading, the paper has no newcomers: it joins the cluster whose members' latest updates
        are on average most similar to its own.
        """
        clusters, client = self.clusters, update.task.client
        delta = self.compared(update.delta)
        newcomer = not clusters.is_placed(client)
        if newcomer:
            known = {k: self._known(clusters.clients(k)) for k in clusters.models}
            similarity = nearest(delta, known)
            largest = clusters.largest()
            clusters.assign(client, max(similarity, key=lambda k: similarity[k], default=largest))
        self.state.deltas[client], self.state.examples[client] = delta, update.num_examples
        return newcomer

    def _known(self, clients: Sequence[str]) -> list[Vector]:
        """Return the latest updates of given clients, if any."""
        deltas = self.state.deltas
        return [deltas[client] for client in clients if client in deltas]

    def _add_absent(self, cluster: int, parts: list[list[str]]) -> None:
        """Add absent members to the most similar part, or else to the largest.

        Our reading: the papers let all clients take part in every round.
        """
        present = {client for part in parts for client in part}
        groups = {index: self._known(part) for index, part in enumerate(parts)}
        largest = max(groups, key=lambda index: len(parts[index]))
        for client in self.clusters.clients(cluster, online_only=False):
            if client not in present:
                delta = self.state.deltas.get(client)
                similarity = {} if delta is None else nearest(delta, groups)
                best = max(similarity, key=lambda index: similarity[index], default=largest)
                parts[best].append(client)


class Bipartitions(LatestUpdates):
    """Shared by CFL, in rounds, and CFL-Async, at every update."""

    parameters: CFLParameters | CFLAsyncParameters

    def _divide_if_due(
        self, cluster: int, clients: Sequence[str], rounds: float, log_norms: bool
    ) -> None:
        """Bipartition a cluster if its clients' updates meet the criterion, Algorithm 1.

        Parameters
        ----------
        cluster : int
            The cluster.
        clients : Sequence[str]
            Its clients whose updates count.
        rounds : float
            Rounds of the run before this one, or updates per client.
        log_norms : bool
            Whether to log the norms that ε1 and ε2 bound.
        """
        state, options = self.state, self.parameters
        if len(clients) < 2:
            return
        deltas = np.stack([state.deltas[client] for client in clients])
        norms = norms_of(deltas, np.array([state.examples[client] for client in clients]))
        if log_norms:
            # The log of a short run shows suitable values of ε1 and ε2.
            text = "cluster %d after %d updates: mean norm %.4f, largest norm %.4f"
            log.info(text, cluster, self.progress.updates, norms.mean, norms.largest)
        if len(clients) < options.least_members or rounds < options.wait_rounds:
            return
        if not should_bipartition(norms, options.eps1, options.eps2):
            return
        similarity = cosines(deltas, deltas)
        labels = linkage(1.0 - similarity, parts=2, how=options.linkage)
        if options.gamma_max and separation(similarity, labels) <= options.gamma_max:
            return
        parts = parts_of(clients, labels)
        self._add_absent(cluster, parts)
        self.clusters.split(cluster, parts, score=norms.largest, threshold=options.eps2)
        for client in (client for part in parts for client in part):
            state.deltas.pop(client, None)


def separation(similarity: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Return √((1 − α_cross) / 2), with α_cross the largest similarity across the two halves.

    It is 0 for halves that share a direction, and 1 for opposite ones: Algorithm 1, whose γ_max
    bounds the noise of the updates.
    """
    across = similarity[np.ix_(labels == 0, labels == 1)]
    return float(np.sqrt(max(0.0, 1.0 - float(across.max())) / 2.0))


class CFL(Bipartitions):
    """Recursive bipartitioning of clusters by the cosine similarity of updates, in rounds (CFL)."""

    parameters_type = CFLParameters
    parameters: CFLParameters
    scheduling: InRounds

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Divide the clusters that meet the criterion, then average inside each."""
        for update in updates:
            self._take(update)
        taken = {update.task.client for update in updates}
        before = max(0, self.scheduling.rounds - 1)
        for cluster in list(self.models):
            members = self.clusters.clients(cluster)
            present = [client for client in members if client in taken]
            self._divide_if_due(cluster, present, before, log_norms=True)
        return average_by_cluster(self.clusters, updates)


class CFLAsync(Bipartitions):
    """CFL at every arrival: criterion on the latest updates, staleness-weighted mixing."""

    parameters_type = CFLAsyncParameters
    parameters: CFLAsyncParameters

    def on_update(self, update: Update) -> Outcome:
        """Divide the client's cluster if it meets the criterion, then mix the update in.

        Our reading: the criterion waits until every member has sent an update to this cluster.
        """
        client, clusters = update.task.client, self.clusters
        newcomer = self._take(update)
        members = clusters.clients(clusters.main(client))
        if all(member in self.state.deltas for member in members):
            # About as often as in a round-based run.
            log_norms = self.progress.updates % max(1, len(members)) == 0
            rounds = self.progress.updates / max(1, len(clusters.members))
            self._divide_if_due(clusters.main(client), members, rounds, log_norms)
        home = clusters.main(client)
        staleness = update.age if newcomer else update.staleness
        return mix_by_staleness(self, update, home, staleness)


class OCFL(LatestUpdates):
    """One division of all clients by density, as soon as updates cease to diverge (OCFL)."""

    parameters_type = OCFLParameters
    state_type = OCFLState
    parameters: OCFLParameters
    state: OCFLState

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Divide the clients if that is due, then average inside each cluster."""
        for update in updates:
            self._take(update)
        clients = [update.task.client for update in updates]
        if not self.state.is_divided and len(clients) > 1:
            self._divide_if_due(clients)
        return average_by_cluster(self.clusters, updates)

    def _divide_if_due(self, clients: Sequence[str]) -> None:
        """Divide the clients if the temperature has not risen since the last round."""
        state, options = self.state, self.parameters
        deltas = np.stack(self._known(clients))
        similarity = np.asarray(cosines(deltas, deltas), np.float64)
        # HDBSCAN rejects matrices that are asymmetric by rounding.
        distances = np.clip(1.0 - (similarity + similarity.T) / 2.0, 0.0, 2.0)
        np.fill_diagonal(distances, 0.0)
        before, state.temperature = state.temperature, temperature(distances, options.norm)
        log.info("temperature %.4f, before %.4f", state.temperature, before)
        if not 0 < state.temperature <= before:
            return
        parts = density_parts(clients, distances, options.least_members)
        if len(parts) > 1:
            self._add_absent(0, parts)
            self.clusters.split(0, parts, score=state.temperature, threshold=before)
        state.is_divided = True


def temperature(distances: NDArray[np.floating], norm: float) -> float:
    """Return T(Γ) = ‖Γ‖_p / (n (n − 1) 2^p)^(1/p), from 0 for equal directions to 1.

    Parameters
    ----------
    distances : NDArray
        Γ: 1 − cos of every two updates, from 0 to 2, diagonal 0. Shape (n, n).
    norm : float
        p.
    """
    count = len(distances)
    mean = float((distances**norm).sum()) / (count * (count - 1))
    return float(mean ** (1.0 / norm)) / 2.0


def density_parts(
    clients: Sequence[str], distances: NDArray[np.floating], least: int
) -> list[list[str]]:
    """Return the parts that HDBSCAN finds, without the clients that it leaves out.

    Parameters
    ----------
    clients : Sequence[str]
        The clients, at least two.
    distances : NDArray
        Distances of every two. Shape (n, n).
    least : int
        Least number of clients in a part, at least two.
    """
    from sklearn.cluster import HDBSCAN

    if len(clients) <= least:
        return []
    method = HDBSCAN(min_cluster_size=least, metric="precomputed", copy=True)
    labels = method.fit_predict(distances)
    kept = [client for client, label in zip(clients, labels, strict=True) if label >= 0]
    return parts_of(kept, labels[labels >= 0]) if kept else []
