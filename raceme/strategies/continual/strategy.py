"""Continual learning: FedProx-EWC, Stable SGD, FedProx-APD and FedWeIT, and their common part.

A task is a step of a client's data, with ``--drift tasks`` or any other drift. Without a drift
there is one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import raceme.strategies.continual as keys
from raceme.core import messages as names
from raceme.core.messages import ModelSpec, forward_cost, to_array
from raceme.core.options import option
from raceme.core.requests import Outcomes, Request, Update, Value
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Needs, average_by_cluster
from raceme.flower.messages import array_record
from raceme.strategies.shared import AveragingRounds


@dataclass(frozen=True)
class TaskRoundsParameters(RoundsParameters):
    """Hyper-parameters of a continual method in FedProx's rounds."""

    mu: float = option(0.05, "weight μ of FedProx's proximal term; 0: FedAvg's rounds", low=0)


class TaskRounds(AveragingRounds):
    """FedProx's rounds; the methods differ in the training of clients."""

    def task_of(self, client: str) -> int:
        """Return the number of a client's present task, from 0."""
        return self.step_of(client) or 0

    def begins_task(self, client: str) -> bool:
        """Return whether a client has sent no update of its present task."""
        return self.progress.trained_steps.get(client) != self.task_of(client)


# -----------------------------------------------------------------------------
# FedProx-EWC: FedProx with elastic weight consolidation.
#
# Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017. A client
# with former tasks minimizes its loss on the present one plus
#
#     λ/2 Σ_i F_i (w_i − w*_i)²,
#
# where w* are its weights at the end of the former task and F_i is the Fisher information of weight
# i there: the mean over the task's samples of the squared gradient of the loss. FedProx's term
# μ/2 ‖w − w_g‖² is added (Li et al., MLSys 2020), and the server averages.
#
# F is accumulated as in online EWC (Schwarz et al., "Progress & Compress", ICML 2018): one penalty
# for all former tasks, around the latest w*, with F ← γ F + F_t at the end of task t; γ = 1 forgets
# none. Kirkpatrick's own has a penalty for each task, around its own w*.
#
# A client computes F_t at its first training on the next task, on the former step's samples, at the
# cost of about one local epoch. F and w* never leave the client. Without a drift this is FedProx.
# The default of λ is ours, tuned on the digits.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EWCParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-EWC."""

    strength: float = option(1000.0, "λ: strength of the pull to former tasks' weights", low=0)
    memory: float = option(
        1.0, "γ: share of former tasks' information that remains after the next task", low=0, high=1
    )


class EWC(TaskRounds):
    """FedProx with elastic weight consolidation against forgetting earlier tasks (FedProx-EWC)."""

    parameters_type = EWCParameters
    needs = Needs(
        kinds=frozenset({keys.TRAIN_ELASTIC}),
        settings=frozenset({keys.ELASTIC_STRENGTH, keys.ELASTIC_MEMORY}),
        one_model=True,
    )
    parameters: EWCParameters

    def request_for(self, client: str) -> Request:
        """Return a client's training, with the cost of F_t at the start of a task."""
        settings = {
            names.PROXIMAL_MU: self.parameters.mu,
            keys.ELASTIC_STRENGTH: self.parameters.strength,
            keys.ELASTIC_MEMORY: self.parameters.memory,
        }
        if client in self.progress.trained_steps and self.begins_task(client):
            examples = self.progress.fleet.clients[client].num_examples
            measuring = forward_cost(self.train_config, examples, names.PASSES_OF_TRAINING)
            settings[names.COMPUTE_SCALE] = 1.0 + measuring
        return Request(client, keys.TRAIN_ELASTIC, settings=settings)


# -----------------------------------------------------------------------------
# Stable SGD, federated: wide minima reduce forgetting.
#
# Mirzadeh et al., "Understanding the Role of Training Regimes in Continual Learning", NeurIPS 2020.
# Forgetting is bounded by the largest eigenvalue of the Hessian at the task's minimum times the
# squared distance that the weights move afterwards. Therefore:
#
# - dropout and small mini-batches lead to wide minima;
# - so does a large initial learning rate, which decays from task to task, η_t = η γ^t, so that the
#   weights move less and less.
#
# Clients train so with FedProx's term, without a memory, and the server averages. t counts the
# steps of a client's data. Dropout acts on the inputs of the network's linear layers, see
# :mod:`raceme.training.local`.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StableSGDParameters(TaskRoundsParameters):
    """Hyper-parameters of Stable SGD."""

    dropout: float = option(0.25, "share of hidden units dropped in a step", low=0, below=1)
    decay: float = option(
        0.8, "γ: factor of the learning rate from one task to the next", above=0, high=1
    )
    batch_size: int | None = option(
        None, "samples per step; few lead to wide minima (auto: the run's)", low=1
    )


class StableSGD(TaskRounds):
    """FedProx with dropout and a learning rate that decays per task (Stable SGD)."""

    parameters_type = StableSGDParameters
    needs = Needs(one_model=True)
    parameters: StableSGDParameters

    def request_for(self, client: str) -> Request:
        """Return training with dropout, at the task's learning rate."""
        options = self.parameters
        settings = {
            names.PROXIMAL_MU: options.mu,
            names.DROPOUT: options.dropout,
            names.LR_SCALE: options.decay ** self.task_of(client),
        }
        if options.batch_size is not None:
            settings[names.BATCH_SIZE] = options.batch_size
        return Request(client, settings=settings)


# -----------------------------------------------------------------------------
# FedProx-APD: additive parameter decomposition, with a shared part that is averaged.
#
# Yoon, Kim, Yang and Hwang, "Scalable and Order-robust Continual Learning with Additive Parameter
# Decomposition", ICLR 2020. The weights of a task t are
#
#     θ_t = σ ⊙ M_t + τ_t,   M_t = sigmoid(v_t),
#
# with task-shared weights σ, a mask with one number per unit, and task-adaptive weights τ_t.
# Training on task t minimizes
#
#     L({σ ⊙ M_t + τ_t}; D_t) + λ1 Σ_{i≤t} ‖τ_i‖₁ + λ2 Σ_{i<t} ‖θ_i* − (σ ⊙ M_i + τ_i)‖²
#
# over σ, v_t and all τ_i: task-adaptive weights are sparse, and those of former tasks compensate
# for the drift of σ from θ_i* = σ ⊙ M_i + τ_i at the start of task t.
#
# Federated, σ is the model: clients train it with FedProx's term, and the server averages. v_t and
# τ_t stay on the client, which tests its present task with σ ⊙ M_t + τ_t.
#
# Our readings: masks of former tasks are fixed; M_t starts from 0.9 and τ_t from 0; the terms of λ1
# and λ2 are proximal steps after each step (see :mod:`raceme.strategies.continual.client`); τ is
# not clustered over tasks (the paper's hierarchical knowledge consolidation), and no task is
# removed. The default of λ1 was tuned on the digits; that of λ2 was compared with 0 and 1 only. A
# client stores about two models per task.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class APDParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-APD."""

    sparsity: float = option(0.01, "λ1: strength of the L1 norm of task-adaptive weights", low=0)
    drift: float = option(100.0, "λ2: how strongly former tasks' weights are held", low=0)

    def settings(self) -> dict[str, Value]:
        """Return the settings of a request."""
        return {
            names.PROXIMAL_MU: self.mu,
            keys.SPARSITY: self.sparsity,
            keys.DRIFT_STRENGTH: self.drift,
        }


def needs_of_decomposition(kind: str) -> Needs:
    """Return the requirements of decomposed weights; clients test with their own parts."""
    return Needs(
        kinds=frozenset({kind}),
        settings=frozenset({keys.SPARSITY, keys.DRIFT_STRENGTH}),
        test_settings={names.COMPLETED_BY: keys.TASK_PARTS},
    )


class APD(TaskRounds):
    """Additive decomposition: shared weights plus masks and sparse weights per task (APD)."""

    parameters_type = APDParameters
    needs = needs_of_decomposition(keys.TRAIN_DECOMPOSED)
    parameters: APDParameters

    def request_for(self, client: str) -> Request:
        """Return training of the shared weights, with the client's own for its task."""
        return Request(client, keys.TRAIN_DECOMPOSED, settings=self.parameters.settings())


# -----------------------------------------------------------------------------
# FedWeIT: transfer of sparse task-adaptive weights between clients.
#
# Yoon, Jeong, Lee, Yang and Hwang, "Federated Continual Learning with Weighted Inter-client
# Transfer", ICML 2021. The weights of client c for its task t are
#
#     θ_c^(t) = B_c ⊙ m_c^(t) + A_c^(t) + Σ_i α_{c,i}^(t) A_i^(j),
#
# with base weights B, a sparse mask m with one number per unit, sparse task-adaptive weights A, and
# those of other clients i for their tasks j < t, weighted by an attention α per array of the
# network. A client minimizes
#
#     L(θ_c^(t)) + λ1 Ω({m_c^(t), A_c^(1..t)}) + λ2 Σ_{i<t} ‖ΔB_c ⊙ m_c^(i) + ΔA_c^(i)‖²
#
# with Ω the L1 norm and Δ the change since the start of task t: A of former tasks compensate for
# the drift of B. The server averages B, stores each client's A, and sends those of others to a
# client at the start of a task; they are fixed during the task.
#
# Our readings: clients upload B itself, not B ⊙ m, which would be masked again in each round; the
# sum is over the latest tasks before t of at most `others` random clients; m starts from 1, A and α
# from 0; FedProx's term applies to B; proximal steps as in
# :mod:`raceme.strategies.continual.client`; borrowed weights of former tasks are fixed. The default
# of λ1 was tuned on the digits; that of λ2 was compared with 0 and 1 only.
#
# **Privacy**: a client's task-adaptive weights, trained on its data alone, are sent to other
# clients without averaging.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedWeITParameters(APDParameters):
    """Hyper-parameters of FedWeIT."""

    sparsity: float = option(
        0.01, "λ1: strength of the L1 norm of masks and task-adaptive weights", low=0
    )
    others: int = option(
        5, "most other clients whose task-adaptive weights a client receives", low=0
    )


@dataclass
class Adaptive:
    """A client's sparse task-adaptive weights A.

    Attributes
    ----------
    indices : NDArray[np.int32]
        Positions of the nonzero weights.
    values : NDArray[np.float32]
        Weights at these positions.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]


@dataclass
class FedWeITState:
    """State of FedWeIT besides the base weights.

    Attributes
    ----------
    adaptive : dict[str, dict[int, Adaptive]]
        A of each client's latest two tasks, by number of the task.
    """

    adaptive: dict[str, dict[int, Adaptive]] = field(default_factory=dict)


class FedWeIT(TaskRounds):
    """Shared base weights, sparse weights per task, and transfer from other clients (FedWeIT)."""

    parameters_type = FedWeITParameters
    state_type = FedWeITState
    needs = needs_of_decomposition(keys.TRAIN_BORROWING)
    parameters: FedWeITParameters
    state: FedWeITState

    def request_for(self, client: str) -> Request:
        """Return a client's training, with the A of others at the start of a task."""
        lent = self._lent_to(client) if self.begins_task(client) else []
        arrays = {}
        if lent:
            named = {}
            for number, adaptive in enumerate(lent):
                named[f"{keys.ADAPTIVE_INDICES}-{number}"] = to_array(adaptive.indices)
                named[f"{keys.ADAPTIVE_VALUES}-{number}"] = to_array(adaptive.values)
            arrays[keys.OTHERS] = array_record(named)
        settings = self.parameters.settings()
        return Request(client, keys.TRAIN_BORROWING, arrays=arrays, settings=settings)

    def _lent_to(self, client: str) -> list[Adaptive]:
        """Return the latest A of others before the client's task, of at most `others` at random."""
        now = self.task_of(client)
        finished = []
        for other, tasks in self.state.adaptive.items():
            before = [task for task in tasks if task < now]
            if other != client and before:
                finished.append(tasks[max(before)])
        count = min(self.parameters.others, len(finished))
        chosen = sorted(self.rng.choice(len(finished), count, replace=False)) if count else []
        return [finished[index] for index in chosen]

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Average the base weights, weighted by the numbers of samples; store each client's A."""
        for update in updates:
            adaptive = adaptive_of(update, self.spec)
            if adaptive is not None:
                tasks = self.state.adaptive.setdefault(update.task.client, {})
                tasks[update.task.step] = adaptive
                for old in sorted(tasks)[:-2]:
                    del tasks[old]
        return average_by_cluster(self.clusters, updates)


def adaptive_of(update: Update, spec: ModelSpec) -> Adaptive | None:
    """Return the task-adaptive weights of an update; None if they are invalid."""
    indices = update.numbers.get(keys.ADAPTIVE_INDICES, np.empty(0))
    values = update.numbers.get(keys.ADAPTIVE_VALUES, np.empty(0))
    weights = spec.size if spec.trainable is None else int(spec.trainable.sum())
    usable = indices.ndim == 1 and indices.shape == values.shape and indices.dtype.kind in "iu"
    if not usable or not indices.size:
        return None
    if indices.min() < 0 or indices.max() >= weights or len(np.unique(indices)) < len(indices):
        return None
    # Other clients train with them: they are bounded as models are.
    if not np.sum(np.square(values, dtype=np.float64)) <= names.LARGEST_SQUARE:
        return None
    return Adaptive(indices.astype(np.int32), values.astype(np.float32))
