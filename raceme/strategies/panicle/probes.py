"""Probes of clients: distances between clients, and groups of clients.

A probe is the direction in which a client moves the initial model w0 in a few mini-batches of one
half of its samples, the halves in turn. Two probes of a client have no samples in common and thus
differ by chance alone. Each client has two mean directions, of its odd and of its even probes,
called its *halves*. Only different halves of two clients are compared, so that chance cancels out.
The cosine of a client's own halves is its *reliability*: the share of its directions that is not
due to chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import unit_rows
from raceme.core.messages import HALF, TASK_SHARE, Vector, mini_batches, short_task
from raceme.strategies.shared import numbered

Distances = NDArray[np.float64]
Labels = NDArray[np.int64]
Rows = NDArray[np.intp]

# -----------------------------------------------------------------------------
# Probes: short tasks, sketched directions, distances.
# -----------------------------------------------------------------------------


HALVES = 2
LEAST_RELIABILITY = 0.1
"""Least reliability of *clear* clients; other clients cannot be compared."""
_FEWEST_STEPS = 2
_BLOCK = 1024
"""Number of clients compared with groups at a time."""


def settings_of_probe(
    settings: Mapping[str, object], examples: int, most: int, former: int
) -> dict[str, int | float]:
    """Return the settings of a probe besides the run's.

    It has as many mini-batches as an ordinary task, up to a limit, of every other sample. Classes
    are balanced, so that class frequencies alone do not make clients look different. The simulator
    charges its share of an ordinary task's computation.

    Parameters
    ----------
    settings : Mapping
        The run's settings of local training.
    examples : int
        Number of the client's training samples.
    most : int
        Largest number of mini-batches.
    former : int
        Number of the client's former probes: if even, the samples are the first, third, and so on;
        if odd, the others.
    """
    steps = min(most, max(_FEWEST_STEPS, round(mini_batches(settings, examples))))
    short = short_task(settings, examples, steps)
    # A client with fewer samples than a mini-batch takes one step per ordinary task.
    return short | {TASK_SHARE: min(1.0, short[TASK_SHARE]), HALF: former % HALVES}


@dataclass
class Probes:
    """The probes of all clients. Arrays have spare capacity beyond the n clients.

    Attributes
    ----------
    clients : list[str]
        Client ids; the position of a client is its index i. Length n.
    counts : NDArray[np.int64]
        Number of probes of each client. Shape (capacity,).
    sums : NDArray[np.float32]
        Sums of the odd and of the even probes' directions. Shape (capacity, 2, size).
    selves : NDArray[np.float32]
        M_ii = a_i·b_i, the cosine of a client's halves: its reliability. Shape (capacity,).
    """

    clients: list[str] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sums: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, HALVES, 0), np.float32))
    selves: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        self._index = {client: index for index, client in enumerate(self.clients)}

    # Queries.

    def count(self, client: str) -> int:
        """Return a client's number of probes since its data last changed."""
        index = self._index.get(client)
        return 0 if index is None else int(self.counts[index])

    def is_known(self, client: str) -> bool:
        """Return whether a client has both halves."""
        return self.count(client) >= HALVES

    def is_clear(self, client: str) -> bool:
        """Return whether a client is reliable enough to be compared with others."""
        return self.is_known(client) and self.reliability(client) >= LEAST_RELIABILITY

    def clear(self) -> list[str]:
        """Return all clear clients, in the order of their first probes."""
        n = len(self.clients)
        agrees = self.selves[:n] >= LEAST_RELIABILITY
        return [self.clients[i] for i in np.flatnonzero(agrees & (self.counts[:n] >= HALVES))]

    def reliability(self, client: str) -> float:
        """Return M_ii: the cosine of a client's two halves."""
        return float(self.selves[self._index[client]])

    def likeness(self, client: str, direction: Vector) -> float:
        """Return the agreement of a new direction with a client's former ones.

        The cosine with the sum of the halves, divided by its expected value for unchanged data,
        r / √((1 + r) / 2) with reliability r. For unchanged data it is 1 on average.
        """
        reliability = max(self.reliability(client), LEAST_RELIABILITY)
        mean = self._halves(self._rows([client]))[:, 0].sum(axis=0)
        length = float(np.linalg.norm(mean))
        if not length:
            return 1.0
        expected = reliability / np.sqrt((1.0 + reliability) / 2.0)
        return float(mean @ direction) / length / float(expected)

    def distances(self, clients: Sequence[str]) -> Distances:
        """Return two estimates of 1 − M_ij / √(M_ii M_jj): 0 for equal clients, 1 for unrelated.

        M_ij is a_i·b_j in the first and b_i·a_j in the second, with halves a and b of unit length:
        the estimates' errors are independent.

        Parameters
        ----------
        clients : Sequence[str]
            Clear clients, in the order of rows and columns.

        Returns
        -------
        Distances
            Symmetric, within [0, 2], zero on the diagonals. Shape (2, m, m).
        """
        rows = self._rows(clients)
        odd, even = self._halves(rows)
        root = self._roots(rows)
        crosswise = 1.0 - np.clip(odd @ even.T / np.outer(root, root), -1.0, 1.0)
        upper, lower = np.triu(crosswise, 1), np.tril(crosswise, -1)
        return np.stack([upper + upper.T, lower + lower.T])

    def distances_to_groups(
        self, clients: Sequence[str], groups: Sequence[Sequence[str]]
    ) -> Distances:
        """Return the mean distances of clients from groups, without computing all pairs.

        A client with a single probe counts as reliable as the groups' median member. A group's
        member has distance 0 from itself.

        Parameters
        ----------
        clients : Sequence[str]
            All with two probes, or all with one.
        groups : Sequence[Sequence[str]]
            Clear clients, at least one in each.

        Returns
        -------
        Distances
            Within [0, 2]. Shape (m, groups).
        """
        centres, roots = [], []
        for group in groups:
            rows = self._rows(group)
            roots.append(self._roots(rows))
            centres.append((self._halves(rows) / roots[-1][:, None]).mean(axis=1))
        odd, even = np.stack(centres, axis=1)
        found = np.empty((len(clients), len(groups)))
        for start in range(0, len(clients), _BLOCK):
            rows = self._rows(clients[start : start + _BLOCK])
            a, b = self._halves(rows)
            if self.counts[rows[0]] >= HALVES:
                cosines = (a @ even.T + b @ odd.T) / 2.0 / self._roots(rows)[:, None]
            else:
                cosines = a @ (odd + even).T / 2.0 / np.median(np.concatenate(roots))
            found[start : start + _BLOCK] = 1.0 - np.clip(cosines, -1.0, 1.0)
        return found

    def _rows(self, clients: Sequence[str]) -> Rows:
        return np.array([self._index[client] for client in clients], np.intp)

    def _roots(self, rows: Rows) -> NDArray[np.float64]:
        return np.sqrt(np.maximum(self.selves[rows], LEAST_RELIABILITY)).astype(np.float64)

    def _halves(self, rows: Rows) -> NDArray[np.float32]:
        """Return the halves of some clients at unit length. Shape (2, m, size)."""
        return np.stack([unit_rows(self.sums[rows, half]) for half in range(HALVES)])

    # Changes.

    def add(self, client: str, direction: Vector) -> None:
        """Add a probe to its client's half with fewer probes.

        Parameters
        ----------
        direction : Vector
            At unit length. Shape (size,).
        """
        if client not in self._index:
            self._add_client(client, len(direction))
        i = self._index[client]
        self.sums[i, int(self.counts[i]) % HALVES] += direction
        self.counts[i] += 1
        odd, even = self._halves(np.array([i]))[:, 0]
        self.selves[i] = odd @ even

    def forget(self, client: str) -> None:
        """Discard the probes of a client, whose data have changed."""
        i = self._index[client]
        self.counts[i], self.sums[i], self.selves[i] = 0, 0.0, 0.0

    def _add_client(self, client: str, size: int) -> None:
        index = self._index[client] = len(self.clients)
        self.clients.append(client)
        if index == len(self.counts):
            more = max(16, index // 4)
            self.counts = np.pad(self.counts, (0, more))
            self.selves = np.pad(self.selves, (0, more))
            sums = self.sums if index else np.empty((0, HALVES, size), np.float32)
            self.sums = np.concatenate([sums, np.zeros((more, HALVES, size), np.float32)])


# -----------------------------------------------------------------------------
# Groups of clients, scored by silhouettes.
# -----------------------------------------------------------------------------


FLOOR = 0.5
"""Least denominator of silhouettes: very near groups score lower, as one model fits them."""
_LOWEST = 0.1
"""Least denominator for regressions, in which even near groups need separate models."""
_DEVIATIONS = 4.0
"""Least denominator for regressions, in standard deviations of the distances' noise."""
_ALONE = 0.3
"""Distance of a client from its own group if the group has no other member."""
_MARGIN = 0.1
"""Clusters are merged if their score is this far below the level."""
_TIE = 0.03
"""Difference of scores up to which the partition with fewer groups is preferred."""
_FEW = 12
"""Largest number of groups tried, unless more groups have three clients each on average."""


@dataclass(frozen=True)
class ScoredGroups:
    """A partition of clients into groups.

    Attributes
    ----------
    labels : Labels
        Group of each client, from 0. Shape (m,).
    score : float
        Mean silhouette, in [−1, 1], of each estimate's groups by the other estimate; 0 for one
        group.
    """

    labels: Labels
    score: float


def floor_by_chance(distances: Distances) -> float:
    """Return a least denominator of silhouettes: four standard deviations of noise, 0.1 to 0.5.

    The two estimates of a distance differ by chance alone: its variance is half the mean square of
    their difference.

    Parameters
    ----------
    distances : Distances
        Two estimates of the distance of every two clients, symmetric. Shape (2, m, m).
    """
    m = distances.shape[1]
    variance = np.square(distances[0] - distances[1]).sum() / max(1, 2 * m * (m - 1))
    return float(np.clip(_DEVIATIONS * np.sqrt(variance), _LOWEST, FLOOR))


def silhouette(
    own: float | NDArray[np.float64], other: float | NDArray[np.float64], floor: float = FLOOR
) -> NDArray[np.float64]:
    """Return ``(b − a) / max(a, b, floor)``: how much nearer the own group is than another one.

    Distances between equal clients are noise, and so would be their ratio; the least denominator
    suppresses it.

    Parameters
    ----------
    own, other : float or NDArray[np.float64]
        a and b: mean distances from the two groups.
    floor : float
        Least denominator.
    """
    return np.asarray((other - own) / np.maximum(np.maximum(own, other), floor))


def silhouettes(distances: Distances, labels: Labels, floor: float = FLOOR) -> NDArray[np.float64]:
    """Return how much nearer each client is to its own group than to the nearest other one.

    A client alone is 0.3 from its own group; without another group, all are 0.

    Parameters
    ----------
    distances : Distances
        Distance of every two clients, symmetric. Shape (m, m).
    labels : Labels
        Group of each client, from 0; no group is empty. Shape (m,).
    floor : float
        Least denominator.
    """
    groups = int(labels.max()) + 1 if len(labels) else 0
    if groups < 2:
        return np.zeros(len(labels))
    members = np.eye(groups)[labels]
    sizes = members.sum(axis=0)
    sums = distances @ members
    own = np.arange(len(labels)), labels
    others = sizes[labels] - 1.0
    a = np.where(others > 0, sums[own] / np.maximum(others, 1.0), _ALONE)
    means = sums / sizes
    means[own] = np.inf
    b = means.min(axis=1)
    return silhouette(a, b, floor)


def best_partition(distances: Distances, floor: float = FLOOR) -> ScoredGroups:
    """Return the partition into two or more groups with the highest score.

    Average linkage gives one partition for each number of groups; among nearly equal scores the
    smallest number wins. The partition by one estimate is scored by the other estimate, in which
    groups that formed by chance look random. The best number of groups is applied to the mean of
    both estimates.

    Parameters
    ----------
    distances : Distances
        Two estimates of the distance of every two clients, symmetric. Shape (2, m, m).
    floor : float
        Least denominator of silhouettes.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    mean = distances.mean(axis=0)
    count = len(mean)
    best = ScoredGroups(np.zeros(count, np.int64), 0.0)
    if count < 2:
        return best
    whole, *trees = (linkage(squareform(d, checks=False), "average") for d in (mean, *distances))
    for groups in range(2, min(count, max(_FEW, count // 3)) + 1):
        halves = (numbered(fcluster(tree, groups, "maxclust")) for tree in trees)
        scores = [
            silhouettes(d, half, floor).mean()
            for d, half in zip(distances[::-1], halves, strict=True)
        ]
        if (score := float(np.mean(scores))) > best.score + _TIE:
            best = ScoredGroups(numbered(fcluster(whole, groups, "maxclust")), score)
    return best


def divide_further(
    distances: Distances, labels: Labels, level: float, floor: float = FLOOR
) -> Labels:
    """Divide groups into subgroups while the score inside the group reaches the level.

    In the presence of a distant group the silhouette is highest for a coarse partition, which
    unites near groups. A single client is not split off: with few samples it may be far from all
    others by chance.

    Parameters
    ----------
    distances : Distances
        Two estimates of the distance of every two clients, symmetric. Shape (2, m, m).
    labels : Labels
        Group of each client, from 0. Shape (m,).
    level : float
        Least silhouette score of groups.
    floor : float
        Least denominator of silhouettes.
    """
    found = labels.copy()
    for group in range(int(labels.max()) + 1):
        rows = np.flatnonzero(labels == group)
        inside = distances[:, rows[:, None], rows]
        best = best_partition(inside, floor)
        if best.score >= level and np.bincount(best.labels).min() > 1:
            parts = divide_further(inside, best.labels, level, floor)
            found[rows] = np.where(parts > 0, found.max() + parts, group)
    return found


def better_partition(
    distances: Distances, now: Labels, level: float, is_quantity: bool = False
) -> ScoredGroups | None:
    """Return the groups that should replace the clusters; None to keep the clusters.

    The result is the best groups, divided further, if their score reaches the level. It is a single
    group, with the score of the present clusters, if both scores are too low.

    Parameters
    ----------
    distances : Distances
        Two estimates of the distance of every two clients, symmetric. Shape (2, m, m).
    now : Labels
        The cluster of each client. Shape (m,).
    level : float
        Least silhouette score of groups.
    is_quantity : bool
        Whether models predict a quantity. In a classification one model fits near groups; in a
        regression near groups need separate models, as far as the noise permits.
    """
    if len(now) < 2:
        return None
    floor = floor_by_chance(distances) if is_quantity else FLOOR
    best = best_partition(distances, floor)
    if best.score >= level:
        wanted = divide_further(distances, best.labels, level, floor)
        is_new = not np.array_equal(numbered(wanted), numbered(now))
        return ScoredGroups(wanted, best.score) if is_new else None
    clusters, present = np.unique(now, return_inverse=True)
    score = float(silhouettes(distances.mean(axis=0), present, floor).mean())
    if len(clusters) > 1 and score < level - _MARGIN:
        return ScoredGroups(np.zeros_like(now), score)
    return None


@dataclass(frozen=True)
class Reassignment:
    """Steps that turn the clusters into the wanted groups, in this order.

    Attributes
    ----------
    merges : list[list[int]]
        Ids of the clusters of each merge, which become one cluster.
    splits : dict[int, list[int]]
        Wanted groups that are split off each cluster.
    home : dict[int, int]
        Cluster that becomes each wanted group; for a merge, one of the merged clusters. Groups
        split off another have none.
    """

    merges: list[list[int]]
    splits: dict[int, list[int]]
    home: dict[int, int]


def plan_reassignment(now: Labels, wanted: Labels) -> Reassignment:
    """Match wanted groups with the present clusters.

    Clusters and groups are matched so that most clients stay. A cluster without a group is merged
    into the group of most of its members; a group without a cluster is split off the cluster of
    most of its members.

    Parameters
    ----------
    now : Labels
        Cluster of each client. Shape (m,).
    wanted : Labels
        Its group, from 0. Shape (m,).
    """
    from scipy.optimize import linear_sum_assignment

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


# -----------------------------------------------------------------------------
# Landmarks: clients that represent a large fleet.
# -----------------------------------------------------------------------------


LANDMARKS = 500
"""Number of clients compared pairwise; in a larger fleet they are drawn at random."""
_FEWEST = 8
"""Least number of landmarks of each cluster, if it has as many members."""


def landmarks(now: Labels, rng: np.random.Generator) -> Rows:
    """Return the rows of landmarks, which represent all clients: some of each cluster; all if few.

    Parameters
    ----------
    now : Labels
        The cluster of each client. Shape (m,).
    """
    rows = np.arange(len(now))
    if len(rows) <= LANDMARKS:
        return rows
    drawn = [rng.choice(rows, LANDMARKS, replace=False)]
    for cluster in np.unique(now):
        members = np.flatnonzero(now == cluster)
        drawn.append(rng.choice(members, min(_FEWEST, len(members)), replace=False))
    return np.unique(np.concatenate(drawn))
