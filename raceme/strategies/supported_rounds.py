"""FAACL's rounds: train, compare, merge, until nothing changes; then train.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024:
Algorithms 2 to 6. FAACL and C-FAACL have these rounds in common; where the clusters that they start
from come from differs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.support import Partition, disjoint_pairs
from raceme.config.options import option
from raceme.server.dispatch import InRounds, Moment, RoundsParameters
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.work import Task, Work
from raceme.strategies.supported_models import (
    SupportParameters,
    SupportState,
    compared,
    comparison,
    report_support,
    trains,
)

log = logging.getLogger("raceme")

ASKING_SECONDS = 600.0
"""How long losses are waited for: who measures many models on a slow device takes long."""


@dataclass(frozen=True)
class SupportRoundsParameters(SupportParameters, RoundsParameters):
    """Hyper-parameters of FAACL's rounds."""

    hierarchical: bool = option(True, "compare in partitions that are joined in pairs, not all")


@dataclass
class SupportRoundsState(SupportState):
    """What decides how FAACL's rounds go on.

    Attributes
    ----------
    is_due : bool
        Whether clusters are to be compared before the next round.
    has_settled : bool
        Whether clusters have been found once: from then on all clients train in every round.
    begun : dict[str, dict[int, bool]]
        Models that a client was given to train in this round.
    losses : dict[str, dict[int, NDArray]]
        What clients have measured since models last changed: by client and cluster.
    """

    is_due: bool = False
    has_settled: bool = False
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)
    losses: dict[str, dict[int, NDArray[np.float64]]] = field(default_factory=dict)


class SupportRounds:
    """Trains, compares and merges the clusters of a method, in rounds.

    Parameters
    ----------
    method : Method
        Its state is a :class:`SupportRoundsState`, its parameters are
        :class:`SupportRoundsParameters`.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._parameters: SupportRoundsParameters = method.parameters

    @property
    def _state(self) -> SupportRoundsState:
        state: SupportRoundsState = self._method.state
        return state

    def policy(self) -> InRounds:
        """Work in rounds; who supports other clusters trains their models after its own."""
        return InRounds(
            self._parameters.fraction,
            participants=self._participants,
            picking=self._parameters.picking,
            again=lambda client: self._next_model(client) is not None,
        )

    @property
    def _dispatch(self) -> InRounds:
        dispatch = self._method.dispatch
        assert isinstance(dispatch, InRounds), "policy() has made it"
        return dispatch

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Choose those whose clusters are still to be compared; once they are found, a share."""
        state = self._state
        working = [c for c in online if c.client_id in state.cold or self._works(c.client_id)]
        if not state.has_settled:
            return working or online
        share = int(self._parameters.fraction * len(online))
        picked = self._dispatch.pick(online, share, rng)
        known = {client.client_id for client in picked}
        return [*picked, *(client for client in working if client.client_id not in known)]

    def _works(self, client: str) -> bool:
        return self._state.supported.works(self._method.clusters.main(client))

    # Cluster Train, Algorithm 4.

    def train(self, client: str) -> Work:
        """Return the work of a client: the next of the models that it trains in this round."""
        model = self._next_model(client)
        return Work(client, models=None if model is None else (model,))

    def sent(self, task: Task) -> None:
        """Note which model a client was given to train."""
        self._state.begun.setdefault(task.client, {})[task.cluster] = True

    def _next_model(self, client: str) -> int | None:
        """Return the first model that a client trains in this round and has not begun."""
        state, begun = self._state, self._state.begun.get(client, {})
        if client in state.cold:
            return None
        own = trains(state.supported, self._method.clusters.main(client))
        return next((model for model in own if model not in begun), None)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average what was trained from each model, weighted by the numbers of samples."""
        self._state.begun = {}
        self._state.is_due = bool(updates) and not self._state.supported.is_settled
        clusters = self._method.clusters
        return average_by_cluster(clusters, updates, home=lambda update: update.task.cluster)

    # Cluster Support and Cluster Merge, Algorithms 2 and 3, between two rounds.

    def compare(self, moment: Moment) -> list[Work] | None:
        """Return who measures which models now; None if the next round may begin."""
        if not self._state.is_due:
            return None
        asked = self._dispatch.ask_first(moment, self._compares, patience=ASKING_SECONDS)
        if asked is not None:
            return [comparison(self._method, c, self._compared_by(c)) for c in asked]
        if not (self._dispatch.state.running or moment.greeting):
            self._judge()
        return None

    def _compares(self, client: str) -> bool:
        state = self._state
        return client not in state.cold and len(self._compared_by(client)) > 1

    def _compared_by(self, client: str) -> list[int]:
        """Return the clusters whose models a client measures, its own first."""
        own = self._method.clusters.main(client)
        return [own, *self._state.supported.compared_with(own)]

    def take(self, answer: Answer) -> None:
        """Take losses in; they are acted on together.

        Raises
        ------
        InvalidReplyError
            They are no losses, too few for any test, or come after the round has begun.
        """
        client = answer.task.client
        if client not in self._dispatch.state.asking.awaited:
            raise InvalidReplyError("it came after the round had begun")
        self._state.losses[client] = compared(answer, self._parameters.alpha)

    def _judge(self) -> None:
        """Find support, merge; a partition in which nothing has changed is settled."""
        state, supported = self._state, self._state.supported
        state.is_due = False
        open_partitions = [part for part in supported.partitions if not part.settled]
        before = supported.listed()
        for partition in open_partitions:
            for cluster in partition.clusters:
                self._update_support(cluster, supported.compared_with(cluster))
        report_support(self._method, supported, before)
        state.losses = {}
        for partition in open_partitions:
            partition.settled = not self._merge_mutual(partition.clusters)
        if len(supported.partitions) > 1 and all(part.settled for part in supported.partitions):
            supported.join(self._method.rng)
        if supported.is_settled:
            state.has_settled = True
            log.info("%d clusters after %d tests.", len(self._method.models), supported.tests)

    def _update_support(self, cluster: int, others: Sequence[int]) -> None:
        """Find out anew who supports a cluster, Algorithm 2.

        One of which no client has measured anything keeps its supporters.
        """
        state, options = self._state, self._parameters
        clients = self._method.clusters.clients(cluster, online_only=False)
        measured = [state.losses[client] for client in clients if client in state.losses]
        if measured:
            found = state.supported.find(cluster, others, measured, options.epsilon, options.alpha)
            state.supported.support(cluster, found)

    def _merge_mutual(self, clusters: Sequence[int]) -> bool:
        """Merge pairs that support each other, Algorithm 3; return whether there are any.

        The model is that of one of the two, drawn at random: their mean may be worse than either,
        as networks that were trained apart hold what they know in different places.
        """
        method, supported = self._method, self._state.supported
        before = supported.listed()
        pairs = disjoint_pairs(clusters, supported.are_mutual, method.rng)
        for pair in pairs:
            kept = method.models[int(method.rng.choice(pair))]
            supported.unite(pair, method.clusters.merge(pair, kept.copy()))
        report_support(method, supported, before)
        return bool(pairs)

    def add(self, clusters: Sequence[int]) -> None:
        """Take new clusters in: each is a partition of its own, or all are in the only one."""
        supported = self._state.supported
        if not clusters:
            return
        if self._parameters.hierarchical:
            supported.partitions += [Partition([cluster]) for cluster in clusters]
        else:
            self.compare_all([*(c for p in supported.partitions for c in p.clusters), *clusters])

    def compare_all(self, clusters: Sequence[int]) -> None:
        """Have all of some clusters compared with each other, after the next round.

        No others support, or are supported, until they are compared again.
        """
        state, before = self._state, self._state.supported.listed()
        state.is_due = False
        state.supported.partitions = [Partition(list(clusters))]
        for cluster, theirs in before.items():
            kept = [other for other in theirs if other in clusters and cluster in clusters]
            state.supported.support(cluster, kept)
        report_support(self._method, state.supported, before)
