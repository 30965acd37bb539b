"""FedSoft: soft clustering with proximal local updating.

Ruan and Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI
2022. Every few rounds each client evaluates the K cluster models c_s on its samples; u_ks, the
importance of cluster s to client k, is the share of its samples on which c_s has the lowest loss.
In a round each cluster draws clients with probabilities v_ks proportional to u_ks n_k. A drawn
client trains its personal model w, which it keeps, on ``f_k(w) + λ/2 Σ_s u_ks ‖w − c_s‖²``, and c_s
becomes the mean of the models of the clients that it has drawn.

Since Σ_s u_ks = 1, the proximal terms are one towards the mixture Σ_s u_ks c_s, and only the
mixture is sent. Clients are tested with it, since their personal models stay with them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.messages import Vector, candidate, forward_cost, to_array
from raceme.core.options import option
from raceme.core.requests import Answer, InvalidReplyError, Outcome, Outcomes, Request, Update
from raceme.core.scheduling import InRounds, Scheduler, SelectionContext
from raceme.core.strategy import Method, Needs
from raceme.flower.messages import array_record
from raceme.strategies.cdfl.strategy import (
    Shares,
    SoftParameters,
    SoftState,
    SoftUploads,
)
from raceme.strategies.shared import DEFAULT_K, models_of, start_clusters

log = logging.getLogger("raceme")

SELECTIONS = ("drawn", "all")
_MOST_DRAWN = 15
"""Number of clients that a cluster draws in the paper."""


@dataclass(frozen=True)
class FedSoftParameters:
    """Hyper-parameters of FedSoft; with at least 30 clients `drawn` is the paper's."""

    k: int | None = option(None, "K: number of clusters (auto: of pre-trained models, or 4)", low=1)
    estimate_every: int = option(2, "τ: rounds between two estimates of importance", low=1)
    selection: str = option(
        "drawn",
        "clients of a cluster's round: drawn, or all, weighted by u n",
        among=SELECTIONS,
    )
    drawn: int | None = option(
        None,
        "clients that each cluster draws for a round (auto: half of the clients, 15 at most)",
        low=1,
    )
    smoothing: float = option(1e-4, "σ: importance of a cluster that fits no sample", above=0)
    strength: float = option(0.1, "λ: strength of the pull towards the clusters", low=0)

    def participants(self, clients: int) -> int:
        """Return the maximum number of clients of a round."""
        if self.selection == "all":
            return clients
        return min(clients, self.draws(clients) * (self.k or DEFAULT_K))

    def draws(self, clients: int) -> int:
        """Return the number of clients that each cluster draws."""
        # In a small fleet the paper's 15 would be all clients, and all clusters alike.
        return self.drawn or max(1, min(_MOST_DRAWN, clients // 2))


@dataclass
class FedSoftState:
    """State of FedSoft besides its clusters.

    Attributes
    ----------
    importance : dict[str, list[float]]
        u_k: importance of each cluster, in order, to each client that has answered.
    drawn : dict[str, list[int]]
        Clusters that have drawn each client in the present round.
    pretrained : bool
        Whether the clusters started from pre-trained models of the distributions.
    """

    importance: dict[str, list[float]] = field(default_factory=dict)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    pretrained: bool = False


class FedSoft(Method):
    """Soft clustering: personal models pulled towards their clusters, in rounds (FedSoft)."""

    parameters_type = FedSoftParameters
    state_type = FedSoftState
    parameters: FedSoftParameters
    state: FedSoftState
    scheduling: InRounds

    needs = Needs(kinds=frozenset({names.LOSSES, names.TRAIN_OWN}), pretrained=True)

    @property
    def has_distributions(self) -> bool:
        """Whether clusters started from pre-trained models."""
        return self.state.pretrained

    def check(self, clients: int) -> None:
        """Warn if each cluster draws all clients, which makes all clusters alike."""
        if self.parameters.selection == "drawn" and clients <= (self.parameters.drawn or 0):
            log.warning(
                "Each cluster draws %d of %d clients, that is all of them, and all clusters have "
                "the same model. Lower fedsoft.drawn to %d, or set fedsoft.selection to all.",
                self.parameters.drawn,
                clients,
                FedSoftParameters().draws(clients),
            )

    def scheduler(self) -> Scheduler:
        """Work in rounds with the drawn clients."""
        return InRounds(participants=self._draw, queries=self._queries)

    def initialize(self, vector: Vector) -> None:
        """Start clusters from their pre-trained models, or from different ones."""
        count, reason = models_of(self, self.parameters.k)
        self.clusters = start_clusters(self, vector, count, reason)
        self.state = FedSoftState(pretrained=bool(self.starts))

    def on_join(self, client: Client) -> None:
        """Add a client with equal weights until it has evaluated the clusters."""
        super().on_join(client)
        if not self.clusters.is_placed(client.client_id):
            alike = dict.fromkeys(self.models, 1.0 / len(self.models))
            self.clusters.assign(client.client_id, alike)

    # Every few rounds: importance.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query losses before every few rounds."""
        asked = self.scheduling.ask_first(context, every=self.parameters.estimate_every)
        if asked is not None:
            return [self._measure(client) for client in asked]
        return None

    def _measure(self, client: str) -> Request:
        """Return the evaluation of all cluster models: K passes without gradients."""
        examples = self.progress.fleet.clients[client].num_examples
        cost = forward_cost(self.train_config, examples, len(self.models))
        settings = {names.COMPUTE_SCALE: cost}
        return Request(client, names.LOSSES, models=tuple(self.models), settings=settings)

    def on_answer(self, answer: Answer) -> None:
        """Compute the importance of each cluster from a client's losses."""
        measured = answer.numbers.get(names.LOSSES, np.empty(0))
        if measured.ndim != 2 or len(measured) != len(self.models) or not measured.size:
            raise InvalidReplyError(
                f"it must state as '{names.LOSSES}' the loss of each sample under "
                f"{len(self.models)} models, got shape {measured.shape}"
            )
        shares = importance_of(measured, self.parameters.smoothing)
        self.state.importance[answer.task.client] = shares.tolist()
        weights = dict(zip(self.models, shares.tolist(), strict=True))
        self.clusters.assign(answer.task.client, weights)

    # A round.

    def _draw(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Draw clients for each cluster without replacement, with probabilities v_ks."""
        clients = [client.client_id for client in online]
        draws = self.parameters.draws(len(self.progress.fleet.clients))
        self.state.drawn = {}
        for position, weights in enumerate(self._weights(clients).T):
            chosen = range(len(clients))
            if self.parameters.selection == "drawn":
                count = min(draws, int(np.count_nonzero(weights)))
                chosen = rng.choice(len(clients), count, replace=False, p=weights).tolist()
            for index in chosen:
                self.state.drawn.setdefault(clients[index], []).append(position)
        return [client for client in online if client.client_id in self.state.drawn]

    def _weights(self, clients: Sequence[str]) -> NDArray[np.float64]:
        """Return v_ks: u_ks n_k, normalized for each cluster s. Shape (clients, K)."""
        fleet, count = self.progress.fleet, len(self.models)
        alike = [1.0 / count] * count
        shares = np.array([self.state.importance.get(client, alike) for client in clients])
        examples = np.array([max(1, fleet.plausible_examples(client)) for client in clients])
        weights = shares * examples[:, None]
        return np.asarray(weights / weights.sum(axis=0))

    def request_for(self, client: str) -> Request:
        """Return training of a client's personal model, with the proximal term."""
        return Request(
            client, names.TRAIN_OWN, settings={names.PROXIMAL_MU: self.parameters.strength}
        )

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Replace each cluster's model by the mean of its drawn clients' models."""
        clients, drawn = [update.task.client for update in updates], self.state.drawn
        largest = [0.0] * len(clients)
        all_weights = self._weights(clients)
        for position, model in enumerate(self.models.values()):
            rows = [row for row, client in enumerate(clients) if position in drawn.get(client, [])]
            if not rows:
                continue
            weights = np.ones(len(rows))
            if self.parameters.selection == "all":
                weights = all_weights[rows, position]
            weights = weights / weights.sum()
            model.average([updates[row].vector for row in rows], weights.tolist())
            for row, weight in zip(rows, weights.tolist(), strict=True):
                largest[row] = max(largest[row], weight)
        return {
            update.number: Outcome(self.clusters.main(update.task.client), 0, weight)
            for update, weight in zip(updates, largest, strict=True)
        }


def importance_of(losses: NDArray[np.float32], smoothing: float) -> Shares:
    """Return u_k: share of the samples on which each model has the lowest loss.

    Parameters
    ----------
    losses : NDArray[np.float32]
        Loss of each sample under each model. Shape (K, n).
    smoothing : float
        σ: replaces shares of 0, before normalization.

    Returns
    -------
    Shares
        Shape (K,), positive, sum 1. The first of ties counts.
    """
    counts = np.bincount(np.argmin(losses, axis=0), minlength=len(losses))
    shares = np.where(counts > 0, counts / counts.sum(), smoothing)
    return np.asarray(shares / shares.sum())


# -----------------------------------------------------------------------------
# FedSoft-Async: CDFL with mixtures that clients estimate themselves, with all cluster models.
#
# The baseline of Li and Zhu, "Towards Client Driven Federated Learning" (CDFL), after FedSoft (Ruan
# and Joe-Wong, AAAI 2022). A client receives all K cluster models. α are the shares of its present
# samples on which each has the lowest loss. It trains the mixture Σ α_k w_k with CDFL's objective,
# and uploads the result with α. The server aggregates as in CDFL, without proxy sets.
#
# Our readings: training starts from Σ α_k w_k; a share is at least that of one sample. The K passes
# without gradients count in virtual time, each as a third of one with gradients.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedSoftAsyncParameters(SoftParameters):
    """Hyper-parameters of FedSoft-Async."""

    k: int | None = option(None, "K: number of clusters (auto: of pre-trained models, or 4)", low=1)


@dataclass
class FedSoftAsyncState(SoftState):
    """State of FedSoft-Async besides its clusters.

    Attributes
    ----------
    held : dict[str, dict[int, int]]
        Versions of the cluster models that each client has.
    shares : dict[str, list[float]]
        Latest α stated by each client, in order of the clusters.
    pretrained : bool
        Whether the clusters started from pre-trained models of the distributions.
    """

    held: dict[str, dict[int, int]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    pretrained: bool = False


class FedSoftAsync(SoftUploads):
    """FedSoft at every arrival, CDFL's baseline: clients estimate their mixtures themselves."""

    parameters_type = FedSoftAsyncParameters
    state_type = FedSoftAsyncState
    parameters: FedSoftAsyncParameters
    state: FedSoftAsyncState

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(
            kinds=frozenset({names.TRAIN_MIXED}) | self.scheduling.asked_kinds,
            pretrained=True,
        )

    @property
    def has_distributions(self) -> bool:
        """Whether clusters started from pre-trained models."""
        return self.state.pretrained

    def base_of(self, update: Update) -> Vector:
        """Return the mixture that a client has trained. Shape (d,)."""
        models = self.bases.own(update.task)
        alpha = stated_shares(update, len(models))
        return np.tensordot(alpha, np.stack(models), axes=1).astype(np.float32)

    def initialize(self, vector: Vector) -> None:
        """Start clusters from their pre-trained models, or from different ones."""
        count, reason = models_of(self, self.parameters.k)
        self.clusters = start_clusters(self, vector, count, reason)
        self.state = FedSoftAsyncState(
            renewed=dict.fromkeys(self.clusters.models, 0), pretrained=bool(self.starts)
        )

    # Requests.

    def request_for(self, client: str) -> Request:
        """Return estimation and training of a client's mixture, or a loss evaluation of it."""
        versions = self.state.held[client]
        vectors = [self.bases.vectors[_name(k, version)] for k, version in versions.items()]
        if self.scheduling.evaluates_loss(client):
            shares = np.asarray(self._shares(client))
            mixture = np.tensordot(shares, np.stack(vectors), axes=1).astype(np.float32)
            cost = self._pass_cost(client)
            return self.scheduling.loss_evaluation(client, self.spec.pack(mixture), cost)
        models = {candidate(k): self.spec.pack(own) for k, own in enumerate(vectors)}
        settings = {
            names.PROXIMAL_MU: self.parameters.rho,
            names.COMPUTE_SCALE: 1.0 + self._pass_cost(client, len(models)),
        }
        if client in self.state.shares:
            shares = np.asarray(self.state.shares[client])
            models[names.SHARES] = array_record({names.SHARES: to_array(shares)})
        return Request(client, names.TRAIN_MIXED, models=(), arrays=models, settings=settings)

    # Uploads.

    def on_update(self, update: Update) -> Outcome:
        """Mix a client's model in by its stated shares, and send it all models."""
        alpha = stated_shares(update, len(self.models))
        applied = self._mix_in(update, alpha)
        self.state.shares[update.task.client] = alpha.tolist()
        return applied

    def _shares(self, client: str) -> list[float]:
        return self.state.shares.get(client) or [1.0 / len(self.models)] * len(self.models)

    def _send_back(self, client: str, weights: dict[int, float]) -> None:
        """Record that a client has all present models; each version is stored once."""
        super()._send_back(client, weights)
        for k, version in self.state.held.get(client, {}).items():
            self.bases.release(_name(k, version))
        self.state.held[client] = {k: model.version for k, model in self.models.items()}
        for k, model in self.models.items():
            self.bases.hold(_name(k, model.version), model.vector)


def _name(cluster: int, version: int) -> str:
    return f"{cluster}/{version}"


def stated_shares(update: Update, count: int) -> Shares:
    """Return a client's stated shares of K models.

    Raises
    ------
    InvalidReplyError
        They are missing or negative, or their sum is not 1.
    """
    shares = np.asarray(update.numbers.get(names.SHARES, ()), np.float64)
    if shares.shape != (count,) or shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-6:
        raise InvalidReplyError(
            f"it must state the weights of {count} models as '{names.SHARES}': numbers of at least "
            "0, sum 1"
        )
    return np.asarray(shares / shares.sum())
