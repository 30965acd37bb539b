"""What a cluster's model was lately, on average: steadier than what it happens to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.model import Model
from raceme.protocol.messages import Vector


@dataclass
class Tail:
    """The average of a model's latest versions.

    Attributes
    ----------
    model : Model
        w̄.
    count : int
        Versions since it was begun.
    """

    model: Model
    count: int = 1


@dataclass
class Averages:
    """Averages of the latest versions of each cluster's model, for those who use it.

    A single version leans towards the clients that reported last. The mean of the last tenth of
    all versions does not, and is hardly behind (suffix averaging: Rakhlin et al., ICML 2012).

    Attributes
    ----------
    tails : dict[int, Tail]
        By cluster.
    """

    tails: dict[int, Tail] = field(default_factory=dict)

    def take(self, cluster: int, vector: Vector, share: float, members: int) -> None:
        """Take a new version in: w̄ ← w̄ + (w − w̄) / max(1, min(share · n, m)).

        Parameters
        ----------
        cluster : int
            Whose model it is.
        vector : Vector
            w. Shape (d,).
        share : float
            How much of the n versions so far is averaged over, about; 0: nothing is.
        members : int
            m: members of the cluster. An average over one update of each leans on none of them, and
            a longer one is of an older model.
        """
        tail = self.tails.get(cluster)
        if tail is not None:
            tail.count += 1
            tail.model.mix(vector, 1.0 / max(1.0, min(share * tail.count, members)))
        elif share:
            self.tails[cluster] = Tail(Model(vector.copy()))

    def restart(self, *clusters: int | None) -> None:
        """Begin anew: these have other members than before, or are no more."""
        for cluster in clusters:
            if cluster is not None:
                self.tails.pop(cluster, None)

    def instead_of(
        self, models: Mapping[int, Model], counters: NDArray[np.bool_] | None
    ) -> Mapping[int, Model]:
        """Return each cluster's average, or its model where there is none.

        Parameters
        ----------
        models : Mapping[int, Model]
            The models by cluster.
        counters : NDArray[np.bool_], optional
            Numbers of a model of which a mean has no meaning, shape (d,): they are the model's.
        """
        shown = {}
        for cluster, model in models.items():
            shown[cluster] = tail.model if (tail := self.tails.get(cluster)) else model
            if counters is not None and tail:
                tail.model.copy_from(model.vector, counters)
        return shown
