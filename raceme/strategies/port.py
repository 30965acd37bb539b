"""PORT: a buffer whose updates count by freshness, and by agreement with where the model is going.

Su and Li, "How Asynchronous Can Federated Learning Be?", IWQoS 2022. When enough clients have
reported, ``w ← w + Σ p_i Δ_i``, Σ p_i = 1, with
``p_i ∝ n_i [γ S / (s_i + S) + μ (cos(Δ_i, w − w_ref) + 1) / 2]``: n_i examples, s_i staleness, S
its bound. The cosine is taken as 1 when s_i ≤ 1 or there is no older model.

w_ref is the model before the last step, as in the authors' code; its comment speaks of the model
that the client started from, ``reference = start``. Which of both is the paper's is not confirmed.
In the paper a client above the bound is told to report what it has. Here no message interrupts a
client that trains: the buffer waits until nobody who is at work is above the bound (the form
without such messages; our reading). Only weights are compared. The server keeps one model more,
the buffer's sum, and the models that clients have started from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.contributions import contribution, stepped
from raceme.clustering.mixing import cosine
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import Vector
from raceme.server.method import Applied, Method
from raceme.server.replies import Update
from raceme.server.work import Task
from raceme.strategies.fedbuff import warn_of_short_run


@dataclass(frozen=True)
class PORTParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    min_clients: int = option(15, "updates per server step, at least", low=1)
    bound: int = option(10, "S: staleness above which a client is waited for", low=1)
    gamma: float = option(3.0, "γ: weight of freshness", low=0)
    mu: float = option(1.0, "μ: weight of agreement", low=0)
    reference: str = option(
        "last-step",
        "w_ref: the model before the last step, or the one that the client started from",
        among=("last-step", "start"),
    )

    def weight(self, staleness: int, cos: float) -> float:
        """Return γ S / (s + S) + μ (cos + 1) / 2."""
        fresh = self.bound / (staleness + self.bound)
        return self.gamma * fresh + self.mu * (cos + 1.0) / 2.0


@dataclass
class PORTState:
    """What has been collected for the next step.

    Attributes
    ----------
    total : NDArray[np.float64]
        Sum of the weighted updates; of statistics, of what clients have. Shape (d,).
    weight : float
        Sum of their weights.
    count : int
        How many they are.
    before : Vector or None
        The model before the last step. Shape (d,).
    at_work : dict[str, int]
        Version of the model that each client trains.
    """

    total: NDArray[np.float64]
    weight: float = 0.0
    count: int = 0
    before: Vector | None = None
    at_work: dict[str, int] = field(default_factory=dict)


class PORT(Method):
    """A buffer weighted by freshness and agreement, which waits for those too stale (PORT)."""

    parameters_type = PORTParameters
    state_type = PORTState
    keeps_bases = True
    state: PORTState
    parameters: PORTParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with nothing collected."""
        options = self.parameters
        warn_of_short_run("PORT", "min-clients", options.min_clients, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        self.state = PORTState(np.zeros(len(vector)))

    def on_dispatch(self, task: Task) -> None:
        """Note which version a client trains."""
        self.state.at_work[task.client] = task.version

    def on_close(self, task: Task) -> None:
        """Note that a client is done."""
        self.state.at_work.pop(task.client, None)

    def on_update(self, update: Update) -> Applied:
        """Collect the update by its weight; take the step if nobody is to be waited for."""
        state, options = self.state, self.parameters
        staleness = self.models[0].version - update.task.version
        weight = options.weight(staleness, self._agreement(update, staleness)) * update.num_examples
        brought = contribution(self.delta(update), update.vector, self.trainable)
        state.total += weight * brought
        state.weight += weight
        state.count += 1
        share = weight / state.weight if state.weight else 0.0
        state.at_work.pop(update.task.client, None)
        if state.count >= options.min_clients and not self._waits():
            self._step()
        return Applied(cluster=0, staleness=staleness, weight=share)

    def _agreement(self, update: Update, staleness: int) -> float:
        """Return cos(Δ_i, w − w_ref); 1 of a fresh update, and before the first step."""
        by_start = self.parameters.reference == "start"
        reference = self.base_of(update) if by_start else self.state.before
        if staleness <= 1 or reference is None:
            return 1.0
        direction = np.asarray(self.models[0].vector - reference)
        return float(cosine(self.compared(self.delta(update)), self.compared(direction)))

    def _waits(self) -> bool:
        """Return whether a client is at work that is staler than the bound."""
        oldest = min(self.state.at_work.values(), default=self.models[0].version)
        return self.models[0].version - oldest > self.parameters.bound

    def _step(self) -> None:
        """Take the step along the weighted mean."""
        state, model = self.state, self.models[0]
        mean = state.total / state.weight if state.weight else np.zeros_like(state.total)
        state.total, state.weight, state.count = np.zeros_like(mean), 0.0, 0
        state.before = model.vector.copy()
        model.replace(stepped(model.vector, mean, mean, self.trainable))
