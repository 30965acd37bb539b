"""What a dataset is, and what a source of one has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError

Indices = NDArray[np.int64]
"""Positions of samples in a dataset."""
Labels = NDArray[Any]
"""Classes, int64, or quantities, float32."""


@dataclass(frozen=True)
class Target:
    """What a regression predicts: a quantity, of which labels hold the standardised value.

    Attributes
    ----------
    unit : str
        Unit of the quantity, in which errors are reported: ``"µg/m³"``.
    mean, std : float
        A label is the quantity less the one, over the other.
    """

    unit: str
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class DataShape:
    """What a model has to fit.

    Attributes
    ----------
    input_shape : tuple[int, ...]
        Shape of one input.
    num_classes : int
        Number of classes; 0 where the task is a regression.
    tokens : int
        Size of the vocabulary where inputs are token ids, shape (length,); 0 where they are
        quantities.
    target : Target or None
        What is predicted where the task is a regression; None where it is a classification.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    tokens: int = 0
    target: Target | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs of a model: a score for each class, or the predicted quantity."""
        return self.num_classes if self.target is None else 1


@dataclass(frozen=True)
class Dataset:
    """Samples of all clients together.

    Attributes
    ----------
    x : NDArray
        Inputs, shape (N, ...): float32, or as stored in less memory, float16, uint8 or token ids,
        which :meth:`inputs` turns into float32 for the samples that are asked for.
    y : Labels
        Labels, shape (N,): classes, int64, from 0 to ``num_classes - 1``, or for a regression the
        standardised quantity, float32; NaN where there is none.
    num_classes : int
        Number of classes; 0 for a regression.
    mean, std : float or NDArray
        :meth:`inputs` subtracts the one and divides by the other; of uint8 inputs scaled to [0, 1].
        Arrays have a shape that fits one input.
    users : tuple[Indices, ...] or None
        Samples of each client where the data come with clients of their own; None where a
        partitioner has to deal them out.
    test_users : tuple[Indices, ...] or None
        Test samples of each of these clients where they are given too; `users` are then for
        training.
    groups : tuple[int or None, ...] or None
        True group of each of these clients where the data come with groups too.
    tokens : int
        Size of the vocabulary where `x` holds token ids, which :meth:`inputs` leaves as they are;
        0 where it holds quantities.
    periods : Indices or None
        Period of time of each sample, from 0, shape (N,), where the data tell it: what the drift
        ``in-order`` follows.
    target : Target or None
        What is predicted where the task is a regression.
    """

    x: NDArray[np.generic]
    y: Labels
    num_classes: int
    mean: float | NDArray[np.float32] = 0.0
    std: float | NDArray[np.float32] = 1.0
    users: tuple[Indices, ...] | None = None
    test_users: tuple[Indices, ...] | None = None
    groups: tuple[int | None, ...] | None = None
    tokens: int = 0
    periods: Indices | None = None
    target: Target | None = None

    @property
    def shape(self) -> DataShape:
        """What a model has to fit."""
        return DataShape(tuple(self.x.shape[1:]), self.num_classes, self.tokens, self.target)

    @property
    def blank(self) -> NDArray[np.float32]:
        """What an input of zeros, an empty image, becomes: of a shape that fits one input."""
        return np.asarray(-np.asarray(self.mean) / np.asarray(self.std), np.float32)

    def inputs(self, indices: Indices) -> NDArray[np.float32]:
        """Return the inputs of some samples, normalised. Copies."""
        values = self.x[indices].astype(np.float32, copy=False)
        if self.tokens:
            return values
        if self.x.dtype == np.uint8:
            values /= np.float32(255)
        values -= np.asarray(self.mean, np.float32)
        values /= np.asarray(self.std, np.float32)
        return values


@dataclass(frozen=True)
class ClientData:
    """One client's own samples.

    Attributes
    ----------
    x_train, x_test : NDArray[np.float32]
        Inputs, shape (n, ...).
    y_train, y_test : Labels
        Labels, shape (n,), as in :class:`Dataset`.
    group : int or None
        The true group of the client where there is one; used to report purity only.
    mixture : tuple[float, ...] or None
        Share of each group's distribution in these samples where they are a mixture; used in
        reports only.
    """

    x_train: NDArray[np.float32]
    y_train: Labels
    x_test: NDArray[np.float32]
    y_test: Labels
    group: int | None
    mixture: tuple[float, ...] | None = None


class Source:
    """Where a dataset comes from. A source is a subclass with these attributes and methods.

    Attributes
    ----------
    default_model : str or None
        Network used when the run names none; None stands for the one that suits the inputs' shape,
        with its own learning rate.
    default_lr : float
        Learning rate used when the run names none.
    default_clients : int
        Number of clients of a run that names none.
    has_clients : bool
        Whether the data come with clients of their own, so that nothing is dealt out.
    target_accuracy : float
        Mean client accuracy that a method is timed to; for a regression the mean absolute error.
    options_type : type or None
        Frozen dataclass of the options that the source reads: ``config.read(options_type)``.
    """

    default_model: str | None
    default_lr: float
    target_accuracy: float
    default_clients: int = 40
    has_clients: bool = False
    options_type: type[Any] | None = None

    def load(self, config: RunConfig) -> Dataset:
        """Read or generate the samples of all clients.

        Raises
        ------
        UserError
            Files are missing or not what they should be.
        """
        raise TypeError(f"{type(self).__name__} does not define load().")

    def shape(self, config: RunConfig) -> DataShape:
        """Return what a model has to fit; a source that knows it need not load anything.

        The configuration's number of clients may be open.
        """
        clients = self.count_clients(config) if config.clients is None else config.clients
        return self.load(config.with_values(clients=clients)).shape

    def is_elsewhere(self, config: RunConfig) -> bool:
        """Return whether this process was told of no data: only the clients have any."""
        return False

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of clients of a run that names none.

        Raises
        ------
        UserError
            The data have to be looked at, and are missing.
        """
        return self.default_clients

    def for_client(self, config: RunConfig, client: int) -> tuple[RunConfig, int]:
        """Narrow a configuration to what one client has to load, and its position therein."""
        return config, client


class Loaded(Source):
    """The source of a user's function that returns a dataset.

    Parameters
    ----------
    name : str
        As a run names it.
    function : Callable
        Takes the configuration and returns a `Dataset`.
    """

    default_model = None
    default_lr = 0.05
    target_accuracy = 0.9

    def __init__(self, name: str, function: Callable[[RunConfig], Dataset]) -> None:
        self._name, self._function = name, function

    def load(self, config: RunConfig) -> Dataset:
        """Return what the function returns.

        Raises
        ------
        UserError
            That is no dataset.
        """
        found: object = self._function(config)
        if not isinstance(found, Dataset):
            raise UserError(
                f"Dataset '{self._name}' must return a raceme.datasets.Dataset, got "
                f"{type(found).__name__}."
            )
        return found

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of clients that come with the data, if any do."""
        users = self.load(config.with_values(clients=self.default_clients)).users
        return self.default_clients if users is None else len(users)


def generator(seed: int, purpose: str, client: int = 0) -> np.random.Generator:
    """Return the random generator for one purpose, independent of all others of the same seed."""
    entropy = [seed, crc32(purpose.encode()), client]
    return np.random.default_rng(np.random.SeedSequence(entropy))


# -----------------------------------------------------------------------------
# What suits data of which only the shape is known: a network, its learning rate, a target.
# -----------------------------------------------------------------------------


SPECTRUM = 512
"""From this length on a vector is taken for a spectrum or a wave, not for so many features."""
_SMALLEST_IMAGE = 4
_TARGET_ERROR = 0.25
"""Deviations of a quantity: an error that is small beside what there is to predict."""


def suited(shape: DataShape) -> tuple[str, float]:
    """Return the name of a network for inputs of a shape, and a learning rate for it.

    Token ids are for ``gru``; (channels, height, width) is an image, for ``cnn``; two axes are a
    window of sensor readings and a long vector is a spectrum or a wave, for ``cnn1d``; everything
    else is for ``mlp``.
    """
    size = shape.input_shape
    if shape.tokens:
        return "gru", 0.5
    if len(size) == 3 and min(size[1:]) >= _SMALLEST_IMAGE:
        return "cnn", 0.01
    if len(size) == 2 or (len(size) == 1 and size[0] >= SPECTRUM):
        return "cnn1d", 0.05
    return "mlp", 0.05


def suited_target(shape: DataShape, accuracy: float) -> float:
    """Return what a method is timed to: an accuracy, or the mean absolute error of a quantity."""
    return accuracy if shape.target is None else float(f"{_TARGET_ERROR * shape.target.std:.2g}")
