"""Clusters by what clients say of their data once: the mean input of each class."""

from dataclasses import dataclass, field

import numpy as np

from raceme.core.clusters import Model
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Answer, Outcome, Request, Update
from raceme.core.strategy import Method, Needs

KIND = "my_client:mean_inputs"
FAR = MeasureSchema(
    "far", "distance to the nearest cluster", ("client", "far"), summary="max", figure="points"
)


@dataclass(frozen=True)
class ByMeansParameters:
    """Each is a key, `by-means.apart`."""

    apart: float = option(0.5, "relative distance above which a client founds a cluster", above=0)
    alpha: float = option(0.5, "share of an update in the cluster's model", above=0, high=1)


@dataclass
class ByMeansState:
    """Means of the first client of each cluster, clients that have answered, the first model."""

    start: Vector | None = None
    means: dict[int, Vector] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


class ByMeans(Method):
    """One query per client, then clustered FedAsync (an example)."""

    needs = Needs(kinds=frozenset({KIND}))
    parameters_type = ByMeansParameters
    state_type = ByMeansState

    def initialize(self, vector: Vector) -> None:
        """Keep the model that every cluster starts from."""
        super().initialize(vector)
        self.state.start = vector.copy()

    def request_for(self, client: str) -> Request:
        """Ask a client for its means before it trains for the first time."""
        if client not in self.state.known:
            return Request(client, kind=KIND, models=())
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        """Put the client into the cluster whose means are nearest, or into one of its own."""
        client, own = answer.task.client, answer.numbers["mean-inputs"].ravel()
        self.state.known.add(client)
        means = self.state.means or {0: own}
        apart = {k: np.linalg.norm(own - mean) / np.linalg.norm(own) for k, mean in means.items()}
        cluster = min(apart, key=apart.__getitem__)
        values = {"client": client, "far": float(apart[cluster])}
        self.report(Measured(self.now(), self.progress.updates, FAR, values))
        if apart[cluster] <= self.parameters.apart:
            self.clusters.assign(client, cluster)
        else:
            cluster = self.clusters.found(Model(self.state.start.copy()), [client])
        self.state.means = {cluster: own, **means}

    def on_update(self, update: Update) -> Outcome:
        """Mix the update into the model of the client's cluster."""
        cluster = self.clusters.main(update.task.client)
        weight = self.parameters.alpha / (1 + update.staleness)
        self.models[cluster].mix(update.vector, weight)
        return Outcome(cluster, update.staleness, weight)
