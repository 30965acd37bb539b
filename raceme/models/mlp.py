"""A small multilayer perceptron.

The activation is tanh: on the digits in four label groups (20 seeds, learning rate 0.25) CASA then
found exactly four clusters every time, and with rectified units more than four in 7 of 20.
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
