"""A small multilayer perceptron.

The activation is tanh: with few samples of skewed labels per client it brought the clients of one
group closer together, and those of different groups further apart, than rectified units did.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

HIDDEN = 64


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Perceptron with one hidden layer of 64 units, for small images and feature vectors."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(prod(input_shape), HIDDEN),
            activation=nn.Tanh(),
            output=nn.Linear(HIDDEN, num_classes),
        )
    )
