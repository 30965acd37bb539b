"""FlexCFL-Async: FlexCFL's groups and migration on every single update.

Our own: Duan et al. (TPDS 2022) wait for rounds. Some clients train the initial model w0 first, and
the directions of their updates are grouped; then nobody waits for anybody. A client without a group
trains w0 for a little while and joins the group of the nearest direction; each later update is
mixed into its group's model at once, with a weight that falls with staleness as FedAsync's does.
Before a client is given work it is asked for its label counts, or the direction of its latest
update is looked at. If its data have changed, it joins the group that alone has clients with such
labels, and else it trains w0 again. An update that comes from a model which is not that of its
client's group is dropped.

There is no inter-group aggregation: η_g belongs to a round, after which all groups are at rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raceme.clustering.clusters import Clusters
from raceme.clustering.cold_start import ColdStart
from raceme.clustering.model import Model
from raceme.protocol.messages import LABEL_COUNTS, Vector
from raceme.server.dispatch import Dispatch, EveryIdle, InRounds
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.picking import sample
from raceme.server.replies import Answer, Update
from raceme.server.stages import Then
from raceme.server.work import Task, Work
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.flexcfl import (
    ColdStartParameters,
    check_groups,
    place,
    pretraining,
    start_groups,
    take_counts,
)


@dataclass(frozen=True)
class FlexCFLAsyncParameters(ColdStartParameters, FedAsyncParameters):
    """Hyper-parameters of FlexCFL-Async."""


@dataclass
class FlexCFLAsyncState:
    """What FlexCFL-Async knows beside its groups.

    Attributes
    ----------
    start : ColdStart
        What places clients.
    told : dict[str, bool]
        Clients that have said their label counts since they were last given other work.
    """

    start: ColdStart
    told: dict[str, bool] = field(default_factory=dict)


class FlexCFLAsync(Method):
    """FlexCFL's groups and migration on every single update (FlexCFL-Async, our own)."""

    parameters_type = FlexCFLAsyncParameters
    state_type = FlexCFLAsyncState
    keeps_bases = True
    parameters: FlexCFLAsyncParameters
    state: FlexCFLAsyncState

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have."""
        return self.parameters.needs_classes

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LABEL_COUNTS} if self.parameters.counts_labels else ())

    def policy(self) -> Dispatch:
        """Wait for those who make the groups; then nobody waits."""
        first = InRounds(participants=self._first)
        return Then(first, EveryIdle(), lambda: self._has_groups)

    def check(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        check_groups(self.parameters.groups, clients)

    def initialize(self, vector: Vector) -> None:
        """Keep w0; all clients are cold."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = FlexCFLAsyncState(ColdStart(vector.copy()))

    @property
    def _has_groups(self) -> bool:
        return bool(self.state.start.directions)

    def _first(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Pick α m clients, whose first updates make the groups."""
        alone = self.parameters.measure == "random-clients"
        per_group = 1 if alone else self.parameters.pretrain
        return sample(online, per_group * self.parameters.groups, rng)

    def add_client(self, client: Client) -> None:
        """Take a client in: cold, or back into its group."""
        super().add_client(client)
        if self._has_groups and not self.clusters.is_placed(client.client_id):
            self.state.start.cold[client.client_id] = True

    def work_for(self, client: str) -> Work:
        """Let a cold client train w0, ask others for label counts, or train their group's model."""
        start = self.state.start
        if not self._has_groups or client in start.cold:
            return pretraining(client, self.record_of(start.initial), self.parameters)
        by_counts = self.parameters.counts_labels
        if by_counts and client not in self.state.told and start.answers(client):
            return Work(client, LABEL_COUNTS, models=())
        return Work(client)

    def on_dispatch(self, task: Task) -> None:
        """Note whom label counts are asked of."""
        if task.kind == LABEL_COUNTS:
            self.state.start.ask(task.client)

    def on_answer(self, answer: Answer) -> None:
        """Take label counts in: a client whose data have changed is cold."""
        client = answer.task.client
        examples = self.progress.fleet.clients[client].num_examples
        start = self.state.start
        was_cold = client in start.cold
        take_counts(start, answer, examples, self.parameters.tolerance)
        if client in start.cold and not was_cold:
            self._place_by_labels(client)

    def _place_by_labels(self, client: str) -> None:
        """Move a client whose data have changed at once, if its labels are those of one group."""
        start, members = self.state.start, self.clusters.members
        homes = {c: self.clusters.main(c) for c in members if c not in start.cold}
        group = start.group_by_labels(client, homes)
        if group is not None:
            self.clusters.assign(client, group)
            start.settle(client)

    def on_close(self, task: Task) -> None:
        """Ask a client again after each of its trainings, and only once if it does not answer."""
        if task.kind == LABEL_COUNTS:
            self.state.told[task.client] = True
        else:
            self.state.told.pop(task.client, None)

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Applied]:
        """Find the groups first; then act on each update by itself."""
        if not self._has_groups:
            return start_groups(self, self.state.start, updates, self.parameters)
        return super().aggregate(updates)

    def on_update(self, update: Update) -> Applied:
        """Place a cold client; mix what others bring into their group's model."""
        client, start = update.task.client, self.state.start
        if client in start.cold:
            return place(self, start, update)
        group = self.clusters.main(client)
        if update.task.cluster != group:
            return Applied(group, staleness=0, weight=0.0)
        looks_at_it = self.parameters.detect == "direction"
        if looks_at_it and start.looks_foreign(group, self.compared(self.delta(update))):
            start.cold[client] = True
        model = self.models[group]
        return mix_by_staleness(
            model, update, group, model.version - update.task.version, self.parameters
        )
