"""Groups that are found anew, over all clients: which of them is which present cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from raceme.clustering.clusters import Clusters


def kept_homes(
    clients: Sequence[str], labels: NDArray[np.integer], homes: Mapping[str, int]
) -> dict[int, int]:
    """Return which cluster a label stands for, so that most clients stay where they are.

    Labels are matched one to one with the clusters that clients are in (the Hungarian method); a
    label that shares no client with its cluster, or finds none, is left out.

    Parameters
    ----------
    clients : Sequence[str]
        Who was grouped.
    labels : NDArray[np.integer]
        Label of each of them, from 0. Shape (n,).
    homes : Mapping[str, int]
        Cluster of those of them that have one.
    """
    clusters = sorted(set(homes.values()))
    common = np.zeros((int(labels.max()) + 1, len(clusters)), np.int64)
    for client, label in zip(clients, labels, strict=True):
        if client in homes:
            common[label, clusters.index(homes[client])] += 1
    rows, columns = linear_sum_assignment(-common)
    return {
        int(row): clusters[column]
        for row, column in zip(rows, columns, strict=True)
        if common[row, column]
    }


def regroup(clusters: Clusters, clients: Sequence[str], labels: NDArray[np.integer]) -> None:
    """Move clients into groups that were found anew; found clusters, and give up empty ones.

    A new cluster starts with the model of the one that most of its clients come from, or that
    serves the most clients.

    Parameters
    ----------
    clusters : Clusters
        Where they are.
    clients : Sequence[str]
        Who was grouped.
    labels : NDArray[np.integer]
        Label of each of them, from 0. Shape (n,).
    """
    homes = {client: clusters.main(client) for client in clients if clusters.is_placed(client)}
    kept = kept_homes(clients, labels, homes)
    for label in range(int(labels.max()) + 1):
        own = [client for client, other in zip(clients, labels, strict=True) if other == label]
        if not own:
            continue
        if label in kept:
            for client in own:
                clusters.assign(client, kept[label])
            continue
        origins = Counter(homes[client] for client in own if client in homes)
        origin = origins.most_common(1)[0][0] if origins else clusters.largest()
        clusters.found(clusters.models[origin].copy(), own)
    for cluster in list(clusters.models):
        if len(clusters.models) > 1 and not clusters.clients(cluster, online_only=False):
            clusters.retire(cluster)
