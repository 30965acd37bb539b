"""CA2FL: a buffer whose mean is corrected by every client's last update.

Wang et al., "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", ICLR 2024. As in FedBuff the server collects M updates before it takes a step. It also
keeps h_i, the last update of each client, 0 at the start, and their mean h over all N clients. An
update counts by how it differs from the client's former one, and the mean of those of the clients
that are absent stands in for them: ``v = h + 1/M Σ (Δ_i − h_i)``, ``w ← w + η_g v``, as SAGA does.

The cache takes N · |w| numbers. h is that from before the buffer. Of a client that reports twice in
one buffer the second residual is taken from its first update. The paper's own M and η_g are not
confirmed: they are 10 (of 100 clients) and 1, those of third parties. With η_g = 1 the cache's term
may grow until nothing is learnt; take less then. Clients that went offline stay in the mean, and
those that have not reported yet count as 0 in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.contributions import contribution, only_weights, stepped
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import Vector
from raceme.server.method import Applied, Method
from raceme.server.replies import Update
from raceme.strategies.fedbuff import warn_of_short_run


@dataclass(frozen=True)
class CA2FLParameters:
    """Hyper-parameters; the defaults are third parties', those of the paper are not confirmed."""

    m: int = option(10, "M: updates per server step", low=1)
    server_lr: float = option(1.0, "server learning rate η_g", above=0)


@dataclass
class CA2FLState:
    """The cache, and what has been collected for the next step.

    Attributes
    ----------
    latest : dict[str, Vector]
        h_i: last update of each client that has reported, its weights only. Shape (d,).
    latest_total : NDArray[np.float64]
        Σ h_i now. Shape (d,).
    mean : NDArray[np.float64]
        h: mean over all clients, from before the buffer. Shape (d,).
    residuals : NDArray[np.float64]
        D: sum of Δ_i − h_i over the buffer; of statistics the sum of what clients have. Shape (d,).
    count : int
        How many updates are in the buffer.
    """

    latest_total: NDArray[np.float64]
    mean: NDArray[np.float64]
    residuals: NDArray[np.float64]
    latest: dict[str, Vector] = field(default_factory=dict)
    count: int = 0


class CA2FL(Method):
    """FedBuff with a cache of every client's last update, which corrects the mean (CA2FL)."""

    parameters_type = CA2FLParameters
    state_type = CA2FLState
    keeps_bases = True
    state: CA2FLState
    parameters: CA2FLParameters

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model, with an empty cache and nothing collected."""
        warn_of_short_run("CA2FL", "m", self.parameters.m, self.planned_updates)
        self.clusters = Clusters({0: Model(vector)})
        zeros = np.zeros(len(vector))
        self.state = CA2FLState(zeros, zeros.copy(), zeros.copy())

    def on_update(self, update: Update) -> Applied:
        """Collect the residual, overwrite the cache; with M of them, take the server step."""
        state, options, client = self.state, self.parameters, update.task.client
        staleness = self.models[0].version - update.task.version
        brought = contribution(self.delta(update), update.vector, self.trainable)
        change = only_weights(brought, self.trainable).astype(np.float64)
        state.residuals += brought
        if client in state.latest:
            state.residuals -= state.latest[client]
            change -= state.latest[client]
        state.latest[client] = only_weights(brought, self.trainable)
        state.latest_total += change
        state.count += 1
        if state.count == options.m:
            self._step()
        return Applied(cluster=0, staleness=staleness, weight=options.server_lr / options.m)

    def _step(self) -> None:
        """Take the step along v = h + D/M, and let h be the mean over all clients of now."""
        state, model = self.state, self.models[0]
        mean = state.residuals / state.count
        step = self.parameters.server_lr * (state.mean + mean)
        state.mean = state.latest_total / len(self.clusters.members)
        state.residuals, state.count = np.zeros_like(mean), 0
        model.replace(stepped(model.vector, step, mean, self.trainable))
