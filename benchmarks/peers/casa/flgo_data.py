"""Configuration file of an FLGo benchmark: the digits and the network."""

import os

import method
import torch
from torch.utils.data import ConcatDataset, TensorDataset

DATA, GROUPS = method.clients(int(os.environ["PEERS_SEED"]))
train_data = ConcatDataset([TensorDataset(own.x, own.y) for own in DATA])
test_data = ConcatDataset([TensorDataset(own.test_x, own.test_y) for own in DATA])


def get_model() -> torch.nn.Module:
    """Make the network."""
    return method.network()
