"""Hierarchy: clusters with a shared parent model, as a newcomer writes it from the docs.

Every update goes into the parent and into its client's cluster; a client is served their weighted
mean. A client's first update founds a cluster, unless its direction is that of an existing one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raceme.core.clusters import Clusters, Model, cosine
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Update
from raceme.core.strategy import Method, Needs

PARENT = 0


@dataclass(frozen=True)
class HierarchyParameters:
    """Hyper-parameters."""

    share: float = option(0.3, "share of the parent in the model that a client gets", low=0, high=1)
    alpha: float = option(0.5, "share of an update in a cluster's model", above=0, high=1)
    near: float = option(0.5, "cosine from which two directions are the same", low=-1, high=1)


@dataclass
class HierarchyState:
    """The direction of the update that founded each cluster."""

    directions: dict[int, Vector] = field(default_factory=dict)


class Hierarchy(Method):
    """Clusters with a shared parent model, asynchronously (an example)."""

    parameters_type = HierarchyParameters
    state_type = HierarchyState
    needs = Needs(bases=True)
    parameters: HierarchyParameters
    state: HierarchyState

    def initialize(self, vector: Vector) -> None:
        """Start with the parent only."""
        self.clusters = Clusters({PARENT: Model(vector)})
        self.state = HierarchyState()

    def on_update(self, update: Update) -> Outcome:
        """Place the client if it is new, then mix its model into its cluster and the parent."""
        client = update.task.client
        if set(self.clusters.of(client)) == {PARENT}:
            self.place(client, update)
        cluster = next(k for k in self.clusters.of(client) if k != PARENT)
        staleness = update.staleness
        self.models[cluster].mix(update.vector, self.parameters.alpha)
        self.models[PARENT].mix(update.vector, self.parameters.alpha / (1 + staleness))
        return Outcome(cluster=cluster, staleness=staleness, weight=self.parameters.alpha)

    def place(self, client: str, update: Update) -> None:
        """Move a client under the cluster of its direction, or under a new one."""
        direction = self.compared(update.delta)
        known = self.state.directions
        near = {k: cosine(direction, other) for k, other in known.items()}
        best = max(near, key=lambda k: near[k], default=PARENT)
        if best == PARENT or near[best] < self.parameters.near:
            best = self.clusters.found(Model(np.array(self.models[PARENT].vector)))
            known[best] = direction
        share = self.parameters.share
        self.clusters.assign(client, {best: 1 - share, PARENT: share} if share else best)
