"""FedGroup: static groups, found once from the directions of the first updates.

Duan et al., "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift", TPDS
2022: FlexCFL without migration is FedGroup, a preliminary version of it. Some clients train the
initial model w0 first; their updates' directions are grouped (Algorithm 3: EDC, eq 7, or MADC,
eq 6). Every other client trains w0 once too, and joins the group with the nearest direction
(eq 8). Then rounds of federated averaging go on inside each group (Algorithm 2), if wanted with
a share of the other groups' models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.bipartition import complete_linkage, cosines
from raceme.strategies.clusters import Clustered, Clusters, parts_of
from raceme.strategies.fleet import Client
from raceme.strategies.mixing import cosine
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update
from raceme.strategies.rounds import Rounds, RoundsParameters
from raceme.strategies.spectral import numbered

_COLD = 0
"""The cluster whose model is w0: where clients are that have no group yet."""


@dataclass(frozen=True)
class FedGroupParameters(RoundsParameters):
    """Hyper-parameters of FedGroup; but for the number of groups the defaults are the paper's."""

    groups: int = option(4, "m: number of groups", low=1)
    pretrain: int = option(20, "α: clients per group that train before the groups are found", low=1)
    measure: str = option("edc", "how updates are compared: edc or madc", among=("edc", "madc"))
    eta_g: float = option(0.0, "η_g: weight of the other groups' models (0: none)", low=0)


@dataclass
class FedGroupState:
    """The groups.

    Attributes
    ----------
    clusters : Clusters
        Groups and members; cluster 0 is w0, for clients without a group, until all have one.
    initial : Vector
        w0. Shape (d,).
    directions : dict[int, Vector]
        Δw0^(g) of each group.
    """

    clusters: Clusters
    initial: Vector
    directions: dict[int, Vector] = field(default_factory=dict)


class FedGroup(Clustered, Rounds):
    """Static groups by the directions of the first updates; averaging inside them (FedGroup)."""

    parameters_type = FedGroupParameters
    state_type = FedGroupState
    parameters: FedGroupParameters
    state: FedGroupState

    def initialize(self, vector: Vector) -> None:
        """Keep w0; all clients are cold."""
        self.state = FedGroupState(Clusters({_COLD: Model(vector)}), vector.copy())

    def add_client(self, client: Client) -> None:
        """Take a client in: cold, or back into its group."""
        clusters = self.state.clusters
        clusters.of.setdefault(client.client_id, _COLD)
        clusters.online[client.client_id] = True
        if clusters.of[client.client_id] == _COLD and _COLD not in clusters.models:
            clusters.models[_COLD] = Model(self.state.initial.copy())

    def participants(self) -> list[Client]:
        """Return α m random clients before there are groups, then those of a round."""
        if not self.state.directions:
            return self._sample(self.parameters.pretrain * self.parameters.groups)
        return super().participants()

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Find the groups first; later place cold clients, and average inside each group."""
        if not self.state.directions:
            return self._start_groups(updates)
        trained = [update for update in updates if update.task.cluster != _COLD]
        for update in updates:
            if update.task.cluster == _COLD:
                self._start_client(update)
        applied = {
            update.task.client: done
            for update, done in zip(trained, self._average(trained), strict=True)
        }
        if self.parameters.eta_g:
            groups = [model for group, model in self.models.items() if group != _COLD]
            mix_groups(groups, self.parameters.eta_g)
        self._forget_w0()
        # What a cold client trained has placed it, and is no part of its group's model.
        return [
            applied.get(client, Applied(self.cluster_of(client), staleness=0, weight=0.0))
            for client in (update.task.client for update in updates)
        ]

    def _start_groups(self, updates: Sequence[Update]) -> list[Applied]:
        """Group the clients of the first round, Algorithm 3."""
        state, clients = self.state, [update.task.client for update in updates]
        deltas = np.stack([update.vector for update in updates]) - state.initial
        count = min(self.parameters.groups, len(updates))
        if self.parameters.measure == "edc":
            labels = group_by_edc(deltas, count, seed=int(self.rng.integers(2**31)))
        else:
            labels = complete_linkage(madc(cosines(deltas, deltas)), count)
        self._split(_COLD, parts_of(clients, labels), gap=math.nan, threshold=math.nan)
        state.clusters.models[_COLD] = Model(state.initial.copy())
        applied = self._average(updates, by_examples=False)
        for group, model in self.models.items():
            if group != _COLD:
                state.directions[group] = model.vector - state.initial
        self._forget_w0()
        return applied

    def _start_client(self, update: Update) -> None:
        """Put a cold client into the group g* = argmin (1 − cos(Δw0^(g), Δw_pre)) / 2, eq (8)."""
        delta = np.asarray(update.vector - self.state.initial)
        directions = self.state.directions
        best = min(directions, key=lambda group: (1 - cosine(directions[group], delta)) / 2)
        self._assign(update.task.client, best)

    def _forget_w0(self) -> None:
        """Let w0 go once nobody is cold; a newcomer brings it back."""
        clusters = self.state.clusters
        if _COLD not in clusters.of.values():
            clusters.models.pop(_COLD, None)


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
    """Add to each group η_g Σ_{l≠j} w̃_l / ‖w̃_l‖ of the others, Algorithm 2, line 21."""
    units = [model.vector / (np.linalg.norm(model.vector) or 1.0) for model in models]
    total = np.sum(units, axis=0)
    for model, own in zip(models, units, strict=True):
        model.vector += np.float32(eta_g) * (total - own).astype(np.float32)
        model.version += 1
