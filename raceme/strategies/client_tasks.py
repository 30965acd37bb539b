"""What the methods share whose clients meet one task after another.

A task of a client is a step of its data that change, by ``--drift tasks`` or any other drift; where
they never change there is one task.
"""

from __future__ import annotations

from dataclasses import dataclass

from raceme.config.options import option
from raceme.server.dispatch import RoundsParameters
from raceme.server.interface import Questions


@dataclass(frozen=True)
class TaskRoundsParameters(RoundsParameters):
    """Hyper-parameters of a continual method in FedProx's rounds."""

    mu: float = option(0.05, "weight μ of FedProx's proximal term; 0: FedAvg's rounds", low=0)


def task_of(method: Questions, client: str) -> int:
    """Return the number of the task that a client is at, from 0."""
    return method.step_of(client) or 0


def begins_task(method: Questions, client: str) -> bool:
    """Return whether a client has sent no update of the task that it is at."""
    return method.progress.trained_steps.get(client) != task_of(method, client)
