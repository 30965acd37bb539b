"""Clipping of changes, on the server or on a device."""

from __future__ import annotations

import numpy as np

from raceme.core.messages import Vector


def clipped(change: Vector, length: float) -> Vector:
    """Return a change, scaled to a length if it is longer. Shape (d,)."""
    own = float(np.linalg.norm(change.astype(np.float64)))
    return change if own <= length else np.asarray(change * (length / own))
