"""Datasets by user: LEAF's JSON files, handwritten characters by writer, and text by role.

LEAF's files lie in the folders ``train`` and ``test``, or ``all_data``, and hold ``user_data`` by
name, each with ``x`` and ``y``.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.files import ReadingError, free_bytes, parse_json, read_text
from raceme.core.options import option
from raceme.datasets import source
from raceme.datasets.npz import MOST_CLASSES, NpzFolder, standardised
from raceme.datasets.source import Arrays, Dataset, DataShape, Defaults, Indices, Source, cached

_PARSED = 8
"""Minimum memory of parsed JSON per byte."""
_FEWEST = 2
"""A user needs one training and one test sample."""
_EXPECTED = (
    "expected of every user x with as many numbers, or characters, for each sample, and y with a "
    "whole number from 0, or a character, for each"
)


class LeafSource(Source, ABC):
    """A task in LEAF's files, one client per user.

    Attributes
    ----------
    name : str
        Name in the registry of datasets, also in error messages.
    folders : tuple[str, ...]
        Folders under data-root that may hold train/ and test/, or all_data/.
    hint : str
        How to get the files, for error messages.
    """

    default_clients = 100
    has_clients = True

    name: str
    folders: tuple[str, ...]
    hint: str

    def _files(self, config: RunConfig) -> tuple[list[Path], list[Path]]:
        """Return the training and the test files; without test files, all are training files.

        Raises
        ------
        UserError
            No folder contains such files.
        """

        def find(folder: Path) -> tuple[list[Path], list[Path]] | None:
            train, test, whole = (
                sorted((folder / part).glob("*.json")) for part in ("train", "test", "all_data")
            )
            if train and test:
                return train, test
            return (train or whole, []) if train or whole else None

        expected = "train/*.json and test/*.json, or all_data/*.json, there or in data/"
        return source.find_under(
            config, self.name, self.folders, find, expected, f"{self.hint}.", "LEAF's files"
        )

    def _arrays(self, config: RunConfig) -> tuple[Arrays, NDArray[np.bool_] | None]:
        """Return all users' samples, with the split into training and test if given.

        Raises
        ------
        UserError
            There are no files, or one is invalid.
        """
        train, test = self._files(config)
        arrays = cached(self.name, [*train, *test], (len(train),), lambda: self._read(train, test))
        return arrays, np.asarray(arrays["test"], np.bool_) if test else None

    @abstractmethod
    def _samples(self, path: Path, name: str, content: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Check the samples of one user: return inputs, shape (n, ...), and labels, shape (n,)."""

    def _read(self, train: Sequence[Path], test: Sequence[Path]) -> Arrays:
        """Read all users of the files.

        Returns
        -------
        Mapping[str, NDArray]
            ``x``, ``y``, the number of each sample's user in ``writer``, and the test samples in
            ``test``.

        Raises
        ------
        UserError
            A file is invalid.
        """
        numbers: dict[str, int] = {}
        x, y, writer, tested = [], [], [], []
        for number, path in enumerate([*train, *test]):
            for name, content in _users(path).items():
                inputs, labels = self._samples(path, name, content)
                if not len(labels):
                    continue
                x.append(inputs)
                y.append(labels)
                writer.append(np.full(len(labels), numbers.setdefault(name, len(numbers))))
                tested.append(np.full(len(labels), number >= len(train)))
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
        if not test:
            return arrays
        # Without users that have no training or no test samples (LEAF's option -t user).
        users, is_tested = arrays["writer"], arrays["test"]
        kept = np.isin(users, np.intersect1d(users[is_tested], users[~is_tested]))
        if not kept.any():
            raise UserError(
                f"The users in {self.name}'s train/ and test/ are not the same ones: run LEAF's "
                "preprocess.sh with -t sample."
            )
        # Renumbered, so that every number has samples.
        _, users = np.unique(users[kept], return_inverse=True)
        return {**{name: values[kept] for name, values in arrays.items()}, "writer": users}


class Leaf(LeafSource):
    """JSON files in LEAF's format, numbers or text, one client per user (data-root)."""

    target_accuracy = 0.6

    name = "leaf"
    folders = ("data", "")
    hint = (
        "Such files are made by LEAF's scripts (https://github.com/TalwalkarLab/leaf) and those of "
        "FedProx; FEMNIST's images are dataset femnist"
    )

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the largest users, one client each."""
        arrays, test = self._arrays(config)
        sizes = np.bincount(arrays["writer"])
        enough = int(np.count_nonzero(sizes >= _FEWEST))
        there = f"the files in {config.data_root} have only {enough} users with samples enough."
        source.check_clients(config, enough, there)
        order = np.argsort(-sizes, kind="stable")[: config.num_clients]
        members = [np.flatnonzero(arrays["writer"] == user) for user in order]
        users, test_users = source.by_test(members, test)
        tokens = int(arrays["tokens"])
        dataset = Dataset(
            x=arrays["x"],
            y=np.array(arrays["y"], np.int64),
            num_classes=tokens or int(arrays["y"].max()) + 1,
            users=users,
            test_users=test_users,
            tokens=tokens,
        )
        return dataset if tokens else standardised(dataset)

    def count_clients(self, config: RunConfig) -> int:
        """Return 100, or all users if fewer."""
        sizes = np.bincount(self._arrays(config)[0]["writer"])
        return max(1, min(self.default_clients, int(np.count_nonzero(sizes >= _FEWEST))))

    def _samples(self, path: Path, name: str, content: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Check the samples of one user: numbers, or texts as character codes."""
        labels: NDArray[Any]
        try:
            x, y = content["x"], content["y"]
            if x and all(isinstance(text, str) for text in (*x, *y)):
                inputs = np.array([[ord(char) for char in text] for text in x], np.int32)
                labels = np.array([ord(char) for char in y], np.int32)
            else:
                inputs, labels = np.asarray(x, np.float32), np.asarray(y)
                if not len(labels):
                    return inputs, np.empty(0, np.int64)
                # Non-integers and too large numbers change in the conversion.
                with np.errstate(invalid="ignore"):
                    whole = labels.astype(np.int64)
                if not np.isfinite(inputs).all() or np.any(labels != whole):
                    raise ValueError
                labels = whole
            if inputs.ndim < 2 or labels.shape != (len(inputs),) or np.any(labels < 0):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(f"{path}, user '{name[:80]}': {_EXPECTED}.") from None
        if labels.dtype == np.int64 and labels.max() >= MOST_CLASSES:
            raise UserError(
                f"{path}, user '{name[:80]}': y must be below {MOST_CLASSES:,}, got {labels.max()}."
            )
        return inputs, labels

    def _read(self, train: Sequence[Path], test: Sequence[Path]) -> Arrays:
        """Read all users; the characters of text are numbered from 0, in the order of codes."""
        arrays = super()._read(train, test)
        x, y = arrays["x"], arrays["y"]
        if x.dtype.kind == "f":
            return {**arrays, "tokens": np.array(0)}
        codes: Indices = np.union1d(x, y)
        return {
            **arrays,
            "x": np.searchsorted(codes, x).astype(np.int32),
            "y": np.searchsorted(codes, y),
            "tokens": np.array(len(codes)),
        }


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


# -----------------------------------------------------------------------------
# Handwritten characters by writer: characters, writers, and a folder of them.
#
# Shared by FEMNIST and other collections of the 62 digits and letters.
# -----------------------------------------------------------------------------


CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The 62 characters in the order of their labels, as in EMNIST by class."""
_ALL = "all"
_RANGE = re.compile(r"(\w)-(\w)|(\w)")


@dataclass(frozen=True)
class CharacterOptions:
    """Options of characters and writers."""

    characters: str = option(
        _ALL, "characters to keep of the 62: all, or for example a-j, 0-9 or A-Fxyz"
    )
    classes_per_writer: int = option(
        0,
        "characters per writer, drawn by the seed; writers with fewer are left out (0: all)",
        low=0,
    )
    writers_classes: str = option(
        "drawn",
        "choice of these: drawn, or in-turn (writer i keeps those of i, i + 1, … that it has)",
        among=("drawn", "in-turn"),
    )
    least_samples: int = option(2, "minimum samples of these characters per client", low=2)


class Writers(NamedTuple):
    """The kept samples and their number per writer.

    Attributes
    ----------
    labels : Indices
        New label of each sample, from 0; -1 if left out.
    sizes : Indices
        Number of kept samples per writer; 0 for writers that cannot be clients.
    num_classes : int
        Number of kept characters, the classes of the task.
    """

    labels: Indices
    sizes: Indices
    num_classes: int

    @property
    def usable(self) -> int:
        """Number of possible clients."""
        return int(np.count_nonzero(self.sizes))

    def largest(self, count: int, where: str) -> Indices:
        """Return the `count` writers with the most samples, the first at ties.

        Raises
        ------
        UserError
            There are too few.
        """
        if count > self.usable:
            raise UserError(
                f"Too many clients: {count}, but {where} has only {self.usable} writers with "
                "enough samples of the chosen characters. Take fewer clients, or see the keys "
                "characters, classes-per-writer and least-samples."
            )
        order: Indices = np.argsort(-self.sizes, kind="stable")[:count]
        return order


def kinds(text: str) -> list[int]:
    """Parse the key ``characters``: return the kept labels, ascending.

    Raises
    ------
    UserError
        The text names no characters, unknown ones, or an invalid range.
    """
    if text == _ALL:
        return list(range(len(CHARACTERS)))
    ranges = list(_RANGE.finditer(text))
    bounds = [
        (CHARACTERS.find(found[1] or found[3]), CHARACTERS.find(found[2] or found[3]))
        for found in ranges
    ]
    read = bool(ranges) and "".join(found[0] for found in ranges) == text
    if not read or any(min(first, last) < 0 or last < first for first, last in bounds):
        raise UserError(
            f"characters '{text}' cannot be read: write all, or digits and letters and ranges of "
            "them, in the order 0-9, A-Z, a-z, e.g. a-j or 0-9a-f."
        )
    return sorted({label for first, last in bounds for label in range(first, last + 1)})


def by_writer(
    y: Indices,
    writer: Indices,
    test: NDArray[np.bool_] | None,
    options: CharacterOptions,
    seed: int,
) -> Writers:
    """Select the kept samples, and count them per writer.

    Parameters
    ----------
    y : Indices
        Labels from 0 to 61, shape (N,).
    writer : Indices
        Number of each sample's writer, shape (N,).
    test : NDArray or None
        Test samples, if the data define them: every client needs both kinds.
    options : CharacterOptions
        Options of characters and writers.
    seed : int
        Seed by which each writer's characters are drawn.
    """
    kept = kinds(options.characters)
    position = np.full(len(CHARACTERS), -1)
    position[kept] = np.arange(len(kept))
    labels = position[y]
    count, wanted = int(writer.max()) + 1, options.classes_per_writer
    if wanted > len(kept):
        raise UserError(
            f"classes-per-writer is {wanted}, but characters '{options.characters}' are only "
            f"{len(kept)}."
        )
    if wanted:
        has = np.zeros((count, len(kept)), np.bool_)
        has[writer[labels >= 0], labels[labels >= 0]] = True
        for number, row in enumerate(has):
            if options.writers_classes == "in-turn":
                # As FedProx's code deals classes: there are as many kinds of clients as classes.
                row &= (np.arange(len(kept)) - number) % len(kept) < wanted
                continue
            own = source.generator(seed, "characters of a writer", number).permutation(
                np.flatnonzero(row)
            )
            row[own[wanted:] if len(own) >= wanted else own] = False
        labels = np.where((labels >= 0) & has[writer, labels], labels, -1)
    there = labels >= 0
    sizes = np.bincount(writer[there], minlength=count)
    sizes[sizes < options.least_samples] = 0
    if test is not None:
        for part in (test, ~test):
            sizes[np.bincount(writer[there & part], minlength=count) == 0] = 0
    return Writers(labels, sizes, len(kept))


class Characters(NpzFolder):
    """Handwritten characters, one client per writer, such as UniPen's (.npz files in data-root)."""

    default_model = "cnn"
    default_lr = 0.01
    default_clients = 200
    options_type = CharacterOptions

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the largest writers, one client each."""
        whole, chosen = self._writers(config)
        assert whole.users is not None
        order = chosen.largest(config.num_clients, config.data_root)
        # In the order of the files.
        order = np.sort(order)
        parts = [whole.users] if whole.test_users is None else [whole.users, whole.test_users]
        kept = [[own[chosen.labels[own] >= 0] for own in part] for part in parts]
        used = np.sort(np.concatenate([part[writer] for part in kept for writer in order]))
        users = [tuple(np.searchsorted(used, part[writer]) for writer in order) for part in kept]
        groups = None if whole.groups is None else tuple(whole.groups[i] for i in order)
        return standardised(
            Dataset(
                x=whole.x[used],
                y=chosen.labels[used],
                num_classes=chosen.num_classes,
                users=users[0],
                test_users=users[1] if len(users) > 1 else None,
                groups=groups,
            )
        )

    def defaults(self, config: RunConfig) -> Defaults:
        """Return the defaults of the papers."""
        return Source.defaults(self, config)

    def _folders(self, config: RunConfig) -> Sequence[str]:
        return ("", "unipen_by_writer")

    def count_clients(self, config: RunConfig) -> int:
        """Return 200, as in the papers, or all writers if fewer."""
        return max(1, min(self.default_clients, self._writers(config)[1].usable))

    def _writers(self, config: RunConfig) -> tuple[Dataset, Writers]:
        """Return all files' samples, and the selection."""
        whole = self._unscaled(config, None)
        if whole.target or whole.x.ndim != 4 or whole.y.max() >= len(CHARACTERS):
            raise UserError(
                f"{config.data_root} holds no characters: expected images, and labels from 0 to 61 "
                "for 0-9, A-Z, a-z. Take dataset npz-folder for other data."
            )
        assert whole.users is not None
        tested = whole.test_users or ()
        writer = np.empty(len(whole.y), np.int64)
        for number, own in enumerate((*whole.users, *tested)):
            writer[own] = number % len(whole.users)
        test = np.isin(np.arange(len(writer)), np.concatenate(tested)) if tested else None
        options = config.read(CharacterOptions)
        return whole, by_writer(whole.y, writer, test, options, config.seed)


# -----------------------------------------------------------------------------
# FEMNIST: handwritten characters by writer, in the JSON files that LEAF's scripts make.
# -----------------------------------------------------------------------------


CLASSES = len(CHARACTERS)
_PIXELS = 28 * 28


class Femnist(LeafSource):
    """FEMNIST: handwritten characters, 28x28 pixels, one client per writer (data-root)."""

    default_model = "cnn"
    default_lr = 0.01
    target_accuracy = 0.95
    options_type = CharacterOptions

    name = "femnist"
    folders = ("data", "femnist/data", "femnist", "FEMNIST/data", "FEMNIST", "")
    hint = (
        "To make the files: clone https://github.com/TalwalkarLab/leaf, and in data/femnist run "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample; data-root is that folder"
    )

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the largest writers, one client each."""
        arrays, test, chosen = self._chosen(config)
        members = [
            np.flatnonzero((arrays["writer"] == writer) & (chosen.labels >= 0))
            for writer in chosen.largest(config.num_clients, "femnist")
        ]
        users, test_users = source.by_test(members, test)
        return Dataset(
            x=arrays["x"],
            y=chosen.labels,
            num_classes=chosen.num_classes,
            mean=0.9637,
            std=0.1592,
            users=users,
            test_users=test_users,
        )

    def _chosen(self, config: RunConfig) -> tuple[Arrays, NDArray[np.bool_] | None, Writers]:
        """Return all writers' samples, the test samples, and the selection."""
        arrays, test = self._arrays(config)
        y, writer = np.asarray(arrays["y"], np.int64), np.asarray(arrays["writer"], np.int64)
        options: CharacterOptions = config.read(CharacterOptions)
        return arrays, test, by_writer(y, writer, test, options, config.seed)

    def count_clients(self, config: RunConfig) -> int:
        """Return 100, as in the papers, or all writers if fewer."""
        if not config.data_root:
            return self.default_clients
        return max(1, min(self.default_clients, self._chosen(config)[2].usable))

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, 28, 28), len(kinds(config.read(CharacterOptions).characters)))

    def _samples(self, path: Path, name: str, content: Any) -> tuple[Any, Indices]:
        """Check the samples of one writer: 0 is ink, 255 is paper."""
        try:
            inputs = np.asarray(content["x"], np.float32).reshape(-1, 1, 28, 28)
            labels = np.asarray(content["y"], np.int64)
        except (KeyError, TypeError, ValueError):
            inputs, labels = np.empty((1, 1, 28, 28), np.float32), np.empty(0, np.int64)
        fits = len(inputs) == len(labels) and bool(np.all((labels >= 0) & (labels < CLASSES)))
        if not fits or not np.all((inputs >= 0) & (inputs <= 1)):
            raise UserError(
                f"{path}, writer '{name}': expected x with {_PIXELS} numbers from 0 to 1 per "
                f"sample, and y with as many labels from 0 to {CLASSES - 1}."
            )
        return np.round(inputs * 255).astype(np.uint8), labels
