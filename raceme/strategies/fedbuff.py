"""FedBuff: buffered asynchronous aggregation.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1: the server collects K deltas, each scaled by s(τ) = 1 / √(1 + τ), and then takes one
step w ← w + η_g · mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.bases import Bases
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Task, Update


@dataclass(frozen=True)
class FedBuffParameters:
    """Hyper-parameters; the defaults are those with which CASA's paper runs FedBuff."""

    k: int = option(10, "updates K per server step", low=1)
    server_lr: float = option(1.0, "server learning rate η_g", above=0)


@dataclass
class FedBuffState:
    """The global model, and what has been collected for its next version.

    Attributes
    ----------
    model : Model
        The global model; its version counts server steps.
    total : Vector
        Sum of the scaled deltas collected so far. Shape (d,).
    count : int
        How many they are.
    bases : Bases
        The versions that clients started from: a delta is taken against them.
    """

    model: Model
    total: Vector
    count: int = 0
    bases: Bases = field(default_factory=Bases)


class FedBuff(AsyncStrategy):
    """One model, moved after every K updates by the mean of their staleness-scaled deltas."""

    parameters_type = FedBuffParameters
    state_type = FedBuffState
    state: FedBuffState
    parameters: FedBuffParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with nothing collected."""
        self.state = FedBuffState(Model(vector), np.zeros_like(vector))

    def on_dispatch(self, task: Task) -> None:
        """Keep the version that the client starts from until its update has come."""
        self.state.bases.hold(task, self.state.model)

    def on_close(self, task: Task) -> None:
        """Forget a past version once nobody trains from it."""
        self.state.bases.release(task)

    def on_update(self, update: Update) -> Applied:
        """Collect the scaled delta; with K of them, take the server step."""
        state, options = self.state, self.parameters
        staleness = state.model.version - update.task.version
        scale = 1.0 / math.sqrt(1.0 + staleness)
        state.total += np.float32(scale) * state.bases.delta(update)
        state.count += 1
        if state.count == options.k:
            state.model.vector += np.float32(options.server_lr / options.k) * state.total
            state.model.version += 1
            state.total[...] = 0.0
            state.count = 0
        return Applied(cluster=0, staleness=staleness, weight=options.server_lr * scale / options.k)

    def cluster_of(self, client: str) -> int:
        """Everybody gets the global model."""
        return 0

    @property
    def models(self) -> Mapping[int, Model]:
        """The global model."""
        return {0: self.state.model}
