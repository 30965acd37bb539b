"""How much of its own latest model a client uses beside its cluster's (graded sharing).

Members of one cluster need not be alike: of the same two or three classes, one may have little but
the first. A cluster's model is a mean that fits none of them best, and what a member makes of it in
one task fits that member better, but is learnt from its own few samples. What a client uses lies
between: w + μ (z − w), where μ grows with how far the client is from the others of its cluster, and
with its samples. Of members that are alike, μ is near 0, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.probes import Probes
from raceme.protocol.messages import Vector

_STANDING = 100
"""Members of a cluster that stand for it in a large fleet."""


def apartness(
    probes: Probes, members: Mapping[int, Sequence[str]], asked: Collection[str]
) -> dict[str, float]:
    """Return how far clients are from the others of their cluster, on average, within [0, 1].

    The mean of `Probes.distances`, free of the chance of mini-batches: 0 of a client that is like
    them, 1 of one that has nothing in common with them. In a large fleet it is the distance from
    the first hundred, the client's own among them if it is one.

    Parameters
    ----------
    probes : Probes
        What is known of the clients.
    members : Mapping[int, Sequence[str]]
        Clear clients of each cluster.
    asked : Collection[str]
        Those to answer for.

    Returns
    -------
    dict[str, float]
        Of those that are clear and not alone in their cluster.
    """
    found: dict[str, float] = {}
    for together in members.values():
        own = [client for client in together if client in asked]
        if len(together) < 2 or not own:
            continue
        if probes.is_large:
            distances = probes.distances_to_groups(own, [list(together[:_STANDING])])[:, 0]
        else:
            rows = [place for place, client in enumerate(together) if client in asked]
            distances = probes.distances(list(together))[rows].sum(axis=1) / (len(together) - 1)
        found |= dict(zip(own, np.clip(distances, 0.0, 1.0).tolist(), strict=True))
    return found


def own_share(apart: float, samples: int, prior: float) -> float:
    """Return μ = n D / (n D + n₀ (1 − D)), the share of its own latest model in what it uses.

    As in empirical Bayes: D / (1 − D) is how large what is a client's own is beside what it has in
    common with the others, and n samples of it count beside a prior that is worth n₀ of them. To a
    client that has nothing in common with its cluster, the cluster's model says nothing. More
    samples than n₀ count as n₀, by which μ = D: clients that are alike keep some distance by
    chance, however many samples they have.

    Parameters
    ----------
    apart : float
        D: its distance from the others of its cluster, from 0 to 1.
    samples : int
        n: its training samples, 1 at least.
    prior : float
        n₀, above 0.
    """
    own = min(samples, prior) * apart
    return own / (own + prior * (1.0 - apart))


def inside(clusters: Clusters, clients: Iterable[str]) -> dict[int, list[str]]:
    """Return clients by their main cluster."""
    found: dict[int, list[str]] = {}
    for client in clients:
        found.setdefault(clusters.main(client), []).append(client)
    return found


def between(shared: Vector, own: Vector, share: float) -> NDArray[np.float32]:
    """Return w + μ (z − w). Shape (d,).

    Parameters
    ----------
    shared : Vector
        w: the model of the client's cluster. Shape (d,).
    own : Vector
        z: the client's latest model. Shape (d,).
    share : float
        μ.
    """
    return np.asarray(shared + np.float32(share) * (own - shared), np.float32)
