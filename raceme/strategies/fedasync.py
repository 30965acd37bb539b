"""FedAsync: one global model, each update weighted by its staleness.

Xie et al., "Asynchronous Federated Optimization", 2019: w ← (1 − α_τ) w + α_τ w_i with
α_τ = α · s(τ), Algorithm 1 and section 5.2. There a client adds ρ/2 ‖w_i − w‖² to its loss
(``rho``), and a fresh update has τ = 1 (``first-staleness=1``); the defaults are those of the
baselines in CASA's paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.messages import PROXIMAL_MU
from raceme.core.options import option
from raceme.core.requests import Outcome, Request, Update
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import StalenessParameters


@dataclass(frozen=True)
class MixingParameters(StalenessParameters):
    """Weighting of an update; the defaults are those of the baselines in CASA's paper."""

    alpha: float = option(0.3, "share α of a fresh update", above=0, high=1)


@dataclass(frozen=True)
class FedAsyncParameters(MixingParameters):
    """Hyper-parameters of FedAsync."""

    rho: float = option(0.0, "ρ: strength of a client's pull towards the received model", low=0)
    first_staleness: int = option(
        0, "τ of a fresh update; the paper's Algorithm 1 has 1", low=0, high=1
    )


class FedAsync(Method):
    """Single model, mixed with every update at arrival by a staleness-dependent weight."""

    parameters_type = FedAsyncParameters
    needs = Needs(one_model=True, sums=True)
    parameters: FedAsyncParameters

    def request_for(self, client: str) -> Request:
        """Return training of the model, with the proximal term if there is one."""
        rho = self.parameters.rho
        return Request(client, settings={PROXIMAL_MU: rho} if rho else {})

    def on_update(self, update: Update) -> Outcome:
        """Mix the update in: w ← (1 − α_τ) w + α_τ w_i."""
        alpha = self.parameters.alpha * self.parameters.decay_of(
            update.staleness + self.parameters.first_staleness
        )
        self.models[0].mix(update.vector, alpha)
        return Outcome(0, update.staleness, weight=alpha)


def mix_by_staleness(method: Method, update: Update, cluster: int, staleness: int) -> Outcome:
    """Mix an update into the model of a cluster: w ← (1 − α_τ) w + α_τ w_i.

    Parameters
    ----------
    method : Method
        One whose parameters are :class:`MixingParameters`.
    cluster : int
        The cluster whose model changes.
    staleness : int
        τ: updates applied to the model since the client received it.
    """
    alpha = method.parameters.alpha * method.parameters.decay_of(staleness)
    method.models[cluster].mix(update.vector, alpha)
    return Outcome(cluster, staleness, weight=alpha)
