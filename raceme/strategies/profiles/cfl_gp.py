"""CFL-GP: clusters by accumulated gradients of clients at common models.

Kim et al., "Clustered Federated Learning via Gradient-based Partitioning", ICML 2024. Every P
rounds, until T_end, a criterion model m is chosen among the M cluster models. Every client returns
its gradient g_i(m), and block m of its profile becomes ``(1 − β) old + β g_i`` with
``β = 1 / (⌊(r + 1) / (M P)⌋ + 1)``, a running mean; r is the round, from 0. The profiles, columns
of a matrix, are projected on its first M left singular vectors, k-means finds M groups of these
points, and groups are named so that most clients stay where they are. Rounds of federated
averaging go on in each cluster. All clients are in the first one at the beginning.

Our readings. The criterion model goes through the clusters, as the period M P in β says; in the
authors' code it is the first (``criterion = first``); cycling is not confirmed. Before the first
round all models are equal. A client without a profile makes the next round a clustering round,
after T_end too. With M unknown (``k = 0``) there is one model for ``warmup`` rounds, a length that
is not confirmed; then the profiles are projected on the directions before the largest gap of
singular values, at least 3, and M is the number of groups with the best silhouette.

The server stores a profile of M · |w| numbers per client, or with ``profile = sampled`` a random
1 % of them. A clustering round costs a client a pass over its samples, and an upload of the model's
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, parts_of
from raceme.core.messages import Vector, forward_cost
from raceme.core.options import option
from raceme.core.requests import Answer, InvalidReplyError, Request
from raceme.core.scheduling import InRounds, RoundsParameters, SelectionContext
from raceme.core.strategy import Needs
from raceme.strategies.profiles import GRADIENT
from raceme.strategies.shared import (
    DEFAULT_K,
    QueriesFirst,
    QueryState,
    check_groups,
    kept_homes,
    kmeans,
    log_count,
    numbered,
)

_LEAST_DIRECTIONS = 3
_SAMPLED = 0.01


@dataclass(frozen=True)
class CFLGPParameters(RoundsParameters):
    """Hyper-parameters of CFL-GP; the defaults are those of the authors' code."""

    k: int = option(DEFAULT_K, "M: number of clusters (0: by the largest silhouette)", low=0)
    every: int = option(2, "P: rounds from one clustering to the next", low=1)
    until: int = option(10, "T_end: rounds in which clients are clustered", low=1)
    warmup: int = option(4, "rounds with one model, if the number of clusters is unknown", low=1)
    criterion: str = option(
        "cycle",
        "models at which gradients are taken: cycle, or first (authors' code)",
        among=("cycle", "first"),
    )
    profile: str = option(
        "all", "weights that a profile keeps: all, or 1 % sampled", among=("all", "sampled")
    )


@dataclass
class CFLGPState(QueryState):
    """State of CFL-GP besides its clusters.

    Attributes
    ----------
    profiles : dict[str, dict[int, Vector]]
        G: blocks m of each client's profile. Shape (coordinates,) each.
    criterion : int
        m: criterion model of this clustering round.
    clustered : int
        Number of the last clustering round, from 0; −1 before the first.
    answered : dict[str, bool]
        Clients with a gradient in this clustering round.
    coordinates : NDArray[np.int64]
        Weights stored in profiles; empty for all.
    """

    profiles: dict[str, dict[int, Vector]] = field(default_factory=dict)
    criterion: int = 0
    clustered: int = -1
    answered: dict[str, bool] = field(default_factory=dict)
    coordinates: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


class CFLGP(QueriesFirst):
    """Clustering by gradients accumulated at common models, in rounds (CFL-GP)."""

    parameters_type = CFLGPParameters
    state_type = CFLGPState
    parameters: CFLGPParameters
    state: CFLGPState
    scheduling: InRounds

    needs = Needs(kinds=frozenset({GRADIENT}))

    def check(self, clients: int) -> None:
        """Raise UserError if there are more clusters than clients."""
        check_groups(self.parameters.k, clients, "clusters")

    def initialize(self, vector: Vector) -> None:
        """Start with M equal models; with one if M is unknown."""
        count = self.parameters.k or 1
        if self.parameters.k:
            log_count(self, count, "k")
        self.clusters = Clusters({m: Model(vector.copy()) for m in range(count)})
        self.state = CFLGPState()
        if self.parameters.profile == "sampled":
            weights = len(self.compared(vector))
            kept = max(1, int(_SAMPLED * weights))
            chosen = np.sort(self.rng.choice(weights, kept, replace=False))
            self.state.coordinates = chosen.astype(np.int64)

    def on_join(self, client: Client) -> None:
        """Add a client; all are in the first cluster before the first clustering."""
        super().on_join(client)
        if not self.clusters.is_placed(client.client_id) and self.state.clustered < 0:
            self.clusters.assign(client.client_id, next(iter(self.models)))

    # Before a clustering round: gradients.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query gradients before clustering rounds, and cluster the clients."""
        rounds = self.scheduling.state
        if self._is_due(rounds.number, context) and not (rounds.running or context.greeting):
            asked = self.scheduling.ask_first(context, self._should_answer, every=0)
            if asked is not None:
                return [self._question(client) for client in asked]
            self._cluster(rounds.number)
        return None

    def _is_due(self, number: int, context: SelectionContext) -> bool:
        """Return whether a round, numbered from 0, is a clustering round."""
        state, options = self.state, self.parameters
        if state.clustered == number:
            return False
        if number < options.until and number % options.every == 0:
            return True
        return any(
            client.client_id not in state.profiles
            and self._has_tries(client.client_id)
            and client.client_id in context.idle
            for client in context.fleet.online()
        )

    def _should_answer(self, client: str) -> bool:
        state = self.state
        return not state.answered.get(client, False) and self._has_tries(client)

    def _question(self, client: str) -> Request:
        """Return the computation of a client's gradient at the criterion model."""
        examples = self.progress.fleet.clients[client].num_examples
        cost = names.PASSES_OF_TRAINING * forward_cost(self.train_config, examples)
        model = list(self.models)[self.state.criterion]
        return Request(client, GRADIENT, models=(model,), settings={names.COMPUTE_SCALE: cost})

    def on_answer(self, answer: Answer) -> None:
        """Update the running mean of a block of the client's profile.

        A gradient that arrives after the start of the round counts for the next clustering.

        Raises
        ------
        InvalidReplyError
            It has another shape, is too large, or of a model that was split meanwhile.
        """
        state, client, rounds = self.state, answer.task.client, self.scheduling.state
        weights = len(self.compared(next(iter(self.models.values())).vector))
        stated = answer.array(GRADIENT, (weights,))
        if not np.dot(stated, stated) <= names.LARGEST_SQUARE:
            raise InvalidReplyError("too large: its gradient's length")
        if len(state.coordinates):
            stated = stated[state.coordinates]
        share = running_share(rounds.number, len(self.models), self.parameters.every)
        if answer.task.cluster not in self.models:
            raise InvalidReplyError("its cluster has been split meanwhile")
        blocks = state.profiles.setdefault(client, {})
        criterion = list(self.models).index(answer.task.cluster)
        old = blocks.get(criterion)
        new = stated if old is None else (1.0 - share) * old + share * stated
        blocks[criterion] = new.astype(np.float32)
        if not rounds.running and answer.task.version == self.models[answer.task.cluster].version:
            # The criterion model has not changed since the query.
            state.answered[client] = criterion == state.criterion
        state.asked.pop(client, None)

    def _cluster(self, number: int) -> None:
        """Cluster the profiles, reassign clients, and choose the next criterion model."""
        state, options = self.state, self.parameters
        state.clustered, state.answered = number, {}
        clients = list(state.profiles)
        if not clients:
            return
        count = len(self.models)
        profiles = profile_rows([state.profiles[client] for client in clients], count)
        if options.k:
            self._move(clients, grouped(profiles, count, self._seed()))
        elif count == 1 and number + 1 >= options.warmup and len(clients) > 2:
            labels = found_groups(profiles, self._seed())
            if labels.any():
                self.clusters.split(0, parts_of(clients, labels))
            # The blocks so far are those of the single model, the origin of all clusters.
            return
        elif count > 1:
            self._move(clients, grouped(profiles, count, self._seed()))
        if options.criterion == "cycle":
            state.criterion = (state.criterion + 1) % len(self.models)

    def _move(self, clients: Sequence[str], labels: NDArray[np.int64]) -> None:
        """Assign clients to the groups, labelled so that most clients stay in their cluster."""
        clusters = self.clusters
        homes = {client: clusters.main(client) for client in clients if clusters.is_placed(client)}
        kept = kept_homes(clients, labels, homes)
        free = iter([cluster for cluster in clusters.models if cluster not in kept.values()])
        for label in range(int(labels.max()) + 1):
            if label not in kept:
                kept[label] = next(free)
        for client, label in zip(clients, labels, strict=True):
            clusters.assign(client, kept[int(label)])

    def _seed(self) -> int:
        return int(self.rng.integers(2**31))


def running_share(number: int, models: int, every: int) -> float:
    """Return β = 1 / (⌊(r + 1) / (M P)⌋ + 1).

    Parameters
    ----------
    number : int
        r: number of the round, from 0.
    models, every : int
        M: number of models; P: rounds between clusterings.
    """
    return 1.0 / ((number + 1) // (models * every) + 1)


def profile_rows(blocks: Sequence[dict[int, Vector]], models: int) -> NDArray[np.float64]:
    """Return profiles as rows: the blocks of M models, missing ones 0.

    Parameters
    ----------
    blocks : Sequence of dict[int, Vector]
        Blocks of each client. Shape (c,) each.
    models : int
        M: number of models, and of blocks per profile.

    Returns
    -------
    NDArray[np.float64]
        Shape (n, M c).
    """
    size = len(next(iter(blocks[0].values())))
    rows = np.zeros((len(blocks), models, size))
    for row, own in zip(rows, blocks, strict=True):
        for model, values in own.items():
            row[model] = values
    return rows.reshape(len(blocks), -1)


def main_points(profiles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return profiles projected on all left singular vectors, and the singular values.

    Parameters
    ----------
    profiles : NDArray[np.float64]
        Columns of G as rows. Shape (n, c).

    Returns
    -------
    tuple of NDArray[np.float64]
        Points, shape (n, r), and singular values in descending order, shape (r,).
    """
    # Gᵀ = V S Uᵀ: the columns of G projected on U are the rows of V S.
    directions, values, _ = np.linalg.svd(profiles, full_matrices=False)
    return directions * values, values


def grouped(profiles: NDArray[np.float64], groups: int, seed: int) -> NDArray[np.int64]:
    """Cluster profiles by k-means of their projections on the first M left singular vectors.

    Parameters
    ----------
    profiles : NDArray[np.float64]
        Profiles of the clients. Shape (n, c).
    groups : int
        M; fewer if there are fewer profiles that differ.
    seed : int
        Seed of the initial centres of k-means.

    Returns
    -------
    NDArray[np.int64]
        A label per client, numbered in order of first appearance. Shape (n,).
    """
    return kmeans(main_points(profiles)[0][:, :groups], groups, seed)


def found_groups(profiles: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Group profiles into an unknown number of groups.

    Directions are kept up to the largest gap of singular values, at least 3. The number of groups,
    between 2 and the number of directions and at most n − 1, is the one with the best silhouette.

    Parameters
    ----------
    profiles : NDArray[np.float64]
        Shape (n, c), n at least 3.
    seed : int
        Seed of the initial centres of k-means.

    Returns
    -------
    NDArray[np.int64]
        A label per client, numbered in order of first appearance. Shape (n,).
    """
    points, values = main_points(profiles)
    directions = max(_LEAST_DIRECTIONS, int(np.argmax(values[:-1] - values[1:])) + 1)
    points = points[:, :directions]
    best, best_labels = -np.inf, np.zeros(len(points), np.int64)
    differ = len(np.unique(points, axis=0))
    for count in range(2, min(directions, len(points) - 1, differ) + 1):
        labels = kmeans(points, count, seed)
        if len(set(labels)) < 2:
            continue
        score = float(silhouette_score(points, labels))
        if score > best:
            best, best_labels = score, labels
    return numbered(best_labels)
