"""A method similar to CDFL: clients request work, and belong to several clusters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import softmax

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.messages import Vector
from raceme.core.requests import Outcome, Update
from raceme.core.schedulers import OnRequest, RequestParameters
from raceme.core.scheduling import Scheduler
from raceme.core.strategy import Method

K, SHARPNESS, MIXED = 3, 12.0, 0.2


@dataclass
class SoftState:
    """The epoch of each cluster's last update."""

    renewed: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(K), 0))


class SoftClusters(Method):
    """Serves each client a mixture of K models, and mixes its update into its clusters."""

    state_type = SoftState
    state: SoftState

    def scheduler(self) -> Scheduler:
        return OnRequest(RequestParameters(request_seconds=2.0))

    def initialize(self, vector: Vector) -> None:
        starts = [vector + 0.1 * np.eye(K, len(vector))[k].astype(np.float32) for k in range(K)]
        self.clusters = Clusters({k: Model(start) for k, start in enumerate(starts)})
        self.state = SoftState()

    def on_join(self, client: Client) -> None:
        super().on_join(client)
        if not self.clusters.is_placed(client.client_id):
            self.clusters.assign(client.client_id, dict.fromkeys(range(K), 1 / K))

    def on_update(self, update: Update) -> Outcome:
        client, epoch, applied = update.task.client, self.progress.updates + 1, 0.0
        losses = np.array([self.probe([update.vector], k).mean() for k in self.models])
        alphas = softmax(SHARPNESS * (1 - losses / losses.sum()) / (K - 1))
        self.clusters.assign(client, {k: float(alpha) for k, alpha in enumerate(alphas)})
        staleness = epoch - 1 - update.task.updates
        for k in np.flatnonzero(alphas >= 1 / K) if staleness <= len(self.clusters.members) else ():
            age = max(0, self.state.renewed[int(k)] - update.task.updates - 5)
            share = MIXED * float(alphas[k] / alphas.max()) / (1 + 0.1 * age)
            self.models[int(k)].mix(update.vector, share)
            self.state.renewed[int(k)] = epoch
            applied = max(applied, share)
        return Outcome(self.clusters.main(client), staleness, applied)
