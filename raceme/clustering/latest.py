"""The latest model of every member, so that none counts for more by reporting more often.

As SAGA, and in federated learning CA2FL (Wang et al., ICLR 2024) and ACE (2025), remember each
client's last contribution; here per cluster, and models instead of changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raceme.protocol.messages import Vector


@dataclass
class Latest:
    """Latest models, and their sum over each cluster.

    Attributes
    ----------
    models : dict[str, Vector]
        z_i of each client that has one. Shape (d,).
    totals : dict[int, Vector]
        Σ z_i over the clients of a cluster. Shape (d,).
    counts : dict[int, int]
        How many that are.
    """

    models: dict[str, Vector] = field(default_factory=dict)
    totals: dict[int, Vector] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def mean(self, cluster: int) -> Vector:
        """Return z̄ of a cluster that somebody has a model in. Shape (d,)."""
        return np.asarray(self.totals[cluster] / np.float32(self.counts[cluster]))

    def renew(self, client: str, cluster: int, vector: Vector) -> None:
        """Remember a member's latest model in place of its former one."""
        self.withdraw(client, cluster)
        self.models[client] = vector
        self._add(cluster, vector)

    def withdraw(self, client: str, cluster: int) -> None:
        """Forget a client's latest model: it goes elsewhere, or has gone."""
        vector = self.models.pop(client, None)
        # In the midst of a repair a new cluster has no total yet: all are counted anew after it.
        if vector is not None and cluster in self.totals:
            self.totals[cluster] -= vector
            self.counts[cluster] -= 1

    def recount(self, home: Callable[[str], int]) -> None:
        """Add all up anew: clusters have changed."""
        self.totals, self.counts = {}, {}
        for client, vector in self.models.items():
            self._add(home(client), vector)

    def drop(self, cluster: int) -> None:
        """Forget a cluster that nobody is left in."""
        self.totals.pop(cluster, None)
        self.counts.pop(cluster, None)

    def _add(self, cluster: int, vector: Vector) -> None:
        if cluster not in self.totals:
            self.totals[cluster], self.counts[cluster] = np.zeros_like(vector), 0
        self.totals[cluster] += vector
        self.counts[cluster] += 1
