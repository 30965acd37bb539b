"""Standalone: every client trains its own model and nothing is exchanged.

The lower reference of the papers: what a device achieves with its own data alone. Time passes as
for the other methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.messages import Vector
from raceme.core.requests import Outcome, Update
from raceme.core.strategy import Method, Needs


@dataclass(frozen=True)
class StandaloneParameters:
    """There is nothing to choose."""


@dataclass
class StandaloneState:
    """Where every client starts.

    Attributes
    ----------
    initial : Vector
        The initial model. Shape (d,).
    """

    initial: Vector


class Standalone(Method):
    """Local training only: one model per client, the lower reference."""

    parameters_type = StandaloneParameters
    state_type = StandaloneState
    needs = Needs(pretrained=True, exchange=False)
    state: StandaloneState

    def initialize(self, vector: Vector) -> None:
        """Keep the initial model for every client to come; of pre-trained ones their mean."""
        self.clusters = Clusters()
        mean = np.mean(self.starts, axis=0, dtype=np.float64) if self.starts else vector
        self.state = StandaloneState(np.asarray(mean, np.float32))

    def on_join(self, client: Client) -> None:
        """Give a new client a cluster of its own, with a copy of the initial model."""
        if client.client_id not in self.clusters.members:
            self.clusters.found(Model(self.state.initial.copy()), [client.client_id])
        self.clusters.join(client.client_id)

    def on_update(self, update: Update) -> Outcome:
        """Replace the client's model by what it trained."""
        cluster = self.clusters.main(update.task.client)
        self.models[cluster].replace(update.vector)
        return Outcome(cluster=cluster, staleness=0, weight=1.0)
