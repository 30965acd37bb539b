"""A user's own network and samples, for Raceme's kinds of work in a ClientApp of the user's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.app import Context
from numpy.typing import ArrayLike
from torch import nn

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.training.clients import Client
from raceme.training.network import Network
from raceme.training.samples import Samples

_PARTITION = "partition-id"


@dataclass(frozen=True, eq=False)
class OwnData:
    """What a client trains and tests with: a classification with cross-entropy.

    Attributes
    ----------
    network : nn.Module
        The network; its state_dict has the names of the arrays that the server sends.
    x_train, y_train, x_test, y_test : ArrayLike
        The client's samples: inputs, shape (n, ...), and classes from 0, shape (n,). Arrays, or
        tensors in the CPU's memory.
    lr : float
        Learning rate, where messages state none (``train_config``).
    batch_size, local_epochs : int
        Mini-batch size and passes over the samples, likewise.
    seed : int
        Decides what the work leaves to chance.
    client_id : str
        A name that stays; by default the number of the partition, or else of the node.
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

    def client(self, context: Context) -> Client:
        """Return the client that these are of.

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
        return Client(
            id=self.client_id or name,
            config=config,
            train=train,
            test=test,
            num_classes=int(max(train.y.max(), test.y.max())) + 1,
            group=None,
            mixture=None,
            network=network,
        )


def _samples(part: str, x: ArrayLike, y: ArrayLike, network: Network) -> Samples:
    """Check samples, and keep them as the network takes them."""
    inputs, labels = np.asarray(x, np.float32), np.asarray(y, np.int64)
    if labels.ndim != 1 or not len(labels) or len(inputs) != len(labels) or labels.min() < 0:
        raise UserError(
            f"OwnData: x_{part} and y_{part} must be as many inputs as classes, one at least, and "
            f"classes count from 0; they have shapes {inputs.shape} and {labels.shape}."
        )
    return Samples(inputs, labels, network.channels_last, network.accelerator)
