"""Arithmetic on flat models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.messages import Vector

Matrix = NDArray[np.float64]


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0


def unit(vector: Vector) -> Vector:
    """Return a vector at unit length; a zero vector as it is."""
    length = np.float32(np.linalg.norm(vector)) or np.float32(1.0)
    return np.asarray(vector / length)


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Matrix:
    """Return the cosines between the rows of two matrices; 0 where a row is zero.

    Parameters
    ----------
    first, second : NDArray[np.floating]
        Shapes (a, d) and (b, d).

    Returns
    -------
    Matrix
        Shape (a, b), within [-1, 1].
    """
    products = _unit_rows(first) @ _unit_rows(second).T
    return np.clip(np.asarray(products, np.float64), -1.0, 1.0)


def _unit_rows(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))
