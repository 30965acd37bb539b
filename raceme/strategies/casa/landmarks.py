"""Landmarks: the clients of a large fleet that are compared pair by pair, and stand for the others.

They are drawn at random. Of every client the latest model is kept as a sketch, and a client goes
where those landmarks go that its own sketch is nearest to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters
from raceme.core.messages import Vector
from raceme.strategies.casa.buffers import Encoder, Sketches, WholeModels
from raceme.strategies.shared import affinity

_NEIGHBOURS = 10
"""Nearest sketches that decide together."""
_SHORT = 256
"""Numbers of a sketch by which clients are placed, if models are compared whole."""


def shortener(reference: Vector) -> Encoder:
    """Return what makes short sketches of models that are compared whole."""
    return Sketches(reference, _SHORT, seed=0) if len(reference) > 2 * _SHORT else WholeModels()


@dataclass
class Landmarks:
    """The clients that are no landmarks, and the latest models of all as sketches.

    Arrays have room for more clients than there are, n.

    Attributes
    ----------
    others : dict[str, bool]
        The clients that are no landmarks; empty where all are.
    clients : list[str]
        Clients with a sketch in order of arrival; length n.
    sketches : NDArray[np.float32]
        Distances between rows are, nearly, those between models. Shape (capacity, c).
    """

    others: dict[str, bool] = field(default_factory=dict)
    clients: list[str] = field(default_factory=list)
    sketches: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        self._rows = {client: row for row, client in enumerate(self.clients)}

    def drawn(self, client: str, most: int, rng: np.random.Generator) -> int | None:
        """Return the index of the landmark whose place a new client takes; None if it takes none.

        Every client so far has had the same chance (Vitter's reservoir, 1985).
        """
        index = int(rng.integers(most + len(self.others) + 1))
        if index < most:
            return index
        self.others[client] = True
        return None

    def note(self, client: str, sketch: Vector) -> None:
        """Keep a client's latest model."""
        row = self._rows.get(client)
        if row is None:
            row = self._rows[client] = len(self.clients)
            self.clients.append(client)
            if row == len(self.sketches):
                more = np.zeros((max(16, row // 2), len(sketch)), np.float32)
                self.sketches = np.concatenate([self.sketches, more]) if row else more
        self.sketches[row] = sketch

    def share_out(self, members: Sequence[str], parts: list[list[str]]) -> None:
        """Add the members of a cluster that are no landmarks to its parts.

        Those without a sketch are left out: they are newcomers when their first model comes.

        Parameters
        ----------
        members : Sequence[str]
            All clients of the cluster, offline ones included.
        parts : list[list[str]]
            Its landmarks, divided.
        """
        labels = {client: label for label, part in enumerate(parts) for client in part}
        known = [client for client in labels if client in self._rows]
        others = [c for c in members if c in self.others and c in self._rows]
        if known and others:
            found = self._nearest(others, known, [labels[client] for client in known])
            for client, label in zip(others, found.tolist(), strict=True):
                parts[label].append(client)

    def cluster_near(self, client: str, landmarks: Iterable[str], clusters: Clusters) -> int:
        """Return the cluster of most of the landmarks that a newcomer is nearest to."""
        known = [c for c in landmarks if c in self._rows and clusters.is_placed(c)]
        if client not in self._rows or not known:
            return clusters.largest()
        return int(self._nearest([client], known, [clusters.main(c) for c in known])[0])

    def _nearest(
        self, clients: Sequence[str], known: Sequence[str], labels: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return for each client the label that most of its nearest neighbours have."""
        # Only a large fleet needs scikit-learn, which takes a second to import.
        from sklearn.neighbors import KNeighborsClassifier

        vote = KNeighborsClassifier(min(_NEIGHBOURS, len(known)), algorithm="brute")
        vote.fit(self._of(known), np.asarray(labels))
        return np.asarray(vote.predict(self._of(clients)), np.int64)

    def _of(self, clients: Iterable[str]) -> NDArray[np.float32]:
        """Return the sketches of clients. Shape (m, c)."""
        return self.sketches[[self._rows[client] for client in clients]]


# -----------------------------------------------------------------------------
# When a cluster need not be looked at: a bound on how far its eigenvalues can have moved.
#
# Looking at a cluster means the eigenvalues of its Laplacian, the dearest part of CASA. An update
# changes one row and column of the similarities. By Weyl's inequality no eigenvalue moves by more
# than the spectral norm of the change, so no gap grows by more than twice that. As long as the
# largest gap seen, and all that may have been added since, stay below the threshold, the decision
# is known to be no without looking. Decisions are exactly those of looking every time.
# -----------------------------------------------------------------------------


_ROUNDING = 1e-10
"""Added to a bound: what rounding may do to computed eigenvalues."""


@dataclass
class SplitWatch:
    """What is known of one cluster without looking.

    Attributes
    ----------
    members : NDArray[np.intp]
        Its clients that are online, by index. Shape (m,).
    position : NDArray[np.intp]
        Where each client is among the members; −1 for the others. Shape (n,).
    missing : int
        Pairs of members whose similarity is not known.
    degrees : NDArray[np.float64] or None
        Row sums of the similarities; None until the first look. Shape (m,).
    gap : float
        Largest eigengap at the last look.
    drift : float
        Bound on how far any eigenvalue has moved since.
    """

    members: NDArray[np.intp]
    position: NDArray[np.intp]
    missing: int
    degrees: NDArray[np.float64] | None = None
    gap: float = 0.0
    drift: float = 0.0

    @classmethod
    def over(
        cls, members: NDArray[np.intp], computed: NDArray[np.bool_], clients: int
    ) -> SplitWatch:
        """Start to watch a cluster.

        Parameters
        ----------
        members : NDArray[np.intp]
            Its clients by index.
        computed : NDArray[np.bool_]
            Which pairs are known, of all clients.
        clients : int
            How many clients there are in all.
        """
        position = np.full(clients, -1, np.intp)
        position[members] = np.arange(len(members))
        known = int(np.count_nonzero(computed[np.ix_(members, members)]))
        return cls(members, position, missing=(len(members) ** 2 - known) // 2)

    def look(self, weights: NDArray[np.float64], gap: float) -> None:
        """Note what a look has found.

        Parameters
        ----------
        weights : NDArray[np.float64]
            Affinities of the members. Shape (m, m).
        gap : float
            Their largest eigengap.
        """
        self.degrees, self.gap, self.drift = weights.sum(axis=1), gap, 0.0

    def change(
        self,
        i: int,
        others: NDArray[np.intp],
        new: NDArray[np.float32],
        similarity: NDArray[np.float32],
        computed: NDArray[np.bool_],
    ) -> None:
        """Take note that similarities of client i are about to change.

        Parameters
        ----------
        i : int
            A member.
        others : NDArray[np.intp]
            Clients with whom its similarity changes.
        new : NDArray[np.float32]
            To what. Same shape as `others`.
        similarity, computed : ndarray
            The matrices before the change.
        """
        inside = self.position[others] >= 0
        others, new = others[inside], new[inside]
        self.missing -= int(np.count_nonzero(~computed[i, others]))
        if self.degrees is None or not len(others):
            return
        row = affinity(similarity[i, self.members])
        change = np.zeros(len(self.members))
        at = self.position[others]
        change[at] = affinity(new) - row[at]
        self.drift += self._movement(int(self.position[i]), row, change)

    def bound(self) -> float:
        """Return what the largest eigengap cannot exceed now; infinity before the first look."""
        if self.degrees is None:
            return np.inf
        return self.gap + 2.0 * self.drift + _ROUNDING

    def _movement(self, i: int, row: NDArray[np.float64], change: NDArray[np.float64]) -> float:
        """Bound the spectral norm of the Laplacian's change when row and column i change.

        With N = D^(−1/2) S D^(−1/2) and R = D'^(−1/2) D^(1/2) = I + F:
        N' − N = D'^(−1/2) (S' − S) D'^(−1/2) + (F N + N F + F N F). The first part has rank 2 and
        the norm of its row; in the second only the entry f_i is not tiny, and |N| = 1.
        """
        assert self.degrees is not None, "only after a look"
        before = self.degrees
        after = before + change
        after[i] += change.sum()
        self.degrees = after
        direct = np.linalg.norm(change / np.sqrt(after[i] * after))
        factor = np.abs(np.sqrt(before / after) - 1.0)
        row_norm = np.linalg.norm(row / np.sqrt(before[i] * before))
        own = float(factor[i])
        largest = float(factor.max())
        factor[i] = 0.0
        return float(direct + 2.0 * own * row_norm + 2.0 * factor.max() + largest**2)
