"""Dropout in a network that need not have any: inputs of linear layers, left out at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout as left_out


@contextmanager
def dropout(module: nn.Module, share: float) -> Iterator[None]:
    """Let a network in training leave out a share of its hidden units.

    Units are left out where a linear layer receives them, the network's first layer aside, whose
    inputs are the samples: of a perceptron all hidden layers, of a convolutional network what goes
    into its linear layers. A network of one layer has no hidden units, and is left as it is. The
    dropout layers of the network itself work as ever.

    Parameters
    ----------
    module : nn.Module
        The network. In evaluation mode it leaves nothing out.
    share : float
        Probability with which a unit is left out; the others are enlarged by 1 / (1 − share).
    """
    layers = hidden_linear_layers(module) if share else []
    hooks = [layer.register_forward_pre_hook(_leaves_out(share)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hidden_linear_layers(module: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a network whose inputs are hidden units: all but a first one."""
    layers = [layer for layer in module.modules() if any(True for _ in layer.parameters(False))]
    return [layer for layer in layers[1:] if isinstance(layer, nn.Linear)]


def _leaves_out(share: float) -> Any:
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (left_out(inputs[0], share, layer.training), *inputs[1:])

    return hook
