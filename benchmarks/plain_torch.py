"""Local training in plain PyTorch, for ClientApps without Raceme."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raceme import datasets
from raceme.core.config import RunConfig


def train(
    module: nn.Module, data: datasets.ClientData, config: RunConfig, seed: list[int]
) -> float:
    """Train a module for one epoch of SGD; return its mean training loss."""
    x, y = torch.as_tensor(data.x_train), torch.as_tensor(data.y_train)
    order = torch.as_tensor(np.random.default_rng(seed).permutation(len(y)))
    optimizer = torch.optim.SGD(module.parameters(), lr=config.lr)
    total = 0.0
    for batch in order.split(config.batch_size):
        optimizer.zero_grad()
        loss = cross_entropy(module(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    return total / len(y)


def accuracy(module: nn.Module, data: datasets.ClientData) -> float:
    """Return the share of a client's test samples that a module classifies correctly."""
    with torch.no_grad():
        predicted = module(torch.as_tensor(data.x_test)).argmax(1)
    return float((predicted == torch.as_tensor(data.y_test)).float().mean())
