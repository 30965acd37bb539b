"""One-sided support between clusters: who may train whose model, and who merges with whom.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (FAACL), thesis, Waterloo 2024:
Algorithms 2, 3 and 6. A cluster is supported by another if, on the validation samples of every one
of its own clients, the other's model is no worse than its own by more than ε. Two clusters that
support each other are merged; one that supports another without being supported by it trains the
other's model beside its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

_FEW = 13
"""Differences up to which the distribution of Wilcoxon's statistic is that without ties."""


def no_worse(
    own: NDArray[np.floating], other: NDArray[np.floating], epsilon: float, alpha: float
) -> bool:
    """Return whether another model is no worse than one's own by more than ε.

    The null hypothesis ``H0: own + ε < other`` is rejected by Wilcoxon's signed-rank test on the
    differences ``other − own − ε``, sample by sample. Differences of zero say nothing and are left
    out; if all are zero, nothing is rejected.

    Parameters
    ----------
    own, other : NDArray
        Losses of the same samples under the two models, shape (n,).
    epsilon : float
        ε. The larger, the more passes.
    alpha : float
        α, the level of the test. The larger, the more passes.
    """
    differences = np.asarray(other, np.float64) - np.asarray(own, np.float64) - epsilon
    differences = differences[differences != 0]
    if not len(differences):
        return False
    # Left to itself scipy goes through all 2^n signs of few differences that tie: up to a second.
    method = "exact" if len(differences) <= _FEW else "auto"
    return bool(wilcoxon(differences, alternative="less", method=method).pvalue <= alpha)


def fewest_samples(alpha: float) -> int:
    """Return how many samples a test at level α needs: its least p of n samples is 2^−n."""
    return max(1, math.ceil(-math.log2(alpha)))


def disjoint_pairs(
    clusters: Sequence[int], are_mutual: Callable[[int, int], bool], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Return pairs that support each other, none of them in two: one pass of Algorithm 3.

    Parameters
    ----------
    clusters : Sequence[int]
        Among these.
    are_mutual : Callable
        Whether two support each other.
    rng : numpy.random.Generator
        Draws the order in which pairs are looked at: the outcome depends on it.
    """
    pairs = [(a, b) for i, a in enumerate(clusters) for b in clusters[i + 1 :]]
    taken: set[int] = set()
    found = []
    for index in rng.permutation(len(pairs)):
        pair = pairs[index]
        if taken.isdisjoint(pair) and are_mutual(*pair):
            taken.update(pair)
            found.append(pair)
    return found


@dataclass
class Partition:
    """Clusters that are compared with each other.

    Attributes
    ----------
    clusters : list[int]
        Which.
    settled : bool
        Whether the last comparison has changed nothing.
    """

    clusters: list[int]
    settled: bool = False


@dataclass
class Supported:
    """Who supports whom, and who is compared with whom.

    Attributes
    ----------
    supporters : dict[int, dict[int, bool]]
        C.sup of each cluster C: the clusters that train its model beside its own clients.
    partitions : list[Partition]
        All clusters that are compared, divided.
    heirs : dict[int, int]
        Clusters that were merged, to what they were merged into.
    tests : int
        Tests of one client's losses under two models that were made so far.
    """

    supporters: dict[int, dict[int, bool]] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    heirs: dict[int, int] = field(default_factory=dict)
    tests: int = 0

    # Support.

    def is_supported(self, cluster: int, by: int) -> bool:
        """Return whether a cluster is supported by another."""
        return by in self.supporters.get(cluster, {})

    def are_mutual(self, one: int, other: int) -> bool:
        """Return whether two clusters support each other."""
        return self.is_supported(one, other) and self.is_supported(other, one)

    def supported_by(self, cluster: int) -> list[int]:
        """Return the clusters that a cluster supports."""
        return [other for other, theirs in self.supporters.items() if cluster in theirs]

    def support(self, cluster: int, supporters: Iterable[int]) -> None:
        """Let a cluster be supported by these, and by no others."""
        self.supporters[cluster] = dict.fromkeys(sorted(supporters), True)
        if not self.supporters[cluster]:
            del self.supporters[cluster]

    def listed(self) -> dict[int, tuple[int, ...]]:
        """Return the supporters of each cluster that has some, ascending."""
        return {cluster: tuple(sorted(own)) for cluster, own in sorted(self.supporters.items())}

    def find(
        self,
        cluster: int,
        others: Iterable[int],
        losses: Sequence[dict[int, NDArray[np.float64]]],
        epsilon: float,
        alpha: float,
    ) -> list[int]:
        """Return which of some clusters support one, by Algorithm 2, and count the tests.

        Parameters
        ----------
        cluster : int
            The one that may be supported.
        others : Iterable[int]
            Those that may support it.
        losses : Sequence of dict[int, NDArray]
            For each client of the cluster, its losses by model, each of shape (n,). Whoever has not
            measured a model does not support it.
        epsilon, alpha : float
            ε and α.
        """
        found = []
        for other in others:
            agrees = bool(losses)
            for own in losses:
                # The first client that disagrees is enough.
                if other not in own or cluster not in own:
                    agrees = False
                    break
                self.tests += 1
                if not no_worse(own[cluster], own[other], epsilon, alpha):
                    agrees = False
                    break
            if agrees:
                found.append(other)
        return found

    def unite(self, pair: tuple[int, int], target: int) -> None:
        """Let a cluster take the place of two: its supporters are those that both had.

        It supports others where both did.
        """
        one, two = pair
        common = self.supporters.pop(one, {}).keys() & self.supporters.pop(two, {}).keys()
        self.support(target, common - {one, two})
        for cluster, theirs in list(self.supporters.items()):
            kept = [other for other in theirs if other not in pair]
            if one in theirs and two in theirs:
                kept.append(target)
            self.support(cluster, kept)
        self.heirs.update(dict.fromkeys(pair, target))
        for partition in self.partitions:
            if one in partition.clusters:
                partition.clusters = [c for c in partition.clusters if c not in pair]
                partition.clusters.append(target)

    def heir(self, cluster: int) -> int:
        """Return what a cluster has become: itself, or what it was merged into."""
        while cluster in self.heirs:
            cluster = self.heirs[cluster]
        return cluster

    # Partitions.

    @property
    def is_settled(self) -> bool:
        """Whether there is one partition, and comparing changes nothing in it."""
        return len(self.partitions) == 1 and self.partitions[0].settled

    def compared_with(self, cluster: int) -> list[int]:
        """Return the clusters with which one is compared now; none if it waits for others."""
        for partition in self.partitions:
            if cluster in partition.clusters and not partition.settled:
                return [other for other in partition.clusters if other != cluster]
        return []

    def works(self, cluster: int) -> bool:
        """Return whether a cluster's partition is not settled."""
        return any(cluster in p.clusters and not p.settled for p in self.partitions)

    def join(self, rng: np.random.Generator) -> None:
        """Unite settled partitions in random pairs, Algorithm 6; an odd one waits."""
        order = [self.partitions[index] for index in rng.permutation(len(self.partitions))]
        joined = [
            Partition([*one.clusters, *two.clusters])
            for one, two in zip(order[::2], order[1::2], strict=False)
        ]
        self.partitions = joined + order[len(joined) * 2 :]
