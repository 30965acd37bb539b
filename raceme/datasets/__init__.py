"""Data by name: what all clients have together, and what one of them has.

A process loads a dataset and partitions it once; asking again is cheap.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from raceme.config import RunConfig
from raceme.datasets.partition import Partition
from raceme.datasets.skew import skew
from raceme.datasets.source import ClientData, Dataset, DataShape, Indices, Source, generator
from raceme.errors import UserError
from raceme.registry import DATASETS, PARTITIONERS

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "ClientData",
    "DataShape",
    "Dataset",
    "Source",
    "all_clients",
    "client_data",
    "data_shape",
    "load",
    "source_of",
    "true_groups",
    "with_defaults",
]

_LOADING = ("dataset", "data_root", "download", "clients", "seed")
"""What decides, beside the dataset's own options, what is loaded."""

_DEALING = (*_LOADING, "partition")
"""What decides, beside the options of the dataset and the partition, who gets which samples."""


def source_of(config: RunConfig) -> Source:
    """Return the source that a configuration names.

    Raises
    ------
    UserError
        There is no such dataset.
    """
    chosen: Source = DATASETS[config.dataset]()
    return chosen


def with_defaults(config: RunConfig) -> RunConfig:
    """Fill in the dataset's own model and learning rate where the configuration names none."""
    chosen = source_of(config)
    return config.with_values(
        model=chosen.default_model if config.model is None else config.model,
        lr=chosen.default_lr if config.lr is None else config.lr,
    )


def load(config: RunConfig) -> Dataset:
    """Return the samples of all clients together.

    Raises
    ------
    UserError
        The dataset does not exist, or its files are missing or damaged.
    """
    return _load(config.narrowed(*_LOADING))


def data_shape(config: RunConfig) -> DataShape:
    """Return what a model has to fit; loads nothing where the source knows it."""
    return _data_shape(config.narrowed(*_LOADING))


def client_data(config: RunConfig, client: int) -> ClientData:
    """Return one client's own samples, split into training and test samples.

    Parameters
    ----------
    config : RunConfig
        Names the dataset, the partitioner and the number of clients.
    client : int
        Position of the client, from 0.

    Raises
    ------
    UserError
        There is no such client, or the data cannot be loaded or dealt out as asked.
    """
    if not 0 <= client < config.clients:
        raise UserError(
            f"There is no client {client}: clients are numbered 0 to {config.clients - 1}."
        )
    config, position = source_of(config).for_client(config, client)
    dataset, partition = load(config), _deal(config.narrowed(*_DEALING))
    train, test = _train_and_test(config, dataset, partition, position)
    if config.validation_fraction:
        train, test = _held_out(config, train, position)
    group = partition.groups[position]
    # Clients that the data come with have their own features; a partition's skew is not theirs.
    skewed = dataset.users is None
    x_train, x_test = (
        skew(dataset.inputs(own), config, group, client, part) if skewed else dataset.inputs(own)
        for part, own in (("train", train), ("test", test))
    )
    return ClientData(x_train, dataset.y[train], x_test, dataset.y[test], group)


def all_clients(config: RunConfig) -> list[ClientData]:
    """Return the samples of every client of a simulation.

    Raises
    ------
    UserError
        The data cannot be loaded or dealt out as asked.
    """
    _deal(config.narrowed(*_DEALING))
    return [client_data(config, client) for client in range(config.clients)]


def true_groups(config: RunConfig) -> tuple[int | None, ...]:
    """Return the true group of every client of a simulation, None where there is none.

    Nothing is copied, so this is also the cheap way to find out, before any work starts, whether
    the data can be loaded and dealt out as asked.

    Raises
    ------
    UserError
        They cannot.
    """
    return _deal(config.narrowed(*_DEALING)).groups


@lru_cache(maxsize=2)
def _load(config: RunConfig) -> Dataset:
    return source_of(config).load(config)


@lru_cache(maxsize=16)
def _data_shape(config: RunConfig) -> DataShape:
    return source_of(config).shape(config)


@lru_cache(maxsize=2)
def _deal(config: RunConfig) -> Partition:
    """Deal the samples out, unless the data come with clients of their own."""
    partitioner = PARTITIONERS[config.partition]
    dataset = load(config)
    if dataset.users is not None:
        return Partition(dataset.users, dataset.groups or (None,) * len(dataset.users))
    dealt: Partition = partitioner(dataset.y, config, generator(config.seed, "partition"))
    return dealt


def _train_and_test(
    config: RunConfig, dataset: Dataset, partition: Partition, client: int
) -> tuple[Indices, Indices]:
    """Return the training and the test samples of a client: at least one of each."""
    own = partition.indices[client]
    if dataset.test_users is not None:
        return own, dataset.test_users[client]
    shuffled = generator(config.seed, "train and test", client).permutation(own)
    num_test = int(np.clip(round(config.test_fraction * len(own)), 1, len(own) - 1))
    return np.sort(shuffled[num_test:]), np.sort(shuffled[:num_test])


def _held_out(config: RunConfig, train: Indices, client: int) -> tuple[Indices, Indices]:
    """Divide a client's training samples once more, into training and validation samples.

    What is chosen by the validation samples has not seen the test samples.
    """
    if len(train) < 2:
        raise UserError(
            f"Client {client} has a single training sample: with validation-fraction every client "
            "needs two."
        )
    shuffled = generator(config.seed, "validation", client).permutation(train)
    held_out = int(np.clip(round(config.validation_fraction * len(train)), 1, len(train) - 1))
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
