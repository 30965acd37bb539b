"""A device's own data: one .npz file with x_train, y_train, x_test and y_test."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.config.reading import ReadingError
from raceme.datasets.archive import read_arrays
from raceme.datasets.labels import (
    LABEL_ARRAYS,
    Quantity,
    checked_labels,
    checked_targets,
    common_quantity,
    num_classes_of,
    quantity_of,
    standardised_labels,
    target_of,
)
from raceme.datasets.source import Dataset, DataShape, Indices, Labels, Source

CLIENT = "{client}"
"""Stands for the number of a client in ``data-file``."""

_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_EXPECTED = (
    "Expected: x_train and x_test, numbers of shape (samples, ...), y_train and y_test, whole "
    "numbers from 0 of shape (samples,), and optionally num_classes; or for a quantity numbers, "
    "unit, a text, and optionally y_mean and y_std"
)


@dataclass(frozen=True)
class _File:
    """The arrays of one file, checked; labels that are a quantity are in its unit."""

    x_train: NDArray[np.float32]
    y_train: Labels
    x_test: NDArray[np.float32]
    y_test: Labels
    num_classes: int
    quantity: Quantity | None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])


@dataclass(frozen=True)
class NpzOptions:
    """Where the data are."""

    data_file: str = option("", "the file with x_train, y_train, x_test, y_test", path=True)


class Npz(Source):
    """A device's own .npz file with x_train, y_train, x_test, y_test (data-file)."""

    default_model = None
    default_lr = 0.05
    target_accuracy = 0.9
    has_clients = True
    options_type = NpzOptions

    def load(self, config: RunConfig) -> Dataset:
        """Read the files of all clients.

        Raises
        ------
        UserError
            A file is missing or damaged, the files do not fit together, or one file would have to
            serve several clients.
        """
        data_file = config.read(NpzOptions).data_file
        if config.num_clients > 1 and CLIENT not in data_file:
            raise UserError(
                f"data-file '{data_file}' is one file for {config.num_clients} clients: write "
                f"{CLIENT} for the client's number, e.g. device-{CLIENT}.npz, or set clients to 1."
            )
        paths = [_path(config, client) for client in range(config.num_clients)]
        files = [read(path) for path in paths]
        shape = _common_shape(dict(zip(paths, files, strict=True)))
        users: list[Indices] = []
        test_users: list[Indices] = []
        start = 0
        for file in files:
            middle = start + len(file.y_train)
            end = middle + len(file.y_test)
            users.append(np.arange(start, middle))
            test_users.append(np.arange(middle, end))
            start = end
        labels = [
            standardised_labels(path, part, shape.target)
            for path, file in zip(paths, files, strict=True)
            for part in (file.y_train, file.y_test)
        ]
        return Dataset(
            x=np.concatenate([part for file in files for part in (file.x_train, file.x_test)]),
            y=np.concatenate(labels),
            num_classes=shape.num_classes,
            users=tuple(users),
            test_users=tuple(test_users),
            target=shape.target,
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return what fits all the clients' files that are on this machine.

        A device has only its own; a simulation has all of them, and every client must build the
        same network although its own labels may stop short of the largest.
        """
        clients = self.count_clients(config) if config.clients is None else config.clients
        paths = [_path(config, client) for client in range(clients)]
        present = [path for path in dict.fromkeys(paths) if path.is_file()] or paths[:1]
        return _common_shape({path: read(path) for path in present})

    def is_elsewhere(self, config: RunConfig) -> bool:
        """Return whether no file is named, as on the server of devices that have their own."""
        return not config.read(NpzOptions).data_file

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of files, numbered from 0, or 1 for a device's own file."""
        numbers = itertools.count()
        if CLIENT not in config.read(NpzOptions).data_file:
            return 1
        found = next(number for number in numbers if not _path(config, number).is_file())
        return max(1, found)

    def for_client(self, config: RunConfig, client: int) -> tuple[RunConfig, int]:
        """Narrow the configuration to the client's own file, the only one that a device has."""
        return config.with_values(data_file=str(_path(config, client)), clients=1), 0


def read(path: Path) -> _File:
    """Read and check one file.

    Raises
    ------
    UserError
        The file or an array in it is missing or not what it should be; names both.
    """
    with explained(path):
        arrays = read_arrays(path, (*_NEEDED, *LABEL_ARRAYS))
    missing = [name for name in _NEEDED if name not in arrays]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}. {_EXPECTED}.")
    x_train, x_test = (checked_inputs(path, name, arrays[name]) for name in ("x_train", "x_test"))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise UserError(
            f"{path}: x_train and x_test must hold samples of one shape, "
            f"got {x_train.shape[1:]} and {x_test.shape[1:]}."
        )
    quantity = quantity_of(path, arrays)
    y_train, y_test = (
        checked_targets(path, name, arrays[name], samples, quantity)
        for name, samples in (("y_train", len(x_train)), ("y_test", len(x_test)))
    )
    if quantity is not None:
        return _File(x_train, y_train, x_test, y_test, 0, quantity)
    found = int(max(y_train.max(), y_test.max())) + 1
    num_classes = num_classes_of(path, arrays.get("num_classes"), found)
    return _File(x_train, y_train, x_test, y_test, num_classes, None)


def _path(config: RunConfig, client: int) -> Path:
    data_file = config.read(NpzOptions).data_file
    if not data_file:
        raise UserError(
            "npz needs the file with the data: set data-file=device.npz, or for a simulation "
            f"data-file=device-{CLIENT}.npz. {_EXPECTED}."
        )
    return Path(data_file.replace(CLIENT, str(client)))


@contextmanager
def explained(path: Path, expected: str = _EXPECTED) -> Iterator[None]:
    """Turn what numpy raises for a bad file into a UserError that says what is expected."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"There is no data file {path}. {expected}.") from None
    except (OSError, ReadingError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot read {path} as .npz: {reason}. {expected}.") from None


def files_in(data_root: str, folders: Iterable[str], pattern: str = "*.npz") -> list[Path]:
    """Return the files of the first of several folders that has any, sorted by name."""
    for inner in folders if data_root else ():
        found = sorted((Path(data_root) / inner).glob(pattern))
        if found:
            return found
    return []


def labelled(
    path: Path, input_shape: tuple[int, ...], classes: int, expected: str
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Read a file with inputs `x`, as they are stored, and labels `y`.

    Raises
    ------
    UserError
        It is not what is expected, which it says.
    """
    with explained(path, expected):
        arrays = read_arrays(path, ("x", "y"))
    if len(arrays) < 2:
        raise UserError(f"{path} lacks x or y. {expected}.")
    x = arrays["x"]
    checked_inputs(path, "x", x)
    y = checked_labels(path, "y", arrays["y"], len(x))
    if x.shape[1:] != input_shape or y.max() >= classes:
        raise UserError(
            f"{path} holds x of shape {x.shape} and labels up to {y.max()}. {expected}."
        )
    return x, y


def stacked(
    parts: Iterable[tuple[NDArray[np.generic], NDArray[np.generic]]],
) -> dict[str, NDArray[Any]]:
    """Return inputs and labels of several files one after another, and how many are of each."""
    xs, ys = zip(*parts, strict=True)
    sizes = np.array([len(y) for y in ys])
    return {"x": np.concatenate(xs), "y": np.concatenate(ys), "sizes": sizes}


def checked_inputs(path: Path, name: str, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Check inputs and make them float32."""
    if values.dtype.kind not in "fiub" or values.ndim < 2 or values.size == 0:
        raise UserError(
            f"{path}: {name} must hold numbers, shape (samples, ...) with at least one sample; "
            f"got {values.dtype} of shape {values.shape}."
        )
    with np.errstate(over="ignore"):
        inputs = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(inputs).all():
        raise UserError(f"{path}: {name} must be finite; it holds NaN, infinity or huge numbers.")
    return inputs


def _common_shape(files: dict[Path, _File]) -> DataShape:
    """Return the input shape and the quantity, which must be one, or the most classes."""
    (first, expected), *others = ((path, file.input_shape) for path, file in files.items())
    for path, shape in others:
        if shape != expected:
            raise UserError(
                f"{path}: samples must have the shape of those in {first}, {expected}; got {shape}."
            )
    quantity = common_quantity({path: file.quantity for path, file in files.items()})
    classes = max(file.num_classes for file in files.values())
    return DataShape(expected, classes, target=target_of(quantity))
