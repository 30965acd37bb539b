"""The kinds of work that a client does on its samples: one function each.

A function is given what a message asks for and returns the answer. The answer depends on nothing
else, so that messages may be answered early, in any order and in any process. The names of the
kinds, and those of functions added to these, are in :mod:`raceme.client_app`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from raceme.core.errors import UserError
from raceme.core.messages import (
    ACCURACIES,
    ACCURACY_AFTER,
    ACCURACY_BEFORE,
    ANCHOR,
    BORROWED,
    CHOSEN,
    DECOMPOSED,
    FORMER_STEP,
    GROUP,
    INPUTS,
    LABEL_COUNTS,
    LABELS,
    LOCAL,
    LOSS,
    LOSSES,
    MEMORY,
    MEMORY_STEPS,
    MIXTURE,
    NUM_EXAMPLES,
    ON,
    PASSES_OF_TRAINING,
    REMEMBERED,
    SAMPLE_PASSES,
    SCORED,
    SHARES,
    STEP,
    TESTED_MODELS,
    TESTED_STEPS,
    TRAIN_LOSS,
    UNIT,
    ModelSpec,
    from_array,
    numbered,
    to_array,
)
from raceme.flower.messages import array_record
from raceme.training.decomposition import complete
from raceme.training.local import epoch_sizes
from raceme.training.local import evaluate as test_locally
from raceme.training.local import losses as sample_losses
from raceme.training.local import train as train_locally
from raceme.training.network import Samples
from raceme.training.work import Answer, ClientWork, Metric

# -----------------------------------------------------------------------------
# How good uploads are: tests that a client makes beside its work, for reports only.
#
# Li and Zhu ("Client-Driven Federated Learning") test what a client uploads, "client before",
# and the
# model that it gets in return, "client after", both on test data of the mixture that it was
# trained
# on. The latter is known when the client speaks next, with the model that it has from the
# server.
#
# What a kind of work trains is not changed by these tests. They ask for it by the setting
# ``scored``.
# -----------------------------------------------------------------------------


def score_former(
    work: ClientWork,
    received: ArrayRecord,
    completes: Callable[[int], object] = lambda step: None,
) -> dict[str, Metric]:
    """Test what a client was sent in return for its last upload, on the data of that upload.

    To be called before training: afterwards the client's network holds the received model.

    Parameters
    ----------
    work : ClientWork
        What the client is asked.
    received : ArrayRecord
        The model that it goes on from: the one that was sent, or one made of several.
    completes : Callable
        Does to the client's network, which holds that model, what its tests at a step need.

    Returns
    -------
    dict[str, Metric]
        The accuracy, as a metric of the answer; nothing if it is not asked for, or if the client
        has not uploaded anything yet.
    """
    former = work.former() if work.settings.get(SCORED, False) else None
    if former is None:
        return {}
    work.receive(received)
    completes(int(work.number(FORMER_STEP, 0)))
    return {ACCURACY_AFTER: test_locally(work.client.network, former.test)[0]}


def score_upload(work: ClientWork, forward: int = 0) -> dict[str, Metric]:
    """Test the trained model, which the client's network holds, on the data of its step.

    Parameters
    ----------
    work : ClientWork
        What the client is asked.
    forward : int
        Samples that it passed forward through a network beside training, each model counted.

    Returns
    -------
    dict[str, Metric]
        The accuracy, and the passes of samples that the work took without these tests, as metrics
        of the answer; nothing if it is not asked for.
    """
    if not work.settings.get(SCORED, False):
        return {}
    client = work.client
    trained = epoch_sizes(len(client.train), work.training_settings(), client.network.needs_pairs)
    return {
        ACCURACY_BEFORE: test_locally(client.network, client.test)[0],
        SAMPLE_PASSES: forward + PASSES_OF_TRAINING * sum(trained),
    }


# -----------------------------------------------------------------------------
# The kinds of work that a client does on its samples: one function each.
# -----------------------------------------------------------------------------


OWN_MODEL = "own-model"
"""Record of a client's state: the model that it keeps from one task to the next."""


def train(work: ClientWork) -> Answer:
    """Train the received model on the client's training samples."""
    return train_model(work, work.model)


def train_best(work: ClientWork) -> Answer:
    """Train that of several models which fits the training samples best (IFCA).

    The answer states which: the first of those with the least loss; a loss that is not finite is
    infinite.
    """
    models = work.models
    losses = []
    for model in models:
        work.receive(model)
        loss = test_locally(work.client.network, work.client.train)[1]
        losses.append(loss if math.isfinite(loss) else math.inf)
    chosen = losses.index(min(losses))
    forward = len(models) * len(work.client.train)
    return train_model(work, models[chosen], {CHOSEN: chosen}, forward)


def train_mixed(work: ClientWork) -> Answer:
    """Train the mixture of several models that fits the training samples (FedSoft-Async).

    A model's share is that of the samples on which it has the least loss, the first of equal ones;
    at least one sample's, so that no share is 0; a loss that is not finite is infinite. The answer
    states the shares.
    """
    models = work.models
    best = np.argmin(np.nan_to_num(losses_of(work, models), nan=np.inf, posinf=np.inf), axis=0)
    counts = np.maximum(np.bincount(best, minlength=len(models)), 1)
    shares = (counts / counts.sum()).astype(np.float64)
    forward = len(models) * len(work.client.train)
    returned = mixed(models, _stated(work, len(models))) if SHARES in work.arrays else None
    answer = train_model(work, mixed(models, shares), forward=forward, returned=returned)
    return replace(answer, numbers={SHARES: shares})


def train_own(work: ClientWork) -> Answer:
    """Train the client's own model, which it keeps, pulled towards the received one (FedSoft).

    A client that has none yet starts from the received one.
    """
    received = work.model
    own = work.state.array_records.get(OWN_MODEL, received)
    anchored = {**work.arrays, ANCHOR: received}
    answer = train_model(work, own, arrays=anchored)
    assert answer.model is not None, "training answers with a model"
    work.state[OWN_MODEL] = answer.model
    return answer


def mixed(models: Sequence[ArrayRecord], shares: NDArray[np.float64]) -> ArrayRecord:
    """Return Σ_k share_k w_k of models, array by array; what only counts is the first's."""
    spec = ModelSpec.of(models[0])
    vectors = np.stack([spec.unpack(model) for model in models])
    mean = np.tensordot(shares, vectors, axes=1).astype(np.float32)
    spec.copy_counters(vectors[0], mean)
    return spec.pack(mean)


def _stated(work: ClientWork, count: int) -> NDArray[np.float64]:
    """Return the shares that the client has stated with its last upload, as the server has them.

    Raises
    ------
    ValueError
        They are not of so many models.
    """
    record = work.arrays[SHARES]
    shares = from_array(record[SHARES]) if SHARES in record else np.empty(0)
    if shares.shape != (count,):
        raise ValueError(f"{SHARES} must have shape ({count},), got {shares.shape}.")
    return np.asarray(shares, np.float64)


def evaluate(work: ClientWork) -> Answer:
    """Test the received model on the client's test samples."""
    return evaluation_answer(work, *tested(work, work.model))


def tested(work: ClientWork, model: ArrayRecord) -> tuple[float, float]:
    """Return the score and the mean loss of a model on the client's test samples.

    Where weights are decomposed, the model is the shared part, and the client adds what it keeps
    for the step that it is told; if that is nothing, it tests the shared part alone.
    """
    work.receive(model)
    if work.settings.get(DECOMPOSED, False):
        complete(work, work.step)
    return test_locally(work.client.network, work.client.test)


def test_steps(work: ClientWork) -> Answer:
    """Test received models on the client's test samples of the steps that the message names.

    Data of a step that cannot be loaded, or that a device had in a file that was replaced since,
    are not tested on: the number is NaN.

    Raises
    ------
    ValueError
        The message does not say which model is tested on which step.
    """
    steps, which = (work.settings.get(name) for name in (TESTED_STEPS, TESTED_MODELS))
    models = work.models
    if not (_are_counts(steps) and _are_counts(which)) or len(steps) != len(which):
        raise ValueError(f"{TESTED_STEPS} and {TESTED_MODELS} must be two lists of equal length.")
    if any(index >= len(models) for index in which):
        raise ValueError(f"{TESTED_MODELS} names models that were not sent: {which!r}.")
    measured = np.full(len(steps), np.nan)
    for place, (step, index) in enumerate(zip(steps, which, strict=True)):
        if step < work.since:
            continue
        try:
            client = work.at_step(step)
        except UserError:
            continue
        settings = ConfigRecord({**work.settings, STEP: step})
        there = replace(work, client=client, settings=settings)
        measured[place] = tested(there, models[index])[0]
    unit = work.client.network.objective.measure.unit
    return Answer(
        {NUM_EXAMPLES: len(work.client.test)},
        numbers={ACCURACIES: measured},
        told={} if unit is None else {UNIT: unit},
    )


def _are_counts(stated: object) -> TypeGuard[list[int]]:
    """Return whether a setting is a list of whole numbers of at least 0."""
    return isinstance(stated, list) and all(isinstance(n, int) and n >= 0 for n in stated)


def losses(work: ClientWork) -> Answer:
    """Measure the loss of each sample under each of the received models.

    A loss that is not finite is the largest number.

    Raises
    ------
    ValueError
        The losses are asked for on other samples than those for training or for testing.
    """
    client, wanted = work.client, work.settings.get(ON, "train")
    parts = {"train": client.train, "test": client.test, "validation": client.validation}
    samples = parts.get(wanted) if isinstance(wanted, str) else None
    if samples is None:
        known = ", ".join(name for name, part in parts.items() if part is not None)
        raise ValueError(f"losses are measured on these samples: {known}; not on {wanted!r}.")
    measured = bounded(losses_of(work, work.models, samples))
    return Answer({NUM_EXAMPLES: len(samples)}, numbers={LOSSES: measured})


def scores(work: ClientWork) -> Answer:
    """Measure how well each of the received models fits the training samples of each step.

    The steps are those that the message names, or the one of the message. A loss that is not
    finite, or too large for float32, is the largest number.
    """
    models, clients = work.models, work.steps or (work.client,)
    measured = np.empty((2, len(models), len(clients)), np.float64)
    for row, model in enumerate(models):
        work.receive(model)
        for column, client in enumerate(clients):
            measured[:, row, column] = test_locally(client.network, client.train)
    accuracies, means = bounded(measured)
    numbers = {ACCURACIES: accuracies, LOSSES: means}
    return Answer({NUM_EXAMPLES: sum(len(client.train) for client in clients)}, numbers=numbers)


def bounded(measured: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return what was measured as finite numbers: what is none, or too large, is the largest."""
    most = float(np.finfo(np.float32).max)
    finite = np.nan_to_num(measured, nan=most, posinf=most).clip(max=most)
    return np.asarray(finite, np.float32)


def label_counts(work: ClientWork) -> Answer:
    """Count the client's training samples of each class.

    Raises
    ------
    ValueError
        There are no classes: the task is a regression.
    """
    client = work.client
    if not client.num_classes:
        raise ValueError("label-counts counts classes, and these data have quantities for labels.")
    labels = client.train.y.cpu().numpy()
    counts = np.bincount(labels, minlength=client.num_classes).astype(np.int64)
    return Answer({NUM_EXAMPLES: len(client.train)}, numbers={LABEL_COUNTS: counts})


def training_answer(
    work: ClientWork,
    model: ArrayRecord,
    metrics: Mapping[str, Metric],
    told: Mapping[str, int] | None = None,
) -> Answer:
    """Answer with a trained model; where data change, with the mixture that they are now, too."""
    metrics = {NUM_EXAMPLES: len(work.client.train), **metrics}
    if STEP in work.settings and work.client.mixture is not None:
        metrics[MIXTURE] = list(work.client.mixture)
    return Answer(metrics, model, told=told or {})


def evaluation_answer(work: ClientWork, score: float, loss: float) -> Answer:
    """Answer with test results; where data change, with the group that they are of now, too.

    What was measured is stated by its name: ``accuracy``, or ``mae`` with its unit.
    """
    measure = work.client.network.objective.measure
    metrics: dict[str, Metric] = {
        measure.name: score,
        LOSS: loss,
        NUM_EXAMPLES: len(work.client.test),
    }
    group = work.client.group
    if STEP in work.settings and group is not None:
        metrics[GROUP] = group
    return Answer(metrics, told={} if measure.unit is None else {UNIT: measure.unit})


def train_model(
    work: ClientWork,
    received: ArrayRecord,
    told: Mapping[str, int] | None = None,
    forward: int = 0,
    arrays: Mapping[str, ArrayRecord] | None = None,
    returned: ArrayRecord | None = None,
) -> Answer:
    """Train a model on the client's training samples, and test it if that is asked for.

    Parameters
    ----------
    work : ClientWork
        What the client is asked.
    received : ArrayRecord
        The model to start from.
    told : Mapping[str, int], optional
        What else the answer states.
    forward : int
        Samples that were passed forward through a network to come to this model, for each network.
    arrays : Mapping[str, ArrayRecord], optional
        What terms of the objective are given; by default what came with the message.
    returned : ArrayRecord, optional
        What the client was sent in return for its last upload, if it is not the model to start
        from: it is tested on the data of that upload.
    """
    client, network = work.client, work.client.network
    settings, rng = work.training_settings(), work.generator()
    scores = score_former(work, received if returned is None else returned)
    spec = work.receive(received)
    terms = work.arrays if arrays is None else arrays
    loss = train_locally(network, client.train, settings, rng, terms)
    scores |= score_upload(work, forward)
    return training_answer(work, work.give(spec, received), {TRAIN_LOSS: loss, **scores}, told)


def losses_of(
    work: ClientWork, models: Sequence[ArrayRecord], samples: Samples | None = None
) -> NDArray[np.float32]:
    """Return the loss of each sample, by default for training, under each model."""
    samples = work.client.train if samples is None else samples
    measured = np.empty((len(models), len(samples)), np.float32)
    for row, model in zip(measured, models, strict=True):
        work.receive(model)
        row[...] = sample_losses(work.client.network, samples)
    return measured


# -----------------------------------------------------------------------------
# What a client remembers of the data of its former tasks: a sample of each, never trained on.
#
# Zhang, "Asymmetric Clustering in Federated Continual Learning" (C-FAACL), thesis, Waterloo
# 2024. The
# samples are records of the client's state; they leave it only where :func:`lend` is asked for.
# -----------------------------------------------------------------------------


def learn(work: ClientWork) -> Answer:
    """Train the received model, and remember a sample of the validation samples of this step.

    Raises
    ------
    ValueError
        The client keeps no samples for validation, or is not told how many to remember.
    """
    kept = work.client.validation
    if kept is None:
        raise ValueError("To remember samples, a client has to keep some for validation.")
    count = min(int(work.number(REMEMBERED, None)), len(kept))
    chosen = np.sort(work.generator().choice(len(kept), count, replace=False))
    step = int(work.number(STEP, 0))
    inputs = np.asarray(kept.shaped(kept.x).cpu().numpy())[chosen]
    arrays = {INPUTS: to_array(inputs), LABELS: to_array(kept.y.cpu().numpy()[chosen])}
    work.state[numbered(MEMORY, step)] = array_record(arrays)
    return train_model(work, work.model)


def match(work: ClientWork) -> Answer:
    """Measure the loss of each sample under each of several models, on several sets of samples.

    The models are those of clusters, and then those that clients have trained themselves. The sets
    are the validation samples, if asked for, what the client remembers of the steps that the
    message names (left out where it remembers nothing), and samples that came with the message.
    """
    models = [*_clusters(work), *_numbered(work, LOCAL)]
    sets: dict[str, Samples] = {}
    if work.settings.get(ON) == "validation" and work.client.validation is not None:
        sets["validation"] = work.client.validation
    for step in _steps(work):
        name = numbered(MEMORY, step)
        if name in work.state:
            sets[name] = _samples(work, work.state.array_records[name])
    for index, record in enumerate(_numbered(work, BORROWED)):
        sets[numbered(BORROWED, index)] = _samples(work, record)
    measured = {
        name: np.empty((len(models), len(samples)), np.float32) for name, samples in sets.items()
    }
    for row, model in enumerate(models):
        work.receive(model)
        for name, samples in sets.items():
            measured[name][row] = sample_losses(work.client.network, samples)
    numbers = {name: bounded(losses) for name, losses in measured.items()}
    return Answer({NUM_EXAMPLES: len(work.client.train)}, numbers=numbers)


def lend(work: ClientWork) -> Answer:
    """Hand out what the client remembers of the steps that the message names."""
    numbers: dict[str, NDArray[np.generic]] = {}
    for step in _steps(work):
        name = numbered(MEMORY, step)
        if name in work.state:
            record = work.state.array_records[name]
            for part in (INPUTS, LABELS):
                numbers[f"{name}-{part}"] = from_array(record[part])
    return Answer({NUM_EXAMPLES: len(work.client.train)}, numbers=numbers)


def _clusters(work: ClientWork) -> list[ArrayRecord]:
    """Return the models of clusters in a message, which may have none."""
    try:
        return work.models
    except ValueError:
        return []


def _numbered(work: ClientWork, name: str) -> Iterable[ArrayRecord]:
    """Yield the records of a message that are numbered from 0."""
    index = 0
    while numbered(name, index) in work.arrays:
        yield work.arrays[numbered(name, index)]
        index += 1


def _steps(work: ClientWork) -> list[int]:
    steps = work.settings.get(MEMORY_STEPS, [])
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []


def _samples(work: ClientWork, record: ArrayRecord) -> Samples:
    """Return samples out of a record, in the order of memory of this client's network.

    Raises
    ------
    ValueError
        They are not of the shape of the client's own.
    """
    inputs, labels = from_array(record[INPUTS]), from_array(record[LABELS])
    own = work.client.train
    if inputs.shape[1:] != tuple(own.shaped(own.x[:1]).shape[1:]) or len(inputs) != len(labels):
        raise ValueError(f"These samples have the shape {inputs.shape}, unlike the client's own.")
    network = work.client.network
    kept = network.channels_last, network.accelerator
    return Samples(np.array(inputs, np.float32), np.array(labels), *kept)
