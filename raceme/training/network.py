"""A network on one flat vector of weights.

All weights are views into one vector and all gradients into another, so that a step, the proximal
term and whatever else acts on weights is one operation on a vector, whatever the number of layers,
and a received model is copied once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss

from raceme.core.events import ACCURACY, Measure
from raceme.core.messages import LARGEST_SQUARE, InvalidModelError, ModelSpec, from_array, to_array
from raceme.datasets.source import DataShape, Labels, Target
from raceme.flower.messages import array_record
from raceme.training.models import batch_norm_arrays, has_batch_norm

# -----------------------------------------------------------------------------
# What local training makes small, and what a test measures: by the task of the data.
# -----------------------------------------------------------------------------


class Objective:
    """Classification: cross-entropy, and the share of the samples that are classified correctly.

    Attributes
    ----------
    measure : Measure
        What :meth:`scores` are the mean of.
    """

    measure = ACCURACY

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss of a network's outputs.

        Parameters
        ----------
        outputs : Tensor
            Shape (n, outputs).
        targets : Tensor
            Labels, shape (n,).
        reduction : str
            ``"mean"``, ``"sum"``, or ``"none"`` for the loss of each sample, shape (n,).
        """
        return cross_entropy(outputs, targets, reduction=reduction)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what a test counts of each sample, shape (n,): 1 if its class is right, else 0."""
        return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Regression(Objective):
    """Regression: Huber's loss of the standardised quantity, and the absolute error in its unit.

    Huber's loss is half the square of an error up to one standard deviation and grows linearly
    from there, so that a rare peak of many deviations does not throw the weights about as its
    square would.

    Attributes
    ----------
    target : Target
        What is predicted.
    """

    target: Target

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """The mean absolute error, in the unit of the quantity."""
        return Measure(self.target.unit)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return Huber's loss."""
        return huber_loss(outputs.squeeze(1), targets, reduction=reduction)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error of each sample in the unit of the quantity, shape (n,)."""
        return (outputs.squeeze(1) - targets).abs() * self.target.std


def objective_of(shape: DataShape) -> Objective:
    """Return the objective of the task that data have."""
    return Objective() if shape.target is None else Regression(shape.target)


# -----------------------------------------------------------------------------
# A client's samples as tensors.
# -----------------------------------------------------------------------------


_GATHERED = 64
"""Mini-batches whose samples are gathered at once: less work per step, and bounded memory."""


class Samples:
    """Inputs and labels as tensors.

    Parameters
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : Labels
        Labels, shape (n,): classes, or quantities.
    channels_last : bool
        Keep inputs of shape (n, channels, height, width) in the order of memory that
        convolutions work on fastest.
    accelerator : str
        Where they are kept: where their network computes.
    """

    def __init__(
        self,
        x: NDArray[np.float32],
        y: Labels,
        channels_last: bool = False,
        accelerator: str = "cpu",
    ) -> None:
        self._channels_last = channels_last and x.ndim == 4
        # Kept as (n, height, width, channels): what is cut out of that is "channels last", which
        # selecting from a tensor that merely has such strides would lose. numpy rather than torch
        # brings it into this order, because with a single channel torch takes it to be so already
        # and keeps strides that its kernels do not recognise.
        values = np.array(np.moveaxis(x, 1, -1), order="C") if self._channels_last else x
        self.x = torch.from_numpy(np.ascontiguousarray(values)).to(accelerator)
        self.y = torch.from_numpy(np.ascontiguousarray(y)).to(accelerator)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """Return the samples of several parts, at least one, in their order. Copies."""
        if len(parts) == 1:
            return parts[0]
        whole = cls.__new__(cls)
        whole._channels_last = parts[0]._channels_last
        whole.x = torch.cat([part.x for part in parts])
        whole.y = torch.cat([part.y for part in parts])
        return whole

    def divided(self, count: int, rng: np.random.Generator) -> tuple[Samples, Samples]:
        """Return all but `count` samples, in their order, and those, drawn at random. Copies."""
        taken = np.zeros(len(self), bool)
        taken[rng.choice(len(self), count, replace=False)] = True
        return self._where(~taken), self._where(taken)

    def with_labels(self, y: Labels) -> Samples:
        """Return the same inputs, not copied, with other labels, shape (n,)."""
        other = Samples.__new__(Samples)
        other._channels_last, other.x = self._channels_last, self.x
        other.y = torch.from_numpy(np.ascontiguousarray(y)).to(self.y.device)
        return other

    def _where(self, wanted: NDArray[np.bool_]) -> Samples:
        part = Samples.__new__(Samples)
        part._channels_last = self._channels_last
        positions = torch.from_numpy(np.flatnonzero(wanted)).to(self.y.device)
        part.x, part.y = self.x.index_select(0, positions), self.y.index_select(0, positions)
        return part

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


# -----------------------------------------------------------------------------
# A network on one flat vector of weights.
# -----------------------------------------------------------------------------


_CLASSIFICATION = Objective()


def is_usable(weights: Tensor) -> bool:
    """Return whether the server would take a model of these weights: neither NaN nor huge."""
    return float(weights @ weights) <= LARGEST_SQUARE


class Network:
    """A torch network whose weights lie in one flat vector.

    Parameters
    ----------
    module : nn.Module
        The network. Its parameters become views into :attr:`weights`, and their gradients views
        into :attr:`gradient`.
    objective : Objective
        What it is trained for and tested by.
    accelerator : str
        Where it computes: ``"cpu"``, or what torch calls a GPU, ``"cuda"`` or ``"mps"``.

    Attributes
    ----------
    weights, gradient : Tensor
        All parameters and their gradients, shape (d,), float32, in the accelerator's memory.
    accelerator : str
        Where it computes.
    slices : dict[str, slice]
        Where each parameter lies in them.
    trained : tuple[nn.Parameter, ...]
        The parameters that training moves: not those that the network itself has frozen.
    trained_values : tuple[Tensor, ...]
        Their values, the same memory, which may be changed in place.
    needs_pairs : bool
        True if a mini-batch of one sample is unusable: batch normalisation.
    batch_norm : tuple[str, ...]
        Names of the arrays of its batch normalisation: weights, statistics and counters.
    channels_last : bool
        True if it convolves: images are then best kept in that order of memory.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective = _CLASSIFICATION,
        accelerator: str = "cpu",
    ) -> None:
        self.module = module.to(accelerator)
        self.objective = objective
        self.accelerator = accelerator
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
        self.trained = tuple(p for p in parameters if p.requires_grad)
        self.trained_values = tuple(parameter.detach() for parameter in self.trained)
        self._tensors: dict[str, Tensor] = dict(module.state_dict())
        # Parameters and buffers as numpy sees them: on a CPU the very same memory, else a copy.
        self._state: dict[str, NDArray[np.generic]] = {
            name: values.cpu().numpy() for name, values in self._tensors.items()
        }
        self.needs_pairs = has_batch_norm(module)
        self.batch_norm = batch_norm_arrays(module)
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
        self._take(record.items())
        return spec

    def restore(self, record: ArrayRecord) -> None:
        """Take over some of the arrays, those of :meth:`keep`.

        Raises
        ------
        InvalidModelError
            They are not those of this network.
        """
        foreign = [name for name in record if name not in self._state]
        if foreign:
            raise InvalidModelError(f"This client's network has no arrays {foreign}.")
        self._take(record.items())

    def _take(self, arrays: Iterable[tuple[str, Array]]) -> None:
        for name, array in arrays:
            values, own = from_array(array), self._state[name]
            if values.shape != own.shape or values.dtype.kind not in "fiu":
                raise InvalidModelError(
                    f"The received array '{name}' is {values.dtype} of shape {values.shape}; "
                    f"this client's network has shape {own.shape}."
                )
            np.copyto(own, values, casting="unsafe")
            if self.accelerator != "cpu":
                self._tensors[name].copy_(torch.from_numpy(own))

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
        mask = torch.empty_like(self.weights, dtype=torch.bool)
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

    def read_weights(self, record: ArrayRecord) -> Tensor:
        """Return the weights of a model without receiving it.

        Parameters
        ----------
        record : ArrayRecord
            A model; its statistics and counters are left aside.

        Returns
        -------
        Tensor
            Shape (d,), float32, in the order of :attr:`weights`.

        Raises
        ------
        InvalidModelError
            A parameter is missing, or has another shape.
        """
        weights = torch.empty_like(self.weights)
        for name, where in self.slices.items():
            values = from_array(record[name]) if name in record else np.empty(0)
            if values.shape != self._state[name].shape:
                raise InvalidModelError(
                    f"The received model's '{name}' must have shape {self._state[name].shape}, got "
                    f"{values.shape}."
                )
            weights[where] = torch.from_numpy(values.reshape(-1).astype(np.float32))
        return weights

    def write_weights(self, values: Tensor) -> ArrayRecord:
        """Return a number for each weight as :meth:`read_weights` takes it: arrays by name."""
        return array_record(
            {
                name: to_array(values[where].cpu().numpy().reshape(self._state[name].shape))
                for name, where in self.slices.items()
            }
        )

    def write(self, spec: ModelSpec) -> ArrayRecord:
        """Return the model as it is now, in the order and types of the one that was read."""
        return array_record(
            {
                name: to_array(self._present(name).astype(dtype, copy=False))
                for name, dtype in zip(spec.names, spec.dtypes, strict=True)
            }
        )

    def keep(self, names: Collection[str]) -> ArrayRecord:
        """Return some of the arrays as they are now, by name."""
        return array_record({name: to_array(self._present(name)) for name in names})

    def _present(self, name: str) -> NDArray[np.generic]:
        """Return an array as it is now, in the CPU's memory."""
        if self.accelerator == "cpu":
            return self._state[name]
        return self._tensors[name].cpu().numpy()
