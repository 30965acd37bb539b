"""FAACL: clusters that may be supported by clusters which they do not support.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024. Every
client trains a random θ and is a cluster of its own. Then clusters are trained, compared and
merged, again and again, until nothing changes: C2 supports C1 if on every client of C1 the model of
C2 is no worse by more than ε, by Wilcoxon's test on the losses of its validation samples; two that
support each other are merged; and a model is trained by the clients of its cluster and of those
that support it. Hierarchical FAACL does this in partitions, first of one client each, which are
joined in pairs until one is left: far fewer models are compared. From then on clusters stay as they
are, and are trained.

Where the thesis is silent (our readings): α is 0.05; support is found out anew each time; a merged
cluster is compared again in the next pass only; "nothing changes" means the same clients together,
whoever supports whom; a step of training is one pass of mini-batches; the last partition, of all
clients, is worked on too. A client that comes later trains θ and is a partition of its own, which
is joined with the others. These rounds are in :mod:`raceme.strategies.faacl.strategy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.errors import UserError
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import (
    ARRAYS,
    COMPUTE_SCALE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    LOSSES,
    ON,
    VALIDATION_SHARE,
    Vector,
    forward_cost,
    kept_for_validation,
)
from raceme.core.options import option
from raceme.core.requests import (
    Answer,
    InFlight,
    InvalidReplyError,
    Outcome,
    Request,
    Update,
    Value,
)
from raceme.core.scheduling import InRounds, RoundsParameters, Scheduler, SelectionContext
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.faacl.support import (
    Partition,
    Supported,
    disjoint_pairs,
    fewest_samples,
    no_worse,
)
from raceme.strategies.shared import StalenessFunction, staleness_factor

# -----------------------------------------------------------------------------
# What FAACL, C-FAACL and FAACL-Async have in common: what clients are asked, and what follows.
#
# Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024;
# see
# :mod:`raceme.strategies.faacl.strategy`.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

INIT, SUPPORT = "init", "support"
"""Phases, by which bytes are counted, beside training."""
START = 0
"""The cluster of θ, in which clients are until they have a model of their own."""


@dataclass(frozen=True)
class SupportParameters:
    """What FAACL, C-FAACL and FAACL-Async can be told in common."""

    epsilon: float = option(
        0.5, "ε: how much worse another model may be on a sample and still support", low=0
    )
    alpha: float = option(0.05, "α: level of Wilcoxon's test", above=0, below=1)
    init_epochs: int = option(5, "passes over its samples before a client is compared", low=1)


@dataclass
class SupportState:
    """What they know in common beside their models.

    Attributes
    ----------
    initial : Vector
        The θ from which every client starts. Shape (d,).
    cold : dict[str, bool]
        Clients that have no model of their own yet, or data that belong nowhere yet.
    supported : Supported
        Who supports whom, and who is compared with whom.
    """

    initial: Vector
    cold: dict[str, bool] = field(default_factory=dict)
    supported: Supported = field(default_factory=Supported)


# What a client is asked.


def validation_share(method: Method) -> float:
    """Return the share of its samples that a client keeps to compare models on."""
    share = method.train_config[VALIDATION_SHARE]
    assert isinstance(share, float), "start() sees to it"
    return share


def comparison(method: Method, client: str, clusters: Sequence[int]) -> Request:
    """Return the work of a client that measures models on its validation samples."""
    examples = method.progress.fleet.clients[client].num_examples
    cost = validation_share(method) * forward_cost(method.train_config, examples, len(clusters))
    settings: dict[str, Value] = {ON: "validation", COMPUTE_SCALE: cost}
    return Request(client, LOSSES, models=tuple(clusters), settings=settings, phase=SUPPORT)


def trains(supported: Supported, cluster: int) -> list[int]:
    """Return what a cluster's clients train, Algorithm 4: its model, and those that it supports."""
    return [cluster, *supported.supported_by(cluster)]


# What becomes of the answers.


def losses_of(answer: Answer, models: int, key: str = LOSSES) -> NDArray[np.float64]:
    """Return what a client has measured, shape (models, samples).

    Raises
    ------
    InvalidReplyError
        These are no losses of so many models.
    """
    losses = answer.numbers.get(key)
    if losses is None or losses.ndim != 2 or losses.dtype.kind != "f" or not losses.size:
        raise InvalidReplyError("it brings no losses")
    if len(losses) != models:
        raise InvalidReplyError(f"it brings losses of {len(losses)} of {models} models")
    return np.asarray(losses, np.float64)


def compared(answer: Answer, alpha: float) -> dict[int, NDArray[np.float64]]:
    """Return a client's losses by cluster, each of shape (samples,), its own cluster's first.

    Raises
    ------
    InvalidReplyError
        These are no losses of the models that it was sent, or too few for any test.
    """
    asked = answer.task.candidates
    measured, needed = losses_of(answer, len(asked)), fewest_samples(alpha)
    if measured.shape[1] < needed:
        raise InvalidReplyError(
            f"it has {measured.shape[1]} samples for validation, and a test at level {alpha:g} "
            f"needs {needed}"
        )
    return dict(zip(asked, measured, strict=True))


class FindsSupport(Method):
    """What FAACL, C-FAACL and FAACL-Async do with clients that have no model of their own yet."""

    parameters: SupportParameters
    state: SupportState

    @property
    def needs(self) -> Needs:
        """What a run of the method has to have."""
        return Needs(
            kinds=frozenset({LOSSES}), validation=True, fits_validation=self._check_samples
        )

    def _check_samples(self, samples: int) -> None:
        """Raise UserError if a client keeps too few samples for any test to be passed."""
        needed = fewest_samples(alpha := self.parameters.alpha)
        if samples < needed:
            raise UserError(
                f"A client keeps {samples} of its samples to compare models on, and a test at "
                f"level {alpha:g} needs {needed}: raise validation-share, or take fewer clients."
            )

    def initialize(self, vector: Vector) -> None:
        """Begin with θ, which serves all clients until there are clusters."""
        self.clusters = Clusters({START: Model(vector)})
        self.state = self.state_type(vector.copy())

    def on_join(self, client: Client) -> None:
        """Take a client in; one that is new has to train θ first."""
        is_new = client.client_id not in self.clusters.members
        super().on_join(client)
        if is_new:
            self._greet(client)

    def _greet(self, client: Client) -> None:
        """Note that a new client has to train θ; say so if it has too few samples for any test."""
        self.state.cold[client.client_id] = True
        needed = fewest_samples(self.parameters.alpha)
        kept = kept_for_validation(client.num_examples, validation_share(self))
        if client.num_examples and kept < needed:
            log.warning(
                "%s keeps %d samples for validation, and a test at level %g needs %d: no other "
                "model can support its cluster. Raise validation-share or alpha.",
                client.client_id,
                kept,
                self.parameters.alpha,
                needed,
            )

    def _initial_training(self, client: str, epochs: int) -> Request:
        """Return the work of a client that has no model yet: it trains θ, Algorithm 1."""
        settings: dict[str, Value] = {LOCAL_STEPS: 0, LOCAL_EPOCHS: epochs}
        arrays = {ARRAYS: self.record_of(self.state.initial)}
        return Request(client, models=(), arrays=arrays, settings=settings, phase=INIT)

    def _found_each(self, updates: Sequence[Update]) -> list[Outcome]:
        """Let each client that has trained θ become a cluster of its own."""
        applied = []
        for update in updates:
            client = update.task.client
            cluster = self.clusters.found(Model(update.vector.copy(), 1), [client])
            self.state.cold.pop(client, None)
            applied.append(Outcome(cluster, staleness=0, weight=1.0))
        if START in self.models and not self.clusters.clients(START, online_only=False):
            self.clusters.retire(START)
        return applied


SUPPORTERS = MeasureSchema(
    "support",
    "support between clusters",
    ("supporters",),
    per="cluster",
    summary="column",
    figure="graph",
)
"""Each cluster that has supporters from now on, to them, ascending."""


def report_support(
    method: Method, supported: Supported, before: Mapping[int, tuple[int, ...]]
) -> None:
    """Report who supports whom, if that is not as it was."""
    now = supported.listed()
    if now != before:
        method.report(
            Measured(method.now(), method.progress.updates, SUPPORTERS, {"supporters": now})
        )


# -----------------------------------------------------------------------------
# FAACL's rounds: train, compare, merge, until nothing changes; then train.
#
# Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024:
# Algorithms 2 to 6. FAACL and C-FAACL have these rounds in common; where the clusters that they
# start
# from come from differs.
# -----------------------------------------------------------------------------


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

    def scheduler(
        self, queries: Callable[[SelectionContext], Sequence[Request] | None]
    ) -> InRounds:
        """Work in rounds; who supports other clusters trains their models after its own.

        Parameters
        ----------
        queries : Callable
            Returns what clients are asked before a round; None if it may begin.
        """
        return InRounds(
            self._parameters.fraction,
            participants=self._participants,
            picking=self._parameters.picking,
            again=lambda client: self._next_model(client) is not None,
            queries=queries,
        )

    @property
    def _dispatch(self) -> InRounds:
        dispatch = self._method.scheduling
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

    def train(self, client: str) -> Request:
        """Return the work of a client: the next of the models that it trains in this round."""
        model = self._next_model(client)
        return Request(client, models=None if model is None else (model,))

    def sent(self, task: InFlight) -> None:
        """Note which model a client was given to train."""
        self._state.begun.setdefault(task.client, {})[task.cluster] = True

    def _next_model(self, client: str) -> int | None:
        """Return the first model that a client trains in this round and has not begun."""
        state, begun = self._state, self._state.begun.get(client, {})
        if client in state.cold:
            return None
        own = trains(state.supported, self._method.clusters.main(client))
        return next((model for model in own if model not in begun), None)

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Average what was trained from each model, weighted by the numbers of samples."""
        self._state.begun = {}
        self._state.is_due = bool(updates) and not self._state.supported.is_settled
        clusters = self._method.clusters
        return average_by_cluster(clusters, updates, home=lambda update: update.task.cluster)

    # Cluster Support and Cluster Merge, Algorithms 2 and 3, between two rounds.

    def compare(self, moment: SelectionContext) -> list[Request] | None:
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
            kept = int(method.rng.choice(pair))
            supported.unite(pair, method.clusters.merge(pair, keep=kept))
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


# -----------------------------------------------------------------------------
# FAACL-Async: FAACL's clusters and support, tested and acted on with every single answer.
#
# Our own, after Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis,
# Waterloo 2024. There are no rounds and no partitions, and nobody waits. Every client trains θ
# and
# becomes a cluster of its own when it is done. Then it measures, a few at a time, the models of
# the
# clusters that it has not been compared with, on its validation samples, and among them those
# first
# that would merge with its own. Only when there are none left does it train: a slow client that
# trained in between would keep its whole cluster from merging. What it finds is acted on at
# once. A
# cluster supports another if the latest test of every client of that one says so, and two that
# support each other are merged. Old tests are made again between two trainings, a few at a time,
# so
# that support ends when models grow apart.
#
# An update is mixed in by its staleness, as in FedAsync, but never with less than its client's
# share
# of the samples of all that train the model: a client that is alone in its cluster just replaces
# it.
# An update that was trained from a model which a merge has given up is of no use: the mean of
# two
# networks that were trained apart may be worse than either.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FAACLAsyncParameters(SupportParameters):
    """Hyper-parameters of FAACL-Async."""

    share: float = option(0.6, "share of a fresh update in the model", above=0, high=1)
    decay: str = option("hinge", "staleness function s", among=("constant", "hinge", "polynomial"))
    a: float = option(1.0, "slope of the hinge, exponent of the polynomial", low=0)
    b: float = option(4.0, "staleness up to which the hinge does nothing", low=0)
    compared: int = option(5, "most other models that a client measures at a time", low=1)
    retest_after: int = option(
        8,
        "most trainings of a client before it repeats its oldest tests (0: never); at first, and "
        "when a result has changed, it is one, and it doubles as long as nothing does",
        low=0,
    )

    def share_of(self, staleness: int) -> float:
        """Return the share of an update in the model: that of a fresh one, times s(τ)."""
        function = cast(StalenessFunction, self.decay)
        return self.share * staleness_factor(function, staleness, self.a, self.b)


@dataclass
class FAACLAsyncState(SupportState):
    """What FAACL-Async knows beside its models.

    Attributes
    ----------
    passed : dict[str, dict[int, bool]]
        The latest tests of each client: whether a cluster's model is no worse than its own.
    tested_at : dict[str, dict[int, int]]
        When these were made: a count of all answers.
    answers : int
        Answers so far.
    trained : dict[str, int]
        Trainings of each client since it last measured models.
    waits : dict[str, int]
        After how many it repeats tests.
    unanswered : dict[str, bool]
        Clients that were asked to measure models and have brought no valid answer.
    begun : dict[str, dict[int, bool]]
        Models that a client was given to train since it last began with its own.
    """

    passed: dict[str, dict[int, bool]] = field(default_factory=dict)
    tested_at: dict[str, dict[int, int]] = field(default_factory=dict)
    answers: int = 0
    trained: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, bool] = field(default_factory=dict)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)


class FAACLAsync(FindsSupport):
    """FAACL's tests, support and merges as updates arrive (FAACL-Async, our own)."""

    parameters_type = FAACLAsyncParameters
    state_type = FAACLAsyncState
    parameters: FAACLAsyncParameters
    state: FAACLAsyncState

    # What a client is asked.

    def request_for(self, client: str) -> Request:
        """Let a new client train θ, and others measure models or train the next of theirs."""
        if client in self.state.cold:
            return self._initial_training(client, self.parameters.init_epochs)
        own = self.clusters.main(client)
        if others := self._to_compare(client, own):
            return comparison(self, client, [own, *others])
        models, begun = trains(self.state.supported, own), self.state.begun.get(client, {})
        model = next((model for model in models if model not in begun), own)
        return Request(client, models=(model,))

    def _to_compare(self, client: str, own: int) -> list[int]:
        """Return the clusters that a client is to be compared with now, none if it is to train."""
        state, trained = self.state, self.state.trained.get(client, 0)
        tested = state.tested_at.get(client, {})
        others = [cluster for cluster in self.models if cluster != own and cluster != START]
        is_new = any(other not in tested for other in others)
        is_old = self.parameters.retest_after > 0 and state.waits.get(client, 1) <= trained
        # Who cannot measure trains all the same.
        if client in state.unanswered or not (is_new or is_old):
            return []
        # Untested ones come first, and of these the ones that have agreed to merge.
        order = {other: (tested.get(other, -1), not self._agrees(other, own)) for other in others}
        return sorted(others, key=lambda other: order[other])[: self.parameters.compared]

    def _agrees(self, cluster: int, other: int) -> bool:
        """Return whether all clients of a cluster have found another's model no worse."""
        passed = self.state.passed
        clients = self.clusters.clients(cluster)
        return bool(clients) and all(passed.get(c, {}).get(other, False) for c in clients)

    def on_sent(self, task: InFlight) -> None:
        """Note who trains what."""
        if task.kind == LOSSES:
            self.state.unanswered[task.client] = True
            return
        begun = self.state.begun.setdefault(task.client, {})
        if task.cluster in begun:
            begun.clear()
        begun[task.cluster] = True

    def on_closed(self, task: InFlight) -> None:
        """Count a client's trainings since it last measured models."""
        trained = self.state.trained
        if task.kind == LOSSES:
            trained[task.client] = 0
        else:
            trained[task.client] = trained.get(task.client, 0) + 1
            self.state.unanswered.pop(task.client, None)

    # What becomes of an answer.

    def on_answer(self, answer: Answer) -> None:
        """Test the models that a client has measured; change support, and merge, at once.

        Raises
        ------
        InvalidReplyError
            They are no losses, or too few for any test.
        """
        client, state = answer.task.client, self.state
        measured = compared(answer, self.parameters.alpha)
        del state.unanswered[client]
        own = next(iter(measured))
        if self.clusters.main(client) != own:
            # It was merged meanwhile: what was measured is not of its present model.
            return
        state.answers += 1
        passed = state.passed.setdefault(client, {})
        before = dict(passed)
        for other, losses in measured.items():
            if other != own and other in self.models:
                state.supported.tests += 1
                passed[other] = no_worse(
                    measured[own], losses, self.parameters.epsilon, self.parameters.alpha
                )
                state.tested_at.setdefault(client, {})[other] = state.answers
        longer = min(2 * state.waits.get(client, 1), self.parameters.retest_after)
        state.waits[client] = longer if passed == before else 1
        self._update_support(own)
        self._merge(own)

    def _update_support(self, cluster: int) -> None:
        """Let those support a cluster of which all its clients say so."""
        before = self.state.supported.listed()
        supporters = [k for k in self.models if k != cluster and self._agrees(cluster, k)]
        self.state.supported.support(cluster, supporters)
        report_support(self, self.state.supported, before)

    def _merge(self, cluster: int) -> None:
        """Merge a cluster with one that supports it and that it supports, drawn at random."""
        supported = self.state.supported
        mutual = [k for k in supported.supported_by(cluster) if supported.are_mutual(cluster, k)]
        if not mutual:
            return
        pair = (cluster, mutual[int(self.rng.integers(len(mutual)))])
        kept = pair[int(self.rng.integers(2))]
        before = supported.listed()
        target = self.clusters.merge(pair, keep=kept)
        supported.unite(pair, target)
        self._carry_over(pair, target)
        report_support(self, supported, before)

    def _carry_over(self, pair: tuple[int, int], target: int) -> None:
        """Let tests of two clusters that were merged be of the new one, if both were passed."""
        for client, passed in self.state.passed.items():
            tested = self.state.tested_at.setdefault(client, {})
            found = [passed.pop(cluster, False) for cluster in pair]
            times = [tested.pop(cluster, 0) for cluster in pair]
            if all(found) and self.clusters.main(client) != target:
                passed[target], tested[target] = True, min(times)

    def on_update(self, update: Update) -> Outcome:
        """Make a cluster of a new client; mix what others have trained into its model."""
        if update.task.client in self.state.cold:
            (founded,) = self._found_each([update])
            return founded
        return self._mix(update)

    def _mix(self, update: Update) -> Outcome:
        task, own = update.task, self.clusters.main(update.task.client)
        # Where its model lives on; nowhere if a merge has given it up.
        cluster = next(iter(self.clusters.continuations(task.cluster)), None)
        if cluster is None or own not in self._trainers(cluster):
            return Outcome(own, staleness=0, weight=0.0)
        model = self.models[cluster]
        staleness = update.staleness
        share = max(self.parameters.share_of(staleness), self._share(update, cluster))
        model.mix(update.vector, share)
        return Outcome(cluster, staleness, share)

    def _trainers(self, cluster: int) -> list[int]:
        """Return the clusters whose clients train a cluster's model."""
        return [cluster, *self.state.supported.supporters.get(cluster, {})]

    def _share(self, update: Update, cluster: int) -> float:
        """Return a client's share of the samples of all that train a cluster's model."""
        fleet = self.progress.fleet
        names = {name for k in self._trainers(cluster) for name in self.clusters.clients(k)}
        names.add(update.task.client)
        total = sum(fleet.counted(name) for name in names)
        own = fleet.counted(update.task.client)
        return own / total if total else 1.0 / len(names)


# -----------------------------------------------------------------------------
# FAACL: clusters that may be supported by clusters which they do not support.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FAACLParameters(SupportRoundsParameters):
    """Hyper-parameters of FAACL."""


@dataclass
class FAACLState(SupportRoundsState):
    """What FAACL knows beside its models."""


class FAACL(FindsSupport):
    """Clusters found by statistical tests, with one-sided support between them (FAACL)."""

    parameters_type = FAACLParameters
    state_type = FAACLState
    parameters: FAACLParameters
    state: FAACLState

    def scheduler(self) -> Scheduler:
        """Work in rounds; who supports other clusters trains their models after its own."""
        self.rounds = SupportRounds(self)
        return self.rounds.scheduler(self.rounds.compare)

    def on_answer(self, answer: Answer) -> None:
        """Take losses in."""
        self.rounds.take(answer)

    def request_for(self, client: str) -> Request:
        """Let a new client train θ, Algorithm 1, and others the next of their models."""
        if client in self.state.cold:
            return self._initial_training(client, self.parameters.init_epochs)
        return self.rounds.train(client)

    def on_sent(self, task: InFlight) -> None:
        """Note who trains what."""
        if task.kind != LOSSES:
            self.rounds.sent(task)

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Make clusters of new clients; average what was trained from each model."""
        cold = [update for update in updates if update.task.client in self.state.cold]
        others = [update for update in updates if update.task.client not in self.state.cold]
        averaged = self.rounds.aggregate(others)
        founded = self._found_each(cold)
        self.rounds.add([applied.cluster for applied in founded])
        done = dict(zip(map(id, [*cold, *others]), [*founded, *averaged], strict=True))
        return [done[id(update)] for update in updates]
