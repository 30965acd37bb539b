"""Partitioned samples of clients before any drift, and the server's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
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
# Test samples reserved for the server.
# -----------------------------------------------------------------------------


def wanted(text: str) -> float | None:
    """Parse the number or share of samples in ``proxy``; None for none or a folder.

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
    """Parse the folder in ``proxy``; None if it names none.

    Raises
    ------
    UserError
        The text is a number that is neither a count nor a share.
    """
    return Path(text) if text and wanted(text) is None else None


def with_whole_path(text: str) -> str:
    """Return ``proxy`` with the absolute path of its folder, if any.

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
# The partitioned samples of all clients, before any drift.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dealt:
    """The samples of each client, with the views of groups.

    Attributes
    ----------
    config : RunConfig
        The run's configuration, with the number of clients.
    dataset : Dataset
        All samples that were loaded.
    partition : Partition
        The samples of each client.
    only : int or None
        The only client with loaded data, on a device; None for all.
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
        """Whether groups differ in their view of samples (feature skew), not in the samples."""
        # Clients of the dataset have features of their own, unaffected by the partition.
        by_partition = self.dataset.users is None and is_skewed(self.config)
        return by_partition or self._scenario is not None

    @cached_property
    def _scenario(self) -> Scenario | None:
        """The scenario with different views of the same samples, if any."""
        scenario = scenario_of(self.config) if self.dataset.users is None else None
        return scenario if scenario is not None and scenario.changes_samples else None

    def name(self, client: int) -> str:
        """Return the name of a client, by default ``client-`` and its number."""
        return self.dataset.names[client] if self.dataset.names else f"client-{client}"

    def group(self, client: int) -> int | None:
        """Return the true group of a client, if any."""
        return self.partition.groups[self._position(client)]

    def indices(self, client: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of a client: at least one of each.

        Excludes the server's samples.
        """
        train, test = self._divided(client)
        return train, test[~np.isin(test, self._kept)] if len(self._kept) else test

    @cached_property
    def _kept(self) -> Indices:
        """All samples reserved for the server."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.reserve.values()]))

    @cached_property
    def reserve(self) -> dict[int, Indices]:
        """Test samples of each distribution reserved for the server (``proxy``).

        A distribution is that of a group's clients. Groups that are views of the same samples share
        them. One sample of each class is drawn first.

        Raises
        ------
        UserError
            There are no groups, or too few samples.
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
            # At least one sample remains, to test the cluster's model on other samples.
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
        """Return the training and the test samples of a client, as partitioned."""
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
            # Choices on these must not depend on the test samples.
            share = config.validation_fraction
            train, test = _divided(train, share, config.seed, "validation", position)
        return train, test

    def inputs(
        self, samples: Indices, group: int | None, client: int, part: str
    ) -> NDArray[np.float32]:
        """Return samples in the view of a group.

        Parameters
        ----------
        samples : Indices
            Positions of the samples in the dataset.
        group : int or None
            True group of the client.
        client : int
            The client, which seeds the noise of its group.
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
        """Return the labels of samples in the view of a group, shape (n,)."""
        labels = self.dataset.y[samples]
        if self._scenario is None or group is None:
            return labels
        return self._scenario.labels(labels, group, self.dataset.num_classes)

    def data(self, client: int) -> ClientData:
        """Return a client's samples before any drift."""
        return self._data(client, *self.indices(client))

    def data_where(self, client: int, wanted: NDArray[np.bool_]) -> ClientData:
        """Return a client's selected samples, at least two.

        If only training or test samples are selected, one of them serves as the other part.

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
    """Split off a random share of samples, leaving at least one in each part."""
    shuffled = generator(seed, purpose, position).permutation(own)
    count = int(np.clip(round(share * len(own)), 1, len(own) - 1))
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


# -----------------------------------------------------------------------------
# The server's samples per distribution: proxy sets, test sets, pre-training samples.
# -----------------------------------------------------------------------------


_EXPECTED = (
    "Expected: x, numbers of shape (samples, ...), and y, whole numbers from 0 of shape "
    "(samples,), or for a quantity numbers, unit, a text, and optionally y_mean and y_std; "
    "optionally x_test and y_test, and to pre-train with x_train and y_train"
)

_SUFFIXES = {"proxy": "", "test": "_test", "train": "_train"}
"""Suffixes of the names x and y in a file."""


class LabelledSamples(NamedTuple):
    """The server's samples of one distribution.

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
    """The server's samples for measuring models, by distribution.

    Attributes
    ----------
    proxies : tuple[LabelledSamples, ...]
        Samples for measuring clients' models; no client has them.
    tests : tuple[LabelledSamples, ...]
        Test samples of cluster models, for reports; may be empty.
    """

    proxies: tuple[LabelledSamples, ...]
    tests: tuple[LabelledSamples, ...]


def proxies_from_clients(dealt: Dealt) -> ProxySets:
    """Take a server's proxy sets from the test samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, too few samples, or a proxy set lacks a class.
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
                f"samples have: with proxy '{dealt.config.proxy}' it holds "
                f"{plural(len(has), 'sample')}. "
                "Take more."
            )
    return ProxySets(tuple(proxies), tuple(tests))


def pretraining_from_clients(dealt: Dealt, count: int) -> tuple[LabelledSamples, ...]:
    """Take pre-training samples from the training samples of a simulation's clients.

    Raises
    ------
    UserError
        There are no groups, or too few samples.
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


def _seen(dealt: Dealt, own: Indices, group: int, part: str) -> LabelledSamples:
    """Return samples in the view of a group's clients."""
    # The noise of a group differs from any client's.
    return LabelledSamples(
        dealt.inputs(own, group, dealt.clients + group, part), dealt.labels(own, group)
    )


def proxies_from_folder(folder: Path, shape: DataShape) -> ProxySets:
    """Read a server's proxy sets: an .npz file for each cluster, in order of name.

    Raises
    ------
    UserError
        There are no files, or one is invalid.
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


def pretraining_from_folder(
    folder: Path, shape: DataShape, count: int
) -> tuple[LabelledSamples, ...]:
    """Read the first pre-training samples of the same files.

    Raises
    ------
    UserError
        A file lacks samples or is invalid.
    """
    files = _files(folder, shape)
    for path, file in files.items():
        if "train" not in file:
            raise UserError(f"{path} lacks x_train and y_train, which pretrain needs. {_EXPECTED}.")
    own = [file["train"] for file in files.values()]
    return tuple(LabelledSamples(samples.x[:count], samples.y[:count]) for samples in own)


def shape_of_folder(folder: Path) -> DataShape:
    """Return the shape of the first file's samples in a folder.

    Raises
    ------
    UserError
        There is no file, or it is invalid.
    """
    parts, quantity = _read(_paths(folder)[0])
    samples, target = parts["proxy"], target_of(quantity)
    # It has every class, which from_folder checks.
    classes = int(samples.y.max()) + 1 if target is None else 0
    return DataShape(tuple(samples.x.shape[1:]), classes, target=target)


def _paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(f"proxy {folder} must be a folder with an .npz file for each cluster.")
    return paths


def _files(folder: Path, shape: DataShape) -> dict[Path, dict[str, LabelledSamples]]:
    """Read all files of a folder, and check that models for a shape fit them."""
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
            part: LabelledSamples(samples.x, standardised_labels(path, samples.y, target))
            for part, samples in parts.items()
        }
        for path, (parts, _) in files.items()
    }


def _read(path: Path) -> tuple[dict[str, LabelledSamples], Target | None]:
    """Read and check one file; labels that are a quantity are in its unit.

    Contains proxies, and optionally test and training samples.
    """
    samples = [f"{part}{suffix}" for suffix in _SUFFIXES.values() for part in "xy"]
    arrays = arrays_of(path, (), _EXPECTED, (*samples, *LABEL_ARRAYS))
    quantity = quantity_of(path, arrays)
    found: dict[str, LabelledSamples] = {}
    for part, suffix in _SUFFIXES.items():
        names = f"x{suffix}", f"y{suffix}"
        if not all(name in arrays for name in names):
            if part == "proxy" or any(name in arrays for name in names):
                raise UserError(f"{path} lacks {' or '.join(names)}. {_EXPECTED}.")
            continue
        x, y = checked_samples(path, arrays, suffix, quantity)
        found[part] = LabelledSamples(np.asarray(x, np.float32), y)
    return found, quantity
