"""FeSEM: K centres, and every client belongs to the one nearest to its own model.

Xie et al., "Multi-Center Federated Learning", 2020, as the baseline of FlexCFL's paper describes
it: expectation maximisation over l2 distances between local models and centres, rounds with simple
means, centres that start at random clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import kmeans_plusplus

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.clusters import UNASSIGNED, Clustered, Clusters, parts_of
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update
from raceme.strategies.rounds import Rounds, RoundsParameters


@dataclass(frozen=True)
class FeSEMParameters(RoundsParameters):
    """Hyper-parameters of FeSEM."""

    k: int = option(4, "K: number of centres", low=1)
    start: str = option(
        "random",
        "first centres: random clients, or k-means++ among them (our addition)",
        among=("random", "k-means++"),
    )


@dataclass
class FeSEMState:
    """The centres and their clients.

    Attributes
    ----------
    clusters : Clusters
        Cluster 0 with the initial model until the first round is over, then the K centres.
    """

    clusters: Clusters


class FeSEM(Clustered, Rounds):
    """K centres; each client goes to the one nearest to its model in l2 distance (FeSEM)."""

    parameters_type = FeSEMParameters
    state_type = FeSEMState
    parameters: FeSEMParameters
    state: FeSEMState

    def initialize(self, vector: Vector) -> None:
        """All clients train the initial model first."""
        self.state = FeSEMState(Clusters({0: Model(vector)}))

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Let every client go to its nearest centre (E), then move the centres (M)."""
        vectors = np.stack([update.vector for update in updates])
        if 0 in self.models:
            self._found_centres(updates, vectors)
        else:
            labels = nearest_centre(vectors, np.stack([m.vector for m in self.models.values()]))
            names = list(self.models)
            for update, label in zip(updates, labels, strict=True):
                self._assign(update.task.client, names[label])
        return self._average(updates, by_examples=False)

    def _found_centres(self, updates: Sequence[Update], vectors: NDArray[np.float32]) -> None:
        """Make K clients' models the first centres; clients that took no part have none yet."""
        count = min(self.parameters.k, len(updates))
        if self.parameters.start == "random":
            chosen = self.rng.choice(len(updates), size=count, replace=False)
        else:
            seed = int(self.rng.integers(2**31))
            chosen = kmeans_plusplus(vectors, count, random_state=seed)[1]
        labels = nearest_centre(vectors, vectors[chosen])
        # A centre is its own nearest one, so that none is empty, unless two models are equal.
        labels[chosen] = np.arange(count)
        self._split(
            0, parts_of([u.task.client for u in updates], labels), gap=math.nan, threshold=math.nan
        )
        present = {update.task.client for update in updates}
        for client in self.state.clusters.of:
            if client not in present:
                self.state.clusters.of[client] = UNASSIGNED


def nearest_centre(vectors: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return for each model the index of the centre at the least l2 distance.

    Parameters
    ----------
    vectors, centres : NDArray[np.float32]
        Shapes (m, d) and (k, d).
    """
    distances = [np.linalg.norm(vectors - centre, axis=1) for centre in centres]
    return np.asarray(np.argmin(np.stack(distances), axis=0), np.int64)
