"""Finding out whether a cluster is several: eigengaps of the Laplacian, spectral clustering."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from sklearn.cluster import SpectralClustering

Matrix = NDArray[np.float64]

_LARGE = 300
"""From this size on only the first eigenvalues are computed: that is when it is faster."""
_RESTARTS = 100
"""Restarts of Lanczos after which all eigenvalues are computed after all."""
_SHUFFLES = 10
_EIGENVALUES = 10
"""Number of smallest eigenvalues that are looked at."""


@dataclass(frozen=True)
class Gap:
    """The largest eigengap of a cluster.

    Attributes
    ----------
    parts : int
        R: number of parts that it suggests.
    size : float
        λ_{R+1} − λ_R.
    """

    parts: int
    size: float


def affinity(similarity: NDArray[np.floating]) -> Matrix:
    """Return a similarity matrix as edge weights: symmetric float64, negative ones as 0.

    Cosines of whole weight vectors are positive in practice; a graph has no negative edges, so
    opposed models count as not connected (our reading, the paper does not say).
    """
    weights: Matrix = np.maximum(similarity, 0.0, dtype=np.float64)
    return weights


def laplacian(weights: Matrix) -> Matrix:
    """Return L = I − D^(−1/2) S D^(−1/2), CASA's eq (12), with D the row sums of S.

    Parameters
    ----------
    weights : Matrix
        S: similarities inside a cluster, symmetric, not negative, diagonal 1. Shape (m, m).
    """
    scale = _scale(weights)
    return np.asarray(np.eye(len(weights)) - weights * scale[:, None] * scale[None, :])


def largest_gap(weights: Matrix) -> Gap | None:
    """Return R = argmax over k ≥ 2 of λ_{k+1} − λ_k, CASA's eq (13), among the first eigenvalues.

    k = 1 is left out: with dense positive similarities the first gap is always the largest.

    Returns
    -------
    Gap or None
        None for fewer than three clients, which have no such gap.
    """
    count = min(_EIGENVALUES, len(weights))
    if count < 3:
        return None
    if len(weights) < _LARGE:
        values = eigh(laplacian(weights), eigvals_only=True, driver="ev")[:count]
    else:
        # The smallest of L are the largest of I − L, which Lanczos finds without a factorisation
        # and without a second matrix of this size; a fixed start makes it repeatable.
        scale = _scale(weights)
        shifted = LinearOperator(
            weights.shape, matvec=lambda x: scale * (weights @ (scale * x)), dtype=np.float64
        )
        start = np.random.default_rng(0).normal(size=len(weights))
        how = {"which": "LA", "v0": start, "return_eigenvectors": False, "maxiter": _RESTARTS}
        try:
            values = np.sort(1.0 - eigsh(shifted, k=count, **how))
        except ArpackNoConvergence:
            # Clients that are all alike: the eigenvalues are nearly one, and Lanczos would not end.
            only = (0, count - 1)
            values = eigh(laplacian(weights), eigvals_only=True, subset_by_index=only)
    gaps = np.diff(values)[1:]
    best = int(np.argmax(gaps))
    return Gap(parts=best + 2, size=float(gaps[best]))


def noise_gap(weights: Matrix, rng: np.random.Generator) -> float:
    """Return the largest eigengap that the same similarities have without any structure.

    They are dealt out to the pairs anew, at random, a few times, and the largest gap counts: Horn's
    parallel analysis (Psychometrika 1965), which tells components from noise.
    """
    pairs = np.triu_indices(len(weights), k=1)
    largest = 0.0
    for _ in range(_SHUFFLES):
        shuffled = np.eye(len(weights))
        shuffled[pairs] = rng.permutation(weights[pairs])
        gap = largest_gap(np.maximum(shuffled, shuffled.T))
        largest = max(largest, gap.size if gap else 0.0)
    return largest


def _scale(weights: Matrix) -> NDArray[np.float64]:
    """Return the diagonal of D^(−1/2)."""
    return np.asarray(1.0 / np.sqrt(weights.sum(axis=1)))


def should_split(alpha_c: float, gap: float, gamma: float) -> bool:
    """Return whether α_c,k < (λ_{R+1} − λ_R)^γ, CASA's eq (14).

    γ is an exponent: gaps lie between 1e-4 and 1e-3, and 0.0008^0.15 = 0.34 is comparable to α.
    """
    return bool(alpha_c < max(gap, 0.0) ** gamma)


def partition(weights: Matrix, parts: int, seed: int) -> NDArray[np.int64]:
    """Split clients by spectral clustering on their similarities.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … parts − 1 per client, numbered in order of first appearance. Shape (m,).
    """
    if parts == len(weights):
        # scikit-learn warns that it cannot look for so many eigenvectors as it usually does.
        return np.arange(parts)
    method = SpectralClustering(n_clusters=parts, affinity="precomputed", random_state=seed)
    return numbered(method.fit_predict(weights))


def numbered(labels: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return labels numbered in order of first appearance: 2, 0, 2, 1 becomes 0, 1, 0, 2."""
    _, first, where = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[where])
