"""FedAsync: one global model, each update weighted by its staleness.

Xie et al., "Asynchronous Federated Optimization", 2019: w ← (1 − α_τ) w + α_τ w_i with
α_τ = α · s(τ), Algorithm 1 and section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.decay import StalenessFunction, staleness_factor
from raceme.strategies.mixing import mix
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update


@dataclass(frozen=True)
class FedAsyncParameters:
    """How an update is weighted; the defaults are those of the baselines in CASA's paper."""

    alpha: float = option(0.3, "share α of a fresh update", above=0, high=1)
    decay: str = option("hinge", "staleness function s", among=("constant", "hinge", "polynomial"))
    a: float = option(1.0, "slope of the hinge, exponent of the polynomial", low=0)
    b: float = option(4.0, "staleness up to which the hinge does nothing", low=0)

    def alpha_of(self, staleness: int) -> float:
        """Return α_τ = α · s(τ)."""
        function = cast(StalenessFunction, self.decay)
        return self.alpha * staleness_factor(function, staleness, self.a, self.b)


@dataclass
class FedAsyncState:
    """The global model."""

    model: Model


class FedAsync(AsyncStrategy):
    """One model, every update mixed in at once with a weight that falls with staleness."""

    parameters_type = FedAsyncParameters
    state_type = FedAsyncState
    state: FedAsyncState
    parameters: FedAsyncParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model."""
        self.state = FedAsyncState(Model(vector))

    def on_update(self, update: Update) -> Applied:
        """Mix the update in: w ← (1 − α_τ) w + α_τ w_i."""
        staleness = self.state.model.version - update.task.version
        return mix_by_staleness(self.state.model, update, 0, staleness, self.parameters)

    def cluster_of(self, client: str) -> int:
        """Everybody gets the global model."""
        return 0

    @property
    def models(self) -> Mapping[int, Model]:
        """The global model."""
        return {0: self.state.model}


def mix_by_staleness(
    model: Model, update: Update, cluster: int, staleness: int, options: FedAsyncParameters
) -> Applied:
    """Mix an update into the model of a cluster: w ← (1 − α_τ) w + α_τ w_i."""
    alpha = options.alpha_of(staleness)
    mix(model, update.vector, alpha)
    return Applied(cluster=cluster, staleness=staleness, weight=alpha)
