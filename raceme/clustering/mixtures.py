"""Of which distributions a client's data are a mixture, told from the model that it has trained.

Li and Zhu, "Client-Driven Federated Learning" (CDFL): DistributionEstimation and
UpdateRatioCompute. A cluster k has a model w_k and a proxy set D_k, samples of its distribution
that the server has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

Shares = NDArray[np.float64]
"""Of each cluster, shape (K,): not below 0, sum 1."""


def above_bar(values: NDArray[np.float64], bar: float | None) -> NDArray[np.float64]:
    """Return what values exceed a bar by, none below 0.

    A bar above the smallest value would turn the sign of its difference and favour the worse
    cluster; such a bar is lowered to the smallest value (our reading).

    Parameters
    ----------
    values : NDArray[np.float64]
        Losses or distances, by cluster. Shape (K,).
    bar : float or None
        The bar; None for the smallest value ("min" in the paper's Table 2).
    """
    least = float(values.min())
    return values - (least if bar is None else min(bar, least))


def others_shares(values: NDArray[np.float64]) -> Shares:
    """Return, for each cluster, the share of the others in a sum: 1 − value_k / Σ value.

    Where all values are 0 nothing tells the clusters apart, and all have the same.
    """
    total = float(values.sum())
    if not total > 0:
        return np.full(len(values), 1.0 - 1.0 / len(values))
    return np.asarray(1.0 - values / total)


def estimated_shares(
    losses: NDArray[np.float64],
    differences: NDArray[np.float64],
    distances: NDArray[np.float64],
    c1: float,
    c2: float,
    sharpness: Sequence[float],
) -> Shares:
    """Estimate α, the shares of K distributions in a client's data (DistributionEstimation).

    ``α_k = (c1 Σ_{i≠k} l_i / Σ l + c2 Σ_{i≠k} d1_i / Σ d1 + (1 − c1 − c2) Σ_{i≠k} d2_i / Σ d2)
    / (K − 1)``, then ``α ← softmax(A α)``, once for each A.

    Parameters
    ----------
    losses : NDArray[np.float64]
        l: mean loss of the client's model on each proxy set, less its bar. Shape (K,).
    differences : NDArray[np.float64]
        d1: how far that is from the loss of the cluster's own model, less its bar. Shape (K,).
    distances : NDArray[np.float64]
        d2: distance of the client's model from the cluster's, less its bar. Shape (K,).
    c1, c2 : float
        Weights of the first two terms; the third has the rest.
    sharpness : Sequence[float]
        A: one number or several.

    Returns
    -------
    Shares
        α. Shape (K,).
    """
    count = len(losses)
    if count == 1:
        return np.ones(1)
    terms = zip((c1, c2, 1.0 - c1 - c2), (losses, differences, distances), strict=True)
    alpha = np.sum([c * others_shares(values) for c, values in terms], axis=0) / (count - 1)
    for factor in sharpness:
        alpha = softmax(factor * alpha)
    return np.asarray(alpha, np.float64)


def cluster_shares(alpha: Shares, bar: float | None = None) -> Shares:
    """Return β1: how much of an update goes to each cluster, relative to the one with most.

    Shares below the bar are 0; the others are divided by the largest. Shape (K,).

    Parameters
    ----------
    alpha : Shares
        α. Shape (K,).
    bar : float, optional
        β1's bar; by default the mean of α, which is 1/K ("ave" in the paper's Table 2).
    """
    least = 1.0 / len(alpha) if bar is None else bar
    return np.where(_reaches(alpha, least), alpha / alpha.max(), 0.0)


def lateness_share(last: int, received: int, a: float, b: float) -> float:
    """Return β2: ``1`` if ``e_k − τ < b``, else ``1 / (a (e_k − τ) + 1)``.

    Parameters
    ----------
    last : int
        e_k: epoch of the cluster's last update before this one.
    received : int
        τ: epoch at which the client received what it has trained.
    a, b : float
        How fast it falls, and from where on.
    """
    late = last - received
    return 1.0 if late < b else 1.0 / (a * late + 1.0)


def _reaches(alpha: Shares, bar: float) -> NDArray[np.bool_]:
    """Return which shares reach a bar; equal shares reach their mean, whatever their rounding."""
    return alpha >= bar * (1.0 - 1e-9)
