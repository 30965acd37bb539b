"""Data by name: whole datasets, and the data of single clients.

A process loads and partitions a dataset once; further calls are cheap.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.errors import UserError, plural
from raceme.core.registry import DATASETS, PARTITIONERS, explained
from raceme.datasets.dealt import (
    Dealt,
    LabelledSamples,
    ProxySets,
    folder_of,
    pretraining_from_clients,
    pretraining_from_folder,
    proxies_from_clients,
    proxies_from_folder,
    shape_of_folder,
    wanted,
)
from raceme.datasets.drift import Drift, drift_of, drift_type
from raceme.datasets.partition import (
    ClassesOptions,
    DirichletOptions,
    GroupOptions,
    LabelGroupOptions,
    Partition,
    ScenarioPartitionOptions,
    SizeOptions,
    fitting_groups,
    scenario_of,
)
from raceme.datasets.source import (
    ClientData,
    Dataset,
    DataShape,
    Loaded,
    Source,
    generator,
    own_randomness,
    suited,
    suited_target,
)

log = logging.getLogger("raceme.defaults")

_LOADING = ("dataset", "data_root", "download", "clients", "test_fraction", "seed")
"""Keys that determine the loaded data, besides the dataset's options."""

_DEALING = (*_LOADING, "partition")
"""Keys that determine each client's data, besides the options of dataset and partition."""

_CHANGING = (*_DEALING, "validation_fraction", "drift", "proxy")
"""Keys that determine clients' data at each step, besides the drift's options too."""


def source_of(config: RunConfig) -> Source:
    """Return the source of a configuration.

    Raises
    ------
    UserError
        There is no such dataset.
    """
    found = DATASETS[config.dataset]
    if not isinstance(found, type):
        return Loaded(config.dataset, found)
    chosen: Source = DATASETS.make(config.dataset)
    return chosen


def with_clients(config: RunConfig) -> RunConfig:
    """Fill in the number of clients if the configuration leaves it open.

    Raises
    ------
    UserError
        There is no such dataset, or its files are needed to count clients and are missing.
    """
    if config.clients is not None:
        return config
    return config.with_values(clients=source_of(config).count_clients(config))


def with_defaults(config: RunConfig) -> RunConfig:
    """Fill in the dataset's defaults: clients, model and learning rate.

    Raises
    ------
    UserError
        There is no such dataset, or it cannot be read.
    """
    config = with_clients(config)
    chosen = source_of(config)
    stated = chosen.defaults(config)
    model, lr = stated.model, chosen.default_lr
    if model is None and config.model is None:
        model, lr = suited(data_shape(config))
    lr = lr if stated.lr is None else stated.lr
    return config.with_values(
        model=model if config.model is None else config.model,
        lr=lr if config.lr is None else config.lr,
    )


def with_fitting_groups(config: RunConfig) -> RunConfig:
    """Return a configuration with at most as many groups as clients and labels; log a change.

    Raises
    ------
    UserError
        There is no such dataset or partition, or the shares cannot be read.
    """
    config = with_clients(config)
    options_type = PARTITIONERS.options_type(config.partition) or SizeOptions
    chosen = source_of(config)
    if chosen.has_clients or not issubclass(options_type, GroupOptions):
        return config
    options = config.read(options_type)
    groups = options.groups
    labels = None
    if isinstance(options, LabelGroupOptions):
        if options.group_labels != "auto":
            return config
        # A regression has none, which dealing reports.
        labels = data_shape(config).num_classes or None
    fitting = fitting_groups(groups, config.num_clients, labels)
    if fitting == groups:
        return config
    if isinstance(chosen, Loaded) and chosen.comes_with_clients(config):
        return config
    there = f"clients={config.num_clients}" + (f", {plural(labels, 'label')}" if labels else "")
    log.warning("groups '%s' do not fit (%s): merged into '%s'", groups, there, fitting)
    return config.with_values(groups=fitting)


def default_target(config: RunConfig) -> float:
    """Return the default target of a run: an accuracy or an error.

    Raises
    ------
    UserError
        There is no such dataset, or it cannot be read.
    """
    source = source_of(config)
    stated = source.defaults(config).target_accuracy
    if stated is not None:
        return stated
    return suited_target(data_shape(config), source.target_accuracy)


def load(config: RunConfig) -> Dataset:
    """Return the samples of all clients together.

    Raises
    ------
    UserError
        The dataset does not exist, or its files are missing or damaged.
    """
    return _load(with_clients(config).narrowed(*_LOADING))


def data_shape(config: RunConfig) -> DataShape:
    """Return the shape of the data, without loading where the source knows it.

    A server without client data reads it from its own files; see ``proxy``.
    """
    return _data_shape(config.narrowed(*_LOADING, "proxy"))


def described(config: RunConfig) -> Dataset:
    """Return a dataset that describes the normalisation of inputs and the names of classes.

    It has no samples if the source uses inputs unchanged.
    """
    source = source_of(config)
    if (form := source.form(config)) is not None:
        return form
    if source.normalises:
        return load(config)
    shape = data_shape(config)
    return Dataset(
        np.empty((0, *shape.input_shape), np.float32),
        np.empty(0, np.int64),
        shape.num_classes,
        tokens=shape.tokens,
        target=shape.target,
    )


def client_data(config: RunConfig, client: int, step: int = 0) -> ClientData:
    """Return one client's own samples, split into training and test samples.

    Parameters
    ----------
    config : RunConfig
        Configuration with dataset, partition, number of clients and drift.
    client : int
        Position of the client, from 0.
    step : int
        Step of the client's data, from 0: see :func:`schedule_of`.

    Raises
    ------
    UserError
        There is no such client, or the data cannot be loaded, partitioned or changed.
    """
    return _drift_of(config, client).data(client, step)


def constant_guess(config: RunConfig) -> float | None:
    """Return the clients' mean accuracy if each always predicts its most frequent training label.

    For a regression, it is the mean absolute error of each client's mean training label. Under
    drift, the initial data count, which some clients may lack; None if all lack them.
    """
    target, scores = data_shape(config).target, []
    for client in range(config.num_clients):
        data = client_data(config, client)
        if not (len(data.y_train) and len(data.y_test)):
            continue
        if target is not None:
            scores.append(target.std * float(np.abs(data.y_test - data.y_train.mean()).mean()))
        else:
            scores.append(float((data.y_test == np.bincount(data.y_train).argmax()).mean()))
    return float(np.mean(scores)) if scores else None


def client_names(config: RunConfig) -> tuple[str, ...]:
    """Return the clients' names in a simulation; empty if they have numbers only."""
    return _drift_of_all(with_clients(config)).dealt.dataset.names


def client_name(config: RunConfig, client: int) -> str:
    """Return the name of a client in a simulation, by default ``client-`` and its number."""
    return _drift_of(config, client).dealt.name(client)


def fewest_training(config: RunConfig, client: int) -> int:
    """Return the minimum number of training samples of a client at any step, as far as known.

    Raises
    ------
    UserError
        There is no such client, or the data cannot be loaded, partitioned or changed.
    """
    return _drift_of(config, client).fewest(client)


def all_clients(config: RunConfig, step: int = 0) -> list[ClientData]:
    """Return the samples of every client of a simulation, at one step of their data.

    Raises
    ------
    UserError
        The data cannot be loaded or partitioned.
    """
    config = with_clients(config)
    true_groups(config, step)
    return [client_data(config, client, step) for client in range(config.num_clients)]


def true_groups(config: RunConfig, step: int = 0) -> tuple[int | None, ...]:
    """Return the true group, if any, of every client of a simulation.

    Nothing is copied, so this is also a cheap check of the data before any work starts.

    Raises
    ------
    UserError
        The data cannot be loaded, partitioned or changed.
    """
    return _drift_of_all(with_clients(config)).groups(step)


def proxy_sets(config: RunConfig) -> ProxySets:
    """Return the server's samples for measuring models: the key ``proxy``.

    Raises
    ------
    UserError
        The samples are missing or invalid.
    """
    config = with_clients(config)
    folder = folder_of(config.proxy)
    if folder is not None:
        return proxies_from_folder(folder, data_shape(config))
    return proxies_from_clients(_drift_of_all(config).dealt)


def pretraining(config: RunConfig) -> tuple[LabelledSamples, ...]:
    """Return the server's samples for pre-training a model per distribution: ``pretrain``.

    Raises
    ------
    UserError
        The samples are missing, too few or invalid.
    """
    if config.dataset == "npz" and not config.proxy:
        raise UserError(
            "pretrain needs samples on the server: set proxy to a folder of .npz files."
        )
    config = with_clients(config)
    folder = folder_of(config.proxy)
    if folder is not None:
        return pretraining_from_folder(folder, data_shape(config), config.pretrain)
    return pretraining_from_clients(_drift_of_all(config).dealt, config.pretrain)


def _drift_of_all(config: RunConfig) -> Drift:
    """Return the drift of all clients of a simulation."""
    return _drift(config.narrowed(*_CHANGING), config.narrowed(*_DEALING), None)


def forget() -> None:
    """Drop all loaded data, because files have changed."""
    for kept in (_load, _data_shape, _deal, _drift):
        kept.cache_clear()


_BY_LABEL = (LabelGroupOptions, DirichletOptions, ClassesOptions, ScenarioPartitionOptions)
"""Options of partitions by class."""


@lru_cache(maxsize=2)
def _load(config: RunConfig) -> Dataset:
    try:
        # A user's function may draw from the process's generators, and every worker loads the data.
        with own_randomness([config.seed]):
            return source_of(config).load(config)
    except ModuleNotFoundError as error:
        raise explained(error) from None


@lru_cache(maxsize=16)
def _data_shape(config: RunConfig) -> DataShape:
    source, folder = source_of(config), folder_of(config.proxy)
    # The folder exists on the server only, although devices receive its name.
    if folder is not None and folder.is_dir() and source.is_elsewhere(config):
        return shape_of_folder(folder)
    return source.shape(config)


@lru_cache(maxsize=2)
def _deal(config: RunConfig) -> Partition:
    """Partition the samples, unless the data come with clients."""
    partitioner = PARTITIONERS[config.partition]
    dataset = load(config)
    if dataset.users is not None:
        return Partition(dataset.users, dataset.groups or (None,) * len(dataset.users))
    if dataset.target is not None and PARTITIONERS.options_type(config.partition) in _BY_LABEL:
        raise UserError(
            f"partition {config.partition} needs classes, and the labels of {config.dataset} are "
            "quantities: take iid, rotation-groups or noise-groups."
        )
    scenario = scenario_of(config)
    if scenario is not None:
        scenario.check(dataset, config.dataset)
    dealt = partitioner(dataset.y, config, generator(config.seed, "partition"))
    if not isinstance(dealt, Partition):
        raise UserError(
            f"Partition '{config.partition}' must return a raceme.datasets.partition.Partition, "
            f"got {type(dealt).__name__}."
        )
    return dealt


def _drift_of(config: RunConfig, client: int) -> Drift:
    """Return a client's drift, on as little data as necessary."""
    config = with_clients(config)
    if not 0 <= client < config.num_clients:
        raise UserError(
            f"There is no client {client}: clients are numbered 0 to {config.num_clients - 1}."
        )
    narrowed = source_of(config).for_client(config, client)
    shares = drift_type(config).needs_others or wanted(config.proxy) is not None
    if narrowed is config or shares:
        return _drift_of_all(config)
    return _drift(config.narrowed(*_CHANGING), narrowed.narrowed(*_DEALING), client)


@lru_cache(maxsize=4)
def _drift(config: RunConfig, dealing: RunConfig, only: int | None) -> Drift:
    """Return the drift of the clients after checking it."""
    if dealing == config.narrowed(*_DEALING):
        config = with_fitting_groups(config)
        dealing = config.narrowed(*_DEALING)
    drift = drift_of(config, Dealt(config, load(dealing), _deal(dealing), only))
    drift.check()
    return drift
