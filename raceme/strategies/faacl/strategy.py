"""FAACL: clustering by statistical tests, with asymmetric support between clusters.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024. Every
client trains a random θ and forms a cluster of its own. Clusters are trained, compared and merged
until nothing changes: C2 supports C1 if on every client of C1 the model of C2 is not worse by more
than ε, by Wilcoxon's test on the losses of validation samples; clusters with mutual support are
merged; a model is trained by the clients of its cluster and of its supporters. Hierarchical FAACL
does this in partitions, first of one client each, which are joined in pairs until one is left; far
fewer models are compared. The final clusters are only trained.

Our readings where the thesis is silent: α is 0.05; support is determined anew in each comparison; a
merged cluster is compared again in the next pass; "nothing changes" refers to the members of
clusters, not to support; a step of training is one pass of mini-batches; the last partition, of all
clients, is processed too; a client that joins later trains θ and forms a new partition.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.errors import UserError, about, plural
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import Vector, forward_cost, kept_for_validation
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
from raceme.core.scheduling import InRounds, RoundsParameters, Scheduler, SelectionContext, share_of
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.shared import StalenessParameters

# -----------------------------------------------------------------------------
# Support between clusters, Algorithms 2, 3 and 6. A cluster is supported by another if the other's
# model is not worse than its own by more than ε on the validation samples of each of its clients.
# Clusters with mutual support are merged; a one-sided supporter also trains the other's model.
# -----------------------------------------------------------------------------


_FEW = 13
"""Number of differences up to which the exact distribution of Wilcoxon's statistic is used."""


def no_worse(
    own: NDArray[np.floating], other: NDArray[np.floating], epsilon: float, alpha: float
) -> bool:
    """Return whether another model is not worse than the own one by more than ε.

    Wilcoxon's signed-rank test on the differences ``other − own − ε`` of each sample rejects the
    null hypothesis ``H0: own + ε < other``. Zero differences are left out; if all are zero, the
    test does not reject.

    Parameters
    ----------
    own, other : NDArray
        Losses of the same samples under the two models. Shape (n,).
    epsilon : float
        ε: tolerance; larger values pass more.
    alpha : float
        α: level of the test; larger values pass more.
    """
    differences = np.asarray(other, np.float64) - np.asarray(own, np.float64) - epsilon
    differences = differences[differences != 0]
    if not len(differences):
        return False
    # With "auto", few differences and ties, scipy enumerates all 2^n signs, which takes up to a
    # second.
    method = "exact" if len(differences) <= _FEW else "auto"
    return bool(wilcoxon(differences, alternative="less", method=method).pvalue <= alpha)


def fewest_samples(alpha: float) -> int:
    """Return the minimum sample size of a test at level α: its smallest p-value is 2^−n."""
    return max(1, math.ceil(-math.log2(alpha)))


def disjoint_pairs(
    clusters: Sequence[int], are_mutual: Callable[[int, int], bool], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Return disjoint pairs of clusters with mutual support: one pass of Algorithm 3.

    Parameters
    ----------
    clusters : Sequence[int]
        Ids of the clusters.
    are_mutual : Callable
        Whether two clusters support each other.
    rng : numpy.random.Generator
        Draws the order of the pairs, on which the result depends.
    """
    pairs = [(a, b) for i, a in enumerate(clusters) for b in clusters[i + 1 :]]
    taken: set[int] = set()
    found = []
    for index in rng.permutation(len(pairs)):
        pair = pairs[index]
        if taken.isdisjoint(pair) and are_mutual(*pair):
            taken.update(pair)
            found.append(pair)
    return found


@dataclass
class ComparedClusters:
    """Clusters that are compared with each other.

    Attributes
    ----------
    settled : bool
        Whether the last comparison changed nothing.
    """

    clusters: list[int]
    settled: bool = False


@dataclass
class Supported:
    """Support between clusters, and partitions in which they are compared.

    Attributes
    ----------
    supporters : dict[int, dict[int, bool]]
        C.sup of each cluster C: the clusters that also train its model.
    partitions : list[ComparedClusters]
        Partitions of the compared clusters.
    heirs : dict[int, int]
        Merged clusters, to the clusters that replace them.
    tests : int
        Number of tests so far, each of a client's losses under two models.
    """

    supporters: dict[int, dict[int, bool]] = field(default_factory=dict)
    partitions: list[ComparedClusters] = field(default_factory=list)
    heirs: dict[int, int] = field(default_factory=dict)
    tests: int = 0

    # Support.

    def is_supported(self, cluster: int, by: int) -> bool:
        """Return whether a cluster is supported by another one."""
        return by in self.supporters.get(cluster, {})

    def are_mutual(self, one: int, other: int) -> bool:
        """Return whether two clusters support each other."""
        return self.is_supported(one, other) and self.is_supported(other, one)

    def supported_by(self, cluster: int) -> list[int]:
        """Return the clusters supported by a cluster."""
        return [other for other, theirs in self.supporters.items() if cluster in theirs]

    def trained_by(self, cluster: int) -> list[int]:
        """Return the models that a cluster trains, Algorithm 4: its own and those it supports."""
        return [cluster, *self.supported_by(cluster)]

    def support(self, cluster: int, supporters: Iterable[int]) -> None:
        """Replace the supporters of a cluster."""
        self.supporters[cluster] = dict.fromkeys(sorted(supporters), True)
        if not self.supporters[cluster]:
            del self.supporters[cluster]

    def listed(self) -> dict[int, tuple[int, ...]]:
        """Return the supporters of each supported cluster, ascending."""
        return {cluster: tuple(sorted(own)) for cluster, own in sorted(self.supporters.items())}

    def find(
        self,
        cluster: int,
        others: Iterable[int],
        losses: Sequence[dict[int, NDArray[np.float64]]],
        epsilon: float,
        alpha: float,
    ) -> list[int]:
        """Return the supporters of a cluster by Algorithm 2, and count the tests.

        Parameters
        ----------
        cluster : int
            The cluster.
        others : Iterable[int]
            Candidates for its support.
        losses : Sequence of dict[int, NDArray]
            Losses by model of each client of the cluster, each of shape (n,). A client without
            losses of a candidate rejects it.
        epsilon, alpha : float
            ε: tolerance; α: level of the test.
        """

        def agrees(own: dict[int, NDArray[np.float64]], other: int) -> bool:
            if other not in own or cluster not in own:
                return False
            self.tests += 1
            return no_worse(own[cluster], own[other], epsilon, alpha)

        # all() stops at the first client that rejects.
        return [other for other in others if losses and all(agrees(own, other) for own in losses)]

    def unite(self, pair: tuple[int, int], target: int) -> None:
        """Replace two clusters by one, with their common supporters and supported clusters."""
        one, two = pair
        common = self.supporters.pop(one, {}).keys() & self.supporters.pop(two, {}).keys()
        self.support(target, common - {one, two})
        for cluster, theirs in list(self.supporters.items()):
            kept = [other for other in theirs if other not in pair]
            if one in theirs and two in theirs:
                kept.append(target)
            self.support(cluster, kept)
        self.heirs.update(dict.fromkeys(pair, target))
        for partition in self.partitions:
            if one in partition.clusters:
                partition.clusters = [c for c in partition.clusters if c not in pair]
                partition.clusters.append(target)

    def heir(self, cluster: int) -> int:
        """Return the cluster that replaces a merged one; itself if not merged."""
        while cluster in self.heirs:
            cluster = self.heirs[cluster]
        return cluster

    # Partitions.

    @property
    def is_settled(self) -> bool:
        """Whether there is a single, settled partition."""
        return len(self.partitions) == 1 and self.partitions[0].settled

    def compared_with(self, cluster: int) -> list[int]:
        """Return the clusters to compare a cluster with; none while it waits for others."""
        for partition in self.partitions:
            if cluster in partition.clusters and not partition.settled:
                return [other for other in partition.clusters if other != cluster]
        return []

    def is_unsettled(self, cluster: int) -> bool:
        """Return whether a cluster's partition is unsettled."""
        return any(cluster in p.clusters and not p.settled for p in self.partitions)

    def join(self, rng: np.random.Generator) -> None:
        """Join settled partitions in random pairs, Algorithm 6; an odd one waits."""
        order = [self.partitions[index] for index in rng.permutation(len(self.partitions))]
        joined = [
            ComparedClusters([*one.clusters, *two.clusters])
            for one, two in zip(order[::2], order[1::2], strict=False)
        ]
        self.partitions = joined + order[len(joined) * 2 :]


# -----------------------------------------------------------------------------
# Common part of FAACL, C-FAACL and FAACL-Async.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

INIT, SUPPORT = "init", "support"
"""Phases of the traffic counts, besides training."""
START = 0
"""Cluster of θ, of clients without a model of their own."""


@dataclass(frozen=True)
class SupportParameters:
    """Common hyper-parameters of FAACL, C-FAACL and FAACL-Async."""

    epsilon: float = option(
        0.5, "ε: how much worse another model may be on a sample and still support", low=0
    )
    alpha: float = option(0.05, "α: level of Wilcoxon's test", above=0, below=1)
    init_epochs: int = option(5, "passes over its samples before a client is compared", low=1)


@dataclass
class SupportState:
    """Common state besides the models.

    Attributes
    ----------
    initial : Vector
        θ: initial model of every client. Shape (d,).
    cold : dict[str, bool]
        Clients without a model of their own, or with data that are not assigned yet.
    supported : Supported
        Support between clusters, and their partitions.
    """

    initial: Vector
    cold: dict[str, bool] = field(default_factory=dict)
    supported: Supported = field(default_factory=Supported)


# Requests.


def validation_share(method: Method) -> float:
    """Return the share of a client's samples used for validation."""
    share = method.train_config[names.VALIDATION_SHARE]
    assert isinstance(share, float), "start() sees to it"
    return share


def comparison(method: Method, client: str, clusters: Sequence[int]) -> Request:
    """Return the evaluation of models on a client's validation samples.

    All clients of a cluster are queried at once. Algorithm 2 as printed queries one after another,
    until one rejects, which sends fewer models and takes longer.
    """
    examples = method.progress.fleet.clients[client].num_examples
    cost = validation_share(method) * forward_cost(method.train_config, examples, len(clusters))
    return Request(
        client,
        names.LOSSES,
        models=tuple(clusters),
        settings={names.ON: "validation", names.COMPUTE_SCALE: cost},
        phase=SUPPORT,
    )


# Answers.


def losses_of(answer: Answer, models: int, key: str = names.LOSSES) -> NDArray[np.float64]:
    """Return a client's losses, shape (models, samples).

    Raises
    ------
    InvalidReplyError
        The losses are missing, or of another number of models.
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
        The losses are missing, of other models, or of too few samples for a test.
    """
    asked = answer.task.candidates
    measured, needed = losses_of(answer, len(asked)), fewest_samples(alpha)
    if measured.shape[1] < needed:
        raise InvalidReplyError(
            f"it has {plural(measured.shape[1], 'sample')} for validation, and a test at "
            f"level {alpha:g} needs {needed}"
        )
    return dict(zip(asked, measured, strict=True))


class FindsSupport(Method):
    """Common part of FAACL, C-FAACL and FAACL-Async: initial training and support."""

    parameters: SupportParameters
    state: SupportState

    needs = Needs(kinds=frozenset({names.LOSSES}), validation=True)

    def check_samples(self, samples: int) -> None:
        """Raise UserError if a client keeps too few validation samples for a test."""
        needed = fewest_samples(alpha := self.parameters.alpha)
        if samples < needed:
            raise UserError(
                f"A client keeps {samples} of its samples to compare models on, and a test at "
                f"level {alpha:g} needs {needed}: raise validation-share, or take fewer clients."
            )

    def initialize(self, vector: Vector) -> None:
        """Start with θ, the model of all clients until there are clusters."""
        self.clusters = Clusters({START: Model(vector)})
        self.state = self.state_type(vector.copy())

    def on_join(self, client: Client) -> None:
        """Add a client; a new one trains θ first."""
        is_new = client.client_id not in self.clusters.members
        super().on_join(client)
        if is_new:
            self._greet(client)

    def _greet(self, client: Client) -> None:
        """Make a new client cold; warn if it has too few validation samples for a test."""
        self.state.cold[client.client_id] = True
        needed = fewest_samples(self.parameters.alpha)
        kept = kept_for_validation(client.num_examples, validation_share(self))
        if client.num_examples and kept < needed:
            log.warning(
                "%s keeps %s for validation, and a test at level %g needs %d: no other "
                "model can support its cluster. Raise validation-share or alpha.",
                client.client_id,
                plural(kept, "sample"),
                self.parameters.alpha,
                needed,
                extra=about(client.client_id),
            )

    def _initial_training(self, client: str, epochs: int) -> Request:
        """Return the training of θ, Algorithm 1."""
        settings = {names.LOCAL_STEPS: 0, names.LOCAL_EPOCHS: epochs}
        arrays = {names.ARRAYS: self.record_of(self.state.initial)}
        return Request(client, models=(), arrays=arrays, settings=settings, phase=INIT)

    def _report_support(self, before: Mapping[int, tuple[int, ...]]) -> None:
        """Report the support between clusters if it has changed."""
        now = self.state.supported.listed()
        if now != before:
            values = {"supporters": now}
            self.report(Measured(self.now(), self.progress.updates, SUPPORTERS, values))

    def _found_each(self, updates: Sequence[Update]) -> Outcomes:
        """Found a cluster for each client that has trained θ."""
        applied = Outcomes()
        for update in updates:
            client = update.task.client
            cluster = self.clusters.found(Model(update.vector.copy(), 1), [client])
            self.state.cold.pop(client, None)
            applied[update.number] = Outcome(cluster, staleness=0, weight=1.0)
        if START in self.models and not self.clusters.clients(START, online_only=False):
            self.clusters.retire(START)
        return applied


SUPPORTERS = MeasureSchema(
    "support",
    "support between clusters",
    ("supporters",),
    per="cluster",
    summary="column",
    figure="none",
)
"""Supporters of each supported cluster, ascending."""


# -----------------------------------------------------------------------------
# FAACL's rounds, Algorithms 2 to 6, which C-FAACL shares: train, compare and merge until nothing
# changes; then train.
# -----------------------------------------------------------------------------


ASKING_SECONDS = 600.0
"""Time limit of a comparison: many models on a slow device take long."""


@dataclass(frozen=True)
class FAACLParameters(SupportParameters, RoundsParameters):
    """Hyper-parameters of FAACL."""

    hierarchical: bool = option(True, "compare in partitions that are joined in pairs, not all")


@dataclass
class FAACLState(SupportState):
    """State of FAACL besides its models.

    Attributes
    ----------
    is_due : bool
        Whether clusters are compared before the next round.
    has_settled : bool
        Whether the clusters were final once; from then on all clients train in every round.
    losses : dict[str, dict[int, NDArray]]
        Losses of the present models, by client and cluster.
    """

    is_due: bool = False
    has_settled: bool = False
    losses: dict[str, dict[int, NDArray[np.float64]]] = field(default_factory=dict)


class FAACL(FindsSupport):
    """Clustering by statistical tests, with one-sided support between clusters (FAACL)."""

    parameters_type = FAACLParameters
    state_type = FAACLState
    parameters: FAACLParameters
    state: FAACLState
    scheduling: InRounds

    def scheduler(self) -> Scheduler:
        """Work in rounds; clients also train the models that their cluster supports."""
        return InRounds(
            participants=self._participants,
            sampling=self.parameters.sampling,
            models=self._models_of,
            queries=self._queries,
        )

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Select the clients of unsettled partitions; after the first settlement a share of all."""
        state = self.state
        working = [
            c for c in online if c.client_id in state.cold or self._is_unsettled(c.client_id)
        ]
        if not state.has_settled:
            return working or online
        share = share_of(len(online), self.parameters.fraction)
        picked = self.scheduling.pick(online, share, rng)
        known = {client.client_id for client in picked}
        return [*picked, *(client for client in working if client.client_id not in known)]

    def _is_unsettled(self, client: str) -> bool:
        return self.state.supported.is_unsettled(self.clusters.main(client))

    # Cluster Train, Algorithm 4.

    def request_for(self, client: str) -> Request:
        """Return the training of θ for a cold client, else of the next of its models."""
        if client in self.state.cold:
            return self._initial_training(client, self.parameters.init_epochs)
        return self._training(client)

    def _training(self, client: str) -> Request:
        """Return the training of a client's next model in this round."""
        model = self.scheduling.next_model(client)
        return Request(client, models=None if model is None else (model,))

    def _models_of(self, client: str) -> Sequence[int]:
        """Return the models that a client trains in a round; a cold client trains θ only."""
        if client in self.state.cold:
            return ()
        return self.state.supported.trained_by(self.clusters.main(client))

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Add new clients; average the updates of each model."""
        state = self.state
        new = [update for update in updates if self._is_new(update)]
        others = [update for update in updates if not self._is_new(update)]
        state.is_due = bool(others) and not state.supported.is_settled
        averaged = average_by_cluster(self.clusters, others, home=lambda u: u.task.cluster)
        return {**averaged, **self._process_founders(new)}

    def _is_new(self, update: Update) -> bool:
        """Return whether an update is of a client without a cluster."""
        return update.task.client in self.state.cold

    def _process_founders(self, updates: Sequence[Update]) -> Outcomes:
        """Found a cluster for each client, and add it to the comparison."""
        founded = self._found_each(updates)
        self._add([outcome.cluster for outcome in founded.values()])
        return founded

    # Cluster Support and Cluster Merge, Algorithms 2 and 3, between two rounds.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the evaluations of clients; None if the next round may start."""
        if not self.state.is_due:
            return None
        asked = self.scheduling.ask_first(context, self._compares, patience=ASKING_SECONDS)
        if asked is not None:
            return [comparison(self, c, self._compared_by(c)) for c in asked]
        if not (self.scheduling.state.running or context.greeting):
            self._process_losses()
        return None

    def _compares(self, client: str) -> bool:
        state = self.state
        return client not in state.cold and len(self._compared_by(client)) > 1

    def _compared_by(self, client: str) -> list[int]:
        """Return the clusters whose models a client evaluates, its own first."""
        own = self.clusters.main(client)
        return [own, *self.state.supported.compared_with(own)]

    def on_answer(self, answer: Answer) -> None:
        """Store losses, which are processed together.

        Raises
        ------
        InvalidReplyError
            They are invalid, too few for a test, or arrive after the start of the round.
        """
        client = answer.task.client
        if client not in self.scheduling.state.asking.awaited:
            raise InvalidReplyError("it came after the round had begun")
        self.state.losses[client] = compared(answer, self.parameters.alpha)

    def _process_losses(self) -> None:
        """Update support, and merge; a partition without a merge is settled."""
        state, supported = self.state, self.state.supported
        state.is_due = False
        open_partitions = [part for part in supported.partitions if not part.settled]
        before = supported.listed()
        for partition in open_partitions:
            for cluster in partition.clusters:
                self._update_support(cluster, supported.compared_with(cluster))
        self._report_support(before)
        state.losses = {}
        for partition in open_partitions:
            partition.settled = not self._merge_mutual(partition.clusters)
        if len(supported.partitions) > 1 and all(part.settled for part in supported.partitions):
            supported.join(self.rng)
        if supported.is_settled:
            state.has_settled = True
            log.info("%d clusters after %d tests.", len(self.models), supported.tests)

    def _update_support(self, cluster: int, others: Sequence[int]) -> None:
        """Determine a cluster's supporters, Algorithm 2.

        A cluster without any losses keeps its supporters.
        """
        state, options = self.state, self.parameters
        clients = self.clusters.clients(cluster, online_only=False)
        measured = [state.losses[client] for client in clients if client in state.losses]
        if measured:
            found = state.supported.find(cluster, others, measured, options.epsilon, options.alpha)
            state.supported.support(cluster, found)

    def _merge_mutual(self, clusters: Sequence[int]) -> bool:
        """Merge pairs with mutual support, Algorithm 3; return whether there are any.

        The merged model is that of one of the two at random: the mean of separately trained
        networks may be worse than either.
        """
        supported = self.state.supported
        before = supported.listed()
        pairs = disjoint_pairs(clusters, supported.are_mutual, self.rng)
        for pair in pairs:
            kept = int(self.rng.choice(pair))
            supported.unite(pair, self.clusters.merge(pair, keep=kept))
        self._report_support(before)
        return bool(pairs)

    def _add(self, clusters: Sequence[int]) -> None:
        """Add clusters: each as a partition of its own, or all to the only partition."""
        supported = self.state.supported
        if not clusters:
            return
        if self.parameters.hierarchical:
            supported.partitions += [ComparedClusters([cluster]) for cluster in clusters]
        else:
            self._compare_all([*(c for p in supported.partitions for c in p.clusters), *clusters])

    def _compare_all(self, clusters: Sequence[int]) -> None:
        """Compare all given clusters with each other after the next round.

        Other clusters lose their support until they are compared again.
        """
        state, before = self.state, self.state.supported.listed()
        state.is_due = False
        state.supported.partitions = [ComparedClusters(list(clusters))]
        for cluster, theirs in before.items():
            kept = [other for other in theirs if other in clusters and cluster in clusters]
            state.supported.support(cluster, kept)
        self._report_support(before)


# -----------------------------------------------------------------------------
# FAACL-Async: FAACL's tests and merges at every answer (our own), without rounds and partitions.
#
# Every client trains θ and then forms a cluster of its own. It evaluates the models of clusters
# that it has not been compared with, a few at a time, those that agree to merge with its own first.
# It trains only when none is left: a slow client that trained in between would delay the merges of
# its whole cluster. A cluster is supported by another if the latest tests of all of its clients
# pass; clusters with mutual support are merged at once. Old tests are repeated between trainings, a
# few at a time, so that support ends when models diverge.
#
# Updates are mixed in with FedAsync's staleness weight, but at least the client's share of the
# samples of all that train the model, so that a client alone in its cluster replaces the model. An
# update of a model that a merge has discarded is dropped: the mean of separately trained networks
# may be worse than either.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FAACLAsyncParameters(SupportParameters, StalenessParameters):
    """Hyper-parameters of FAACL-Async."""

    share: float = option(0.6, "share of a fresh update in the model", above=0, high=1)
    compared: int = option(5, "most other models that a client measures at a time", low=1)
    retest_after: int = option(
        8,
        "most trainings of a client before it repeats its oldest tests (0: never); the number "
        "starts at one, doubles while results do not change, and returns to one when they do",
        low=0,
    )


@dataclass
class FAACLAsyncState(SupportState):
    """State of FAACL-Async besides its models.

    Attributes
    ----------
    passed : dict[str, dict[int, bool]]
        Latest test results of each client, by cluster.
    tested_at : dict[str, dict[int, int]]
        Value of `answers` at each of these tests.
    answers : int
        Number of answers of all clients so far.
    trained : dict[str, int]
        Trainings of each client since its last evaluation.
    waits : dict[str, int]
        Trainings of each client until it repeats tests.
    unanswered : dict[str, bool]
        Clients with an evaluation that has no valid answer yet.
    begun : dict[str, dict[int, bool]]
        Models of each client's present pass through those that it trains.
    """

    passed: dict[str, dict[int, bool]] = field(default_factory=dict)
    tested_at: dict[str, dict[int, int]] = field(default_factory=dict)
    answers: int = 0
    trained: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, bool] = field(default_factory=dict)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)


class FAACLAsync(FindsSupport):
    """FAACL's tests, support and merges at every arrival (FAACL-Async, our own)."""

    parameters_type = FAACLAsyncParameters
    state_type = FAACLAsyncState
    parameters: FAACLAsyncParameters
    state: FAACLAsyncState

    # Requests.

    def request_for(self, client: str) -> Request:
        """Return training of θ for a cold client, else an evaluation or the next training."""
        if client in self.state.cold:
            return self._initial_training(client, self.parameters.init_epochs)
        own = self.clusters.main(client)
        if others := self._to_compare(client, own):
            return comparison(self, client, [own, *others])
        models, begun = self.state.supported.trained_by(own), self.state.begun.get(client, {})
        model = next((model for model in models if model not in begun), own)
        return Request(client, models=(model,))

    def _to_compare(self, client: str, own: int) -> list[int]:
        """Return the clusters to compare a client with; none if it trains."""
        state, trained = self.state, self.state.trained.get(client, 0)
        tested = state.tested_at.get(client, {})
        others = [cluster for cluster in self.models if cluster != own and cluster != START]
        is_new = any(other not in tested for other in others)
        is_old = self.parameters.retest_after > 0 and state.waits.get(client, 1) <= trained
        # A client whose evaluation failed trains in the meantime.
        if client in state.unanswered or not (is_new or is_old):
            return []
        # Untested clusters come first, among them those that agree to merge.
        order = {other: (tested.get(other, -1), not self._agrees(other, own)) for other in others}
        return sorted(others, key=lambda other: order[other])[: self.parameters.compared]

    def _agrees(self, cluster: int, other: int) -> bool:
        """Return whether the latest tests of all clients of a cluster accept another's model."""
        passed = self.state.passed
        clients = self.clusters.clients(cluster)
        return bool(clients) and all(passed.get(c, {}).get(other, False) for c in clients)

    def on_sent(self, task: InFlight) -> None:
        """Record a client's task."""
        if task.kind == names.LOSSES:
            self.state.unanswered[task.client] = True
            return
        begun = self.state.begun.setdefault(task.client, {})
        if task.cluster in begun:
            begun.clear()
        begun[task.cluster] = True

    def on_closed(self, task: InFlight) -> None:
        """Count a client's trainings since its last evaluation."""
        trained = self.state.trained
        if task.kind == names.LOSSES:
            trained[task.client] = 0
        else:
            trained[task.client] = trained.get(task.client, 0) + 1
            self.state.unanswered.pop(task.client, None)

    # Answers.

    def on_answer(self, answer: Answer) -> None:
        """Test the evaluated models, update support, and merge.

        Raises
        ------
        InvalidReplyError
            The losses are invalid, or too few for a test.
        """
        client, state = answer.task.client, self.state
        measured = compared(answer, self.parameters.alpha)
        del state.unanswered[client]
        own = next(iter(measured))
        if self.clusters.main(client) != own:
            # The cluster has been merged meanwhile: the losses belong to another model.
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
        """Update a cluster's supporters from its clients' latest tests."""
        before = self.state.supported.listed()
        supporters = [k for k in self.models if k != cluster and self._agrees(cluster, k)]
        self.state.supported.support(cluster, supporters)
        self._report_support(before)

    def _merge(self, cluster: int) -> None:
        """Merge a cluster with a random one of mutual support."""
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
        self._report_support(before)

    def _carry_over(self, pair: tuple[int, int], target: int) -> None:
        """Transfer passed tests of both merged clusters to the new one."""
        for client, passed in self.state.passed.items():
            tested = self.state.tested_at.setdefault(client, {})
            found = [passed.pop(cluster, False) for cluster in pair]
            times = [tested.pop(cluster, 0) for cluster in pair]
            if all(found) and self.clusters.main(client) != target:
                passed[target], tested[target] = True, min(times)

    def on_update(self, update: Update) -> Outcome:
        """Found a cluster for a cold client; mix other updates into their models."""
        if update.task.client in self.state.cold:
            return self._found_each([update])[update.number]
        return self._mix(update)

    def _mix(self, update: Update) -> Outcome:
        task, own = update.task, self.clusters.main(update.task.client)
        # The cluster that continues its model; None if a merge has discarded it.
        cluster = next(iter(self.clusters.continuations(task.cluster)), None)
        if cluster is None or own not in self._trainers(cluster):
            return Outcome(own, staleness=0, weight=0.0)
        model = self.models[cluster]
        staleness = update.staleness
        mixed = self.parameters.share * self.parameters.decay_of(staleness)
        share = max(mixed, self._share(update, cluster))
        model.mix(update.vector, share)
        return Outcome(cluster, staleness, share)

    def _trainers(self, cluster: int) -> list[int]:
        """Return the clusters whose clients train a cluster's model."""
        return [cluster, *self.state.supported.supporters.get(cluster, {})]

    def _share(self, update: Update, cluster: int) -> float:
        """Return a client's share of the samples of all clients that train a model."""
        fleet = self.progress.fleet
        names = {name for k in self._trainers(cluster) for name in self.clusters.clients(k)}
        names.add(update.task.client)
        total = sum(fleet.plausible_examples(name) for name in names)
        own = fleet.plausible_examples(update.task.client)
        return own / total if total else 1.0 / len(names)
