"""FedRC: robust clustering by concept shift, not by label or feature shift.

Guo et al., "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust
Clustering", ICML 2024 (arXiv 2301.12379). K models are trained by expectation maximisation. The
responsibility of model k for sample j of client i is divided by the frequency of its label among
the samples assigned to k: ``γ_ijk ∝ ω_ik exp(−ℓ(x_ij, y_ij; θ_k)) / C[k][y_ij]``, normalized over
k. Label and feature shift therefore do not separate clients, and concept shift does. ``ω_ik`` is
the mean of γ over the client's samples. A client trains each θ_k on Σ_j γ_ijk ℓ; the server
averages by numbers of samples, and C[k] is the normalized mass of each class assigned to k, at
least 1e-8. At the start γ, ω and C are uniform, and the models different.

In each round a client receives the K models twice: to compute γ, which it stores, and one by one
for training; each is an update. It is tested with the model of its largest ω, which is ahead of the
soft mixture of predictions in the paper's figure 6c; a new client is placed by a query for γ. Our
readings: the loss of a step is the mean of γ ℓ over its mini-batch; clients that did not answer in
a round count in C with their latest masses; the removal of rarely used models is left out, as it is
switched off in the authors' code. The server stores K masses of each class per client. Computing γ
costs K passes without gradients.
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
from raceme.core.requests import (
    Answer,
    InvalidReplyError,
    Outcomes,
    Request,
    Update,
)
from raceme.core.scheduling import InRounds, RoundsParameters, Scheduler, SelectionContext
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.flower.messages import array_record
from raceme.strategies.fedrc import LABEL_MASSES, LABEL_TABLE, MIXING, TRAIN_WEIGHTED, WEIGHTED_BY
from raceme.strategies.shared import DEFAULT_K, different_models

log = getLogger("raceme")

_LEAST_SHARE = 1e-8
_ROUNDING = 1e-3
_MOST = 1_000_000
"""Maximum number of masses stated by a client."""


@dataclass(frozen=True)
class FedRCParameters(RoundsParameters):
    """Hyper-parameters of FedRC."""

    k: int = option(DEFAULT_K, "K: number of models", low=1)


@dataclass
class FedRCState:
    """State of FedRC besides its clusters.

    Attributes
    ----------
    masses : dict[str, NDArray[np.float64]]
        m_i: latest responsibilities of the models for each client's samples, summed by class.
        Shape (K, classes).
    assigned : dict[str, bool]
        Clients that have stated them since the last round.
    """

    masses: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    assigned: dict[str, bool] = field(default_factory=dict)


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
        """Work in rounds; a client trains every model."""
        return InRounds(
            participants=self._participants,
            sampling=self.parameters.sampling,
            models=lambda client: self.models,
            queries=self._queries,
        )

    def initialize(self, vector: Vector) -> None:
        """Start with K different models."""
        self.clusters = different_models(self, vector, self.parameters.k)
        self.state = FedRCState()

    # Before a round: the E-step.

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query all clients for responsibilities before each round."""
        asked = self.scheduling.ask_first(context)
        if asked is not None:
            return [self._assign(client) for client in asked]
        return None

    def _assign(self, client: str) -> Request:
        """Return the computation of γ, given ω and C."""
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
        """Return C: share of each class in the mass of each model."""
        return label_table(list(self._masses_of_common_shape().values()))

    def _masses_of_common_shape(self) -> dict[str, NDArray[np.float64]]:
        """Return the masses with the most frequent number of classes."""
        masses = self.state.masses
        shape, _ = Counter(own.shape for own in masses.values()).most_common(1)[0]
        return {client: own for client, own in masses.items() if own.shape == shape}

    def on_answer(self, answer: Answer) -> None:
        """Store a client's masses, and assign it to the model of its largest ω.

        An answer after the start of the round counts for the next.

        Raises
        ------
        InvalidReplyError
            They are not masses of K models over all of its samples.
        """
        client = answer.task.client
        examples = answer.num_examples
        stated = answer.array(LABEL_MASSES, (len(self.models), None), 0.0, examples, most=_MOST)
        counts = stated.sum(axis=0)
        off = np.abs(counts - np.round(counts)).max()
        if off > _ROUNDING or round(float(counts.sum())) != examples or not examples:
            raise InvalidReplyError("its masses are not those of whole samples")
        # Bounds the weight of a client that states far more samples than others.
        counted = self.progress.fleet.plausible_examples(client, examples)
        self.state.masses[client] = stated * (counted / examples)
        self.state.assigned[client] = True
        self.clusters.assign(client, list(self.models)[int(np.argmax(mixing_of(stated)))])

    # A round: the M-step.

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Select from the clients with responsibilities; from all if there are none."""
        able = [client for client in online if client.client_id in self.state.assigned]
        return self.scheduling.pick(
            able or online, self.parameters.participants(len(able or online)), rng
        )

    def request_for(self, client: str) -> Request:
        """Return the weighted training of a client's next model."""
        model = self.scheduling.next_model(client)
        if model is None or client not in self.state.assigned:
            # Without responsibilities a client cannot train; it takes part in the next round.
            return self._assign(client)
        settings = {WEIGHTED_BY: list(self.models).index(model)}
        return Request(client, TRAIN_WEIGHTED, models=(model,), settings=settings)

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Average each model over its clients: θ_k ← Σ n_i θ_ik / Σ n_i."""
        self.state.assigned = {}
        return average_by_cluster(self.clusters, updates, home=lambda update: update.task.cluster)


def mixing_of(masses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ω_i: mean responsibility of each model for a client's samples. Shape (K,).

    Parameters
    ----------
    masses : NDArray[np.float64]
        m_i: responsibilities summed over the client's samples of each class. Shape (K, classes).
    """
    return np.asarray(masses.sum(axis=1) / masses.sum())


def label_table(masses: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return C[k][y] = Σ_i m_ik[y], at least 1e-8, rows normalized. Shape (K, classes).

    Parameters
    ----------
    masses : Sequence of NDArray[np.float64]
        m_i of each client. Shape (K, classes) each.
    """
    total = np.maximum(np.sum(masses, axis=0), _LEAST_SHARE)
    return np.asarray(total / total.sum(axis=1, keepdims=True))
