"""FedDrift: one model per concept, with drift detection and hierarchical merging.

Jothimurugesan et al., "Federated Learning under Distributed Concept Drift", AISTATS 2023. Clients
with new data evaluate every model on them. A client whose lowest loss has grown by more than δ
since its last query has drifted; others are assigned the model of lowest loss. Each drifted client
founds a model, a copy of its best one, which is isolated: no other client may join it for W steps.
Similar models are merged then (hierarchical clustering, complete linkage). FedDrift-Eager founds
one model for all drifted clients, and does not merge. Federated averaging trains a model on all
data ever assigned to it, of any client and step; a client with data of several concepts trains
several models.

Data stay on the clients: the server sees losses (or accuracies, as in the authors' code). In a
simulation a client has its data of former steps; a device keeps what it can. ``memory`` limits the
steps that are used (all in the paper).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.clusters import Model
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
from raceme.core.scheduling import InRounds, RoundsParameters, Scheduler, SelectionContext
from raceme.core.strategy import Method, Needs, Variant, average_by_cluster
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness
from raceme.strategies.shared import linkage

# -----------------------------------------------------------------------------
# ConceptAssignments: assignment of data to models, drift detection and merging.
# -----------------------------------------------------------------------------


def has_drifted(loss: float, before: float | None, delta: float) -> bool:
    """Return whether a client's data have drifted: its lowest loss has grown by more than δ.

    Parameters
    ----------
    loss : float
        Lowest loss of any model on its present data.
    before : float or None
        Lowest loss at the last query; None, before the first, is no drift.
    delta : float
        δ: tolerated increase of the loss.
    """
    return before is not None and loss - before > delta


def cluster_distances(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distances of models: the increase of the loss on each other's data.

    ``d(p, q) = max(L(p, q) − L(p, p), L(q, p) − L(q, q), 0)``.

    Parameters
    ----------
    losses : NDArray[np.float64]
        L(p, q): loss of model p on the data of q; NaN if unknown. Shape (k, k).

    Returns
    -------
    NDArray[np.float64]
        Shape (k, k), symmetric, 0 on the diagonal; infinite if a loss is unknown.
    """
    growth = losses - np.diag(losses)[:, None]
    distances = np.maximum(np.maximum(growth, growth.T), 0.0)
    distances[np.isnan(distances)] = np.inf
    np.fill_diagonal(distances, 0.0)
    return distances


def complete_linkage(distances: NDArray[np.float64], below: float) -> list[list[int]]:
    """Return clusters of complete linkage with distances below a bound.

    Parameters
    ----------
    distances : NDArray[np.float64]
        Shape (k, k), symmetric; infinite for pairs that must not be merged.
    below : float
        Upper bound, exclusive, of the distance of merged clusters.

    Returns
    -------
    list[list[int]]
        Positions of each cluster of at least two, ascending.
    """
    if len(distances) < 2 or not below > 0:
        return []
    finite = np.nan_to_num(distances, posinf=np.finfo(np.float64).max)
    labels = linkage(finite, None, below=below)
    parts = (np.flatnonzero(labels == label).tolist() for label in np.unique(labels))
    return [part for part in parts if len(part) > 1]


@dataclass
class ConceptAssignments:
    """Assignment of clients' data to models.

    Attributes
    ----------
    assigned : dict[str, dict[int, int]]
        a[t, i]: model of each client's data of each step.
    least : dict[str, float]
        r_i: lowest loss of any model on a client's data at its last query.
    losses : dict[str, dict[int, dict[int, float]]]
        Latest losses of each client, by step of its data and model.
    isolated : dict[int, int]
        Remaining steps of isolation of new models: no other client joins, none is merged.
    heirs : dict[int, int]
        Merged models, to the models that replace them.
    used : dict[int, int]
        Value of `count` at the last assignment to each model.
    asked : dict[str, list[int]]
        Queried clients, and the steps of the data that they evaluate on.
    count : int
        Number of assignments so far.
    """

    assigned: dict[str, dict[int, int]] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)
    losses: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    isolated: dict[int, int] = field(default_factory=dict)
    heirs: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    asked: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0

    # Assignment.

    def assign(self, client: str, step: int, model: int) -> None:
        """Assign a client's data of a step to a model."""
        self.assigned.setdefault(client, {})[step] = model
        self.used[model] = self.count
        self.count += 1

    def remembered(self, client: str, now: int, memory: int = 0) -> list[int]:
        """Return the latest steps, up to the present one, of the data that a client uses.

        Parameters
        ----------
        now : int
            Step of the client's present data.
        memory : int
            Number of remembered steps; 0: all.
        """
        steps = sorted(step for step in self.assigned.get(client, {}) if step <= now)
        return steps[-memory:]

    def by_model(self, client: str, now: int, memory: int = 0) -> dict[int, list[int]]:
        """Return the models that a client trains, and the steps of each one's data.

        The model of the latest data is first.
        """
        found: dict[int, list[int]] = {}
        for step in reversed(self.remembered(client, now, memory)):
            found.setdefault(self.assigned[client][step], []).insert(0, step)
        return found

    def pairs(self, model: int) -> int:
        """Return the number of pairs of client and step assigned to a model."""
        return sum(mine == model for steps in self.assigned.values() for mine in steps.values())

    def unite(self, sources: Iterable[int], target: int) -> None:
        """Assign the data of merged models to their replacement."""
        gone = set(sources)
        self.used[target] = max(self.used.pop(model, 0) for model in gone)
        self.heirs.update(dict.fromkeys(gone, target))
        for steps in self.assigned.values():
            for step, model in steps.items():
                if model in gone:
                    steps[step] = target

    def heir(self, model: int) -> int:
        """Return the model that replaces a merged one; itself if not merged."""
        while model in self.heirs:
            model = self.heirs[model]
        return model

    def forget(self, model: int) -> None:
        """Remove a retired model and the assignments to it."""
        self.used.pop(model, None)
        self.isolated.pop(model, None)
        for steps in self.assigned.values():
            for step in [step for step, mine in steps.items() if mine == model]:
                del steps[step]

    def age(self, models: Iterable[int]) -> None:
        """Reduce the remaining isolation of some models by a step."""
        for model in models:
            self.isolated[model] -= 1
            if not self.isolated[model]:
                del self.isolated[model]

    # Losses.

    def to_score(self, client: str, now: int, memory: int = 0, newest: bool = False) -> list[int]:
        """Return the steps of the data that a client evaluates models on; `now` is the last."""
        if newest or memory == 1:
            return [now]
        return [*self.remembered(client, now - 1, max(0, memory - 1)), now]

    def take(
        self, client: str, losses: Mapping[int, Mapping[int, float]], there: Container[int]
    ) -> None:
        """Replace a client's losses.

        Models merged meanwhile count as their replacement, with the lowest of several losses.

        Parameters
        ----------
        losses : Mapping
            Losses by step and model.
        there : Container[int]
            Ids of the present models.
        """
        own: dict[int, dict[int, float]] = {}
        for step, by_model in losses.items():
            now = own.setdefault(step, {})
            for model, loss in by_model.items():
                heir = self.heir(model)
                if heir in there:
                    now[heir] = min(loss, now.get(heir, loss))
        self.losses[client] = own

    def best(self, client: str, step: int, own: int | None) -> tuple[int, float]:
        """Return the model of lowest loss on a client's data of a step, and the loss.

        Isolated models of other clients are excluded, unless there are no others. At ties the first
        model is taken.
        """
        losses = self.losses[client][step]
        open_to = [model for model in losses if model not in self.isolated or model == own]
        best = min(open_to or list(losses), key=lambda model: losses[model])
        return best, losses[best]

    def mean_losses(self, models: Sequence[int]) -> NDArray[np.float64]:
        """Return L(p, q): mean loss of model p on the data of q, shape (k, k); NaN if unknown.

        Pairs of client and step have equal weights.
        """
        place = {model: index for index, model in enumerate(models)}
        total, count = np.zeros((2, len(models), len(models)))
        for client, by_step in self.losses.items():
            for step, by_model in by_step.items():
                owner = self.assigned.get(client, {}).get(step)
                if owner not in place:
                    continue
                for model, loss in by_model.items():
                    if model in place:
                        total[place[model], place[owner]] += loss
                        count[place[model], place[owner]] += 1
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)

    def alike(self, models: Sequence[int], below: float) -> list[list[int]]:
        """Return groups of similar models to merge, each of at least two."""
        distances = cluster_distances(self.mean_losses(models))
        return [[models[index] for index in part] for part in complete_linkage(distances, below)]


# -----------------------------------------------------------------------------
# Common part of FedDrift and FedDrift-Async.
# -----------------------------------------------------------------------------


PER_CLIENT = "per-client"
NEW = "new"


@dataclass(frozen=True)
class ConceptParameters:
    """Common hyper-parameters of FedDrift and FedDrift-Async."""

    delta: float = option(
        0.1, "δ: growth of a client's least loss beyond which its data have drifted", above=0
    )
    merge_delta: float | None = option(
        None, "δ': distance below which two models are merged (auto: δ; 0: never)", low=0
    )
    isolation: int = option(1, "W: steps for which no other client may join a new model", low=1)
    measure: str = option(
        "accuracy",
        "loss measure: 1 - accuracy (the authors' code), or the mean loss (the paper)",
        among=("accuracy", "loss"),
    )
    start: str = option(
        "one",
        "models at the start: one for all, or one per client (the published runs of FedDrift)",
        among=("one", PER_CLIENT),
    )
    max_models: int = option(0, "most models at a time (0: no limit)", low=0)
    memory: int = option(0, "steps of its data that a client uses, the latest (0: all)", low=0)
    compare_on: str = option(
        "all",
        "data on which models are compared for merging: all remembered data, or only new data",
        among=("all", NEW),
    )
    scoring_cost: float = option(
        0.0, "cost of one score, as a share of a round's computation (our addition)", low=0
    )
    ask_every: int = option(
        0, "rounds after which a client measures again (0: only when its data have changed)", low=0
    )

    @property
    def merges_below(self) -> float:
        """δ': distance below which two models are merged; by default δ."""
        return self.delta if self.merge_delta is None else self.merge_delta


@dataclass
class ConceptState:
    """State of FedDrift and FedDrift-Async besides their models.

    Attributes
    ----------
    concepts : ConceptAssignments
        Assignment of data to models.
    trained : dict[str, int]
        Rounds with training, or updates, of each client since its last query.
    """

    concepts: ConceptAssignments = field(default_factory=ConceptAssignments)
    trained: dict[str, int] = field(default_factory=dict)


class FollowsConcepts(Method):
    """Common part of FedDrift and FedDrift-Async."""

    parameters: ConceptParameters
    state: ConceptState

    @property
    def needs(self) -> Needs:
        """Requirements of the method; a regression has no accuracies."""
        by_accuracy = self.parameters.measure == "accuracy"
        return Needs(
            kinds=frozenset({names.SCORES} if self.parameters.ask_every else ()),
            classes="measure accuracies unless measure=loss" if by_accuracy else "",
        )

    def on_join(self, client: Client) -> None:
        """Add a client; it is assigned a model at the start, and queried later."""
        super().on_join(client)
        self._assign_first_model(client.client_id)

    def _scoring(self, client: str) -> Request:
        """Return the evaluation of all models on a client's data."""
        step = self.step_of(client) or 0
        steps = self._scored_steps(client, step)
        models = tuple(self.models)
        cost = self.parameters.scoring_cost * len(models) * len(steps)
        settings: dict[str, float | list[int]] = {names.COMPUTE_SCALE: cost}
        if steps != [step]:
            settings[names.STEPS] = steps
        return Request(client, names.SCORES, models=models, settings=settings)

    def _scored_steps(self, client: str, now: int) -> list[int]:
        """Return the steps of the data that a client evaluates models on."""
        newest = self.parameters.compare_on == NEW
        return self.state.concepts.to_score(client, now, self.parameters.memory, newest)

    def on_sent(self, task: InFlight) -> None:
        """Record the steps of a query."""
        if task.kind == names.SCORES:
            self.state.trained[task.client] = 0
            self.state.concepts.asked[task.client] = self._scored_steps(task.client, task.step)

    def _models_of(self, client: str) -> list[int]:
        """Return the models that a client trains, that of its latest data first."""
        now = self.step_of(client) or 0
        return list(self.state.concepts.by_model(client, now, self.parameters.memory))

    def on_closed(self, task: InFlight) -> None:
        """Remove a query that is over."""
        if task.kind == names.SCORES:
            self.state.concepts.asked.pop(task.client, None)

    def _store_scores(self, answer: Answer) -> None:
        """Process a client's scores.

        Raises
        ------
        InvalidReplyError
            Scores of models or steps are missing, or accuracies lie outside [0, 1].
        """
        concepts = self.state.concepts
        by_accuracy = self.parameters.measure == "accuracy"
        scores = answer.numbers.get(names.ACCURACIES if by_accuracy else names.LOSSES)
        asked, steps = list(answer.task.candidates), concepts.asked.get(answer.task.client, [])
        if scores is None or scores.shape != (len(asked), len(steps)) or scores.dtype.kind != "f":
            raise InvalidReplyError(
                f"it brings no {self.parameters.measure} of every model and step"
            )
        if by_accuracy and (scores.min() < 0 or scores.max() > 1):
            raise InvalidReplyError("its accuracies are not between 0 and 1")
        losses = 1.0 - scores if by_accuracy else scores
        if not any(concepts.heir(model) in self.models for model in asked):
            raise InvalidReplyError("it has measured models that do not exist any more")
        by_step = {
            step: {model: float(losses[row, column]) for row, model in enumerate(asked)}
            for column, step in enumerate(steps)
        }
        concepts.take(answer.task.client, by_step, self.models)

    def _training(self, client: str, model: int | None) -> Request:
        """Return the training of a model on all of a client's data assigned to it."""
        if model is None:
            return Request(client)
        now = self.step_of(client) or 0
        steps = self.state.concepts.by_model(client, now, self.parameters.memory)[model]
        settings: dict[str, float | list[int]] = {}
        if steps != [now]:
            settings[names.STEPS] = steps
            if not self.train_config.get(names.LOCAL_STEPS, 0):
                # The simulator knows the size of one step's data; passes over several take longer.
                settings[names.COMPUTE_SCALE] = float(len(steps))
        return Request(client, models=(model,), settings=settings)

    # Answers.

    def _assign_first_model(self, client: str) -> None:
        """Assign a client's first model, before any update."""
        if self.progress.updates or client in self.state.concepts.assigned:
            return
        clusters, seated = self.clusters, len(self.state.concepts.assigned)
        model = 0
        if self.parameters.start == PER_CLIENT and seated:
            limit = self.parameters.max_models
            if limit and len(clusters.models) >= limit:
                model = list(clusters.models)[seated % limit]
            else:
                model = clusters.found(clusters.models[0].copy(), [client])
        self.state.concepts.assign(client, self.step_of(client) or 0, model)
        clusters.assign(client, model)

    def _assign_best(self, answered: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """Assign clients the model of lowest loss on their new data, unless these have drifted.

        r_i is a loss on data not trained on yet. It therefore does not change when a client
        evaluates the same step again, except at its first step, and if the steps of the data are
        unknown.

        Parameters
        ----------
        answered : Mapping[str, int]
            Step of the data of each client.

        Returns
        -------
        list[tuple[str, int, int]]
            Drifted clients, with the step and the model of lowest loss.
        """
        concepts = self.state.concepts
        drifted = []
        for client, step in answered.items():
            own = self.clusters.home(client)
            model, loss = concepts.best(client, step, own)
            steps = concepts.assigned.get(client, {})
            is_new = step not in steps or self.step_of(client) is None
            is_first = len(steps) == 1 and step in steps
            if is_new and has_drifted(loss, concepts.least.get(client), self.parameters.delta):
                drifted.append((client, step, model))
            else:
                self._place(client, step, model)
            if is_new or is_first:
                concepts.least[client] = loss
        return drifted

    def _found_each(self, drifted: Sequence[tuple[str, int, int]]) -> None:
        """Found a model for each drifted client, isolated for W steps."""
        for client, step, base in drifted:
            model = self._found(base)
            self._place(client, step, base if model is None else model)
            if model is not None:
                self.state.concepts.isolated[model] = self.parameters.isolation

    def _found_together(self, drifted: Sequence[tuple[str, int, int]]) -> None:
        """Found one model for all drifted clients: a copy of the most frequent best model."""
        if not drifted:
            return
        base = Counter(base for _, _, base in drifted).most_common(1)[0][0]
        model = self._found(base)
        for client, step, own in drifted:
            self._place(client, step, own if model is None else model)

    def _merge_alike(self, settled: Sequence[int]) -> None:
        """Merge similar models into means weighted by their numbers of clients' steps."""
        concepts = self.state.concepts
        there = [model for model in settled if model in self.models]
        for group in concepts.alike(there, self.parameters.merges_below):
            sources = [self.models[model] for model in group]
            mean = Model(sources[0].vector.copy(), max(source.version for source in sources))
            weights = [float(concepts.pairs(model)) for model in group]
            mean.average([source.vector for source in sources], weights)
            merged = self.clusters.merge(group, mean, threshold=self.parameters.merges_below)
            concepts.unite(group, merged)

    def _place(self, client: str, step: int, model: int) -> None:
        """Assign data and their client to a model; the isolation of its former model ends."""
        if self.clusters.is_placed(client) and self.clusters.main(client) != model:
            self.state.concepts.isolated.pop(self.clusters.main(client), None)
        self.state.concepts.assign(client, step, model)
        self.clusters.assign(client, model)

    def _found(self, base: int) -> int | None:
        """Add a copy of a model, at the limit in place of the longest unused one.

        Returns
        -------
        int or None
            The new model; None at the limit if all are in use.
        """
        concepts = self.state.concepts
        clusters = self.clusters
        if self.parameters.max_models and len(clusters.models) >= self.parameters.max_models:
            in_use = {clusters.main(client) for client in clusters.members}
            unused = [model for model in clusters.models if model not in in_use and model != base]
            if not unused:
                return None
            oldest = min(unused, key=lambda model: concepts.used.get(model, -1))
            clusters.retire(oldest)
            concepts.forget(oldest)
        return clusters.found(clusters.models[base].copy())


# -----------------------------------------------------------------------------
# FedDrift-Async: FedDrift's detection, isolation and merging at every update (our own).
#
# A client with new data evaluates all models before it trains again, and is assigned at once: it
# founds a model if its lowest loss has grown by more than δ, else it takes the best one. If the
# steps of the data are unknown, it is queried after every few updates (``ask-every``). A new model
# is isolated until its client has answered W more queries; similar models are merged after every
# answer. Updates are mixed in on arrival, with FedAsync's staleness weight; an update of a merged
# model goes into its replacement. A client with data of several models trains them in turn.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedDriftAsyncParameters(ConceptParameters, MixingParameters):
    """Hyper-parameters of FedDrift-Async."""

    ask_every: int = option(
        5,
        "a client's updates after which it measures again (0: only when its data have changed)",
        low=0,
    )


@dataclass
class FedDriftAsyncState(ConceptState):
    """State of FedDrift-Async besides its models.

    Attributes
    ----------
    begun : dict[str, dict[int, bool]]
        Models that each client has trained in this pass through its models.
    """

    begun: dict[str, dict[int, bool]] = field(default_factory=dict)


class FedDriftAsync(FollowsConcepts):
    """FedDrift at every arrival (FedDrift-Async, our own)."""

    parameters_type = FedDriftAsyncParameters
    state_type = FedDriftAsyncState
    parameters: FedDriftAsyncParameters
    state: FedDriftAsyncState

    def request_for(self, client: str) -> Request:
        """Return a query for a client with new data, else training of the next of its models."""
        if self._should_measure(client):
            return self._scoring(client)
        return self._training(client, self._next_model(client))

    def _should_measure(self, client: str) -> bool:
        """Return whether to query a client, never twice without training in between."""
        step, trained = self.step_of(client) or 0, self.state.trained.get(client, -1)
        if step not in self.state.concepts.assigned.get(client, {}):
            return trained != 0
        return 0 < self.parameters.ask_every <= trained

    def _next_model(self, client: str) -> int | None:
        """Return the next of a client's models, in turn."""
        begun, own = self.state.begun.get(client, {}), self._models_of(client)
        return next((model for model in own if model not in begun), own[0] if own else None)

    def on_sent(self, task: InFlight) -> None:
        """Record a training; a repeated model starts a new pass through the client's models."""
        super().on_sent(task)
        if task.kind != names.SCORES:
            begun = self.state.begun.setdefault(task.client, {})
            if task.cluster in begun:
                begun.clear()
            begun[task.cluster] = True

    def on_answer(self, answer: Answer) -> None:
        """Assign the client's data, found a model if they have drifted, and merge similar ones."""
        client, concepts = answer.task.client, self.state.concepts
        self._store_scores(answer)
        if self.clusters.is_placed(client):
            own = self.clusters.main(client)
            concepts.age([own] if own in concepts.isolated else [])
        settled = [model for model in self.models if model not in concepts.isolated]
        drifted = self._assign_best({client: answer.task.step})
        self._found_each(drifted)
        self._merge_alike(settled)

    def on_closed(self, task: InFlight) -> None:
        """Count a client's updates, including lost ones."""
        super().on_closed(task)
        if task.kind != names.SCORES:
            self.state.trained[task.client] = self.state.trained.get(task.client, 0) + 1

    def on_update(self, update: Update) -> Outcome:
        """Mix an update into the model that it was trained from, or its replacement."""
        task = update.task
        cluster = self.state.concepts.heir(task.cluster)
        if cluster not in self.models:
            return Outcome(self.clusters.main(task.client), staleness=0, weight=0.0)
        return mix_by_staleness(self, update, cluster, update.staleness)


# -----------------------------------------------------------------------------
# FedDrift in rounds.
# -----------------------------------------------------------------------------


_ASKING_SECONDS = 120.0
"""Time limit of queries before a round: devices may be slow or offline."""


@dataclass(frozen=True)
class FedDriftParameters(ConceptParameters, RoundsParameters):
    """Hyper-parameters of FedDrift."""

    founding: str = option(
        "each",
        "new models: each drifted client founds one, or all that drift together (Eager)",
        among=("each", "together"),
    )


@dataclass(frozen=True)
class FedDriftEagerParameters(FedDriftParameters):
    """Hyper-parameters of FedDrift-Eager."""

    founding: str = option(
        "together", "new models: one for all that drift together", among=("together",)
    )


@dataclass
class FedDriftState(ConceptState):
    """State of FedDrift besides its models.

    Attributes
    ----------
    answered : dict[str, int]
        Clients that have answered, and the step of their data.
    latest : int
        Latest step with assigned data.
    """

    answered: dict[str, int] = field(default_factory=dict)
    latest: int = 0


class FedDrift(FollowsConcepts):
    """One model per concept of drifting data: detection, isolation, merging (FedDrift)."""

    parameters_type = FedDriftParameters
    state_type = FedDriftState
    parameters: FedDriftParameters
    state: FedDriftState
    scheduling: InRounds

    def scheduler(self) -> Scheduler:
        """Work in rounds; a client with data of several models trains them one by one."""
        return InRounds(
            self.parameters.fraction,
            sampling=self.parameters.sampling,
            models=self._models_of,
            queries=self._queries,
        )

    # Before a round: scores.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query clients with new data; process all answers before the round."""
        asked = self.scheduling.ask_first(context, self._should_measure, patience=_ASKING_SECONDS)
        if asked is not None:
            return [self._scoring(c) for c in asked]
        if self.state.answered and not (self.scheduling.state.running or context.greeting):
            self._process_scores()
        return None

    def _should_measure(self, client: str) -> bool:
        """Return whether to query a client: new data, or enough training (``ask-every``)."""
        if (self.step_of(client) or 0) not in self.state.concepts.assigned.get(client, {}):
            return True
        return 0 < self.parameters.ask_every <= self.state.trained.get(client, 0)

    def on_answer(self, answer: Answer) -> None:
        """Store scores, which are processed together.

        Raises
        ------
        InvalidReplyError
            They are invalid, or arrive after the start of the round.
        """
        if answer.task.client not in self.scheduling.state.asking.awaited:
            raise InvalidReplyError("it came after the round had begun")
        self._store_scores(answer)
        self.state.answered[answer.task.client] = answer.task.step

    def _process_scores(self) -> None:
        """Assign the data of the answering clients, found models, and merge similar ones."""
        state, concepts = self.state, self.state.concepts
        latest = max(state.answered.values())
        if latest > state.latest:
            concepts.age(list(concepts.isolated))
            state.latest = latest
        settled = [model for model in self.models if model not in concepts.isolated]
        drifted = self._assign_best(state.answered)
        if self.parameters.founding == "together":
            self._found_together(drifted)
        else:
            self._found_each(drifted)
            self._merge_alike(settled)
        # Old losses are not comparable: models change until the next query.
        state.answered, concepts.losses = {}, {}

    # A round.

    def request_for(self, client: str) -> Request:
        """Return training of the next of a client's models."""
        return self._training(client, self.scheduling.next_model(client))

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Average the updates of each model, weighted by the numbers of samples."""
        for client in dict.fromkeys(update.task.client for update in updates):
            self.state.trained[client] = self.state.trained.get(client, 0) + 1
        return average_by_cluster(self.clusters, updates, home=lambda update: update.task.cluster)


FedDriftEager = Variant(
    FedDrift,
    FedDriftEagerParameters,
    "FedDrift without merging, with one new model per step (FedDrift-Eager).",
)
