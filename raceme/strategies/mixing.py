"""Arithmetic on flat models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raceme.messages import Vector
from raceme.strategies.model import Model

_BLOCK = 1 << 16
"""Elements that are mixed at a time: as much as stays in a core's cache between the operations."""


def mix(model: Model, w_i: Vector, alpha: float) -> None:
    """Mix an update into a model in place: w_g ← α w_i + (1 − α) w_g.

    Written as w_g + α (w_i − w_g), block by block, so that memory is gone through once and no
    temporary array of the model's size is needed.
    """
    w_g, share = model.vector, np.float32(alpha)
    step = np.empty(min(_BLOCK, len(w_g)), np.float32)
    for start in range(0, len(w_g), _BLOCK):
        block = w_g[start : start + _BLOCK]
        change = step[: len(block)]
        np.subtract(w_i[start : start + _BLOCK], block, out=change)
        change *= share
        block += change
    model.version += 1


def average(model: Model, vectors: Sequence[Vector], weights: Sequence[float]) -> None:
    """Replace a model by the weighted mean of its clients' models."""
    shares = np.asarray(weights, np.float64) / sum(weights)
    model.vector[...] = shares @ np.stack(vectors)
    model.version += 1


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0


def unit(vector: Vector) -> Vector:
    """Return a vector at unit length; a zero vector as it is."""
    length = np.float32(np.linalg.norm(vector)) or np.float32(1.0)
    return np.asarray(vector / length)
