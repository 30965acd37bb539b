"""Local training and testing: mini-batches of one client's samples through one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from types import MappingProxyType

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from raceme.training.dropout import dropout
from raceme.training.network import Network
from raceme.training.optimisers import Descent, optimiser_of
from raceme.training.samples import Samples
from raceme.training.settings import TrainingSettings
from raceme.training.terms import Term, terms_of

_TEST_BATCH = 256
_LARGE = 2**16
"""Weights from which on a plain step leaves the flat gradient out; fewer stay in the cache."""
_NO_ARRAYS: Mapping[str, ArrayRecord] = MappingProxyType({})


def torch_seed(rng: np.random.Generator) -> int:
    """Draw the seed of a network's own randomness, e.g. dropout: a task's first random number."""
    return int(rng.integers(2**63))


def epochs(
    count: int, settings: TrainingSettings, needs_pairs: bool, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the order of a client's samples in each epoch; mini-batches are cut from its front.

    Parameters
    ----------
    count : int
        Number of samples.
    settings : TrainingSettings
        Hyper-parameters. With a number of steps the last epoch ends where they do.
    needs_pairs : bool
        Leave a last mini-batch of one sample out.
    rng : np.random.Generator
        Shuffles.

    Raises
    ------
    ValueError
        Pairs are needed, and no mini-batch has two samples.
    """
    for used in epoch_sizes(count, settings, needs_pairs):
        yield rng.permutation(count)[:used]


def epoch_sizes(count: int, settings: TrainingSettings, needs_pairs: bool) -> Iterator[int]:
    """Yield how many samples each epoch takes; see :func:`epochs`."""
    used, size = count, settings.batch_size
    if needs_pairs and count % size == 1 % size:
        # Batch normalisation has no variance to divide by in a mini-batch of one sample.
        used = count - 1 if size > 1 else 0
    if used == 0:
        raise ValueError(
            "A network with batch normalisation needs mini-batches of at least 2 samples; "
            f"this client has {count} samples and batch-size {size}."
        )
    steps = settings.local_steps or settings.local_epochs * -(-used // size)
    while steps > 0:
        taken = min(used, steps * size)
        steps -= -(-taken // size)
        yield taken


def train(
    network: Network,
    samples: Samples,
    settings: TrainingSettings,
    rng: np.random.Generator,
    arrays: Mapping[str, ArrayRecord] = _NO_ARRAYS,
    descent: Callable[[Network, TrainingSettings], Descent] = optimiser_of,
    weights: Tensor | None = None,
) -> float:
    """Train a network in place.

    Parameters
    ----------
    network : Network
        Holds the weights to start from, and afterwards the trained ones.
    samples : Samples
        The client's training samples.
    settings : TrainingSettings
        Hyper-parameters.
    rng : np.random.Generator
        Shuffles the samples, and seeds the network's own randomness.
    arrays : Mapping[str, ArrayRecord]
        What came with the model, for terms that need it, e.g. a mask.
    descent : Callable
        Makes what follows the gradient; by default the optimiser of the settings.
    weights : Tensor, optional
        By what the loss of each sample is multiplied, shape (n,).

    Returns
    -------
    float
        Mean loss of the samples as they were met, weighted, without the terms added to it.
    """
    terms = terms_of(network, settings, arrays)
    take_step = _steps(network, settings, terms, descent)
    total = torch.zeros((), device=network.accelerator)
    seen = 0
    network.module.train()
    with _seeded(torch_seed(rng), network), dropout(network.module, settings.dropout):
        for order in epochs(len(samples), settings, network.needs_pairs, rng):
            chosen, size = torch.from_numpy(order).to(network.accelerator), settings.batch_size
            batches = samples.mini_batches(chosen, size)
            for (x, y), own in zip(batches, _cut(weights, chosen, size), strict=False):
                total.add_(take_step(x, y, own), alpha=len(y))
            seen += len(order)
    return float(total) / seen


def _steps(
    network: Network,
    settings: TrainingSettings,
    terms: Sequence[Term],
    descent: Callable[[Network, TrainingSettings], Descent],
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return what takes a step on a mini-batch and returns its mean loss before the step."""
    if descent is optimiser_of and settings.optimizer == "sgd" and not terms:
        return lambda x, y, weights: step(network, x, y, settings.lr, weights)
    descend = descent(network, settings)

    def take_step(x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        loss = differentiate(network, x, y, terms, weights)
        descend()
        return loss

    return take_step


@contextmanager
def _seeded(seed: int, network: Network) -> Iterator[None]:
    """Let a network's own randomness come from a seed; what torch draws elsewhere stays as it is.

    A GPU draws by a generator of its own, which nobody else uses here.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if network.accelerator != "cpu":
            torch.get_device_module(network.accelerator).manual_seed(seed)
        yield


def _cut(weights: Tensor | None, order: Tensor, size: int) -> Iterator[Tensor | None]:
    """Yield the weights of each mini-batch; None again and again if samples have none."""
    return repeat(None) if weights is None else iter(torch.split(weights[order], size))


def differentiate(
    network: Network,
    x: Tensor,
    y: Tensor,
    terms: Sequence[Term] = (),
    weights: Tensor | None = None,
) -> Tensor:
    """Leave in a network the gradient of a mini-batch and the terms; return the mean loss.

    Where samples have weights, that is the mean of their losses times their weights.
    """
    network.gradient.zero_()
    loss = _mean_loss(network, x, y, weights)
    loss.backward()  # type: ignore[no-untyped-call]
    for term in terms:
        term(network.weights, network.gradient)
    return loss.detach()


def step(
    network: Network, x: Tensor, y: Tensor, lr: float, weights: Tensor | None = None
) -> Tensor:
    """Take one plain step on a mini-batch, and return its mean loss before the step.

    A large network's weights follow each layer's gradient as it is: to gather it in
    :attr:`Network.gradient` first, which is then left as it was, is two passes over memory more.
    The outcome is the same, bit for bit.
    """
    if len(network.weights) < _LARGE:
        loss = differentiate(network, x, y, weights=weights)
        network.weights.add_(network.gradient, alpha=-lr)
        return loss
    loss = _mean_loss(network, x, y, weights)
    gradients = torch.autograd.grad(loss, network.trained, allow_unused=True)
    for values, gradient in zip(network.trained_values, gradients, strict=True):
        if gradient is not None:
            values.add_(gradient, alpha=-lr)
    return loss.detach()


def _mean_loss(network: Network, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return network.objective.loss(network.module(x), y)
    return (network.objective.loss(network.module(x), y, "none") * weights).mean()


def evaluate(network: Network, samples: Samples) -> tuple[float, float]:
    """Test a network.

    Returns
    -------
    tuple[float, float]
        Mean of what the network's objective measures, e.g. the share of the samples that are
        classified correctly, and mean loss.
    """
    objective = network.objective
    score = loss = 0.0
    network.module.eval()
    with torch.inference_mode():
        for x, y in samples.slices(_TEST_BATCH):
            outputs = network.module(x)
            loss += float(objective.loss(outputs, y, "sum"))
            score += float(objective.scores(outputs, y).sum())
    return score / len(samples), loss / len(samples)


def losses(network: Network, samples: Samples) -> NDArray[np.float32]:
    """Return the loss of each sample, shape (n,), float32."""
    network.module.eval()
    with torch.inference_mode():
        parts = [
            network.objective.loss(network.module(x), y, "none")
            for x, y in samples.slices(_TEST_BATCH)
        ]
        return torch.cat(parts).cpu().numpy()
