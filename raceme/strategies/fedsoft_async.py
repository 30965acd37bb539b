"""FedSoft-Async: CDFL with mixtures that clients estimate themselves, with all cluster models.

The baseline of Li and Zhu, "Client-Driven Federated Learning" (CDFL), after FedSoft (Ruan and
Joe-Wong, AAAI 2022). A client holds all K cluster models. With its present data it counts on how
many samples each has the least loss; these shares are α. It trains the mixture Σ α_k w_k with
CDFL's objective, and uploads the result with α. The server mixes it in as CDFL does, needs no proxy
sets, and sends all K models.

Our readings: training starts from Σ α_k w_k; no share is below that of one sample. The extra K
passes over the samples count as computing on virtual time, a pass without gradients as a third of
one with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raceme.clustering.mixtures import Shares
from raceme.compat import array_record
from raceme.config.options import option
from raceme.protocol.effort import forward_cost
from raceme.protocol.messages import (
    COMPUTE_SCALE,
    PROXIMAL_MU,
    SHARES,
    TRAIN_MIXED,
    Vector,
    candidate,
    to_array,
)
from raceme.server.dispatch import Dispatch
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.requests import OnRequest
from raceme.server.work import Work
from raceme.strategies.cdfl import SoftParameters, SoftState, mix_in, placement_of
from raceme.strategies.fedsoft import soft_clusters


@dataclass(frozen=True)
class FedSoftAsyncParameters(SoftParameters):
    """Hyper-parameters of FedSoft-Async."""

    k: int | None = option(None, "K: number of clusters (auto: of pre-trained models, or 2)", low=1)


@dataclass
class FedSoftAsyncState(SoftState):
    """What FedSoft-Async knows beside its clusters.

    Attributes
    ----------
    held : dict[str, dict[int, int]]
        Version of each cluster's model that each client has.
    shares : dict[str, list[float]]
        α that each client has stated last, in order of the clusters.
    pretrained : bool
        Whether the clusters started from the server's models, one for each distribution.
    """

    held: dict[str, dict[int, int]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    pretrained: bool = False


class FedSoftAsync(Method):
    """CDFL's baseline: clients hold all cluster models and estimate their mixtures themselves."""

    parameters_type = FedSoftAsyncParameters
    state_type = FedSoftAsyncState
    uses_starts = True
    parameters: FedSoftAsyncParameters
    state: FedSoftAsyncState
    dispatch: OnRequest

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({TRAIN_MIXED}) | self.dispatch.asked_kinds

    def policy(self) -> Dispatch:
        """Let each client decide when it uploads."""
        return OnRequest(self.parameters)

    def initialize(self, vector: Vector) -> None:
        """Start each cluster from its pre-trained model, or all from different ones."""
        self.clusters = soft_clusters(self, vector, self.parameters.k)
        self.state = FedSoftAsyncState(
            renewed=dict.fromkeys(self.clusters.models, 0), pretrained=bool(self.starts)
        )

    def add_client(self, client: Client) -> None:
        """Give a client that is new all cluster models."""
        name = client.client_id
        super().add_client(client)
        if name not in self.state.since:
            self.clusters.assign(name, dict.fromkeys(self.models, 1.0 / len(self.models)))
            self.state.since[name] = self.progress.updates
            self._send_all(name)

    @property
    def by_distribution(self) -> bool:
        """Whether cluster k is of the k-th distribution: if it started from its model."""
        return self.state.pretrained

    # What a client does when it chooses.

    def work_for(self, client: str) -> Work:
        """Let a client estimate and train its mixture, or look how well its last one still fits."""
        versions = self.state.held[client]
        vectors = [self.bases.vectors[_name(k, version)] for k, version in versions.items()]
        if self.dispatch.looks(client):
            shares = np.asarray(self._shares(client))
            mixture = np.tensordot(shares, np.stack(vectors), axes=1).astype(np.float32)
            return self.dispatch.look_at(client, self.spec.pack(mixture), self._cost(client))
        models = {candidate(k): self.spec.pack(own) for k, own in enumerate(vectors)}
        settings = {
            PROXIMAL_MU: self.parameters.rho,
            COMPUTE_SCALE: 1.0 + self._cost(client, len(models)),
        }
        if client in self.state.shares:
            shares = np.asarray(self.state.shares[client])
            models[SHARES] = array_record({SHARES: to_array(shares)})
        return Work(client, TRAIN_MIXED, models=(), arrays=models, settings=settings)

    def _cost(self, client: str, models: int = 1) -> float:
        examples = self.progress.fleet.clients[client].num_examples
        return forward_cost(self.train_config, examples, models)

    def on_answer(self, answer: Answer) -> None:
        """Note how well a client's mixture still fits its data."""
        self.dispatch.heard(answer)

    # What the server does with an upload.

    def on_update(self, update: Update) -> Applied:
        """Mix the client's model in by the shares that it states, and send it all models."""
        client, epoch = update.task.client, self.progress.updates + 1
        alpha = stated_shares(update, len(self.models))
        applied = mix_in(
            self.clusters, self.state, self.parameters, update.vector, alpha, client, epoch
        )
        self.state.shares[client] = alpha.tolist()
        self.clusters.move(client, placement_of(self.clusters, alpha))
        self._send_all(client)
        return applied

    def _shares(self, client: str) -> list[float]:
        return self.state.shares.get(client) or [1.0 / len(self.models)] * len(self.models)

    def _send_all(self, client: str) -> None:
        """Note which models a client has from now on; each version is kept once."""
        for k, version in self.state.held.get(client, {}).items():
            self.bases.release(_name(k, version))
        self.state.held[client] = {k: model.version for k, model in self.models.items()}
        for k, model in self.models.items():
            self.bases.hold(_name(k, model.version), model.vector)


def _name(cluster: int, version: int) -> str:
    return f"{cluster}/{version}"


def stated_shares(update: Update, count: int) -> Shares:
    """Return the shares of K models that a client states.

    Raises
    ------
    InvalidReplyError
        They are missing, below 0, or their sum is not 1.
    """
    shares = np.asarray(update.numbers.get(SHARES, ()), np.float64)
    if shares.shape != (count,) or shares.min() < 0 or abs(shares.sum() - 1.0) > 1e-6:
        raise InvalidReplyError(
            f"it must state as '{SHARES}' how much each of {count} models counts: numbers from 0 "
            "on, sum 1"
        )
    return np.asarray(shares / shares.sum())
