"""What the methods share whose clients meet one task after another.

A task of a client is a step of its data that change, by ``--drift tasks`` or any other drift; where
they never change there is one task.
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
from raceme.core.requests import Outcome, Request, Update, Value
from raceme.core.scheduling import RoundsParameters
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.flower.messages import array_record


@dataclass(frozen=True)
class TaskRoundsParameters(RoundsParameters):
    """Hyper-parameters of a continual method in FedProx's rounds."""

    mu: float = option(0.05, "weight μ of FedProx's proximal term; 0: FedAvg's rounds", low=0)


class TaskRounds(Method):
    """FedProx's rounds: the methods differ in how clients train, and the server averages."""

    def task_of(self, client: str) -> int:
        """Return the number of the task that a client is at, from 0."""
        return self.step_of(client) or 0

    def begins_task(self, client: str) -> bool:
        """Return whether a client has sent no update of the task that it is at."""
        return self.progress.trained_steps.get(client) != self.task_of(client)

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Average, weighted by the numbers of samples."""
        return average_by_cluster(self.clusters, updates)


# -----------------------------------------------------------------------------
# FedProx-EWC: federated averaging whose clients hold what matters for their former tasks.
#
# Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017. A client
# that has trained on former tasks makes its loss on the present one small together with
#
#     λ/2 Σ_i F_i (w_i − w*_i)²,
#
# where w* are its own weights at the end of the former task and F_i, the Fisher information, says
# how much weight i matters there: the mean over the task's samples of the squared gradient of the
# loss. FedProx's term μ/2 ‖w − w_g‖² is added (Li et al., MLSys 2020), and the server averages.
#
# Information is accumulated as in online EWC (Schwarz et al., "Progress & Compress", ICML 2018):
# one penalty for all former tasks together, around the latest w*, with F ← γ F + F_t at the end of
# task t. γ = 1 forgets none; Kirkpatrick's own has a penalty for each task, around its own w*.
#
# When a task is over, a client notices with its next training, as its data have moved on then. It
# measures F_t at that moment, on the former step's samples, which takes about one local epoch. F
# and w* never leave the client. Where data never change this is FedProx. The default of λ is ours,
# found on the digits; F is a mean over samples.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EWCParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-EWC."""

    strength: float = option(1000.0, "λ: strength of the pull to former tasks' weights", low=0)
    memory: float = option(
        1.0, "γ: share of former tasks' information that is left after the next", low=0, high=1
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
        """Let a client train, after it has measured the task that is over, if one is."""
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
# Stable SGD, federated: training that stays in wide minima forgets less.
#
# Mirzadeh et al., "Understanding the Role of Training Regimes in Continual Learning", NeurIPS 2020.
# What a network forgets of a task is bounded by the curvature of that task's minimum, its largest
# eigenvalue, times the squared distance that the weights move afterwards. So:
#
# - dropout and small mini-batches, from the first task on, lead to wide minima;
# - a large learning rate does too, but then each task gets a smaller one, η_t = η γ^t, so that the
#   weights move less and less.
#
# No memory is needed. Here each client trains so, with FedProx's term, and the server averages. t
# counts the steps of the client's data; where they never change η stays. Networks are the user's:
# dropout acts on what their linear layers receive, see :mod:`raceme.training.local`.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StableSGDParameters(TaskRoundsParameters):
    """Hyper-parameters of Stable SGD."""

    dropout: float = option(0.25, "share of hidden units that a step leaves out", low=0, below=1)
    decay: float = option(
        0.8, "γ: share of the learning rate that is left from one task to the next", above=0, high=1
    )
    batch_size: int | None = option(
        None, "samples per step, small ones for wide minima (auto: the run's)", low=1
    )


class StableSGD(TaskRounds):
    """FedProx with dropout and a learning rate that decays per task (Stable SGD)."""

    parameters_type = StableSGDParameters
    needs = Needs(one_model=True)
    parameters: StableSGDParameters

    def request_for(self, client: str) -> Request:
        """Let a client train with dropout, at its task's learning rate."""
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
# with task-shared weights σ, a mask of one number for each unit, and task-adaptive weights τ_t. In
# training on task t
#
#     L({σ ⊙ M_t + τ_t}; D_t) + λ1 Σ_{i≤t} ‖τ_i‖₁ + λ2 Σ_{i<t} ‖θ_i* − (σ ⊙ M_i + τ_i)‖²
#
# is made small over σ, v_t and all τ_i: few task-adaptive weights are not 0, and those of former
# tasks make up for what σ drifts, from θ_i* = σ ⊙ M_i + τ_i as it was when task t began.
#
# Federated, σ is the model: clients train it with FedProx's term on it, and the server averages.
# v_t and τ_t stay with the client, which tests the task that it is at with σ ⊙ M_t + τ_t.
#
# Our readings: masks of former tasks stay as they are; M_t starts from 0.9 and τ_t from 0; the
# terms with λ1 and λ2 follow each step as proximal steps (see
# :mod:`raceme.strategies.continual.client`); τ is not clustered over tasks (the paper's
# hierarchical knowledge consolidation), and no task is given up. The default of λ1 was found on the
# digits; that of λ2 was compared with 0 and 1 only. A client keeps about two models for each task
# that it has met.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class APDParameters(TaskRoundsParameters):
    """Hyper-parameters of FedProx-APD."""

    sparsity: float = option(0.01, "λ1: strength of the L1 norm of task-adaptive weights", low=0)
    drift: float = option(100.0, "λ2: how strongly former tasks' weights are held", low=0)

    def settings(self) -> dict[str, Value]:
        """Return what a request says of the strengths."""
        return {
            names.PROXIMAL_MU: self.mu,
            keys.SPARSITY: self.sparsity,
            keys.DRIFT_STRENGTH: self.drift,
        }


def needs_of_decomposition(kind: str) -> Needs:
    """Return what training decomposed weights needs; clients test with their own parts."""
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
        """Let a client train the shared weights, with its own for its task."""
        return Request(client, keys.TRAIN_DECOMPOSED, settings=self.parameters.settings())


# -----------------------------------------------------------------------------
# FedWeIT: clients that learn tasks one after another borrow from each other's tasks.
#
# Yoon, Jeong, Lee, Yang and Hwang, "Federated Continual Learning with Weighted Inter-client
# Transfer", ICML 2021. The weights of client c for its task t are
#
#     θ_c^(t) = B_c ⊙ m_c^(t) + A_c^(t) + Σ_i α_{c,i}^(t) A_i^(j),
#
# with base weights B, a sparse mask m of one number for each unit, sparse task-adaptive weights A,
# and those of other clients i for their tasks j < t, weighted by an attention α for each array of
# the network. A client makes
#
#     L(θ_c^(t)) + λ1 Ω({m_c^(t), A_c^(1..t)}) + λ2 Σ_{i<t} ‖ΔB_c ⊙ m_c^(i) + ΔA_c^(i)‖²
#
# small, Ω the L1 norm and Δ what has changed since task t began: A of former tasks make up for what
# B drifts. The server averages B. It keeps each client's A, and sends a client that begins a task
# those of others; they do not change while it lasts.
#
# Our readings: the clients upload B itself, not B ⊙ m, which each round would mask once more; sums
# are of the latest task of each other client that is before t, of at most `others` of them, drawn
# at random; m starts from 1, A and α from 0; FedProx's term is there too, on B; proximal steps as
# in :mod:`raceme.strategies.continual.client`. When a task is over, what was borrowed for it stays
# as it is. The default of λ1 was found on the digits; that of λ2 was compared with 0 and 1 only.
#
# **What leaves a client**: its task-adaptive weights go to other clients as they are, not averaged
# with others, and they are made from its data alone.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedWeITParameters(APDParameters):
    """Hyper-parameters of FedWeIT."""

    sparsity: float = option(
        0.01, "λ1: strength of the L1 norm of masks and task-adaptive weights", low=0
    )
    others: int = option(
        5, "other clients, at most, whose task-adaptive weights a client is sent", low=0
    )


@dataclass
class Adaptive:
    """A client's task-adaptive weights A, of which few are not 0.

    Attributes
    ----------
    indices : NDArray[np.int32]
        Where they are not 0.
    values : NDArray[np.float32]
        Values at these positions, in the same order.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]


@dataclass
class FedWeITState:
    """What FedWeIT knows beside the base weights.

    Attributes
    ----------
    adaptive : dict[str, dict[int, Adaptive]]
        A of each client's latest task, and of the one before, by number of the task.
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
        """Let a client train; if it begins a task, send it what others have for theirs."""
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
        """Return the latest A of others that is of a task before the client's, or some of them."""
        now = self.task_of(client)
        finished = []
        for other, tasks in self.state.adaptive.items():
            before = [task for task in tasks if task < now]
            if other != client and before:
                finished.append(tasks[max(before)])
        count = min(self.parameters.others, len(finished))
        chosen = sorted(self.rng.choice(len(finished), count, replace=False)) if count else []
        return [finished[index] for index in chosen]

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Average the base weights, weighted by the numbers of samples; keep each client's A."""
        for update in updates:
            adaptive = adaptive_of(update, self.spec)
            if adaptive is not None:
                tasks = self.state.adaptive.setdefault(update.task.client, {})
                tasks[update.task.step] = adaptive
                for old in sorted(tasks)[:-2]:
                    del tasks[old]
        return average_by_cluster(self.clusters, updates)


def adaptive_of(update: Update, spec: ModelSpec) -> Adaptive | None:
    """Return the task-adaptive weights that come with an update; None if they are unusable."""
    indices = update.numbers.get(keys.ADAPTIVE_INDICES, np.empty(0))
    values = update.numbers.get(keys.ADAPTIVE_VALUES, np.empty(0))
    weights = spec.size if spec.trainable is None else int(spec.trainable.sum())
    usable = indices.ndim == 1 and indices.shape == values.shape and indices.dtype.kind in "iu"
    if not usable or not indices.size:
        return None
    if indices.min() < 0 or indices.max() >= weights or len(np.unique(indices)) < len(indices):
        return None
    # Other clients will train with them: they are bounded as models are.
    if not np.sum(np.square(values, dtype=np.float64)) <= names.LARGEST_SQUARE:
        return None
    return Adaptive(indices.astype(np.int32), values.astype(np.float32))
