"""FEMNIST: handwritten characters by writer, in the JSON files that LEAF's scripts make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.characters import CHARACTERS, CharacterOptions, Writers, by_writer, kinds
from raceme.datasets.source import Dataset, DataShape, Indices, Source

CLASSES = len(CHARACTERS)
_PIXELS = 28 * 28
_FOLDERS = ("data", "femnist/data", "femnist", "FEMNIST/data", "FEMNIST", "")
"""Where the folders train/ and test/, or all_data/, may lie under data-root."""
_HOW_TO_FETCH = (
    "To make the files: clone https://github.com/TalwalkarLab/leaf, and in data/femnist run "
    "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample; data-root is that folder"
)


class Femnist(Source):
    """FEMNIST: characters of 28x28 pixels by writer, LEAF's JSON files under data-root."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95
    default_clients = 100
    has_clients = True
    options_type = CharacterOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the writers with the most of them, a client for each writer."""
        arrays, with_test = self._arrays(config)
        chosen = _chosen(arrays, with_test, config)
        tests = np.asarray(arrays["test"], np.bool_)
        members = [
            np.flatnonzero((arrays["writer"] == writer) & (chosen.labels >= 0))
            for writer in chosen.largest(config.num_clients, "femnist")
        ]
        return Dataset(
            x=arrays["x"],
            y=chosen.labels,
            num_classes=chosen.num_classes,
            mean=0.9637,
            std=0.1592,
            users=tuple(own[~tests[own]] for own in members),
            test_users=tuple(own[tests[own]] for own in members) if with_test else None,
        )

    def _arrays(self, config: RunConfig) -> tuple[Arrays, bool]:
        """Return all writers' samples, and whether some of them are given as test samples."""
        if not config.data_root:
            raise UserError(
                "femnist needs the folder with LEAF's files: --data-root DIR. " + _HOW_TO_FETCH
            )
        train, test = _files(Path(config.data_root))
        arrays = cached("femnist", [*train, *test], (len(train),), lambda: _read(train, test))
        return arrays, bool(test)

    def count_clients(self, config: RunConfig) -> int:
        """Return 100, the number of the papers' runs, or all writers where there are fewer."""
        if not config.data_root:
            return self.default_clients
        return max(1, min(self.default_clients, _chosen(*self._arrays(config), config).usable))

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, 28, 28), len(kinds(config.read(CharacterOptions).characters)))


def _chosen(arrays: Arrays, with_test: bool, config: RunConfig) -> Writers:
    """Return which samples are kept, and how many each writer has of them."""
    test = np.asarray(arrays["test"], np.bool_) if with_test else None
    y, writer = np.asarray(arrays["y"], np.int64), np.asarray(arrays["writer"], np.int64)
    return by_writer(y, writer, test, config.read(CharacterOptions), config.seed)


def _files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the test files; without test files, all are the former."""
    for inner in _FOLDERS:
        folder = root / inner
        train, test, whole = (
            sorted((folder / part).glob("*.json")) for part in ("train", "test", "all_data")
        )
        if train and test:
            return train, test
        if train or whole:
            return train or whole, []
    raise UserError(
        f"femnist is not under {root}: expected train/*.json and test/*.json, or "
        f"all_data/*.json, there or in data/. {_HOW_TO_FETCH}."
    )


def _read(train: Sequence[Path], test: Sequence[Path]) -> Arrays:
    """Read all writers of the files; pixels as bytes, a quarter of the memory."""
    numbers: dict[str, int] = {}
    x, y, writer, tested = [], [], [], []
    for is_test, path in [*((False, path) for path in train), *((True, path) for path in test)]:
        for name, samples in _users(path).items():
            inputs, labels = _samples(path, name, samples)
            x.append(inputs)
            y.append(labels)
            writer.append(np.full(len(labels), numbers.setdefault(name, len(numbers))))
            tested.append(np.full(len(labels), is_test))
    if not any(len(part) for part in x):
        raise UserError(f"{train[0]} and its neighbours hold no samples. {_HOW_TO_FETCH}.")
    arrays = {
        "x": np.concatenate(x).reshape(-1, 1, 28, 28),
        "y": np.concatenate(y),
        "writer": np.concatenate(writer),
        "test": np.concatenate(tested),
    }
    return _complete(arrays) if test else arrays


def _complete(arrays: Arrays) -> Arrays:
    """Leave out writers that have no training or no test samples (LEAF's option -t user)."""
    writer, test = arrays["writer"], arrays["test"]
    kept = np.isin(writer, np.intersect1d(writer[test], writer[~test]))
    if not kept.any():
        raise UserError(
            "The writers in femnist's train/ and test/ are not the same ones: run LEAF's "
            "preprocess.sh with -t sample."
        )
    # Numbered anew, so that no number is without samples.
    _, numbers = np.unique(writer[kept], return_inverse=True)
    return {**{name: values[kept] for name, values in arrays.items()}, "writer": numbers}


def _users(path: Path) -> Mapping[str, Any]:
    """Return the samples of each writer in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        users = content["user_data"]
        if not isinstance(users, dict):
            raise TypeError
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path} as JSON: {error}.") from None
    except (KeyError, TypeError):
        raise UserError(f"{path} has no 'user_data' by writer, as LEAF's files have.") from None
    return users


def _samples(path: Path, name: str, samples: Any) -> tuple[Any, Indices]:
    """Check the samples of one writer; 0 is ink, 255 is paper."""
    try:
        inputs = np.asarray(samples["x"], np.float32).reshape(-1, _PIXELS)
        labels = np.asarray(samples["y"], np.int64)
    except (KeyError, TypeError, ValueError):
        inputs, labels = np.empty((1, 0), np.float32), np.empty(0, np.int64)
    fits = len(inputs) == len(labels) and bool(np.all((labels >= 0) & (labels < CLASSES)))
    if not fits or not np.all((inputs >= 0) & (inputs <= 1)):
        raise UserError(
            f"{path}, writer '{name}': expected x with {_PIXELS} numbers from 0 to 1 per sample, "
            f"and y with as many labels from 0 to {CLASSES - 1}."
        )
    return np.round(inputs * 255).astype(np.uint8), labels
