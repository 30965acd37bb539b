"""From the groups that there are to those that there should be, with as few changes as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Repair:
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


def plan_repair(now: Labels, wanted: Labels) -> Repair:
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
    return Repair(merges, splits, home)


def movers(now: Labels, wanted: Labels) -> NDArray[np.bool_]:
    """Return which clients' cluster changes: all but those whose group is their cluster's heir.

    Parameters
    ----------
    now, wanted : Labels
        As for :func:`plan_repair`. Shape (m,).
    """
    home: Mapping[int, int] = plan_repair(now, wanted).home
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
    """Return who stays in a cluster that is split, and then each group that leaves it.

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
