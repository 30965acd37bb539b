"""FAACL-Async: FAACL's clusters and support, tested and acted on with every single answer.

Our own, after Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis,
Waterloo 2024. There are no rounds and no partitions, and nobody waits. Every client trains θ and
becomes a cluster of its own when it is done. Then it measures, a few at a time, the models of the
clusters that it has not been compared with, on its validation samples, and among them those first
that would merge with its own. Only when there are none left does it train: a slow client that
trained in between would keep its whole cluster from merging. What it finds is acted on at once. A
cluster supports another if the latest test of every client of that one says so, and two that
support each other are merged. Old tests are made again between two trainings, a few at a time, so
that support ends when models grow apart.

An update is mixed in by its staleness, as in FedAsync, but never with less than its client's share
of the samples of all that train the model: a client that is alone in its cluster just replaces it.
An update that was trained from a model which a merge has given up is of no use: the mean of two
networks that were trained apart may be worse than either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from raceme.clustering.clusters import Clusters
from raceme.clustering.decay import StalenessFunction, staleness_factor
from raceme.clustering.model import Model
from raceme.clustering.support import no_worse
from raceme.config.options import option
from raceme.protocol.messages import LOSSES, Vector
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, Update
from raceme.server.work import Task, Work
from raceme.strategies.supported_models import (
    START,
    SupportParameters,
    SupportState,
    check_samples,
    compared,
    comparison,
    found_each,
    greet,
    initial_training,
    report_support,
    trains,
)


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
    kept : dict[int, int]
        Clusters that a merge has made, to the one whose model they have kept.
    """

    passed: dict[str, dict[int, bool]] = field(default_factory=dict)
    tested_at: dict[str, dict[int, int]] = field(default_factory=dict)
    answers: int = 0
    trained: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, bool] = field(default_factory=dict)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


class FAACLAsync(Method):
    """FAACL's tests, support and merges as updates arrive (FAACL-Async, our own)."""

    parameters_type = FAACLAsyncParameters
    state_type = FAACLAsyncState
    validates = True
    parameters: FAACLAsyncParameters
    state: FAACLAsyncState

    def check_validation(self, samples: int) -> None:
        """Raise UserError if a client keeps too few samples for any test to be passed."""
        check_samples(samples, self.parameters.alpha)

    def initialize(self, vector: Vector) -> None:
        """Begin with θ, which serves everybody until there are clusters."""
        self.clusters = Clusters({START: Model(vector)})
        self.state = FAACLAsyncState(vector.copy())

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LOSSES})

    def add_client(self, client: Client) -> None:
        """Take a client in; one that is new has to train θ first."""
        is_new = client.client_id not in self.clusters.members
        super().add_client(client)
        if is_new:
            greet(self, self.state, client, self.parameters.alpha)

    # What a client is asked.

    def work_for(self, client: str) -> Work:
        """Let a new client train θ, and others measure models or train the next of theirs."""
        if client in self.state.cold:
            epochs = self.parameters.init_epochs
            return initial_training(self, client, self.state.initial, epochs)
        own = self.clusters.main(client)
        if others := self._to_compare(client, own):
            return comparison(self, client, [own, *others])
        models, begun = trains(self.state.supported, own), self.state.begun.get(client, {})
        model = next((model for model in models if model not in begun), own)
        return Work(client, models=(model,))

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

    def on_dispatch(self, task: Task) -> None:
        """Note who trains what."""
        if task.kind == LOSSES:
            self.state.unanswered[task.client] = True
            return
        begun = self.state.begun.setdefault(task.client, {})
        if task.cluster in begun:
            begun.clear()
        begun[task.cluster] = True

    def on_close(self, task: Task) -> None:
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
        target = self.clusters.merge(pair, self.models[kept].copy())
        self.state.kept[target] = kept
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

    def on_update(self, update: Update) -> Applied:
        """Make a cluster of a new client; mix what others have trained into its model."""
        if update.task.client in self.state.cold:
            (founded,) = found_each(self, self.state, [update])
            return founded
        return self._mix(update)

    def _mix(self, update: Update) -> Applied:
        task, own = update.task, self.clusters.main(update.task.client)
        cluster = self._living(task.cluster)
        if cluster is None or own not in self._trainers(cluster):
            return Applied(own, staleness=0, weight=0.0)
        model = self.models[cluster]
        staleness = model.version - task.version
        share = max(self.parameters.share_of(staleness), self._share(update, cluster))
        model.mix(update.vector, share)
        return Applied(cluster, staleness, share)

    def _living(self, cluster: int) -> int | None:
        """Return where a cluster's model lives on; None if a merge has given it up."""
        supported, kept = self.state.supported, self.state.kept
        while cluster in supported.heirs:
            heir = supported.heirs[cluster]
            if kept[heir] != cluster:
                return None
            cluster = heir
        return cluster if cluster in self.models else None

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
