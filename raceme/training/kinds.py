"""The kinds of work that a client does on its samples: one function each.

A function is given what a message asks for and returns the answer. The answer depends on nothing
else, so that messages may be answered early, in any order and in any process. The names of the
kinds, and those of functions added to these, are in :mod:`raceme.client_app`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from raceme import training
from raceme.protocol.messages import (
    CHOSEN,
    GROUP,
    LABEL_COUNTS,
    LOSS,
    LOSSES,
    NUM_EXAMPLES,
    ON,
    STEP,
    TRAIN_LOSS,
    UNIT,
)
from raceme.training.work import Answer, ClientWork


def train(work: ClientWork) -> Answer:
    """Train the received model on the client's training samples."""
    return _train(work, work.model)


def train_best(work: ClientWork) -> Answer:
    """Train that of several models which fits the training samples best (IFCA).

    The answer states which: the first of those with the least loss; a loss that is not finite is
    infinite.
    """
    models = work.models
    losses = []
    for model in models:
        work.receive(model)
        loss = training.evaluate(work.client.network, work.client.train)[1]
        losses.append(loss if math.isfinite(loss) else math.inf)
    chosen = losses.index(min(losses))
    return _train(work, models[chosen], {CHOSEN: chosen})


def evaluate(work: ClientWork) -> Answer:
    """Test the received model on the client's test samples."""
    work.receive(work.model)
    score, loss = training.evaluate(work.client.network, work.client.test)
    return evaluation_answer(work, score, loss)


def losses(work: ClientWork) -> Answer:
    """Measure the loss of each sample under each of the received models.

    Raises
    ------
    ValueError
        The losses are asked for on other samples than those for training or for testing.
    """
    client, wanted = work.client, work.settings.get(ON, "train")
    if wanted not in ("train", "test"):
        raise ValueError(f"losses are measured on 'train' or 'test' samples, not on {wanted!r}.")
    samples = client.train if wanted == "train" else client.test
    models = work.models
    measured = np.empty((len(models), len(samples)), np.float32)
    for row, model in zip(measured, models, strict=True):
        work.receive(model)
        row[...] = training.losses(client.network, samples)
    return Answer({NUM_EXAMPLES: len(samples)}, numbers={LOSSES: measured})


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
    counts = np.bincount(client.train.y.numpy(), minlength=client.num_classes).astype(np.int64)
    return Answer({NUM_EXAMPLES: len(client.train)}, numbers={LABEL_COUNTS: counts})


def training_answer(
    work: ClientWork,
    model: ArrayRecord,
    metrics: Mapping[str, int | float],
    told: Mapping[str, int] | None = None,
) -> Answer:
    """Answer with a trained model."""
    return Answer({NUM_EXAMPLES: len(work.client.train), **metrics}, model, told=told or {})


def evaluation_answer(work: ClientWork, score: float, loss: float) -> Answer:
    """Answer with test results; where data change, with the group that they are of now, too.

    What was measured is stated by its name: ``accuracy``, or ``mae`` with its unit.
    """
    measure = work.client.network.objective.measure
    metrics = {measure.name: score, LOSS: loss, NUM_EXAMPLES: len(work.client.test)}
    group = work.client.group
    if STEP in work.settings and group is not None:
        metrics[GROUP] = group
    return Answer(metrics, told={} if measure.unit is None else {UNIT: measure.unit})


def _train(
    work: ClientWork, received: ArrayRecord, told: Mapping[str, int] | None = None
) -> Answer:
    client, network = work.client, work.client.network
    settings, rng = work.training_settings(), work.generator()
    spec = work.receive(received)
    loss = training.train(network, client.train, settings, rng, work.arrays)
    return training_answer(work, work.give(spec, received), {TRAIN_LOSS: loss}, told)
