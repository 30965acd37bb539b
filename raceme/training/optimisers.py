"""Optimisers by name: how a step follows its gradient.

An optimiser starts anew with every piece of work: what it remembers of former steps is of this
client's last visit, not of the model that it now trains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raceme.training.network import Network
from raceme.training.settings import TrainingSettings

Descent = Callable[[], None]
"""Moves a network's weights by one step along its gradient."""


def sgd(network: Network, settings: TrainingSettings) -> Descent:
    """Plain stochastic gradient descent: one operation, without a library's bookkeeping."""

    def descend() -> None:
        network.weights.add_(network.gradient, alpha=-settings.lr)

    return descend


def momentum(network: Network, settings: TrainingSettings) -> Descent:
    """Stochastic gradient descent with (heavy-ball) momentum."""
    weights = [_with_gradient(network)]
    return _steps_of(torch.optim.SGD(weights, lr=settings.lr, momentum=settings.momentum))


def adam(network: Network, settings: TrainingSettings) -> Descent:
    """Adam (Kingma and Ba 2015) with its usual constants."""
    return _steps_of(torch.optim.Adam([_with_gradient(network)], lr=settings.lr))


OPTIMISERS: dict[str, Callable[[Network, TrainingSettings], Descent]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
}


def optimiser_of(network: Network, settings: TrainingSettings) -> Descent:
    """Make the optimiser that the settings name, for one piece of work.

    Raises
    ------
    ValueError
        There is none of this name.
    """
    if settings.optimizer not in OPTIMISERS:
        known = ", ".join(OPTIMISERS)
        raise ValueError(f"optimizer must be one of {known}, got '{settings.optimizer}'.")
    return OPTIMISERS[settings.optimizer](network, settings)


def _with_gradient(network: Network) -> Tensor:
    """Return a network's weights as torch's optimisers want them, their gradient attached."""
    weights = network.weights.detach()
    weights.grad = network.gradient
    return weights


def _steps_of(optimiser: torch.optim.Optimizer) -> Descent:
    def descend() -> None:
        optimiser.step()

    return descend
