"""Weights that are made of a shared part and of parts for each task: APD and FedWeIT.

The weights of task t are

    θ_t = σ ⊙ M_t + τ_t + b_t,

with σ shared by all tasks and all clients, a mask M_t with one number for each unit, task-adaptive
weights τ_t, few of which are not 0, and b_t, what a task borrows of other clients: Σ_i α_i A_i with
one α_i for each array of a network. In FedWeIT σ, M and τ are called B, m and A; APD has no b.

What is made small together with the loss of θ_t is

    λ1 Σ_i ‖τ_i‖₁ + λ2 Σ_{i<t} ‖θ_i* − (σ ⊙ M_i + τ_i + b_i)‖² + μ/2 ‖σ − σ₀‖²,

where θ_i* are the weights of a former task when the present one began. The first two terms are not
left to the gradient, but follow each step of it as proximal steps, which have a closed form: so
task-adaptive weights become 0 and not merely small, and λ2 may be as large as one likes (the
papers' 100 would make plain gradient descent diverge at the learning rates used here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.nn.functional import softshrink

from raceme.core.messages import from_array, to_array
from raceme.flower.messages import array_record
from raceme.training.local import Descent, TrainingSettings, optimiser_of
from raceme.training.network import Network
from raceme.training.work import ClientWork

_FIRST_SIGMOID = 0.9
"""What a sigmoid mask starts from: near 1, where nothing is masked, and not yet flat."""


class Masks:
    """Masks of the units of a network: one number for all weights that go into a unit.

    A unit is a row of a matrix, or a kernel of a convolution, for each of its outputs. Arrays of
    one dimension, biases, have no mask.

    Parameters
    ----------
    network : Network
        Whose units.
    sigmoid : bool
        Whether a mask M is the sigmoid of what is trained (APD), or what is trained itself.
    """

    def __init__(self, network: Network, sigmoid: bool) -> None:
        self.sigmoid = sigmoid
        shapes = {name: values.shape for name, values in network.module.named_parameters()}
        units: list[Tensor] = []
        self.count = 0
        for name in network.slices:
            shape = shapes[name]
            if len(shape) > 1:
                own = torch.arange(self.count, self.count + shape[0])
                units.append(own.repeat_interleave(math.prod(shape[1:])))
                self.count += shape[0]
            else:
                units.append(torch.full((math.prod(shape),), -1))
        self._unit = torch.cat(units).to(network.accelerator)
        # Weights without a mask have that of a unit behind the last one, which is always 1.
        self._unit[self._unit < 0] = self.count

    def first(self) -> Tensor:
        """Return what the mask of a new task starts from, shape (units,)."""
        first = math.log(_FIRST_SIGMOID / (1 - _FIRST_SIGMOID)) if self.sigmoid else 1.0
        return torch.full((self.count,), first, device=self._unit.device)

    def of_weights(self, trained: Tensor) -> Tensor:
        """Return M for each weight, shape (d,), of what is trained, shape (units,)."""
        mask = torch.sigmoid(trained) if self.sigmoid else trained
        return torch.cat([mask, mask.new_ones(1)])[self._unit]

    def gradient(self, trained: Tensor, of_weights: Tensor) -> Tensor:
        """Return the gradient of what is trained, given that of M for each weight."""
        summed = of_weights.new_zeros(self.count + 1)
        summed = summed.index_add_(0, self._unit, of_weights)[:-1]
        if self.sigmoid:
            mask = torch.sigmoid(trained)
            summed *= mask * (1 - mask)
        return summed


@dataclass(eq=False)
class TaskPart:
    """What a client keeps of one of its tasks.

    Attributes
    ----------
    mask : Tensor
        What is trained of M, shape (units,).
    adaptive : Tensor
        τ, shape (d,).
    borrowed : Tensor
        b, shape (d,).
    shares : Tensor
        α for each client of whom it borrows and each array, shape (clients, arrays).
    held : Tensor
        θ*, shape (d,); empty for the task that is trained.
    """

    mask: Tensor
    adaptive: Tensor
    borrowed: Tensor
    shares: Tensor
    held: Tensor

    @classmethod
    def new(cls, masks: Masks, weights: int, clients: int = 0, arrays: int = 0) -> TaskPart:
        """Return the part of a task that begins: nothing of its own, and nothing borrowed."""
        mask = masks.first()
        nothing, shares = mask.new_zeros(weights), mask.new_zeros(clients, arrays)
        return cls(mask, nothing, nothing.clone(), shares, mask.new_empty(0))

    def weights(self, shared: Tensor, masks: Masks) -> Tensor:
        """Return θ = σ ⊙ M + τ + b, shape (d,)."""
        return shared * masks.of_weights(self.mask) + self.adaptive + self.borrowed


@dataclass(frozen=True)
class Strengths:
    """How strongly the parts are held.

    Attributes
    ----------
    sparsity : float
        λ1.
    drift : float
        λ2.
    mu : float
        μ, of FedProx's term on the shared part.

    Raises
    ------
    ValueError
        One is below 0, or not finite.
    """

    sparsity: float
    drift: float
    mu: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sparsity", "drift", "mu"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")


class Decomposition:
    """The parts of a network's weights, trained by the gradient of these.

    Parameters
    ----------
    network : Network
        Holds θ of the present task; each step sets it anew.
    masks : Masks
        Of its units.
    shared : Tensor
        σ as it was received.
    part : TaskPart
        The present task's; :meth:`finish` sets what was trained of it.
    formers : Sequence[TaskPart]
        Those of former tasks; each step changes their task-adaptive weights.
    others : Tensor
        A_i of other clients, shape (clients, d).
    strengths : Strengths
        λ1, λ2 and μ.

    Attributes
    ----------
    weights, gradient : Tensor
        All that the gradient trains, flat: σ, the mask, τ and α.
    shared : Tensor
        σ, a part of :attr:`weights`.
    """

    def __init__(
        self,
        network: Network,
        masks: Masks,
        shared: Tensor,
        part: TaskPart,
        formers: Sequence[TaskPart],
        others: Tensor,
        strengths: Strengths,
    ) -> None:
        self._network, self._masks, self._strengths = network, masks, strengths
        self._start, self._part, self._formers = shared.clone(), part, formers
        self._others = others
        self._array = torch.cat(
            [
                torch.full((where.stop - where.start,), index)
                for index, where in enumerate(network.slices.values())
            ]
        ).to(network.accelerator)
        pieces = [shared, part.mask, part.adaptive, part.shares.reshape(-1)]
        self.weights = torch.cat(pieces)
        self.gradient = torch.zeros_like(self.weights)
        sizes = [len(piece) for piece in pieces]
        self.shared, self._mask, self._adaptive, shares = torch.split(self.weights, sizes)
        self._shares = shares.view_as(part.shares)
        self._gradients = torch.split(self.gradient, sizes)
        # Masks of former tasks stay as they are.
        self._former_masks = [masks.of_weights(former.mask) for former in formers]
        self.compose()

    def compose(self) -> None:
        """Set the network's weights to those that the parts make together."""
        self._of_weights = self._masks.of_weights(self._mask)
        torch.mul(self.shared, self._of_weights, out=self._network.weights)
        self._network.weights.add_(self._adaptive).add_(self._borrowed())

    def descent(self, network: Network, settings: TrainingSettings) -> Descent:
        """Return what makes a step of the parts, given the gradient of the network's weights."""
        move = optimiser_of(self, settings)

        def descend() -> None:
            self._differentiate(network.gradient)
            move()
            self._hold(settings.lr)
            self._shrink(settings.lr)
            self.compose()

        return descend

    def finish(self) -> None:
        """Write what was trained into the present task's part."""
        part = self._part
        part.mask, part.adaptive = self._mask.clone(), self._adaptive.clone()
        part.shares, part.borrowed = self._shares.clone(), self._borrowed()

    def _borrowed(self) -> Tensor:
        """Return b = Σ_i α_i A_i, each array with its own α."""
        return (self._shares[:, self._array] * self._others).sum(0)

    def _differentiate(self, gradient: Tensor) -> None:
        """Set the gradients of the parts from that of the weights that they make."""
        shared, mask, adaptive, shares = self._gradients
        torch.mul(gradient, self._of_weights, out=shared)
        shared.add_(self.shared - self._start, alpha=self._strengths.mu)
        mask.copy_(self._masks.gradient(self._mask, gradient * self.shared))
        adaptive.copy_(gradient)
        if len(self._others):
            sums = torch.zeros_like(self._shares)
            sums.index_add_(1, self._array, self._others * gradient)
            shares.copy_(sums.reshape(-1))

    def _hold(self, lr: float) -> None:
        """Make the proximal step of λ2 Σ_i ‖θ_i* − (σ ⊙ M_i + τ_i + b_i)‖², over σ and all τ_i.

        Of x = (σ, τ_1, …) it is where ‖x − x₀‖² / 2η and the term are least together. With
        k = 2 η λ2 and κ = k / (1 + k) that is

            σ = (σ₀ − κ Σ M_i (τ_i + b_i − θ_i*)) / (1 + κ Σ M_i²),

        and each τ_i takes the share κ of what is then left of its residual.
        """
        k = 2.0 * lr * self._strengths.drift
        if not k or not self._formers:
            return
        share = k / (1.0 + k)
        above, below = self.shared.clone(), torch.ones_like(self.shared)
        for former, mask in zip(self._formers, self._former_masks, strict=True):
            rest = former.adaptive + former.borrowed - former.held
            above.addcmul_(mask, rest, value=-share)
            below.addcmul_(mask, mask, value=share)
        torch.div(above, below, out=self.shared)
        for former, mask in zip(self._formers, self._former_masks, strict=True):
            residual = self.shared * mask + former.adaptive + former.borrowed - former.held
            former.adaptive.sub_(residual, alpha=share)

    def _shrink(self, lr: float) -> None:
        """Make the proximal step of λ1 Σ_i ‖τ_i‖₁: towards 0 by η λ1, and not past it.

        A mask that is no sigmoid is sparse too (FedWeIT's Ω has m beside A).
        """
        step = lr * self._strengths.sparsity
        if not step:
            return
        sparse = [self._adaptive, *(former.adaptive for former in self._formers)]
        if not self._masks.sigmoid:
            sparse.append(self._mask)
        for values in sparse:
            values.copy_(softshrink(values, step))


# -----------------------------------------------------------------------------
# What a client keeps of each of its tasks: its parts of decomposed weights, in its state.
# -----------------------------------------------------------------------------


PART = "part-"
"""Records of a client's state: what it keeps of a task, by the task's number."""
_LOGITS = "logits"
"""Name of a mask in such a record if M is the sigmoid of it."""


def complete(work: ClientWork, step: int) -> None:
    """Make of the shared part in a client's network its weights for a task, if it has a part."""
    if key(step) in work.state:
        network, record = work.client.network, work.state.array_records[key(step)]
        masks = Masks(network, sigmoid=_LOGITS in record)
        part = read(record, network.accelerator)
        network.weights.copy_(part.weights(network.weights, masks))


def key(step: int) -> str:
    """Name the record of a task."""
    return f"{PART}{step}"


def read(record: ArrayRecord, accelerator: str) -> TaskPart:
    """Read a part as the client keeps it into the memory of an accelerator."""
    arrays = {
        name: torch.from_numpy(np.array(from_array(array))).to(accelerator)
        for name, array in record.items()
    }
    mask = arrays[_LOGITS] if _LOGITS in arrays else arrays["mask"]
    rest = (arrays[name] for name in ("adaptive", "borrowed", "shares", "held"))
    return TaskPart(mask, *rest)


def written(part: TaskPart, masks: Masks) -> ArrayRecord:
    """Return a part as the client keeps it."""
    arrays: dict[str, Tensor] = {
        _LOGITS if masks.sigmoid else "mask": part.mask,
        "adaptive": part.adaptive,
        "borrowed": part.borrowed,
        "shares": part.shares,
        "held": part.held,
    }
    return array_record({name: to_array(values.cpu().numpy()) for name, values in arrays.items()})
