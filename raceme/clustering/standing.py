"""Some clients that stand for many, where there are too many to compare all with all.

They are drawn at random; the others go where those are that they are nearest to, by the mean
distance from each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.probes import Probes

Labels = NDArray[np.int64]
Rows = NDArray[np.intp]

_EXAMPLES = 100
"""Members of a cluster that stand for it when a single client is placed."""
_FEWEST = 8
"""Members of each cluster that are looked at, however small it is."""


def some(rows: Rows, most: int, rng: np.random.Generator) -> Rows:
    """Return so many of some indices, drawn at random, in order; all if there are no more."""
    if len(rows) <= most:
        return rows
    return np.sort(rng.choice(rows, most, replace=False))


def shown(now: Labels, most: int, rng: np.random.Generator) -> Rows:
    """Return which clients stand for all: some of each cluster, too; all if there are no more.

    Parameters
    ----------
    now : Labels
        The cluster of each client. Shape (m,).
    most : int
        How many stand for all; 0: all.
    rng : numpy.random.Generator
        Draws them.
    """
    rows = np.arange(len(now))
    if not most or len(rows) <= most:
        return rows
    drawn = [some(rows, most, rng)]
    drawn += [some(np.flatnonzero(now == k), _FEWEST, rng) for k in np.unique(now)]
    return np.unique(np.concatenate(drawn))


def spread(probes: Probes, clients: list[str], standing: list[str], labels: Labels) -> Labels:
    """Return the groups of all clients: of those that do not stand for others, the nearest one.

    Parameters
    ----------
    probes : Probes
        What is known of them.
    clients : list[str]
        Clear ones.
    standing : list[str]
        Those of them that stand for all, in the same order.
    labels : Labels
        Their groups, from 0.
    """
    if len(standing) == len(clients):
        return labels
    groups = [
        [client for client, label in zip(standing, labels, strict=True) if label == group]
        for group in range(int(labels.max()) + 1)
    ]
    found = probes.distances_to_groups(clients, groups).argmin(axis=1).tolist()
    known = dict(zip(standing, labels.tolist(), strict=True))
    return np.array([known.get(c, g) for c, g in zip(clients, found, strict=True)], np.int64)


@dataclass
class Examples:
    """Members that stand for their clusters, drawn once for each set of clusters.

    Attributes
    ----------
    of : dict[int, list[str]]
        Those of each cluster.
    """

    of: dict[int, list[str]] = field(default_factory=dict)

    def forget(self) -> None:
        """Draw others next time: clients were moved."""
        self.of = {}

    def seen_from(
        self,
        client: str,
        probes: Probes,
        clusters: Clusters,
        clear: Callable[[], Iterable[str]],
        rng: np.random.Generator,
    ) -> tuple[Labels, Labels, NDArray[np.float64]]:
        """Return clusters, and how far others are from a client: in a large fleet, those drawn.

        Parameters
        ----------
        client : str
            One with a probe at least.
        probes, clusters : Probes, Clusters
            What is known, and who is where.
        clear : Callable
            Returns the clear clients that are online.
        rng : numpy.random.Generator
            Draws who stands for a cluster.

        Returns
        -------
        tuple[Labels, Labels, NDArray[np.float64]]
            Clusters that have a clear client beside this one, shape (k,); and of each client that
            is compared, in a large fleet of each cluster's mean, the index of the cluster and the
            distance, shapes (m,).
        """
        if not probes.is_large:
            others = [other for other in clear() if other != client]
            own, labels = np.unique([clusters.main(c) for c in others], return_inverse=True)
            return own, labels, probes.distances_from(client, others) if others else np.empty(0)
        if self.of.keys() != clusters.models.keys():
            self._draw(clusters.models, clusters, clear, rng)

        def usable(k: int) -> list[str]:
            others = (c for c in self.of[k] if c != client)
            return [c for c in others if clusters.online[c] and probes.is_clear(c)]

        groups = {k: usable(k) for k in self.of}
        # All that were drawn may have gone, while others of their cluster are there.
        home = clusters.main(client) if clusters.is_placed(client) else None
        gone = [k for k, own in groups.items() if not own and clusters.size(k) > (k == home)]
        if gone:
            self._draw(gone, clusters, clear, rng)
            groups |= {k: usable(k) for k in gone}
        known = [k for k, group in groups.items() if group]
        if not known:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        found = probes.distances_to_groups([client], [groups[k] for k in known])
        return np.array(known, np.int64), np.arange(len(known)), found[0]

    def _draw(
        self,
        which: Iterable[int],
        clusters: Clusters,
        clear: Callable[[], Iterable[str]],
        rng: np.random.Generator,
    ) -> None:
        """Draw those who stand for some clusters among the clear clients that are online."""
        names = list(clear())
        homes = np.array([clusters.main(name) for name in names], np.int64)
        drawn = {
            k: [names[i] for i in some(np.flatnonzero(homes == k), _EXAMPLES, rng)] for k in which
        }
        self.of = {k: drawn.get(k, self.of.get(k, [])) for k in clusters.models}
