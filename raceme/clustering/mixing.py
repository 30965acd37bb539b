"""Arithmetic on flat models."""

from __future__ import annotations

import numpy as np

from raceme.protocol.messages import Vector


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0


def unit(vector: Vector) -> Vector:
    """Return a vector at unit length; a zero vector as it is."""
    length = np.float32(np.linalg.norm(vector)) or np.float32(1.0)
    return np.asarray(vector / length)
