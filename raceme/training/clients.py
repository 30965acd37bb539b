"""Clients of this process with their data, and the server's own samples.

The node config names the client:

``partition-id``, ``num-partitions``
    Index of the client and number of clients; the latter replaces the key ``clients``.
``device-id``
    A stable name of the device; otherwise ``client-<partition-id>``.
``data-file``, ``data-root``, ``download``
    Location of the device's data, and whether missing data are downloaded; they replace the keys of
    the same name. A replaced data file is read again for the next message.
``accelerator``, ``threads``
    Processor, ``cpu``, ``cuda`` or ``mps``, and number of threads; ``auto``: the fastest for the
    network. Without them it trains on one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from zlib import crc32

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from numpy.typing import ArrayLike, NDArray
from torch import nn

from raceme import datasets
from raceme.core.config import RunConfig, expanded
from raceme.core.errors import UserError
from raceme.core.files import Stamp
from raceme.core.messages import (
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    VALIDATION_SHARE,
    InvalidModelError,
    ModelSpec,
    Vector,
    kept_for_validation,
)
from raceme.core.options import Value
from raceme.core.training_settings import TrainingSettings
from raceme.datasets.npz import DATA_FILE, NpzOptions, stamp_of
from raceme.datasets.source import ClientData, DataShape, generator
from raceme.training import models
from raceme.training.local import evaluate, losses, train
from raceme.training.machine import ACCELERATOR, THREADS, Way, fastest, ways_of
from raceme.training.models import Network, Samples, objective_of

_Items = tuple[tuple[str, Value], ...]

DATA_SHAPE = "data-shape"
"""Key of a run's configuration: the server's data in words."""
_NODE_KEYS = (DATA_FILE, "data-root", "download")
"""Keys of the run that a node may override."""
_MOST_CLIENTS = 16384
_STEPS_KEPT = 2
"""Steps of a client's data kept in memory: around a change, work on both may be pending. A request
for more steps keeps all of them."""


@dataclass(frozen=True, eq=False)
class LocalClient:
    """A client of this process, with its data of one step.

    Attributes
    ----------
    id : str
        Stable id.
    config : RunConfig
        The run's configuration, completed by node and dataset.
    train, test : Samples
        Its training and test samples.
    num_classes : int
        Number of classes of the dataset; 0 for a regression.
    network : Network
        The network, shared by the clients of this process.
    group : int or None
        Its true group, if any.
    mixture : tuple[float, ...] or None
        Share of each distribution in its samples, if they are a mixture.
    all_training : int or None
        Final number of its training samples, if they are released step by step.
    validation : Samples or None
        Validation samples for comparing models, if any.
    """

    id: str
    config: RunConfig
    train: Samples
    test: Samples
    num_classes: int
    network: Network
    group: int | None = None
    mixture: tuple[float, ...] | None = None
    all_training: int | None = None
    validation: Samples | None = None
    _divided: dict[float, LocalClient] = field(default_factory=dict, repr=False)

    def divided(self, share: float) -> LocalClient:
        """Return this client with a share of its training samples kept for validation.

        At least one sample is kept, drawn by the seed of the run and the client's name.

        Raises
        ------
        ValueError
            The share is invalid, or the client has a single sample.
        """
        if share not in self._divided:
            if not 0 < share < 1:
                raise ValueError(f"{VALIDATION_SHARE} must be between 0 and 1, got {share:g}.")
            if len(self.train) < 2:
                raise ValueError(
                    f"This client has a single training sample: {VALIDATION_SHARE} needs two."
                )
            rng = generator(self.config.seed, VALIDATION_SHARE, crc32(self.id.encode()))
            count = kept_for_validation(len(self.train), share)
            train, validation = self.train.divided(count, rng)
            self._divided[share] = replace(self, train=train, validation=validation, _divided={})
        return self._divided[share]


class ClientCache:
    """The clients of one run, loaded on first use.

    A new run drops the former one's clients; data of former steps, and the least recently used of
    very many clients, are dropped too.

    Parameters
    ----------
    load : Callable
        Loads a client from the items of the run and node configurations and a step.
    """

    def __init__(self, load: Callable[[_Items, _Items, int], LocalClient]) -> None:
        self._load = load
        self._run: _Items | None = None
        self._clients: OrderedDict[_Items, dict[int, LocalClient]] = OrderedDict()
        self._stamps: dict[_Items, Stamp] = {}
        self._since: dict[_Items, int] = {}

    def client(self, context: Context, step: int = 0, kept: int = _STEPS_KEPT) -> LocalClient:
        """Return a node's client.

        Parameters
        ----------
        context : Context
            Holds the run's configuration and the node's.
        step : int
            Step of the client's data.
        kept : int
            Number of steps of its data to keep in memory.

        Raises
        ------
        UserError
            The data cannot be loaded, or there is no such client.
        ValueError
            The node states no client.
        """
        run, node = tuple(context.run_config.items()), tuple(context.node_config.items())
        if run != self._run:
            self.forget()
            self._run = run
        self._notice_new_file(node, context.node_config)
        steps = self._clients.setdefault(node, {})
        self._clients.move_to_end(node)
        if step in steps:
            return steps[step]
        client = steps[step] = self._load(run, node, step)
        while len(steps) > kept:
            # Drop the least recently used step: work may refer to the previous one.
            del steps[min(steps)]
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        return client

    def _notice_new_file(self, node: _Items, config: Mapping[str, object]) -> None:
        """Drop the data of a device whose file was replaced."""
        stamp = stamp_of(config)
        if stamp is None:
            return
        known = self._stamps.setdefault(node, stamp)
        if stamp != known:
            # Taken before the file is read, so that later writes are noticed at the next message.
            self._stamps[node] = stamp
            self._since[node] = max(self._clients.pop(node, {}), default=0)
            datasets.forget()

    def clients(self, context: Context, steps: Sequence[int]) -> list[LocalClient]:
        """Return a node's client with its data of each of several steps."""
        kept = max(_STEPS_KEPT, len(steps) + 1)
        return [self.client(context, step, kept) for step in steps]

    def since(self, context: Context) -> int:
        """Return the first step whose data a node still has, later if its file was replaced.

        It is the latest step requested before the replacement, unknown to a process that answers a
        single message.
        """
        return self._since.get(tuple(context.node_config.items()), 0)

    def forget(self) -> None:
        """Drop all clients."""
        self._run = None
        self._since.clear()
        self._clients.clear()


def joined(client: LocalClient, others: Sequence[LocalClient]) -> LocalClient:
    """Return a client that trains on its data of several steps together."""
    kept = [other.validation for other in others if other.validation is not None]
    return replace(
        client,
        train=Samples.joined([other.train for other in others]),
        validation=Samples.joined(kept) if kept else None,
        _divided={},
    )


def load(run_items: _Items, node_items: _Items, step: int) -> LocalClient:
    """Load a client with its data of a step; see :class:`ClientCache`."""
    node = dict(node_items)
    own = tuple((name, node[name]) for name in _NODE_KEYS if name in node)
    config = _run_config(run_items, own)
    if config.dataset == "npz" and not config.read(NpzOptions).data_file:
        raise UserError(
            "This device has no data file: start it with --node-config "
            "\"data-file='/data/device.npz'\"."
        )
    config = config.with_values(clients=int(node.get("num-partitions", config.num_clients)))
    position = _position(config, node)
    data, shape = datasets.client_data(config, position, step), datasets.data_shape(config)
    _check_shape(config, shape, str(dict(run_items).get(DATA_SHAPE, "")))
    network = _fastest_network(config, node, data)
    kept = network.channels_last, network.accelerator
    return LocalClient(
        id=str(node.get("device-id", datasets.client_name(config, position))),
        config=config,
        train=Samples(data.x_train, data.y_train, *kept),
        test=Samples(data.x_test, data.y_test, *kept),
        num_classes=shape.num_classes,
        group=data.group,
        mixture=data.mixture,
        all_training=data.all_training,
        network=network,
    )


_ways: dict[tuple[str, DataShape, int, tuple[Way, ...]], Way] = {}
"""Fastest ways measured so far, by network, mini-batch and candidate ways."""


def _fastest_network(config: RunConfig, node: Mapping[str, Value], data: ClientData) -> Network:
    """Return the network on the fastest processor that the node's owner allows; set threads."""
    if ACCELERATOR not in node and THREADS not in node:
        return network_of(config)
    # Batch normalisation takes two samples at least.
    size, ways = max(2, config.batch_size), tuple(ways_of(node))
    same = str(config.model), datasets.data_shape(config), size, ways
    if same not in _ways:
        _ways[same] = fastest(
            ways,
            lambda accelerator: network_of(config, accelerator),
            data.x_train[:size],
            data.y_train[:size],
        )
    torch.set_num_threads(_ways[same].threads)
    return network_of(config, _ways[same].accelerator)


@lru_cache(maxsize=1)
def _run_config(run: _Items, own: _Items) -> RunConfig:
    # The device owner's setting takes precedence over the run's.
    items = {**expanded(dict(run)), **dict(own)}
    # Hyper-parameters of strategies concern the server; reading them would import scikit-learn.
    return datasets.with_defaults(RunConfig.from_mapping(items, lenient=True))


def shape_in_words(shape: DataShape) -> str:
    """Return the shape of data in words for the owner of a file."""
    size = "x".join(map(str, shape.input_shape))
    if shape.tokens:
        inputs = f"{size} tokens of {shape.tokens}"
    elif len(shape.input_shape) == 1:
        inputs = f"{size} feature{'s' if shape.input_shape[0] != 1 else ''}"
    else:
        inputs = f"inputs of shape {size}"
    if shape.target is not None:
        return f"{inputs} and a quantity in '{shape.target.unit}'"
    return f"{inputs} and {shape.num_classes} class{'es' if shape.num_classes != 1 else ''}"


def _check_shape(config: RunConfig, shape: DataShape, expected: str) -> None:
    """Refuse a device's data if their shape differs from the server's."""
    own = shape_in_words(shape)
    if expected in ("", own):
        return
    file = config.read(NpzOptions).data_file if config.dataset == "npz" else ""
    whose = f"Your file {file} has" if file else "Your data have"
    raise UserError(
        f"{whose} {own}, the server's sample {expected}: inputs need the shape of the server's, "
        "and num_classes is stated if a label may be missing."
    )


def _position(config: RunConfig, node: Mapping[str, Value]) -> int:
    """Return a node's client number."""
    if "partition-id" in node:
        return int(node["partition-id"])
    # A device with a file of its own needs only a stable name, no number.
    if config.dataset == "npz" and "device-id" in node:
        return 0
    raise ValueError(
        'This node states no client number: start it with --node-config "partition-id=0 '
        'num-partitions=2", or, for a device with its own .npz file, --node-config '
        "\"device-id='kitchen' data-file='/data/device.npz'\"."
    )


def network_of(config: RunConfig, accelerator: str = "cpu") -> Network:
    """Return this process's network of a resolved configuration.

    Every model overwrites its weights.

    Parameters
    ----------
    config : RunConfig
        Names the model and the dataset.
    accelerator : str
        Processor; see :class:`~raceme.training.models.Network`.
    """
    return _network(str(config.model), datasets.data_shape(config), accelerator)


@lru_cache(maxsize=8)
def _network(name: str, shape: DataShape, accelerator: str) -> Network:
    module = models.build(name, shape.input_shape, shape.outputs, tokens=shape.tokens)
    return Network(module, objective_of(shape), accelerator)


# -----------------------------------------------------------------------------
# A user's network and samples, for Raceme's kinds of work in the user's ClientApp.
# -----------------------------------------------------------------------------


_PARTITION = "partition-id"


@dataclass(frozen=True, eq=False)
class OwnData:
    """A client's network and samples, for classification with cross-entropy.

    Attributes
    ----------
    network : nn.Module
        The network; its state_dict has the names of the arrays that the server sends.
    x_train, y_train, x_test, y_test : ArrayLike
        The client's samples: inputs, shape (n, ...), and classes from 0, shape (n,). Arrays, or
        tensors in the CPU's memory.
    lr : float
        Learning rate if messages state none (``train_config``).
    batch_size, local_epochs : int
        Mini-batch size and passes over the samples, likewise.
    seed : int
        Seed of random choices of the work.
    client_id : str
        Stable name; by default the number of the partition, or else of the node.
    """

    network: nn.Module
    x_train: ArrayLike
    y_train: ArrayLike
    x_test: ArrayLike
    y_test: ArrayLike
    lr: float = 0.01
    batch_size: int = 32
    local_epochs: int = 1
    seed: int = 0
    client_id: str = ""

    def client(self, context: Context) -> LocalClient:
        """Return the client with these samples.

        Raises
        ------
        UserError
            Inputs and labels do not fit together, or there are none.
        """
        network = Network(self.network)
        train = _samples("train", self.x_train, self.y_train, network)
        test = _samples("test", self.x_test, self.y_test, network)
        config = RunConfig(
            lr=self.lr, batch_size=self.batch_size, local_epochs=self.local_epochs, seed=self.seed
        )
        node = context.node_config
        name = f"client-{node[_PARTITION]}" if _PARTITION in node else f"node-{context.node_id}"
        return LocalClient(
            id=self.client_id or name,
            config=config,
            train=train,
            test=test,
            num_classes=int(max(train.y.max(), test.y.max())) + 1,
            network=network,
        )


def _samples(part: str, x: ArrayLike, y: ArrayLike, network: Network) -> Samples:
    """Check samples and convert them to the network's input."""
    inputs, labels = np.asarray(x, np.float32), np.asarray(y, np.int64)
    if labels.ndim != 1 or not len(labels) or len(inputs) != len(labels) or labels.min() < 0:
        raise UserError(
            f"OwnData: x_{part} and y_{part} must have equal lengths of at least 1, and classes "
            f"from 0; they have shapes {inputs.shape} and {labels.shape}."
        )
    return Samples(inputs, labels, network.channels_last, network.accelerator)


# -----------------------------------------------------------------------------
# The server's own samples: the implementation of `raceme.core.strategy.Probe`.
# -----------------------------------------------------------------------------


class ModelProbe:
    """Losses of flat models on proxy sets.

    Parameters
    ----------
    network : Network
        A network of the models' kind; its weights are overwritten at every call.
    spec : ModelSpec
        Names and shapes of a model's arrays.
    proxies : Sequence[Samples]
        One proxy set per distribution.
    tests : Sequence[Samples]
        Test samples of the same distributions, for reports; may be empty.
    """

    def __init__(
        self,
        network: Network,
        spec: ModelSpec,
        proxies: Sequence[Samples],
        tests: Sequence[Samples] = (),
    ) -> None:
        self._network, self._spec = network, spec
        self._proxies, self._tests = proxies, tests

    @property
    def sets(self) -> int:
        """Number of proxy sets."""
        return len(self._proxies)

    @property
    def tests(self) -> int:
        """Number of test sets."""
        return len(self._tests)

    def accuracy(self, vector: Vector, k: int) -> float:
        """Return the share of a test set's samples that a model classifies correctly."""
        self._network.read(self._spec.pack(vector))
        return evaluate(self._network, self._tests[k])[0]

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Return the loss of each sample of a proxy set under each model.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Index of the proxy set.

        Returns
        -------
        NDArray[np.float32]
            Shape (models, samples).

        Raises
        ------
        ValueError
            There is no such proxy set.
        """
        if not 0 <= proxy < len(self._proxies):
            raise ValueError(f"there is no proxy set {proxy}: there are {len(self._proxies)}")
        measured = []
        for vector in vectors:
            self._network.read(self._spec.pack(vector))
            measured.append(losses(self._network, self._proxies[proxy]))
        return np.stack(measured)


def probe_of(config: RunConfig, initial: ArrayRecord) -> ModelProbe | None:
    """Return the probe of the server's proxy sets; None without proxy sets.

    Raises
    ------
    UserError
        The proxy sets cannot be read.
    """
    if not config.proxy:
        return None
    held, network = datasets.proxy_sets(config), network_of(config)
    return ModelProbe(
        network,
        ModelSpec.of(initial),
        [Samples(own.x, own.y, network.channels_last) for own in held.proxies],
        [Samples(own.x, own.y, network.channels_last) for own in held.tests],
    )


def starts_of(config: RunConfig, initial: ArrayRecord) -> Sequence[Vector]:
    """Return the server's pre-trained models, one per distribution, if any.

    All start from the same initial model, without which averaging them is meaningless.

    Raises
    ------
    UserError
        There are no training samples, or a trained model is not finite.
    """
    if not config.pretrain:
        return ()
    held = datasets.pretraining(config)
    network, spec = network_of(config), ModelSpec.of(initial)
    settings = TrainingSettings.of({LOCAL_EPOCHS: config.pretrain_epochs, LOCAL_STEPS: 0}, config)
    trained = []
    try:
        for number, own in enumerate(held):
            network.read(initial)
            entropy = [config.seed, crc32(b"pretrain"), number]
            rng = np.random.default_rng(np.random.SeedSequence(entropy))
            train(network, Samples(own.x, own.y, network.channels_last), settings, rng)
            trained.append(spec.unpack(network.write(spec)))
        return trained
    except InvalidModelError as error:
        raise UserError(f"pretrain gave an unusable model, {error}: lower lr.") from None
