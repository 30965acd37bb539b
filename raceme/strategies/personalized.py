"""Personalized methods: clients combine a shared model with a private one, or train only that.

- FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
- FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
  ICML 2021, Algorithm 1.
- Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
  Algorithm 1.
- APFL: Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1.

The server averages as FedAvg does. The personal part never leaves a client: it is stored in the
client's state, and used when the client is tested. A client that has not trained yet is tested with
the server's model. Client halves: :mod:`raceme.training.personal`.

Standalone, the papers' lower reference, shows what a device achieves with its own data: nothing is
exchanged, and training takes the same time as for the other methods.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, Vector
from raceme.core.options import option
from raceme.core.requests import Outcome, Request, Update, Value
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import AveragingRounds


class Personalized(AveragingRounds):
    """Rounds of federated averaging in which clients also train a personal part."""

    parameters_type = RoundsParameters
    kind: ClassVar[str]
    completed_by: ClassVar[str]
    """Completion by which a client turns a received model into its personal one."""
    settings: ClassVar[frozenset[str]]
    """Settings of requests besides those that any method may use."""

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(
            kinds=frozenset({self.kind}),
            settings=self.settings,
            one_model=True,
            test_settings={names.COMPLETED_BY: self.completed_by},
        )

    def request_for(self, client: str) -> Request:
        """Return training of the received model and of the client's personal part."""
        return Request(client, self.kind, settings=self.request_settings(client))

    @abstractmethod
    def request_settings(self, client: str) -> dict[str, Value]:
        """Return the settings of a request: the hyper-parameters, and the cost of the work."""


@dataclass(frozen=True)
class FedPerParameters(RoundsParameters):
    """Hyper-parameters of FedPer."""

    head_layers: int = option(1, "K_P: last layers of the network that stay on each client", low=1)


class FedPer(Personalized):
    """Federated averaging of all layers but the last, which each client keeps (FedPer)."""

    parameters_type = FedPerParameters
    kind = names.TRAIN_SPLIT
    completed_by = "own-head"
    settings = frozenset({names.HEAD_LAYERS})
    parameters: FedPerParameters

    def check_model(self, spec: ModelSpec) -> None:
        """Check that the network has layers to share beside the head."""
        layers, head = len(spec.layers), self.parameters.head_layers
        if layers <= head:
            raise UserError(
                f"head-layers={head} leaves no layers to share: the model has {layers} layers with "
                f"weights. Use a deeper model, or another method."
            )

    def request_settings(self, client: str) -> dict[str, Value]:
        """Return the number of layers that stay on the client."""
        return {names.HEAD_LAYERS: self.parameters.head_layers}


@dataclass(frozen=True)
class FedRepParameters(FedPerParameters):
    """Hyper-parameters of FedRep."""

    head_epochs: int = option(1, "τ_h: epochs on the head, before those on the body", low=1)


class FedRep(FedPer):
    """FedPer in two steps: a client first trains its own last layers, then the shared ones."""

    parameters_type = FedRepParameters
    settings = frozenset({names.HEAD_LAYERS, names.HEAD_EPOCHS})
    parameters: FedRepParameters

    def request_settings(self, client: str) -> dict[str, Value]:
        """Return the layers and epochs of the head, which take time in addition to the body's."""
        epochs = self.parameters.head_epochs
        examples = self.progress.fleet.clients[client].num_examples
        scale = 1.0 + epochs / names.passes(self.train_config, examples)
        more: dict[str, Value] = {names.HEAD_EPOCHS: epochs, names.COMPUTE_SCALE: scale}
        return super().request_settings(client) | more


@dataclass(frozen=True)
class DittoParameters(RoundsParameters):
    """Hyper-parameters of Ditto."""

    strength: float = option(1.0, "λ: pull of the own model towards the shared one", low=0)


class Ditto(Personalized):
    """Federated averaging, and a model of each client's own that is pulled towards it (Ditto)."""

    parameters_type = DittoParameters
    kind = names.TRAIN_BESIDE
    completed_by = "pulled-model"
    settings = frozenset()
    parameters: DittoParameters

    def request_settings(self, client: str) -> dict[str, Value]:
        """Return λ; two models are trained."""
        return {names.PROXIMAL_MU: self.parameters.strength, names.COMPUTE_SCALE: 2.0}


@dataclass(frozen=True)
class APFLParameters(RoundsParameters):
    """Hyper-parameters of APFL."""

    alpha: float = option(0.5, "α: share of the own model at the start", low=0, high=1)
    adaptive: bool = option(True, "move α along its gradient, once per task")


class APFL(Personalized):
    """Federated averaging, interpolated on each client with a model of its own (APFL)."""

    parameters_type = APFLParameters
    kind = names.TRAIN_INTERPOLATED
    completed_by = "interpolation"
    settings = frozenset({names.OWN_SHARE, names.ADAPTIVE})
    parameters: APFLParameters

    def request_settings(self, client: str) -> dict[str, Value]:
        """Return the first α and whether it adapts; two gradients are taken at each step."""
        chosen, adaptive = self.parameters.alpha, self.parameters.adaptive
        return {names.OWN_SHARE: chosen, names.ADAPTIVE: adaptive, names.COMPUTE_SCALE: 2.0}


@dataclass(frozen=True)
class StandaloneParameters:
    """Standalone has no hyper-parameters."""


@dataclass
class StandaloneState:
    """Common start of all clients.

    Attributes
    ----------
    initial : Vector
        The initial model. Shape (d,).
    """

    initial: Vector


class Standalone(Method):
    """Local training only: one model per client, the lower reference."""

    parameters_type = StandaloneParameters
    state_type = StandaloneState
    needs = Needs(pretrained=True, exchange=False)
    state: StandaloneState

    def initialize(self, vector: Vector) -> None:
        """Store the initial model for clients that join; the mean of pre-trained models, if any."""
        self.clusters = Clusters()
        mean = np.mean(self.starts, axis=0, dtype=np.float64) if self.starts else vector
        self.state = StandaloneState(np.asarray(mean, np.float32))

    def on_join(self, client: Client) -> None:
        """Give a new client a cluster of its own, with a copy of the initial model."""
        if client.client_id not in self.clusters.members:
            self.clusters.found(Model(self.state.initial.copy()), [client.client_id])
        self.clusters.join(client.client_id)

    def on_update(self, update: Update) -> Outcome:
        """Replace the client's model by the trained one."""
        cluster = self.clusters.main(update.task.client)
        self.models[cluster].replace(update.vector)
        return Outcome(cluster=cluster, staleness=0, weight=1.0)
