"""FedBuff: buffered asynchronous aggregation.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1: the server collects K deltas, each scaled by s(τ) = 1 / √(1 + τ), and then takes one
step w ← w + η_g · mean. Statistics of batch normalisation become the mean of what clients have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from logging import getLogger

import numpy as np

from raceme.clustering.clusters import Clusters
from raceme.clustering.contributions import contribution, stepped
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import Vector
from raceme.server.method import Applied, Method
from raceme.server.replies import Update

log = getLogger("raceme")


@dataclass(frozen=True)
class FedBuffParameters:
    """Hyper-parameters; the defaults are those with which CASA's paper runs FedBuff."""

    k: int = option(10, "updates K per server step", low=1)
    server_lr: float = option(1.0, "server learning rate η_g", above=0)


@dataclass
class FedBuffState:
    """What has been collected for the next version of the global model.

    Attributes
    ----------
    total : Vector
        Sum of the scaled deltas collected so far; of statistics, of what clients have. Shape (d,).
    count : int
        How many they are.
    """

    total: Vector
    count: int = 0


class FedBuff(Method):
    """One model, moved after every K updates by the mean of their staleness-scaled deltas."""

    parameters_type = FedBuffParameters
    state_type = FedBuffState
    keeps_bases = True
    one_model = True
    state: FedBuffState
    parameters: FedBuffParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with nothing collected."""
        warn_of_short_run("FedBuff", "k", self.parameters.k, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        self.state = FedBuffState(np.zeros_like(vector))

    def on_update(self, update: Update) -> Applied:
        """Collect the scaled delta; with K of them, take the server step."""
        state, options, model = self.state, self.parameters, self.models[0]
        staleness = model.version - update.task.version
        scale = 1.0 / math.sqrt(1.0 + staleness)
        scaled = np.float32(scale) * self.delta(update)
        state.total += contribution(scaled, update.vector, self.trainable)
        state.count += 1
        if state.count == options.k:
            step = np.float32(options.server_lr / options.k) * state.total
            mean = state.total / np.float32(options.k)
            # Emptied first: a step that is not finite is refused, and the next one must come.
            state.total[...] = 0.0
            state.count = 0
            model.replace(stepped(model.vector, step, mean, self.trainable))
        return Applied(cluster=0, staleness=staleness, weight=options.server_lr * scale / options.k)


def warn_of_short_run(name: str, option: str, needed: int, planned: int) -> None:
    """Log it if a run ends before a method that waits for some updates has moved its model.

    Parameters
    ----------
    name, option : str
        The method, and its option that says for how many it waits.
    needed, planned : int
        How many these are, and how many the run has; 0 if that is not known.
    """
    if 0 < planned < needed:
        log.warning(
            "%s moves its model after every %d updates, and the run has %d: it will stay as it is. "
            "Give a smaller %s.",
            name,
            needed,
            planned,
            option,
        )
