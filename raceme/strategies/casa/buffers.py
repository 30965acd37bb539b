"""CASA's buffers: recent models of other clients for comparison with a client's next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters
from raceme.core.errors import UserError
from raceme.core.files import check_memory
from raceme.core.messages import Vector
from raceme.strategies.shared import affinity

# -----------------------------------------------------------------------------
# Storage of models for comparison: whole, or as sketches that need far less memory.
#
# A code has two vectors: a stored one and a query. The product of one model's stored and another's
# query vector is their cosine, exactly or approximately.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A model's code for comparisons.

    Attributes
    ----------
    stored : Vector
        Vector kept in buffers; linear in the model before the division by `norm`. Shape (c,).
    query : Vector
        Vector for comparisons with stored ones: ``stored_j @ query_i`` is cos(w_i, w_j).
    norm : float
        Euclidean length of the model.
    """

    stored: Vector
    query: Vector
    norm: float


def since(w: Vector, base: Vector | None) -> Vector:
    """Return the compared vector: the model, or its change since the received one (our own).

    Whole models, and changes since the initial model, also depend on the time of training, so that
    stragglers differ from clients with equal data. Changes since the received model do not.
    """
    return w if base is None else w - base


class WholeModels:
    """Keeps whole models: exact cosines, codes as large as models."""

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
    """Keeps a random projection of a model's difference from a reference.

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
        # Entries per column of the sparse projection, each a value and an index.
        entries = size * max(1.0, len(reference) ** 0.5)
        check_memory(int(32 * entries), f"A projection of models to {size:,} numbers")
        self._reference = reference.copy()
        self._squared = float(reference @ reference)
        # Imported late: takes a second, and only sketches need it.
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
        """Return the projection of δ, which approximates distances of models. Shape (size,)."""
        return np.asarray(code.stored[:-3] * np.float32(code.norm))

    def cosine(self, code: Code, mean: Vector) -> float:
        """Compare a model with a weighted mean of models; see `WholeModels`."""
        mirrored = np.concatenate([mean[:-3], [mean[-2], mean[-3], mean[-1]]])
        squared = float(mean @ mirrored)
        return float(code.query @ mean) / np.sqrt(squared) if squared > 0 else 0.0


Encoder = WholeModels | Sketches


# -----------------------------------------------------------------------------
# CASA's buffers: recent models of other clients for comparison with a client's next one.
# -----------------------------------------------------------------------------


_EMPTY = -1


@dataclass
class ModelBuffers:
    """One buffer per client, with at most one model of each other client.

    Items are references: a model in several buffers is stored once.

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
        """Return whether each client's buffer has a model of the owner ("recurring")."""
        return np.asarray(self.slots[:, owner] != _EMPTY)

    def cosines(self, buffer: int, query: Vector) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Compare a model with all models in a client's buffer, eq (10).

        Parameters
        ----------
        buffer : int
            Index of the client that has the buffer.
        query : Vector
            Query vector of the model; see `Code`. Shape (c,).

        Returns
        -------
        tuple of arrays
            The owners j of the buffered models, and cos(w_i, buf_i[j]). Both of shape (m,).
        """
        owners = self.owners(buffer)
        if not len(owners):
            return owners, np.empty(0, np.float32)
        slots = self.slots[buffer, owners]
        # Selecting rows copies them; comparing with all rows is cheaper if most are needed.
        if 2 * len(slots) > len(self.codes):
            return owners, (self.codes @ query)[slots]
        return owners, self.codes[slots] @ query

    def mean_of(
        self, buffer: int, owners: NDArray[np.intp], weights: NDArray[np.float64]
    ) -> Vector:
        """Return the weighted mean of buffered models in stored form, eq (15).

        Parameters
        ----------
        buffer : int
            Index of the client that has the buffer.
        owners : NDArray[np.intp]
            Owners of the models. Shape (m,).
        weights : NDArray[np.float64]
            Their weights |D_j|. Shape (m,).
        """
        slots = self.slots[buffer, owners]
        shares = weights / weights.sum() * self.norms[slots]
        return np.asarray(shares.astype(np.float32) @ self.codes[slots])

    def insert(self, owner: int, code: Code, buffers: NDArray[np.intp]) -> None:
        """Insert a client's model into other clients' buffers."""
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
        """Empty a client's buffer, and remove its model from all others."""
        self.clear(client)
        holding = np.flatnonzero(self.holds(client))
        self.drop(holding, np.full(len(holding), client))

    def drop(self, buffers: NDArray[np.intp], owners: NDArray[np.intp]) -> None:
        """Remove items: for each pair, the owner's model from the buffer."""
        np.subtract.at(self.references, self.slots[buffers, owners], 1)
        self.slots[buffers, owners] = _EMPTY
        self.total -= len(buffers)

    def enforce(
        self,
        budget: int,
        computed: NDArray[np.bool_],
        alphas: NDArray[np.float64],
        rng: np.random.Generator,
        counts: str = "items",
    ) -> None:
        """Drop items until the budget M holds, Algorithm 2.

        Items of pairs without a similarity have priority, then those in the buffers of clients with
        the smallest α_i, eq (11), i.e. slow clients. Our reading where the paper is silent: ties
        are broken at random so that no buffer starves.

        Parameters
        ----------
        budget : int
            M.
        computed : NDArray[np.bool_]
            Whether the similarity of a pair is known. Shape (n, n).
        alphas : NDArray[np.float64]
            α_i of every client at present. Shape (n,).
        rng : numpy.random.Generator
            Generator for ties.
        counts : {"items", "models"}
            What M counts: items, as in Algorithm 2, or stored models, each once for all buffers
            (our reading of section 5.3.2, where other methods store "the most recent model
            parameters of each client"). The first M models in the order of items are kept.
        """
        of_models = counts == "models"
        if (np.count_nonzero(self.references) if of_models else self.total) <= budget:
            return
        buffers, owners = np.nonzero(self.slots != _EMPTY)
        chance = rng.permutation(len(buffers))
        order = np.lexsort((chance, alphas[buffers], computed[buffers, owners]))
        buffers, owners = buffers[order], owners[order]
        if of_models:
            slots = self.slots[buffers, owners]
            first = np.sort(np.unique(slots, return_index=True)[1])
            dropped = ~np.isin(slots, slots[first[:budget]])
        else:
            dropped = np.arange(len(order)) >= budget
        self.drop(buffers[dropped], owners[dropped])

    def _free_slot(self, size: int) -> int:
        """Return a free slot; the store doubles when full."""
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


# -----------------------------------------------------------------------------
# Landmarks: the clients of a large fleet that are compared pairwise.
# -----------------------------------------------------------------------------


_NEIGHBOURS = 10
"""Number of nearest sketches that vote."""
_SHORT = 256
"""Size of sketches for placing clients, if models are compared whole."""


def shortener(reference: Vector) -> Encoder:
    """Return the sketcher for models that are compared whole."""
    return Sketches(reference, _SHORT, seed=0) if len(reference) > 2 * _SHORT else WholeModels()


@dataclass
class Landmarks:
    """The other clients, and sketches of all clients' latest models.

    Arrays have spare capacity beyond the n clients.

    Attributes
    ----------
    others : dict[str, bool]
        Clients that are no landmarks; may be empty.
    clients : list[str]
        Clients with a sketch in order of arrival; length n.
    sketches : NDArray[np.float32]
        Row distances approximate model distances. Shape (capacity, c).
    """

    others: dict[str, bool] = field(default_factory=dict)
    clients: list[str] = field(default_factory=list)
    sketches: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        self._rows = {client: row for row, client in enumerate(self.clients)}

    def drawn(self, client: str, most: int, rng: np.random.Generator) -> int | None:
        """Return the index of the landmark that a new client replaces, if any.

        Reservoir sampling (Vitter 1985): every client has the same probability.
        """
        index = int(rng.integers(most + len(self.others) + 1))
        if index < most:
            return index
        self.others[client] = True
        return None

    def note(self, client: str, sketch: Vector) -> None:
        """Store the sketch of a client's latest model."""
        row = self._rows.get(client)
        if row is None:
            row = self._rows[client] = len(self.clients)
            self.clients.append(client)
            if row == len(self.sketches):
                more = np.zeros((max(16, row // 2), len(sketch)), np.float32)
                self.sketches = np.concatenate([self.sketches, more]) if row else more
        self.sketches[row] = sketch

    def share_out(self, members: Sequence[str], parts: list[list[str]]) -> None:
        """Add a cluster's other members to its parts.

        Clients without a sketch are left out and count as newcomers later.

        Parameters
        ----------
        members : Sequence[str]
            All clients of the cluster, offline ones included.
        parts : list[list[str]]
            Parts of landmarks; other members are appended in place.
        """
        labels = {client: label for label, part in enumerate(parts) for client in part}
        known = [client for client in labels if client in self._rows]
        others = [c for c in members if c in self.others and c in self._rows]
        if known and others:
            found = self._nearest(others, known, [labels[client] for client in known])
            for client, label in zip(others, found.tolist(), strict=True):
                parts[label].append(client)

    def cluster_near(self, client: str, landmarks: Iterable[str], clusters: Clusters) -> int:
        """Return the cluster of most of a newcomer's nearest landmarks."""
        known = [c for c in landmarks if c in self._rows and clusters.is_placed(c)]
        if client not in self._rows or not known:
            return clusters.largest()
        return int(self._nearest([client], known, [clusters.main(c) for c in known])[0])

    def _nearest(
        self, clients: Sequence[str], known: Sequence[str], labels: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the majority label of each client's nearest neighbours."""
        # Imported late: takes a second, and only large fleets need it.
        from sklearn.neighbors import KNeighborsClassifier

        vote = KNeighborsClassifier(min(_NEIGHBOURS, len(known)), algorithm="brute")
        vote.fit(self._of(known), np.asarray(labels))
        return np.asarray(vote.predict(self._of(clients)), np.int64)

    def _of(self, clients: Iterable[str]) -> NDArray[np.float32]:
        """Return the sketches of clients. Shape (m, c)."""
        return self.sketches[[self._rows[client] for client in clients]]


# -----------------------------------------------------------------------------
# Skipping eigenvalue computations: a bound on the movement of a cluster's eigenvalues.
#
# The eigenvalues of a cluster's Laplacian are the most expensive part of CASA. An update changes
# one row and column of the similarities. By Weyl's inequality no eigenvalue moves by more than the
# spectral norm of the change, so that no gap grows by more than twice that. While the last computed
# gap plus the largest possible growth since then stays below the threshold, the cluster cannot be
# due for a split, and no computation is needed. Decisions are exactly those of computing every
# time.
# -----------------------------------------------------------------------------


_ROUNDING = 1e-10
"""Rounding error of eigenvalues, added to a bound."""


def comparable(members: NDArray[np.intp], computed: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return members with all pairs known, by removing those with most unknown pairs.

    Parameters
    ----------
    members : NDArray[np.intp]
        Indices of clients. Shape (m,).
    computed : NDArray[np.bool_]
        Known pairs of all clients. Shape (n, n).
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
    """Known bounds of a cluster between eigenvalue computations.

    Attributes
    ----------
    members : NDArray[np.int64]
        Indices of its online clients. Shape (m,).
    position : NDArray[np.int64]
        Position of each client among the members, or −1. Shape (n,).
    missing : int
        Number of unknown pairs of members.
    degrees : NDArray[np.float64]
        Row sums of the similarities; empty before the first computation. Shape (m,).
    gap : float
        Largest eigengap at the last computation.
    drift : float
        Bound on the movement of any eigenvalue since then.
    """

    members: NDArray[np.int64]
    position: NDArray[np.int64]
    missing: int
    degrees: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    gap: float = 0.0
    drift: float = 0.0

    @classmethod
    def for_members(
        cls, members: NDArray[np.intp], computed: NDArray[np.bool_], clients: int
    ) -> SplitWatch:
        """Start to watch a cluster.

        Parameters
        ----------
        members : NDArray[np.intp]
            Indices of the cluster's clients.
        computed : NDArray[np.bool_]
            Known pairs of all clients.
        clients : int
            Total number of clients.
        """
        members = members.astype(np.int64)
        position = np.full(clients, -1, np.int64)
        position[members] = np.arange(len(members))
        known = int(np.count_nonzero(computed[np.ix_(members, members)]))
        return cls(members, position, missing=(len(members) ** 2 - known) // 2)

    def record_computation(self, weights: NDArray[np.float64], gap: float) -> None:
        """Record a computation.

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
        """Record a coming change of client i's similarities.

        Parameters
        ----------
        i : int
            Index of the client, a member of the cluster.
        others : NDArray[np.intp]
            Clients with changed similarities.
        new : NDArray[np.float32]
            New similarities, in the shape of `others`.
        similarity, computed : ndarray
            The matrices before the change.
        """
        inside = self.position[others] >= 0
        others, new = others[inside], new[inside]
        self.missing -= int(np.count_nonzero(~computed[i, others]))
        if not len(self.degrees) or not len(others):
            return
        row = affinity(similarity[i, self.members])
        change = np.zeros(len(self.members))
        at = self.position[others]
        change[at] = affinity(new) - row[at]
        self.drift += self._movement(int(self.position[i]), row, change)

    def bound(self) -> float:
        """Return an upper bound of the largest eigengap now; infinity if unknown."""
        if not len(self.degrees):
            return np.inf
        return self.gap + 2.0 * self.drift + _ROUNDING

    def _movement(self, i: int, row: NDArray[np.float64], change: NDArray[np.float64]) -> float:
        """Bound the spectral norm of the Laplacian's change when row and column i change.

        With N = D^(−1/2) S D^(−1/2) and R = D'^(−1/2) D^(1/2) = I + F:
        N' − N = D'^(−1/2) (S' − S) D'^(−1/2) + (F N + N F + F N F). The first part has rank 2 and
        the norm of its row; in the second only the entry f_i is not tiny, and |N| = 1.
        """
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
