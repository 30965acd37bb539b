"""FedWeIT: clients that learn tasks one after another borrow from each other's tasks.

Yoon, Jeong, Lee, Yang and Hwang, "Federated Continual Learning with Weighted Inter-client
Transfer", ICML 2021. The weights of client c for its task t are

    θ_c^(t) = B_c ⊙ m_c^(t) + A_c^(t) + Σ_i α_{c,i}^(t) A_i^(j),

with base weights B, a sparse mask m of one number for each unit, sparse task-adaptive weights A,
and those of other clients i for their tasks j < t, weighted by an attention α for each array of the
network. A client makes

    L(θ_c^(t)) + λ1 Ω({m_c^(t), A_c^(1..t)}) + λ2 Σ_{i<t} ‖ΔB_c ⊙ m_c^(i) + ΔA_c^(i)‖²

small, Ω the L1 norm and Δ what has changed since task t began: A of former tasks make up for what
B drifts. The server averages B. It keeps each client's A, and sends a client that begins a task
those of others; they do not change while it lasts.

Our readings: the clients upload B itself, not B ⊙ m, which each round would mask once more; sums
are of the latest task of each other client that is before t, of at most `others` of them, drawn at
random; m starts from 1, A and α from 0; FedProx's term is there too, on B; proximal steps as in
:mod:`raceme.training.decomposition`. When a task is over, what was borrowed for it stays as it is.
The default of λ1 was found on the digits; that of λ2 was compared with 0 and 1 only.

**What leaves a client**: its task-adaptive weights go to other clients as they are, not averaged
with anybody's, and they are made from its data alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from raceme.compat import array_record
from raceme.config.options import option
from raceme.protocol.messages import (
    ADAPTIVE_INDICES,
    ADAPTIVE_VALUES,
    DECOMPOSED,
    DRIFT_STRENGTH,
    LARGEST_SQUARE,
    OTHERS,
    PROXIMAL_MU,
    SPARSITY,
    TRAIN_BORROWING,
    ModelSpec,
    to_array,
)
from raceme.server.dispatch import Dispatch, InRounds
from raceme.server.method import Applied, Method, average_by_cluster
from raceme.server.replies import Update
from raceme.server.work import Work
from raceme.strategies.client_tasks import TaskRoundsParameters, begins_task, task_of


@dataclass(frozen=True)
class FedWeITParameters(TaskRoundsParameters):
    """Hyper-parameters of FedWeIT."""

    sparsity: float = option(
        0.01, "λ1: strength of the L1 norm of masks and task-adaptive weights", low=0
    )
    drift: float = option(100.0, "λ2: how strongly former tasks' weights are held", low=0)
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
        What they are there.
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


class FedWeIT(Method):
    """Base weights for all, sparse ones for each task, and those of others borrowed (FedWeIT)."""

    parameters_type = FedWeITParameters
    state_type = FedWeITState
    test_settings = MappingProxyType({DECOMPOSED: True})
    parameters: FedWeITParameters
    state: FedWeITState
    dispatch: InRounds

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({TRAIN_BORROWING})

    def policy(self) -> Dispatch:
        """Work in rounds."""
        return InRounds(self.parameters.fraction, picking=self.parameters.picking)

    def work_for(self, client: str) -> Work:
        """Let a client train; if it begins a task, send it what others have for theirs."""
        settings = {
            PROXIMAL_MU: self.parameters.mu,
            SPARSITY: self.parameters.sparsity,
            DRIFT_STRENGTH: self.parameters.drift,
        }
        lent = self._lent_to(client) if begins_task(self, client) else []
        arrays = {}
        if lent:
            named = {}
            for number, adaptive in enumerate(lent):
                named[f"{ADAPTIVE_INDICES}-{number}"] = to_array(adaptive.indices)
                named[f"{ADAPTIVE_VALUES}-{number}"] = to_array(adaptive.values)
            arrays[OTHERS] = array_record(named)
        return Work(client, TRAIN_BORROWING, arrays=arrays, settings=settings)

    def _lent_to(self, client: str) -> list[Adaptive]:
        """Return the latest A of others that is of a task before the client's, or some of them."""
        now = task_of(self, client)
        finished = []
        for other, tasks in self.state.adaptive.items():
            before = [task for task in tasks if task < now]
            if other != client and before:
                finished.append(tasks[max(before)])
        count = min(self.parameters.others, len(finished))
        chosen = sorted(self.rng.choice(len(finished), count, replace=False)) if count else []
        return [finished[index] for index in chosen]

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
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
    indices = update.numbers.get(ADAPTIVE_INDICES, np.empty(0))
    values = update.numbers.get(ADAPTIVE_VALUES, np.empty(0))
    weights = spec.size if spec.trainable is None else int(spec.trainable.sum())
    usable = indices.ndim == 1 and indices.shape == values.shape and indices.dtype.kind in "iu"
    if not usable or not indices.size:
        return None
    if indices.min() < 0 or indices.max() >= weights or len(np.unique(indices)) < len(indices):
        return None
    # Other clients will train with them: they are bounded as models are.
    if not np.sum(np.square(values, dtype=np.float64)) <= LARGEST_SQUARE:
        return None
    return Adaptive(indices.astype(np.int32), values.astype(np.float32))
