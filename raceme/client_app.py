"""The Flower ClientApp: one device that trains, tests and answers queries about itself.

It is the same on every grid, and works with Flower's own strategies. A reply depends on nothing
but the content of the message and the client that answers, so that messages may be answered early,
in any order and in any process.

A node says who it is in its node config:

``partition-id``, ``num-partitions``
    Which of how many clients it is; the latter replaces the key ``clients``.
``device-id``
    A stable name of the device; otherwise ``client-<partition-id>``.
``data-file``, ``data-root``
    Where this device keeps its data; they replace the keys of the same name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme import datasets, models, training
from raceme.config import RunConfig, Value
from raceme.deployment import hardware
from raceme.messages import (
    ACCURACY,
    ARRAYS,
    BATCH_SIZE,
    CHOSEN,
    CLIENT_ID,
    CONFIG,
    EVALUATE_FIRST,
    FINISHED_AT,
    GROUP,
    LOCAL_EPOCHS,
    LOSS,
    LR,
    MASK,
    METRICS,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    PROXIMAL_MU,
    REPORT_TIMING,
    ROUND,
    STARTED_AT,
    TASK,
    TRAIN_LOSS,
    VERSION,
    candidate,
)

app = ClientApp()

# Clients work side by side, each on one thread: two processes of one thread get through nearly
# twice the work of one process with two.
torch.set_num_threads(1)

_Items = tuple[tuple[str, Value], ...]

_UNKNOWN_GROUP = -1


@dataclass(frozen=True, eq=False)
class Client:
    """One client of this process, with its data in memory.

    Attributes
    ----------
    id : str
        The stable id that it states.
    config : RunConfig
        The run's configuration, with what the node and the dataset fill in.
    network : Network
        The network of this process: clients with the same one take turns.
    """

    id: str
    config: RunConfig
    train: training.Samples
    test: training.Samples
    group: int | None
    network: training.Network


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """What a training message asks of a client.

    Attributes
    ----------
    settings : ConfigRecord
        The message's own.
    rng : np.random.Generator
        Decides whatever the task leaves to chance; made anew for each task, from the seed of the
        run, the client and the task.
    chosen : int or None
        Which model to train, of several that were received.
    """

    client: Client
    settings: ConfigRecord
    sgd: training.Sgd
    rng: np.random.Generator
    chosen: int | None = None


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the client's own samples."""
    started_at = time.time()
    task = training_task(message, context)
    client, network = task.client, task.client.network
    spec = network.read(model_of(message, task.chosen))
    mask = message.content.array_records.get(MASK)
    metrics: dict[str, int | float] = {}
    if task.settings.get(EVALUATE_FIRST, False):
        metrics[ACCURACY], metrics[LOSS] = training.evaluate(network, client.test)
        metrics[NUM_TEST_EXAMPLES] = len(client.test)
    trainable = None if mask is None else network.read_mask(mask)
    metrics[TRAIN_LOSS] = training.train(network, client.train, task.sgd, task.rng, trainable)
    model = network.write(spec)
    if task.settings.get(REPORT_TIMING, False):
        metrics[STARTED_AT], metrics[FINISHED_AT] = started_at, time.time()
    return training_reply(message, task, model, metrics)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the received model on the client's own test samples."""
    client = client_of(context)
    client.network.read(model_of(message))
    return evaluation_reply(message, client, *training.evaluate(client.network, client.test))


@app.query()
def query(message: Message, context: Context) -> Message:
    """State the client's stable id, its data and their true group, and the machine it runs on."""
    client = client_of(context)
    metrics = MetricRecord(
        {
            NUM_EXAMPLES: len(client.train),
            NUM_TEST_EXAMPLES: len(client.test),
            GROUP: _UNKNOWN_GROUP if client.group is None else client.group,
        }
    )
    about = ConfigRecord({CLIENT_ID: client.id, **hardware.describe()})
    content = RecordDict({METRICS: metrics, CONFIG: about})
    return Message(content=content, reply_to=message)


def training_task(message: Message, context: Context) -> TrainingTask:
    """Read what a training message asks for, but for the model and the mask.

    Of several models it chooses the one with the least loss on the client's training samples.
    """
    client, settings = client_of(context), _settings(message)
    return TrainingTask(
        client,
        settings,
        _sgd(settings, client.config),
        _generator(client, settings),
        _choose(message, client),
    )


def training_reply(
    message: Message, task: TrainingTask, model: ArrayRecord, metrics: Mapping[str, int | float]
) -> Message:
    """Answer a training message with the trained model."""
    told = {NUM_EXAMPLES: len(task.client.train), **metrics}
    echoed = {name: task.settings[name] for name in (TASK, VERSION) if name in task.settings}
    if task.chosen is not None:
        echoed[CHOSEN] = task.chosen
    content = RecordDict(
        {ARRAYS: model, METRICS: MetricRecord(dict(told)), CONFIG: ConfigRecord(echoed)}
    )
    return Message(content=content, reply_to=message)


def evaluation_reply(message: Message, client: Client, accuracy: float, loss: float) -> Message:
    """Answer an evaluation message with the client's test results."""
    metrics = MetricRecord({ACCURACY: accuracy, LOSS: loss, NUM_EXAMPLES: len(client.test)})
    return Message(content=RecordDict({METRICS: metrics}), reply_to=message)


_clients: dict[_Items, dict[_Items, Client]] = {}
"""The clients of one run, by the run's configuration and then by the node's own settings."""


def forget() -> None:
    """Drop the data of all clients: for a process whose run has ended."""
    _clients.clear()


def client_of(context: Context) -> Client:
    """Return the client that a node is; its data are loaded the first time only.

    Only one run's clients are kept. A process that does several runs, one after another, would
    otherwise hold a copy of the whole dataset for each.
    """
    run_items = tuple(context.run_config.items())
    known = _clients.get(run_items)
    if known is None:
        _clients.clear()
        known = _clients[run_items] = {}
    node_items = tuple(context.node_config.items())
    client = known.get(node_items)
    if client is None:
        client = known[node_items] = _client(run_items, node_items)
    return client


def _client(run_items: _Items, node_items: _Items) -> Client:
    """Load the data of a client."""
    node = dict(node_items)
    config = _node_view(_run_config(run_items), node)
    position = _position(config, node)
    data, shape = datasets.client_data(config, position), datasets.data_shape(config)
    network = _network(str(config.model), shape.input_shape, shape.num_classes)
    return Client(
        id=str(node.get("device-id", f"client-{position}")),
        config=config,
        train=training.Samples(data.x_train, data.y_train, network.channels_last),
        test=training.Samples(data.x_test, data.y_test, network.channels_last),
        group=data.group,
        network=network,
    )


@lru_cache(maxsize=8)
def _run_config(items: _Items) -> RunConfig:
    # Hyper-parameters of strategies are the server's; to read them would import scikit-learn.
    own = {name: value for name, value in items if "." not in name}
    return datasets.with_defaults(RunConfig.from_mapping(own))


def _node_view(config: RunConfig, node: Mapping[str, Value]) -> RunConfig:
    """Return the configuration as a node's own settings change it."""
    return config.with_values(
        clients=int(node.get("num-partitions", config.clients)),
        data_file=str(node.get("data-file", config.data_file)),
        data_root=str(node.get("data-root", config.data_root)),
    )


def _position(config: RunConfig, node: Mapping[str, Value]) -> int:
    """Return which of the clients a node is."""
    if "partition-id" in node:
        return int(node["partition-id"])
    # A device with a file of its own needs no number, only a name that stays.
    if config.dataset == "npz" and "device-id" in node:
        return 0
    raise ValueError(
        "This node does not say which client it is: start it with "
        '--node-config "partition-id=0 num-partitions=2", or for a device with its own npz file '
        "--node-config \"device-id='kitchen' data-file='/data/device.npz'\"."
    )


@lru_cache(maxsize=8)
def _network(name: str, input_shape: tuple[int, ...], num_classes: int) -> training.Network:
    """Build a network; its weights are overwritten by every message that it serves."""
    return training.Network(models.build(name, input_shape, num_classes))


def model_of(message: Message, chosen: int | None = None) -> ArrayRecord:
    """Return the received model, or the chosen one of several."""
    record = message.content.get(ARRAYS if chosen is None else candidate(chosen))
    if not isinstance(record, ArrayRecord):
        raise ValueError(
            f"The message holds no model: expected an ArrayRecord named '{ARRAYS}', "
            f"got {sorted(message.content)}."
        )
    return record


def _choose(message: Message, client: Client) -> int | None:
    """Return which of several received models fits the training samples best; None without any."""
    records = message.content.array_records
    losses: list[float] = []
    while candidate(len(losses)) in records:
        client.network.read(records[candidate(len(losses))])
        loss = training.evaluate(client.network, client.train)[1]
        losses.append(loss if math.isfinite(loss) else math.inf)
    return losses.index(min(losses)) if losses else None


def _settings(message: Message) -> ConfigRecord:
    """Return the message's settings; none at all is fine."""
    record = message.content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _sgd(settings: ConfigRecord, config: RunConfig) -> training.Sgd:
    """Return the hyper-parameters of a message, or else of the run."""
    return training.Sgd(
        lr=_number(settings, LR, config.lr),
        batch_size=int(_number(settings, BATCH_SIZE, config.batch_size)),
        local_epochs=int(_number(settings, LOCAL_EPOCHS, config.local_epochs)),
        proximal_mu=_number(settings, PROXIMAL_MU, 0.0),
    )


def _number(settings: ConfigRecord, name: str, default: float | None) -> float:
    value = settings.get(name, default)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)


def _generator(client: Client, settings: ConfigRecord) -> np.random.Generator:
    """Return the generator for one task of one client."""
    task = int(_number(settings, TASK, _number(settings, ROUND, 0)))
    entropy = [client.config.seed, crc32(client.id.encode()), task]
    return np.random.default_rng(np.random.SeedSequence(entropy))
