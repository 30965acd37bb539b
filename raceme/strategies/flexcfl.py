"""FlexCFL: groups by the directions of first updates, with migration under distribution shift.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS
2022. Group cold start (Algorithm 3): some clients pre-train the initial model w0, and their update
directions are clustered by EDC (eq 7) or MADC (eq 6). Client cold start: every other client
pre-trains w0 when it is first selected, joins the group of the nearest direction (eq 8), and trains
that group's model in the same round. Each group runs federated averaging (Algorithm 2), optionally
with inter-group aggregation. Migration: clients state their label counts before each round, and a
client whose counts have changed repeats the client cold start.

The defaults are those of the authors' code, except for the number of groups. ``paper=true`` takes
the choices of the paper's text: one epoch of pre-training, groups that start from w0, undivided
inter-group aggregation, cold clients that find their group themselves. Two of its statements are
not followed: a pre-trained model is discarded, and the client trains E epochs of its group's model
(the text: the client trains E − 1 more epochs and uploads them); K = 20 clients of a round are a
share here, `fraction`.

In the paper a cold client determines its group itself: it keeps w0 and the groups' directions, and
sends the group's number only (``placing=client``). By default the server does so, and devices need
no memory.

FedGroup, a preliminary version, is FlexCFL without migration. Ablations of the paper: RCC
(``measure=random-clients``) and RAC (``newcomers=random``).

Label counts reveal a client's label distribution to the server, for instance the diagnoses of a
ward. ``detect=direction`` does without them (our own): a client is placed again when its latest
update is nearer to the direction of another group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, cosine, cosines, parts_of
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
from raceme.core.requests import (
    Answer,
    InFlight,
    InvalidReplyError,
    Outcome,
    Outcomes,
    Request,
    Update,
)
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
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness
from raceme.strategies.shared import (
    DEFAULT_K,
    DISTANCES,
    LabelCounts,
    check_groups,
    kmeans,
    linkage,
    log_count,
)

# -----------------------------------------------------------------------------
# Group cold start (Algorithm 3, eqs 6 and 7) and client cold start (eq 8).
# -----------------------------------------------------------------------------


_MUCH = 0.5
"""Minimum overlap of two clients' label distributions to count as similar."""


@dataclass
class ColdStart(LabelCounts):
    """State for placing clients, besides their label counts.

    Attributes
    ----------
    initial : Vector
        w0: initial model, which clients pre-train to be placed. Shape (d,).
    directions : dict[int, Vector]
        Δw0^(g) of each group, constant; empty before there are groups.
    """

    initial: Vector
    directions: dict[int, Vector] = field(default_factory=dict)

    def nearest(self, delta: Vector) -> int:
        """Return the group of a first update: g* = argmin (1 − cos(Δw0^(g), Δw_pre)) / 2, eq (8).

        Parameters
        ----------
        delta : Vector
            Change of w0 by pre-training. Shape (d,), weights only.
        """
        directions = self.directions
        return min(directions, key=lambda group: (1 - cosine(directions[group], delta)) / 2)

    def is_nearest_to_other_group(self, group: int, delta: Vector) -> bool:
        """Return whether a client's latest update is nearest to the direction of another group.

        Our own: eq (8) for an update of the group's model instead of w0. False alarms, which are
        frequent if groups overlap, cost a pre-training.

        Parameters
        ----------
        delta : Vector
            Change of the group's model by training. Shape (d,), weights only.
        """
        return self.nearest(delta) != group

    def group_by_labels(self, client: str, homes: Mapping[str, int]) -> int | None:
        """Return the only group with clients of similar label distributions, None if ambiguous.

        Our own: saves the pre-training of eq (8) where labels identify the group; groups that
        differ in something else share labels, which is ambiguous.

        Parameters
        ----------
        client : str
            The client to place; its label counts are known.
        homes : Mapping[str, int]
            Groups of the placed clients.
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
    """Return the overlap of two label distributions: the sum of the smaller shares.

    Parameters
    ----------
    one, other : NDArray[np.float64]
        Samples per label. Shape (labels,).
    """
    return float(np.minimum(one / one.sum(), other / other.sum()).sum())


def find_groups(
    deltas: NDArray[np.float32], groups: int, measure: str, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Cluster the first updates, Algorithm 3.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m: number of groups, at most n.
    measure : str
        ``"edc"``: k-means++ on the updates' cosines to their main directions. ``"madc"``:
        hierarchical clustering on the differences of their cosines. ``"random-clients"``: each of
        m updates is a group (RCC).
    rng : numpy.random.Generator
        Source of the seed of k-means.

    Returns
    -------
    NDArray[np.int64]
        Group of each update, from 0. Shape (n,).
    """
    if measure == "edc":
        return group_by_edc(deltas, groups, seed=int(rng.integers(2**31)))
    if measure == "madc":
        return linkage(madc(cosines(deltas, deltas)), groups)
    return np.arange(len(deltas))


def group_by_edc(deltas: NDArray[np.float32], groups: int, seed: int) -> NDArray[np.int64]:
    """Cluster updates by the Euclidean distance of decomposed cosines (EDC), eq (7).

    The m main directions V are those of a truncated SVD of the updates, which are not centred. An
    update is embedded as its cosines to V, divided by m; k-means++ clusters the embeddings.

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
    return kmeans(cosines(deltas, directions) / groups, groups, seed)


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
        # The sum leaves the terms z = i and z = j out.
        own = differences[:, i] + differences[np.arange(n), np.arange(n)]
        distances[i] = (differences.sum(axis=1) - own) / max(1, n - 2)
    np.fill_diagonal(distances, 0.0)
    return (distances + distances.T) / 2.0


# -----------------------------------------------------------------------------
# FlexCFL in rounds.
# -----------------------------------------------------------------------------


log = getLogger("raceme")

_W0 = 0
"""Cluster of w0, before there are groups."""


_PAPER = {"pretrain_steps": 0, "start": "common", "inter_group": "sum", "placing": "client"}
"""Choices of the paper's text that differ from the authors' code."""


@dataclass(frozen=True)
class ColdStartParameters:
    """Common hyper-parameters of FlexCFL and FlexCFL-Async."""

    groups: int = option(DEFAULT_K, "m: number of groups", low=1)
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
    distance: str = option(
        "counts",
        "distance of label counts: counts: mean difference per label; or wasserstein: scipy's "
        "distance of the two sets of counts, as in the authors' code, which overlooks the exchange "
        "of labels with equal counts",
        among=DISTANCES,
    )
    start: str = option(
        "own",
        "first models of groups: own: the mean of their pre-trained models (the authors' code); or "
        "common: w0 (the paper's Algorithm 2)",
        among=("own", "common"),
    )
    tolerance: float = option(
        0.2, "share of a client's samples that may come or go; a replaced one counts twice", low=0
    )

    @property
    def counts_labels(self) -> bool:
        """Whether changes are detected from label counts."""
        return self.detect == "label-counts"


@dataclass(frozen=True)
class FlexCFLParameters(ColdStartParameters, RoundsParameters):
    """Hyper-parameters of FlexCFL."""

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
    paper: bool = option(
        False,
        "the choices of the paper's text: pretrain-steps=0, start=common, inter-group=sum and "
        "placing=client",
    )

    def __post_init__(self) -> None:
        if self.paper:
            for name, value in _PAPER.items():
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class FedGroupParameters(FlexCFLParameters):
    """Hyper-parameters of FedGroup."""

    detect: str = option("none", "detection of changed data", among=("none",))


class GroupsByStart(Method):
    """Common part of FlexCFL and FlexCFL-Async."""

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
        )

    def check(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        check_groups(self.parameters.groups, clients)

    def initialize(self, vector: Vector) -> None:
        """Store w0; all clients are cold."""
        log_count(self, self.parameters.groups, "groups")
        self.clusters = Clusters({_W0: Model(vector)})
        self.state = self.state_type(vector.copy())

    @property
    def _has_groups(self) -> bool:
        return bool(self.state.directions)

    @property
    def _cold(self) -> dict[str, bool]:
        return self.state.cold

    def on_join(self, client: Client) -> None:
        """Add a client: cold, or back in its group."""
        super().on_join(client)
        if self._has_groups and not self.clusters.is_placed(client.client_id):
            self._cold[client.client_id] = True

    def on_sent(self, task: InFlight) -> None:
        """Record queries for label counts."""
        if task.kind == LABEL_COUNTS:
            self.state.ask(task.client)

    def _first(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Select the α m clients of the group cold start."""
        alone = self.parameters.measure == "random-clients"
        per_group = 1 if alone else self.parameters.pretrain
        return sample(online, per_group * self.parameters.groups, rng)

    def _pretraining(self, client: str) -> Request:
        """Return the pre-training of w0."""
        w0 = self.record_of(self.state.initial)
        steps = self.parameters.pretrain_steps
        settings = {LOCAL_STEPS: steps} if steps else {LOCAL_STEPS: 0, LOCAL_EPOCHS: 1}
        return Request(client, models=(), arrays={ARRAYS: w0}, settings=settings)

    def _start_groups(self, updates: Sequence[Update]) -> Outcomes:
        """Group the clients of the first round, Algorithm 3; all others are cold.

        A group's constant direction is the change from w0 to the plain mean of its clients' models.
        This mean is also its model, unless groups start from w0.
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
            if self.parameters.start == "common":
                self.models[group].replace(start.initial)
        for client in clusters.members:
            if clusters.is_placed(client):
                start.settle(client)
            else:
                start.cold[client] = True
        return applied

    def _place(self, update: Update) -> Outcome:
        """Assign a cold client to the nearest group; its pre-trained model is discarded."""
        client = update.task.client
        group = self.state.nearest(self.compared(np.asarray(update.vector - self.state.initial)))
        self.clusters.assign(client, group)
        self.state.settle(client)
        return Outcome(group, staleness=0, weight=0.0)

    def _process_label_counts(self, answer: Answer) -> None:
        """Process label counts; a client whose data have changed becomes cold."""
        stated = self.progress.fleet.clients[answer.task.client].num_examples
        parameters = self.parameters
        self.state.take(answer, stated, parameters.tolerance, parameters.distance)


@dataclass
class FlexCFLState(ColdStart):
    """State of FlexCFL besides its groups.

    Attributes
    ----------
    picked : dict[str, bool]
        Clients selected for training in this round; others are only placed.
    holding : dict[str, bool]
        With ``placing=client``: clients that store w0 and the groups' directions.
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
        """Work in rounds; a cold client is placed first, and trains then if selected."""
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

    # Before a round: detection of changed data.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query label counts before each round."""
        if self.parameters.counts_labels:
            asked = self.scheduling.ask_first(context, self.state.answers)
            if asked is not None:
                return [Request(client, LABEL_COUNTS, models=()) for client in asked]
        return None

    def on_answer(self, answer: Answer) -> None:
        """Process label counts, or a cold client's own choice of a group."""
        if answer.task.kind == LABEL_COUNTS:
            self._process_label_counts(answer)
        else:
            self._process_choice(answer)

    def _process_choice(self, answer: Answer) -> None:
        """Assign a client to the group of its choice; it trains then if selected.

        Raises
        ------
        InvalidReplyError
            The group does not exist.
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
        """Select α m clients before there are groups, then K and all whose data have changed."""
        parameters, state = self.parameters, self.state
        if not self._has_groups:
            return self._first(online, rng)
        # Pre-training does not count as a turn.
        picked = self.scheduling.pick(online, parameters.participants(len(online)), rng)
        state.picked = {client.client_id: True for client in picked}
        if parameters.newcomers == "random":
            self._place_at_random(rng)
        changed = {c for c in self._cold if self.clusters.is_placed(c) and c not in state.picked}
        return [*picked, *(client for client in online if client.client_id in changed)]

    def _place_at_random(self, rng: np.random.Generator) -> None:
        """Assign the selected cold clients to random groups, for RAC."""
        for client in [client for client in self.state.picked if client in self._cold]:
            group = int(rng.choice(list(self.state.directions)))
            self.clusters.assign(client, group)
            self.state.settle(client)

    def request_for(self, client: str) -> Request:
        """Return pre-training of w0 for a cold client, else training of its group's model."""
        if self._has_groups and client not in self._cold:
            return Request(client)
        pretraining = self._pretraining(client)
        if not self._has_groups or self.parameters.placing == "server":
            return pretraining
        directions = self.state.directions.values()
        arrays = {str(index): to_array(one) for index, one in enumerate(directions)}
        # Sent once: the client stores them, and they are constant.
        return replace(
            pretraining,
            kind=NEAREST_DIRECTION,
            arrays={**pretraining.arrays, DIRECTIONS: ArrayRecord(arrays)},
            is_held=client in self.state.holding,
        )

    # After a round.

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Form the groups first; later place cold clients, and average inside each group."""
        if not self._has_groups:
            return self._start_groups(updates)
        cold = [update for update in updates if update.task.client in self._cold]
        others = [update for update in updates if update.task.client not in self._cold]
        placed = {update.number: self._place(update) for update in cold}
        unused = {u.number: Outcome(self._main_group(u), staleness=0, weight=0.0) for u in others}
        # A client that has migrated since then has trained the model of its former group.
        trained = [update for update in others if update.task.cluster == self._main_group(update)]
        if self.parameters.detect == "direction":
            self._mark_cold_by_direction(trained)
        averaged = average_by_cluster(self.clusters, trained)
        if self.parameters.eta_g and trained:
            self._mix_groups()
        return {**unused, **placed, **averaged}

    def _mix_groups(self) -> None:
        """Aggregate between all groups with clients, including those idle in the round.

        Algorithm 2, lines 12 and 13: a group without a selected client keeps its model (line 16).
        """
        clusters, parameters = self.clusters, self.parameters
        groups = [g for g in sorted(self.models) if clusters.size(g, online_only=False)]
        models = [self.models[group] for group in groups]
        mix_groups(models, parameters.eta_g, divided=parameters.inter_group == "mean")

    def _main_group(self, update: Update) -> int:
        return self.clusters.main(update.task.client)

    def _mark_cold_by_direction(self, updates: Sequence[Update]) -> None:
        """Make clients cold whose update is nearest to another group's direction."""
        for update in updates:
            delta = self.compared(update.delta)
            if self.state.is_nearest_to_other_group(self._main_group(update), delta):
                self._cold[update.task.client] = True


FedGroup = Variant(FlexCFL, FedGroupParameters, "FlexCFL without migration (FedGroup).")


def mix_groups(models: Sequence[Model], eta_g: float, divided: bool = True) -> None:
    """Add to each group η_g Σ_{l≠j} w̃_l / ‖w̃_l‖ of the others: Algorithm 2, line 21; eq (20).

    As in the authors' code the sum is divided by 1 + η_g Σ_{l≠j} 1/‖w̃_l‖: a weighted mean of the
    groups' models, w̃_j with weight 1. Undivided, each round adds a norm of up to η_g (m − 1).

    Parameters
    ----------
    models : Sequence[Model]
        Models of the groups with clients.
    eta_g : float
        η_g: inter-group learning rate.
    divided : bool
        Whether the sum is divided, as in the authors' code; the paper's text does not.
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
# FlexCFL-Async: FlexCFL's groups and migration at every update (our own).
#
# After a synchronous group cold start, each update is mixed into its group's model on arrival, with
# FedAsync's staleness weight. Before a client trains, its label counts are queried, or the
# direction of its latest update is checked. If its data have changed, it joins the only group with
# similar label distributions, or else repeats the client cold start. An update of a model that is
# not of its client's group is dropped. There is no inter-group aggregation, which needs rounds.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FlexCFLAsyncParameters(ColdStartParameters, MixingParameters):
    """Hyper-parameters of FlexCFL-Async."""


@dataclass
class FlexCFLAsyncState(ColdStart):
    """State of FlexCFL-Async besides its groups.

    Attributes
    ----------
    told : dict[str, bool]
        Clients queried for label counts since their last training.
    """

    told: dict[str, bool] = field(default_factory=dict)


class FlexCFLAsync(GroupsByStart):
    """FlexCFL's groups and migration at every arrival (FlexCFL-Async, our own)."""

    parameters_type = FlexCFLAsyncParameters
    state_type = FlexCFLAsyncState
    parameters: FlexCFLAsyncParameters
    state: FlexCFLAsyncState

    def scheduler(self) -> Scheduler:
        """Run the group cold start in one round; then keep every client busy."""
        first = InRounds(participants=self._first)
        return then(first, EveryIdle(), lambda: self._has_groups)

    def request_for(self, client: str) -> Request:
        """Return pre-training of w0, a query for label counts, or training of the group's model."""
        start = self.state
        if not self._has_groups or client in start.cold:
            return self._pretraining(client)
        by_counts = self.parameters.counts_labels
        if by_counts and client not in self.state.told and start.answers(client):
            return Request(client, LABEL_COUNTS, models=())
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        """Process label counts: a client whose data have changed becomes cold."""
        client = answer.task.client
        start = self.state
        was_cold = client in start.cold
        self._process_label_counts(answer)
        if client in start.cold and not was_cold:
            self._place_by_labels(client)

    def _place_by_labels(self, client: str) -> None:
        """Move a cold client at once if its labels identify a group."""
        start, members = self.state, self.clusters.members
        homes = {c: self.clusters.main(c) for c in members if c not in start.cold}
        group = start.group_by_labels(client, homes)
        if group is not None:
            self.clusters.assign(client, group)
            start.settle(client)

    def on_closed(self, task: InFlight) -> None:
        """Allow the next query after each training, without repeating unanswered ones."""
        if task.kind == LABEL_COUNTS:
            self.state.told[task.client] = True
        else:
            self.state.told.pop(task.client, None)

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Form the groups first; then process each update by itself."""
        if not self._has_groups:
            return self._start_groups(updates)
        return super().aggregate(updates)

    def on_update(self, update: Update) -> Outcome:
        """Place a cold client; mix other updates into their group's model."""
        client, start = update.task.client, self.state
        if client in start.cold:
            return self._place(update)
        group = self.clusters.main(client)
        if update.task.cluster != group:
            return Outcome(group, staleness=0, weight=0.0)
        looks_at_it = self.parameters.detect == "direction"
        if looks_at_it and start.is_nearest_to_other_group(group, self.compared(update.delta)):
            start.cold[client] = True
        return mix_by_staleness(self, update, group, update.staleness)
