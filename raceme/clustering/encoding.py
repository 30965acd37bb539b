"""How CASA keeps models for comparison: whole, or as sketches that take far less memory.

Every code has two sides: what is stored of one model, and what another is compared by. Their
product is the cosine of the two models, exactly or nearly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.random_projection import SparseRandomProjection

from raceme.config.errors import UserError
from raceme.config.room import check_room
from raceme.protocol.messages import Vector


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


def exact_error(similarity: NDArray[np.floating], models: NDArray[np.float32]) -> float:
    """Return the largest error of a matrix of cosines against the models' exact ones.

    Parameters
    ----------
    similarity : ndarray
        Cosines to be checked; NaN where unknown. Shape (n, n).
    models : ndarray
        The models. Shape (n, d).
    """
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    return float(np.nanmax(np.abs(similarity - unit @ unit.T)))
