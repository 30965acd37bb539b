"""Arithmetic on flat models."""

from __future__ import annotations

import numpy as np

from raceme.messages import Vector
from raceme.strategies.model import Model


def mix(model: Model, w_i: Vector, alpha: float) -> None:
    """Mix an update into a model in place: w_g ← α w_i + (1 − α) w_g.

    Written as w_g + α (w_i − w_g), which needs one temporary array.
    """
    step = np.subtract(w_i, model.vector)
    step *= np.float32(alpha)
    model.vector += step
    model.version += 1


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0
