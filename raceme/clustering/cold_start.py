"""Groups by the directions of first updates: how they begin, and how a client finds its own.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
TPDS 2022: the group cold start (Algorithm 3, eqs 6 and 7), the client cold start (eq 8), and the
change of label counts after which a client is taken through it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from raceme.clustering.bipartition import linkage
from raceme.clustering.mixing import cosine, cosines
from raceme.clustering.spectral import numbered
from raceme.protocol.messages import Vector

_MUCH = 0.5
"""Two clients have much the same labels if they share so much of their samples' labels."""
_PATIENCE = 3
"""A client that has not said its label counts so often in a row is not asked again."""


@dataclass
class ColdStart:
    """What is known for placing clients.

    Attributes
    ----------
    initial : Vector
        w0: what every client trains to be placed. Shape (d,).
    directions : dict[int, Vector]
        Δw0^(g) of each group; empty before there are groups. They never change.
    cold : dict[str, bool]
        Clients that are to be placed: they have no group, or their data have changed.
    counts : dict[str, list[int]]
        Each client's training samples per label, as it has last said.
    placed_with : dict[str, list[int]]
        The same when the client was placed.
    unanswered : dict[str, int]
        How often in a row a client was asked and has not said them.
    """

    initial: Vector
    directions: dict[int, Vector] = field(default_factory=dict)
    cold: dict[str, bool] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    placed_with: dict[str, list[int]] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)

    def nearest(self, delta: Vector) -> int:
        """Return the group of a first update: g* = argmin (1 − cos(Δw0^(g), Δw_pre)) / 2, eq (8).

        Parameters
        ----------
        delta : Vector
            What training w0 has changed. Shape (d,), weights only.
        """
        directions = self.directions
        return min(directions, key=lambda group: (1 - cosine(directions[group], delta)) / 2)

    def looks_foreign(self, group: int, delta: Vector) -> bool:
        """Return whether a client's latest update goes where another group's first ones went.

        Our own: eq (8) asked of an update of the group's model, not of w0. Who has come to have
        another group's data is pulled towards it. It costs a needless pre-training where it is
        wrong, which it often is where groups overlap.

        Parameters
        ----------
        group : int
            The client's group.
        delta : Vector
            What training its model has changed. Shape (d,), weights only.
        """
        return self.nearest(delta) != group

    def group_by_labels(self, client: str, homes: Mapping[str, int]) -> int | None:
        """Return the group whose clients have much the same labels, if it is the only one.

        Our own: eq (8) needs a training of w0, and a client whose labels are those of one group
        alone is told by them. Groups that differ in other things have the same labels, and none is
        returned.

        Parameters
        ----------
        client : str
            Who is to be placed; its label counts are known.
        homes : Mapping[str, int]
            The groups of the clients that are placed.
        """
        own = np.asarray(self.counts[client], np.float64)
        found = {
            group
            for other, group in homes.items()
            if other != client
            and len(self.placed_with.get(other, ())) == len(own)
            and overlap(own, np.asarray(self.placed_with[other], np.float64)) >= _MUCH
        }
        return found.pop() if len(found) == 1 else None

    def settle(self, client: str) -> None:
        """Note that a client was placed, with the data that it has now."""
        self.cold.pop(client, None)
        if client in self.counts:
            self.placed_with[client] = self.counts[client]

    def answers(self, client: str) -> bool:
        """Return whether it is worth asking a client for its label counts."""
        return self.unanswered.get(client, 0) < _PATIENCE

    def ask(self, client: str) -> None:
        """Note that a client is asked for them."""
        self.unanswered[client] = self.unanswered.get(client, 0) + 1

    def usual_labels(self, client: str, labels: int) -> int:
        """Return how many labels a client's counts should have, which come with `labels` of them.

        As many as most others' have. Whoever is first does not speak for all: a device with
        another task, or one that lies, would shut everybody else out.
        """
        first, known = next(iter(self.counts.items()), ("", []))
        # Mostly so, and it spares a look at all of a large fleet.
        if first != client and len(known) == labels:
            return labels
        lengths = Counter(len(told) for other, told in self.counts.items() if other != client)
        usual, clients = lengths.most_common(1)[0] if lengths else (labels, 0)
        return usual if clients > lengths[labels] + 1 else labels

    def count(self, client: str, counts: Sequence[int], examples: int, tolerance: float) -> None:
        """Note a client's label counts; it is cold if they have changed too much.

        Parameters
        ----------
        client : str
            Who.
        counts : Sequence[int]
            Training samples per label, now.
        examples : int
            n_i, at the start.
        tolerance : float
            Share of the data that may change.
        """
        self.unanswered.pop(client, None)
        self.counts[client] = list(counts)
        if client in self.cold:
            return
        then = self.placed_with.setdefault(client, self.counts[client])
        if len(then) != len(counts) or has_shifted(counts, then, examples, tolerance):
            self.cold[client] = True


def overlap(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return how much of two clients' samples is of the same labels: Σ min of their shares.

    Parameters
    ----------
    one, other : NDArray[np.float64]
        Samples per label. Shape (labels,).
    """
    return float(np.minimum(one / one.sum(), other / other.sum()).sum())


def has_shifted(
    now: Sequence[int], then: Sequence[int], examples: int, tolerance: float = 0.2
) -> bool:
    """Return whether label counts have moved further than τ_i = tolerance / LabelSize · n_i.

    The distance is the mean over the labels of ``|count now − count then|``: with a tolerance of
    0.2 it is passed when a fifth of the samples have come, gone or changed.

    Parameters
    ----------
    now, then : Sequence[int]
        Samples per label. Shape (labels,).
    examples : int
        n_i.
    tolerance : float
        Share of the data.
    """
    difference = np.abs(np.asarray(now, np.int64) - np.asarray(then, np.int64))
    return bool(difference.mean() > tolerance / len(difference) * examples)


def find_groups(
    deltas: NDArray[np.float32], groups: int, measure: str, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Group the first updates, Algorithm 3.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m, at most n.
    measure : str
        ``"edc"``: k-means++ on the updates' cosines to their main directions. ``"madc"``:
        hierarchical clustering on the differences of their cosines. ``"random-clients"``: each
        update is a group (RCC), if m random clients have trained.
    rng : numpy.random.Generator
        Draws what is left to chance.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … m − 1 per update. Shape (n,).
    """
    if measure == "edc":
        return group_by_edc(deltas, groups, seed=int(rng.integers(2**31)))
    if measure == "madc":
        return linkage(madc(cosines(deltas, deltas)), groups)
    return np.arange(len(deltas))


def group_by_edc(deltas: NDArray[np.float32], groups: int, seed: int) -> NDArray[np.int64]:
    """Group updates by the Euclidean distance of decomposed cosines (EDC), eq (7).

    The updates' m main directions V come from a truncated SVD; each update is embedded as its
    cosines to them, divided by m, and k-means++ groups these points.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m, at most n.
    seed : int
        Of k-means++.
    """
    directions = np.linalg.svd(deltas, full_matrices=False)[2][:groups]
    points = cosines(deltas, directions) / groups
    method = KMeans(n_clusters=groups, init="k-means++", n_init=10, random_state=seed)
    return numbered(method.fit_predict(points))


def madc(similarity: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean of absolute differences of pairwise cosines (MADC), eq (6).

    ``MADC(i, j) = 1/(n−2) Σ_{z≠i,j} |S(i,z) − S(j,z)|``; for two clients, where the sum is empty,
    it is 0.

    Parameters
    ----------
    similarity : NDArray[np.floating]
        S. Shape (n, n).
    """
    n = len(similarity)
    distances = np.zeros((n, n))
    for i in range(n):
        differences = np.abs(similarity - similarity[i])
        # z = i and z = j are the two terms that the sum leaves out.
        own = differences[:, i] + differences[np.arange(n), np.arange(n)]
        distances[i] = (differences.sum(axis=1) - own) / max(1, n - 2)
    np.fill_diagonal(distances, 0.0)
    return (distances + distances.T) / 2.0
