"""CASA+: CASA with sparse training, which gives slow clients less to do.

Liu et al., "CASA: Clustered Federated Learning with Asynchronous Clients", KDD 2024, section 4.4.
The staler a client's update was, the larger the share of its smallest weights that it does not
train next time (eq 17). The mask travels with the model; the client trains the other weights only,
which takes it so much less time, and the server mixes only these in (eq 16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme.messages import COMPUTE_SCALE, MASK, Vector
from raceme.options import option
from raceme.strategies.casa import CASA, CASAParameters, CASAState
from raceme.strategies.model import Model
from raceme.strategies.replies import Task, Update

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

    def attachments(self, client: str) -> Mapping[str, ArrayRecord]:
        """Send the mask along, if there is one."""
        mask = self.state.masks.get(client)
        return {} if mask is None else {MASK: self._spec.pack_mask(mask)}

    def train_config(self, client: str) -> Mapping[str, str | int | float | bool]:
        """Tell the simulator that training takes 1 − S_i of the time."""
        mask = self.state.masks.get(client)
        return {} if mask is None else {COMPUTE_SCALE: float(mask.mean())}

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

    def _aggregate(self, k: int, update: Update, alpha: float) -> None:
        """Mix in what was trained, eq (16), and choose what the client trains next, eq (17)."""
        state, client = self.state, update.task.client
        mask = state.sent.get(update.task.number)
        if mask is None:
            super()._aggregate(k, update, alpha)
        else:
            mix_masked(state.models[k], update.vector, alpha, mask)
        end = self.parameters.rounds or self.planned_updates
        s_i = sparsity(self.parameters.sparsity, self._alpha_c(k), alpha, state.round, end)
        following = magnitude_mask(update.vector, s_i)
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


def magnitude_mask(w_i: Vector, share: float) -> Mask:
    """Return m_i: False for the given share of the smallest weights, True for the others."""
    mask = np.ones(len(w_i), np.bool_)
    dropped = int(share * len(w_i))
    if dropped > 0:
        mask[np.argpartition(np.abs(w_i), dropped - 1)[:dropped]] = False
    return mask


def mix_masked(model: Model, w_i: Vector, alpha: float, mask: Mask) -> None:
    """Mix an update into a model where its mask is set, eq (16); elsewhere w_g stays."""
    step = np.subtract(w_i, model.vector)
    step *= np.float32(alpha)
    step *= mask
    model.vector += step
    model.version += 1
