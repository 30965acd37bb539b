"""Dividing clients by the directions of their updates: CFL's criterion and linkage.

Sattler et al., "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
under Privacy Constraints", 2020, sections III and IV.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering

from raceme.clustering.spectral import numbered


@dataclass(frozen=True)
class Norms:
    """How large the updates Δ_i of a cluster are.

    Attributes
    ----------
    mean : float
        ‖Σ n_i Δ_i / Σ n_i‖: small when the cluster as a whole has come to rest.
    largest : float
        max ‖Δ_i‖: large while some client still wants to go elsewhere.
    """

    mean: float
    largest: float


def norms_of(deltas: NDArray[np.float32], examples: NDArray[np.integer]) -> Norms:
    """Measure the updates of a cluster.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        Δ_i, one row per client. Shape (m, d).
    examples : NDArray[np.integer]
        n_i. Shape (m,).
    """
    shares = examples / examples.sum()
    mean = float(np.linalg.norm(shares @ deltas))
    return Norms(mean, float(np.linalg.norm(deltas, axis=1).max()))


def should_bipartition(norms: Norms, eps1: float, eps2: float) -> bool:
    """Return whether ‖mean Δ‖ < ε1 and max ‖Δ_i‖ > ε2: at rest as a whole, but not its clients."""
    return norms.mean < eps1 and norms.largest > eps2


LINKAGES = ("complete", "single")
"""Ways to tell how far two sets of clients are apart; see `linkage`."""


def linkage(
    distances: NDArray[np.floating],
    parts: int | None,
    how: str = "complete",
    below: float | None = None,
) -> NDArray[np.int64]:
    """Divide clients by agglomerative clustering.

    With the distances 1 − cos and two parts, single linkage makes the largest similarity across
    the parts as small as can be, which is what CFL's paper asks for;
    complete linkage, which keeps every part compact, is what the authors' code does.

    Parameters
    ----------
    distances : NDArray[np.floating]
        Symmetric, finite. Shape (m, m), m at least 2.
    parts : int or None
        Number of parts, at most m; None for as many as stay apart by `below`.
    how : str
        One of `LINKAGES`: the distance of two sets is that of their farthest or their nearest
        clients.
    below : float, optional
        Instead of a number of parts: sets at this distance, or farther apart, stay apart.

    Returns
    -------
    NDArray[np.int64]
        A label in 0 … parts − 1 per client, numbered in order of first appearance. Shape (m,).
    """
    method = AgglomerativeClustering(
        n_clusters=parts, metric="precomputed", linkage=how, distance_threshold=below
    )
    return numbered(method.fit_predict(distances))
