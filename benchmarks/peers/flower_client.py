"""The ClientApps of `on_flower.py`, in a module that Flower's Ray workers import."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn.functional import cross_entropy

DATA_ROOT = "PEERS_DATA_ROOT"
"""Environment variable, because Flower's `run_simulation` passes no configuration to clients."""

training, idle = ClientApp(), ClientApp()


@cache
def held() -> list[tuple[Tensor, Tensor]]:
    """Return all clients' samples, read once per process."""
    torch.set_num_threads(1)
    return work.clients(Path(os.environ[DATA_ROOT]))


@training.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model for one epoch."""
    x, y = held()[int(context.node_config["partition-id"])]
    model = work.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=work.LEARNING_RATE)
    for batch in torch.randperm(len(y)).split(work.BATCH):
        optimiser.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    return _reply(message, ArrayRecord(model.state_dict()))


@idle.train()
def send_back(message: Message, context: Context) -> Message:
    """Echo the received model."""
    return _reply(message, message.content["arrays"])


def _reply(message: Message, arrays: ArrayRecord) -> Message:
    metrics = MetricRecord({"num-examples": work.SAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
