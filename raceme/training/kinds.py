"""The kinds of work that a client does on its samples: one function each.

A function is given what a message asks for and returns the answer. The answer depends on nothing
else, so that messages may be answered early, in any order and in any process. The names of the
kinds, and those of functions added to these, are in :mod:`raceme.client_app`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme import training
from raceme.protocol.messages import (
    ACCURACY,
    ANCHOR,
    CHOSEN,
    GROUP,
    LABEL_COUNTS,
    LOSS,
    LOSSES,
    NUM_EXAMPLES,
    ON,
    SHARES,
    STEP,
    TRAIN_LOSS,
    ModelSpec,
)
from raceme.training.samples import Samples
from raceme.training.work import Answer, ClientWork

OWN_MODEL = "own-model"
"""Record of a client's state: the model that it keeps from one task to the next."""


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


def train_mixed(work: ClientWork) -> Answer:
    """Train the mixture of several models that fits the training samples (FedSoft-Async).

    A model's share is that of the samples on which it has the least loss, the first of equal ones;
    at least one sample's, so that no share is 0. The answer states the shares.
    """
    models = work.models
    best = np.argmin(_losses_of(work, models), axis=0)
    counts = np.maximum(np.bincount(best, minlength=len(models)), 1)
    shares = (counts / counts.sum()).astype(np.float64)
    answer = _train(work, mixed(models, shares))
    return replace(answer, numbers={SHARES: shares})


def train_own(work: ClientWork) -> Answer:
    """Train the client's own model, which it keeps, pulled towards the received one (FedSoft).

    A client that has none yet starts from the received one.
    """
    received = work.model
    own = work.state.array_records.get(OWN_MODEL, received)
    anchored = {**work.arrays, ANCHOR: received}
    answer = _train(work, own, arrays=anchored)
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


def evaluate(work: ClientWork) -> Answer:
    """Test the received model on the client's test samples."""
    work.receive(work.model)
    accuracy, loss = training.evaluate(work.client.network, work.client.test)
    return evaluation_answer(work, accuracy, loss)


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
    measured = _losses_of(work, work.models, samples)
    return Answer({NUM_EXAMPLES: len(samples)}, numbers={LOSSES: measured})


def label_counts(work: ClientWork) -> Answer:
    """Count the client's training samples of each class."""
    client = work.client
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


def evaluation_answer(work: ClientWork, accuracy: float, loss: float) -> Answer:
    """Answer with test results; where data change, with the group that they are of now, too."""
    metrics = {ACCURACY: accuracy, LOSS: loss, NUM_EXAMPLES: len(work.client.test)}
    group = work.client.group
    if STEP in work.settings and group is not None:
        metrics[GROUP] = group
    return Answer(metrics)


def _losses_of(
    work: ClientWork, models: Sequence[ArrayRecord], samples: Samples | None = None
) -> NDArray[np.float32]:
    """Return the loss of each sample, by default for training, under each model."""
    samples = work.client.train if samples is None else samples
    measured = np.empty((len(models), len(samples)), np.float32)
    for row, model in zip(measured, models, strict=True):
        work.receive(model)
        row[...] = training.losses(work.client.network, samples)
    return measured


def _train(
    work: ClientWork,
    received: ArrayRecord,
    told: Mapping[str, int] | None = None,
    arrays: Mapping[str, ArrayRecord] | None = None,
) -> Answer:
    client, network = work.client, work.client.network
    settings, rng = work.training_settings(), work.generator()
    spec = work.receive(received)
    loss = training.train(
        network, client.train, settings, rng, work.arrays if arrays is None else arrays
    )
    return training_answer(work, work.give(spec, received), {TRAIN_LOSS: loss}, told)
