"""Multinomial logistic regression."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer, a convex problem."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), output=nn.Linear(prod(input_shape), num_classes))
    )
