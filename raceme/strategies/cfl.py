"""CFL: federated averaging in clusters, recursively bipartitioned.

Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
under Privacy Constraints", 2020: a cluster that has converged as a whole while some of its clients
still have large updates (Algorithm 1) is bipartitioned by the cosines of the updates. CFL-Async is
its asynchronous form in CASA's paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np

from raceme.core.clusters import cosines, nearest, parts_of
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Update
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.shared import LINKAGES, linkage, norms_of, should_bipartition

log = getLogger("raceme")


@dataclass(frozen=True)
class _Dividing:
    """Criteria of divisions; the defaults are the authors' code without its waiting."""

    linkage: str = option(
        "complete",
        "how a cluster is divided: complete, as in the authors' code, or single, which makes the "
        "largest similarity across the parts as small as can be, as in the paper's text",
        among=LINKAGES,
    )
    wait_rounds: int = option(
        0, "rounds of the run before the first division (the authors' code: 20)", low=0
    )
    least_members: int = option(
        2, "clients that a cluster must have to be divided (the authors' code: 3)", low=2
    )


@dataclass(frozen=True)
class CFLParameters(_Dividing, RoundsParameters):
    """Hyper-parameters of CFL; the defaults are those of CASA's paper.

    The bounds are norms of whole updates: they depend on the model and on the learning rate. See
    `docs/choosing-a-method.md` for how to choose them.
    """

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(0.7, "ε2: and is divided if a client's update is above", above=0)


@dataclass(frozen=True)
class CFLAsyncParameters(_Dividing, FedAsyncParameters):
    """Hyper-parameters of CFL-Async; the defaults are those of CASA's paper."""

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(1.0, "ε2: and is divided if a client's update is above", above=0)


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


class Bipartitions(Method):
    """Shared by CFL, in rounds, and CFL-Async, at every update."""

    state_type = CFLState
    needs = Needs(bases=True)
    parameters: CFLParameters | CFLAsyncParameters
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

    def _divide_if_due(self, cluster: int, clients: Sequence[str], log_norms: bool) -> None:
        """Bipartition a cluster if its clients' updates meet the criterion, Algorithm 1."""
        state, options = self.state, self.parameters
        if len(clients) < 2:
            return
        deltas = np.stack([state.deltas[client] for client in clients])
        norms = norms_of(deltas, np.array([state.examples[client] for client in clients]))
        if log_norms:
            # Shows suitable ε1 and ε2 in a short run.
            text = "cluster %d after %d updates: mean norm %.4f, largest norm %.4f"
            log.info(text, cluster, self.progress.updates, norms.mean, norms.largest)
        rounds = self.progress.updates / max(1, len(self.clusters.members))
        if len(clients) < options.least_members or rounds < options.wait_rounds:
            return
        if not should_bipartition(norms, options.eps1, options.eps2):
            return
        labels = linkage(1.0 - cosines(deltas, deltas), parts=2, how=options.linkage)
        parts = parts_of(clients, labels)
        self._add_absent(cluster, parts)
        self.clusters.split(cluster, parts, score=norms.largest, threshold=options.eps2)
        for client in (client for part in parts for client in part):
            state.deltas.pop(client, None)

    def _add_absent(self, cluster: int, parts: list[list[str]]) -> None:
        """Add absent members to the most similar part, or else to the largest.

        Our reading: the paper lets all clients take part in every round.
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


class CFL(Bipartitions):
    """Recursive bipartitioning of clusters by the cosine similarity of updates, in rounds (CFL)."""

    parameters_type = CFLParameters
    parameters: CFLParameters

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Divide the clusters that meet the criterion, then average inside each."""
        for update in updates:
            self._take(update)
        taken = {update.task.client for update in updates}
        for cluster in list(self.models):
            members = self.clusters.clients(cluster)
            present = [client for client in members if client in taken]
            self._divide_if_due(cluster, present, log_norms=True)
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
            self._divide_if_due(clusters.main(client), members, log_norms)
        home = clusters.main(client)
        staleness = update.age if newcomer else update.staleness
        return mix_by_staleness(self, update, home, staleness)
