"""IFCA: K models, and every client trains the one that fits its data best.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1
with model averaging: each participant receives all K models, takes the one with the least loss on
its training data, trains it and returns it with its index; the server averages per model.
IFCA-Async, as in CASA's paper, does the same on every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raceme.messages import COMPUTE_SCALE, ModelSpec, Vector
from raceme.options import option
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.clusters import Clustered, Clusters
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update
from raceme.strategies.rounds import Rounds, RoundsParameters


@dataclass(frozen=True)
class _Choice:
    """What IFCA and IFCA-Async can be told in common."""

    k: int = option(4, "K: number of models", low=1)
    choosing_cost: float = option(
        0.0, "share of a round's computing that testing one model takes (our addition)", low=0
    )


@dataclass(frozen=True)
class IFCAParameters(_Choice, RoundsParameters):
    """Hyper-parameters of IFCA."""

    by_examples: bool = option(False, "weigh models by their examples (the paper: all alike)")


@dataclass(frozen=True)
class IFCAAsyncParameters(_Choice, FedAsyncParameters):
    """Hyper-parameters of IFCA-Async."""


@dataclass
class IFCAState:
    """The K models, and which of them each client has chosen last."""

    clusters: Clusters


class _IFCA(Clustered):
    """What IFCA and IFCA-Async share: K models, all of which every client receives.

    A client is tested with the model that it chose last; before its first choice with the one that
    most others have chosen, at the start the first.
    """

    state_type = IFCAState
    state: IFCAState
    parameters: IFCAParameters | IFCAAsyncParameters

    def initialize(self, vector: Vector) -> None:
        """Start from K different models; the first is the initial model itself."""
        others = range(1, self.parameters.k)
        vectors = [vector, *(redrawn(vector, self.spec, self.rng) for _ in others)]
        models = {k: Model(start) for k, start in enumerate(vectors)}
        self.state = IFCAState(Clusters(models, next_cluster=len(models)))

    def models_for(self, client: str) -> tuple[int, ...]:
        """Everybody receives all models."""
        return tuple(self.models)

    def train_config(self, client: str) -> dict[str, float]:
        """Let the simulator charge for the choice, if it is to cost anything."""
        cost = self.parameters.choosing_cost * len(self.models)
        return {COMPUTE_SCALE: 1.0 + cost} if cost else {}


class IFCA(_IFCA, Rounds):
    """K models; each client trains the one with the least loss on its data, in rounds (IFCA)."""

    parameters_type = IFCAParameters
    parameters: IFCAParameters

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average the models that were trained from the same one."""
        for update in updates:
            self._assign(update.task.client, update.task.cluster)
        return self._average(updates, by_examples=self.parameters.by_examples)


class IFCAAsync(_IFCA, AsyncStrategy):
    """IFCA on every single update: mixed by staleness into the model that the client chose."""

    parameters_type = IFCAAsyncParameters
    parameters: IFCAAsyncParameters

    def on_update(self, update: Update) -> Applied:
        """Mix the update into the chosen model."""
        chosen = update.task.cluster
        self._assign(update.task.client, chosen)
        staleness = self._tau(update, has_moved=False)
        return mix_by_staleness(self.models[chosen], update, chosen, staleness, self.parameters)


def redrawn(vector: Vector, spec: ModelSpec | None, rng: np.random.Generator) -> Vector:
    """Return another initial model: that one's numbers, shuffled inside each array.

    Our reading of "different initialisations": a server that knows no network gets so, layer by
    layer, another draw from the same distribution.
    """
    drawn = vector.copy()
    arrays = [drawn] if spec is None else spec.views(drawn).values()
    for values in arrays:
        flat = values.reshape(-1)
        flat[...] = rng.permutation(flat)
    return drawn
