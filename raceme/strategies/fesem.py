"""FeSEM: K centres, and every client belongs to the one nearest to its own model.

Xie et al., "Multi-Center Federated Learning", 2020, as the baseline of FlexCFL's paper describes
it: expectation maximisation over l2 distances between local models and centres, rounds with simple
means, centres that start at random clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import kmeans_plusplus

from raceme.core.clusters import parts_of
from raceme.core.options import option
from raceme.core.requests import Outcome, Update
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, average_by_cluster


@dataclass(frozen=True)
class FeSEMParameters(RoundsParameters):
    """Hyper-parameters of FeSEM."""

    k: int = option(4, "K: number of centres", low=1)
    start: str = option(
        "random",
        "first centres: random clients, or k-means++ among them (our addition)",
        among=("random", "k-means++"),
    )


class FeSEM(Method):
    """K centres; each client goes to the one nearest to its model in l2 distance (FeSEM).

    Cluster 0 holds the initial model until the first round is over; then there are the K centres.
    """

    parameters_type = FeSEMParameters
    parameters: FeSEMParameters

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Let every client go to its nearest centre (E), then move the centres (M)."""
        vectors = np.stack([self.compared(update.vector) for update in updates])
        if 0 in self.models:
            self._found_centres(updates, vectors)
        else:
            centres = np.stack([self.compared(model.vector) for model in self.models.values()])
            labels, names = nearest_centre(vectors, centres), list(self.models)
            for update, label in zip(updates, labels, strict=True):
                self.clusters.assign(update.task.client, names[label])
        return average_by_cluster(self.clusters, updates, by_examples=False)

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
        # Clients that took no part have no centre yet: the split places only those it names.
        self.clusters.split(0, parts_of([update.task.client for update in updates], labels))


def nearest_centre(vectors: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return for each model the index of the centre at the least l2 distance.

    Parameters
    ----------
    vectors, centres : NDArray[np.float32]
        Shapes (m, d) and (k, d).
    """
    distances = [np.linalg.norm(vectors - centre, axis=1) for centre in centres]
    return np.asarray(np.argmin(np.stack(distances), axis=0), np.int64)
