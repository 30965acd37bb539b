"""FLUX: clusters by moments of clients' latent features, of unknown number.

Fenoglio et al., NeurIPS 2025 (arXiv 2511.22305). Federated averaging trains a common model until it
is *ripe*: from round 3 on, when its accuracy gains less than 0.06 in a round, or after 80 % of the
rounds. Every client then computes descriptors of its training samples once: mean and standard
deviation of the latent features z, projected on l dimensions, of all samples and of each class. The
server scales them, and DBSCAN finds the groups and their number, with 2 points and ε at the elbow
of the sorted nearest-neighbour distances; noise points are clusters of their own. Federated
averaging continues in each cluster. A newcomer joins the nearest cluster by the moments of all of
its samples, without labels.

The projection is fitted on random points, the same on all clients, in the range up to 1.02 times
the largest latent feature, which clients state first. z is the input of the first dense layer after
the convolutions. Our readings: without convolutions z is the input of the last layer; the accuracy
is that on the training samples, evaluated before each round until the model is ripe (the authors'
is that of Flower's tests); without a limit on the updates only the first rule applies; each moment
of each class is scaled to 0…1; the elbow is the point farthest from the line between the curve's
ends. l is the number of classes in the authors' code, and 10, the default, in a second-hand note on
the paper. Their option ``noise`` adds noise to the descriptors, here on the server: for comparing
results, not for privacy.

The server stores the common model, for newcomers, and 2 (U + 1) l numbers of each client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import DBSCAN
from sklearn.neighbors import NearestNeighbors

from raceme.core import messages as names
from raceme.core.clusters import parts_of
from raceme.core.messages import Vector, forward_cost
from raceme.core.options import option
from raceme.core.requests import Answer, InvalidReplyError, Request
from raceme.core.scheduling import InRounds, RoundsParameters, SelectionContext
from raceme.core.strategy import Needs
from raceme.strategies.profiles import DESCRIPTORS, LATENT_DIMENSIONS, LATENT_MOST, LATENT_SEED
from raceme.strategies.shared import QueriesFirst, QueryState, drop_unusual, numbered

log = getLogger("raceme")

_FIRST_LOOK = 3
"""First round after which the model may be ripe."""
_FEWEST_POINTS = 2
_ROUNDING = 1.0 + 1e-9
_MOST = 1_000_000
"""Maximum size of a client's descriptors."""


@dataclass(frozen=True)
class FLUXParameters(RoundsParameters):
    """Hyper-parameters of FLUX; the defaults are the authors'."""

    dimensions: int = option(10, "l: dimensions of the latent features", low=1, high=1000)
    least_gain: float = option(
        0.06, "gain of accuracy in a round below which the common model is ripe", low=0, high=1
    )
    latest: float = option(
        0.8, "share of the rounds after which the common model is ripe in any case", above=0, high=1
    )
    warmup: int = option(
        0, "rounds with the common model, instead of these two rules (0: by the rules)", low=0
    )
    reach: float = option(1.0, "ε, in distances at the elbow", above=0)
    noise: float = option(0.0, "standard deviation of noise on scaled descriptors", low=0)


@dataclass
class FLUXState(QueryState):
    """State of FLUX besides its clusters.

    Attributes
    ----------
    phase : str
        Queries before the next round: ``"scores"``, ``"range"``, ``"descriptors"``, or
        ``"newcomers"``.
    scored : int
        Number of rounds before the last scores.
    answered : dict[str, bool]
        Clients that have answered in this phase.
    correct : dict[str, float]
        Accuracy of each client in this phase.
    accuracies : list[float]
        Mean accuracy of the common model before each round but the first.
    most : float
        Largest latent feature of all clients.
    common : Vector or None
        Common model of the descriptors. Shape (d,).
    descriptors : dict[str, NDArray[np.float64]]
        Descriptors of each client. Shape (1 + U, 2, l).
    low, high : NDArray[np.float64]
        Bounds of the scaling. Shape (1 + U, 2).
    centroids : dict[int, Vector]
        Mean scaled descriptors of all samples in each cluster. Shape (2 l,).
    """

    phase: str = "scores"
    scored: int = 0
    answered: dict[str, bool] = field(default_factory=dict)
    correct: dict[str, float] = field(default_factory=dict)
    accuracies: list[float] = field(default_factory=list)
    most: float = 0.0
    common: Vector | None = None
    descriptors: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    low: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    high: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    centroids: dict[int, NDArray[np.float64]] = field(default_factory=dict)


class FLUX(QueriesFirst):
    """Clustering by moments of latent features; places new clients without labels (FLUX)."""

    parameters_type = FLUXParameters
    state_type = FLUXState
    parameters: FLUXParameters
    state: FLUXState
    scheduling: InRounds

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        scores = () if self.parameters.warmup else (names.SCORES,)
        return Needs(
            kinds=frozenset({LATENT_MOST, DESCRIPTORS, *scores}),
            settings=frozenset({LATENT_DIMENSIONS, LATENT_MOST, LATENT_SEED}),
            classes="measure accuracies unless warmup=20 or the like" if scores else "",
        )

    # Before a round: ripeness of the common model, and descriptors.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the queries of the present phase; None if the round may start."""
        while not (self.scheduling.state.running or context.greeting):
            if self._queries_before_round():
                asked = self.scheduling.ask_first(context, self._should_answer, every=0)
                if asked is not None:
                    return [self._question(client) for client in asked]
            if not self._advance():
                break
        return None

    def _queries_before_round(self) -> bool:
        """Return whether there are queries before this round; an untrained model is not scored."""
        state, rounds = self.state, self.scheduling.state.number
        if state.phase == "scores":
            return not self.parameters.warmup and rounds > state.scored
        return True

    def _should_answer(self, client: str) -> bool:
        state = self.state
        if state.phase == "newcomers" and self.clusters.is_placed(client):
            return False
        return client not in state.answered and self._has_tries(client)

    def _question(self, client: str) -> Request:
        """Return a query for the accuracy, the largest latent feature, or the descriptors."""
        examples = self.progress.fleet.clients[client].num_examples
        settings = {names.COMPUTE_SCALE: forward_cost(self.train_config, examples)}
        if self.state.phase == "scores":
            return Request(client, names.SCORES, models=(0,), settings=settings)
        assert self.state.common is not None, "it is kept when the model is ripe"
        common = {names.ARRAYS: self.record_of(self.state.common)}
        if self.state.phase == "range":
            return Request(client, LATENT_MOST, models=(), arrays=common, settings=settings)
        settings |= {
            LATENT_DIMENSIONS: self.parameters.dimensions,
            LATENT_MOST: self.state.most,
            LATENT_SEED: 0,
        }
        return Request(client, DESCRIPTORS, models=(), arrays=common, settings=settings)

    def on_answer(self, answer: Answer) -> None:
        """Process an answer; late descriptors place a client as a newcomer.

        Raises
        ------
        InvalidReplyError
            The answer is invalid.
        """
        state, client, kind = self.state, answer.task.client, answer.task.kind
        wanted = {"scores": names.SCORES, "range": LATENT_MOST}.get(state.phase, DESCRIPTORS)
        in_time = kind == wanted and not self.scheduling.state.running
        if kind == names.SCORES:
            accuracy = float(answer.array(names.ACCURACIES, (1, 1), 0.0, 1.0)[0, 0])
            in_time = in_time and answer.task.version == self.models[0].version
            if in_time:
                state.correct[client] = accuracy
        elif kind == LATENT_MOST:
            most = answer.metrics.get(LATENT_MOST, math.nan)
            if not -names.LARGEST <= most <= names.LARGEST:
                raise InvalidReplyError(f"it must state a finite '{LATENT_MOST}'")
            if in_time:
                state.most = max(state.most, most) if state.answered else most
        else:
            shape = (None, 2, self.parameters.dimensions)
            self._process_descriptors(client, answer.array(DESCRIPTORS, shape, most=_MOST))
        if in_time:
            state.answered[client] = True

    def _process_descriptors(self, client: str, stated: NDArray[np.float64]) -> None:
        """Store descriptors, or assign a newcomer to the nearest cluster by overall moments."""
        state = self.state
        if state.phase == "descriptors":
            state.descriptors[client] = stated
            return
        own = scaled(stated[:1], state.low[:1], state.high[:1]).reshape(-1)
        nearest = min(
            state.centroids, key=lambda cluster: np.linalg.norm(state.centroids[cluster] - own)
        )
        self.clusters.assign(client, nearest)

    def _advance(self) -> bool:
        """Process a complete phase; return whether a new one starts."""
        state = self.state
        if state.phase == "scores":
            if not self._is_warm_up_over():
                return False
            state.common = self.models[0].vector.copy()
            return self._begin("range")
        if state.phase == "range":
            # Without an answer there are no descriptors: the common model remains.
            return bool(state.answered) and self._begin("descriptors")
        if state.phase == "descriptors" and state.descriptors:
            self._cluster()
            return self._begin("newcomers")
        return False

    def _begin(self, phase: str) -> bool:
        self.state.phase, self.state.asked, self.state.answered = phase, {}, {}
        return True

    def _is_warm_up_over(self) -> bool:
        """Return whether the common model is ripe, and record its accuracy."""
        state, options, rounds = self.state, self.parameters, self.scheduling.state.number
        if options.warmup:
            return rounds >= options.warmup
        if rounds > state.scored:
            if state.correct:
                state.accuracies.append(float(np.mean(list(state.correct.values()))))
            state.scored, state.correct = rounds, {}
            self._begin("scores")
        planned = self.planned_updates / options.participants(max(1, len(self.clusters.members)))
        if 0 < planned * options.latest <= rounds:
            return True
        return rounds >= _FIRST_LOOK and gains_little(state.accuracies, options.least_gain)

    def _cluster(self) -> None:
        """Cluster the clients, and compute the centroids for newcomers."""
        state, options = self.state, self.parameters
        found = state.descriptors
        drop_unusual(found, "it has another number of classes than others")
        clients, stacked = list(found), np.stack(list(found.values()))
        state.low, state.high = stacked.min(axis=(0, 3)), stacked.max(axis=(0, 3))
        points = scaled(stacked, state.low, state.high)
        points = points + options.noise * self.rng.standard_normal(points.shape)
        labels = density_groups(points.reshape(len(clients), -1), options.reach)
        groups = self.clusters.split(0, parts_of(clients, labels))
        for label, group in enumerate(groups):
            of_all = points[labels == label, 0].reshape(int(np.sum(labels == label)), -1)
            state.centroids[group] = of_all.mean(axis=0)
        state.descriptors = {}


def gains_little(accuracies: Sequence[float], least: float) -> bool:
    """Return whether the last round gained less accuracy than a threshold.

    Parameters
    ----------
    accuracies : Sequence[float]
        Accuracy after each round so far.
    least : float
        Threshold of the gain.
    """
    return len(accuracies) > 1 and accuracies[-1] - accuracies[-2] < least


def scaled(
    descriptors: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scale each block, one moment of all samples or of a class, to 0…1.

    Parameters
    ----------
    descriptors : NDArray[np.float64]
        Shape (..., blocks, 2, l).
    low, high : NDArray[np.float64]
        Minimum and maximum of each block. Shape (blocks, 2).
    """
    width = np.where(high > low, high - low, 1.0)
    return np.asarray((descriptors - low[..., None]) / width[..., None])


def elbow(distances: NDArray[np.float64]) -> float:
    """Return the elbow of a sorted curve: the value farthest below the line between its ends.

    Parameters
    ----------
    distances : NDArray[np.float64]
        Distances in ascending order. Shape (n,).
    """
    line = np.linspace(distances[0], distances[-1], len(distances))
    return float(distances[np.argmax(line - distances)])


def density_groups(points: NDArray[np.float64], reach: float) -> NDArray[np.int64]:
    """Cluster points by DBSCAN; noise points are groups of their own.

    Parameters
    ----------
    points : NDArray[np.float64]
        The points. Shape (n, c).
    reach : float
        ε in units of the distance at the elbow.

    Returns
    -------
    NDArray[np.int64]
        Labels, numbered in order of first appearance. Shape (n,).
    """
    if len(points) < _FEWEST_POINTS:
        return np.zeros(len(points), np.int64)
    neighbours = NearestNeighbors(n_neighbors=1).fit(points)
    distances = np.sort(neighbours.kneighbors()[0][:, 0])
    # A point at the elbow is a neighbour despite rounding; ε must not be 0.
    epsilon = max(reach * elbow(distances) * _ROUNDING, float(np.finfo(np.float64).tiny))
    labels = DBSCAN(eps=epsilon, min_samples=_FEWEST_POINTS).fit_predict(points)
    noise = labels < 0
    labels[noise] = labels.max() + 1 + np.arange(np.count_nonzero(noise))
    return numbered(labels)
