"""Local training and testing: mini-batches of one client's samples through one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout as left_out
from torch.nn.functional import pad

from raceme.core.errors import plural
from raceme.core.messages import ANCHOR, MASK
from raceme.core.training_settings import TrainingSettings
from raceme.training.models import Network, Samples

# -----------------------------------------------------------------------------
# Optimisers by name.
#
# An optimiser starts anew with every task: its former state belongs to an outdated model.
# -----------------------------------------------------------------------------


class Trained(Protocol):
    """Weights and their gradient as flat vectors.

    Attributes
    ----------
    weights, gradient : Tensor
        Shape (d,), float32.
    """

    weights: Tensor
    gradient: Tensor


Descent = Callable[[], object]
"""Takes one step along the gradient."""


def sgd(trained: Trained, settings: TrainingSettings) -> Descent:
    """Plain stochastic gradient descent, as a single operation."""
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
    """Make the optimiser of the settings for one task."""
    return OPTIMISERS[settings.optimizer](trained, settings)


def _with_gradient(trained: Trained) -> Tensor:
    """Return weights with attached gradient, as torch's optimisers require."""
    weights = trained.weights.detach()
    weights.grad = trained.gradient
    return weights


# -----------------------------------------------------------------------------
# Terms of the objective besides the loss, which change the gradient.
#
# A term is a function here and in :func:`terms_of`, or a function that a method's client half
# passes to :func:`train`. It receives the network as received, the hyper-parameters and the
# message's array records, and returns None where it does not apply.
# -----------------------------------------------------------------------------


Term = Callable[[Tensor, Tensor], object]
"""Changes the gradient of a step in place, given the weights: ``term(weights, gradient)``."""

TermBuilder = Callable[[Network, TrainingSettings, Mapping[str, ArrayRecord]], Term | None]


@dataclass(frozen=True, eq=False)
class Pull:
    """The term with the gradient s (w − w₀), of s/2 ‖w − w₀‖².

    Attributes
    ----------
    strength : float or Tensor
        s: for all weights, or for each, shape (d,).
    anchor : Tensor or None
        w₀, shape (d,); None for 0.
    where : Tensor or None
        Weights that are pulled, shape (d,), bool; None for all.
    """

    strength: float | Tensor
    anchor: Tensor | None = None
    where: Tensor | None = None

    def __call__(self, weights: Tensor, gradient: Tensor) -> None:
        """Add the gradient."""
        away = weights if self.anchor is None else weights - self.anchor
        if self.where is not None:
            away = away * self.where
        if isinstance(self.strength, Tensor):
            gradient.addcmul_(self.strength, away)
        else:
            gradient.add_(away, alpha=self.strength)


@dataclass(frozen=True, eq=False)
class Frozen:
    """The term that keeps some weights, shape (d,), bool, as they are."""

    weights: Tensor

    def __call__(self, weights: Tensor, gradient: Tensor) -> None:
        """Set their gradient to 0."""
        gradient.masked_fill_(self.weights, 0.0)


def weight_decay(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the gradient λ w of λ/2 ‖w‖², of all weights or of kernels only.

    Unlike torch's weight decay, it leaves masked weights unchanged.
    """
    strength = settings.weight_decay
    if not strength:
        return None
    return Pull(strength, where=None if settings.weight_decay_on == "all" else network.kernels)


def proximal(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return FedProx's term (Li et al. 2020): the gradient μ (w - w₀) of μ/2 ‖w - w₀‖².

    w₀ is the received model or the anchor sent with it.
    """
    if not settings.proximal_mu:
        return None
    start = network.read_weights(arrays[ANCHOR]) if ANCHOR in arrays else network.weights.clone()
    return Pull(settings.proximal_mu, start)


def masked(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the term that keeps weights at their received values where the mask is 0."""
    if MASK not in arrays:
        return None
    return Frozen(~network.read_mask(arrays[MASK]))


def terms_of(
    network: Network,
    settings: TrainingSettings,
    arrays: Mapping[str, ArrayRecord],
    more: Sequence[TermBuilder] = (),
) -> list[Term]:
    """Return the terms of a task in order of application.

    Raises
    ------
    InvalidModelError
        A record does not fit the network.
    """
    # The mask comes last, so that no term moves frozen weights.
    builders = [weight_decay, proximal, *more, masked]
    built = (build(network, settings, arrays) for build in builders)
    return [term for term in built if term is not None]


# -----------------------------------------------------------------------------
# Augmentation of images.
# -----------------------------------------------------------------------------


LARGEST_SHIFT = 4
"""Pixels by which an image is shifted at most, on either axis."""


class Moves(NamedTuple):
    """Random moves of images: first rows and columns of crops, and mirroring; shape (n,) each."""

    down: Tensor
    across: Tensor
    mirrored: Tensor


def random_moves(n: int, generator: torch.Generator | None = None) -> Moves:
    """Draw moves on the CPU, by default from torch's default generator."""
    down, across = torch.randint(2 * LARGEST_SHIFT + 1, (2, n), generator=generator)
    return Moves(down, across, torch.rand(n, generator=generator) < 0.5)


def shifted_and_mirrored(x: Tensor, moves: Moves) -> Tensor:
    """Return images that are shifted and mirrored left to right.

    The images are padded by 4 reflected pixels on every side, and cropped to their size, as is
    usual for CIFAR-10.

    Parameters
    ----------
    x : Tensor
        Images of more than 4 pixels a side, shape (n, channels, height, width).
    moves : Moves
        A move for each.
    """
    n, channels, height, width = x.shape
    padded = pad(x, 4 * [LARGEST_SHIFT], mode="reflect").permute(0, 2, 3, 1).contiguous()
    image, row, column, _ = padded.stride()
    shifts = 2 * LARGEST_SHIFT + 1
    crops = padded.as_strided(
        (n, shifts, shifts, height, width, channels), (image, row, column, row, column, 1)
    )
    down, across, mirrored = (own.to(x.device) for own in moves)
    shifted = crops[torch.arange(n, device=x.device), down, across]
    is_mirrored = mirrored[:, None, None, None]
    return torch.where(is_mirrored, shifted.flip(2), shifted).permute(0, 3, 1, 2)


# -----------------------------------------------------------------------------
# Dropout for the inputs of any network's linear layers.
# -----------------------------------------------------------------------------


@contextmanager
def dropout(module: nn.Module, share: float) -> Iterator[None]:
    """Apply dropout to a network's hidden units in training.

    Dropout applies to the inputs of all linear layers except a first one, whose inputs are the
    samples: all hidden layers of a perceptron, or the inputs of a convolutional network's linear
    layers. A network of one layer is unchanged. The network's own dropout layers stay active.

    Parameters
    ----------
    module : nn.Module
        The network; without effect in evaluation mode.
    share : float
        Dropout probability; the remaining units are scaled by 1 / (1 − share).
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
    """Return a network's linear layers whose inputs are hidden units, all but a first one."""
    layers = [layer for layer in module.modules() if any(True for _ in layer.parameters(False))]
    return [layer for layer in layers[1:] if isinstance(layer, nn.Linear)]


# -----------------------------------------------------------------------------
# An engine that computes for many clients at once.
# -----------------------------------------------------------------------------


class Engine(Protocol):
    """Does a client's computations together with those of other clients.

    A method returns None if the engine cannot do the work; then the functions of this module do it.
    Meanwhile other clients use the network; afterwards it has this client's weights again.
    """

    def train(
        self,
        network: Network,
        samples: Samples,
        settings: TrainingSettings,
        rng: np.random.Generator,
        terms: Sequence[Term],
        weights: Tensor | None,
    ) -> float | None:
        """Train; return the mean loss."""
        ...

    def measure(self, network: Network, samples: Samples) -> tuple[Tensor, Tensor] | None:
        """Return loss and score of each sample in a test, both of shape (n,)."""
        ...

    def differentiate(
        self, network: Network, x: Tensor, y: Tensor, weights: Tensor | None
    ) -> Tensor | None:
        """Compute the gradient of a mini-batch; return its mean loss."""
        ...


ENGINE: ContextVar[Engine | None] = ContextVar("engine", default=None)
"""The engine of the current client's work, if any."""


# -----------------------------------------------------------------------------
# Local training and testing: mini-batches of one client's samples through one network.
# -----------------------------------------------------------------------------


_TEST_BATCH = 256
_LARGE = 2**16
"""Minimum number of weights for steps without the flat gradient; fewer fit the cache."""
_NO_ARRAYS: Mapping[str, ArrayRecord] = MappingProxyType({})


def torch_seed(rng: np.random.Generator) -> int:
    """Draw the seed of a network's randomness, e.g. dropout, as a task's first random number."""
    return int(rng.integers(2**63))


def epochs(
    count: int, settings: TrainingSettings, needs_pairs: bool, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the order of a client's samples in each epoch.

    Parameters
    ----------
    count : int
        Number of the client's training samples.
    settings : TrainingSettings
        Hyper-parameters; `local_steps` may truncate the last epoch.
    needs_pairs : bool
        Drop a last mini-batch of one sample.
    rng : np.random.Generator
        Generator of the permutations, one per epoch.

    Raises
    ------
    ValueError
        Pairs are needed, but no mini-batch has two samples.
    """
    for used in epoch_sizes(count, settings, needs_pairs):
        yield rng.permutation(count)[:used]


def epoch_sizes(count: int, settings: TrainingSettings, needs_pairs: bool) -> Iterator[int]:
    """Yield the number of samples per epoch; see :func:`epochs`."""
    used, size = count, settings.batch_size
    if needs_pairs and count % size == 1 % size:
        # Batch normalisation has no variance for a single sample.
        used = count - 1 if size > 1 else 0
    if count == 0:
        raise ValueError("This client has no samples to train on.")
    if used == 0:
        raise ValueError(
            "A network with batch normalisation needs mini-batches of at least 2 samples; "
            f"this client has {plural(count, 'sample')} and batch-size {size}."
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
        The network, with the initial weights and afterwards the trained ones.
    settings : TrainingSettings
        Learning rate, batch size, epochs and so on.
    rng : np.random.Generator
        Generator of the shuffling and the seed of the network's randomness.
    arrays : Mapping[str, ArrayRecord]
        Array records of the message, for terms such as a mask.
    descent : Callable
        Makes the optimiser; by default that of the settings.
    weights : Tensor, optional
        Factor on the loss of each sample, shape (n,).
    terms : Sequence[TermBuilder]
        Terms of the objective besides those of the settings.
    before_step : Callable, optional
        Called with each mini-batch, inputs and labels, before the step; it may differentiate the
        network, but does not change its weights.

    Returns
    -------
    float
        Mean weighted loss of the samples during training, without the terms.
    """
    built, engine = terms_of(network, settings, arrays, terms), ENGINE.get()
    if engine is not None and descent is optimiser_of and before_step is None:
        loss = engine.train(network, samples, settings, rng, built, weights)
        if loss is not None:
            return loss
    if settings.dropout:
        # Dropout is made by hooks of the network, which other clients would share.
        ENGINE.set(None)
    try:
        return _train_here(
            network,
            samples,
            settings,
            rng,
            _steps(network, settings, built, descent),
            weights,
            before_step,
        )
    finally:
        ENGINE.set(engine)


def _train_here(
    network: Network,
    samples: Samples,
    settings: TrainingSettings,
    rng: np.random.Generator,
    take_step: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    weights: Tensor | None,
    before_step: Callable[[Tensor, Tensor], object] | None,
) -> float:
    """Train step by step; see :func:`train`."""
    total = torch.zeros((), device=network.accelerator)
    seen = 0
    network.module.train()
    with _seeded(torch_seed(rng), network), dropout(network.module, settings.dropout):
        for order in epochs(len(samples), settings, network.needs_pairs, rng):
            chosen, size = torch.from_numpy(order).to(network.accelerator), settings.batch_size
            batches = samples.mini_batches(chosen, size)
            parts = repeat(None) if weights is None else torch.split(weights[chosen], size)
            for (x, y), own in zip(batches, parts, strict=False):
                if settings.augment:
                    x = shifted_and_mirrored(x, random_moves(len(x)))
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
    """Return the function that takes a step and returns the mean loss before it."""
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
    """Seed a network's randomness within the context, without affecting torch elsewhere.

    A GPU's own generator has no other use here.
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
    """Compute the gradient of a mini-batch and the terms; return the mean loss.

    With sample weights, it is the mean of weighted losses.
    """
    engine = ENGINE.get()
    loss = None if engine is None else engine.differentiate(network, x, y, weights)
    if loss is None:
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

    Large networks apply each layer's gradient directly, which saves two passes over memory and
    leaves :attr:`Network.gradient` unchanged. The result is bit-identical.
    """
    if len(network.weights) < _LARGE or ENGINE.get() is not None:
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
        Mean score of the network's objective, e.g. the accuracy, and mean loss.
    """
    if (engine := ENGINE.get()) and (measured := engine.measure(network, samples)):
        total, right = (float(values.sum()) for values in measured)
        return right / len(samples), total / len(samples)
    objective = network.objective
    score = loss = 0.0
    network.module.eval()
    with torch.inference_mode():
        for x, y in samples.slices(_TEST_BATCH):
            outputs = network.outputs(x)
            loss += float(objective.loss(outputs, y, "sum"))
            score += float(objective.scores(outputs, y).sum())
    return score / len(samples), loss / len(samples)


def losses(network: Network, samples: Samples) -> NDArray[np.float32]:
    """Return the loss of each sample, shape (n,), float32."""
    return losses_and_scores(network, samples)[0]


def losses_and_scores(
    network: Network, samples: Samples
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the loss and the score of each sample, each of shape (n,), float32."""
    if (engine := ENGINE.get()) and (measured := engine.measure(network, samples)):
        return measured[0].numpy(), measured[1].numpy()
    objective, parts = network.objective, []
    network.module.eval()
    with torch.inference_mode():
        for x, y in samples.slices(_TEST_BATCH):
            outputs = network.outputs(x)
            parts.append((objective.loss(outputs, y, "none"), objective.scores(outputs, y)))
    lost, scores = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return lost, scores
