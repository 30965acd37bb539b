"""FedAsync: one global model, each update weighted by its staleness.

Xie et al., "Asynchronous Federated Optimization", 2019: w ← (1 − α_τ) w + α_τ w_i with
α_τ = α · s(τ), Algorithm 1 and section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from raceme.core.clusters import Model
from raceme.core.options import option
from raceme.core.requests import Outcome, Update
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import StalenessFunction, staleness_factor


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


class FedAsync(Method):
    """One model, every update mixed in at once with a weight that falls with staleness."""

    parameters_type = FedAsyncParameters
    needs = Needs(one_model=True)
    parameters: FedAsyncParameters

    def on_update(self, update: Update) -> Outcome:
        """Mix the update in: w ← (1 − α_τ) w + α_τ w_i."""
        model = self.models[0]
        staleness = update.staleness
        return mix_by_staleness(model, update, 0, staleness, self.parameters)


def mix_by_staleness(
    model: Model, update: Update, cluster: int, staleness: int, options: FedAsyncParameters
) -> Outcome:
    """Mix an update into the model of a cluster: w ← (1 − α_τ) w + α_τ w_i."""
    alpha = options.alpha_of(staleness)
    model.mix(update.vector, alpha)
    return Outcome(cluster=cluster, staleness=staleness, weight=alpha)
