"""Local training and testing: mini-batches of one client's samples through one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout as left_out

from raceme.core.messages import ANCHOR, MASK
from raceme.training.models import Network, Samples

# -----------------------------------------------------------------------------
# Hyper-parameters of the local training.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSettings:
    """Hyper-parameters of the local training.

    Attributes
    ----------
    lr : float
        Learning rate η of the local optimiser.
    batch_size : int
        Samples per step; the last step of an epoch takes what is left.
    local_epochs : int
        Number of passes over the client's samples.
    local_steps : int
        Exactly so many steps instead, through as many epochs as they take; 0: epochs count.
    optimizer : str
        Name of the optimiser, of those in :mod:`raceme.training.local`.
    momentum : float
        Share of the former step that the optimiser ``momentum`` adds to the next.
    weight_decay : float
        Strength λ of the term λ/2 ‖w‖². Keras' ``l2(s)`` is s ‖w‖², so that λ = 2 s.
    weight_decay_on : {"all", "kernels"}
        What the term is of: all weights, or those in arrays of two dimensions at least, which are
        what Keras calls kernels: no biases, no scales of a normalisation.
    proximal_mu : float
        Strength μ of FedProx's term μ/2 ‖w - w₀‖², with w₀ the received weights.
    dropout : float
        Share of the inputs of linear layers that each step leaves out.

    Raises
    ------
    ValueError
        A number is out of its range.
    """

    lr: float
    batch_size: int = 10
    local_epochs: int = 1
    local_steps: int = 0
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    weight_decay_on: str = "all"
    proximal_mu: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be greater than 0, got {self.lr}.")
        for name, low in _LEAST.items():
            if not low <= getattr(self, name) < math.inf:
                key = name.replace("_", "-")
                raise ValueError(f"{key} must be at least {low}, got {getattr(self, name)}.")
        for name in ("momentum", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}."
                )


_LEAST = {"batch_size": 1, "local_epochs": 1, "local_steps": 0, "weight_decay": 0, "proximal_mu": 0}


# -----------------------------------------------------------------------------
# Optimisers by name: how a step follows its gradient.
#
# An optimiser starts anew with every piece of work: what it remembers of former steps is of this
# client's last visit, not of the model that it now trains.
# -----------------------------------------------------------------------------


class Trained(Protocol):
    """Weights in one flat vector, and their gradient in another: a network's, or what makes them.

    Attributes
    ----------
    weights, gradient : Tensor
        Shape (d,), float32.
    """

    weights: Tensor
    gradient: Tensor


Descent = Callable[[], object]
"""Moves weights by one step along their gradient."""


def sgd(trained: Trained, settings: TrainingSettings) -> Descent:
    """Plain stochastic gradient descent: one operation, without a library's bookkeeping."""
    return lambda: trained.weights.add_(trained.gradient, alpha=-settings.lr)


def momentum(trained: Trained, settings: TrainingSettings) -> Descent:
    """Stochastic gradient descent with (heavy-ball) momentum."""
    weights = [_with_gradient(trained)]
    return torch.optim.SGD(weights, lr=settings.lr, momentum=settings.momentum).step


def adam(trained: Trained, settings: TrainingSettings) -> Descent:
    """Adam (Kingma and Ba 2015) with its usual constants."""
    return torch.optim.Adam([_with_gradient(trained)], lr=settings.lr).step


OPTIMISERS: dict[str, Callable[[Trained, TrainingSettings], Descent]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
}


def optimiser_of(trained: Trained, settings: TrainingSettings) -> Descent:
    """Make the optimiser that the settings name, for one piece of work.

    Raises
    ------
    ValueError
        There is none of this name.
    """
    if settings.optimizer not in OPTIMISERS:
        known = ", ".join(OPTIMISERS)
        raise ValueError(f"optimizer must be one of {known}, got '{settings.optimizer}'.")
    return OPTIMISERS[settings.optimizer](trained, settings)


def _with_gradient(trained: Trained) -> Tensor:
    """Return weights as torch's optimisers want them, their gradient attached."""
    weights = trained.weights.detach()
    weights.grad = trained.gradient
    return weights


# -----------------------------------------------------------------------------
# What else than the loss a step follows: terms that change its gradient.
#
# A further term is one function here and its place in :func:`terms_of`, or for one method a
# function that its client half hands to :func:`train`. It is given the network as it was received,
# the hyper-parameters, and every record of named arrays that came with the model, and returns None
# where it was not asked for.
# -----------------------------------------------------------------------------


Term = Callable[[Tensor, Tensor], object]
"""Changes the gradient of a step in place, given the weights: ``term(weights, gradient)``."""

TermBuilder = Callable[[Network, TrainingSettings, Mapping[str, ArrayRecord]], Term | None]


def weight_decay(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the gradient λ w of λ/2 ‖w‖², of all weights or of kernels only.

    A term like any other rather than torch's own, which would also shrink what a mask freezes.
    """
    strength = settings.weight_decay
    if not strength:
        return None
    if settings.weight_decay_on == "all":
        return lambda weights, gradient: gradient.add_(weights, alpha=strength)
    kernels = network.kernels
    return lambda weights, gradient: gradient.add_(weights * kernels, alpha=strength)


def proximal(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return FedProx's term (Li et al. 2020): the gradient μ (w - w₀) of μ/2 ‖w - w₀‖².

    w₀ is where training starts, or the anchor that came with the model.
    """
    if not settings.proximal_mu:
        return None
    start = network.read_weights(arrays[ANCHOR]) if ANCHOR in arrays else network.weights.clone()
    return lambda weights, gradient: gradient.add_(weights - start, alpha=settings.proximal_mu)


def masked(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the term that keeps weights at their received values where the mask is 0."""
    if MASK not in arrays:
        return None
    frozen = ~network.read_mask(arrays[MASK])
    return lambda weights, gradient: gradient.masked_fill_(frozen, 0.0)


def terms_of(
    network: Network,
    settings: TrainingSettings,
    arrays: Mapping[str, ArrayRecord],
    more: Sequence[TermBuilder] = (),
) -> list[Term]:
    """Return the terms that a piece of work asks for, in the order in which they act.

    Raises
    ------
    InvalidModelError
        A record does not fit the network.
    """
    # The mask is last: nothing may move what it freezes.
    builders = [weight_decay, proximal, *more, masked]
    built = (build(network, settings, arrays) for build in builders)
    return [term for term in built if term is not None]


# -----------------------------------------------------------------------------
# Dropout in a network that need not have any: inputs of linear layers, left out at random.
# -----------------------------------------------------------------------------


@contextmanager
def dropout(module: nn.Module, share: float) -> Iterator[None]:
    """Let a network in training leave out a share of its hidden units.

    Units are left out where a linear layer receives them, the network's first layer aside, whose
    inputs are the samples: of a perceptron all hidden layers, of a convolutional network what goes
    into its linear layers. A network of one layer has no hidden units, and is left as it is. The
    dropout layers of the network itself work as ever.

    Parameters
    ----------
    module : nn.Module
        The network. In evaluation mode it leaves nothing out.
    share : float
        Probability with which a unit is left out; the others are enlarged by 1 / (1 − share).
    """

    def leave_out(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (left_out(inputs[0], share, layer.training), *inputs[1:])

    layers = hidden_linear_layers(module) if share else []
    hooks = [layer.register_forward_pre_hook(leave_out) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hidden_linear_layers(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a network whose inputs are hidden units: all but a first one."""
    layers = [layer for layer in module.modules() if any(True for _ in layer.parameters(False))]
    return [layer for layer in layers[1:] if isinstance(layer, nn.Linear)]


# -----------------------------------------------------------------------------
# Local training and testing: mini-batches of one client's samples through one network.
# -----------------------------------------------------------------------------


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
        Number of the client's training samples.
    settings : TrainingSettings
        Hyper-parameters. With a number of steps the last epoch ends where they do.
    needs_pairs : bool
        Leave a last mini-batch of one sample out.
    rng : np.random.Generator
        Generator of the permutations, one per epoch.

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
    terms: Sequence[TermBuilder] = (),
    before_step: Callable[[Tensor, Tensor], object] | None = None,
) -> float:
    """Train a network in place.

    Parameters
    ----------
    network : Network
        Holds the weights to start from, and afterwards the trained ones.
    settings : TrainingSettings
        Learning rate, batch size, epochs and so on.
    rng : np.random.Generator
        Shuffles the samples, and seeds the network's own randomness.
    arrays : Mapping[str, ArrayRecord]
        What came with the model, for terms that need it, e.g. a mask.
    descent : Callable
        Makes what follows the gradient; by default the optimiser of the settings.
    weights : Tensor, optional
        By what the loss of each sample is multiplied, shape (n,).
    terms : Sequence[TermBuilder]
        Terms of the objective beyond those that the settings ask for.
    before_step : Callable, optional
        Called with each mini-batch, inputs and labels, before the step; it may differentiate the
        network, and leaves its weights as they are.

    Returns
    -------
    float
        Mean loss of the samples as they were met, weighted, without the terms added to it.
    """
    take_step = _steps(network, settings, terms_of(network, settings, arrays, terms), descent)
    total = torch.zeros((), device=network.accelerator)
    seen = 0
    network.module.train()
    with _seeded(torch_seed(rng), network), dropout(network.module, settings.dropout):
        for order in epochs(len(samples), settings, network.needs_pairs, rng):
            chosen, size = torch.from_numpy(order).to(network.accelerator), settings.batch_size
            batches = samples.mini_batches(chosen, size)
            parts = repeat(None) if weights is None else torch.split(weights[chosen], size)
            for (x, y), own in zip(batches, parts, strict=False):
                if before_step is not None:
                    before_step(x, y)
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

    A GPU draws by a generator of its own, which serves nothing else here.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if network.accelerator != "cpu":
            torch.get_device_module(network.accelerator).manual_seed(seed)
        yield


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
