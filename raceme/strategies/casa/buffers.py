"""CASA's buffers: recent models of other clients, kept to be compared with a client's next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters
from raceme.core.errors import UserError
from raceme.core.files import check_room
from raceme.core.messages import Vector
from raceme.strategies.shared import affinity

# -----------------------------------------------------------------------------
# How CASA keeps models for comparison: whole, or as sketches that take far less memory.
#
# Every code has two sides: what is stored of one model, and what another is compared by. Their
# product is the cosine of the two models, exactly or nearly.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A model as it is compared.

    Attributes
    ----------
    stored : Vector
        What a buffer keeps; linear in the model before it is divided by `norm`. Shape (c,).
    query : Vector
        What the model is compared by with stored ones: ``stored_j @ query_i`` is cos(w_i, w_j).
    norm : float
        Euclidean length of the model.
    """

    stored: Vector
    query: Vector
    norm: float


class WholeModels:
    """Keeps models whole: cosines are exact, a code has as many numbers as the model."""

    def encode(self, w: Vector) -> Code:
        """Return the model, scaled to length 1."""
        norm = float(np.linalg.norm(w)) or 1.0
        unit = w * np.float32(1.0 / norm)
        return Code(unit, unit, norm)

    def sketch_of(self, code: Code) -> Vector:
        """Return the model. Shape (d,)."""
        return np.asarray(code.stored * np.float32(code.norm))

    def cosine(self, code: Code, mean: Vector) -> float:
        """Compare a model with a weighted mean of models, Σ share_j · norm_j · stored_j."""
        length = float(np.linalg.norm(mean))
        return float(code.query @ mean) / length if length else 0.0


class Sketches:
    """Keeps a random projection of what a model differs by from a reference.

    With w = w_ref + δ, the product of two models is |w_ref|² + w_ref·δ_i + w_ref·δ_j + δ_i·δ_j. The
    first three terms are exact; only the last, the smallest, is estimated from the projections
    (Johnson and Lindenstrauss: its relative error falls as 1/√size).

    Parameters
    ----------
    reference : Vector
        w_ref: the initial model. Shape (d,).
    size : int
        Numbers in a projection; a code has three more.
    seed : int
        Seed of the random projection: equal seeds project alike.
    """

    def __init__(self, reference: Vector, size: int, seed: int) -> None:
        if size >= len(reference):
            raise UserError(
                f"sketch must be below the {len(reference):,} weights of the model to save "
                f"anything, got {size:,}; 0 compares whole models."
            )
        # Each column of the sparse projection has so many entries: a value and an index.
        entries = size * max(1.0, len(reference) ** 0.5)
        check_room(int(32 * entries), f"A projection of models to {size:,} numbers")
        self._reference = reference.copy()
        self._squared = float(reference @ reference)
        # Only sketches need scikit-learn, which takes a second to import.
        from sklearn.random_projection import SparseRandomProjection

        projection = SparseRandomProjection(n_components=size, random_state=seed)
        projection.fit(np.zeros((1, len(reference)), np.float32))
        self._projection = projection.components_.astype(np.float32).tocsr()

    def encode(self, w: Vector) -> Code:
        """Return projection and exact terms, ordered so that the products add up."""
        delta = w - self._reference
        shared = float(self._reference @ delta)
        norm = float(np.linalg.norm(w)) or 1.0
        sketch = self._projection @ delta
        root = np.sqrt(self._squared)
        stored = np.concatenate([sketch, [shared, 1.0, root]]).astype(np.float32)
        query = np.concatenate([sketch, [1.0, shared, root]]).astype(np.float32)
        scale = np.float32(1.0 / norm)
        return Code(stored * scale, query * scale, norm)

    def sketch_of(self, code: Code) -> Vector:
        """Return the projection of δ: distances of models, nearly. Shape (size,)."""
        return np.asarray(code.stored[:-3] * np.float32(code.norm))

    def cosine(self, code: Code, mean: Vector) -> float:
        """Compare a model with a weighted mean of models; see `WholeModels`."""
        mirrored = np.concatenate([mean[:-3], [mean[-2], mean[-3], mean[-1]]])
        squared = float(mean @ mirrored)
        return float(code.query @ mean) / np.sqrt(squared) if squared > 0 else 0.0


Encoder = WholeModels | Sketches


# -----------------------------------------------------------------------------
# CASA's buffers: recent models of other clients, kept to be compared with a client's next one.
# -----------------------------------------------------------------------------


_EMPTY = -1


@dataclass
class ModelBuffers:
    """One buffer per client, holding at most one model of each other client.

    Items are references: a model that is in many buffers is stored once.

    Attributes
    ----------
    slots : NDArray[np.int32]
        ``slots[j, i]`` is where the model of client i in the buffer of client j is stored, or −1.
        Shape (capacity, capacity), of which the first n rows and columns are in use.
    codes : NDArray[np.float32]
        Stored models, each divided by its length; see `Code`. Shape (capacity, c).
    norms : NDArray[np.float32]
        Euclidean length of each stored model. Shape (capacity,).
    references : NDArray[np.int64]
        Buffers that hold each stored model; 0 marks a free place. Shape (capacity,).
    total : int
        Number of items in all buffers together, Σ_j |buf_j|.
    """

    slots: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    codes: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    norms: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    references: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    total: int = 0

    def resize(self, clients: int) -> None:
        """Make room for more clients."""
        grown = np.full((clients, clients), _EMPTY, np.int32)
        known = len(self.slots)
        grown[:known, :known] = self.slots
        self.slots = grown

    def owners(self, buffer: int) -> NDArray[np.intp]:
        """Return the clients whose models are in a client's buffer."""
        return np.flatnonzero(self.slots[buffer] != _EMPTY)

    def holds(self, owner: int) -> NDArray[np.bool_]:
        """Return for every client whether its buffer holds a model of the owner ("recurring")."""
        return np.asarray(self.slots[:, owner] != _EMPTY)

    def cosines(self, buffer: int, query: Vector) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Compare a model with all models in a client's buffer, eq (10).

        Parameters
        ----------
        buffer : int
            Index of the client that has the buffer.
        query : Vector
            The model's side of the comparison; see `Code`. Shape (c,).

        Returns
        -------
        tuple of arrays
            The owners j of the buffered models, and cos(w_i, buf_i[j]). Both of shape (m,).
        """
        owners = self.owners(buffer)
        if not len(owners):
            return owners, np.empty(0, np.float32)
        slots = self.slots[buffer, owners]
        # Gathering rows copies them; when most are wanted, comparing with all is cheaper.
        if 2 * len(slots) > len(self.codes):
            return owners, (self.codes @ query)[slots]
        return owners, self.codes[slots] @ query

    def mean_of(
        self, buffer: int, owners: NDArray[np.intp], weights: NDArray[np.float64]
    ) -> Vector:
        """Return the weighted mean of buffered models, eq (15), as they are stored.

        Parameters
        ----------
        buffer : int
            Index of the client that has the buffer.
        owners : NDArray[np.intp]
            Whose models in it. Shape (m,).
        weights : NDArray[np.float64]
            Their weights |D_j|. Shape (m,).
        """
        slots = self.slots[buffer, owners]
        shares = weights / weights.sum() * self.norms[slots]
        return np.asarray(shares.astype(np.float32) @ self.codes[slots])

    def insert(self, owner: int, code: Code, buffers: NDArray[np.intp]) -> None:
        """Put a client's model into the buffers of others that have none of it."""
        if not len(buffers):
            return
        slot = self._free_slot(len(code.stored))
        self.codes[slot] = code.stored
        self.norms[slot] = code.norm
        self.references[slot] = len(buffers)
        self.slots[buffers, owner] = slot
        self.total += len(buffers)

    def clear(self, buffer: int) -> None:
        """Empty a client's buffer."""
        self.drop(np.full(len(self.owners(buffer)), buffer), self.owners(buffer))

    def forget(self, client: int) -> None:
        """Empty a client's buffer, and take its model out of all others."""
        self.clear(client)
        holding = np.flatnonzero(self.holds(client))
        self.drop(holding, np.full(len(holding), client))

    def drop(self, buffers: NDArray[np.intp], owners: NDArray[np.intp]) -> None:
        """Take items out: for each pair, the model of the owner out of the buffer."""
        np.subtract.at(self.references, self.slots[buffers, owners], 1)
        self.slots[buffers, owners] = _EMPTY
        self.total -= len(buffers)

    def enforce(
        self,
        budget: int,
        computed: NDArray[np.bool_],
        alphas: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> None:
        """Drop items until the budget M holds, Algorithm 2.

        Items whose pair has not been computed yet are kept first, then those in the buffers of
        clients with the smallest α_i, eq (11): slow clients have fewer chances. Our reading of
        what the paper leaves open: α_i of the last update falls with t, so that of two clients
        that are equally fast the one that was served later would always win; values are taken
        for equal within a tenth, and among equal ones chance decides, lest the same buffers starve.

        Parameters
        ----------
        budget : int
            M: items in all buffers together.
        computed : NDArray[np.bool_]
            Whether the similarity of a pair is known. Shape (n, n).
        alphas : NDArray[np.float64]
            Last α_i of every client. Shape (n,).
        rng : numpy.random.Generator
            Decides among items that are equal by these rules.
        """
        excess = self.total - budget
        if excess <= 0:
            return
        buffers, owners = np.nonzero(self.slots != _EMPTY)
        chance = rng.permutation(len(buffers))
        order = np.lexsort((chance, alpha_class(alphas)[buffers], computed[buffers, owners]))
        worst = order[len(order) - excess :]
        self.drop(buffers[worst], owners[worst])

    def _free_slot(self, size: int) -> int:
        """Find a place for a model; the store doubles when it is full."""
        free = np.flatnonzero(self.references == 0)
        if len(free):
            return int(free[0])
        used = len(self.references)
        capacity = max(16, 2 * used)
        codes = np.zeros((capacity, size), np.float32)
        if used:
            codes[:used] = self.codes
        self.codes = codes
        self.norms = np.concatenate([self.norms, np.ones(capacity - used, np.float32)])
        self.references = np.concatenate([self.references, np.zeros(capacity - used, np.int64)])
        return used


def alpha_class(alphas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return α in classes of a tenth: ⌊log α / log 1.1⌋; −∞ for a client without an update."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.floor(np.log(alphas) / np.log(1.1)))


# -----------------------------------------------------------------------------
# Landmarks: clients of a large fleet that are compared pair by pair.
# -----------------------------------------------------------------------------


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
            Landmarks of the cluster, divided; the other members are appended in place.
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


def comparable(members: NDArray[np.intp], computed: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return members of which every pair is known: one with most unknown pairs goes, and so on.

    Parameters
    ----------
    members : NDArray[np.intp]
        Indices of clients. Shape (m,).
    computed : NDArray[np.bool_]
        Which pairs are known, of all clients. Shape (n, n).
    """
    unknown = ~computed[np.ix_(members, members)]
    lacking, kept = unknown.sum(axis=1), np.ones(len(members), np.bool_)
    while lacking[kept].any():
        worst = int(np.argmax(np.where(kept, lacking, -1)))
        kept[worst] = False
        lacking -= unknown[worst]
    return members[kept]


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
            Indices of the cluster's clients.
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
            Largest eigengap of these affinities.
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
            Index of the client, a member of the cluster.
        others : NDArray[np.intp]
            Clients to which its similarity changes.
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
