"""How a run's accuracy gets to its final value: when, and how steadily."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raceme.protocol.measure import ACCURACY, WITHIN, Measure

__all__ = ["WITHIN", "convergence_index", "unrest"]


def convergence_index(accuracies: Sequence[float], measure: Measure = ACCURACY) -> int | None:
    """Return from which evaluation on the accuracy stays near its final value.

    Papers report times to convergence without a rule for them; this one needs no smoothing, and
    does not depend on how often a run is evaluated.

    Parameters
    ----------
    accuracies : Sequence[float]
        Mean client accuracy, or mean absolute error, of each evaluation, in their order.
    measure : Measure
        Which of the two; near is a point of accuracy, or 1 % of the final error (our rule).

    Returns
    -------
    int or None
        Index of the first of the last evaluations that are all near; None if there are none, or
        if the run diverged.
    """
    values = np.asarray(accuracies, np.float64)
    if not values.size or not np.isfinite(values[-1]):
        return None
    # A float's last digit decides nothing: 0.95 is within a point of 0.94. NaN is never near.
    away = ~(np.abs(values - values[-1]) <= measure.tolerance(float(values[-1])) + 1e-9)
    return int(np.max(np.flatnonzero(away), initial=-1)) + 1


def unrest(accuracies: Sequence[float], measure: Measure = ACCURACY) -> float | None:
    """Return how far the accuracy is behind its best so far, on the mean of the evaluations.

    0 for a curve that never falls. A curve that swings, or falls back when clients change
    clusters, has more.

    Parameters
    ----------
    accuracies : Sequence[float]
        Mean client accuracy, or mean absolute error, of each evaluation, in their order.
    measure : Measure
        Which of the two.

    Returns
    -------
    float or None
        In [0, 1], or of errors in their unit; None if there are no finite accuracies.
    """
    values = np.asarray(accuracies, np.float64)
    values = values[np.isfinite(values)]
    return float(np.mean(measure.shortfall(values))) if values.size else None
