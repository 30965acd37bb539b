"""FADAS: AMSGrad on the server over a buffer's mean, slower when the buffer holds a stale update.

Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", ICML 2024
(arXiv 2407.18365). With every M updates, Δ their mean and s_max the largest staleness among them:
``m ← β1 m + (1 − β1) Δ``, ``v ← β2 v + (1 − β2) Δ²``, ``v̂ ← max(v̂, v)``,
``w ← w + η_t m / (√v̂ + ε)``.

η_t is η while s_max ≤ τ_c, and η / s_max beyond, as in the authors' code; a transcription of the
paper has min(η, 1/s_max), which is ``delay-rule = least``. The authors' code also divides m by
1 − β1^t and √v̂ by √(1 − β2^t): ``bias-correction``. Which of both is the paper's is not confirmed:
the defaults are our reading. The server keeps m, v, v̂ and the buffer's sum, no vectors of clients.
A larger η, from 0.01 on, may explode after calm steps, since v̂ is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.contributions import contribution, stepped
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import Vector
from raceme.server.method import Applied, Method
from raceme.server.replies import Update
from raceme.strategies.fedbuff import warn_of_short_run


@dataclass(frozen=True)
class FADASParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    m: int = option(5, "M: updates per server step", low=1)
    server_lr: float = option(1e-3, "server learning rate η (without delay rule: 1e-4)", above=0)
    beta1: float = option(0.9, "β1: what is left of the mean", low=0, below=1)
    beta2: float = option(0.99, "β2: what is left of the mean square", low=0, below=1)
    epsilon: float = option(1e-8, "ε, added to the root", above=0)
    calm_delay: int = option(1, "τ_c: staleness up to which η is not reduced", low=0)
    delay_rule: str = option(
        "divide",
        "η beyond τ_c: divide: η / s (authors' code), least: min(η, 1/s), or none: η",
        among=("divide", "least", "none"),
    )
    bias_correction: bool = option(False, "divide by 1 - β^t as the authors' code does")

    def rate(self, largest: int) -> float:
        """Return η_t, by the largest staleness of the buffer."""
        if largest <= self.calm_delay or self.delay_rule == "none":
            return self.server_lr
        if self.delay_rule == "least":
            return min(self.server_lr, 1.0 / largest)
        return self.server_lr / largest


@dataclass
class FADASState:
    """The optimiser, and what has been collected for its next step.

    Attributes
    ----------
    momentum, square, largest_square : NDArray[np.float64]
        m, v and v̂. Shape (d,).
    total : NDArray[np.float64]
        Sum of the updates collected so far; of statistics, of what clients have. Shape (d,).
    count : int
        How many they are.
    largest_staleness : int
        s_max among them.
    steps : int
        t: steps of the server so far.
    """

    momentum: NDArray[np.float64]
    square: NDArray[np.float64]
    largest_square: NDArray[np.float64]
    total: NDArray[np.float64]
    count: int = 0
    largest_staleness: int = 0
    steps: int = 0


class FADAS(Method):
    """AMSGrad on the server, with every M updates, by the delay of the stalest one (FADAS)."""

    parameters_type = FADASParameters
    state_type = FADASState
    keeps_bases = True
    state: FADASState
    parameters: FADASParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model with nothing collected."""
        warn_of_short_run("FADAS", "m", self.parameters.m, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        zeros = np.zeros(len(vector))
        self.state = FADASState(zeros, zeros.copy(), zeros.copy(), zeros.copy())

    def on_update(self, update: Update) -> Applied:
        """Collect the update; with M of them, take the server step."""
        state, options = self.state, self.parameters
        staleness = self.models[0].version - update.task.version
        state.total += contribution(self.delta(update), update.vector, self.trainable)
        state.largest_staleness = max(state.largest_staleness, staleness)
        state.count += 1
        if state.count == options.m:
            self._step()
        # Adam divides by the size of what it is given: the update's share of the mean.
        return Applied(cluster=0, staleness=staleness, weight=1.0 / options.m)

    def _step(self) -> None:
        """Take the optimiser's step along the mean of the buffer."""
        state, options, model = self.state, self.parameters, self.models[0]
        mean, rate = state.total / state.count, options.rate(state.largest_staleness)
        state.total, state.count, state.largest_staleness = np.zeros_like(mean), 0, 0
        state.steps += 1
        state.momentum = options.beta1 * state.momentum + (1.0 - options.beta1) * mean
        state.square = options.beta2 * state.square + (1.0 - options.beta2) * mean**2
        state.largest_square = np.maximum(state.largest_square, state.square)
        momentum, root = state.momentum, np.sqrt(state.largest_square)
        if options.bias_correction:
            momentum = momentum / (1.0 - options.beta1**state.steps)
            root = root / np.sqrt(1.0 - options.beta2**state.steps)
        step = rate * momentum / (root + options.epsilon)
        model.replace(stepped(model.vector, step, mean, self.trainable))
