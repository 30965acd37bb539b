"""Local training: mini-batch SGD on one client's samples, on one flat vector of weights.

All weights of a network are views into one vector and all gradients into another, so that a step,
the proximal term and whatever else acts on weights is one operation on a vector, whatever the
number of layers, and a received model is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raceme.compat import array_record
from raceme.messages import InvalidModelError, ModelSpec, from_array, to_array

_TEST_BATCH = 256
_GATHERED = 64
"""Mini-batches whose samples are gathered at once: less work per step, and bounded memory."""

Term = Callable[[Tensor, Tensor], None]
"""Changes the gradient of a step in place, given the weights: ``term(weights, gradient)``."""


class Network:
    """A torch network whose weights lie in one flat vector.

    Parameters
    ----------
    module : nn.Module
        The network. Its parameters become views into :attr:`weights`, and their gradients views
        into :attr:`gradient`.

    Attributes
    ----------
    weights, gradient : Tensor
        All parameters and their gradients, shape (d,), float32.
    slices : dict[str, slice]
        Where each parameter lies in them.
    needs_pairs : bool
        True if a mini-batch of one sample is of no use: batch normalisation.
    channels_last : bool
        True if it convolves: images are then best kept in that order of memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = list(module.parameters())
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters]).float()
        self.gradient = torch.zeros_like(self.weights)
        self.slices: dict[str, slice] = {}
        start = 0
        for name, parameter in module.named_parameters():
            end = start + parameter.numel()
            parameter.data = self.weights[start:end].view_as(parameter)
            parameter.grad = self.gradient[start:end].view_as(parameter)
            self.slices[name] = slice(start, end)
            start = end
        # Parameters and buffers as numpy sees the very same memory.
        self._state: dict[str, NDArray[np.generic]] = {
            name: values.numpy() for name, values in module.state_dict().items()
        }
        self.needs_pairs = any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()
        )
        self.channels_last = any(isinstance(layer, nn.Conv2d) for layer in module.modules())

    def read(self, record: ArrayRecord) -> ModelSpec:
        """Take over a received model, buffers included.

        Returns
        -------
        ModelSpec
            Names, shapes and types of the record, for :meth:`write`.

        Raises
        ------
        InvalidModelError
            The arrays are not those of this network.
        """
        spec = ModelSpec.of(record)
        if set(spec.names) != set(self._state):
            raise InvalidModelError(
                f"The received model has the arrays {list(spec.names)}; "
                f"this client's network has {list(self._state)}."
            )
        for name, array in record.items():
            values, own = from_array(array), self._state[name]
            if values.shape != own.shape or values.dtype.kind not in "fiu":
                raise InvalidModelError(
                    f"The received array '{name}' is {values.dtype} of shape {values.shape}; "
                    f"this client's network has shape {own.shape}."
                )
            np.copyto(own, values, casting="unsafe")
        return spec

    def read_mask(self, record: ArrayRecord) -> Tensor:
        """Return which weights a record of zeros and ones lets a client train.

        Parameters
        ----------
        record : ArrayRecord
            One array per parameter, of its name and shape; arrays of bool or integers.

        Returns
        -------
        Tensor
            Shape (d,), bool, in the order of :attr:`weights`.

        Raises
        ------
        InvalidModelError
            A parameter is missing, or an array has another shape or type.
        """
        mask = torch.empty(len(self.weights), dtype=torch.bool)
        for name, where in self.slices.items():
            if name not in record:
                raise InvalidModelError(f"The received mask says nothing of '{name}'.")
            values, shape = from_array(record[name]), self._state[name].shape
            if values.shape != shape or values.dtype.kind not in "biu":
                raise InvalidModelError(
                    f"The received mask of '{name}' is {values.dtype} of shape {values.shape}; "
                    f"it must be bool or uint8 of shape {shape}."
                )
            mask[where] = torch.from_numpy(values.reshape(-1) != 0)
        return mask

    def write(self, spec: ModelSpec) -> ArrayRecord:
        """Return the model as it is now, in the order and types of the one that was read."""
        return array_record(
            {
                name: to_array(self._state[name].astype(dtype, copy=False))
                for name, dtype in zip(spec.names, spec.dtypes, strict=True)
            }
        )


class Samples:
    """Inputs and labels as tensors.

    Parameters
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : NDArray[np.int64]
        Labels, shape (n,).
    channels_last : bool
        Keep inputs of shape (n, channels, height, width) in the order of memory that
        convolutions work on fastest.
    """

    def __init__(
        self, x: NDArray[np.float32], y: NDArray[np.int64], channels_last: bool = False
    ) -> None:
        self._channels_last = channels_last and x.ndim == 4
        # Kept as (n, height, width, channels): what is cut out of that is "channels last", which
        # selecting from a tensor that merely has such strides would lose. numpy rather than torch
        # brings it into this order, because with a single channel torch takes it to be so already
        # and keeps strides that its kernels do not recognise.
        values = np.array(np.moveaxis(x, 1, -1), order="C") if self._channels_last else x
        self.x = torch.from_numpy(np.ascontiguousarray(values))
        self.y = torch.from_numpy(np.ascontiguousarray(y))

    def __len__(self) -> int:
        return len(self.y)

    def mini_batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples at `order`, `size` at a time."""
        for block in torch.split(order, size * _GATHERED):
            x, y = self.shaped(self.x.index_select(0, block)), self.y.index_select(0, block)
            yield from zip(torch.split(x, size), torch.split(y, size), strict=True)

    def slices(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples in order, `size` at a time, without copying."""
        return zip(torch.split(self.shaped(self.x), size), torch.split(self.y, size), strict=True)

    def shaped(self, x: Tensor) -> Tensor:
        """Return inputs cut out of :attr:`x` as a network takes them."""
        return x.permute(0, 3, 1, 2) if self._channels_last else x


@dataclass(frozen=True)
class Sgd:
    """Hyper-parameters of the local training.

    Attributes
    ----------
    lr : float
        Learning rate.
    batch_size : int
        Samples per step; the last step of an epoch takes what is left.
    local_epochs : int
        Passes over the samples.
    proximal_mu : float
        Strength μ of FedProx's term μ/2 ‖w - w₀‖², with w₀ the received weights.

    Raises
    ------
    ValueError
        A number is out of its range.
    """

    lr: float
    batch_size: int = 10
    local_epochs: int = 1
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be greater than 0, got {self.lr}.")
        if self.batch_size < 1:
            raise ValueError(f"batch-size must be at least 1, got {self.batch_size}.")
        if self.local_epochs < 1:
            raise ValueError(f"local-epochs must be at least 1, got {self.local_epochs}.")
        if not 0 <= self.proximal_mu < float("inf"):
            raise ValueError(f"proximal-mu must be at least 0, got {self.proximal_mu}.")


def proximal(start: Tensor, mu: float) -> Term:
    """Return FedProx's term (Li et al. 2020): the gradient μ (w - w₀) of μ/2 ‖w - w₀‖²."""

    def add(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(weights - start, alpha=mu)

    return add


def masked(mask: Tensor) -> Term:
    """Return the term that keeps weights at their received values where `mask` is False."""
    frozen = ~mask

    def clear(weights: Tensor, gradient: Tensor) -> None:
        gradient.masked_fill_(frozen, 0.0)

    return clear


def torch_seed(rng: np.random.Generator) -> int:
    """Draw the seed of a network's own randomness, e.g. dropout: a task's first random number."""
    return int(rng.integers(2**63))


def epochs(
    count: int, sgd: Sgd, needs_pairs: bool, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the order of a client's samples in each epoch; mini-batches are cut from its front.

    Parameters
    ----------
    count : int
        Number of samples.
    sgd : Sgd
        Hyper-parameters.
    needs_pairs : bool
        Leave a last mini-batch of one sample out.
    rng : np.random.Generator
        Shuffles.

    Raises
    ------
    ValueError
        Pairs are needed, and no mini-batch has two samples.
    """
    used = count
    if needs_pairs and count % sgd.batch_size == 1 % sgd.batch_size:
        # Batch normalisation has no variance to divide by in a mini-batch of one sample.
        used = count - 1 if sgd.batch_size > 1 else 0
    if used == 0:
        raise ValueError(
            "A network with batch normalisation needs mini-batches of at least 2 samples; "
            f"this client has {count} samples and batch-size {sgd.batch_size}."
        )
    for _ in range(sgd.local_epochs):
        yield rng.permutation(count)[:used]


def train(
    network: Network,
    samples: Samples,
    sgd: Sgd,
    rng: np.random.Generator,
    mask: Tensor | None = None,
) -> float:
    """Train a network in place.

    Parameters
    ----------
    network : Network
        Holds the weights to start from, and afterwards the trained ones.
    samples : Samples
        The client's training samples.
    sgd : Sgd
        Hyper-parameters.
    rng : np.random.Generator
        Shuffles the samples, and seeds the network's own randomness.
    mask : Tensor, optional
        Shape (d,), bool: weights where it is False stay as they are.

    Returns
    -------
    float
        Mean cross-entropy of the samples as they were met, without the terms added to it.
    """
    terms: list[Term] = []
    if sgd.proximal_mu:
        terms.append(proximal(network.weights.clone(), sgd.proximal_mu))
    if mask is not None:
        terms.append(masked(mask))
    total = torch.zeros(())
    seen = 0
    network.module.train()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(rng))
        for order in epochs(len(samples), sgd, network.needs_pairs, rng):
            for x, y in samples.mini_batches(torch.from_numpy(order), sgd.batch_size):
                total.add_(step(network, x, y, sgd.lr, terms), alpha=len(y))
            seen += len(order)
    return float(total) / seen


def step(network: Network, x: Tensor, y: Tensor, lr: float, terms: Sequence[Term] = ()) -> Tensor:
    """Take one step of SGD on a mini-batch, and return its mean cross-entropy before the step."""
    network.gradient.zero_()
    loss = cross_entropy(network.module(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    for term in terms:
        term(network.weights, network.gradient)
    network.weights.add_(network.gradient, alpha=-lr)
    return loss.detach()


def evaluate(network: Network, samples: Samples) -> tuple[float, float]:
    """Test a network.

    Returns
    -------
    tuple[float, float]
        Share of the samples that are classified correctly, and mean cross-entropy.
    """
    correct = 0
    loss = 0.0
    network.module.eval()
    with torch.inference_mode():
        for x, y in samples.slices(_TEST_BATCH):
            scores = network.module(x)
            loss += float(cross_entropy(scores, y, reduction="sum"))
            correct += int((scores.argmax(dim=1) == y).sum())
    return correct / len(samples), loss / len(samples)
