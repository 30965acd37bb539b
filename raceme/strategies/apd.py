"""FedProx-APD: additive parameter decomposition, with a shared part that is averaged.

Yoon, Kim, Yang and Hwang, "Scalable and Order-robust Continual Learning with Additive Parameter
Decomposition", ICLR 2020. The weights of a task t are

    θ_t = σ ⊙ M_t + τ_t,   M_t = sigmoid(v_t),

with task-shared weights σ, a mask of one number for each unit, and task-adaptive weights τ_t. In
training on task t

    L({σ ⊙ M_t + τ_t}; D_t) + λ1 Σ_{i≤t} ‖τ_i‖₁ + λ2 Σ_{i<t} ‖θ_i* − (σ ⊙ M_i + τ_i)‖²

is made small over σ, v_t and all τ_i: few task-adaptive weights are not 0, and those of former
tasks make up for what σ drifts, from θ_i* = σ ⊙ M_i + τ_i as it was when task t began.

Federated, σ is the model: clients train it with FedProx's term on it, and the server averages. v_t
and τ_t stay with the client, which tests the task that it is at with σ ⊙ M_t + τ_t.

Our readings: masks of former tasks stay as they are; M_t starts from 0.9 and τ_t from 0; the terms
with λ1 and λ2 follow each step as proximal steps (see :mod:`raceme.training.decomposition`); τ is
not clustered over tasks (the paper's hierarchical knowledge consolidation), and no task is given
up. The default of λ1 was found on the digits; that of λ2 was compared with 0 and 1 only. A client
keeps about two models for each task that it has met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from raceme.config.options import option
from raceme.protocol.messages import (
    DECOMPOSED,
    DRIFT_STRENGTH,
    PROXIMAL_MU,
    SPARSITY,
    TRAIN_DECOMPOSED,
)
from raceme.server.dispatch import Dispatch, InRounds
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.replies import Update
from raceme.server.work import Work
from raceme.strategies.client_tasks import TaskRoundsParameters


@dataclass(frozen=True)
class APDParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-APD."""

    sparsity: float = option(0.01, "λ1: strength of the L1 norm of task-adaptive weights", low=0)
    drift: float = option(100.0, "λ2: how strongly former tasks' weights are held", low=0)


class APD(Method):
    """FedProx on weights shared by all tasks, with masks and sparse weights for each (APD)."""

    parameters_type = APDParameters
    test_settings = MappingProxyType({DECOMPOSED: True})
    parameters: APDParameters
    dispatch: InRounds

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({TRAIN_DECOMPOSED})

    def policy(self) -> Dispatch:
        """Work in rounds."""
        return InRounds(self.parameters.fraction, picking=self.parameters.picking)

    def work_for(self, client: str) -> Work:
        """Let a client train the shared weights, with its own for its task."""
        settings = {
            PROXIMAL_MU: self.parameters.mu,
            SPARSITY: self.parameters.sparsity,
            DRIFT_STRENGTH: self.parameters.drift,
        }
        return Work(client, TRAIN_DECOMPOSED, settings=settings)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average the shared weights, weighted by the numbers of samples."""
        return average_by_cluster(self.clusters, updates)
