"""FlexCFL: groups by the directions of first updates, for clients whose data may change.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS
2022. Some clients train the initial model w0 first; the directions of their updates are grouped
(Algorithm 3: EDC, eq 7, or MADC, eq 6). Every other client trains w0 when it is first picked, joins
the group of the nearest direction (eq 8), and trains that group's model in the same round. Rounds
of federated averaging go on inside each group (Algorithm 2), if wanted with a share of the other
groups' models. Before each round clients say how many samples of each label they have; who has come
to have others trains w0 again, and joins the group that is nearest now.

FedGroup, a preliminary version, is FlexCFL without this migration. Ablations of the paper: RCC
(``measure=random-clients``) and RAC (``newcomers=random``).

Label counts tell the server what a client has, if not the samples: of a person's photographs how
many show what, of a ward how many had which illness. ``detect=direction`` does without them (our
own): a client is placed anew when its latest update is nearer to the direction of another group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord

from raceme.clustering.clusters import Clusters, parts_of
from raceme.clustering.cold_start import ColdStart, find_groups
from raceme.clustering.model import Model
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.protocol.messages import ARRAYS, LABEL_COUNTS, LOCAL_EPOCHS, LOCAL_STEPS, Vector
from raceme.server.dispatch import Dispatch, InRounds, Moment, RoundsParameters
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method, Variant, average_by_cluster
from raceme.server.picking import sample
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.work import Task, Work

log = getLogger("raceme")

_W0 = 0
"""The cluster whose model is w0, until there are groups."""


@dataclass(frozen=True)
class ColdStartParameters:
    """What FlexCFL and FlexCFL-Async can be told in common."""

    groups: int = option(4, "m: number of groups", low=1)
    pretrain: int = option(20, "α: clients per group that train before the groups are found", low=1)
    pretrain_steps: int = option(
        50, "mini-batches of pre-training (0: one pass over the samples, the paper's text)", low=0
    )
    measure: str = option(
        "edc",
        "how first updates are grouped: edc, madc, or random-clients: each makes a group (RCC)",
        among=("edc", "madc", "random-clients"),
    )
    detect: str = option(
        "label-counts",
        "what tells that a client's data have changed: label-counts, direction, or none",
        among=("label-counts", "direction", "none"),
    )
    tolerance: float = option(0.2, "share of a client's samples that may change", low=0)

    @property
    def counts_labels(self) -> bool:
        """Whether label counts tell that data have changed."""
        return self.detect == "label-counts"

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have; empty if there is nothing."""
        return "count their labels unless detect=direction" if self.counts_labels else ""


@dataclass(frozen=True)
class FlexCFLParameters(ColdStartParameters, RoundsParameters):
    """Hyper-parameters of FlexCFL; but for the number of groups the defaults are the paper's."""

    newcomers: str = option(
        "direction",
        "the group of a client without one: by direction, or random (RAC)",
        among=("direction", "random"),
    )
    eta_g: float = option(0.0, "η_g: weight of the other groups' models (0: none)", low=0)


@dataclass(frozen=True)
class FedGroupParameters(FlexCFLParameters):
    """Hyper-parameters of FedGroup."""

    detect: str = option("none", "what tells that data have changed", among=("none",))


@dataclass
class FlexCFLState:
    """What FlexCFL knows beside its groups.

    Attributes
    ----------
    start : ColdStart
        What places clients.
    picked : dict[str, bool]
        Clients that train in this round; others take part only to be placed.
    """

    start: ColdStart
    picked: dict[str, bool] = field(default_factory=dict)


class FlexCFL(Method):
    """Groups by the directions of first updates, in rounds, with migration (FlexCFL)."""

    parameters_type = FlexCFLParameters
    state_type = FlexCFLState
    keeps_bases = True
    parameters: FlexCFLParameters
    state: FlexCFLState
    dispatch: InRounds

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have."""
        return self.parameters.needs_classes

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LABEL_COUNTS} if self.parameters.counts_labels else ())

    def policy(self) -> Dispatch:
        """Work in rounds; who is cold is placed first, and then trains if it was picked."""
        return InRounds(
            participants=self._participants,
            prepares=lambda update: self._has_groups and update.task.client in self._cold,
            returns=lambda client: client in self.state.picked,
            picking=self.parameters.picking,
        )

    def check(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        check_groups(self.parameters.groups, clients)

    def initialize(self, vector: Vector) -> None:
        """Keep w0; all clients are cold."""
        self.clusters = Clusters({_W0: Model(vector)})
        self.state = FlexCFLState(ColdStart(vector.copy()))

    @property
    def _has_groups(self) -> bool:
        return bool(self.state.start.directions)

    @property
    def _cold(self) -> dict[str, bool]:
        return self.state.start.cold

    def add_client(self, client: Client) -> None:
        """Take a client in: cold, or back into its group."""
        super().add_client(client)
        if self._has_groups and not self.clusters.is_placed(client.client_id):
            self._cold[client.client_id] = True

    # Before a round: whose data have changed?

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Ask for label counts before each round; then let its participants work."""
        if self.parameters.counts_labels:
            asked = self.dispatch.ask_first(moment, self.state.start.answers)
            if asked is not None:
                return [Work(client, LABEL_COUNTS, models=()) for client in asked]
        return super().next_work(moment)

    def on_dispatch(self, task: Task) -> None:
        """Note whom label counts are asked of."""
        if task.kind == LABEL_COUNTS:
            self.state.start.ask(task.client)

    def on_answer(self, answer: Answer) -> None:
        """Take label counts in: a client whose data have changed is cold."""
        take_counts(self.state.start, answer, self._examples(answer), self.parameters.tolerance)

    def _examples(self, answer: Answer) -> int:
        return self.progress.fleet.clients[answer.task.client].num_examples

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Pick α m clients before there are groups, then K, and with them all that have changed."""
        parameters, state = self.parameters, self.state
        if not self._has_groups:
            per_group = 1 if parameters.measure == "random-clients" else parameters.pretrain
            return sample(online, per_group * parameters.groups, rng)
        # Pre-training is nobody's turn: all train in the rounds after it.
        picked = self.dispatch.pick(online, parameters.participants(len(online)), rng)
        state.picked = {client.client_id: True for client in picked}
        if parameters.newcomers == "random":
            self._place_at_random(rng)
        changed = [c for c in online if c.client_id in self._cold and self._is_placed(c)]
        return [*picked, *(client for client in changed if client.client_id not in state.picked)]

    def _is_placed(self, client: Client) -> bool:
        return self.clusters.is_placed(client.client_id)

    def _place_at_random(self, rng: np.random.Generator) -> None:
        """Assign the picked clients that have no group to any, for RAC."""
        for client in [client for client in self.state.picked if client in self._cold]:
            group = int(rng.choice(list(self.state.start.directions)))
            self.clusters.assign(client, group)
            self.state.start.settle(client)

    def work_for(self, client: str) -> Work:
        """Let a cold client train w0, and others the model of their group."""
        if self._has_groups and client not in self._cold:
            return Work(client)
        return pretraining(client, self.record_of(self.state.start.initial), self.parameters)

    # After a round.

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Find the groups first; later place cold clients, and average inside each group."""
        if not self._has_groups:
            return start_groups(self, self.state.start, updates, self.parameters)
        cold = [update for update in updates if update.task.client in self._cold]
        others = [update for update in updates if update.task.client not in self._cold]
        placed = [place(self, self.state.start, update) for update in cold]
        # A client that has gone elsewhere meanwhile has trained a model that is not its group's.
        trained = [update for update in others if update.task.cluster == self._home(update)]
        if self.parameters.detect == "direction":
            self._look_at_directions(trained)
        averaged = average_by_cluster(self.clusters, trained)
        if self.parameters.eta_g:
            groups = {self._home(update) for update in trained}
            mix_groups([self.models[group] for group in sorted(groups)], self.parameters.eta_g)
        done = dict(zip(map(id, [*cold, *trained]), [*placed, *averaged], strict=True))
        return [done.get(id(u)) or Applied(self._home(u), staleness=0, weight=0.0) for u in updates]

    def _home(self, update: Update) -> int:
        return self.clusters.main(update.task.client)

    def _look_at_directions(self, updates: Sequence[Update]) -> None:
        """Note whose update goes where another group's go: its data may have changed."""
        for update in updates:
            delta = self.compared(self.delta(update))
            if self.state.start.looks_foreign(self._home(update), delta):
                self._cold[update.task.client] = True


FedGroup = Variant(FlexCFL, FedGroupParameters, "FlexCFL without migration (FedGroup).")


def check_groups(groups: int, clients: int) -> None:
    """Raise UserError if there are more groups than clients."""
    if groups > clients:
        raise UserError(
            f"{groups} groups cannot be made of {clients} clients: take fewer groups, or more "
            "clients."
        )


def pretraining(client: str, w0: ArrayRecord, parameters: ColdStartParameters) -> Work:
    """Return the work of a client that is to be placed: it trains w0 for a little while."""
    steps = parameters.pretrain_steps
    settings = {LOCAL_STEPS: steps} if steps else {LOCAL_STEPS: 0, LOCAL_EPOCHS: 1}
    return Work(client, models=(), arrays={ARRAYS: w0}, settings=settings)


def start_groups(
    method: Method, start: ColdStart, updates: Sequence[Update], parameters: ColdStartParameters
) -> list[Applied]:
    """Group the clients of the first round, Algorithm 3; all others are cold from now on.

    A group's model is the plain mean of what its clients have trained; its direction, for good,
    the change from w0.
    """
    clusters, clients = method.clusters, [update.task.client for update in updates]
    deltas = np.stack([method.compared(update.vector - start.initial) for update in updates])
    count = min(parameters.groups, len(updates))
    if count < parameters.groups:
        log.warning("Only %d clients have pre-trained: there are so many groups.", count)
    labels = find_groups(deltas, count, parameters.measure, method.rng)
    groups = clusters.split(_W0, parts_of(clients, labels))
    applied = average_by_cluster(clusters, updates, by_examples=False)
    for group in groups:
        change = np.asarray(method.models[group].vector - start.initial)
        start.directions[group] = method.compared(change)
    for client in clusters.members:
        if clusters.is_placed(client):
            start.settle(client)
        else:
            start.cold[client] = True
    return applied


def place(method: Method, start: ColdStart, update: Update) -> Applied:
    """Put a cold client into the group that is nearest; what it has trained is used for nothing."""
    client = update.task.client
    group = start.nearest(method.compared(np.asarray(update.vector - start.initial)))
    method.clusters.assign(client, group)
    start.settle(client)
    return Applied(group, staleness=0, weight=0.0)


def take_counts(start: ColdStart, answer: Answer, examples: int, tolerance: float) -> None:
    """Take label counts in.

    Raises
    ------
    InvalidReplyError
        They are no counts, or of another number of labels than the client had before.
    """
    client = answer.task.client
    counts = answer.numbers.get(LABEL_COUNTS)
    if counts is None or counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu":
        raise InvalidReplyError("it brings no label counts")
    if counts.min() < 0 or not counts.any():
        raise InvalidReplyError("its label counts are no counts")
    labels = start.usual_labels(client, len(counts))
    if len(counts) != labels:
        raise InvalidReplyError(f"it counts {len(counts)} labels, and others {labels}")
    if answer.num_examples and int(counts.sum()) != answer.num_examples:
        total = int(counts.sum())
        raise InvalidReplyError(f"it counts {total} labels of {answer.num_examples} examples")
    start.count(client, counts.tolist(), examples, tolerance)


def mix_groups(models: Sequence[Model], eta_g: float) -> None:
    """Add to each group η_g Σ_{l≠j} w̃_l / ‖w̃_l‖ of the others, Algorithm 2, line 21.

    As in the authors' code the sum is divided by 1 + η_g Σ_{l≠j} 1/‖w̃_l‖: a weighted mean of the
    groups' models, w̃_j with weight 1. Without this, every round would add a norm of up to
    η_g (m − 1).

    Parameters
    ----------
    models : Sequence[Model]
        The groups that trained in the round.
    eta_g : float
        η_g.
    """
    norms = [float(np.linalg.norm(model.vector)) or 1.0 for model in models]
    units = [model.vector / np.float32(norm) for model, norm in zip(models, norms, strict=True)]
    total = np.sum(units, axis=0)
    shares = sum(1.0 / norm for norm in norms)
    mixed = [
        (model.vector + np.float32(eta_g) * (total - own))
        / np.float32(1.0 + eta_g * (shares - 1.0 / norm))
        for model, own, norm in zip(models, units, norms, strict=True)
    ]
    for model, vector in zip(models, mixed, strict=True):
        model.replace(np.asarray(vector, np.float32))
