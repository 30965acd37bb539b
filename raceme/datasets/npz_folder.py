"""A folder with one .npz file for each person, device or machine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets import npz
from raceme.datasets.archive import read_arrays
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.labels import (
    LABEL_ARRAYS,
    MOST_CLASSES,
    Quantity,
    checked_targets,
    common_quantity,
    num_classes_of,
    quantity_of,
    standardised_labels,
)
from raceme.datasets.source import Dataset, Indices, Labels, Source, Target
from raceme.datasets.suited import SPECTRUM

_EXPECTED = (
    "Expected in each file: x, numbers of shape (samples, ...), and y, whole numbers from 0 of "
    "shape (samples,), or for a quantity numbers and unit, a text; optionally heldout, one bool "
    "per sample, and group, one whole number. Or x_train, y_train, x_test and y_test"
)
_FOUR = ("x_train", "y_train", "x_test", "y_test")
_TEXT = 2
_IMAGES = (3, 4)
"""Axes of what is taken for text and for images, if it holds whole numbers."""


@dataclass(frozen=True)
class _Part:
    """One file: its samples as stored, and which of them are for testing if it says so."""

    x: NDArray[np.generic]
    y: Labels
    test: NDArray[np.bool_] | None
    group: int | None
    num_classes: int
    quantity: Quantity | None


class NpzFolder(Source):
    """A folder of .npz files with x and y, one per person or device (data-root)."""

    default_model: str | None = None
    default_lr = 0.05
    target_accuracy = 0.9
    has_clients = True

    inner: tuple[str, ...] = ("npz-folder", "har")
    """Folders that are looked for in data-root if it holds no .npz file itself."""

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the first files, in the order of the numbers in their names.

        Float inputs are brought to mean 0 and deviation 1 over what is not held out, each channel
        of a window or an image and each feature of a vector by itself.
        """
        dataset = self._unscaled(config, config.num_clients)
        return dataset if dataset.tokens else standardised(dataset)

    def count_clients(self, config: RunConfig) -> int:
        """Return the number of files."""
        return len(self._files(config)[1])

    def _unscaled(self, config: RunConfig, count: int | None) -> Dataset:
        """Return the samples of the first files, or of all, as they are stored."""
        folder, paths = self._files(config)
        if count is not None and len(paths) < count:
            raise UserError(
                f"Too many clients: {count}, but there are only {len(paths)} .npz "
                f"files in {folder}. Take fewer clients, or another --data-root."
            )
        paths = paths[:count]
        arrays = cached("npz-folder", paths, (_LAYOUT,), lambda: _read(paths))
        starts = np.cumsum([0, *arrays["sizes"].tolist()])
        spans = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
        test = np.asarray(arrays["test"], np.bool_)
        with_test = bool(test.any())
        groups = tuple(None if group < 0 else int(group) for group in arrays["groups"])
        users = tuple(own[~test[own]] for own in spans)
        target = _target(arrays, users)
        return Dataset(
            x=arrays["x"],
            y=standardised_labels(folder, np.array(arrays["y"]), target),
            num_classes=int(arrays["num_classes"]),
            users=users,
            test_users=tuple(own[test[own]] for own in spans) if with_test else None,
            groups=_groups_by_name(paths) if None in groups else groups,
            tokens=int(arrays["tokens"]),
            target=target,
        )

    def _files(self, config: RunConfig) -> tuple[Path, list[Path]]:
        """Return the folder and its files."""
        if not config.data_root:
            raise UserError(
                f"{config.dataset} needs the folder with an .npz file for each person or device: "
                f"--data-root DIR. {_EXPECTED}."
            )
        root = Path(config.data_root)
        for folder in (root, *(root / inner for inner in self.inner)):
            paths = sorted(folder.glob("*.npz"), key=_natural)
            if paths:
                return folder, paths
        raise UserError(f"There are no .npz files in {root}. {_EXPECTED}.")


_LAYOUT = 2
"""Number of the layout of what is cached; a change of the arrays needs another."""


def _target(arrays: Arrays, users: Sequence[Indices]) -> Target | None:
    """Return what is predicted if it is a quantity: standardised as the files say, or else here.

    Then it has mean 0 and deviation 1 over what is for training, as inputs have.
    """
    if "unit" not in arrays:
        return None
    mean, std = (float(value) for value in arrays["scale"])
    if np.isfinite(std):
        return Target(str(arrays["unit"].item()), mean, std)
    values = arrays["y"][np.concatenate(users)].astype(np.float64)
    deviation = float(values.std())
    return Target(str(arrays["unit"].item()), float(values.mean()), deviation or 1.0)


def standardised(dataset: Dataset) -> Dataset:
    """Return a dataset whose inputs have mean 0 and deviation 1, by what is for training.

    Bytes are scaled to [0, 1] first and have one mean and deviation together. Otherwise each
    channel has its own: of windows the shorter axis, of images the first. Of vectors each feature
    has, unless they are spectra or waves. A channel that never changes is left at zero.
    """
    assert dataset.users is not None
    axes = _channel_axes(dataset.x.shape[1:], dataset.x.dtype == np.uint8)
    reduced = tuple(axis for axis in range(dataset.x.ndim) if axis not in axes)
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    # Client by client: float64 copies of all at once might not fit into memory.
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
    # Rounding leaves a tiny deviation where there is none.
    moves = deviation > 1e-6 * (np.abs(mean) + 1e-30)
    std = np.where(moves, deviation, 1.0).astype(np.float32)
    return replace(dataset, mean=mean.astype(np.float32), std=std)


def _channel_axes(shape: tuple[int, ...], bytes_: bool) -> tuple[int, ...]:
    """Return the axes, counted with the samples' one in front, that keep a mean of their own."""
    if bytes_ or (len(shape) == 1 and shape[0] >= SPECTRUM):
        return ()
    if len(shape) == 2:
        return (1,) if shape[0] <= shape[1] else (2,)
    return (1,)


def _read(paths: Sequence[Path]) -> Arrays:
    """Read all files; inputs stay in their own type, a half or a quarter of float32's memory."""
    parts = [_part(path) for path in paths]
    shapes = {part.x.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise UserError(
            f"The files in {paths[0].parent} hold samples of different shapes: "
            f"{', '.join(map(str, sorted(shapes)))}."
        )
    with_test = {part.test is not None for part in parts}
    if len(with_test) > 1:
        raise UserError(
            f"Some files in {paths[0].parent} have test samples (heldout, or x_test and y_test) "
            f"and others have not."
        )
    x = np.concatenate([part.x for part in parts])
    quantity = common_quantity({p: part.quantity for p, part in zip(paths, parts, strict=True)})
    num_classes = max(part.num_classes for part in parts)
    tokens = 0
    if x.dtype.kind in "iu" and x.ndim == _TEXT and x.min() >= 0:
        # Of next-token tasks the labels are of the same vocabulary.
        tokens = int(max(int(x.max()) + 1, num_classes))
        if tokens > MOST_CLASSES:
            raise UserError(
                f"The files in {paths[0].parent} hold x up to {tokens - 1}; of text, which whole "
                f"numbers are taken for, it must be below {MOST_CLASSES:,}."
            )
    elif x.dtype == np.uint8 and x.ndim in _IMAGES:
        x = x[:, np.newaxis] if x.ndim == _IMAGES[0] else x
    elif x.dtype.kind in "iu":
        x = x.astype(np.float32)
    return {
        "x": x,
        "y": np.concatenate([part.y for part in parts]),
        "test": np.concatenate(
            [np.zeros(len(part.y), np.bool_) if part.test is None else part.test for part in parts]
        ),
        "sizes": np.array([len(part.y) for part in parts]),
        "groups": np.array([-1 if part.group is None else part.group for part in parts]),
        "num_classes": np.array(num_classes),
        "tokens": np.array(tokens),
        **_said(quantity),
    }


def _said(quantity: Quantity | None) -> dict[str, NDArray[Any]]:
    """Return what files say of a quantity, as arrays: NaN where they leave the scale open."""
    if quantity is None:
        return {}
    scale = np.array([quantity.mean, quantity.std], np.float64)
    return {"unit": np.array(quantity.unit), "scale": scale}


def _part(path: Path) -> _Part:
    """Read and check one file."""
    with npz.explained(path, _EXPECTED):
        arrays = read_arrays(path, ("x", "y", *_FOUR, "heldout", "group", *LABEL_ARRAYS))
    wanted = ("x", "y") if "x" in arrays else _FOUR
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}. {_EXPECTED}.")
    if wanted == _FOUR:
        sizes = [len(arrays[name]) for name in ("x_train", "x_test")]
        checked = npz.read(path)
        return _Part(
            np.concatenate([_inputs(path, name, arrays[name]) for name in ("x_train", "x_test")]),
            np.concatenate([checked.y_train, checked.y_test]),
            np.repeat([False, True], sizes),
            _group(path, arrays),
            checked.num_classes,
            checked.quantity,
        )
    quantity = quantity_of(path, arrays)
    x = _inputs(path, "x", arrays["x"])
    y = checked_targets(path, "y", arrays["y"], len(x), quantity)
    test = arrays.get("heldout")
    if test is not None and (test.dtype != np.bool_ or test.shape != y.shape):
        raise UserError(
            f"{path}: heldout must hold one bool for each of {len(y)} samples; got {test.dtype} "
            f"of shape {test.shape}."
        )
    if len(y) < 2 or (test is not None and test.sum() in (0, len(y))):
        raise UserError(f"{path} needs at least one sample to train with and one to test with.")
    if quantity is not None:
        return _Part(x, y, test, _group(path, arrays), 0, quantity)
    num_classes = num_classes_of(path, arrays.get("num_classes"), int(y.max()) + 1)
    return _Part(x, y, test, _group(path, arrays), num_classes, None)


def _inputs(path: Path, name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Check inputs; large floats become float32, everything else stays as it is stored."""
    checked = npz.checked_inputs(path, name, values)
    return checked if values.dtype.kind == "f" and values.dtype.itemsize > 2 else values


def _group(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> int | None:
    """Return the true group that a file states."""
    group = arrays.get("group")
    if group is None:
        return None
    if group.dtype.kind not in "iu" or group.size != 1 or int(group.item()) < 0:
        raise UserError(f"{path}: group must be one whole number from 0; got {group.tolist()}.")
    return int(group.item())


def _groups_by_name(paths: Sequence[Path]) -> tuple[int | None, ...] | None:
    """Return groups of files whose names begin with the same letters; None if that says nothing.

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
