"""What a client states of its data, for methods that group clients before or while they train.

As the kinds of work in :mod:`raceme.training.kinds`: one function each, of what a message asks for.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raceme.core.messages import (
    ABSENT,
    DESCRIPTORS,
    GRADIENT,
    IN_ALL,
    LABEL_MASSES,
    LABEL_TABLE,
    LATENT_DIMENSIONS,
    LATENT_MOST,
    LATENT_SEED,
    MIXING,
    NUM_EXAMPLES,
    PER_CLASS,
    PRINCIPAL_DIRECTIONS,
    TRAIN_LOSS,
    WEIGHTED_BY,
    Role,
    from_array,
    to_array,
)
from raceme.flower.messages import array_record
from raceme.training.kinds import bounded, losses_of, score_former, score_upload, training_answer
from raceme.training.local import differentiate, train
from raceme.training.network import Network, Samples
from raceme.training.work import Answer, ClientWork

_BATCH = 256
_POINTS = 200
_MARGIN = 1.02
"""FLUX fits its projection on 200 points, uniform in [0, 1.02 · the largest latent feature]."""
_MOST_DIMENSIONS = 10_000

Matrix = NDArray[np.float64]


def principal_directions(work: ClientWork) -> Answer:
    """Return the first left singular vectors of the raw samples of each class (PACFL).

    The labels of a regression are one class. Fewer samples of a class than directions give fewer.

    Raises
    ------
    ValueError
        It is not said how many directions there shall be.
    """
    per_class, in_all = _count(work, PER_CLASS), int(work.number(IN_ALL, 0))
    samples = work.client.train
    x = samples.shaped(samples.x).reshape(len(samples), -1).cpu().numpy().astype(np.float64)
    labels = (
        samples.y.cpu().numpy() if work.client.num_classes else np.zeros(len(samples), np.int64)
    )
    parts = []
    for label in np.unique(labels):
        own = x[labels == label]
        count = max(1, round(in_all * len(own) / len(x))) if in_all else per_class
        parts.append(main_directions(own, count))
    directions = np.concatenate(parts, axis=1).astype(np.float32)
    return Answer({NUM_EXAMPLES: len(samples)}, numbers={PRINCIPAL_DIRECTIONS: directions})


def main_directions(rows: Matrix, count: int) -> Matrix:
    """Return the first left singular vectors of a matrix whose columns are samples.

    The sign of a singular vector is arbitrary, and angles between vectors depend on it: each is
    turned towards the mean of the samples (our reading).

    Parameters
    ----------
    rows : NDArray[np.float64]
        Samples. Shape (n, d).
    count : int
        p: how many.

    Returns
    -------
    NDArray[np.float64]
        Shape (d, at most p).
    """
    found = np.linalg.svd(rows, full_matrices=False)[2][:count].T
    return np.asarray(np.where(rows.mean(axis=0) @ found < 0, -found, found))


def latent_most(work: ClientWork) -> Answer:
    """Return the largest latent feature of the training samples under the received model (FLUX)."""
    work.receive(work.models[0])
    most = float(latent_features(work.client.network, work.client.train).max())
    return Answer({NUM_EXAMPLES: len(work.client.train), LATENT_MOST: most})


def descriptors(work: ClientWork) -> Answer:
    """Return moments of the latent features, of all training samples and of each class (FLUX).

    Raises
    ------
    ValueError
        It is not said how many dimensions are described.
    """
    work.receive(work.models[0])
    client, network = work.client, work.client.network
    features, outputs = latent_features(network, client.train), width_of(network, client.train)
    rng = np.random.default_rng(int(work.number(LATENT_SEED, 0)))
    scale = _MARGIN * work.number(LATENT_MOST, None)
    points = rng.uniform(0.0, 1.0, (_POINTS, features.shape[1])) * scale
    latent = projected(features, points, _count(work, LATENT_DIMENSIONS))
    labels = client.train.y.cpu().numpy() if client.num_classes else None
    described = moments(latent, labels, outputs if client.num_classes else 0)
    numbers = {DESCRIPTORS: bounded(described)}
    return Answer({NUM_EXAMPLES: len(client.train)}, numbers=numbers)


def moments(latent: Matrix, labels: NDArray[np.integer] | None, classes: int) -> Matrix:
    """Return mean and standard deviation of all samples, and then of those of each class.

    Parameters
    ----------
    latent : NDArray[np.float64]
        Shape (n, l).
    labels : NDArray[np.integer] or None
        Shape (n,).
    classes : int
        U.

    Returns
    -------
    NDArray[np.float64]
        Shape (1 + U, 2, l); −1 for a class without a sample.
    """
    described = np.full((1 + classes, 2, latent.shape[1]), ABSENT)
    described[0] = latent.mean(axis=0), latent.std(axis=0)
    for label in [] if labels is None else np.unique(labels):
        own = latent[labels == label]
        described[1 + int(label)] = own.mean(axis=0), own.std(axis=0)
    return described


def projected(features: Matrix, points: Matrix, dimensions: int) -> Matrix:
    """Project features on the main components of some points; missing dimensions are 0.

    Parameters
    ----------
    features, points : NDArray[np.float64]
        Shapes (n, f) and (m, f).
    dimensions : int
        l.

    Returns
    -------
    NDArray[np.float64]
        Shape (n, l).
    """
    middle = points.mean(axis=0)
    components = np.linalg.svd(points - middle, full_matrices=False)[2][:dimensions]
    # The sign of a component is arbitrary, and must be the same on every machine.
    largest = np.abs(components).argmax(axis=1)
    components *= np.sign(components[np.arange(len(components)), largest])[:, None]
    latent = np.zeros((len(features), dimensions))
    latent[:, : len(components)] = (features - middle) @ components.T
    return latent


def latent_features(network: Network, samples: Samples) -> Matrix:
    """Return what a network makes of samples before its first dense layer, shape (n, features).

    A network without convolutions is dense throughout: of it the input of the last layer (our
    reading). One without a linear layer is described by its outputs.
    """
    layer = _described_layer(network.module)
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(1))

    handle = None if layer is None else layer.register_forward_pre_hook(keep)
    network.module.eval()
    try:
        with torch.inference_mode():
            for x, _ in samples.slices(_BATCH):
                outputs = network.module(x)
                if layer is None:
                    seen.append(outputs.flatten(1))
    finally:
        if handle is not None:
            handle.remove()
    return torch.cat(seen).cpu().numpy().astype(np.float64)


def _described_layer(module: nn.Module) -> nn.Module | None:
    convolves, last = False, None
    for layer in module.modules():
        convolves |= isinstance(layer, nn.Conv1d | nn.Conv2d)
        if isinstance(layer, nn.Linear):
            if convolves:
                return layer
            last = layer
    return last


def width_of(network: Network, samples: Samples) -> int:
    """Return how many outputs a network has: classes, of which a client need not have all."""
    network.module.eval()
    with torch.inference_mode():
        x, _ = next(iter(samples.slices(1)))
        return int(network.module(x).shape[1])


def gradient(work: ClientWork) -> Answer:
    """Return the gradient of the mean loss of all training samples at the received model (CFL-GP).

    Running statistics stay as they are: the network works as in a test.
    """
    spec = work.receive(work.models[0])
    network, samples = work.client.network, work.client.train
    total = torch.zeros_like(network.gradient)
    network.module.eval()
    for x, y in samples.slices(_BATCH):
        differentiate(network, x, y)
        total.add_(network.gradient, alpha=len(y) / len(samples))
    values = total.cpu().numpy()
    parts = [
        values[network.slices[name]] if name in network.slices else np.zeros(size, np.float32)
        for name, size, role in zip(spec.names, spec.sizes, spec.roles, strict=True)
        if role is Role.TRAINABLE
    ]
    numbers = {GRADIENT: bounded(np.concatenate(parts))}
    return Answer({NUM_EXAMPLES: len(samples)}, numbers=numbers)


def _count(work: ClientWork, name: str) -> int:
    """Return a setting that is a count.

    Raises
    ------
    ValueError
        It is none.
    """
    value = work.settings.get(name)
    if not isinstance(value, int) or not 1 <= value <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} must be a whole number from 1 to {_MOST_DIMENSIONS:,}.")
    return value


# -----------------------------------------------------------------------------
# FedRC's part of a client: how much each of several models is responsible for each sample.
#
# Guo et al., "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by
# Robust
# Clustering", ICML 2024.
# -----------------------------------------------------------------------------


RESPONSIBILITIES = "responsibilities"
"""Record of a client's state: γ, float32, shape (models, samples)."""


def label_masses(work: ClientWork) -> Answer:
    """Assign samples to models, keep the assignment, and state how much of each class went where.

    Raises
    ------
    ValueError
        There are no classes; or what was sent with the models is not of their number.
    """
    client, models = work.client, work.models
    if not client.num_classes:
        raise ValueError("label-masses counts classes, and these data have quantities for labels.")
    losses = losses_of(work, models)
    classes = width_of(client.network, client.train)
    alike = np.full(len(models), 1.0 / len(models))
    mixing = _sent(work, MIXING, (len(models),), alike)
    table = _sent(work, LABEL_TABLE, (len(models), classes), np.ones((len(models), classes)))
    labels = client.train.y.cpu().numpy()
    shares = responsibilities(losses.astype(np.float64), labels, mixing, table)
    kept = to_array(shares.astype(np.float32))
    work.state[RESPONSIBILITIES] = array_record({RESPONSIBILITIES: kept})
    masses = np.stack([np.bincount(labels, weights=row, minlength=classes) for row in shares])
    return Answer({NUM_EXAMPLES: len(client.train)}, numbers={LABEL_MASSES: masses})


def responsibilities(
    losses: NDArray[np.float64],
    labels: NDArray[np.integer],
    mixing: NDArray[np.float64],
    table: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return γ_jk ∝ ω_k exp(−ℓ_jk) / C[k][y_j]; a loss that is not finite is very large.

    Parameters
    ----------
    losses : NDArray[np.float64]
        ℓ. Shape (K, n).
    labels : NDArray[np.integer]
        y. Shape (n,).
    mixing, table : NDArray[np.float64]
        ω and C. Shapes (K,) and (K, classes).

    Returns
    -------
    NDArray[np.float64]
        Shape (K, n), columns of sum 1.
    """
    finite = np.nan_to_num(losses, nan=1e30, posinf=1e30, neginf=-1e30)
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.log(mixing)[:, None] - finite - np.log(table[:, labels])
    # A share of 0 stays 0; if all are, or what was sent is senseless, all models are alike.
    logits = np.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    return torch.softmax(torch.from_numpy(logits), dim=0).numpy()


def train_weighted(work: ClientWork) -> Answer:
    """Train the received model on the samples, weighted by its responsibility for each.

    Raises
    ------
    ValueError
        The client has not assigned these samples to models yet.
    """
    received, client, network = work.models[0], work.client, work.client.network
    index, kept = work.settings.get(WEIGHTED_BY), work.state.array_records.get(RESPONSIBILITIES)
    shares = np.empty((0, 0)) if kept is None else from_array(kept[RESPONSIBILITIES])
    fits = shares.ndim == 2 and shares.shape[1] == len(client.train)
    if not isinstance(index, int) or not fits or not 0 <= index < len(shares):
        raise ValueError(
            f"{WEIGHTED_BY} must name a model to which these samples were assigned by "
            f"'{LABEL_MASSES}', got {index!r}."
        )
    settings, rng = work.training_settings(), work.generator()
    scores = score_former(work, received)
    spec = work.receive(received)
    weights = torch.from_numpy(shares[index].astype(np.float32)).to(network.accelerator)
    loss = train(network, client.train, settings, rng, work.arrays, weights=weights)
    scores |= score_upload(work, 0)
    return training_answer(work, work.give(spec, received), {TRAIN_LOSS: loss, **scores})


def _sent(
    work: ClientWork, name: str, shape: tuple[int, ...], default: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return an array that came with the models, or what stands for it at the start.

    Raises
    ------
    ValueError
        It has another shape.
    """
    record = work.arrays.get(name)
    if record is None:
        return default
    values = from_array(record[name])
    if values.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {values.shape}.")
    return np.asarray(values, np.float64)
