"""LEAF's JSON files: samples by user, of numbers or of text.

What FEMNIST and every other task of LEAF have in common is here: the folders ``train`` and
``test``, or ``all_data``, whose files hold ``user_data`` by name, each with ``x`` and ``y``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.reading import ReadingError, parse_json, read_text
from raceme.config.room import free_bytes
from raceme.datasets.cache import Arrays, cached
from raceme.datasets.labels import MOST_CLASSES
from raceme.datasets.npz_folder import standardised
from raceme.datasets.source import Dataset, Indices, Source

_PARSED = 8
"""Bytes of memory that a byte of JSON takes when it is parsed, at least."""
_FEWEST = 2
"""A user needs a sample to train with and one to test with."""
_EXPECTED = (
    "expected of every user x with as many numbers, or characters, for each sample, and y with a "
    "whole number from 0, or a character, for each"
)

ReadSamples = Callable[[Path, str, Any], tuple[NDArray[Any], NDArray[Any]]]
"""Checks what a file says of a user: returns inputs, shape (n, ...), and labels, shape (n,)."""


class Layout(NamedTuple):
    """Where a task's files are, and what is said if they are not there.

    Attributes
    ----------
    name : str
        Of the dataset.
    folders : tuple[str, ...]
        Where train/ and test/, or all_data/, may lie under data-root.
    hint : str
        How to get the files.
    """

    name: str
    folders: tuple[str, ...]
    hint: str

    def files(self, data_root: str) -> tuple[list[Path], list[Path]]:
        """Return the training files and the test files; without test files, all are the former.

        Raises
        ------
        UserError
            There are none.
        """
        if not data_root:
            raise UserError(
                f"{self.name} needs the folder with LEAF's files: --data-root DIR. {self.hint}"
            )
        root = Path(data_root)
        for inner in self.folders:
            train, test, whole = (
                sorted((root / inner / part).glob("*.json"))
                for part in ("train", "test", "all_data")
            )
            if train and test:
                return train, test
            if train or whole:
                return train or whole, []
        raise UserError(
            f"{self.name} is not under {root}: expected train/*.json and test/*.json, or "
            f"all_data/*.json, there or in data/. {self.hint}."
        )

    def read(self, train: Sequence[Path], test: Sequence[Path], samples: ReadSamples) -> Arrays:
        """Read all users of the files.

        Returns
        -------
        Mapping[str, NDArray]
            ``x``, ``y``, the number of each sample's user in ``writer``, and in ``test`` which are
            for testing.

        Raises
        ------
        UserError
            A file is not what it should be.
        """
        numbers: dict[str, int] = {}
        x, y, writer, tested = [], [], [], []
        for is_test, path in [*((False, path) for path in train), *((True, path) for path in test)]:
            for name, told in _users(path).items():
                inputs, labels = samples(path, name, told)
                if not len(labels):
                    continue
                x.append(inputs)
                y.append(labels)
                writer.append(np.full(len(labels), numbers.setdefault(name, len(numbers))))
                tested.append(np.full(len(labels), is_test))
        if not x:
            raise UserError(f"{train[0]} and its neighbours hold no samples. {self.hint}.")
        if len({(part.shape[1:], part.dtype.kind) for part in x}) > 1:
            raise UserError(
                f"{train[0]} and its neighbours hold samples of different shapes, or numbers and "
                "text."
            )
        arrays = {
            "x": np.concatenate(x),
            "y": np.concatenate(y),
            "writer": np.concatenate(writer),
            "test": np.concatenate(tested),
        }
        return self._complete(arrays) if test else arrays

    def _complete(self, arrays: Arrays) -> Arrays:
        """Leave out users that have no training or no test samples (LEAF's option -t user)."""
        writer, test = arrays["writer"], arrays["test"]
        kept = np.isin(writer, np.intersect1d(writer[test], writer[~test]))
        if not kept.any():
            raise UserError(
                f"The users in {self.name}'s train/ and test/ are not the same ones: run LEAF's "
                "preprocess.sh with -t sample."
            )
        # Numbered anew, so that no number is without samples.
        _, numbers = np.unique(writer[kept], return_inverse=True)
        return {**{name: values[kept] for name, values in arrays.items()}, "writer": numbers}


class Leaf(Source):
    """LEAF's JSON files of numbers or text, a client for each user (data-root)."""

    default_model = None
    default_lr = 0.05
    target_accuracy = 0.6
    default_clients = 100
    has_clients = True

    layout = Layout(
        "leaf",
        ("data", ""),
        "Such files are made by LEAF's scripts (https://github.com/TalwalkarLab/leaf) and those of "
        "FedProx; FEMNIST's images are dataset femnist",
    )

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the users with the most of them, a client for each."""
        arrays, with_test = self._arrays(config)
        sizes = np.bincount(arrays["writer"])
        if np.count_nonzero(sizes >= _FEWEST) < config.num_clients:
            raise UserError(
                f"Too many clients: {config.num_clients}, but the files in {config.data_root} have "
                f"only {np.count_nonzero(sizes >= _FEWEST)} users with samples enough."
            )
        order = np.argsort(-sizes, kind="stable")[: config.num_clients]
        members = [np.flatnonzero(arrays["writer"] == user) for user in order]
        test = np.asarray(arrays["test"], np.bool_)
        tokens = int(arrays["tokens"])
        dataset = Dataset(
            x=arrays["x"],
            y=np.array(arrays["y"], np.int64),
            num_classes=tokens or int(arrays["y"].max()) + 1,
            users=tuple(own[~test[own]] for own in members),
            test_users=tuple(own[test[own]] for own in members) if with_test else None,
            tokens=tokens,
        )
        return dataset if tokens else standardised(dataset)

    def count_clients(self, config: RunConfig) -> int:
        """Return 100, or all users where there are fewer."""
        sizes = np.bincount(self._arrays(config)[0]["writer"])
        return max(1, min(self.default_clients, int(np.count_nonzero(sizes >= _FEWEST))))

    def _arrays(self, config: RunConfig) -> tuple[Arrays, bool]:
        """Return all users' samples, and whether some of them are given as test samples."""
        train, test = self.layout.files(config.data_root)

        def build() -> Arrays:
            return _numbered(self.layout.read(train, test, _samples))

        return cached("leaf", [*train, *test], (len(train),), build), bool(test)


def _users(path: Path) -> Mapping[str, Any]:
    """Return the samples of each user in a file."""
    try:
        content = parse_json(read_text(path, free_bytes() // _PARSED))
        users = content["user_data"]
        if not isinstance(users, dict):
            raise TypeError
    except ReadingError as error:
        raise UserError(f"Cannot read {path} as JSON: {error}.") from None
    except (KeyError, TypeError):
        raise UserError(f"{path} has no 'user_data' by user, as LEAF's files have.") from None
    return users


def _samples(path: Path, name: str, told: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check the samples of one user: numbers, or texts, whose characters become their codes."""
    labels: NDArray[Any]
    try:
        x, y = told["x"], told["y"]
        if x and all(isinstance(text, str) for text in (*x, *y)):
            inputs = np.array([[ord(char) for char in text] for text in x], np.int32)
            labels = np.array([ord(char) for char in y], np.int32)
        else:
            inputs, labels = np.asarray(x, np.float32), np.asarray(y)
            if not len(labels):
                return inputs, np.empty(0, np.int64)
            # What is no whole number, or too large for one, is told by its not coming back.
            with np.errstate(invalid="ignore"):
                whole = labels.astype(np.int64)
            if not np.isfinite(inputs).all() or np.any(labels != whole):
                raise ValueError
            labels = whole
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path}, user '{name[:80]}': {_EXPECTED}.") from None
    if labels.dtype == np.int64 and labels.max() >= MOST_CLASSES:
        raise UserError(
            f"{path}, user '{name[:80]}': y must be below {MOST_CLASSES:,}, got {labels.max()}."
        )
    if inputs.ndim < 2 or labels.shape != (len(inputs),) or np.any(labels < 0):
        raise UserError(f"{path}, user '{name}': {_EXPECTED}.")
    return inputs, labels


def _numbered(arrays: Arrays) -> Arrays:
    """Number the characters of text from 0, in the order of their codes."""
    x, y = arrays["x"], arrays["y"]
    if x.dtype.kind == "f":
        return {**arrays, "tokens": np.array(0)}
    codes: Indices = np.union1d(x, y)
    return {
        "writer": arrays["writer"],
        "test": arrays["test"],
        "x": np.searchsorted(codes, x).astype(np.int32),
        "y": np.searchsorted(codes, y),
        "tokens": np.array(len(codes)),
    }
