"""FedGroup: static groups, found once from the directions of the first updates.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS
2022: FlexCFL without migration is FedGroup, a preliminary version of it. Some clients train the
initial model w0 first; their updates' directions are grouped (Algorithm 3: EDC, eq 7, or MADC,
eq 6). Every other client trains w0 once too, and joins the group with the nearest direction
(eq 8). Then rounds of federated averaging go on inside each group (Algorithm 2), if wanted with
a share of the other groups' models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from raceme.clustering.bipartition import cosines, linkage
from raceme.clustering.clusters import Clusters, parts_of
from raceme.clustering.mixing import cosine
from raceme.clustering.model import Model
from raceme.clustering.spectral import numbered
from raceme.config.options import option
from raceme.protocol.messages import Vector
from raceme.server.dispatch import Dispatch, InRounds, RoundsParameters
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.picking import sample
from raceme.server.replies import Update

_COLD = 0
"""The cluster whose model is w0 at the start: where clients are that have no group yet."""


@dataclass(frozen=True)
class FedGroupParameters(RoundsParameters):
    """Hyper-parameters of FedGroup; but for the number of groups the defaults are the paper's."""

    groups: int = option(4, "m: number of groups", low=1)
    pretrain: int = option(20, "α: clients per group that train before the groups are found", low=1)
    measure: str = option("edc", "how updates are compared: edc or madc", among=("edc", "madc"))
    eta_g: float = option(0.0, "η_g: weight of the other groups' models (0: none)", low=0)


@dataclass
class FedGroupState:
    """What FedGroup knows beside its groups.

    Attributes
    ----------
    initial : Vector
        w0. Shape (d,).
    directions : dict[int, Vector]
        Δw0^(g) of each group.
    """

    initial: Vector
    directions: dict[int, Vector] = field(default_factory=dict)


class FedGroup(Method):
    """Static groups by the directions of the first updates; averaging inside them (FedGroup).

    Cluster 0 is w0, for clients without a group, until all have one.
    """

    parameters_type = FedGroupParameters
    state_type = FedGroupState
    parameters: FedGroupParameters
    state: FedGroupState
    dispatch: InRounds

    def policy(self) -> Dispatch:
        """Work in rounds: α m random clients before there are groups, then those of a round."""
        return InRounds(participants=self._participants, picking=self.parameters.picking)

    def initialize(self, vector: Vector) -> None:
        """Keep w0; all clients are cold."""
        self.clusters = Clusters({_COLD: Model(vector)})
        self.state = FedGroupState(vector.copy())

    def add_client(self, client: Client) -> None:
        """Take a client in: cold, or back into its group."""
        super().add_client(client)
        if not self.clusters.is_placed(client.client_id):
            self.clusters.assign(client.client_id, self._cold())

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        if not self.state.directions:
            # Pre-training is nobody's turn: all train in the rounds after it.
            return sample(online, self.parameters.pretrain * self.parameters.groups, rng)
        return self.dispatch.pick(online, self.parameters.participants(len(online)), rng)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Find the groups first; later place cold clients, and average inside each group."""
        if not self.state.directions:
            return self._start_groups(updates)
        is_group = self.state.directions
        trained = [update for update in updates if update.task.cluster in is_group]
        for update in updates:
            if update.task.cluster not in is_group:
                self._start_client(update)
        applied = {
            update.task.client: done
            for update, done in zip(
                trained, average_by_cluster(self.clusters, trained), strict=True
            )
        }
        if self.parameters.eta_g:
            groups = {self.clusters.main(update.task.client) for update in trained}
            mix_groups([self.models[group] for group in sorted(groups)], self.parameters.eta_g)
        self._forget_w0()
        # What a cold client trained has placed it, and is no part of its group's model.
        return [
            applied.get(client, Applied(self.clusters.main(client), staleness=0, weight=0.0))
            for client in (update.task.client for update in updates)
        ]

    def _start_groups(self, updates: Sequence[Update]) -> list[Applied]:
        """Group the clients of the first round, Algorithm 3."""
        state, clusters = self.state, self.clusters
        clients = [update.task.client for update in updates]
        deltas = np.stack([self.compared(u.vector) for u in updates]) - self.compared(state.initial)
        count = min(self.parameters.groups, len(updates))
        if self.parameters.measure == "edc":
            labels = group_by_edc(deltas, count, seed=int(self.rng.integers(2**31)))
        else:
            labels = linkage(madc(cosines(deltas, deltas)), count)
        groups = clusters.split(_COLD, parts_of(clients, labels))
        applied = average_by_cluster(clusters, updates, by_examples=False)
        for group in groups:
            direction = self.models[group].vector - state.initial
            state.directions[group] = self.compared(direction)
        for client in clusters.members:
            if not clusters.is_placed(client):
                clusters.assign(client, self._cold())
        return applied

    def _start_client(self, update: Update) -> None:
        """Put a cold client into the group g* = argmin (1 − cos(Δw0^(g), Δw_pre)) / 2, eq (8)."""
        delta = self.compared(np.asarray(update.vector - self.state.initial))
        directions = self.state.directions
        best = min(directions, key=lambda group: (1 - cosine(directions[group], delta)) / 2)
        self.clusters.assign(update.task.client, best)

    def _cold(self) -> int:
        """Return the cluster of w0; a newcomer brings it back."""
        cold = [cluster for cluster in self.models if cluster not in self.state.directions]
        return cold[0] if cold else self.clusters.found(Model(self.state.initial.copy()))

    def _forget_w0(self) -> None:
        """Let w0 go once nobody is cold."""
        for cluster in [cluster for cluster in self.models if cluster not in self.state.directions]:
            if not self.clusters.clients(cluster, online_only=False):
                self.clusters.retire(cluster)


def group_by_edc(deltas: NDArray[np.float32], groups: int, seed: int) -> NDArray[np.int64]:
    """Group updates by the Euclidean distance of decomposed cosines (EDC), eq (7).

    The updates' m main directions V come from a truncated SVD; each update is embedded as its
    cosines to them, divided by m, and k-means++ groups these points.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        One update per row. Shape (n, d).
    groups : int
        m, at most n.
    seed : int
        Of k-means++.
    """
    directions = np.linalg.svd(deltas, full_matrices=False)[2][:groups]
    points = cosines(deltas, directions) / groups
    method = KMeans(n_clusters=groups, init="k-means++", n_init=10, random_state=seed)
    return numbered(method.fit_predict(points))


def madc(similarity: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean of absolute differences of pairwise cosines (MADC), eq (6).

    ``MADC(i, j) = 1/(n−2) Σ_{z≠i,j} |S(i,z) − S(j,z)|``; for two clients, where the sum is empty,
    it is 0.

    Parameters
    ----------
    similarity : NDArray[np.floating]
        S. Shape (n, n).
    """
    n = len(similarity)
    distances = np.zeros((n, n))
    for i in range(n):
        differences = np.abs(similarity - similarity[i])
        # z = i and z = j are the two terms that the sum leaves out.
        own = differences[:, i] + differences[np.arange(n), np.arange(n)]
        distances[i] = (differences.sum(axis=1) - own) / max(1, n - 2)
    np.fill_diagonal(distances, 0.0)
    return (distances + distances.T) / 2.0


def mix_groups(models: Sequence[Model], eta_g: float) -> None:
    """Add to each group η_g Σ_{l≠j} w̃_l / ‖w̃_l‖ of the others, Algorithm 2, line 21.

    As in the authors' code the sum is divided by 1 + η_g Σ_{l≠j} 1/‖w̃_l‖: a weighted mean of the
    groups' models, w̃_j with weight 1. Without this, every round would add a norm of up to
    η_g (m − 1).

    Parameters
    ----------
    models : Sequence[Model]
        The groups that trained in the round.
    eta_g : float
        η_g.
    """
    norms = [float(np.linalg.norm(model.vector)) or 1.0 for model in models]
    units = [model.vector / np.float32(norm) for model, norm in zip(models, norms, strict=True)]
    total = np.sum(units, axis=0)
    shares = sum(1.0 / norm for norm in norms)
    mixed = [
        (model.vector + np.float32(eta_g) * (total - own))
        / np.float32(1.0 + eta_g * (shares - 1.0 / norm))
        for model, own, norm in zip(models, units, norms, strict=True)
    ]
    for model, vector in zip(models, mixed, strict=True):
        model.replace(np.asarray(vector, np.float32))
