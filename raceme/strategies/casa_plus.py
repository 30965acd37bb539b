"""CASA+: CASA with sparse training, which gives slow clients less to do.

Liu et al., "CASA: Clustered Federated Learning with Asynchronous Clients", KDD 2024, section 4.4.
The staler a client's update was, the larger the share of its smallest weights that it does not
train next time (eq 17). The mask travels with the model; the client trains the other weights only,
which takes it so much less time, and the server mixes only these in (eq 16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.config.options import option
from raceme.protocol.messages import COMPUTE_SCALE, MASK, Vector
from raceme.server.replies import Update
from raceme.server.work import Task, Work
from raceme.strategies.casa import CASA, CASAParameters, CASAState

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class CASAPlusParameters(CASAParameters):
    """Hyper-parameters of CASA+; those of CASA, and how sparsely slow clients train."""

    sparsity: float = option(
        0.5, "S0: initial sparsity; the paper's figure 9 tries several", low=0, high=1
    )
    rounds: int = option(0, "R_end: updates over which sparsity ends (0: those of the run)", low=0)


@dataclass
class CASAPlusState(CASAState):
    """What CASA+ knows on top.

    Attributes
    ----------
    masks : dict[str, NDArray[np.bool_]]
        Which weights each client is to train next; clients that train all are left out.
    sent : dict[int, NDArray[np.bool_]]
        The masks of open tasks, by number.
    """

    masks: dict[str, Mask] = field(default_factory=dict)
    sent: dict[int, Mask] = field(default_factory=dict)


class CASAPlus(CASA):
    """CASA with sparse training: slow clients train only their larger weights (CASA+)."""

    parameters_type = CASAPlusParameters
    state_type = CASAPlusState
    state: CASAPlusState
    parameters: CASAPlusParameters

    # On its way out.

    def work_for(self, client: str) -> Work:
        """Send the mask along, if there is one: training then takes 1 − S_i of the time."""
        mask = self.state.masks.get(client)
        if mask is None:
            return Work(client)
        arrays = {MASK: self.spec.pack_mask(mask)}
        return Work(client, arrays=arrays, settings={COMPUTE_SCALE: float(mask.mean())})

    def on_dispatch(self, task: Task) -> None:
        """Note with which mask a client trains."""
        super().on_dispatch(task)
        mask = self.state.masks.get(task.client)
        if mask is not None:
            self.state.sent[task.number] = mask

    def on_close(self, task: Task) -> None:
        """Forget the mask of a task that is over."""
        super().on_close(task)
        self.state.sent.pop(task.number, None)

    # On its way in.

    def _mix(self, k: int, update: Update, alpha: float) -> None:
        """Mix in what was trained, eq (16), and choose what the client trains next, eq (17)."""
        state, client = self.state, update.task.client
        mask = state.sent.get(update.task.number)
        self.models[k].mix(update.vector, alpha, where=mask)
        end = self.parameters.rounds or self.planned_updates
        s_i = sparsity(self.parameters.sparsity, self._alpha_c(k), alpha, state.round, end)
        following = magnitude_mask(update.vector, s_i, self.trainable)
        if following.all():
            state.masks.pop(client, None)
        else:
            state.masks[client] = following


def sparsity(s0: float, alpha_c: float, alpha_i: float, t: int, end: int) -> float:
    """Return S_i(t) = S0/2 · (α_c,k − α_i) · (1 + cos((t − 1) π / R_end)), eq (17).

    Beyond R_end it stays 0, where the cosine would let it grow again (our reading).
    """
    if t - 1 >= end:
        return 0.0
    return s0 / 2 * (alpha_c - alpha_i) * (1 + math.cos((t - 1) * math.pi / end))


def magnitude_mask(w_i: Vector, share: float, trainable: Mask | None = None) -> Mask:
    """Return m_i: False for the given share of the smallest weights, True for the others.

    Parameters
    ----------
    w_i : Vector
        The client's model. Shape (d,).
    share : float
        S_i.
    trainable : Mask, optional
        Which numbers of it are weights; the others are never masked. Shape (d,); None for all.
    """
    mask = np.ones(len(w_i), np.bool_)
    weights = np.arange(len(w_i)) if trainable is None else np.flatnonzero(trainable)
    dropped = int(share * len(weights))
    if dropped > 0:
        smallest = np.argpartition(np.abs(w_i[weights]), dropped - 1)[:dropped]
        mask[weights[smallest]] = False
    return mask
