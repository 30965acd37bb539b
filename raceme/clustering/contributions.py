"""What an update brings to a step of the server: a change of weights, statistics as they are.

Methods that take steps of their own length (a cache's correction, an adaptive optimiser) must not
do so with the running mean and variance of batch normalisation: an extrapolated variance may be
negative. Of these the step takes over the mean of what clients have sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.messages import Vector

Mask = NDArray[np.bool_]
Total = NDArray[np.float64]
"""A sum of very many vectors, of which some are taken out again. In float32 what one huge vector
has pushed out of it would not come back when that is taken out. Shape (d,)."""


def contribution(delta: Vector, vector: Vector, weights: Mask | None) -> Vector:
    """Return Δ_i, but statistics and counters as the client's model has them.

    Parameters
    ----------
    delta, vector : Vector
        Δ_i, or what else is made of an update, and w_i. Shape (d,).
    weights : NDArray[np.bool_] or None
        Which numbers are weights, shape (d,); None if all are.
    """
    return delta if weights is None else np.where(weights, delta, vector)


def only_weights(vector: Vector, weights: Mask | None) -> Vector:
    """Return a vector with zeros in the place of statistics and counters. Shape (d,)."""
    return vector if weights is None else np.where(weights, vector, np.float32(0.0))


def stepped(
    vector: Vector, step: NDArray[np.floating], mean: NDArray[np.floating], weights: Mask | None
) -> Vector:
    """Return a model after a step: w + step, but statistics and counters as in a mean.

    Parameters
    ----------
    vector : Vector
        w. Shape (d,).
    step : NDArray
        How the weights change. Shape (d,).
    mean : NDArray
        Mean of contributions. Shape (d,).
    weights : NDArray[np.bool_] or None
        Which numbers are weights; None if all are. Shape (d,).
    """
    moved = vector + step
    return np.asarray(moved if weights is None else np.where(weights, moved, mean), np.float32)
