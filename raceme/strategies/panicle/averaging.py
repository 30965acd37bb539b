"""What a cluster's model was lately, on average: steadier than what it happens to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Model
from raceme.core.messages import Vector
from raceme.flower.messages import Shelf
from raceme.strategies.shared import cluster_decay


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
class ModelAverages:
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


# -----------------------------------------------------------------------------
# The latest model of every member, so that none counts for more by reporting more often.
#
# As SAGA, and in federated learning CA2FL (Wang et al., ICLR 2024) and ACE (2025), remember each
# client's last contribution; here per cluster, and models instead of changes.
# -----------------------------------------------------------------------------


@dataclass
class ClientMemory:
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


# -----------------------------------------------------------------------------
# How far one update moves a cluster's model.
# -----------------------------------------------------------------------------


_UNDER_WAY = 7.5
"""Largest product of share, members and what is carried that was seen to be steady."""


def share_of(members: int, rounds: float, alpha0: float, ease: float) -> float:
    """Return the share α of an update: CASA's at first, that of one of the members in the end.

    ``max(1 / m, min(1, α0 / log2(m + 3)) / (1 + rounds / ease))``: a young cluster moves fast, and
    one that has learnt for long is a mean over all its members.

    Parameters
    ----------
    members : int
        m, at least 1.
    rounds : float
        Updates per member that the cluster has learnt from.
    alpha0 : float
        α0 of :func:`raceme.strategies.shared.cluster_decay`.
    ease : float
        Rounds after which the first share has halved.
    """
    first = min(1.0, cluster_decay(members, 1.0, alpha0))
    return max(1.0 / max(1, members), first / (1.0 + rounds / ease))


def freshness(staleness: int, members: int, power: float) -> float:
    """Return by what an update's share is less because it is stale: ``max(1, s / m) ** -power``.

    Of members that are equally fast each is overtaken by the m - 1 others: that is no staleness
    yet. Who takes five times as long is overtaken five times by all, and its model, mixed in with
    a whole share, would take the others back to where they were then.

    Parameters
    ----------
    staleness : int
        s: updates since the client was given its model, by all whose updates are counted.
    members : int
        m: how many these are.
    power : float
        0: staleness does not matter.
    """
    return float(max(1.0, staleness / max(1, members)) ** -power)


def calibration(alpha: float, members: int) -> float:
    """Return how much of a client's former change is taken back: 1 where α is one member's share.

    With a larger share the model moves on so far before a member reports again that its former
    change says less: 1 / (α m).
    """
    return min(1.0, 1.0 / (alpha * max(1, members)))


def carried(alpha: float, members: int, most: float) -> float:
    """Return how much of what the model has moved meanwhile is added to a member's model.

    0 mixes models in, which takes the model back towards where the member started; 1 adds changes,
    which overshoots where many members are under way at a time: at most 7.5 / (α m).

    Parameters
    ----------
    alpha : float
        α: the update's share.
    members : int
        m: members of its cluster, all of whom may be under way.
    most : float
        Share at most.
    """
    return min(most, _UNDER_WAY / (alpha * max(1, members)))


def cut(vector: Vector, delta: Vector, length: float, bound: float) -> Vector:
    """Return a client's model with its change cut to a length, if that is longer. Shape (d,).

    Parameters
    ----------
    vector, delta : Vector
        z, and z − w₀. Shape (d,).
    length : float
        ‖z − w₀‖, of its weights.
    bound : float
        Length at most; 0: any.
    """
    if not 0.0 < bound < length:
        return vector
    return np.asarray(vector - np.float32(1.0 - bound / length) * delta)
