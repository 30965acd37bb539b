"""CASA's buffers: recent models of other clients, kept to be compared with a client's next one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core.errors import UserError
from raceme.core.files import check_room
from raceme.core.messages import Vector

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
        Length of the model.
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
        Decides the projection.
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
        Their lengths. Shape (capacity,).
    references : NDArray[np.int64]
        Buffers that hold each stored model; 0 marks a free place. Shape (capacity,).
    total : int
        Σ_j |buf_j|.
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
            Whose buffer.
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
            Whose buffer.
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
            Draws among equal ones.
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
