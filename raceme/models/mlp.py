"""Multilayer perceptrons with one hidden layer: a small one, and two of FlexCFL's experiments.

The activation of the small one is tanh: on the digits in four label groups (20 seeds, learning
rate 0.25) CASA then found exactly four clusters every time, and with rectified units more than
four in 7 of 20.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

HIDDEN = 64


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Perceptron with one hidden layer of 64 units, for small images and feature vectors."""
    return _perceptron(input_shape, HIDDEN, nn.Tanh(), num_classes)


def mlp128(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's perceptron for MNIST: 128 hidden units, ReLU (101,770 weights on MNIST)."""
    return _perceptron(input_shape, 128, nn.ReLU(), num_classes)


def mlp512(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """FlexCFL's perceptron for FEMNIST: 512 hidden units, ReLU (407,050 weights, 10 classes)."""
    return _perceptron(input_shape, 512, nn.ReLU(), num_classes)


def _perceptron(
    input_shape: tuple[int, ...], hidden: int, activation: nn.Module, num_classes: int
) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(prod(input_shape), hidden),
            activation=activation,
            output=nn.Linear(hidden, num_classes),
        )
    )
