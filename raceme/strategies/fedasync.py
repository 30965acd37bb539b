"""FedAsync: one global model, each update weighted by its staleness.

Xie et al., "Asynchronous Federated Optimization", 2019: w ← (1 − α_τ) w + α_τ w_i with
α_τ = α · s(τ), Algorithm 1 and section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import option
from raceme.core.requests import Outcome, Update
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import StalenessParameters


@dataclass(frozen=True)
class FedAsyncParameters(StalenessParameters):
    """How an update is weighted; the defaults are those of the baselines in CASA's paper."""

    alpha: float = option(0.3, "share α of a fresh update", above=0, high=1)


class FedAsync(Method):
    """Single model, mixed with every update at arrival by a staleness-dependent weight."""

    parameters_type = FedAsyncParameters
    needs = Needs(one_model=True)
    parameters: FedAsyncParameters

    def on_update(self, update: Update) -> Outcome:
        """Mix the update in: w ← (1 − α_τ) w + α_τ w_i."""
        return mix_by_staleness(self, update, 0, update.staleness)


def mix_by_staleness(method: Method, update: Update, cluster: int, staleness: int) -> Outcome:
    """Mix an update into the model of a cluster: w ← (1 − α_τ) w + α_τ w_i.

    Parameters
    ----------
    method : Method
        One whose parameters are :class:`FedAsyncParameters`.
    cluster : int
        The cluster whose model changes.
    staleness : int
        τ: updates applied to the model since the client received it.
    """
    alpha = method.parameters.alpha * method.parameters.decay_of(staleness)
    method.models[cluster].mix(update.vector, alpha)
    return Outcome(cluster, staleness, weight=alpha)
