"""Client halves of continual learning: EWC, and the decomposed weights of APD and FedWeIT.

A task of a client is a step of its data. The client's state has what it needs of former tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor
from torch.nn.functional import softshrink

from raceme.core import messages as names
from raceme.core.messages import InvalidModelError, from_array, to_array
from raceme.core.training_settings import TrainingSettings
from raceme.flower.messages import array_record
from raceme.strategies import continual as keys
from raceme.training.local import (
    Descent,
    Pull,
    Term,
    TermBuilder,
    differentiate,
    optimiser_of,
    train,
)
from raceme.training.models import Network, Samples, is_usable
from raceme.training.work import (
    OWN_MODEL,
    ClientWork,
    WorkResult,
    score_former,
    score_upload,
    train_model,
    training_answer,
)

# -----------------------------------------------------------------------------
# EWC. The client keeps its weights at the end of the former task, the Fisher information of all
# former tasks, and the model that it trained last.
# -----------------------------------------------------------------------------


FISHER = "fisher"
"""Record of a client's state: Fisher information, each weight's importance for former tasks."""
FORMER = "former"
"""Record of a client's state: its weights at the end of its former task."""
TRAINED = "trained"
"""Record of a client's state: the step of the data that it last trained on."""


def train_elastic(work: ClientWork) -> WorkResult:
    """Train the received model with elastic weight consolidation (EWC).

    If the client's data have changed since its last training, the former task is over, and its
    Fisher information is first added to that of earlier tasks.
    """
    state, passed = work.state, _consolidate(work)
    strength = work.number(keys.ELASTIC_STRENGTH, 0.0)
    held = state.array_records if FISHER in state else {}
    terms = [elastic(strength, held[FISHER], held[FORMER])] if held else []
    answer = train_model(work, work.model, forward=passed, terms=terms)
    assert answer.model is not None, "training answers with a model"
    # The server refuses a diverged training; its weights must not enter the client's state.
    if is_usable(work.client.network.weights):
        state[OWN_MODEL] = answer.model
        state[TRAINED] = ConfigRecord({names.STEP: work.step})
    return answer


def _consolidate(work: ClientWork) -> int:
    """Add the Fisher information of a task that is over; return the passes of samples it took.

    F ← γ F + F_t and w* ← w_t, the client's own weights after its last training on the task.
    """
    state, network = work.state, work.client.network
    if TRAINED not in state or state.config_records[TRAINED][names.STEP] == work.step:
        return 0
    former = work.at_step(int(str(state.config_records[TRAINED][names.STEP])))
    work.receive(state.array_records[OWN_MODEL])
    fisher = fisher_information(network, former.train)
    if FISHER in state:
        kept = network.read_weights(state.array_records[FISHER])
        fisher += work.number(keys.ELASTIC_MEMORY, 1.0) * kept
    state[FISHER] = network.write_weights(fisher)
    state[FORMER] = network.write_weights(network.weights)
    return names.PASSES_OF_TRAINING * len(former.train)


def fisher_information(network: Network, samples: Samples) -> Tensor:
    """Return the diagonal of the empirical Fisher information at a network's weights.

    The mean over samples of the squared gradient of the loss, with the sample's true label.
    Kirkpatrick et al. draw labels from the network's prediction; the two agree if it predicts well.

    Returns
    -------
    Tensor
        Shape (d,), float32.
    """
    total = torch.zeros_like(network.weights)
    network.module.eval()
    for x, y in samples.slices(1):
        differentiate(network, x, y)
        total.addcmul_(network.gradient, network.gradient)
    return total / len(samples)


def elastic(strength: float, fisher: ArrayRecord, former: ArrayRecord) -> TermBuilder:
    """Return EWC's term (Kirkpatrick et al. 2017): the gradient of λ/2 Σ_i F_i (w_i - w*_i)².

    The gradient is λF / (1 + η λF) (w - w*), with η the learning rate. It is the gradient of the
    penalty's Moreau envelope: a step moves towards w* and never past it, however large λF is. For
    small η λF, as in the paper, it equals λF (w - w*).

    Parameters
    ----------
    strength : float
        λ: strength of the penalty, at least 0.
    fisher, former : ArrayRecord
        F and w*: importance of each weight for former tasks, and the weights after the last one.

    Raises
    ------
    ValueError
        λ is below 0, or not finite.
    """
    if not 0 <= strength < math.inf:
        raise ValueError(f"{keys.ELASTIC_STRENGTH} must be at least 0, got {strength}.")

    def build(network: Network, settings: TrainingSettings, _: Mapping[str, ArrayRecord]) -> Term:
        stiffness = strength * network.read_weights(fisher)
        stiffness /= 1.0 + settings.lr * stiffness
        return Pull(stiffness, network.read_weights(former))

    return build


# -----------------------------------------------------------------------------
# Weights composed of a shared part and of parts for each task: APD and FedWeIT.
#
# The weights of task t are
#
#     θ_t = σ ⊙ M_t + τ_t + b_t,
#
# with σ shared by all tasks and all clients, a mask M_t with one number for each unit, sparse
# task-adaptive weights τ_t, and weights b_t borrowed from other clients: Σ_i α_i A_i with one α_i
# for each array of a network. In FedWeIT σ, M and τ are called B, m and A; APD has no b.
#
# Training minimises the loss of θ_t plus
#
#     λ1 Σ_i ‖τ_i‖₁ + λ2 Σ_{i<t} ‖θ_i* − (σ ⊙ M_i + τ_i + b_i)‖² + μ/2 ‖σ − σ₀‖²,
#
# where θ_i* are the weights of a former task when the present one began. The first two terms are
# not part of the gradient; after each gradient step they are applied as proximal steps, which have
# a closed form. So task-adaptive weights become exactly 0, and any λ2 is stable (the papers' 100
# would make plain gradient descent diverge at the learning rates used here).
# -----------------------------------------------------------------------------


_FIRST_SIGMOID = 0.9
"""Start of a sigmoid mask: near 1, so that nothing is masked, but where the slope is not small."""


class Masks:
    """Masks of the units of a network: one number for all weights that go into a unit.

    A unit is an output: a row of a matrix, or a kernel of a convolution. Biases have no mask.

    Parameters
    ----------
    network : Network
        Network whose units are masked.
    sigmoid : bool
        Whether a mask M is the sigmoid of the trained numbers (APD), or these themselves.
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
        # Weights without a mask belong to an extra last unit, whose mask is always 1.
        self._unit[self._unit < 0] = self.count

    def first(self) -> Tensor:
        """Return the initial numbers of a new task's mask, shape (units,)."""
        first = math.log(_FIRST_SIGMOID / (1 - _FIRST_SIGMOID)) if self.sigmoid else 1.0
        return torch.full((self.count,), first, device=self._unit.device)

    def of_weights(self, trained: Tensor) -> Tensor:
        """Return M for each weight, shape (d,), from the trained numbers, shape (units,)."""
        mask = torch.sigmoid(trained) if self.sigmoid else trained
        return torch.cat([mask, mask.new_ones(1)])[self._unit]

    def gradient(self, trained: Tensor, of_weights: Tensor) -> Tensor:
        """Return the gradient of the trained numbers, from that of M for each weight."""
        summed = of_weights.new_zeros(self.count + 1)
        summed = summed.index_add_(0, self._unit, of_weights)[:-1]
        if self.sigmoid:
            mask = torch.sigmoid(trained)
            summed *= mask * (1 - mask)
        return summed


@dataclass(eq=False)
class TaskPart:
    """Memory of a client's task.

    Attributes
    ----------
    mask : Tensor
        Trained numbers of M, shape (units,).
    adaptive : Tensor
        τ: task-adaptive weights, shape (d,).
    borrowed : Tensor
        b: weighted sum of other clients' weights, shape (d,).
    shares : Tensor
        α for each client whose weights are borrowed and each array, shape (clients, arrays).
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
        """Return the part of a new task: no weights of its own, and none borrowed."""
        mask = masks.first()
        nothing, shares = mask.new_zeros(weights), mask.new_zeros(clients, arrays)
        return cls(mask, nothing, nothing.clone(), shares, mask.new_empty(0))

    def weights(self, shared: Tensor, masks: Masks) -> Tensor:
        """Return θ = σ ⊙ M + τ + b, shape (d,)."""
        return shared * masks.of_weights(self.mask) + self.adaptive + self.borrowed


@dataclass(frozen=True)
class Strengths:
    """Strengths of the penalties on the parts.

    Attributes
    ----------
    sparsity : float
        λ1: strength of the L1 penalty on task-adaptive weights, and on unbounded masks.
    drift : float
        λ2: strength of the penalty on changes of former tasks' weights.
    mu : float
        μ, of FedProx's term on the shared part.

    Raises
    ------
    ValueError
        A strength is below 0, or not finite.
    """

    sparsity: float
    drift: float
    mu: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sparsity", "drift", "mu"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")


class Decomposition:
    """The parts of a network's weights, trained by the gradient of the weights.

    Parameters
    ----------
    network : Network
        Network with θ of the present task, which each step updates.
    masks : Masks
        Layout of the masks of the network's units.
    shared : Tensor
        σ as it was received.
    part : TaskPart
        Part of the present task; :meth:`finish` stores the trained numbers in it.
    formers : Sequence[TaskPart]
        Parts of former tasks; each step changes their task-adaptive weights.
    others : Tensor
        A_i of other clients, shape (clients, d).
    strengths : Strengths
        Strengths λ1, λ2 and μ of the penalties.

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
        """Set the network's weights to those composed of the parts."""
        self._of_weights = self._masks.of_weights(self._mask)
        torch.mul(self.shared, self._of_weights, out=self._network.weights)
        self._network.weights.add_(self._adaptive).add_(self._borrowed())

    def descent(self, network: Network, settings: TrainingSettings) -> Descent:
        """Return a function that makes a step, given the gradient of the network's weights."""
        move = optimiser_of(self, settings)

        def descend() -> None:
            self._differentiate(network.gradient)
            move()
            self._hold(settings.lr)
            self._shrink(settings.lr)
            self.compose()

        return descend

    def finish(self) -> None:
        """Store the trained numbers in the present task's part."""
        part = self._part
        part.mask, part.adaptive = self._mask.clone(), self._adaptive.clone()
        part.shares, part.borrowed = self._shares.clone(), self._borrowed()

    def _borrowed(self) -> Tensor:
        """Return b = Σ_i α_i A_i, each array with its own α."""
        return (self._shares[:, self._array] * self._others).sum(0)

    def _differentiate(self, gradient: Tensor) -> None:
        """Set the gradients of the parts from that of the network's weights."""
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

        The result minimises ‖x − x₀‖² / 2η plus the term over x = (σ, τ_1, …). With k = 2 η λ2 and
        κ = k / (1 + k) that is

            σ = (σ₀ − κ Σ M_i (τ_i + b_i − θ_i*)) / (1 + κ Σ M_i²),

        and each τ_i is reduced by the share κ of the residual that then remains.
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

        Masks that are not sigmoids are sparse, too (FedWeIT's Ω includes m).
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
# Memory of a client for each of its tasks: the parts of decomposed weights, in its state.
# -----------------------------------------------------------------------------


_PART = "part-"
"""Prefix of the records of a client's state with the parts of a task, by the task's number."""
_LOGITS = "logits"
"""Name of the trained numbers of a mask in such a record, if M is their sigmoid."""


def complete(work: ClientWork) -> None:
    """Complete the shared weights in a client's network with the client's parts for a task."""
    if _key(work.step) in work.state:
        network, record = work.client.network, work.state.array_records[_key(work.step)]
        masks = Masks(network, sigmoid=_LOGITS in record)
        part = _read(record, network.accelerator)
        network.weights.copy_(part.weights(network.weights, masks))


def _key(step: int) -> str:
    return f"{_PART}{step}"


def _read(record: ArrayRecord, accelerator: str) -> TaskPart:
    arrays = {
        "mask" if name == _LOGITS else name: torch.from_numpy(np.array(from_array(array)))
        for name, array in record.items()
    }
    return TaskPart(**{item.name: arrays[item.name].to(accelerator) for item in fields(TaskPart)})


def _written(part: TaskPart, masks: Masks) -> ArrayRecord:
    arrays = {item.name: to_array(getattr(part, item.name).cpu().numpy()) for item in fields(part)}
    if masks.sigmoid:
        arrays[_LOGITS] = arrays.pop("mask")
    return array_record(arrays)


# -----------------------------------------------------------------------------
# Work on decomposed weights. Server and clients exchange the shared part.
# -----------------------------------------------------------------------------


def train_decomposed(work: ClientWork) -> WorkResult:
    """Train the received shared weights and those of the current task (APD)."""
    answer, _ = _train(work, sigmoid=True)
    return answer


def train_borrowing(work: ClientWork) -> WorkResult:
    """Train as APD does, with task weights of other clients (FedWeIT).

    Weights received from other clients at the start of a task are kept until its end. The answer
    states the client's task-adaptive weights, which others may borrow.
    """
    state, own = work.state, keys.OTHERS + f"-{work.step}"
    if _key(work.step) not in state:
        for name in [name for name in state if name.startswith(keys.OTHERS)]:
            del state[name]
        if keys.OTHERS in work.arrays:
            state[own] = work.arrays[keys.OTHERS]
    answer, part = _train(work, sigmoid=False, borrowed=state.array_records.get(own))
    where = torch.nonzero(part.adaptive).reshape(-1)
    indices = where.cpu().numpy().astype(np.int32)
    values = part.adaptive[where].cpu().numpy()
    return replace(answer, numbers={keys.ADAPTIVE_INDICES: indices, keys.ADAPTIVE_VALUES: values})


def _train(
    work: ClientWork, sigmoid: bool, borrowed: ArrayRecord | None = None
) -> tuple[WorkResult, TaskPart]:
    """Train, and keep the parts; return the answer, and the present task's part."""
    client, network, received = work.client, work.client.network, work.model
    scores = score_former(work, received, keys.TASK_PARTS)
    spec = work.receive(received)
    shared, masks = network.weights.clone(), Masks(network, sigmoid)
    others = _others(borrowed, len(shared)).to(network.accelerator)
    kept = {
        name: _read(record, network.accelerator)
        for name, record in work.state.array_records.items()
        if name.startswith(_PART)
    }
    present = _key(work.step)
    if present not in kept:
        for former in kept.values():
            former.held = former.weights(shared, masks)
        kept[present] = TaskPart.new(masks, len(shared), len(others), len(network.slices))
    formers = [part for name, part in kept.items() if name != present]
    strengths = Strengths(
        sparsity=work.number(keys.SPARSITY, 0.0),
        drift=work.number(keys.DRIFT_STRENGTH, 0.0),
        mu=work.number(names.PROXIMAL_MU, 0.0),
    )
    parts = Decomposition(network, masks, shared, kept[present], formers, others, strengths)
    # FedProx's term acts on the shared part, not on the composed weights.
    settings = replace(work.training_settings(), proximal_mu=0.0)
    loss = train(network, client.train, settings, work.generator(), descent=parts.descent)
    parts.finish()
    scores |= score_upload(work)
    # The server refuses a diverged training; its weights must not enter the client's state.
    if is_usable(parts.weights) and all(is_usable(part.adaptive) for part in formers):
        for name, part in kept.items():
            work.state[name] = _written(part, masks)
    network.weights.copy_(parts.shared)
    answer = training_answer(work, work.give(spec, received), {names.TRAIN_LOSS: loss, **scores})
    return answer, kept[present]


def _others(record: ArrayRecord | None, weights: int) -> Tensor:
    """Return the task-adaptive weights of other clients, shape (clients, d).

    Raises
    ------
    InvalidModelError
        They do not fit the network.
    """
    record = ArrayRecord() if record is None else record
    count = sum(name.startswith(keys.ADAPTIVE_INDICES) for name in record)
    others = torch.zeros(count, weights)
    for row in range(count):
        where = from_array(record[f"{keys.ADAPTIVE_INDICES}-{row}"])
        values = from_array(record[f"{keys.ADAPTIVE_VALUES}-{row}"])
        fits = where.shape == values.shape and where.ndim == 1 and where.dtype.kind in "iu"
        if not fits or (where.size and not 0 <= int(where.min()) <= int(where.max()) < weights):
            raise InvalidModelError("The task-adaptive weights of another client do not fit.")
        others[row, torch.from_numpy(where.astype(np.int64))] = torch.from_numpy(
            values.astype(np.float32)
        )
    return others
