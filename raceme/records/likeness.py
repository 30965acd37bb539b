"""Clients as points, near each other if their models are alike.

Classical multidimensional scaling (Torgerson 1952) of the distances √(2 (1 − similarity)) into four
dimensions, turned and mirrored so that it lies as the one before (orthogonal Procrustes): a map
stays steady. Four groups that are all as different fit into no plane, so that for the screen it is
laid flat as a whole, with distances as nearly as can be (SMACOF: de Leeuw 1977).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import pdist, squareform
from sklearn.manifold import smacof

Points = NDArray[np.float64]
DIMENSIONS = 4
_MOST_FLATTENED = 400
"""More clients are shown by their first two dimensions."""
_TURNS = 60
_SHOWN = 200
"""Of more clients so many are placed by the eigenvectors, and the others by these."""


def positions(similarity: NDArray[np.floating]) -> Points:
    """Return a position for each client.

    Parameters
    ----------
    similarity : ndarray
        Cosines, NaN where a pair was not compared: that one is as far as the mean pair. Shape
        (n, n).

    Returns
    -------
    ndarray
        Centred, with a mean square distance from the centre of 1, unless all are the same. Shape
        (n, 4).
    """
    known = np.asarray(similarity, np.float64)
    known = np.where(np.isfinite(known), known, known.T)
    finite = np.isfinite(known)
    mean = float(known[finite].mean()) if finite.any() else 1.0
    squares = np.maximum(2.0 * (1.0 - np.where(finite, known, mean)), 0.0)
    squares = (squares + squares.T) / 2
    np.fill_diagonal(squares, 0.0)
    return _scaled(_torgerson(squares))


def positions_of_rows(rows: NDArray[np.floating]) -> Points:
    """Return a position for each client by the directions in which its numbers lie.

    The same as :func:`positions` of the rows' cosines: their principal components. The matrix
    whose eigenvectors are found is as large as the rows are wide, or as there are rows.

    Parameters
    ----------
    rows : ndarray
        Shape (n, s).

    Returns
    -------
    ndarray
        As :func:`positions`. Shape (n, 4).
    """
    known = np.asarray(rows, np.float64)
    # A model that has overflowed lies nowhere, and must not take the others along.
    known = np.where(np.isfinite(known), known, 0.0)
    lengths = np.linalg.norm(known, axis=1, keepdims=True)
    units = known / np.where(lengths > 0, lengths, 1.0)
    centred = units - units.mean(axis=0) if len(units) else units
    if len(centred) < centred.shape[1]:
        values, vectors = np.linalg.eigh(centred @ centred.T)
        points = vectors[:, -DIMENSIONS:] * np.sqrt(np.maximum(values[-DIMENSIONS:], 0.0))
    else:
        _, directions = np.linalg.eigh(centred.T @ centred)
        points = centred @ directions[:, -DIMENSIONS:]
    return _scaled(_widened(points[:, ::-1]))


def _torgerson(squares: Points) -> Points:
    """Return the directions in which squared distances differ most, of landmarks if many.

    Every client is placed by its distances to the landmarks (de Silva and Tenenbaum 2004).
    """
    n = len(squares)
    chosen = np.unique(np.linspace(0, n - 1, min(n, _SHOWN)).round().astype(int))
    inner = squares[np.ix_(chosen, chosen)]
    means = inner.mean(axis=0) if len(inner) else np.zeros(0)
    centred = -0.5 * (inner - means[:, None] - means[None, :] + (means.mean() if n else 0.0))
    values, vectors = np.linalg.eigh(centred)
    top = values[-DIMENSIONS:][::-1]
    # Distances that are no plane's have directions of no length.
    lengths = np.where(top > 1e-9 * max(top.max(initial=0.0), 1e-9), top, np.inf)
    directions = vectors[:, -DIMENSIONS:][:, ::-1]
    points = -0.5 * (squares[:, chosen] - means) @ (directions / np.sqrt(lengths))
    points = _widened(points)
    return np.asarray(points - points.mean(axis=0) if n else points)


def _widened(points: Points) -> Points:
    missing = DIMENSIONS - points.shape[1]
    return np.hstack([points, np.zeros((len(points), missing))]) if missing else points


def _scaled(points: Points) -> Points:
    size = float(np.sqrt((points**2).sum(axis=1).mean())) if len(points) else 0.0
    return points / size if size > 1e-9 else np.zeros_like(points)


def aligned(
    points: Points, clients: Sequence[str], before: Mapping[str, Sequence[float]]
) -> Points:
    """Turn and mirror points so that clients lie as near as can be to where they were.

    Parameters
    ----------
    points : ndarray
        Shape (n, k).
    clients : Sequence[str]
        Whose they are.
    before : Mapping
        Client to its position before; others are left out.
    """
    shared = [index for index, client in enumerate(clients) if client in before]
    if len(shared) < 2:
        return points
    old = np.array([before[clients[index]] for index in shared], np.float64)
    turned, _ = orthogonal_procrustes(points[shared], old - old.mean(axis=0))
    return np.asarray(points @ turned)


def flattened(
    points: Points, clients: Sequence[str], before: Mapping[str, Sequence[float]]
) -> Points:
    """Lay points into the plane, with their distances as they are as nearly as can be.

    Parameters
    ----------
    points : ndarray
        Shape (n, k).
    clients : Sequence[str]
        Whose they are.
    before : Mapping
        Client to its place in the plane before: it begins there, and stays near.

    Returns
    -------
    ndarray
        Shape (n, 2).
    """
    points = np.asarray(points, np.float64)
    n = len(points)
    flat = points[:, :2].copy()
    known = [index for index, client in enumerate(clients) if client in before]
    if n > _MOST_FLATTENED or n < 3:
        return aligned(flat, clients, before)
    if 2 * len(known) > n:
        flat = aligned(flat, clients, before)
        flat[known] = [before[clients[index]] for index in known]
    if not (np.ptp(points, axis=0).any() and np.ptp(flat, axis=0).any()):
        return np.zeros_like(flat)  # All in one place, or beginning there: no step parts them.
    wanted = squareform(pdist(points))
    flat, _ = smacof(wanted, init=flat, n_init=1, max_iter=_TURNS, eps=0.0, normalized_stress=False)
    return aligned(flat, clients, before)
