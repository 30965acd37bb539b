"""Datasets in .npz files: a device's own file, and a folder with one file per client."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig, read_tree
from raceme.core.errors import UserError, check_known
from raceme.core.files import ReadingError, Stamp, file_stamp
from raceme.core.options import convert, declared, option
from raceme.core.registry import MODELS
from raceme.datasets import source
from raceme.datasets.source import (
    Arrays,
    Dataset,
    DataShape,
    Defaults,
    Indices,
    Labels,
    Source,
    Target,
    cached,
    read_arrays,
)

# -----------------------------------------------------------------------------
# Labels of .npz files: classes, or a quantity if the file has a unit.
# -----------------------------------------------------------------------------


log = getLogger("raceme.defaults")

MOST_CLASSES = 100_000
"""Models have an output per class: larger numbers are usually mistaken labels."""
LABEL_ARRAYS = ("num_classes", "unit", "y_mean", "y_std")
"""Optional arrays that describe the labels of a file."""
PERIOD = "period"
"""Optional array: the period of each sample, for data that change over time."""
_LONGEST_UNIT = 24
"""Maximum characters of a unit, which appears in tables and at axes."""
_LARGEST = float(np.finfo(np.float32).max)


def target_of(quantity: Target | None) -> Target | None:
    """Return a regression's target, unscaled if the file has no scale."""
    return replace(quantity, std=1.0) if quantity is not None and not quantity.std else quantity


def quantity_of(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Target | None:
    """Return the quantity of a file's labels; None for classes.

    Its deviation is 0 if the file has no scale.

    Raises
    ------
    UserError
        The description is invalid.
    """
    unit = arrays.get("unit")
    stated = [name for name in ("y_mean", "y_std") if name in arrays]
    if unit is None:
        if stated:
            raise UserError(
                f"{path} has {' and '.join(stated)}, which belong to a quantity, but no "
                "unit: add unit, a text, which may be empty."
            )
        return None
    text = str(unit.item()) if unit.size == 1 and unit.dtype.kind == "U" else None
    if text is None or len(text) > _LONGEST_UNIT or not (text.isprintable() or not text):
        raise UserError(
            f"{path}: unit must be one text of at most {_LONGEST_UNIT} characters, such as '°C'; "
            f"got {str(unit.tolist())[:60]!r}."
        )
    if len(stated) == 1:
        raise UserError(f"{path} has {stated[0]} alone: y_mean and y_std must be given together.")
    if "num_classes" in arrays:
        raise UserError(
            f"{path} has num_classes and unit: labels are either classes or a quantity."
        )
    if not stated:
        return Target(text.strip(), 0.0, 0.0)
    mean, std = (_number(path, name, arrays[name]) for name in ("y_mean", "y_std"))
    if not std > 0:
        raise UserError(f"{path}: y_std must be above 0, got {std:g}.")
    return Target(text.strip(), mean, std)


def _number(path: Path, name: str, values: NDArray[np.generic]) -> float:
    number = float(values.item()) if values.size == 1 and values.dtype.kind in "fiu" else np.nan
    if not abs(number) <= _LARGEST:
        raise UserError(
            f"{path}: {name} must be one finite number; got {str(values.tolist())[:60]}."
        )
    return number


def common_quantity(quantities: Mapping[Path, Target | None]) -> Target | None:
    """Return the common quantity of several files.

    Raises
    ------
    UserError
        The files differ.
    """
    (first, expected), *others = quantities.items()
    for path, quantity in others:
        if quantity != expected:
            raise UserError(
                f"{path} and {first} must describe their labels alike: "
                f"{described(quantity)} and {described(expected)}."
            )
    return expected


def described(stated: Target | None) -> str:
    """Return a readable description of labels."""
    if stated is None:
        return "classes"
    scale = f", y_mean {stated.mean:g}, y_std {stated.std:g}" if stated.std else ""
    return f"unit '{stated.unit}'{scale}"


def checked_labels(
    path: Path,
    name: str,
    values: NDArray[np.generic],
    samples: int,
    quantity: Target | None = None,
    are_names_allowed: bool = False,
) -> Labels:
    """Check labels: classes become int64, quantities float32 in their unit; names stay text."""
    is_named = values.dtype.kind == "U" and values.shape == (samples,)
    if are_names_allowed and quantity is None and is_named:
        return values
    kinds, numbers = ("iub", "whole numbers") if quantity is None else ("fiu", "numbers")
    if values.dtype.kind not in kinds or values.shape != (samples,):
        needs_unit = quantity is None and values.dtype.kind == "f"
        raise UserError(
            f"{path}: {name} must hold {numbers}, shape ({samples},), one for each sample; got "
            f"{values.dtype} of shape {values.shape}."
            + (" A quantity needs its unit, a text." if needs_unit else "")
        )
    if quantity is not None:
        return _finite(path, name, values)
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= MOST_CLASSES:
        raise UserError(
            f"{path}: {name} must hold labels from 0, below {MOST_CLASSES:,}; got "
            f"{lowest if lowest < 0 else highest}."
        )
    return values.astype(np.int64)


def _finite(path: Path, name: str, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return numbers as float32, which must be finite."""
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(f"{path}: {name} must be finite; it holds NaN, infinity or huge numbers.")
    return numbers


def standardised_labels(path: Path, values: Labels, target: Target | None) -> Labels:
    """Return labels for training: classes unchanged, quantities standardised."""
    if target is None:
        return values
    with np.errstate(over="ignore"):
        labels = ((values.astype(np.float64) - target.mean) / target.std).astype(np.float32)
    if not np.isfinite(labels).all():
        raise UserError(f"{path}: its labels are too many y_std ({target.std:g}) from y_mean.")
    return labels


def num_classes_of(
    path: Path,
    arrays: Mapping[str, NDArray[np.generic]],
    largest: float,
    quantity: Target | None,
) -> int:
    """Return the stated number of classes, by default from the largest label; 0 for a quantity."""
    if quantity is not None:
        return 0
    found, values = int(largest) + 1, arrays.get("num_classes")
    if values is None:
        return found
    fits = values.dtype.kind in "iu" and values.size == 1
    if not fits or not found <= int(values.item()) <= MOST_CLASSES:
        raise UserError(
            f"{path}: num_classes must be one whole number, at least {found} for its labels and at "
            f"most {MOST_CLASSES:,}; got {str(values.tolist())[:60]}."
        )
    return int(values.item())


# -----------------------------------------------------------------------------
# A device's own data: one .npz file with x_train, y_train, x_test and y_test.
# -----------------------------------------------------------------------------


CLIENT = "{client}"
"""Stands for the number of a client in ``data-file``."""

FOUR_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_EXPECTED = (
    "Expected: x_train and x_test, numbers of shape (samples, ...), y_train and y_test, whole "
    "numbers from 0 of shape (samples,), and optionally num_classes; or for a quantity numbers, "
    "unit, a text, and optionally y_mean and y_std"
)


class Part(NamedTuple):
    """One file, checked.

    Attributes
    ----------
    x : NDArray
        Inputs as stored, shape (n, ...); large floats as float32.
    y : Labels
        Classes or their names, or a quantity in its unit.
    test : NDArray[np.bool_] or None
        Test samples; None if the file does not define them.
    num_classes : int
        Number of classes; 0 for a quantity.
    quantity : Target or None
        Description of its labels, if a quantity.
    group : int or None
        True group in the file, if any.
    is_stated : bool
        Whether the file states the number of classes.
    labels : tuple[str, ...]
        Names of the classes, if stated.
    periods : Indices or None
        Period of each sample, if stated.
    """

    x: NDArray[np.generic]
    y: Labels
    test: NDArray[np.bool_] | None
    num_classes: int
    quantity: Target | None
    group: int | None = None
    is_stated: bool = False
    labels: tuple[str, ...] = ()
    periods: Indices | None = None


@dataclass(frozen=True)
class NpzOptions:
    """Location of the data."""

    data_file: str = option(
        "", "file of a device (npz: x_train, y_train, x_test, y_test) or of a table", path=True
    )


class Npz(Source):
    """One .npz file per device with x_train, y_train, x_test and y_test (data-file)."""

    has_clients = True
    normalises = False
    options_type = NpzOptions

    def load(self, config: RunConfig) -> Dataset:
        """Read the files of all clients.

        Raises
        ------
        UserError
            A file is missing or damaged, the files are inconsistent, or one file would serve
            several clients.
        """
        data_file = config.read(NpzOptions).data_file
        if config.num_clients > 1 and CLIENT not in data_file:
            raise UserError(
                f"data-file '{data_file}' is one file for {config.num_clients} clients: write "
                f"{CLIENT} for the client's number, e.g. device-{CLIENT}.npz, or set clients to 1."
            )
        paths = [_path(config, client) for client in range(config.num_clients)]
        parts = [read(path) for path in paths]
        shape = _common_shape(dict(zip(paths, parts, strict=True)))
        labels = [
            standardised_labels(path, part.y, shape.target)
            for path, part in zip(paths, parts, strict=True)
        ]
        users, test_users = source.by_test(
            source.spans(map(len, labels)), np.concatenate([part.test for part in parts])
        )
        return Dataset(
            x=np.concatenate([part.x.astype(np.float32, copy=False) for part in parts]),
            y=np.concatenate(labels),
            num_classes=shape.num_classes,
            users=users,
            test_users=test_users,
            target=shape.target,
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape that fits all clients' files on this machine.

        A device has only its own file; in a simulation every client must build the same network
        even if it lacks the largest label.
        """
        clients = self.count_clients(config) if config.clients is None else config.clients
        paths = [_path(config, client) for client in range(clients)]
        present = [path for path in dict.fromkeys(paths) if path.is_file()] or paths[:1]
        return _common_shape({path: read(path) for path in present})

    def is_elsewhere(self, config: RunConfig) -> bool:
        """Return whether no file is given, as on the server of real devices."""
        return not config.read(NpzOptions).data_file

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of files, numbered from 0, or 1 for a device's own file."""
        numbers = itertools.count()
        if CLIENT not in config.read(NpzOptions).data_file:
            return 1
        found = next(number for number in numbers if not _path(config, number).is_file())
        return max(1, found)

    def for_client(self, config: RunConfig, client: int) -> RunConfig:
        """Narrow the configuration to the client's own file."""
        return config.with_values(data_file=str(_path(config, client)), clients=1)


def read(path: Path) -> Part:
    """Read and check one file with training and test samples.

    Raises
    ------
    UserError
        The file or one of its arrays is missing or invalid.
    """
    part = checked_part(path, arrays_of(path, FOUR_ARRAYS, _EXPECTED, LABEL_ARRAYS))
    if part.y.dtype.kind == "U":
        # Numbers of classes must be the same on all devices.
        raise UserError(f"{path}: y_train and y_test hold names. {_EXPECTED}.")
    return part


def checked_part(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Part:
    """Check the arrays of one file: x and y, or training and test arrays."""
    quantity = quantity_of(path, arrays)
    suffixes = ("",) if "x" in arrays else ("_train", "_test")
    parts = [checked_samples(path, arrays, suffix, quantity) for suffix in suffixes]
    x, y = [own for own, _ in parts], np.concatenate([own for _, own in parts])
    if x[0].shape[1:] != x[-1].shape[1:]:
        raise UserError(
            f"{path}: x_train and x_test must hold samples of one shape, "
            f"got {x[0].shape[1:]} and {x[-1].shape[1:]}."
        )
    test: NDArray[Any] | None = arrays.get("heldout")
    if len(x) > 1:
        test = np.repeat([False, True], [len(own) for own in x])
    elif test is not None and (test.dtype != np.bool_ or test.shape != y.shape):
        raise UserError(
            f"{path}: heldout must hold one bool for each of {len(y)} samples; got {test.dtype} "
            f"of shape {test.shape}."
        )
    if len(y) < 2 or (test is not None and test.sum() in (0, len(y))):
        raise UserError(f"{path} needs at least one sample for training and one for testing.")
    labels = tuple(map(str, arrays.get("class_names", ())))
    is_stated = "num_classes" in arrays or bool(labels)
    largest = -1.0 if y.dtype.kind == "U" else float(y.max())
    num_classes = max(len(labels), num_classes_of(path, arrays, largest, quantity))
    group, stated = _group(path, arrays), arrays.get(PERIOD)
    periods = None if stated is None else checked_labels(path, PERIOD, stated, len(y))
    return Part(
        np.concatenate(x), y, test, num_classes, quantity, group, is_stated, labels, periods
    )


def _path(config: RunConfig, client: int) -> Path:
    data_file = config.read(NpzOptions).data_file
    if not data_file:
        raise UserError(
            "npz needs the file with the data: set data-file=device.npz, or for a simulation "
            f"data-file=device-{CLIENT}.npz. {_EXPECTED}."
        )
    return Path(data_file.replace(CLIENT, str(client)))


def arrays_of(
    path: Path, needed: Sequence[str], expected: str, optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Return arrays of a file.

    Parameters
    ----------
    path : Path
        Path of the .npz file.
    needed, optional : Sequence[str]
        Names of required and optional arrays.
    expected : str
        Expected content of the file, for error messages.

    Raises
    ------
    UserError
        The file cannot be read, or lacks an array.
    """
    try:
        arrays = read_arrays(path, (*needed, *optional))
    except FileNotFoundError:
        raise UserError(f"There is no data file {path}. {expected}.") from None
    except (OSError, ReadingError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot read {path} as .npz: {reason}. {expected}.") from None
    if missing := [name for name in needed if name not in arrays]:
        raise UserError(f"{path} lacks {', '.join(missing)}. {expected}.")
    return arrays


def checked_samples(
    path: Path,
    arrays: Mapping[str, NDArray[np.generic]],
    suffix: str,
    quantity: Target | None,
) -> tuple[NDArray[np.generic], Labels]:
    """Check a pair of inputs and labels: ``x`` and ``y``, ``x_test`` and ``y_test``.

    Inputs keep their type, except large floats.
    """
    stored = arrays[f"x{suffix}"]
    x = checked_inputs(path, f"x{suffix}", stored)
    y = checked_labels(path, f"y{suffix}", arrays[f"y{suffix}"], len(x), quantity, True)
    return (x if stored.dtype.kind == "f" and stored.dtype.itemsize > 2 else stored), y


def checked_inputs(path: Path, name: str, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Check inputs and convert them to float32."""
    if values.dtype.kind not in "fiub" or values.ndim < 2 or values.size == 0:
        raise UserError(
            f"{path}: {name} must hold numbers, shape (samples, ...) with at least one sample; "
            f"got {values.dtype} of shape {values.shape}."
        )
    return _finite(path, name, values)


def _common_shape(files: dict[Path, Part]) -> DataShape:
    """Return the common input shape and quantity, or the largest number of classes."""
    (first, expected), *others = ((path, file.x.shape[1:]) for path, file in files.items())
    for path, shape in others:
        if shape != expected:
            raise UserError(
                f"{path}: samples must have the shape of those in {first}, {expected}; got {shape}."
            )
    quantity = common_quantity({path: file.quantity for path, file in files.items()})
    classes = max(file.num_classes for file in files.values())
    return DataShape(expected, classes, target=target_of(quantity))


# -----------------------------------------------------------------------------
# A folder with one .npz file for each person, device or machine.
# -----------------------------------------------------------------------------


_EXPECTED_FOLDER = (
    "Expected in each file: x, numbers of shape (samples, ...), and y, whole numbers from 0 of "
    "shape (samples,), or for a quantity numbers and unit, a text; optionally heldout, one bool "
    "per sample, group, one whole number, and period, one whole number per sample. Or x_train, "
    "y_train, x_test and y_test"
)
_TEXT = 2
_IMAGES = (3, 4)
"""Axes of integer inputs that are images."""


_FOLDER = "npz-folder"
_DESCRIPTION = "dataset.toml"
"""Optional file beside the .npz files: the defaults of runs on them."""


@dataclass(frozen=True)
class FolderOptions:
    """Location of the files."""

    data_folder: str = option("", "folder below data-root with an .npz file for each client")


@dataclass(frozen=True)
class Description(Defaults):
    """Content of a file ``dataset.toml``.

    Attributes
    ----------
    mean, std : float
        What inputs are normalised by, bytes from 0 to 1; without `std`, by the training samples.
    """

    mean: float = 0.0
    std: float | None = field(default=None, metadata={"above": 0})

    @classmethod
    def of(cls, folder: Path) -> Description:
        """Return the description in a folder, or the defaults without one.

        Raises
        ------
        UserError
            The file is invalid.
        """
        path = folder / _DESCRIPTION
        if not path.is_file():
            return cls()
        stated, keys = read_tree(path, "description"), declared(cls)
        for name in stated:
            check_known(f"key of {path}", name, keys)
        found = {name: convert(f"{name} in {path}", stated[name], keys[name]) for name in stated}
        if (model := found.get("model")) is not None:
            # A folder of data does not name code.
            check_known(f"model in {path}", model, list(filter(MODELS.is_own, MODELS)))
        if "mean" in found and "std" not in found:
            raise UserError(f"{path} has mean alone: mean and std are given together.")
        return cls(**{keys[name].name: value for name, value in found.items()})


class NpzFolder(Source):
    """A folder of .npz files with x and y, one file per client, which has its name (data-root)."""

    has_clients = True
    options_type: type[Any] = FolderOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the first files, in the order of the numbers in their names.

        Float inputs are standardised over all training samples, per channel of a window or image
        and per feature of a vector, unless ``dataset.toml`` says otherwise.
        """
        dataset = self._unscaled(config, config.num_clients)
        folder, paths = self._files(config)
        names = tuple(path.stem for path in paths[: config.num_clients])
        dataset = replace(dataset, names=names)
        stated = Description.of(folder)
        if dataset.tokens:
            return dataset
        if stated.std is None:
            return standardised(dataset)
        return replace(dataset, mean=stated.mean, std=stated.std)

    def defaults(self, config: RunConfig) -> Defaults:
        """Return the defaults in ``dataset.toml``, if the folder is known."""
        if not config.data_root:
            return Defaults()
        return Description.of(self._files(config)[0])

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of .npz files in the folder: each is a client."""
        return len(self._files(config)[1])

    def _unscaled(self, config: RunConfig, count: int | None) -> Dataset:
        """Return the unscaled samples of the first files, or of all."""
        folder, paths = self._files(config)
        if count is not None:
            there = f"there are only {len(paths)} .npz files in {folder}. Take fewer clients, or "
            source.check_clients(config, len(paths), f"{there}another --data-root.")
        paths = paths[:count]
        arrays = cached(_FOLDER, paths, (_LAYOUT,), lambda: _read(paths))
        dataset = dataset_of(folder, arrays)
        assert dataset.groups is not None
        by_name = None in dataset.groups
        return replace(dataset, groups=_groups_by_name(paths)) if by_name else dataset

    def _files(self, config: RunConfig) -> tuple[Path, list[Path]]:
        """Return the folder under data-root that holds .npz files, and these in order."""
        if not config.data_root:
            raise UserError(
                f"{config.dataset} needs the folder with an .npz file for each person or device: "
                f"--data-root DIR. {_EXPECTED_FOLDER}."
            )
        folders = [Path(config.data_root) / inner for inner in self._folders(config)]
        for folder in folders:
            paths = sorted(folder.glob("*.npz"), key=_natural)
            if paths:
                return folder, paths
        raise UserError(f"There are no .npz files in {folders[0]}. {_EXPECTED_FOLDER}.")

    def _folders(self, config: RunConfig) -> Sequence[str]:
        """Return the folders below data-root to search."""
        return (config.read(FolderOptions).data_folder,)


_MOST_UNUSED = 5
"""Labels without samples in a warning."""
_LAYOUT = 5
"""Layout number of the cache; a change of the arrays increases it."""


def dataset_of(where: Path, arrays: Arrays) -> Dataset:
    """Return the unscaled samples of all clients; see :func:`joined`."""
    test = np.asarray(arrays["test"], np.bool_)
    users, test_users = source.by_test(
        source.spans(arrays["sizes"].tolist()), test if test.any() else None
    )
    target = _target(arrays, users)
    if target is None and not arrays["tokens"] and not arrays["is_stated"]:
        counts = np.bincount(arrays["y"], minlength=int(arrays["num_classes"]))
        if (
            unused := np.flatnonzero(counts == 0)[:_MOST_UNUSED].tolist()
            if len(arrays["y"])
            else []
        ):
            log.warning(
                "%s: no sample has label %s, and the model has an output for each label up to %d. "
                "Number labels from 0 without gaps, or state num_classes.",
                where,
                ", ".join(map(str, unused)),
                len(counts) - 1,
            )
    return Dataset(
        x=arrays["x"],
        y=standardised_labels(where, np.array(arrays["y"]), target),
        num_classes=int(arrays["num_classes"]),
        users=users,
        test_users=test_users,
        groups=tuple(None if group < 0 else int(group) for group in arrays["groups"]),
        tokens=int(arrays["tokens"]),
        target=target,
        periods=np.array(arrays["periods"]) if "periods" in arrays else None,
        labels=tuple(map(str, arrays["labels"])),
        names=tuple(map(str, arrays.get("names", ()))),
    )


def _target(arrays: Arrays, users: Sequence[Indices]) -> Target | None:
    """Return the target of a regression, scaled as stated in the files or by the training samples.

    In the latter case it has mean 0 and deviation 1 over the training samples.
    """
    if "unit" not in arrays:
        return None
    mean, std = (float(value) for value in arrays["scale"])
    if not std:
        values = arrays["y"][np.concatenate(users)].astype(np.float64)
        mean, std = float(values.mean()), float(values.std()) or 1.0
    return Target(str(arrays["unit"].item()), mean, std)


def standardised(dataset: Dataset) -> Dataset:
    """Return a dataset whose inputs have mean 0 and deviation 1 over the training samples.

    Bytes are scaled to [0, 1] first, and have one common mean and deviation. Otherwise each channel
    has its own: the shorter axis of windows, the first of images. Each feature of a vector has its
    own, unless the vector is a spectrum or a wave. Constant channels become zero.
    """
    assert dataset.users is not None
    axes = _channel_axes(dataset.x.shape[1:], dataset.x.dtype == np.uint8)
    reduced = tuple(axis for axis in range(dataset.x.ndim) if axis not in axes)
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    # Client by client, to bound the memory of float64 copies.
    for own in dataset.users:
        values = dataset.x[own].astype(np.float64)
        if dataset.x.dtype == np.uint8:
            values /= 255
        count += values.size
        total = total + values.sum(axis=reduced, keepdims=True)[0]
        squares = squares + np.square(values).sum(axis=reduced, keepdims=True)[0]
    per_channel = count / total.size
    mean = total / per_channel
    deviation = np.sqrt(np.maximum(squares / per_channel - np.square(mean), 0.0))
    # Rounding gives constant channels a tiny deviation.
    moves = deviation > 1e-6 * (np.abs(mean) + 1e-30)
    std = np.where(moves, deviation, 1.0).astype(np.float32)
    return replace(dataset, mean=mean.astype(np.float32), std=std)


def _channel_axes(shape: tuple[int, ...], bytes_: bool) -> tuple[int, ...]:
    """Return the axes, with samples as axis 0, that have means of their own."""
    if bytes_ or (len(shape) == 1 and shape[0] >= source.SPECTRUM):
        return ()
    return (2,) if len(shape) == 2 and shape[0] > shape[1] else (1,)


def _read(paths: Sequence[Path]) -> Arrays:
    """Read all files."""
    return joined({path: _read_part(path) for path in paths}, f"files in {paths[0].parent}")


def joined(by_path: Mapping[Path, Part], what: str) -> Arrays:
    """Join the clients' samples; inputs keep their type to save memory.

    Parameters
    ----------
    by_path : Mapping[Path, Part]
        A part for each client.
    what : str
        The parts, for error messages.

    Raises
    ------
    UserError
        The parts are inconsistent.
    """
    parts = list(by_path.values())
    shapes = {part.x.shape[1:]: path.name for path, part in reversed(list(by_path.items()))}
    if len(shapes) > 1:
        raise UserError(
            f"The {what} hold samples of different shapes: {', '.join(map(str, sorted(shapes)))} "
            f"(in {', '.join(shapes[shape] for shape in sorted(shapes))})."
        )
    with_test = {part.test is not None for part in parts}
    if len(with_test) > 1:
        raise UserError(
            f"Some {what} have test samples (heldout, or x_test and y_test) and others have not."
        )
    x = np.concatenate([part.x for part in parts])
    quantity = common_quantity({path: part.quantity for path, part in by_path.items()})
    num_classes = max(part.num_classes for part in parts)
    y, labels = np.concatenate([part.y for part in parts]), max(part.labels for part in parts)
    if y.dtype.kind == "U":
        for path, part in by_path.items():
            if part.y.dtype.kind != "U":
                raise UserError(
                    f"Some {what} have names of classes as labels, and others numbers: {path}."
                )
        names, y = np.unique(y, return_inverse=True)
        labels, num_classes = tuple(map(str, names)), len(names)
    tokens = 0
    if x.dtype.kind in "iu" and x.ndim == _TEXT and x.min() >= 0:
        # In next-token tasks, labels share the vocabulary.
        tokens = int(max(int(x.max()) + 1, num_classes))
        if tokens > MOST_CLASSES:
            raise UserError(
                f"The {what} hold x up to {tokens - 1}; of text, which whole numbers are taken "
                f"for, it must be below {MOST_CLASSES:,}."
            )
    elif x.dtype == np.uint8 and x.ndim in _IMAGES:
        x = x[:, np.newaxis] if x.ndim == _IMAGES[0] else x
    elif x.dtype.kind in "iu":
        x = x.astype(np.float32)
    said: dict[str, NDArray[Any]] = {}
    if periods := [part.periods for part in parts if part.periods is not None]:
        if len(periods) < len(parts):
            raise UserError(f"Some {what} have a period of each sample and others have not.")
        said["periods"] = np.concatenate(periods)
    if quantity is not None:
        scale = np.array([quantity.mean, quantity.std], np.float64)
        said |= {"unit": np.array(quantity.unit), "scale": scale}
    return {
        "x": x,
        "y": y,
        "labels": np.array(labels, np.str_),
        "is_stated": np.array(any(part.is_stated for part in parts)),
        "test": np.concatenate(
            [np.zeros(len(part.y), np.bool_) if part.test is None else part.test for part in parts]
        ),
        "sizes": np.array([len(part.y) for part in parts]),
        "groups": np.array([-1 if part.group is None else part.group for part in parts]),
        "num_classes": np.array(num_classes),
        "tokens": np.array(tokens),
        **said,
    }


def _read_part(path: Path) -> Part:
    """Read and check one file of a folder."""
    others = ("heldout", "group", PERIOD, *LABEL_ARRAYS)
    arrays = arrays_of(path, (), _EXPECTED_FOLDER, ("x", "y", *FOUR_ARRAYS, *others))
    wanted = ("x", "y") if "x" in arrays else FOUR_ARRAYS
    if missing := [name for name in wanted if name not in arrays]:
        raise UserError(f"{path} lacks {', '.join(missing)}. {_EXPECTED_FOLDER}.")
    return checked_part(path, arrays)


def _group(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> int | None:
    """Return the true group that a file states."""
    group = arrays.get("group")
    if group is None:
        return None
    if group.dtype.kind not in "iu" or group.size != 1 or int(group.item()) < 0:
        raise UserError(f"{path}: group must be one whole number from 0; got {group.tolist()}.")
    return int(group.item())


def _groups_by_name(paths: Sequence[Path]) -> tuple[int | None, ...] | None:
    """Return groups of files whose names begin with the same letters; None if uninformative.

    ``lab_01``, ``lab_02`` and ``field_01`` are two groups; where all names begin alike, or all
    differently, there are none.
    """
    beginnings = [re.split(r"[^A-Za-z]", path.stem)[0] for path in paths]
    order = sorted(set(beginnings))
    if not 1 < len(order) < len(paths) or "" in order:
        return None
    return tuple(order.index(beginning) for beginning in beginnings)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Order person-2 before person-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", path.stem)]


# -----------------------------------------------------------------------------
# A device's data file, which its owner may replace at any time.
# -----------------------------------------------------------------------------


DATA_FILE = "data-file"


def stamp_of(node: Mapping[str, object]) -> Stamp | None:
    """Return the current version of a device's data file.

    Parameters
    ----------
    node : Mapping
        The node config; its ``data-file`` may hold ``{client}`` for its ``partition-id``.

    Returns
    -------
    Stamp or None
        None if the device has no file of its own, or it is missing.
    """
    name = node.get(DATA_FILE)
    if not isinstance(name, str):
        return None
    return file_stamp(Path(name.replace("{client}", str(node.get("partition-id", 0)))))
