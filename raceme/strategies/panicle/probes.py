"""How alike clients are, by their first steps from one common model.

A probe is the direction in which a client takes the initial model w0 in a few mini-batches. Two
probes of the same client differ by chance alone: by the samples that they met. So every client has
two halves, the means of its odd and of its even probes, and only the half of one client is ever
compared with the *other* half of another: chance cancels out, and what a client agrees with itself
says how much of its directions is not chance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform

from raceme.core.clusters import Clusters
from raceme.core.messages import TASK_SHARE, Vector, mini_batches, short_task
from raceme.strategies.shared import numbered

# -----------------------------------------------------------------------------
# Grouping clients by what their probes say.
# -----------------------------------------------------------------------------


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
        Distance of every two clients, symmetric. Shape (m, m).
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
        Distance of every two clients, symmetric. Shape (m, m).
    most : int
        Largest number of groups that is tried.
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
        Score that a partition into few large groups needs.
    groups : int
        Number of groups of the partition.
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


def silhouette(own: NDArray[np.float64], labels: Labels, group: int) -> float:
    """Return how much nearer a client is to a group than to the next one; 1 if there is none.

    Parameters
    ----------
    own : NDArray[np.float64]
        Its distances from others. Shape (m,).
    labels : Labels
        Their groups, from 0, of which none is empty. Shape (m,).
    group : int
        The one that it belongs to.
    """
    means = np.bincount(labels, weights=own) / np.bincount(labels)
    a, others = float(means[group]), np.delete(means, group)
    if not len(others):
        return 1.0
    b = float(others.min())
    return (b - a) / max(a, b, FLOOR)


# -----------------------------------------------------------------------------
# From the groups that there are to those that there should be, with as few changes as can be.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reassignment:
    """What is to be done, in this order.

    Attributes
    ----------
    merges : list[list[int]]
        Ids of the clusters of each merge, which become one cluster.
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
        Ids of the cluster and of the supposed origin.
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
        Clients of the cluster that is split.
    group_of : Mapping[str, int]
        The group of each client that has one, those of other clusters included.
    groups : Sequence[int]
        Numbers of the groups that leave the cluster.
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
        Distance of every two clients, symmetric. Shape (m, m).
    now : Labels
        The cluster of each client. Shape (m,).
    level : float
        Silhouette score that a partition into few large groups needs.
    most : int
        Largest number of groups that is tried.
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


HALVES = 2
_BLOCK = 1024
"""Clients whose halves are brought to unit length at a time."""
_FEWEST_STEPS = 2
LEAST_RELIABILITY = 0.1
"""Agreement of a client with itself below which its probes say nothing."""


class Sketcher:
    """Shortens directions so that their cosines stay what they are, nearly.

    A count sketch (Charikar et al. 2002): every weight is added, with a random sign, to one of
    `size` numbers. A cosine is off by about 1/√size. What is not longer than twice that stays as
    it is.

    Parameters
    ----------
    size : int
        Numbers of a sketch; 0 for none.
    seed : int
        Seed of the random signs and positions.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._seed = size, seed
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        self._signs: NDArray[np.float32] = np.empty(0, np.float32)

    def direction(self, delta: Vector) -> Vector:
        """Return the direction of a change at unit length, shortened; zeros of no change.

        Parameters
        ----------
        delta : Vector
            Change of the model's weights. Shape (d,).

        Returns
        -------
        Vector
            Shape (size,), or (d,) where that is not much longer.
        """
        short = delta
        if self._size and len(delta) > 2 * self._size:
            if len(self._places) != len(delta):
                rng = np.random.default_rng(np.random.SeedSequence([self._seed, 0x5CE7C4]))
                self._places = rng.integers(self._size, size=len(delta))
                self._signs = rng.choice(np.array([-1.0, 1.0], np.float32), size=len(delta))
            signed = self._signs * delta
            sums = np.bincount(self._places, weights=signed, minlength=self._size)
            short = sums.astype(np.float32)
        length = float(np.linalg.norm(short))
        return np.asarray(short / length if length else np.zeros_like(short), np.float32)


@dataclass
class Probes:
    """The probes of all clients. Arrays have room for more clients than there are, n.

    Attributes
    ----------
    clients : list[str]
        Client ids; the position of a client is its index i. Length n.
    counts : NDArray[np.int64]
        Probes of each client that count.
    sums : NDArray[np.float32]
        Sums of the odd and of the even probes' directions. Shape (capacity, 2, size).
    agreement : NDArray[np.float32]
        M_ij = ½ (a_i·b_j + b_i·a_j), of the halves a and b at unit length; known between clients
        with two probes. Shape (capacity, capacity); (0, 0) in a large fleet.
    selves : NDArray[np.float32]
        M_ii in a large fleet. Shape (capacity,); (0,) in others.
    exact_up_to : int
        Clients up to which all pairs are kept; in a larger fleet they are computed when asked for.
        0: always.
    """

    clients: list[str] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sums: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, HALVES, 0), np.float32))
    agreement: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    selves: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    exact_up_to: int = 0

    def __post_init__(self) -> None:
        # Derived, row by row, from the sums.
        self._index = {client: index for index, client in enumerate(self.clients)}
        self._units = self._all_units()

    def _all_units(self) -> NDArray[np.float32]:
        """Return the halves at unit length, (2, capacity, size); nothing in a large fleet."""
        sums = self.sums[:0] if self.is_large else self.sums
        return np.stack([_unit_rows(sums[:, half]) for half in range(HALVES)])

    def _halves(self, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return the halves of some clients at unit length. Shape (2, m, size)."""
        if not self.is_large:
            return np.asarray(self._units[:, rows])
        return np.stack([_unit_rows(self.sums[rows, half]) for half in range(HALVES)])

    @property
    def is_large(self) -> bool:
        """Whether the fleet is too large to keep all pairs."""
        return 0 < self.exact_up_to < len(self.clients)

    def _reliabilities(self) -> NDArray[np.float32]:
        return self.selves if self.is_large else self.agreement.diagonal()

    # Method.

    def count(self, client: str) -> int:
        """Return how many probes of a client count."""
        index = self._index.get(client)
        return 0 if index is None else int(self.counts[index])

    def is_known(self, client: str) -> bool:
        """Return whether a client has both halves."""
        return self.count(client) >= HALVES

    def is_clear(self, client: str) -> bool:
        """Return whether a client agrees with itself, so that it can be compared with others."""
        return self.is_known(client) and self.reliability(client) >= LEAST_RELIABILITY

    def clear(self) -> list[str]:
        """Return all clients that are clear, in the order in which they were first probed."""
        n = len(self.clients)
        agrees = self._reliabilities()[:n] >= LEAST_RELIABILITY
        return [self.clients[i] for i in np.flatnonzero(agrees & (self.counts[:n] >= HALVES))]

    def reliability(self, client: str) -> float:
        """Return M_ii: the cosine of a client's two halves."""
        return float(self._reliabilities()[self._index[client]])

    def likeness(self, client: str, direction: Vector) -> float:
        """Return how far a new direction is the one that a client had: 1 if it is, but for chance.

        Its cosine to the mean of the halves, over what that is expected to be if nothing has
        changed: with halves of reliability r, √((1 + r) / 2) · √r.
        """
        index = self._index[client]
        reliability = max(self.reliability(client), LEAST_RELIABILITY)
        mean = self._halves(np.array([index]))[:, 0].sum(axis=0)
        length = float(np.linalg.norm(mean))
        if not length:
            return 1.0
        expected = reliability / np.sqrt((1.0 + reliability) / 2.0)
        return float(mean @ direction) / length / float(expected)

    def distances(self, clients: list[str]) -> NDArray[np.float64]:
        """Return 1 − M_ij / √(M_ii M_jj): 0 of clients alike but for chance, 1 of unrelated ones.

        Parameters
        ----------
        clients : list[str]
            Clear clients, in the order of rows and columns.

        Returns
        -------
        NDArray[np.float64]
            Symmetric, within [0, 2], zero on the diagonal. Shape (m, m).
        """
        rows = self.rows(clients)
        if self.is_large:
            odd, even = self._halves(rows)
            crosswise = odd @ even.T
            inner = ((crosswise + crosswise.T) / np.float32(2.0)).astype(np.float64)
        else:
            inner = self.agreement[np.ix_(rows, rows)].astype(np.float64)
        root = np.sqrt(np.maximum(inner.diagonal(), LEAST_RELIABILITY))
        distances = 1.0 - np.clip(inner / np.outer(root, root), -1.0, 1.0)
        np.fill_diagonal(distances, 0.0)
        return np.asarray(distances)

    def distances_from(self, client: str, others: list[str]) -> NDArray[np.float64]:
        """Return the distances of one client from others; see :meth:`distances`.

        A client with a single probe is taken to agree with itself as the median of the others does.

        Parameters
        ----------
        client : str
            One with a probe at least.
        others : list[str]
            Clear ones, at least one.
        """
        own, rows = self._index[client], self.rows(others)
        selves = np.maximum(self._reliabilities()[rows], LEAST_RELIABILITY).astype(np.float64)
        if self.is_known(client):
            if self.is_large:
                found = self.distances_to_groups([client], [[other] for other in others])
                return np.asarray(found[0])
            inner = self.agreement[own, rows].astype(np.float64)
            itself = max(self.reliability(client), LEAST_RELIABILITY)
        else:
            first = self._halves(np.array([own]))[0, 0]
            inner = self._halves(rows).mean(axis=0) @ first
            itself = float(np.median(selves))
        return np.asarray(1.0 - np.clip(inner / np.sqrt(selves * itself), -1.0, 1.0))

    def distances_to_groups(
        self, clients: list[str], groups: Sequence[list[str]]
    ) -> NDArray[np.float64]:
        """Return the mean distances of clients from groups, without those of all pairs.

        The mean of products with a group is the product with its mean; only the cut at a cosine of
        1 is made of the mean instead of each distance.

        Parameters
        ----------
        clients : list[str]
            All with two probes, or all with one.
        groups : Sequence[list[str]]
            Clear ones, at least one in each.

        Returns
        -------
        NDArray[np.float64]
            Shape (m, groups).
        """
        centres, selves = [], []
        for group in groups:
            rows = self.rows(group)
            own = np.sqrt(np.maximum(self._reliabilities()[rows], LEAST_RELIABILITY))
            centres.append((self._halves(rows) / own[:, None]).mean(axis=1))
            selves.append(own**2)
        odd, even = np.stack(centres, axis=1)
        typical = float(np.median(np.concatenate(selves)))
        found = np.empty((len(clients), len(groups)))
        for start in range(0, len(clients), _BLOCK):
            block = clients[start : start + _BLOCK]
            rows = self.rows(block)
            a, b = self._halves(rows)
            if self.is_known(block[0]):
                inner = (a @ even.T + b @ odd.T) / 2.0
                itself = np.maximum(self._reliabilities()[rows], LEAST_RELIABILITY)[:, None]
            else:
                inner, itself = a @ (odd + even).T / 2.0, np.full((1, 1), typical)
            found[start : start + _BLOCK] = 1.0 - np.clip(inner / np.sqrt(itself), -1.0, 1.0)
        return found

    def similarity(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return all clients, and 1 − their distances; NaN where those are not known.

        Returns
        -------
        tuple[list[str], NDArray[np.float32]]
            n ids, and a matrix of shape (n, n); of a large fleet the first that are clear, no more
            than are compared.
        """
        clear = self.clear()
        clients = list(self.clients)
        if self.is_large:
            clients = clear = clear[: self.exact_up_to]
        place = {client: index for index, client in enumerate(clients)}
        matrix = np.full((len(clients), len(clients)), np.nan, np.float32)
        rows = np.array([place[client] for client in clear], np.intp)
        matrix[np.ix_(rows, rows)] = 1.0 - self.distances(clear)
        return clients, matrix

    def rows(self, clients: list[str]) -> NDArray[np.intp]:
        """Return the row of each client in the matrices, in the order given."""
        return np.array([self._index[client] for client in clients], np.intp)

    # Verbs.

    def add(self, client: str, direction: Vector) -> None:
        """Add a probe to the half of its client that has fewer.

        Parameters
        ----------
        direction : Vector
            At unit length. Shape (size,).
        """
        if client not in self._index:
            self._add_client(client, len(direction))
        i, n = self._index[client], len(self.clients)
        half = int(self.counts[i]) % HALVES
        self.sums[i, half] += direction
        self.counts[i] += 1
        if self.is_large:
            odd, even = self._halves(np.array([i]))[:, 0]
            self.selves[i] = odd @ even
            return
        self._units[half, i] = _unit_rows(self.sums[i, half][None, :])[0]
        if self.counts[i] >= HALVES:
            odd, even = self._units[0], self._units[1]
            row = (even[:n] @ odd[i] + odd[:n] @ even[i]) / np.float32(2.0)
            self.agreement[i, :n] = self.agreement[:n, i] = row

    def forget(self, client: str) -> None:
        """Take the probes of a client back: its data have changed."""
        i = self._index[client]
        self.counts[i] = 0
        self.sums[i] = 0.0
        if self.is_large:
            self.selves[i] = 0.0
            return
        self._units[:, i] = 0.0
        self.agreement[i, :] = self.agreement[:, i] = 0.0

    def _add_client(self, client: str, size: int) -> None:
        index = len(self.clients)
        self.clients.append(client)
        self._index[client] = index
        if index == len(self.counts):
            more = max(16, index // 4 if self.is_large else index)
            self.counts = np.pad(self.counts, (0, more))
            empty = np.zeros((more, HALVES, size), np.float32)
            sums = self.sums if index else np.empty((0, HALVES, size), np.float32)
            self.sums = np.concatenate([sums, empty])
            if len(self.selves):
                self.selves = np.pad(self.selves, (0, more))
            else:
                self.agreement = np.pad(self.agreement, (0, more))
            self._units = self._all_units()
        if self.is_large and not len(self.selves):
            self.selves = np.pad(self.agreement.diagonal(), (0, len(self.counts)))
            self.selves = self.selves[: len(self.counts)].copy()
            self.agreement = np.empty((0, 0), np.float32)
            self._units = self._all_units()


def settings_of_probe(
    settings: Mapping[str, object], examples: int, most: int
) -> dict[str, int | float]:
    """Return what a probe's message says beyond the run's settings.

    A tenth of an ordinary task's mini-batches, two at least; and what share of such a task's
    computation that is, which the simulator charges.

    Parameters
    ----------
    settings : Mapping
        The run's settings of local training.
    examples : int
        Number of the client's training samples.
    most : int
        Mini-batches at most; 0 for a whole task.
    """
    if not most:
        return {}
    steps = min(most, max(_FEWEST_STEPS, round(mini_batches(settings, examples) / 10)))
    short = short_task(settings, examples, steps)
    # Of fewer samples than a mini-batch each step is as long as an ordinary task.
    return short | {TASK_SHARE: min(1.0, short[TASK_SHARE])}


def _unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, np.float32(1.0)), np.float32)


# -----------------------------------------------------------------------------
# Some clients that stand for many, where there are too many to compare all with all.
#
# They are drawn at random; the others go where those are that they are nearest to, by the mean
# distance from each group.
# -----------------------------------------------------------------------------


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
        All clear clients that are grouped.
    standing : list[str]
        Those of them that stand for all, in the same order.
    labels : Labels
        Group of each client in `standing`, from 0.
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
        Client ids that stand for each cluster.
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
            Probes of all clients, and their clusters.
        clear : Callable
            Returns the clear clients that are online.
        rng : numpy.random.Generator
            Draws the examples of a cluster.

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
        """Draw the examples of some clusters among the clear clients that are online."""
        names = list(clear())
        homes = np.array([clusters.main(name) for name in names], np.int64)
        drawn = {
            k: [names[i] for i in some(np.flatnonzero(homes == k), _EXAMPLES, rng)] for k in which
        }
        self.of = {k: drawn.get(k, self.of.get(k, [])) for k in clusters.models}


# -----------------------------------------------------------------------------
# How much of its own latest model a client uses beside its cluster's (graded sharing).
#
# Members of one cluster need not be alike: of the same two or three classes, one may have little
# but the first. A cluster's model is a mean that fits none of them best, and what a member makes of
# it in one task fits that member better, but is learnt from its own few samples. What a client uses
# lies between: w + μ (z − w), where μ grows with how far the client is from the others of its
# cluster, and with its samples. Of members that are alike, μ is near 0, and nothing is lost.
# -----------------------------------------------------------------------------


_STANDING = 100
"""Members of a cluster that stand for it in a large fleet."""


def apartness(
    probes: Probes, members: Mapping[int, Sequence[str]], asked: Collection[str]
) -> dict[str, float]:
    """Return how far clients are from the others of their cluster, on average, within [0, 1].

    The mean of `Probes.distances`, free of the chance of mini-batches: 0 of a client that is like
    them, 1 of one that has nothing in common with them. In a large fleet it is the distance from
    the first hundred, the client's own among them if it is one.

    Parameters
    ----------
    probes : Probes
        What is known of the clients.
    members : Mapping[int, Sequence[str]]
        Clear clients of each cluster.
    asked : Collection[str]
        Clients whose distance is wanted.

    Returns
    -------
    dict[str, float]
        Of those that are clear and not alone in their cluster.
    """
    found: dict[str, float] = {}
    for together in members.values():
        own = [client for client in together if client in asked]
        if len(together) < 2 or not own:
            continue
        if probes.is_large:
            distances = probes.distances_to_groups(own, [list(together[:_STANDING])])[:, 0]
        else:
            rows = [place for place, client in enumerate(together) if client in asked]
            distances = probes.distances(list(together))[rows].sum(axis=1) / (len(together) - 1)
        found |= dict(zip(own, np.clip(distances, 0.0, 1.0).tolist(), strict=True))
    return found


def own_share(apart: float, samples: int, prior: float) -> float:
    """Return μ = n D / (n D + n₀ (1 − D)), the share of its own latest model in what it uses.

    As in empirical Bayes: D / (1 − D) is how large what is a client's own is beside what it has in
    common with the others, and n samples of it count beside a prior that is worth n₀ of them. To a
    client that has nothing in common with its cluster, the cluster's model says nothing. More
    samples than n₀ count as n₀, by which μ = D: clients that are alike keep some distance by
    chance, however many samples they have.

    Parameters
    ----------
    apart : float
        D: its distance from the others of its cluster, from 0 to 1.
    samples : int
        n: its training samples, 1 at least.
    prior : float
        n₀: number of samples that the cluster's model counts for, above 0.
    """
    own = min(samples, prior) * apart
    return own / (own + prior * (1.0 - apart))


def inside(clusters: Clusters, clients: Iterable[str]) -> dict[int, list[str]]:
    """Return clients by their main cluster."""
    found: dict[int, list[str]] = {}
    for client in clients:
        found.setdefault(clusters.main(client), []).append(client)
    return found


def between(shared: Vector, own: Vector, share: float) -> NDArray[np.float32]:
    """Return w + μ (z − w). Shape (d,).

    Parameters
    ----------
    shared : Vector
        w: the model of the client's cluster. Shape (d,).
    own : Vector
        z: the client's latest model. Shape (d,).
    share : float
        μ: share of the client's own model, from 0 to 1.
    """
    return np.asarray(shared + np.float32(share) * (own - shared), np.float32)
