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

from raceme.core.clusters import Clusters, Model
from raceme.core.files import check_room
from raceme.core.messages import COMPUTE_SCALE, TRAIN, TRAIN_BEST, ModelSpec, Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Request, Update
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness


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


class ChoosesModel(Method):
    """What IFCA does in rounds, and IFCA-Async on every update."""

    parameters: _Choice

    @property
    def needs(self) -> Needs:
        """What a run of the method has to have."""
        return Needs(kinds=frozenset({TRAIN_BEST} if self.parameters.k > 1 else ()))

    def initialize(self, vector: Vector) -> None:
        """Start from K different models."""
        self.clusters = different_models(vector, self.parameters.k, self._spec, self.rng)
        self.state = self.state_type()

    def request_for(self, client: str) -> Request:
        """Let a client choose among all models, and train the one that it has chosen.

        All models are sent; the simulator charges for the choice, if it is to cost.
        """
        models = tuple(self.models)
        cost = self.parameters.choosing_cost * len(models)
        settings = {COMPUTE_SCALE: 1.0 + cost} if cost else {}
        return Request(client, TRAIN_BEST if len(models) > 1 else TRAIN, models, settings=settings)


class IFCA(ChoosesModel):
    """K models; each client trains the one with the least loss on its data, in rounds (IFCA).

    A client is tested with the model that it chose last; before its first choice with the one that
    most others have chosen, at the start the first.
    """

    parameters_type = IFCAParameters
    parameters: IFCAParameters

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Average the models that were trained from the same one."""
        for update in updates:
            self.clusters.assign(update.task.client, update.task.cluster)
        return average_by_cluster(self.clusters, updates, self.parameters.by_examples)


class IFCAAsync(ChoosesModel):
    """IFCA on every single update: mixed by staleness into the model that the client chose."""

    parameters_type = IFCAAsyncParameters
    parameters: IFCAAsyncParameters

    def on_update(self, update: Update) -> Outcome:
        """Mix the update into the chosen model."""
        chosen = update.task.cluster
        self.clusters.assign(update.task.client, chosen)
        return mix_by_staleness(self, update, chosen, update.staleness)


def different_models(
    vector: Vector, k: int, spec: ModelSpec | None, rng: np.random.Generator
) -> Clusters:
    """Return K clusters with different models; the first is the initial model itself."""
    check_room(k * vector.nbytes, f"{k:,} models of {vector.size:,} weights")
    vectors = [vector, *(redrawn(vector, spec, rng) for _ in range(1, k))]
    return Clusters({cluster: Model(start) for cluster, start in enumerate(vectors)})


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
