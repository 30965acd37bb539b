"""Client halves of PACFL, FLUX and CFL-GP: profiles of a client's data."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raceme.core.clusters import Matrix
from raceme.core.messages import NUM_EXAMPLES, Role
from raceme.strategies import profiles as keys
from raceme.training.local import differentiate
from raceme.training.models import Network, Samples
from raceme.training.work import ClientWork, WorkResult, bounded

_BATCH = 256
_POINTS = 200
_MARGIN = 1.02
"""FLUX fits its projection on 200 points, uniform in [0, 1.02 · the largest latent feature]."""


def principal_directions(work: ClientWork) -> WorkResult:
    """Return the first left singular vectors of the raw samples of each class (PACFL).

    A regression counts as one class. A class with fewer samples than directions has fewer
    directions.

    Raises
    ------
    ValueError
        The message does not state the number of directions.
    """
    per_class, in_all = work.count(keys.PER_CLASS), int(work.number(keys.IN_ALL, 0))
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
    return WorkResult({NUM_EXAMPLES: len(samples)}, numbers={keys.PRINCIPAL_DIRECTIONS: directions})


def main_directions(rows: Matrix, count: int) -> Matrix:
    """Return the first left singular vectors of a matrix whose columns are samples.

    The sign of a singular vector is arbitrary, and angles between vectors depend on it: each is
    turned towards the mean of the samples (our reading).

    Parameters
    ----------
    rows : NDArray[np.float64]
        Samples, one per row. Shape (n, d).
    count : int
        p: number of singular vectors.

    Returns
    -------
    NDArray[np.float64]
        Shape (d, at most p).
    """
    found = np.linalg.svd(rows, full_matrices=False)[2][:count].T
    return np.asarray(np.where(rows.mean(axis=0) @ found < 0, -found, found))


def latent_most(work: ClientWork) -> WorkResult:
    """Return the largest latent feature of the training samples under the received model (FLUX)."""
    work.receive(work.models[0])
    most = float(latent_features(work.client.network, work.client.train).max())
    return WorkResult({NUM_EXAMPLES: len(work.client.train), keys.LATENT_MOST: most})


def descriptors(work: ClientWork) -> WorkResult:
    """Return moments of the latent features, of all training samples and of each class (FLUX).

    Raises
    ------
    ValueError
        The message does not state the number of dimensions.
    """
    work.receive(work.models[0])
    client, network = work.client, work.client.network
    features, outputs = latent_features(network, client.train), network.width(client.train)
    rng = np.random.default_rng(int(work.number(keys.LATENT_SEED, 0)))
    scale = _MARGIN * work.number(keys.LATENT_MOST, None)
    points = rng.uniform(0.0, 1.0, (_POINTS, features.shape[1])) * scale
    latent = projected(features, points, work.count(keys.LATENT_DIMENSIONS))
    labels = client.train.y.cpu().numpy() if client.num_classes else None
    described = moments(latent, labels, outputs if client.num_classes else 0)
    numbers = {keys.DESCRIPTORS: bounded(described)}
    return WorkResult({NUM_EXAMPLES: len(client.train)}, numbers=numbers)


def moments(latent: Matrix, labels: NDArray[np.integer] | None, classes: int) -> Matrix:
    """Return mean and standard deviation of all samples, and then of those of each class.

    Parameters
    ----------
    latent : NDArray[np.float64]
        Latent features of the samples. Shape (n, l).
    labels : NDArray[np.integer] or None
        Class of each sample, shape (n,); None if there are no classes.
    classes : int
        U: number of classes of the task.

    Returns
    -------
    NDArray[np.float64]
        Shape (1 + U, 2, l); −1 for a class without a sample.
    """
    described = np.full((1 + classes, 2, latent.shape[1]), keys.ABSENT)
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
        l: number of components to project on.

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
    """Return the inputs of a network's first dense layer, shape (n, features).

    For a network without convolutions, they are the inputs of the last layer (our reading); for a
    network without a linear layer, its outputs.
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


def gradient(work: ClientWork) -> WorkResult:
    """Return the gradient of the mean loss of all training samples at the received model (CFL-GP).

    The network is in evaluation mode, so that running statistics do not change.
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
    numbers = {keys.GRADIENT: bounded(np.concatenate(parts))}
    return WorkResult({NUM_EXAMPLES: len(samples)}, numbers=numbers)
