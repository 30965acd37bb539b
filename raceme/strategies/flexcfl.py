"""FlexCFL: groups by the directions of first updates, for clients whose data may change.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS
2022. Some clients train the initial model w0 first; the directions of their updates are grouped
(Algorithm 3: EDC, eq 7, or MADC, eq 6). Every other client trains w0 when it is first picked, joins
the group of the nearest direction (eq 8), and trains that group's model in the same round. Rounds
of federated averaging go on inside each group (Algorithm 2), if wanted with a share of the other
groups' models. Before each round clients say how many samples of each label they have; a client
whose labels have changed trains w0 again, and joins the group that is nearest now.

In the paper a cold client finds its group itself: it keeps w0 and the groups' directions, and
nothing but the group's number leaves it (``placing=client``). By default the server does so, and
devices need no memory.

FedGroup, a preliminary version, is FlexCFL without this migration. Ablations of the paper: RCC
(``measure=random-clients``) and RAC (``newcomers=random``).

Label counts tell the server what a client has, if not the samples: of a person's photographs how
many show what, of a ward how many had which illness. ``detect=direction`` does without them (our
own): a client is placed anew when its latest update is nearer to the direction of another group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, cosine, cosines, parts_of
from raceme.core.errors import UserError
from raceme.core.messages import (
    ARRAYS,
    CHOSEN,
    DIRECTIONS,
    LABEL_COUNTS,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    NEAREST_DIRECTION,
    Vector,
    count_of,
    to_array,
)
from raceme.core.options import option
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.scheduling import (
    EveryIdle,
    InRounds,
    RoundsParameters,
    Scheduler,
    SelectionContext,
    sample,
    then,
)
from raceme.core.strategy import Method, Needs, Variant, average_by_cluster
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.shared import LabelCounts, linkage, numbered

# -----------------------------------------------------------------------------
# Groups by the directions of first updates: how they begin, and how a client finds its own.
#
# Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
# TPDS 2022: the group cold start (Algorithm 3, eqs 6 and 7), the client cold start (eq 8), and the
# change of label counts after which a client is taken through it again.
# -----------------------------------------------------------------------------


_MUCH = 0.5
"""Two clients have much the same labels if they share so much of their samples' labels."""


@dataclass
class ColdStart(LabelCounts):
    """What is known for placing clients, beside their label counts.

    Attributes
    ----------
    initial : Vector
        w0: what every client trains to be placed. Shape (d,).
    directions : dict[int, Vector]
        Δw0^(g) of each group; empty before there are groups. They never change.
    """

    initial: Vector
    directions: dict[int, Vector] = field(default_factory=dict)

    def nearest(self, delta: Vector) -> int:
        """Return the group of a first update: g* = argmin (1 − cos(Δw0^(g), Δw_pre)) / 2, eq (8).

        Parameters
        ----------
        delta : Vector
            What training w0 has changed. Shape (d,), weights only.
        """
        directions = self.directions
        return min(directions, key=lambda group: (1 - cosine(directions[group], delta)) / 2)

    def looks_foreign(self, group: int, delta: Vector) -> bool:
        """Return whether a client's latest update goes where another group's first ones went.

        Our own: eq (8) asked of an update of the group's model, not of w0. A client whose data
        are those of another group now is pulled towards it. It costs a needless pre-training where
        it is wrong, which it often is where groups overlap.

        Parameters
        ----------
        delta : Vector
            What training its model has changed. Shape (d,), weights only.
        """
        return self.nearest(delta) != group

    def group_by_labels(self, client: str, homes: Mapping[str, int]) -> int | None:
        """Return the group whose clients have much the same labels, if it is the only one.

        Our own: eq (8) needs a training of w0, and a client whose labels are those of one group
        alone is told by them. Groups that differ in other things have the same labels, and none is
        returned.

        Parameters
        ----------
        client : str
            The client to be placed; its label counts are known.
        homes : Mapping[str, int]
            The groups of the clients that are placed.
        """
        own = np.asarray(self.counts[client], np.float64)
        found = {
            group
            for other, group in homes.items()
            if other != client
            and len(self.placed_with.get(other, ())) == len(own)
            and overlap(own, np.asarray(self.placed_with[other], np.float64)) >= _MUCH
        }
        return found.pop() if len(found) == 1 else None


def overlap(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return how much of two clients' samples is of the same labels: Σ min of their shares.

    Parameters
    ----------
    one, other : NDArray[np.float64]
        Samples per label. Shape (labels,).
    """
    return float(np.minimum(one / one.sum(), other / other.sum()).sum())


def find_groups(
    deltas: NDArray[np.float32], groups: int, measure: str, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Group the first updates, Algorithm 3.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m: number of groups, at most n.
    measure : str
        ``"edc"``: k-means++ on the updates' cosines to their main directions. ``"madc"``:
        hierarchical clustering on the differences of their cosines. ``"random-clients"``: each
        update is a group (RCC), if m random clients have trained.
    rng : numpy.random.Generator
        Draws what is left to chance.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … m − 1 per update. Shape (n,).
    """
    if measure == "edc":
        return group_by_edc(deltas, groups, seed=int(rng.integers(2**31)))
    if measure == "madc":
        return linkage(madc(cosines(deltas, deltas)), groups)
    return np.arange(len(deltas))


def group_by_edc(deltas: NDArray[np.float32], groups: int, seed: int) -> NDArray[np.int64]:
    """Group updates by the Euclidean distance of decomposed cosines (EDC), eq (7).

    The updates' m main directions V come from a truncated SVD; each update is embedded as its
    cosines to them, divided by m, and k-means++ groups these points.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m: number of groups, at most n.
    seed : int
        Seed of the initial centres of k-means++.
    """
    directions = np.linalg.svd(deltas, full_matrices=False)[2][:groups]
    points = cosines(deltas, directions) / groups
    method = KMeans(n_clusters=groups, init="k-means++", n_init=10, random_state=seed)
    return numbered(method.fit_predict(points))


def madc(similarity: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean of absolute differences of pairwise cosines (MADC), eq (6).

    ``MADC(i, j) = 1/(n−2) Σ_{z≠i,j} |S(i,z) − S(j,z)|``; for two clients, where the sum is empty,
    it is 0.

    Parameters
    ----------
    similarity : NDArray[np.floating]
        S: cosine similarities of the clients' updates. Shape (n, n).
    """
    n = len(similarity)
    distances = np.zeros((n, n))
    for i in range(n):
        differences = np.abs(similarity - similarity[i])
        # z = i and z = j are the two terms that the sum leaves out.
        own = differences[:, i] + differences[np.arange(n), np.arange(n)]
        distances[i] = (differences.sum(axis=1) - own) / max(1, n - 2)
    np.fill_diagonal(distances, 0.0)
    return (distances + distances.T) / 2.0


# -----------------------------------------------------------------------------
# FlexCFL: groups by the directions of first updates, for clients whose data may change.
# -----------------------------------------------------------------------------


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
        "detection of changed data of a client: label-counts, direction, or none",
        among=("label-counts", "direction", "none"),
    )
    tolerance: float = option(
        0.2, "share of a client's samples that may come or go; a replaced one counts twice", low=0
    )

    @property
    def counts_labels(self) -> bool:
        """Whether label counts tell that data have changed."""
        return self.detect == "label-counts"


@dataclass(frozen=True)
class FlexCFLParameters(ColdStartParameters, RoundsParameters):
    """Hyper-parameters of FlexCFL; but for the number of groups the defaults are the paper's."""

    newcomers: str = option(
        "direction",
        "the group of a client without one: by direction, or random (RAC)",
        among=("direction", "random"),
    )
    placing: str = option(
        "server",
        "where a cold client's update is compared with the groups' directions: server, to which it "
        "sends the update, or client, which keeps w0 and the directions (the paper)",
        among=("server", "client"),
    )
    eta_g: float = option(0.0, "η_g: weight of the other groups' models (0: none)", low=0)
    inter_group: str = option(
        "mean",
        "how eta-g mixes groups: mean: divided by the sum of the weights (the authors' code), or "
        "sum: undivided, as in the paper's text",
        among=("mean", "sum"),
    )


@dataclass(frozen=True)
class FedGroupParameters(FlexCFLParameters):
    """Hyper-parameters of FedGroup."""

    detect: str = option("none", "detection of changed data", among=("none",))


class GroupsByStart(Method):
    """What FlexCFL does in rounds, and FlexCFL-Async on every update."""

    parameters: ColdStartParameters
    state: ColdStart

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        counts = self.parameters.counts_labels
        return Needs(
            kinds=frozenset({LABEL_COUNTS} if counts else ()),
            classes="count their labels unless detect=direction" if counts else "",
            bases=True,
            fits_clients=self._check_groups,
        )

    def _check_groups(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        if self.parameters.groups > clients:
            raise UserError(
                f"{self.parameters.groups} groups cannot be made of {clients} clients: take fewer "
                "groups, or more clients."
            )

    def initialize(self, vector: Vector) -> None:
        """Keep w0; all clients are cold."""
        self.clusters = Clusters({_W0: Model(vector)})
        self.state = self.state_type(vector.copy())

    @property
    def _has_groups(self) -> bool:
        return bool(self.state.directions)

    @property
    def _cold(self) -> dict[str, bool]:
        return self.state.cold

    def on_join(self, client: Client) -> None:
        """Take a client in: cold, or back into its group."""
        super().on_join(client)
        if self._has_groups and not self.clusters.is_placed(client.client_id):
            self._cold[client.client_id] = True

    def on_sent(self, task: InFlight) -> None:
        """Note which clients are asked for label counts."""
        if task.kind == LABEL_COUNTS:
            self.state.ask(task.client)

    def _first(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Pick α m clients, whose first updates make the groups."""
        alone = self.parameters.measure == "random-clients"
        per_group = 1 if alone else self.parameters.pretrain
        return sample(online, per_group * self.parameters.groups, rng)

    def _pretraining(self, client: str) -> Request:
        """Return the work of a client that is to be placed: it trains w0 for a little while."""
        w0 = self.record_of(self.state.initial)
        steps = self.parameters.pretrain_steps
        settings = {LOCAL_STEPS: steps} if steps else {LOCAL_STEPS: 0, LOCAL_EPOCHS: 1}
        return Request(client, models=(), arrays={ARRAYS: w0}, settings=settings)

    def _start_groups(self, updates: Sequence[Update]) -> list[Outcome]:
        """Group the clients of the first round, Algorithm 3; all others are cold from now on.

        A group's model is the plain mean of what its clients have trained; its direction, for good,
        the change from w0.
        """
        start, clusters = self.state, self.clusters
        clients = [update.task.client for update in updates]
        deltas = np.stack([self.compared(update.vector - start.initial) for update in updates])
        count = min(self.parameters.groups, len(updates))
        if count < self.parameters.groups:
            log.warning(
                "Only %d clients have pre-trained, which limits the number of groups.", count
            )
        labels = find_groups(deltas, count, self.parameters.measure, self.rng)
        groups = clusters.split(_W0, parts_of(clients, labels))
        applied = average_by_cluster(clusters, updates, by_examples=False)
        for group in groups:
            change = np.asarray(self.models[group].vector - start.initial)
            start.directions[group] = self.compared(change)
        for client in clusters.members:
            if clusters.is_placed(client):
                start.settle(client)
            else:
                start.cold[client] = True
        return applied

    def _place(self, update: Update) -> Outcome:
        """Put a cold client into the nearest group; what it has trained is used for nothing."""
        client = update.task.client
        group = self.state.nearest(self.compared(np.asarray(update.vector - self.state.initial)))
        self.clusters.assign(client, group)
        self.state.settle(client)
        return Outcome(group, staleness=0, weight=0.0)

    def _take_counts(self, answer: Answer) -> None:
        """Take label counts in; a client whose data have changed is cold."""
        stated = self.progress.fleet.clients[answer.task.client].num_examples
        self.state.take(answer, stated, self.parameters.tolerance)


@dataclass
class FlexCFLState(ColdStart):
    """What FlexCFL knows beside its groups.

    Attributes
    ----------
    picked : dict[str, bool]
        Clients that train in this round; others take part only to be placed.
    holding : dict[str, bool]
        Clients that keep w0 and the groups' directions, with ``placing=client``.
    """

    picked: dict[str, bool] = field(default_factory=dict)
    holding: dict[str, bool] = field(default_factory=dict)


class FlexCFL(GroupsByStart):
    """Groups by the direction of first updates, in rounds, with client migration (FlexCFL)."""

    parameters_type = FlexCFLParameters
    state_type = FlexCFLState
    parameters: FlexCFLParameters
    state: FlexCFLState
    scheduling: InRounds

    def scheduler(self) -> Scheduler:
        """Work in rounds; a cold client is placed first, and then trains if it was drawn."""
        return InRounds(
            participants=self._participants,
            prepares=lambda update: self._has_groups and update.task.client in self._cold,
            returns=lambda client: client in self.state.picked,
            sampling=self.parameters.sampling,
            queries=self._queries,
        )

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        needs = super().needs
        by_itself = self.parameters.placing == "client"
        return replace(needs, kinds=needs.kinds | ({NEAREST_DIRECTION} if by_itself else set()))

    # Before a round: whose data have changed?

    def _queries(self, moment: SelectionContext) -> Sequence[Request] | None:
        """Ask for label counts before each round; then let its participants work."""
        if self.parameters.counts_labels:
            asked = self.scheduling.ask_first(moment, self.state.answers)
            if asked is not None:
                return [Request(client, LABEL_COUNTS, models=()) for client in asked]
        return None

    def on_answer(self, answer: Answer) -> None:
        """Take label counts in, or the group that a cold client has found for itself."""
        if answer.task.kind == LABEL_COUNTS:
            self._take_counts(answer)
        else:
            self._take_choice(answer)

    def _take_choice(self, answer: Answer) -> None:
        """Put a client into the group that it is nearest to; if it was drawn it trains then.

        Raises
        ------
        InvalidReplyError
            There is no such group.
        """
        client, groups = answer.task.client, list(self.state.directions)
        chosen = count_of(answer.metrics.get(CHOSEN))
        if chosen is None or chosen >= len(groups):
            raise InvalidReplyError(f"it chooses none of the {len(groups)} groups")
        self.state.holding[client] = True
        self.clusters.assign(client, groups[chosen])
        self.state.settle(client)
        if client in self.state.picked:
            self.scheduling.work_again(client)

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Pick α m clients before there are groups, then K, and with them all that have changed."""
        parameters, state = self.parameters, self.state
        if not self._has_groups:
            return self._first(online, rng)
        # Pre-training counts as no turn: all train in the rounds after it.
        picked = self.scheduling.pick(online, parameters.participants(len(online)), rng)
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
            group = int(rng.choice(list(self.state.directions)))
            self.clusters.assign(client, group)
            self.state.settle(client)

    def request_for(self, client: str) -> Request:
        """Let a cold client train w0, and others the model of their group."""
        if self._has_groups and client not in self._cold:
            return Request(client)
        pretraining = self._pretraining(client)
        if not self._has_groups or self.parameters.placing == "server":
            return pretraining
        directions = self.state.directions.values()
        arrays = {str(index): to_array(one) for index, one in enumerate(directions)}
        # A client is sent w0 and the directions once: it keeps them, and they never change.
        return replace(
            pretraining,
            kind=NEAREST_DIRECTION,
            arrays={**pretraining.arrays, DIRECTIONS: ArrayRecord(arrays)},
            is_held=client in self.state.holding,
        )

    # After a round.

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Find the groups first; later place cold clients, and average inside each group."""
        if not self._has_groups:
            return self._start_groups(updates)
        cold = [update for update in updates if update.task.client in self._cold]
        others = [update for update in updates if update.task.client not in self._cold]
        placed = [self._place(update) for update in cold]
        # A client that has gone elsewhere meanwhile has trained a model that is not its group's.
        trained = [update for update in others if update.task.cluster == self._home(update)]
        if self.parameters.detect == "direction":
            self._look_at_directions(trained)
        averaged = average_by_cluster(self.clusters, trained)
        if self.parameters.eta_g and trained:
            self._mix_groups()
        done = dict(zip(map(id, [*cold, *trained]), [*placed, *averaged], strict=True))
        return [done.get(id(u)) or Outcome(self._home(u), staleness=0, weight=0.0) for u in updates]

    def _mix_groups(self) -> None:
        """Aggregate between groups: all that have clients, also those that are idle in the round.

        Algorithm 2, lines 12 and 13: a group without a picked client enters with the model that it
        has (line 16).
        """
        clusters, parameters = self.clusters, self.parameters
        groups = [g for g in sorted(self.models) if clusters.size(g, online_only=False)]
        models = [self.models[group] for group in groups]
        mix_groups(models, parameters.eta_g, divided=parameters.inter_group == "mean")

    def _home(self, update: Update) -> int:
        return self.clusters.main(update.task.client)

    def _look_at_directions(self, updates: Sequence[Update]) -> None:
        """Note whose update goes where another group's go: its data may have changed."""
        for update in updates:
            delta = self.compared(update.delta)
            if self.state.looks_foreign(self._home(update), delta):
                self._cold[update.task.client] = True


FedGroup = Variant(FlexCFL, FedGroupParameters, "FlexCFL without migration (FedGroup).")


def mix_groups(models: Sequence[Model], eta_g: float, divided: bool = True) -> None:
    """Add to each group η_g Σ_{l≠j} w̃_l / ‖w̃_l‖ of the others: Algorithm 2, line 21; eq (20).

    As in the authors' code the sum is divided by 1 + η_g Σ_{l≠j} 1/‖w̃_l‖: a weighted mean of the
    groups' models, w̃_j with weight 1. Without this, every round would add a norm of up to
    η_g (m − 1).

    Parameters
    ----------
    models : Sequence[Model]
        The groups that have clients.
    eta_g : float
        η_g: learning rate between groups; 0 leaves them apart.
    divided : bool
        Whether the sum is divided; the paper's text does not.
    """
    norms = [float(np.linalg.norm(model.vector)) or 1.0 for model in models]
    units = [model.vector / np.float32(norm) for model, norm in zip(models, norms, strict=True)]
    total = np.sum(units, axis=0)
    shares = sum(1.0 / norm for norm in norms)
    mixed = [
        (model.vector + np.float32(eta_g) * (total - own))
        / np.float32(1.0 + eta_g * (shares - 1.0 / norm) if divided else 1.0)
        for model, own, norm in zip(models, units, norms, strict=True)
    ]
    for model, vector in zip(models, mixed, strict=True):
        model.replace(np.asarray(vector, np.float32))


# -----------------------------------------------------------------------------
# FlexCFL-Async: FlexCFL's groups and migration on every single update.
#
# Our own: Duan et al. (TPDS 2022) wait for rounds. Some clients train the initial model w0 first,
# and the directions of their updates are grouped; then no client waits for others. A client without
# a group trains w0 for a little while and joins the group of the nearest direction; each later
# update is mixed into its group's model at once, with a weight that falls with staleness as
# FedAsync's does. Before a client is given work it is asked for its label counts, or the direction
# of its latest update is looked at. If its data have changed, it joins the group that alone has
# clients with such labels, and else it trains w0 again. An update that comes from a model which is
# not that of its client's group is dropped.
#
# There is no inter-group aggregation: η_g belongs to a round, after which all groups are at rest.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FlexCFLAsyncParameters(ColdStartParameters, FedAsyncParameters):
    """Hyper-parameters of FlexCFL-Async."""


@dataclass
class FlexCFLAsyncState(ColdStart):
    """What FlexCFL-Async knows beside its groups.

    Attributes
    ----------
    told : dict[str, bool]
        Clients that have said their label counts since they were last given other work.
    """

    told: dict[str, bool] = field(default_factory=dict)


class FlexCFLAsync(GroupsByStart):
    """FlexCFL's groups and migration at every arrival (FlexCFL-Async, our own)."""

    parameters_type = FlexCFLAsyncParameters
    state_type = FlexCFLAsyncState
    parameters: FlexCFLAsyncParameters
    state: FlexCFLAsyncState

    def scheduler(self) -> Scheduler:
        """Wait for the clients that make the groups; then every client works all the time."""
        first = InRounds(participants=self._first)
        return then(first, EveryIdle(), lambda: self._has_groups)

    def request_for(self, client: str) -> Request:
        """Let a cold client train w0, ask others for label counts, or train their group's model."""
        start = self.state
        if not self._has_groups or client in start.cold:
            return self._pretraining(client)
        by_counts = self.parameters.counts_labels
        if by_counts and client not in self.state.told and start.answers(client):
            return Request(client, LABEL_COUNTS, models=())
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        """Take label counts in: a client whose data have changed is cold."""
        client = answer.task.client
        start = self.state
        was_cold = client in start.cold
        self._take_counts(answer)
        if client in start.cold and not was_cold:
            self._place_by_labels(client)

    def _place_by_labels(self, client: str) -> None:
        """Move a client whose data have changed at once, if its labels are those of one group."""
        start, members = self.state, self.clusters.members
        homes = {c: self.clusters.main(c) for c in members if c not in start.cold}
        group = start.group_by_labels(client, homes)
        if group is not None:
            self.clusters.assign(client, group)
            start.settle(client)

    def on_closed(self, task: InFlight) -> None:
        """Ask a client again after each of its trainings, and only once if it does not answer."""
        if task.kind == LABEL_COUNTS:
            self.state.told[task.client] = True
        else:
            self.state.told.pop(task.client, None)

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Find the groups first; then act on each update by itself."""
        if not self._has_groups:
            return self._start_groups(updates)
        return super().aggregate(updates)

    def on_update(self, update: Update) -> Outcome:
        """Place a cold client; mix what others bring into their group's model."""
        client, start = update.task.client, self.state
        if client in start.cold:
            return self._place(update)
        group = self.clusters.main(client)
        if update.task.cluster != group:
            return Outcome(group, staleness=0, weight=0.0)
        looks_at_it = self.parameters.detect == "direction"
        if looks_at_it and start.looks_foreign(group, self.compared(update.delta)):
            start.cold[client] = True
        return mix_by_staleness(self, update, group, update.staleness)
