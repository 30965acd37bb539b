"""FedRC: clusters of clients whose labels mean different things, and no others.

Guo et al., "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust
Clustering", ICML 2024 (arXiv 2301.12379). K models are trained by expectation maximisation. How
much model k is responsible for sample j of client i is divided by how frequent its label is among
all that is assigned to k: ``γ_ijk ∝ ω_ik exp(−ℓ(x_ij, y_ij; θ_k)) / C[k][y_ij]``, sum 1 over k. A
client of other labels or other inputs thus joins a model as readily; one to which the same inputs
mean other labels (concept shift) does not. ``ω_ik`` is the mean of γ over the client's samples. The
client trains each θ_k on Σ_j γ_ijk ℓ; the server averages by numbers of samples, and C[k] becomes
what clients have assigned to k of each class, at least 1e-8, over its sum. γ, ω and C are uniform
at the start, the models different.

In each round a client is sent the K models twice: to assign its samples, which it remembers, and
then one after the other to train them; K models come back, and count as K updates. It is tested
with the model of its largest ω; the soft mixture of predictions is left out, since the paper's
figure 6c has this one ahead, and a client that is new is placed by one such assignment. Our
readings: a step's loss is the mean over its mini-batch of γ ℓ; clients whose answers a round did
without count in C with their last ones; the paper's removal of models that hardly any client uses
is switched off in the authors' code, and is left out. The server keeps K shares of each class for
each client. An assignment takes as long as K passes without gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.messages import COMPUTE_SCALE, Vector, forward_cost, to_array
from raceme.core.options import option
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.scheduling import InRounds, RoundsParameters, Scheduler, SelectionContext
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.flower.messages import array_record
from raceme.strategies.fedrc import LABEL_MASSES, LABEL_TABLE, MIXING, TRAIN_WEIGHTED, WEIGHTED_BY
from raceme.strategies.ifca import different_models

log = getLogger("raceme")

_LEAST_SHARE = 1e-8
_ROUNDING = 1e-3
_MOST = 1_000_000
"""Masses that one client may state."""


@dataclass(frozen=True)
class FedRCParameters(RoundsParameters):
    """Hyper-parameters of FedRC; the defaults are those of the authors' code."""

    k: int = option(3, "K: number of models", low=1)


@dataclass
class FedRCState:
    """What FedRC knows beside its clusters.

    Attributes
    ----------
    masses : dict[str, NDArray[np.float64]]
        m_i: how much of its samples of each class each client assigns to each model, as it has
        last said. Shape (K, classes).
    assigned : dict[str, bool]
        Clients that have said it since the last round.
    begun : dict[str, dict[int, bool]]
        Models that each participant of the round has been sent to train.
    """

    masses: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    assigned: dict[str, bool] = field(default_factory=dict)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)


class FedRC(Method):
    """Expectation maximisation with clusters that differ by concept shift only (FedRC)."""

    parameters_type = FedRCParameters
    state_type = FedRCState
    needs = Needs(
        kinds=frozenset({LABEL_MASSES, TRAIN_WEIGHTED}),
        settings=frozenset({WEIGHTED_BY}),
        classes="count their labels",
    )
    parameters: FedRCParameters
    state: FedRCState
    scheduling: InRounds

    def scheduler(self) -> Scheduler:
        """Work in rounds, in which a client trains every model."""
        return InRounds(
            participants=self._participants,
            sampling=self.parameters.sampling,
            again=lambda client: self._next_model(client) is not None,
            queries=self._queries,
        )

    def initialize(self, vector: Vector) -> None:
        """Start from K different models."""
        self.clusters = different_models(vector, self.parameters.k, self._spec, self.rng)
        self.state = FedRCState()

    # Before a round: the E-step.

    def _queries(self, moment: SelectionContext) -> Sequence[Request] | None:
        """Let all clients assign their samples; then let a round's clients train."""
        asked = self.scheduling.ask_first(moment)
        if asked is not None:
            return [self._assign(client) for client in asked]
        return None

    def _assign(self, client: str) -> Request:
        """Let a client assign its samples to the models, given ω and C."""
        examples = self.progress.fleet.clients[client].num_examples
        cost = forward_cost(self.train_config, examples, len(self.models))
        arrays = {}
        if self.state.masses:
            arrays[LABEL_TABLE] = array_record({LABEL_TABLE: to_array(self._table())})
        if client in self.state.masses:
            mixing = mixing_of(self.state.masses[client])
            arrays[MIXING] = array_record({MIXING: to_array(mixing)})
        models, settings = tuple(self.models), {COMPUTE_SCALE: cost}
        return Request(client, LABEL_MASSES, models=models, arrays=arrays, settings=settings)

    def _table(self) -> NDArray[np.float64]:
        """Return C, the share of each class in what is assigned to each model."""
        return label_table(list(self._agreeing().values()))

    def _agreeing(self) -> dict[str, NDArray[np.float64]]:
        """Return the masses of as many classes as most clients state."""
        masses = self.state.masses
        shape, _ = Counter(own.shape for own in masses.values()).most_common(1)[0]
        return {client: own for client, own in masses.items() if own.shape == shape}

    def on_answer(self, answer: Answer) -> None:
        """Take in how a client has assigned its samples; its largest ω says where it belongs.

        An answer that comes when the round has begun is as good: the client takes part in the next.

        Raises
        ------
        InvalidReplyError
            These are no masses of so many models, of all of its samples.
        """
        client = answer.task.client
        examples = answer.num_examples
        stated = answer.array(LABEL_MASSES, (len(self.models), None), 0.0, examples, most=_MOST)
        counts = stated.sum(axis=0)
        off = np.abs(counts - np.round(counts)).max()
        if off > _ROUNDING or round(float(counts.sum())) != examples or not examples:
            raise InvalidReplyError("its masses are not those of whole samples")
        # No client counts as many times more samples than the others have.
        counted = self.progress.fleet.counted(client, examples)
        self.state.masses[client] = stated * (counted / examples)
        self.state.assigned[client] = True
        self.clusters.assign(client, list(self.models)[int(np.argmax(mixing_of(stated)))])

    # A round: the M-step.

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Draw from clients that have assigned their samples; if none has, from all."""
        self.state.begun = {}
        able = [client for client in online if client.client_id in self.state.assigned]
        return self.scheduling.pick(
            able or online, self.parameters.participants(len(able or online)), rng
        )

    def request_for(self, client: str) -> Request:
        """Let a client train the next model, on its samples as it has assigned them."""
        model = self._next_model(client)
        if model is None or client not in self.state.assigned:
            # Without assigned samples a client trains nothing; the next round has it again.
            return self._assign(client)
        settings = {WEIGHTED_BY: list(self.models).index(model)}
        return Request(client, TRAIN_WEIGHTED, models=(model,), settings=settings)

    def _next_model(self, client: str) -> int | None:
        begun = self.state.begun.get(client, {})
        return next((model for model in self.models if model not in begun), None)

    def on_sent(self, task: InFlight) -> None:
        """Note which model a client is given to train."""
        if task.kind == TRAIN_WEIGHTED:
            self.state.begun.setdefault(task.client, {})[task.cluster] = True

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """θ_k ← Σ n_i θ_ik / Σ n_i, over the clients that have trained it."""
        self.state.begun, self.state.assigned = {}, {}
        return average_by_cluster(self.clusters, updates, home=lambda update: update.task.cluster)


def mixing_of(masses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ω_i: the share of a client's samples that is assigned to each model. Shape (K,).

    Parameters
    ----------
    masses : NDArray[np.float64]
        m_i: responsibilities summed over the client's samples of each class. Shape (K, classes).
    """
    return np.asarray(masses.sum(axis=1) / masses.sum())


def label_table(masses: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return C[k][y] = Σ_i m_ik[y], at least 1e-8, each row over its sum. Shape (K, classes).

    Parameters
    ----------
    masses : Sequence of NDArray[np.float64]
        m_i of each client. Shape (K, classes) each.
    """
    total = np.maximum(np.sum(masses, axis=0), _LEAST_SHARE)
    return np.asarray(total / total.sum(axis=1, keepdims=True))
