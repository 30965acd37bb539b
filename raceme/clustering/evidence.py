"""How well clients fall into groups: a level, whatever their number.

Rousseeuw's silhouette (1987), for distances on an absolute scale, 0 of clients that are alike and 1
of unrelated ones (:mod:`raceme.clustering.probes`). Two things differ. It is divided by a floor at
least: groups whose members are all much alike are none, however well they are told apart. And a
client alone is as far from its own as `alone` says, so that groups of one can be judged, and fleets
of four.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from raceme.clustering.spectral import numbered

Distances = NDArray[np.float64]
Labels = NDArray[np.int64]

ALONE = 0.3
"""Distance at which a client alone is taken to be from its own."""
FLOOR = 0.8
"""Distance from the next group below which to be nearer to one's own counts for less."""
_SMALL_FLOOR = 1.0
"""The same where there are many small groups: they are to be as far apart as unrelated clients."""
_LONELY = 0.25
"""By how much a client must be better alone, to be put there while others stay as they are."""
_TIE = 0.03
"""Partitions whose evidence differs by less are alike: the one with fewer groups is taken."""
_MANY_GROUPS = 0.3
"""Groups per client from which on groups are small."""
_FEW_GROUPS = 0.1
"""Groups per client up to which they are large."""
_EXTRA = 0.06
"""Evidence asked for beyond the level, of partitions into many small groups."""


@dataclass(frozen=True)
class Partition:
    """Groups of clients, and how clear they are.

    Attributes
    ----------
    labels : Labels
        Group of each client, from 0. Shape (m,).
    evidence : float
        Mean silhouette, in [−1, 1]; 0 of one group.
    """

    labels: Labels
    evidence: float


def silhouettes(distances: Distances, labels: Labels, alone: float = ALONE) -> NDArray[np.float64]:
    """Return how much nearer each client is to its own group than to the next one.

    ``(b − a) / max(a, b, floor)``, with a the mean distance from the others of its group and b that
    from the nearest other group; 0 where there is no other group. The floor is 0.8 of large groups,
    a tenth of the clients each or more, and 1 of small ones.

    Parameters
    ----------
    distances : Distances
        Shape (m, m).
    labels : Labels
        Group of each client, from 0. Shape (m,).
    alone : float
        a of a client alone.
    """
    groups = int(labels.max()) + 1 if len(labels) else 0
    if groups < 2:
        return np.zeros(len(labels))
    members = np.eye(groups)[labels]
    sizes = members.sum(axis=0)
    sums = distances @ members
    own = np.arange(len(labels)), labels
    others = sizes[labels] - 1.0
    a = np.where(others > 0, sums[own] / np.maximum(others, 1.0), alone)
    means = sums / np.maximum(sizes, 1.0)
    means[own] = np.inf
    means[:, sizes == 0] = np.inf
    b = means.min(axis=1)
    floor = FLOOR + (_SMALL_FLOOR - FLOOR) * _smallness(groups, len(labels))
    return np.asarray((b - a) / np.maximum(np.maximum(a, b), floor))


def best_partition(distances: Distances, most: int) -> Partition:
    """Return the groups with the most evidence, of two and more; fewer of equally clear ones.

    Average linkage gives one partition for each number of groups.

    Parameters
    ----------
    distances : Distances
        Shape (m, m).
    most : int
        Groups at most.
    """
    count = len(distances)
    if count < 2:
        return Partition(np.zeros(count, np.int64), 0.0)
    tree = linkage(squareform(distances, checks=False), "average")
    best = Partition(np.zeros(count, np.int64), -np.inf)
    for groups in range(2, min(most, count) + 1):
        labels = numbered(fcluster(tree, groups, "maxclust"))
        if int(labels.max()) + 1 != groups:
            continue  # Ties: the tree has no such level.
        evidence = float(silhouettes(distances, labels).mean())
        if evidence > best.evidence + _TIE:
            best = Partition(labels, evidence)
    if not np.isfinite(best.evidence):
        return Partition(np.zeros(count, np.int64), 0.0)
    return best


def least_evidence(level: float, groups: int, clients: int) -> float:
    """Return the evidence that a partition needs: more of one into many small groups.

    Of clients that merely differ, small groups can be picked that look well apart, since there are
    so many to choose from; of few large groups that is not so.

    Parameters
    ----------
    level : float
        For few large groups.
    groups : int
        How many there are.
    clients : int
        How many they were made of.
    """
    return level + _EXTRA * _smallness(groups, clients)


def _smallness(groups: int, clients: int) -> float:
    """Return 0 for large groups, 1 for small ones, and what lies between."""
    share = (groups / max(1, clients) - _FEW_GROUPS) / (_MANY_GROUPS - _FEW_GROUPS)
    return min(1.0, max(0.0, share))


def nearest_group(
    own: NDArray[np.float64], labels: Labels, may_be_alone: bool = True
) -> int | None:
    """Return the group that a client belongs to, by its distances; None if it is better alone.

    Parameters
    ----------
    own : NDArray[np.float64]
        Its distances from others. Shape (m,).
    labels : Labels
        Their groups, from 0, of which none is empty. Shape (m,).
    may_be_alone : bool
        Whether it can be; else the nearest group is returned.
    """
    sizes = np.bincount(labels)
    means = np.bincount(labels, weights=own) / sizes
    order = np.argsort(means, kind="stable")
    a = float(means[order[0]])
    if len(order) == 1 or not may_be_alone:
        return int(order[0])
    b = float(means[order[1]])
    joined = (b - a) / max(a, b, FLOOR)
    separate = (a - ALONE) / max(a, ALONE, FLOOR)
    return int(order[0]) if joined + _LONELY >= separate else None
