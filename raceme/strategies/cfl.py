"""CFL: federated averaging in clusters that are divided in two when their clients disagree.

Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
under Privacy Constraints", 2020: a cluster that has come to rest as a whole while some of its
clients still have large updates (Algorithm 1) is bi-partitioned by the cosines of the updates.
CFL-Async is its asynchronous form in CASA's paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.bases import Bases
from raceme.strategies.bipartition import (
    Norms,
    complete_linkage,
    cosines,
    norms_of,
    should_bipartition,
)
from raceme.strategies.clusters import UNASSIGNED, Clustered, Clusters, nearest, parts_of
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Task, Update
from raceme.strategies.rounds import Rounds, RoundsParameters

log = getLogger("raceme")


@dataclass(frozen=True)
class CFLParameters(RoundsParameters):
    """Hyper-parameters of CFL; the defaults are those of CASA's paper.

    The bounds are norms of whole updates: they depend on the model and on the learning rate. See
    `docs/choosing-a-method.md` for how to choose them.
    """

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(0.7, "ε2: and is divided if a client's update is above", above=0)


@dataclass(frozen=True)
class CFLAsyncParameters(FedAsyncParameters):
    """Hyper-parameters of CFL-Async; the defaults are those of CASA's paper."""

    eps1: float = option(
        0.4, "ε1: a cluster rests if the norm of its mean update is below", above=0
    )
    eps2: float = option(1.0, "ε2: and is divided if a client's update is above", above=0)


@dataclass
class CFLState:
    """Everything that CFL knows.

    Attributes
    ----------
    clusters : Clusters
        Models and members.
    deltas : dict[str, Vector]
        The latest Δ_i of each client; emptied for the members of a cluster that is divided.
    examples : dict[str, int]
        Its n_i.
    bases : Bases
        What the clients that train now started from.
    """

    clusters: Clusters
    deltas: dict[str, Vector] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    bases: Bases = field(default_factory=Bases)


class _CFL(Clustered):
    """What CFL and CFL-Async share: deltas, the criterion, the bi-partition."""

    state_type = CFLState
    state: CFLState
    parameters: CFLParameters | CFLAsyncParameters

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.state = CFLState(Clusters({0: Model(vector)}))

    def on_dispatch(self, task: Task) -> None:
        """Keep the model that a client starts from."""
        self.state.bases.hold(task, self.models[task.cluster])

    def on_close(self, task: Task) -> None:
        """Forget it once nobody trains from it."""
        self.state.bases.release(task)

    def _take(self, update: Update) -> bool:
        """Note Δ_i; give a newcomer a cluster, and return whether it was one.

        Our reading, the paper has no newcomers: it joins the cluster whose members' latest
        updates are on average most similar to its own.
        """
        state, client = self.state, update.task.client
        delta = state.bases.delta(update)
        newcomer = state.clusters.of[client] == UNASSIGNED
        if newcomer:
            known = {k: self._known(state.clusters.members(k)) for k in state.clusters.models}
            similarity = nearest(delta, known)
            largest = state.clusters.largest()
            self._assign(client, max(similarity, key=lambda k: similarity[k], default=largest))
        state.deltas[client], state.examples[client] = delta, update.num_examples
        return newcomer

    def _known(self, clients: Sequence[str]) -> list[Vector]:
        return [self.state.deltas[client] for client in clients if client in self.state.deltas]

    def _divide_if_due(self, cluster: int, clients: Sequence[str], log_norms: bool) -> None:
        """Bi-partition a cluster if its clients' updates meet the criterion."""
        state, options = self.state, self.parameters
        if len(clients) < 2:
            return
        deltas = np.stack([state.deltas[client] for client in clients])
        norms = norms_of(deltas, np.array([state.examples[client] for client in clients]))
        if log_norms:
            self._log_norms(cluster, norms)
        if not should_bipartition(norms, options.eps1, options.eps2):
            return
        parts = parts_of(clients, complete_linkage(1.0 - cosines(deltas, deltas), parts=2))
        self._add_absent(cluster, parts)
        self._split(cluster, parts, gap=norms.largest, threshold=options.eps2)
        for client in (client for part in parts for client in part):
            state.deltas.pop(client, None)

    def _add_absent(self, cluster: int, parts: list[list[str]]) -> None:
        """Put members that had no say where their latest update fits, or else to the most.

        Our reading: the paper lets all clients take part in every round.
        """
        present = {client for part in parts for client in part}
        groups = {index: self._known(part) for index, part in enumerate(parts)}
        largest = max(groups, key=lambda index: len(parts[index]))
        for client, home in self.state.clusters.of.items():
            if home == cluster and client not in present:
                delta = self.state.deltas.get(client)
                similarity = {} if delta is None else nearest(delta, groups)
                best = max(similarity, key=lambda index: similarity[index], default=largest)
                parts[best].append(client)

    def _log_norms(self, cluster: int, norms: Norms) -> None:
        """Let a short run show where ε1 and ε2 belong."""
        log.info(
            "cluster %d after %d updates: mean norm %.4f, largest norm %.4f",
            cluster,
            self.progress.updates,
            norms.mean,
            norms.largest,
        )


class CFL(_CFL, Rounds):
    """Rounds in clusters that are bi-partitioned by the cosines of the updates (CFL)."""

    parameters_type = CFLParameters
    parameters: CFLParameters

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Divide the clusters that meet the criterion, then average inside each."""
        for update in updates:
            self._take(update)
        taken = {update.task.client for update in updates}
        for cluster in list(self.models):
            members = self.state.clusters.members(cluster)
            present = [client for client in members if client in taken]
            self._divide_if_due(cluster, present, log_norms=True)
        return self._average(updates)


class CFLAsync(_CFL, AsyncStrategy):
    """CFL on every single update: criterion on the latest updates, mixing by staleness."""

    parameters_type = CFLAsyncParameters
    parameters: CFLAsyncParameters

    def on_update(self, update: Update) -> Applied:
        """Divide the client's cluster if it meets the criterion, then mix the update in.

        Our reading: the criterion waits until every member has sent an update to this cluster.
        """
        client, clusters = update.task.client, self.state.clusters
        newcomer = self._take(update)
        members = clusters.members(clusters.of[client])
        if all(member in self.state.deltas for member in members):
            # About as often as a round-based run would say it.
            log_norms = self.progress.updates % len(members) == 0
            self._divide_if_due(clusters.of[client], members, log_norms)
        home = clusters.of[client]
        staleness = self._tau(update, has_moved=newcomer)
        return mix_by_staleness(self.models[home], update, home, staleness, self.parameters)
