"""How well clients fall into groups: a level, whatever their number.

Rousseeuw's silhouette (1987), for distances on an absolute scale, 0 of clients that are alike and 1
of unrelated ones (:mod:`raceme.strategies.panicle.probes`). Two things differ. It is divided by a
floor at least: groups whose members are all much alike are none, however well they are told apart.
And a client alone is as far from its own as `alone` says, so that groups of one can be judged, and
fleets of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform

from raceme.strategies.shared import numbered

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
"""Partitions whose scores differ by less are alike: the one with fewer groups is taken."""
_MANY_GROUPS = 0.3
"""Groups per client from which on groups are small."""
_FEW_GROUPS = 0.1
"""Groups per client up to which they are large."""
_EXTRA = 0.06
"""Silhouette score asked for beyond the level, of partitions into many small groups."""


@dataclass(frozen=True)
class Partition:
    """Groups of clients, and how clear they are.

    Attributes
    ----------
    labels : Labels
        Group of each client, from 0. Shape (m,).
    score : float
        Mean silhouette, in [−1, 1]; 0 of one group.
    """

    labels: Labels
    score: float


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
    """Return the groups with the highest silhouette score, two at least; of equal ones the fewer.

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
        score = float(silhouettes(distances, labels).mean())
        if score > best.score + _TIE:
            best = Partition(labels, score)
    if not np.isfinite(best.score):
        return Partition(np.zeros(count, np.int64), 0.0)
    return best


def least_score(level: float, groups: int, clients: int) -> float:
    """Return the silhouette score that a partition needs: more of one into many small groups.

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


# -----------------------------------------------------------------------------
# From the groups that there are to those that there should be, with as few changes as can be.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reassignment:
    """What is to be done, in this order.

    Attributes
    ----------
    merges : list[list[int]]
        Clusters that become one.
    splits : dict[int, list[int]]
        Wanted groups that a cluster is divided into, where it is the one that most of their
        members are in.
    home : dict[int, int]
        Cluster of each wanted group that exists: of a merge the first of its clusters. Groups that
        come from a split have none.
    """

    merges: list[list[int]]
    splits: dict[int, list[int]]
    home: dict[int, int]


def plan_reassignment(now: Labels, wanted: Labels) -> Reassignment:
    """Match wanted groups with the clusters that there are.

    Each cluster becomes the group that it shares most with where that group has none better; a
    cluster left over is merged into the group that most of its members go to, a group left over is
    split off the cluster that most of its members are in.

    Parameters
    ----------
    now : Labels
        Cluster of each client. Shape (m,).
    wanted : Labels
        Its group, from 0. Shape (m,).
    """
    clusters = np.unique(now)
    groups = int(wanted.max()) + 1
    shared = np.zeros((len(clusters), groups), np.int64)
    np.add.at(shared, (np.searchsorted(clusters, now), wanted), 1)
    rows, columns = linear_sum_assignment(-shared)
    home = {
        int(g): int(clusters[k]) for k, g in zip(rows, columns, strict=True) if shared[k, g] > 0
    }
    merged: dict[int, list[int]] = {g: [k] for g, k in home.items()}
    for row, cluster in enumerate(clusters.tolist()):
        if cluster not in home.values():
            target = int(np.argmax(shared[row]))
            merged.setdefault(target, []).append(cluster)
            home.setdefault(target, cluster)
    splits: dict[int, list[int]] = {}
    for group in range(groups):
        if group not in home:
            parent = int(clusters[np.argmax(shared[:, group])])
            splits.setdefault(parent, []).append(group)
    merges = [sorted(parts) for parts in merged.values() if len(parts) > 1]
    return Reassignment(merges, splits, home)


def movers(now: Labels, wanted: Labels) -> NDArray[np.bool_]:
    """Return which clients' cluster changes: all but those whose group is their cluster's heir.

    Parameters
    ----------
    now, wanted : Labels
        As for :func:`plan_reassignment`. Shape (m,).
    """
    home: Mapping[int, int] = plan_reassignment(now, wanted).home
    heirs = np.array([home.get(int(group), -1) for group in wanted], np.int64)
    return np.asarray(heirs != now)


def comes_from(cluster: int, former: int, origins: Mapping[int, Sequence[int]]) -> bool:
    """Return whether a cluster is a former one, or came from it.

    Parameters
    ----------
    cluster, former : int
        Their numbers.
    origins : Mapping[int, Sequence[int]]
        Clusters that a cluster came from.
    """
    open_ones, seen = [cluster], set[int]()
    while open_ones:
        one = open_ones.pop()
        if one == former:
            return True
        if one not in seen:
            seen.add(one)
            open_ones += origins.get(one, [])
    return False


def parts_of_split(
    inside: Sequence[str],
    group_of: Mapping[str, int],
    groups: Sequence[int],
    stays: Callable[[str], bool],
) -> list[list[str]]:
    """Return the clients that stay in a cluster that is split, and then each group that leaves it.

    Parameters
    ----------
    inside : Sequence[str]
        Its clients.
    group_of : Mapping[str, int]
        The group of each client that has one, those of other clusters included.
    groups : Sequence[int]
        Those that leave.
    stays : Callable
        Whether a client that does not leave stays; else it is in no part.
    """
    here = set(inside)
    leaving = [[c for c, own in group_of.items() if own == group and c in here] for group in groups]
    gone = {client for part in leaving for client in part}
    return [[client for client in inside if client not in gone and stays(client)], *leaving]


# -----------------------------------------------------------------------------
# Whether clusters are to be others than they are, by how alike clients are.
# -----------------------------------------------------------------------------


_UNDECIDED = 0.15
"""Silhouette score so little below the level leaves it open if there are clusters."""
_SLACK = 0.1
"""Silhouette score below the level at which clusters are given up again."""
_GAIN = 0.1
"""What a reassignment must bring the clients that move, in silhouettes."""


@dataclass(frozen=True)
class PartitionDecision:
    """What is to become of the clusters.

    Attributes
    ----------
    wanted : Labels or None
        The group that each client belongs to, from 0, shape (m,); None to leave all as it is.
    score : float
        Of these groups; of one group, what the clusters have that are given up for it.
    is_open : bool
        Whether more is to be known before anything can be said.
    """

    wanted: Labels | None
    score: float = 0.0
    is_open: bool = False


def decided(distances: Distances, now: Labels, level: float, most: int) -> PartitionDecision:
    """Take the partition with the highest score, if it is worth it for the clients that would move.

    If no partition has a score that is high enough, the clusters that there are become one.

    Parameters
    ----------
    distances : Distances
        Shape (m, m).
    now : Labels
        The cluster of each client. Shape (m,).
    level : float
        Silhouette score that a partition into few large groups needs.
    most : int
        Groups at most.
    """
    if len(now) < 2:
        return PartitionDecision(None)
    groups, present = np.unique(now, return_inverse=True)
    here = silhouettes(distances, present)
    best = best_partition(distances, most)
    needed = least_score(level, len(np.unique(best.labels)), len(now))
    if best.score >= needed:
        moving = movers(now, best.labels)
        gain = silhouettes(distances, best.labels)[moving] - here[moving]
        is_worth_it = moving.any() and gain.mean() >= _GAIN
        return PartitionDecision(best.labels if is_worth_it else None, best.score)
    is_open, score = best.score >= needed - _UNDECIDED, float(here.mean())
    if len(groups) > 1 and score < least_score(level, len(groups), len(now)) - _SLACK:
        return PartitionDecision(np.zeros_like(now), score, is_open)
    return PartitionDecision(None, score, is_open)
