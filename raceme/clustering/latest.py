"""The latest model of every member, so that none counts for more by reporting more often.

As SAGA, and in federated learning CA2FL (Wang et al., ICLR 2024) and ACE (2025), remember each
client's last contribution; here per cluster, and models instead of changes.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import numpy as np

from raceme.compat.spill import Shelf
from raceme.protocol.messages import Vector


@dataclass
class Latest:
    """Latest models, and their sum over each cluster.

    Attributes
    ----------
    models : MutableMapping[str, Vector]
        z_i of each client that has one. Shape (d,).
    homes : dict[str, int]
        The cluster that it counts in; a client that is in none is left out.
    totals : dict[int, Vector]
        Σ z_i over the clients that count in a cluster. Shape (d,).
    counts : dict[int, int]
        How many that are.
    """

    models: MutableMapping[str, Vector] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    totals: dict[int, Vector] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One of every client is too much for the memory of a large fleet.
        self.models = Shelf(self.models)

    def mean(self, cluster: int) -> Vector:
        """Return z̄ of a cluster that somebody has a model in. Shape (d,)."""
        return np.asarray(self.totals[cluster] / np.float32(self.counts[cluster]))

    def counts_in(self, client: str, cluster: int) -> bool:
        """Return whether a client has a model that counts in a cluster."""
        return self.homes.get(client) == cluster

    def renew(self, client: str, cluster: int, vector: Vector) -> None:
        """Remember a member's latest model in place of its former one."""
        self.withdraw(client)
        self.models[client] = vector
        self._add(client, cluster)

    def withdraw(self, client: str) -> None:
        """Forget a client's latest model: it goes elsewhere, or has gone."""
        vector = self.models.pop(client, None)
        home = self.homes.pop(client, None)
        if vector is not None and home in self.totals:
            self.totals[home] -= vector
            self.counts[home] -= 1

    def recount(self, home: Callable[[str], int | None]) -> None:
        """Add all up anew where clients are now; who is nowhere is left out."""
        self.homes, self.totals, self.counts = {}, {}, {}
        for client in self.models:
            cluster = home(client)
            if cluster is not None:
                self._add(client, cluster)

    def drop(self, cluster: int) -> None:
        """Forget a cluster that nobody is left in."""
        self.totals.pop(cluster, None)
        self.counts.pop(cluster, None)

    def _add(self, client: str, cluster: int) -> None:
        vector = self.models[client]
        if cluster not in self.totals:
            self.totals[cluster], self.counts[cluster] = np.zeros_like(vector), 0
        self.homes[client] = cluster
        self.totals[cluster] += vector
        self.counts[cluster] += 1
