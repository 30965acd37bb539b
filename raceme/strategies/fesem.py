"""FeSEM: K centres, each client assigned to the one nearest to its model.

Xie et al., "Multi-Center Federated Learning", 2020, as the baseline of FlexCFL's paper (Duan et
al., TPDS 2022, section 5) and its authors' code have it: expectation maximisation over l2 distances
between local models and centres, in rounds. The centres start as K different initial models. Before
a client trains it is assigned to the centre nearest to its local model (E step), which is what it
trained last, and the initial model w0 before that; it trains the centre's model. A centre becomes
the simple mean of the models that its clients return (M step).

All clients begin with the same local model, so that they begin at the same centre, and those that
have trained are nearer to it than to an untrained one: FeSEM is often a single model, as the paper
reports. ``start=random`` and ``start=k-means++`` are another reading: the first round trains w0,
the centres start at the models of K of its clients, and a client is assigned after its training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import kmeans_plusplus

from raceme.core.clusters import parts_of
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Request, Update
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, average_by_cluster
from raceme.strategies.ifca import different_models


@dataclass(frozen=True)
class FeSEMParameters(RoundsParameters):
    """Hyper-parameters of FeSEM."""

    k: int = option(4, "K: number of centres", low=1)
    start: str = option(
        "models",
        "first centres: models: K different initial models (the paper); or the models of clients "
        "after a first round: random ones, or k-means++ among them (our addition)",
        among=("models", "random", "k-means++"),
    )


@dataclass
class FeSEMState:
    """State of FeSEM besides its centres, with ``start=models``.

    Attributes
    ----------
    initial : Vector
        w0: local model of a client before its training. Shape (d,).
    local : dict[str, Vector]
        w_i: the model that each client trained last. Shape (d,).
    """

    initial: Vector
    local: dict[str, Vector] = field(default_factory=dict)


class FeSEM(Method):
    """K-means over client models: each client joins the centre nearest in l2 distance (FeSEM).

    If the centres start at clients' models, cluster 0 has the initial model during the first round.
    """

    parameters_type = FeSEMParameters
    state_type = FeSEMState
    parameters: FeSEMParameters
    state: FeSEMState

    def initialize(self, vector: Vector) -> None:
        """Start from K different models, or from the initial one for the first round."""
        count = self.parameters.k if self._assigns_first else 1
        self.clusters = different_models(vector, count, self._spec, self.rng)
        self.state = FeSEMState(vector.copy())

    @property
    def _assigns_first(self) -> bool:
        """Whether a client is assigned before it trains, not after."""
        return self.parameters.start == "models"

    def request_for(self, client: str) -> Request:
        """Assign a client to the centre nearest to its local model (E), whose model it trains."""
        if self._assigns_first:
            local = self.compared(self.state.local.get(client, self.state.initial))
            self.clusters.assign(client, self._nearest(local[np.newaxis])[0])
        return Request(client)

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Update the centres (M); assign clients to the nearest ones if not done before."""
        if self._assigns_first:
            self.state.local.update({update.task.client: update.vector for update in updates})
            return average_by_cluster(self.clusters, updates, by_examples=False)
        vectors = np.stack([self.compared(update.vector) for update in updates])
        if 0 in self.models:
            self._found_centres(updates, vectors)
        else:
            for update, centre in zip(updates, self._nearest(vectors), strict=True):
                self.clusters.assign(update.task.client, centre)
        return average_by_cluster(self.clusters, updates, by_examples=False)

    def _nearest(self, vectors: NDArray[np.float32]) -> list[int]:
        """Return the cluster of the nearest centre for each model, by weights."""
        centres = np.stack([self.compared(model.vector) for model in self.models.values()])
        clusters = list(self.models)
        return [clusters[index] for index in nearest_centre(vectors, centres)]

    def _found_centres(self, updates: Sequence[Update], vectors: NDArray[np.float32]) -> None:
        """Use K clients' models as first centres; absent clients have none."""
        count = min(self.parameters.k, len(updates))
        if self.parameters.start == "random":
            chosen = self.rng.choice(len(updates), size=count, replace=False)
        else:
            seed = int(self.rng.integers(2**31))
            chosen = kmeans_plusplus(vectors, count, random_state=seed)[1]
        labels = nearest_centre(vectors, vectors[chosen])
        # Each centre is nearest to itself, so none is empty unless models are equal.
        labels[chosen] = np.arange(count)
        # The split places only named clients; absent ones have no centre.
        self.clusters.split(0, parts_of([update.task.client for update in updates], labels))


def nearest_centre(vectors: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the index of the nearest centre in l2 distance for each model.

    Parameters
    ----------
    vectors, centres : NDArray[np.float32]
        Shapes (m, d) and (k, d).
    """
    distances = [np.linalg.norm(vectors - centre, axis=1) for centre in centres]
    return np.asarray(np.argmin(np.stack(distances), axis=0), np.int64)
