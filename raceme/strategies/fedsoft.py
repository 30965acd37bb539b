"""FedSoft: each client trains one model of its own, pulled towards the clusters that it is of.

Ruan and Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI
2022. Every few rounds each client measures the K cluster models c_s on its samples; u_ks, the
importance of cluster s to client k, is the share of its samples on which c_s has the least loss. In
a round each cluster draws clients with probabilities v_ks, which are proportional to u_ks n_k. A
client that is drawn by any trains its own model w, which it keeps from round to round, on
``f_k(w) + λ/2 Σ_s u_ks ‖w − c_s‖²``, and c_s becomes the mean of the models that it has drawn.

Since Σ_s u_ks = 1, that pull is the pull towards the one model Σ_s u_ks c_s, which is all that is
sent. What a client is tested with is this model too, as its own one stays with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.clusters import Clusters
from raceme.clustering.mixtures import Shares
from raceme.config.options import option
from raceme.protocol.effort import forward_cost
from raceme.protocol.messages import (
    COMPUTE_SCALE,
    LOSSES,
    PROXIMAL_MU,
    TRAIN_OWN,
    Vector,
)
from raceme.server.dispatch import Dispatch, InRounds, Moment
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.work import Work
from raceme.strategies.cdfl import start_clusters
from raceme.strategies.ifca import different_models

SELECTIONS = ("drawn", "all")


@dataclass(frozen=True)
class FedSoftParameters:
    """Hyper-parameters of FedSoft; the defaults are the paper's."""

    k: int | None = option(None, "K: number of clusters (auto: of pre-trained models, or 2)", low=1)
    estimate_every: int = option(2, "τ: rounds between two estimates of importance", low=1)
    selection: str = option(
        "drawn", "who trains for a cluster: drawn, or all, weighted by u n", among=SELECTIONS
    )
    drawn: int = option(15, "clients that each cluster draws for a round", low=1)
    smoothing: float = option(1e-4, "σ: importance of a cluster that fits no sample", above=0)
    strength: float = option(0.1, "λ: strength of the pull towards the clusters", low=0)

    def participants(self, clients: int) -> int:
        """Return how many of so many clients take part in a round, at most."""
        if self.selection == "all":
            return clients
        return min(clients, self.drawn * (self.k or 2))


@dataclass
class FedSoftState:
    """What FedSoft knows beside its clusters.

    Attributes
    ----------
    importance : dict[str, list[float]]
        u_k: importance of each cluster, in order, to each client that has told.
    drawn : dict[str, list[int]]
        Clusters that have drawn each client of the present round.
    pretrained : bool
        Whether the clusters started from the server's models, one for each distribution.
    """

    importance: dict[str, list[float]] = field(default_factory=dict)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    pretrained: bool = False


class FedSoft(Method):
    """Clients' own models, pulled towards the clusters that they are of, in rounds (FedSoft)."""

    parameters_type = FedSoftParameters
    state_type = FedSoftState
    uses_starts = True
    parameters: FedSoftParameters
    state: FedSoftState
    dispatch: InRounds

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LOSSES, TRAIN_OWN})

    def policy(self) -> Dispatch:
        """Work in rounds, with those whom clusters draw."""
        return InRounds(participants=self._draw)

    def initialize(self, vector: Vector) -> None:
        """Start each cluster from its pre-trained model, or all from different ones."""
        self.clusters = soft_clusters(self, vector, self.parameters.k)
        self.state = FedSoftState(pretrained=bool(self.starts))

    def add_client(self, client: Client) -> None:
        """Take a client in; all clusters are alike to it until it has measured them."""
        super().add_client(client)
        if not self.clusters.is_placed(client.client_id):
            alike = dict.fromkeys(self.models, 1.0 / len(self.models))
            self.clusters.assign(client.client_id, alike)

    @property
    def by_distribution(self) -> bool:
        """Whether cluster k is of the k-th distribution: if it started from its model."""
        return self.state.pretrained

    # Every few rounds: importance.

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Ask for losses before some rounds; then let those train whom clusters have drawn."""
        asked = self.dispatch.ask_first(moment, every=self.parameters.estimate_every)
        if asked is not None:
            return [self._measure(client) for client in asked]
        return super().next_work(moment)

    def _measure(self, client: str) -> Work:
        """Let a client measure all cluster models: K passes without gradients."""
        examples = self.progress.fleet.clients[client].num_examples
        cost = forward_cost(self.train_config, examples, len(self.models))
        settings = {COMPUTE_SCALE: cost}
        return Work(client, LOSSES, models=tuple(self.models), settings=settings)

    def on_answer(self, answer: Answer) -> None:
        """Take a client's losses in: they tell the importance of each cluster to it."""
        measured = answer.numbers.get(LOSSES, np.empty(0))
        if measured.ndim != 2 or len(measured) != len(self.models) or not measured.size:
            raise InvalidReplyError(
                f"it must state as '{LOSSES}' the loss of each sample under {len(self.models)} "
                f"models, got shape {measured.shape}"
            )
        shares = importance_of(measured, self.parameters.smoothing)
        self.state.importance[answer.task.client] = shares.tolist()
        weights = dict(zip(self.models, shares.tolist(), strict=True))
        self.clusters.move(answer.task.client, weights)

    # A round.

    def _draw(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Let each cluster draw clients, without replacement, with probabilities v_ks."""
        names = [client.client_id for client in online]
        self.state.drawn = {}
        for position, weights in enumerate(self._weights(names).T):
            chosen = range(len(names))
            if self.parameters.selection == "drawn":
                count = min(self.parameters.drawn, int(np.count_nonzero(weights)))
                chosen = rng.choice(len(names), count, replace=False, p=weights).tolist()
            for index in chosen:
                self.state.drawn.setdefault(names[index], []).append(position)
        return [client for client in online if client.client_id in self.state.drawn]

    def _weights(self, names: Sequence[str]) -> NDArray[np.float64]:
        """Return v: u_ks n_k over its sum for each cluster s, shape (clients, K)."""
        fleet, count = self.progress.fleet, len(self.models)
        alike = [1.0 / count] * count
        shares = np.array([self.state.importance.get(name, alike) for name in names])
        examples = np.array([max(1, fleet.counted(name)) for name in names])
        weights = shares * examples[:, None]
        return np.asarray(weights / weights.sum(axis=0))

    def work_for(self, client: str) -> Work:
        """Let a client train its own model, pulled towards its mixture of the clusters'."""
        return Work(client, TRAIN_OWN, settings={PROXIMAL_MU: self.parameters.strength})

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Replace each cluster's model by the mean of those that it has drawn."""
        names = [update.task.client for update in updates]
        largest = dict.fromkeys(names, 0.0)
        all_weights = self._weights(names)
        for position, model in enumerate(self.models.values()):
            rows = [n for n, name in enumerate(names) if position in self.state.drawn.get(name, [])]
            if not rows:
                continue
            weights = np.ones(len(rows))
            if self.parameters.selection == "all":
                weights = all_weights[rows, position]
            weights = weights / weights.sum()
            model.average([updates[row].vector for row in rows], weights.tolist())
            for row, weight in zip(rows, weights.tolist(), strict=True):
                largest[names[row]] = max(largest[names[row]], weight)
        return [
            Applied(self.clusters.main(name), staleness=0, weight=largest[name]) for name in names
        ]


def soft_clusters(method: Method, vector: Vector, k: int | None) -> Clusters:
    """Make K clusters: of the server's pre-trained models if it has some, else of different ones.

    Without K there are as many as pre-trained models, or two.
    """
    count = k or len(method.starts) or 2
    if method.starts:
        return start_clusters(vector, count, method.starts)
    return different_models(vector, count, method.spec, method.rng)


def importance_of(losses: NDArray[np.float32], smoothing: float) -> Shares:
    """Return u_k: the share of the samples on which each model has the least loss.

    Parameters
    ----------
    losses : NDArray[np.float32]
        Loss of each sample under each model, shape (K, n).
    smoothing : float
        σ: what stands for a share of 0, before all are divided by their sum.

    Returns
    -------
    Shares
        Shape (K,), all above 0, sum 1. Of models with equal losses the first counts.
    """
    counts = np.bincount(np.argmin(losses, axis=0), minlength=len(losses))
    shares = np.where(counts > 0, counts / counts.sum(), smoothing)
    return np.asarray(shares / shares.sum())
