"""What FedDrift and FedDrift-Async have in common: what clients are asked, and what follows.

Jothimurugesan et al., "Federated Learning under Distributed Concept Drift", AISTATS 2023; see
:mod:`raceme.strategies.feddrift`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raceme.clustering.concepts import Concepts, has_drifted
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import (
    ACCURACIES,
    COMPUTE_SCALE,
    LOCAL_STEPS,
    LOSSES,
    SCORES,
    STEPS,
)
from raceme.server.method import Method
from raceme.server.replies import Answer, InvalidReplyError
from raceme.server.work import Task, Value, Work

PER_CLIENT = "per-client"
NEW = "new"


@dataclass(frozen=True)
class ConceptParameters:
    """What FedDrift and FedDrift-Async can be told in common."""

    delta: float = option(
        0.1, "δ: growth of a client's least loss beyond which its data have drifted", above=0
    )
    merge_delta: float | None = option(
        None, "δ': distance below which two models are merged (auto: δ; 0: never)", low=0
    )
    isolation: int = option(1, "W: steps for which nobody else may join a new model", low=1)
    measure: str = option(
        "accuracy",
        "what counts as loss: 1 - accuracy (the authors' code), or the mean loss (the paper)",
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
        "data on which models are compared to be merged: all that are remembered, or new ones",
        among=("all", NEW),
    )
    scoring_cost: float = option(
        0.0, "share of a round's computing that one score takes (our addition)", low=0
    )

    @property
    def merges_below(self) -> float:
        """δ'."""
        return self.delta if self.merge_delta is None else self.merge_delta


# What a client is asked.


def without_classes(parameters: ConceptParameters) -> str:
    """Return what clients are asked for that a regression does not have; empty for losses."""
    return "measure accuracies unless measure=loss" if parameters.measure == "accuracy" else ""


def scoring(method: Method, concepts: Concepts, client: str, parameters: ConceptParameters) -> Work:
    """Return the work of a client with new data: it measures all models on them."""
    step = method.step_of(client) or 0
    steps = concepts.to_score(client, step, parameters.memory, parameters.compare_on == NEW)
    models = tuple(method.models)
    settings: dict[str, Value] = {COMPUTE_SCALE: parameters.scoring_cost * len(models) * len(steps)}
    if steps != [step]:
        settings[STEPS] = steps
    return Work(client, SCORES, models=models, settings=settings)


def ask(concepts: Concepts, task: Task, parameters: ConceptParameters) -> None:
    """Note which steps a client is asked about."""
    newest = parameters.compare_on == NEW
    steps = concepts.to_score(task.client, task.step, parameters.memory, newest)
    concepts.asked[task.client] = steps


def take_scores(
    method: Method, concepts: Concepts, answer: Answer, parameters: ConceptParameters
) -> None:
    """Take scores in.

    Raises
    ------
    InvalidReplyError
        There are none for each model and step, or they are no shares.
    """
    by_accuracy = parameters.measure == "accuracy"
    scores = answer.numbers.get(ACCURACIES if by_accuracy else LOSSES)
    asked, steps = list(answer.task.candidates), concepts.asked.get(answer.task.client, [])
    if scores is None or scores.shape != (len(asked), len(steps)) or scores.dtype.kind != "f":
        raise InvalidReplyError(f"it brings no {parameters.measure} of every model and step")
    if by_accuracy and (scores.min() < 0 or scores.max() > 1):
        raise InvalidReplyError("its accuracies are no shares")
    losses = 1.0 - scores if by_accuracy else scores
    if not any(concepts.heir(model) in method.models for model in asked):
        raise InvalidReplyError("it has measured models that are no more")
    by_step = {
        step: {model: float(losses[row, column]) for row, model in enumerate(asked)}
        for column, step in enumerate(steps)
    }
    concepts.take(answer.task.client, by_step, method.models)


def training(
    method: Method,
    concepts: Concepts,
    client: str,
    model: int | None,
    parameters: ConceptParameters,
) -> Work:
    """Return the work of a client that trains a model on all of its data that belong to it."""
    if model is None:
        return Work(client)
    now = method.step_of(client) or 0
    steps = concepts.by_model(client, now, parameters.memory)[model]
    settings: dict[str, Value] = {}
    if steps != [now]:
        settings[STEPS] = steps
        if not method.train_config.get(LOCAL_STEPS, 0):
            # The simulator knows the size of one step's data; passes over several take longer.
            settings[COMPUTE_SCALE] = float(len(steps))
    return Work(client, models=(model,), settings=settings)


# What becomes of the answers.


def seat(method: Method, concepts: Concepts, client: str, parameters: ConceptParameters) -> None:
    """Give a client its first model, before anything has been trained."""
    if method.progress.updates or client in concepts.assigned:
        return
    clusters, seated = method.clusters, len(concepts.assigned)
    model = 0
    if parameters.start == PER_CLIENT and seated:
        limit = parameters.max_models
        if limit and len(clusters.models) >= limit:
            model = list(clusters.models)[seated % limit]
        else:
            model = clusters.found(clusters.models[0].copy(), [client])
    concepts.assign(client, method.step_of(client) or 0, model)
    clusters.assign(client, model)


def assign_best(
    method: Method,
    concepts: Concepts,
    answered: Mapping[str, int],
    parameters: ConceptParameters,
) -> list[tuple[str, int, int]]:
    """Give clients the model of least loss on their new data, unless these have drifted.

    A loss is compared with one on data that were as new: r_i does not change when a client
    measures again what was trained on meanwhile, unless there is no other: at its first step, and
    where nobody says when data change.

    Parameters
    ----------
    answered : Mapping[str, int]
        Clients, and the step of their data.

    Returns
    -------
    list[tuple[str, int, int]]
        Clients that have drifted, with the step and the model of least loss.
    """
    drifted = []
    for client, step in answered.items():
        own = method.clusters.main(client) if method.clusters.is_placed(client) else None
        model, loss = concepts.best(client, step, own)
        steps = concepts.assigned.get(client, {})
        is_new = step not in steps or method.step_of(client) is None
        is_first = len(steps) == 1 and step in steps
        if is_new and has_drifted(loss, concepts.least.get(client), parameters.delta):
            drifted.append((client, step, model))
        else:
            _place(method, concepts, client, step, model)
        if is_new or is_first:
            concepts.least[client] = loss
    return drifted


def found_each(
    method: Method,
    concepts: Concepts,
    drifted: Sequence[tuple[str, int, int]],
    parameters: ConceptParameters,
) -> None:
    """Let every client that has drifted found a model, which is isolated for W steps."""
    for client, step, base in drifted:
        model = _found(method, concepts, base, parameters.max_models)
        _place(method, concepts, client, step, base if model is None else model)
        if model is not None:
            concepts.isolated[model] = parameters.isolation


def found_together(
    method: Method,
    concepts: Concepts,
    drifted: Sequence[tuple[str, int, int]],
    parameters: ConceptParameters,
) -> None:
    """Found one model for all that have drifted: a copy of what most of them come from."""
    if not drifted:
        return
    base = Counter(base for _, _, base in drifted).most_common(1)[0][0]
    model = _found(method, concepts, base, parameters.max_models)
    for client, step, own in drifted:
        _place(method, concepts, client, step, own if model is None else model)


def merge_alike(
    method: Method, concepts: Concepts, settled: Sequence[int], parameters: ConceptParameters
) -> None:
    """Merge models that are alike: means, weighted by how many clients' steps they have."""
    there = [model for model in settled if model in method.models]
    for group in concepts.alike(there, parameters.merges_below):
        sources = [method.models[model] for model in group]
        mean = Model(sources[0].vector.copy(), max(source.version for source in sources))
        weights = [float(concepts.pairs(model)) for model in group]
        mean.average([source.vector for source in sources], weights)
        merged = method.clusters.merge(group, mean, threshold=parameters.merges_below)
        concepts.unite(group, merged)


def _place(method: Method, concepts: Concepts, client: str, step: int, model: int) -> None:
    """Assign data, and let their client be served by the model; a model that it leaves is free."""
    if method.clusters.is_placed(client) and method.clusters.main(client) != model:
        concepts.isolated.pop(method.clusters.main(client), None)
    concepts.assign(client, step, model)
    method.clusters.assign(client, model)


def _found(method: Method, concepts: Concepts, base: int, limit: int) -> int | None:
    """Add a copy of a model; where there are as many as may be, in the place of an unused one.

    Returns
    -------
    int or None
        The new model; None if there are too many, and all are in use.
    """
    clusters = method.clusters
    if limit and len(clusters.models) >= limit:
        in_use = {clusters.main(client) for client in clusters.members}
        unused = [model for model in clusters.models if model not in in_use and model != base]
        if not unused:
            return None
        oldest = min(unused, key=lambda model: concepts.used.get(model, -1))
        clusters.retire(oldest)
        concepts.forget(oldest)
    return clusters.found(clusters.models[base].copy())
