"""Fielding: clusters by label shares; drifted clients move alone, or all are clustered again.

Li et al., "Fielding: Clustered Federated Learning with Data Drift", 2025 (arXiv 2411.01580v2). In
rounds, with averaging inside each cluster. Before each round every client states its label counts;
p_i is the share of each label. A client whose data have drifted, or that is new, moves to the
cluster with the nearest centre, the mean p_i of its clients. If a centre has thereby moved too far
since all clients were clustered last, all are clustered again: k-means, with the number of clusters
that has the highest silhouette score.

Only the paper's summary was available. Our readings: distances are L1; a client has drifted by
FlexCFL's criterion, more than ``tolerance`` of its samples having come or gone; "too far" is
``reach`` times the mean distance of two centres; a cluster of the new clustering starts from the
mean of its clients' former models. The paper's other representations (embeddings, gradients), for
drifts that leave the labels alone, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from raceme.core.events import grouped
from raceme.core.messages import LABEL_COUNTS
from raceme.core.options import option
from raceme.core.requests import Answer, InFlight, Request
from raceme.core.scheduling import InRounds, RoundsParameters, SelectionContext
from raceme.core.strategy import Needs
from raceme.strategies.shared import AveragingRounds, LabelCounts, numbered, regroup

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class FieldingParameters(RoundsParameters):
    """Hyper-parameters of Fielding."""

    most_clusters: int = option(10, "largest number of clusters to try", low=2)
    tolerance: float = option(0.2, "share of a client's samples that may come or go", low=0, high=2)
    reach: float = option(
        1 / 3, "share of the mean distance of two centres that a centre may move", low=0
    )


@dataclass(kw_only=True)
class FieldingState(LabelCounts):
    """State of Fielding besides its clusters.

    Attributes
    ----------
    centres : dict[int, Shares]
        Centre of each cluster when all clients were clustered last. Shape (labels,).
    """

    centres: dict[int, Shares] = field(default_factory=dict)


class Fielding(AveragingRounds):
    """Clusters by label shares; moves drifted clients, and clusters again if need be (Fielding)."""

    parameters_type = FieldingParameters
    state_type = FieldingState
    needs = Needs(kinds=frozenset({LABEL_COUNTS}), classes="count their labels")
    parameters: FieldingParameters
    state: FieldingState
    scheduling: InRounds

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Ask all clients for their label counts; place them, and then let a round begin."""
        asked = self.scheduling.ask_first(context, self.state.answers)
        if asked is not None:
            return [Request(client, LABEL_COUNTS, models=()) for client in asked]
        if not (self.scheduling.state.running or context.greeting):
            self._place()
        return None

    def on_sent(self, task: InFlight) -> None:
        """Record the queried client."""
        if task.kind == LABEL_COUNTS:
            self.state.ask(task.client)

    def on_answer(self, answer: Answer) -> None:
        """Process a client's label counts."""
        stated = self.progress.fleet.clients[answer.task.client].num_examples
        self.state.take(answer, stated, self.parameters.tolerance)

    # Between two rounds.

    def _place(self) -> None:
        """Move drifted and new clients to the nearest centres; cluster all again if need be."""
        state, shares = self.state, self._shares()
        if not state.centres:
            if shares:
                self._cluster(shares)
            return
        centres = self._centres(shares)
        placed = self.clusters.is_placed
        moving = [client for client in shares if client in state.cold or not placed(client)]
        for client in moving:
            self.clusters.assign(client, nearest_centre(shares[client], centres))
            state.settle(client)
        if moving and moved_too_far(state.centres, self._centres(shares), self.parameters.reach):
            self._cluster(shares)

    def _shares(self) -> dict[str, Shares]:
        """Return p_i of each client that has stated as many labels as most."""
        counts = self.state.counts
        if not counts:
            return {}
        labels, _ = Counter(map(len, counts.values())).most_common(1)[0]
        return {
            client: np.asarray(own, np.float64) / sum(own)
            for client, own in counts.items()
            if len(own) == labels
        }

    def _centres(self, shares: dict[str, Shares]) -> dict[int, Shares]:
        """Return the mean p_i of each cluster's clients."""
        placed = [client for client in shares if self.clusters.is_placed(client)]
        own = grouped((self.clusters.main(client), shares[client]) for client in placed)
        return {cluster: np.mean(members, axis=0) for cluster, members in own.items()}

    def _cluster(self, shares: dict[str, Shares]) -> None:
        """Cluster all clients; each cluster starts from the mean of their former models."""
        clients, seed = list(shares), int(self.rng.integers(2**31))
        former = {cluster: model.vector.copy() for cluster, model in self.models.items()}
        homes = {client: self.clusters.main(client) for client in clients}
        labels = best_clusters(np.stack(list(shares.values())), self.parameters.most_clusters, seed)
        regroup(self.clusters, clients, labels)
        for cluster, model in self.models.items():
            origins = Counter(homes[c] for c in clients if self.clusters.main(c) == cluster)
            if set(origins) - {cluster}:
                model.average([former[origin] for origin in origins], list(origins.values()))
        for client in clients:
            self.state.settle(client)
        self.state.centres = self._centres(shares)


def nearest_centre(share: Shares, centres: dict[int, Shares]) -> int:
    """Return the cluster with the nearest centre in L1 distance."""
    return min(centres, key=lambda cluster: float(np.abs(centres[cluster] - share).sum()))


def moved_too_far(then: dict[int, Shares], now: dict[int, Shares], reach: float) -> bool:
    """Return whether a centre is gone, or moved more than `reach` times the mean centre distance.

    Parameters
    ----------
    then, now : dict[int, Shares]
        Centre of each cluster when all clients were clustered, and now. Shape (labels,).
    reach : float
        τ/θ, with θ the mean L1 distance of two centres then.
    """
    pairs = [float(np.abs(one - other).sum()) for one, other in combinations(then.values(), 2)]
    # With a single cluster there are no pairs; this is the largest possible L1 distance.
    bound = reach * (float(np.mean(pairs)) if pairs else 2.0)
    return any(
        cluster not in now or float(np.abs(now[cluster] - centre).sum()) > bound
        for cluster, centre in then.items()
    )


def best_clusters(points: Shares, most: int, seed: int) -> NDArray[np.int64]:
    """Return k-means' clusters with the highest silhouette score. Shape (n,).

    Parameters
    ----------
    points : Shares
        p_i, one row per client. Shape (n, labels).
    most : int
        Largest number of clusters to try. Equal clients, and two clients, are one cluster.
    seed : int
        Seed of k-means.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    best, chosen = -1.0, np.zeros(len(points), np.int64)
    for count in range(2, min(most, len(np.unique(points, axis=0)), len(points) - 1) + 1):
        labels = KMeans(count, n_init=10, random_state=seed).fit_predict(points)
        score = float(silhouette_score(points, labels, metric="manhattan"))
        if score > best:
            best, chosen = score, labels
    return numbered(chosen)
