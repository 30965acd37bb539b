"""Which client a node is, and its data in memory.

A node says who it is in its node config:

``partition-id``, ``num-partitions``
    Which of how many clients it is; the latter replaces the key ``clients``.
``device-id``
    A stable name of the device; otherwise ``client-<partition-id>``.
``data-file``, ``data-root``
    Where this device keeps its data; they replace the keys of the same name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from flwr.app import Context

from raceme import datasets, models
from raceme.config import RunConfig, Value
from raceme.training.network import Network
from raceme.training.objective import objective_of
from raceme.training.samples import Samples

_Items = tuple[tuple[str, Value], ...]

_NODE_KEYS = ("data-file", "data-root")
"""Keys of the run that a node may have its own values of."""
_MOST_CLIENTS = 16384
_STEPS_KEPT = 2
"""Steps of a client's data that stay in memory: about a change, work on both may be pending."""


@dataclass(frozen=True, eq=False)
class Client:
    """One client of this process, with its data of one step in memory.

    Attributes
    ----------
    id : str
        The stable id that it states.
    config : RunConfig
        The run's configuration, with what the node and the dataset fill in.
    train, test : Samples
        Its own samples.
    num_classes : int
        Number of classes, of which it need not have all; 0 for a regression.
    group : int or None
        Its true group where there is one.
    network : Network
        The network of this process: clients with the same one take turns.
    """

    id: str
    config: RunConfig
    train: Samples
    test: Samples
    num_classes: int
    group: int | None
    network: Network


class ClientCache:
    """The clients of one run, each loaded when it is first asked for.

    What belongs to a run is dropped when another one begins, of a client the data of former steps,
    and of very many clients those that were not asked for lately.

    Parameters
    ----------
    load : Callable
        Returns a client, given the items of the run's configuration and of the node's, and a step.
    """

    def __init__(self, load: Callable[[_Items, _Items, int], Client]) -> None:
        self._load = load
        self._run: _Items | None = None
        self._clients: OrderedDict[_Items, OrderedDict[int, Client]] = OrderedDict()

    def client(self, context: Context, step: int = 0) -> Client:
        """Return the client that a node is.

        Parameters
        ----------
        context : Context
            Holds the run's configuration and the node's.
        step : int
            Step of its data.

        Raises
        ------
        UserError
            The data cannot be loaded, or there is no such client.
        ValueError
            The node does not say which client it is.
        """
        run, node = tuple(context.run_config.items()), tuple(context.node_config.items())
        if run != self._run:
            self.forget()
            self._run = run
        steps = self._clients.setdefault(node, OrderedDict())
        self._clients.move_to_end(node)
        if step not in steps:
            steps[step] = self._load(run, node, step)
            if len(steps) > _STEPS_KEPT:
                steps.popitem(last=False)
            if len(self._clients) > _MOST_CLIENTS:
                self._clients.popitem(last=False)
        return steps[step]

    def forget(self) -> None:
        """Drop all clients."""
        self._run = None
        self._clients.clear()


def load(run_items: _Items, node_items: _Items, step: int) -> Client:
    """Load a client with its data of a step; see :class:`ClientCache`."""
    node = dict(node_items)
    own = tuple((name, node[name]) for name in _NODE_KEYS if name in node)
    config = _run_config(run_items + own)
    config = config.with_values(clients=int(node.get("num-partitions", config.num_clients)))
    position = _position(config, node)
    data, shape = datasets.client_data(config, position, step), datasets.data_shape(config)
    network = _network(str(config.model), shape)
    return Client(
        id=str(node.get("device-id", f"client-{position}")),
        config=config,
        train=Samples(data.x_train, data.y_train, network.channels_last),
        test=Samples(data.x_test, data.y_test, network.channels_last),
        num_classes=shape.num_classes,
        group=data.group,
        network=network,
    )


@lru_cache(maxsize=1)
def _run_config(items: _Items) -> RunConfig:
    # Hyper-parameters of strategies are the server's; to read them would import scikit-learn.
    return datasets.with_defaults(RunConfig.from_mapping(dict(items), lenient=True))


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
def _network(name: str, shape: datasets.DataShape) -> Network:
    """Build a network; its weights are overwritten by every message that it serves."""
    module = models.build(name, shape.input_shape, shape.outputs, tokens=shape.tokens)
    return Network(module, objective_of(shape))
