"""Optimisers by name: how a step follows its gradient.

An optimiser starts anew with every piece of work: what it remembers of former steps is of this
client's last visit, not of the model that it now trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from raceme.training.settings import TrainingSettings


class Trained(Protocol):
    """Weights in one flat vector, and their gradient in another: a network's, or what makes them.

    Attributes
    ----------
    weights, gradient : Tensor
        Shape (d,), float32.
    """

    weights: Tensor
    gradient: Tensor


Descent = Callable[[], None]
"""Moves weights by one step along their gradient."""


def sgd(trained: Trained, settings: TrainingSettings) -> Descent:
    """Plain stochastic gradient descent: one operation, without a library's bookkeeping."""

    def descend() -> None:
        trained.weights.add_(trained.gradient, alpha=-settings.lr)

    return descend


def momentum(trained: Trained, settings: TrainingSettings) -> Descent:
    """Stochastic gradient descent with (heavy-ball) momentum."""
    weights = [_with_gradient(trained)]
    return _steps_of(torch.optim.SGD(weights, lr=settings.lr, momentum=settings.momentum))


def adam(trained: Trained, settings: TrainingSettings) -> Descent:
    """Adam (Kingma and Ba 2015) with its usual constants."""
    return _steps_of(torch.optim.Adam([_with_gradient(trained)], lr=settings.lr))


OPTIMISERS: dict[str, Callable[[Trained, TrainingSettings], Descent]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
}


def optimiser_of(trained: Trained, settings: TrainingSettings) -> Descent:
    """Make the optimiser that the settings name, for one piece of work.

    Raises
    ------
    ValueError
        There is none of this name.
    """
    if settings.optimizer not in OPTIMISERS:
        known = ", ".join(OPTIMISERS)
        raise ValueError(f"optimizer must be one of {known}, got '{settings.optimizer}'.")
    return OPTIMISERS[settings.optimizer](trained, settings)


def _with_gradient(trained: Trained) -> Tensor:
    """Return weights as torch's optimisers want them, their gradient attached."""
    weights = trained.weights.detach()
    weights.grad = trained.gradient
    return weights


def _steps_of(optimiser: torch.optim.Optimizer) -> Descent:
    def descend() -> None:
        optimiser.step()

    return descend
