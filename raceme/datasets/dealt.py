"""The samples dealt out to clients, before anything changes them, and those of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.files import absolute
from raceme.datasets.npz import (
    LABEL_ARRAYS,
    arrays_of,
    checked_samples,
    common_quantity,
    described,
    quantity_of,
    standardised_labels,
    target_of,
)
from raceme.datasets.partition import Partition, Scenario, is_skewed, scenario_of, skew
from raceme.datasets.source import (
    ClientData,
    Dataset,
    DataShape,
    Indices,
    Labels,
    Target,
    generator,
)

# -----------------------------------------------------------------------------
# Test samples that the server keeps for itself: how many are wanted, and which they are.
# -----------------------------------------------------------------------------


def wanted(text: str) -> float | None:
    """Read how many samples ``proxy`` asks for; None if it asks for none, or names a folder.

    Parameters
    ----------
    text : str
        A whole number, a share of the test samples between 0 and 1, a folder, or nothing.

    Raises
    ------
    UserError
        The text is a number that is neither a count nor a share.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if 0 < number < 1 or (number >= 1 and number.is_integer()):
        return number
    raise UserError(
        f"proxy '{text}' must be a whole number of samples, a share above 0 and below 1, or a "
        "folder of .npz files."
    )


def folder_of(text: str) -> Path | None:
    """Read which folder ``proxy`` names; None if it names none.

    Raises
    ------
    UserError
        The text is a number that is neither a count nor a share.
    """
    return Path(text) if text and wanted(text) is None else None


def with_whole_path(text: str) -> str:
    """Return ``proxy`` with the whole path of the folder, if it names one.

    Raises
    ------
    UserError
        There is no such folder on this machine.
    """
    folder = folder_of(text)
    if folder is None:
        return text
    found = absolute(folder)
    if not found.is_dir():
        raise UserError(
            f"proxy: there is no folder {found} on this machine. With flwr run, the SuperLink "
            "reads it: give an absolute path."
        )
    return str(found)


# -----------------------------------------------------------------------------
# The samples of all clients as they were dealt out, before anything changes them.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dealt:
    """The samples of each client, and how it sees them.

    Attributes
    ----------
    config : RunConfig
        The run's; its number of clients is known.
    dataset : Dataset
        All samples that were loaded.
    partition : Partition
        The samples of each client.
    only : int or None
        The one client whose data were loaded, on a device that has no others; None for all.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    only: int | None = None

    @property
    def clients(self) -> int:
        """Number of clients of the run."""
        return self.config.num_clients

    @property
    def present(self) -> Iterable[int]:
        """The clients whose data were loaded."""
        return range(self.clients) if self.only is None else (self.only,)

    @property
    def skewed(self) -> bool:
        """Whether a client's group decides how it sees samples, not which samples it has."""
        # Clients that the data come with have their own features; a partition's are not theirs.
        by_partition = self.dataset.users is None and is_skewed(self.config)
        return by_partition or self._scenario is not None

    @cached_property
    def _scenario(self) -> Scenario | None:
        """The scenario in which groups see the same samples in different ways, if there is one."""
        scenario = scenario_of(self.config) if self.dataset.users is None else None
        return scenario if scenario is not None and scenario.changes_samples else None

    def group(self, client: int) -> int | None:
        """Return the true group of a client, None where there is none."""
        return self.partition.groups[self._position(client)]

    def indices(self, client: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of a client: at least one of each.

        What the server keeps for itself is not among them.
        """
        train, test = self._divided(client)
        return train, test[~np.isin(test, self._kept)] if len(self._kept) else test

    @cached_property
    def _kept(self) -> Indices:
        """All samples that the server keeps for itself."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.reserve.values()]))

    @cached_property
    def reserve(self) -> dict[int, Indices]:
        """Test samples of each distribution that the server has, and no client (``proxy``).

        A distribution is what the clients of a group have. Where groups only see the same samples
        in different ways, the samples are the same for all. One of each class is drawn first.

        Raises
        ------
        UserError
            There are no groups, or not samples enough.
        """
        number = wanted(self.config.proxy)
        if number is None:
            return {}
        pools = self.pools(lambda client: self._divided(client)[1], spares_first=True)
        rng = generator(self.config.seed, "proxy")
        drawn: dict[int, Indices] = {}
        for group, pool in pools.items():
            if self.skewed and drawn:
                # Every distribution has the same samples in its pool.
                drawn[group] = next(iter(drawn.values()))
                continue
            count = int(number) if number >= 1 else max(1, round(number * len(pool)))
            # One is left at least, to test the cluster's model on what it was not compared by.
            if count >= len(pool):
                raise UserError(
                    f"proxy '{self.config.proxy}' asks for {count} test samples of distribution "
                    f"{group}, and {max(0, len(pool) - 1)} are available: take fewer, or a larger "
                    "test-fraction."
                )
            order = rng.permutation(pool)
            if self.dataset.target is None:
                _, firsts = np.unique(self.dataset.y[order], return_index=True)
                order = np.concatenate([order[firsts], np.delete(order, firsts)])
            drawn[group] = np.sort(order[:count])
        return drawn

    def pools(self, of: Callable[[int], Indices], spares_first: bool = False) -> dict[int, Indices]:
        """Return the samples of each distribution: those of its group's clients.

        Parameters
        ----------
        of : Callable
            Returns the samples of a client.
        spares_first : bool
            Leave the first sample of each client out.

        Raises
        ------
        UserError
            There are no groups.
        """
        groups = self.partition.groups
        numbers = sorted({group for group in groups if group is not None})
        if None in groups or self.only is not None:
            raise UserError(
                "proxy and pretrain take samples of each group's distribution, and these clients "
                "have no groups: take a partition with groups, or for proxy a folder of .npz files."
            )
        start = int(spares_first)
        own = {client: of(client)[start:] for client in range(self.clients)}
        return {
            number: np.concatenate([own[c] for c in own if self.skewed or groups[c] == number])
            for number in numbers
        }

    def _divided(self, client: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of a client as they were dealt."""
        position = self._position(client)
        own, config = self.partition.indices[position], self.config
        if self.dataset.test_users is not None:
            train, test = own, self.dataset.test_users[position]
        else:
            train, test = _divided(
                own, config.test_fraction, config.seed, "train and test", position
            )
        if config.validation_fraction:
            if len(train) < 2:
                raise UserError(
                    f"Client {client} has a single training sample: with validation-fraction every "
                    "client needs two."
                )
            # What is chosen by these has not seen the test samples.
            share = config.validation_fraction
            train, test = _divided(train, share, config.seed, "validation", position)
        return train, test

    def inputs(
        self, samples: Indices, group: int | None, client: int, part: str
    ) -> NDArray[np.float32]:
        """Return samples as a client of a group sees them.

        Parameters
        ----------
        samples : Indices
            Positions of the samples in the dataset.
        group : int or None
            True group of the client.
        client : int
            The client, which has noise of its own where the group adds noise.
        part : str
            ``"train"`` or ``"test"``: their noise must differ.
        """
        if self._scenario is not None and group is not None:
            return self._scenario.inputs(self.dataset, samples, group)
        inputs = self.dataset.inputs(samples)
        if not self.skewed:
            return inputs
        return skew(inputs, self.config, group, client, part, self.dataset.blank)

    def labels(self, samples: Indices, group: int | None) -> Labels:
        """Return the labels of samples as a client of a group gives them, shape (n,)."""
        labels = self.dataset.y[samples]
        if self._scenario is None or group is None:
            return labels
        return self._scenario.labels(labels, group, self.dataset.num_classes)

    def data(self, client: int) -> ClientData:
        """Return the samples that were dealt out to a client."""
        return self._data(client, *self.indices(client))

    def data_where(self, client: int, wanted: NDArray[np.bool_]) -> ClientData:
        """Return those of a client's samples that are wanted, at least two.

        A lone part, for training or for testing, lends the other one a sample.

        Parameters
        ----------
        client : int
            Position of the client, from 0.
        wanted : NDArray[np.bool_]
            Whether each sample of the dataset is wanted, shape (N,).
        """
        train, test = (own[wanted[own]] for own in self.indices(client))
        if len(test) == 0:
            train, test = train[:-1], train[-1:]
        elif len(train) == 0:
            train, test = test[:-1], test[-1:]
        return self._data(client, train, test)

    def _data(self, client: int, train: Indices, test: Indices) -> ClientData:
        group = self.group(client)
        return ClientData(
            self.inputs(train, group, client, "train"),
            self.labels(train, group),
            self.inputs(test, group, client, "test"),
            self.labels(test, group),
            group,
        )

    def _position(self, client: int) -> int:
        return client if self.only is None else 0


def _divided(
    own: Indices, share: float, seed: int, purpose: str, position: int
) -> tuple[Indices, Indices]:
    """Divide samples at random into those that are kept, and a share: at least one of each."""
    shuffled = generator(seed, purpose, position).permutation(own)
    count = int(np.clip(round(share * len(own)), 1, len(own) - 1))
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


# -----------------------------------------------------------------------------
# What a server has of each distribution: proxy sets, test sets, samples to pre-train with.
# -----------------------------------------------------------------------------


_EXPECTED = (
    "Expected: x, numbers of shape (samples, ...), and y, whole numbers from 0 of shape "
    "(samples,), or for a quantity numbers, unit, a text, and optionally y_mean and y_std; "
    "optionally x_test and y_test, and to pre-train with x_train and y_train"
)

_SUFFIXES = {"proxy": "", "test": "_test", "train": "_train"}
"""Of the names x and y, for each part of a file."""


class Held(NamedTuple):
    """Samples that a server has of one distribution.

    Attributes
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : Labels
        Classes, int64, or the standardised quantity, float32, shape (n,).
    """

    x: NDArray[np.float32]
    y: Labels


class ProxySets(NamedTuple):
    """Samples on which a server measures models, of each distribution in order.

    Attributes
    ----------
    proxies : tuple[Held, ...]
        What clients' models are measured on. No client has any of them.
    tests : tuple[Held, ...]
        What the clusters' models are tested on, for reports; empty where there are none.
    """

    proxies: tuple[Held, ...]
    tests: tuple[Held, ...]


def proxies_from_clients(dealt: Dealt) -> ProxySets:
    """Take a server's proxy sets from the test samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, not samples enough, or a proxy set misses a class.
    """
    proxies, tests = [], []
    remaining = dealt.pools(lambda client: dealt.indices(client)[1])
    for group, own in dealt.reserve.items():
        proxies.append(_seen(dealt, own, group, "proxy"))
        tests.append(_seen(dealt, remaining[group], group, "test"))
        has = proxies[-1].y
        missing = np.setdiff1d(tests[-1].y, has)
        if dealt.dataset.target is None and len(missing):
            raise UserError(
                f"The proxy set of distribution {group} misses class {missing[0]}, which its test "
                f"samples have: with proxy '{dealt.config.proxy}' it holds {len(has)} samples. "
                "Take more."
            )
    return ProxySets(tuple(proxies), tuple(tests))


def pretraining_from_clients(dealt: Dealt, count: int) -> tuple[Held, ...]:
    """Take samples to pre-train with from the training samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, or not samples enough.
    """
    rng = generator(dealt.config.seed, "pretrain")
    held = []
    for group, pool in dealt.pools(lambda client: dealt.indices(client)[0]).items():
        if count > len(pool):
            raise UserError(
                f"pretrain {count} is more than the {len(pool)} training samples of "
                f"distribution {group}."
            )
        own = np.sort(rng.choice(pool, count, replace=False))
        held.append(_seen(dealt, own, group, "pretrain"))
    return tuple(held)


def _seen(dealt: Dealt, own: Indices, group: int, part: str) -> Held:
    """Return samples as the clients of a group see them."""
    # Where a group adds noise, it is not that of a client.
    return Held(dealt.inputs(own, group, dealt.clients + group, part), dealt.labels(own, group))


def proxies_from_folder(folder: Path, shape: DataShape) -> ProxySets:
    """Read a server's proxy sets: an .npz file for each cluster, in order of name.

    Raises
    ------
    UserError
        There are none, or one is not what it should be.
    """
    files = _files(folder, shape)
    for path, file in files.items():
        missing = np.setdiff1d(np.arange(shape.num_classes), file["proxy"].y)
        if len(missing):
            raise UserError(
                f"{path}: y has no sample of class {missing[0]}. Add samples of each class."
            )
    has_tests = all("test" in file for file in files.values())
    return ProxySets(
        tuple(file["proxy"] for file in files.values()),
        tuple(file["test"] for file in files.values()) if has_tests else (),
    )


def pretraining_from_folder(folder: Path, shape: DataShape, count: int) -> tuple[Held, ...]:
    """Read the first samples to pre-train with, of the same files.

    Raises
    ------
    UserError
        A file has none, or is not what it should be.
    """
    files = _files(folder, shape)
    for path, file in files.items():
        if "train" not in file:
            raise UserError(f"{path} lacks x_train and y_train, which pretrain needs. {_EXPECTED}.")
    own = [file["train"] for file in files.values()]
    return tuple(Held(samples.x[:count], samples.y[:count]) for samples in own)


def shape_of_folder(folder: Path) -> DataShape:
    """Return what the samples of the first file in a folder say that a model has to fit.

    Raises
    ------
    UserError
        There is none, or it is not what it should be.
    """
    parts, quantity = _read(_paths(folder)[0])
    samples, target = parts["proxy"], target_of(quantity)
    # Each class is in it: from_folder checks that.
    classes = int(samples.y.max()) + 1 if target is None else 0
    return DataShape(tuple(samples.x.shape[1:]), classes, target=target)


def _paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(f"proxy {folder} must be a folder with an .npz file for each cluster.")
    return paths


def _files(folder: Path, shape: DataShape) -> dict[Path, dict[str, Held]]:
    """Read all files of a folder, and see that models for a shape can be measured on them."""
    files = {path: _read(path) for path in _paths(folder)}
    target = target_of(common_quantity({path: stated for path, (_, stated) in files.items()}))
    if target != shape.target:
        raise UserError(
            f"proxy {folder}: its files must describe labels as the clients' data do, "
            f"{described(shape.target)}; got {described(target)}."
        )
    for path, (parts, _) in files.items():
        for part, samples in parts.items():
            x, y = samples.x, samples.y
            if x.shape[1:] != shape.input_shape:
                raise UserError(
                    f"{path}: x{_SUFFIXES[part]} must hold samples of shape {shape.input_shape}, "
                    f"as all others; got {x.shape[1:]}."
                )
            if target is None and y.max() >= shape.num_classes:
                raise UserError(
                    f"{path}: y{_SUFFIXES[part]} must hold labels below {shape.num_classes}, as "
                    f"all others; got labels up to {y.max()}."
                )
    return {
        path: {
            part: Held(samples.x, standardised_labels(path, samples.y, target))
            for part, samples in parts.items()
        }
        for path, (parts, _) in files.items()
    }


def _read(path: Path) -> tuple[dict[str, Held], Target | None]:
    """Read and check one file; labels that are a quantity are in its unit.

    Proxies are in it, and tests and training samples if it has some.
    """
    samples = [f"{part}{suffix}" for suffix in _SUFFIXES.values() for part in "xy"]
    arrays = arrays_of(path, (), _EXPECTED, (*samples, *LABEL_ARRAYS))
    quantity = quantity_of(path, arrays)
    found: dict[str, Held] = {}
    for part, suffix in _SUFFIXES.items():
        names = f"x{suffix}", f"y{suffix}"
        if not all(name in arrays for name in names):
            if part == "proxy" or any(name in arrays for name in names):
                raise UserError(f"{path} lacks {' or '.join(names)}. {_EXPECTED}.")
            continue
        x, y = checked_samples(path, arrays, suffix, quantity)
        found[part] = Held(np.asarray(x, np.float32), y)
    return found, quantity
