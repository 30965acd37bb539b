"""Handwritten characters by writer: which characters, which writers, and a folder of them.

What FEMNIST and other collections of the 62 digits and letters have in common is here.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.npz_folder import NpzFolder, standardised
from raceme.datasets.source import Dataset, Indices, generator

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The 62 characters in the order of their labels, as in EMNIST by class."""
_ALL = "all"
_RANGE = re.compile(r"(\w)-(\w)|(\w)")


@dataclass(frozen=True)
class CharacterOptions:
    """Which characters there are, and which writers are clients."""

    characters: str = option(
        _ALL, "which of the 62 characters are kept: all, or for example a-j, 0-9 or A-Fxyz"
    )
    classes_per_writer: int = option(
        0,
        "characters that a writer keeps, drawn by the seed; who has fewer is no client (0: all)",
        low=0,
    )
    writers_classes: str = option(
        "drawn",
        "which these are: drawn, or in-turn: writer i keeps i, i + 1, … as far as it has them",
        among=("drawn", "in-turn"),
    )
    least_samples: int = option(2, "who has fewer samples of these characters is no client", low=2)


class Writers(NamedTuple):
    """Samples that are kept, and whose they are.

    Attributes
    ----------
    labels : Indices
        New label of each sample, from 0; -1 where it is left out.
    sizes : Indices
        Samples of each writer that are kept; 0 for one that cannot be a client.
    num_classes : int
        Number of characters.
    """

    labels: Indices
    sizes: Indices
    num_classes: int

    @property
    def usable(self) -> int:
        """How many can be clients."""
        return int(np.count_nonzero(self.sizes))

    def largest(self, count: int, where: str) -> Indices:
        """Return the `count` writers with the most samples; of equal ones the first.

        Raises
        ------
        UserError
            There are not so many.
        """
        if count > self.usable:
            raise UserError(
                f"Too many clients: {count}, but {where} has only {self.usable} writers with "
                "samples enough of the characters asked for. Take fewer clients, or see the keys "
                "characters, classes-per-writer and least-samples."
            )
        order: Indices = np.argsort(-self.sizes, kind="stable")[:count]
        return order


def kinds(text: str) -> list[int]:
    """Read the key ``characters``: return the labels of those that are kept, ascending.

    Raises
    ------
    UserError
        It names no characters, or others than the 62, or a range that is none.
    """
    if text == _ALL:
        return list(range(len(CHARACTERS)))
    return sorted(set(_labels(text)))


def by_writer(
    y: Indices,
    writer: Indices,
    test: NDArray[np.bool_] | None,
    options: CharacterOptions,
    seed: int,
) -> Writers:
    """Find out which samples are kept, and how many each writer has.

    Parameters
    ----------
    y : Indices
        Labels from 0 to 61, shape (N,).
    writer : Indices
        Number of each sample's writer, shape (N,).
    test : NDArray or None
        Which samples are for testing, if the data say it: every client needs both kinds.
    options : CharacterOptions
        What is asked for.
    seed : int
        Draws each writer's characters.
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
            own = generator(seed, "characters of a writer", number).permutation(np.flatnonzero(row))
            row[own[wanted:] if len(own) >= wanted else own] = False
        labels = np.where((labels >= 0) & has[writer, labels], labels, -1)
    there = labels >= 0
    sizes = np.bincount(writer[there], minlength=count)
    sizes[sizes < options.least_samples] = 0
    if test is not None:
        for part in (test, ~test):
            sizes[np.bincount(writer[there & part], minlength=count) == 0] = 0
    return Writers(labels, sizes, len(kept))


def _labels(text: str) -> Iterator[int]:
    """Yield the labels that a text names, range by range."""
    ranges = list(_RANGE.finditer(text))
    if "".join(found[0] for found in ranges) != text or not ranges:
        raise _unreadable(text)
    for found in ranges:
        first, last = found[1] or found[3], found[2] or found[3]
        start, end = CHARACTERS.find(first), CHARACTERS.find(last)
        if min(start, end) < 0 or end < start:
            raise _unreadable(text)
        yield from range(start, end + 1)


def _unreadable(text: str) -> UserError:
    return UserError(
        f"characters '{text}' cannot be read: write all, or digits and letters and ranges of them, "
        "in the order 0-9, A-Z, a-z, e.g. a-j or 0-9a-f."
    )


class Characters(NpzFolder):
    """Handwritten characters, a client per writer: a folder of .npz files such as UniPen's."""

    default_model = "cnn"
    default_lr = 0.01
    default_clients = 200
    options_type = CharacterOptions
    inner = ("unipen_by_writer",)

    def load(self, config: RunConfig) -> Dataset:
        """Return the samples of the writers with the most of them, a client for each writer."""
        whole, chosen = self._writers(config)
        assert whole.users is not None
        order = chosen.largest(config.num_clients, config.data_root)
        # In the order of the files, as in a folder of which all are taken.
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

    def count_clients(self, config: RunConfig) -> int:
        """Return 200, the number of the papers' runs, or all writers where there are fewer."""
        return max(1, min(self.default_clients, self._writers(config)[1].usable))

    def _writers(self, config: RunConfig) -> tuple[Dataset, Writers]:
        """Return all files' samples, and which of them are kept."""
        whole = self._unscaled(config, None)
        if whole.target or whole.x.ndim != 4 or whole.y.max() >= len(CHARACTERS):
            raise UserError(
                f"{config.data_root} holds no characters: expected images, and labels from 0 to 61 "
                "for 0-9, A-Z, a-z. Take dataset npz-folder for other data."
            )
        assert whole.users is not None
        writer, test = np.empty(len(whole.y), np.int64), None
        for number, own in enumerate(whole.users):
            writer[own] = number
        if whole.test_users is not None:
            test = np.zeros(len(whole.y), np.bool_)
            for number, own in enumerate(whole.test_users):
                writer[own], test[own] = number, True
        options = config.read(CharacterOptions)
        return whole, by_writer(whole.y, writer, test, options, config.seed)
