"""Training, tests and gradients of many clients in one computation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raceme.core.training_settings import TrainingSettings
from raceme.simulation.stacked.graphs import CudaGraphs, Eager, Recorder, Step
from raceme.simulation.stacked.layers import Pass
from raceme.simulation.stacked.network import StackedNetwork
from raceme.simulation.stacked.samples import SampleStore
from raceme.training.local import (
    Frozen,
    Moves,
    Pull,
    Term,
    epochs,
    random_moves,
    shifted_and_mirrored,
    torch_seed,
)
from raceme.training.models import Network, Samples

log = logging.getLogger("raceme")

_CPU_BYTES = 2**30
_GPU_SHARE = 0.5
"""Share of a GPU's free memory for one computation."""
_WEIGHT_COPIES = 6
"""Copies of the weights: current, received, gradients and temporaries."""
_TEST_BATCH = 2048
"""Maximum number of samples of all models in a step of a test."""
_LEAST_TEST_BATCH = 32
_MOST_WORKSPACES = 16

# -----------------------------------------------------------------------------
# Computations that clients request.
# -----------------------------------------------------------------------------

Buffers = Mapping[str, Tensor]


@dataclass(eq=False)
class StackedModel:
    """Weights of one client's network on the CPU, and its buffers by name."""

    weights: Tensor
    buffers: Buffers

    @classmethod
    def of(cls, network: Network) -> StackedModel:
        """Return a copy of a network's weights and buffers."""
        buffers = {name: values.clone() for name, values in network.module.named_buffers()}
        return cls(network.weights.clone(), buffers)

    def load(self, network: Network) -> None:
        """Write weights and buffers into a network."""
        network.weights.copy_(self.weights)
        for name, values in network.module.named_buffers():
            values.copy_(self.buffers[name])

    def equals(self, other: StackedModel) -> bool:
        """Return whether two are equal."""
        return torch.equal(self.weights, other.weights) and all(
            torch.equal(values, other.buffers[name]) for name, values in self.buffers.items()
        )


@dataclass(eq=False)
class Training:
    """A training, ready to be stacked with others.

    Attributes
    ----------
    indices : NDArray
        Samples of each step, shape (steps, batch), padded with samples of the same step.
    counts : NDArray
        Number of samples of each step, shape (steps,).
    factors : NDArray
        Factor of each sample's loss in the loss of its step, shape (steps, batch); 0 for padding.
    seed : int
        Seed of the network's random numbers.
    """

    network: Network
    model: StackedModel
    samples: Samples
    settings: TrainingSettings
    terms: Sequence[Pull | Frozen]
    indices: NDArray[np.int64]
    counts: NDArray[np.int64]
    factors: NDArray[np.float32]
    seed: int

    @classmethod
    def of(
        cls,
        network: Network,
        samples: Samples,
        settings: TrainingSettings,
        rng: np.random.Generator,
        terms: Sequence[Term],
        weights: Tensor | None,
    ) -> Training | None:
        """Draw the mini-batches of a training; return None for terms of unknown kinds."""
        known = [term for term in terms if isinstance(term, Pull | Frozen)]
        if len(known) < len(terms):
            return None
        seed, count = torch_seed(rng), len(samples)
        size = min(settings.batch_size, count)
        rows, counts = [], []
        for order in epochs(count, settings, network.needs_pairs, rng):
            steps = -(-len(order) // size)
            filled = np.full(steps * size, order[-1])
            filled[: len(order)] = order
            # Padding repeats a sample of its own step, so that it is finite whenever the step is.
            rows.append(filled.reshape(steps, size))
            counts.append(np.minimum(size, len(order) - size * np.arange(steps)))
        indices, used = np.concatenate(rows), np.concatenate(counts)
        factors = (np.arange(size) < used[:, None]) / used[:, None]
        if weights is not None:
            factors = factors * weights.cpu().numpy()[indices]
        model = StackedModel.of(network)
        real = factors.astype(np.float32)
        return cls(network, model, samples, settings, known, indices, used, real, seed)

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that stacked trainings must share."""
        settings, x = self.settings, self.samples.x
        terms = tuple(_signature(term) for term in self.terms)
        drawn = settings.optimizer, settings.augment, settings.dropout
        return (self.network, x.shape[1:], *drawn, terms)


@dataclass(eq=False)
class StackedResult:
    """A trained model, and the mean loss in training."""

    model: StackedModel
    loss: float


@dataclass(eq=False)
class Test:
    """A test of a model on samples."""

    network: Network
    model: StackedModel
    samples: Samples

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that stacked tests must share."""
        return self.network, self.samples.x.shape[1:]


@dataclass(eq=False)
class Differentiation:
    """A gradient of the mean loss of a mini-batch.

    Attributes
    ----------
    weights : Tensor or None
        Factor of each sample's loss, shape (b,).
    training : bool
        Whether the network is in training mode.
    random : Tensor
        State of torch's generator, for dropout.
    """

    network: Network
    model: StackedModel
    x: Tensor
    y: Tensor
    weights: Tensor | None
    training: bool
    random: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that stacked gradients must share."""
        return self.network, self.x.shape[1:], self.training


@dataclass(eq=False)
class Differentiated:
    """A gradient, shape (d,), the mean loss, changed buffers and the generator's new state."""

    gradient: Tensor
    loss: Tensor
    model: StackedModel
    random: Tensor


Call = Training | Test | Differentiation


def _signature(term: Pull | Frozen) -> tuple[object, ...]:
    if isinstance(term, Frozen):
        return (Frozen,)
    return Pull, isinstance(term.strength, Tensor), term.anchor is None, term.where is None


# -----------------------------------------------------------------------------
# Steps of training in fixed memory.
# -----------------------------------------------------------------------------


class Workspace:
    """The memory of trainings of one kind, and their steps.

    All tensors are on the device, with a row per client, and keep their addresses from one training
    to the next. Clients are sorted by decreasing number of steps, so that the first rows are those
    that still train.

    Parameters
    ----------
    network : StackedNetwork
        The network.
    store : SampleStore
        Holds the clients' samples.
    like : Training
        A training of this kind.
    rows, width, steps : int
        Maximum numbers of clients, samples of a mini-batch, and steps.
    device : torch.device
        The device.
    recorder : Recorder
        Records steps.
    """

    def __init__(
        self,
        network: StackedNetwork,
        store: SampleStore,
        like: Training,
        rows: int,
        width: int,
        steps: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._network, self._store, self._recorder = network, store, recorder
        self._settings, self._device = like.settings, device
        self.rows, self.width, self.steps = rows, width, steps
        self._moves = store.moves
        d = len(like.model.weights)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._weights, self._losses = zeros(rows, d), zeros(rows)
        self._step = zeros(1, dtype=torch.int64)
        self._indices = zeros(steps, rows, width, dtype=torch.int64)
        self._factors = zeros(steps, rows, width)
        self._counts = zeros(steps, rows, dtype=torch.int64)
        self._lr, self._momentum = zeros(rows, 1), zeros(rows, 1)
        kept = {"sgd": 0, "momentum": 1, "adam": 2}[like.settings.optimizer]
        self._kept = [zeros(rows, d) for _ in range(kept)]
        self._buffers = {
            name: zeros(rows, *values.shape, dtype=values.dtype)
            for name, values in like.model.buffers.items()
        }
        self._terms = [_StackedTerm(term, rows, d, device) for term in like.terms]
        x = like.samples.shaped(like.samples.x[:2]).to(device)
        self._dropouts = network.dropouts(x, like.settings.dropout)
        self._masks = [zeros(rows, width, *shape) for _, shape in self._dropouts]
        self._moved = (
            Moves(
                zeros(rows, width, dtype=torch.int64),
                zeros(rows, width, dtype=torch.int64),
                zeros(rows, width, dtype=torch.bool),
            )
            if like.settings.augment
            else None
        )
        self._replays: dict[int, Step] = {}

    def fits(self, rows: int, width: int, steps: int) -> bool:
        """Return whether these numbers fit, and no samples have moved."""
        is_large_enough = rows <= self.rows and steps <= self.steps and width == self.width
        return is_large_enough and self._moves == self._store.moves

    def train(self, trainings: Sequence[Training]) -> list[StackedResult]:
        """Train, and return models and losses in order."""
        order = sorted(range(len(trainings)), key=lambda i: -len(trainings[i].counts))
        own = [trainings[i] for i in order]
        self._load(own)
        steps = np.array([len(training.counts) for training in own])
        generators = [torch.Generator().manual_seed(training.seed) for training in own]
        for step in range(int(steps[0])):
            active = int((steps > step).sum())
            self._draw([int(training.counts[step]) for training in own[:active]], generators)
            rows = min(self.rows, self._recorder.rows(active))
            if rows not in self._replays:
                is_exact = rows == 1 or self._recorder.rows(rows - 1) < rows
                replay = self._recorder.record(self._step_of(rows, is_exact), self._changed())
                self._replays[rows] = replay
            self._replays[rows]()
        weights = self._weights[: len(own)].to("cpu", copy=True)
        buffers = {
            name: values[: len(own)].to("cpu", copy=True) for name, values in self._buffers.items()
        }
        losses = self._losses[: len(own)].tolist()
        trained: list[StackedResult | None] = [None] * len(own)
        for row, (place, training) in enumerate(zip(order, own, strict=True)):
            model = StackedModel(
                weights[row], {name: values[row] for name, values in buffers.items()}
            )
            trained[place] = StackedResult(model, losses[row] / int(training.counts.sum()))
        return [one for one in trained if one is not None]

    def _load(self, own: Sequence[Training]) -> None:
        """Write the initial models and the mini-batches of the trainings."""
        n, longest = len(own), len(own[0].counts)
        self._weights[:n] = torch.stack([training.model.weights for training in own])
        for name, values in self._buffers.items():
            values[:n] = torch.stack([training.model.buffers[name] for training in own])
        for values in (self._losses, self._step, *self._kept):
            values.zero_()
        self._lr[:n, 0] = torch.tensor([training.settings.lr for training in own])
        self._momentum[:n, 0] = torch.tensor([training.settings.momentum for training in own])
        for place, term in enumerate(self._terms):
            term.load([training.terms[place] for training in own])
        shape = (longest, n, self.width)
        indices, factors = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        counts = np.zeros(shape[:2], np.int64)
        for row, training in enumerate(own):
            steps, width = training.indices.shape
            offset = self._store.offset(training.samples)
            indices[:steps, row] = training.indices[:, :1] + offset
            indices[:steps, row, :width] = training.indices + offset
            factors[:steps, row, :width] = training.factors
            counts[:steps, row] = training.counts
        for there, new in (
            (self._indices, indices),
            (self._factors, factors),
            (self._counts, counts),
        ):
            # Rows beyond the clients take part in recorded steps, without samples.
            there[:longest].zero_()
            there[:longest, :n] = torch.from_numpy(new).to(self._device)

    def _draw(self, counts: Sequence[int], generators: Sequence[torch.Generator]) -> None:
        """Draw the random numbers of a step, for each client as if it trained alone."""
        if self._moved is None and not self._masks:
            return
        for row, (count, generator) in enumerate(zip(counts, generators, strict=False)):
            if self._moved is not None:
                for there, new in zip(self._moved, random_moves(count, generator), strict=True):
                    there[row, :count] = new.to(self._device)
            for mask, (share, shape) in zip(self._masks, self._dropouts, strict=True):
                mask[row, :count] = dropout_mask(share, (count, *shape), generator).to(self._device)

    def _changed(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        kept = [self._weights, self._losses, self._step, *self._kept]
        return [*kept, *self._buffers.values()]

    def _step_of(self, rows: int, is_exact: bool) -> Step:
        """Return the step of the first rows.

        Parameters
        ----------
        is_exact : bool
            Whether all rows train in every use of the step.
        """
        network, weights = self._network, self._weights[:rows]
        objective = network.network.objective

        def take() -> None:
            indices, factors, counts = (
                values.index_select(0, self._step)[0, :rows]
                for values in (self._indices, self._factors, self._counts)
            )
            x, y = self._store.select(indices)
            if self._moved is not None:
                moves = Moves(*(values[:rows].flatten() for values in self._moved))
                x = shifted_and_mirrored(x.flatten(0, 1), moves).view_as(x)
            arrays = {
                name: values.detach().requires_grad_(name in network.trained)
                for name, values in network.parameters(weights).items()
            }
            leaves = [arrays[name] for name in network.trained]
            arrays |= {name: values[:rows] for name, values in self._buffers.items()}
            places = torch.arange(self.width, device=self._device)
            step = Pass(
                training=True,
                valid=places < counts[:, None],
                masks=iter([mask[:rows] for mask in self._masks]),
            )
            outputs = network.outputs(arrays, x, step, self._settings.dropout)
            each = objective.loss(outputs.flatten(0, 1), y.flatten(), "none").view(indices.shape)
            loss = (each * factors).sum(1)
            gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
            active = None if is_exact else counts > 0
            for name, new in step.changed.items():
                self._write(self._buffers[name][:rows], new, active)
            self._losses[:rows] += loss.detach() * counts
            self._descend(rows, arrays, gradients, active)
            self._step += 1

        return take

    @staticmethod
    def _write(there: Tensor, new: Tensor, active: Tensor | None) -> None:
        if active is not None:
            new = torch.where(active.view(-1, *repeat(1, new.dim() - 1)), new, there)
        there.copy_(new)

    def _descend(
        self,
        rows: int,
        arrays: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
        active: Tensor | None,
    ) -> None:
        """Take a step along the gradients."""
        trained = dict(zip(self._network.trained, gradients, strict=True))
        lr = self._lr[:rows]
        if not self._terms and not self._kept:
            # A single pass over the weights.
            for name, gradient in trained.items():
                if gradient is not None:
                    column = (-1, *repeat(1, gradient.dim() - 1))
                    if active is not None:
                        gradient = gradient.masked_fill(~active.view(column), 0.0)
                    arrays[name].detach().addcmul_(gradient, lr.view(column), value=-1)
            return
        weights = self._weights[:rows]
        parts = [
            torch.zeros_like(values) if (own := trained.get(name)) is None else own
            for name, values in arrays.items()
            if name in self._network.network.slices
        ]
        move = torch.cat([part.flatten(1) for part in parts], 1)
        for term in self._terms:
            term(weights, move)
        match self._settings.optimizer:
            case "momentum":
                move = self._kept[0][:rows].mul_(self._momentum[:rows]).add_(move)
            case "adam":
                move = self._adam(rows, move)
        if active is not None:
            move = move.masked_fill(~active[:, None], 0.0)
        weights.addcmul_(move, lr, value=-1)

    def _adam(self, rows: int, gradient: Tensor) -> Tensor:
        """Return Adam's direction, with its usual constants."""
        first, second = (values[:rows] for values in self._kept)
        first.lerp_(gradient, 1 - _BETAS[0])
        second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        steps = (self._step + 1).double()
        of_first, of_second = ((1 - beta**steps) for beta in _BETAS)
        deviation = second.sqrt() / of_second.sqrt().float() + _EPSILON
        return first / of_first.float() / deviation


_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class _StackedTerm:
    """A term of many clients.

    Parameters
    ----------
    like : Pull or Frozen
        The term of one client.
    rows, d : int
        Numbers of clients and weights.
    device : torch.device
        The device.
    """

    def __init__(self, like: Pull | Frozen, rows: int, d: int, device: torch.device) -> None:
        self._frozen = self._where = self._anchor = self._strength = None
        if isinstance(like, Frozen):
            self._frozen = torch.zeros(rows, d, dtype=torch.bool, device=device)
            return
        columns = d if isinstance(like.strength, Tensor) else 1
        self._strength = torch.zeros(rows, columns, device=device)
        if like.anchor is not None:
            self._anchor = torch.zeros(rows, d, device=device)
        if like.where is not None:
            self._where = torch.zeros(rows, d, dtype=torch.bool, device=device)

    def load(self, terms: Sequence[Pull | Frozen]) -> None:
        """Load the clients' terms, all of one kind, with one transfer per part."""
        n, attractions = len(terms), [term for term in terms if isinstance(term, Pull)]
        if self._frozen is not None:
            frozen = [term.weights for term in terms if isinstance(term, Frozen)]
            self._frozen[:n] = torch.stack(frozen)
            return
        assert self._strength is not None
        strengths = [torch.as_tensor(pull.strength).reshape(-1) for pull in attractions]
        self._strength[:n] = torch.stack(strengths)
        for there, values in (
            (self._anchor, [pull.anchor for pull in attractions]),
            (self._where, [pull.where for pull in attractions]),
        ):
            if there is not None:
                there[:n] = torch.stack([own for own in values if own is not None])

    def __call__(self, weights: Tensor, gradient: Tensor) -> None:
        """Change the gradients of the first clients."""
        rows = len(weights)
        if self._frozen is not None:
            gradient.masked_fill_(self._frozen[:rows], 0.0)
            return
        assert self._strength is not None
        away = weights if self._anchor is None else weights - self._anchor[:rows]
        if self._where is not None:
            away = away * self._where[:rows]
        gradient.addcmul_(self._strength[:rows], away)


def dropout_mask(share: float, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return the factors by which torch's dropout multiplies, on the CPU."""
    return torch.empty(*shape).bernoulli_(1 - share, generator=generator).div_(1 - share)


# -----------------------------------------------------------------------------
# All kinds of work.
# -----------------------------------------------------------------------------


@dataclass
class Batches:
    """Counts of stacked computations and clients.

    Attributes
    ----------
    count, clients : int
        Numbers of stacked trainings and gradients, and of clients in all of them.
    """

    count: int = 0
    clients: int = 0

    def add(self, clients: int) -> None:
        """Count a computation for some clients."""
        self.count += 1
        self.clients += clients

    @property
    def mean(self) -> float:
        """Mean number of clients."""
        return self.clients / self.count if self.count else 0.0


@dataclass(eq=False)
class Stack:
    """Computes for many clients at once on one device.

    Parameters
    ----------
    device : torch.device
        The device. All clients' samples are kept there.
    memory : int, optional
        Estimated bytes of one computation; by default 1 GiB on a CPU and half of the free memory on
        a GPU. Halved whenever memory does not suffice.
    precision : str
        ``"float32"``, ``"tf32"`` or ``"bf16"``: how a GPU rounds the inputs of products.
    recorder : Callable, optional
        Makes the recorder of a network's steps; by default of CUDA graphs on a GPU.

    Attributes
    ----------
    batches : Batches
        Numbers of clients that were trained together.
    """

    device: torch.device
    memory: int | None = None
    precision: str = "float32"
    recorder: Callable[[], Recorder] | None = None
    batches: Batches = field(default_factory=Batches)

    def __post_init__(self) -> None:
        if self.recorder is None:
            self.recorder = CudaGraphs if self.device.type == "cuda" else Eager
        self._recorders: dict[Network, Recorder] = {}
        self._stores: dict[tuple[object, ...], SampleStore] = {}
        self._networks: dict[Network, StackedNetwork | None] = {}
        self._workspaces: dict[tuple[object, ...], Workspace] = {}

    def close(self) -> None:
        """Release the device's memory."""
        self._stores, self._networks, self._workspaces, self._recorders = {}, {}, {}, {}

    def network(self, network: Network, x: Tensor) -> StackedNetwork | None:
        """Return the stacked form of a network; None, logged once, if there is none.

        Parameters
        ----------
        x : Tensor
            A sample, shape (1, ...).
        """
        if network not in self._networks:
            try:
                with exactness(self.device, "float32"):
                    stacked = StackedNetwork(network)
                    stacked.check(x.to(self.device).expand(2, *x.shape[1:]))
                self._networks[network] = stacked
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                log.warning(
                    "Clients are trained one by one because this network cannot be stacked: %s",
                    reason,
                )
                self._networks[network] = None
        return self._networks[network]

    def compute(
        self, calls: Sequence[Call]
    ) -> Sequence[StackedResult | tuple[Tensor, Tensor] | Differentiated]:
        """Do clients' computations of one kind, in parts that fit into memory."""
        with exactness(self.device, self.precision):
            done: list[StackedResult | tuple[Tensor, Tensor] | Differentiated] = []
            while len(done) < len(calls):
                part = self._affordable(calls[len(done) :])
                try:
                    done += self._compute(part)
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error) or len(part) == 1:
                        raise
                    self._halve(part)
            return done

    def _halve(self, part: Sequence[Call]) -> None:
        """Release memory, and halve the limit of one computation."""
        self._workspaces.clear()
        self._recorders.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.memory = sum(map(self._bytes_of, part)) // 2

    def _budget(self) -> int:
        """Return the number of bytes that one computation may take."""
        if self.memory is not None:
            return self.memory
        if self.device.type != "cuda":
            return _CPU_BYTES
        # Memory that torch caches is free, too.
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(_GPU_SHARE * (torch.cuda.mem_get_info(self.device)[0] + kept))

    def _affordable(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the first calls that fit into memory, at least one."""
        needed = np.cumsum([self._bytes_of(call) for call in calls])
        return calls[: max(1, int(np.searchsorted(needed, self._budget(), side="right")))]

    def _bytes_of(self, call: Call) -> int:
        """Return an estimate of the memory that a call takes."""
        if isinstance(call, Training):
            samples = call.indices.shape[1]
        elif isinstance(call, Test):
            samples = _LEAST_TEST_BATCH
        else:
            samples = len(call.y)
        activations = samples * self._stacked(call).activations
        return int(_WEIGHT_COPIES * call.model.weights.nbytes + activations)

    def _compute(
        self, calls: Sequence[Call]
    ) -> Sequence[StackedResult | tuple[Tensor, Tensor] | Differentiated]:
        trainings = [call for call in calls if isinstance(call, Training)]
        if trainings:
            return self._train(trainings)
        if tests := [call for call in calls if isinstance(call, Test)]:
            return self._test(tests)
        return self._differentiate([c for c in calls if isinstance(c, Differentiation)])

    def _stacked(self, call: Call) -> StackedNetwork:
        stacked = self._networks[call.network]
        assert stacked is not None, "only networks that can be stacked come here"
        return stacked

    def _store(self, calls: Sequence[Training | Test]) -> SampleStore:
        """Return the store of the samples of calls."""
        own = calls[0].samples
        kind = (own.x.shape[1:], own.x.dtype, own.y.dtype, calls[0].network.channels_last)
        store = self._stores.setdefault(kind, SampleStore(self.device))
        store.hold([call.samples for call in calls])
        return store

    def _train(self, trainings: Sequence[Training]) -> list[StackedResult]:
        store, first = self._store(trainings), trainings[0]
        assert self.recorder is not None
        recorder = self._recorders.setdefault(first.network, self.recorder())
        rows = recorder.rows(len(trainings))
        width = max(training.indices.shape[1] for training in trainings)
        steps = max(len(training.counts) for training in trainings)
        kind = (*first.kind, width)
        space = self._workspaces.pop(kind, None)
        if space is None or not space.fits(rows, width, steps):
            if space is not None:
                rows, steps = max(rows, space.rows), max(steps, space.steps)
            space = Workspace(
                self._stacked(first), store, first, rows, width, steps, self.device, recorder
            )
        trained = space.train(trainings)
        # Only the latest workspaces are kept.
        self._workspaces[kind] = space
        while len(self._workspaces) > _MOST_WORKSPACES:
            del self._workspaces[next(iter(self._workspaces))]
        self.batches.add(len(trainings))
        return trained

    # Tests.

    def _test(self, tests: Sequence[Test]) -> list[tuple[Tensor, Tensor]]:
        """Return loss and score of each sample of each test; equal models are computed once."""
        store, stacked = self._store(tests), self._stacked(tests[0])
        groups = _by_model(tests)
        order = sorted(groups, key=lambda own: -sum(len(test.samples) for test in own))
        rows = [
            np.concatenate([np.arange(len(t.samples)) + store.offset(t.samples) for t in own])
            for own in order
        ]
        lengths = np.array([len(row) for row in rows])
        most = min(_TEST_BATCH, self._budget() // max(1, stacked.activations))
        width = min(int(lengths[0]), max(_LEAST_TEST_BATCH, most // len(rows)))
        weights = torch.stack([own[0].model.weights for own in order]).to(self.device)
        arrays = stacked.parameters(weights)
        for name in stacked.buffers:
            values = torch.stack([own[0].model.buffers[name] for own in order])
            arrays[name] = values.to(self.device)
        objective = tests[0].network.objective
        found = torch.zeros(2, len(rows), -(-int(lengths[0]) // width) * width, device=self.device)
        with torch.inference_mode():
            for start in range(0, int(lengths[0]), width):
                active = int((lengths > start).sum())
                picked = np.stack([_window(row, start, width) for row in rows[:active]])
                x, y = store.select(torch.from_numpy(picked).to(self.device))
                own = {name: values[:active] for name, values in arrays.items()}
                outputs = stacked.outputs(own, x, Pass(training=False)).flatten(0, 1)
                labels, where = y.flatten(), slice(start, start + width)
                loss = objective.loss(outputs, labels, "none").view(active, width)
                found[0, :active, where] = loss
                found[1, :active, where] = objective.scores(outputs, labels).view(active, width)
        measured = found.cpu()
        done: dict[Test, tuple[Tensor, Tensor]] = {}
        for row, own_tests in enumerate(order):
            start = 0
            for test in own_tests:
                end = start + len(test.samples)
                done[test] = measured[0, row, start:end], measured[1, row, start:end]
                start = end
        return [done[test] for test in tests]

    # Gradients.

    def _differentiate(self, calls: Sequence[Differentiation]) -> list[Differentiated]:
        stacked, training = self._stacked(calls[0]), calls[0].training
        self.batches.add(len(calls))
        n, width = len(calls), max(len(call.y) for call in calls)
        counts = torch.tensor([len(call.y) for call in calls])
        x = torch.stack([_filled(call.x, width) for call in calls]).to(self.device)
        y = torch.stack([_filled(call.y, width) for call in calls]).to(self.device)
        factors = (torch.arange(width) < counts[:, None]) / counts[:, None]
        for row, call in enumerate(calls):
            if call.weights is not None:
                factors[row, : len(call.y)] *= call.weights
        weights = torch.stack([call.model.weights for call in calls]).to(self.device)
        arrays = {
            name: values.detach().requires_grad_(name in stacked.trained)
            for name, values in stacked.parameters(weights).items()
        }
        leaves = [arrays[name] for name in stacked.trained]
        for name in stacked.buffers:
            values = torch.stack([call.model.buffers[name] for call in calls])
            arrays[name] = values.to(self.device)
        masks, states = self._masks(stacked, calls, x)
        valid = (torch.arange(width) < counts[:, None]).to(self.device)
        step = Pass(training, valid, iter(masks))
        outputs = stacked.outputs(arrays, x, step).flatten(0, 1)
        each = calls[0].network.objective.loss(outputs, y.flatten(), "none").view(n, width)
        loss = (each * factors.to(self.device)).sum(1)
        found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        gradients = dict(zip(stacked.trained, found, strict=True))
        parts = [
            torch.zeros(n, where.stop - where.start, device=self.device)
            if (own := gradients.get(name)) is None
            else own.flatten(1)
            for name, where in stacked.network.slices.items()
        ]
        gradient, loss = torch.cat(parts, 1).cpu(), loss.detach().cpu()
        changed = {name: values.cpu() for name, values in step.changed.items()}
        done = []
        for row, call in enumerate(calls):
            buffers = {**call.model.buffers, **{n: values[row] for n, values in changed.items()}}
            model = StackedModel(call.model.weights, buffers)
            done.append(Differentiated(gradient[row], loss[row], model, states[row]))
        return done

    def _masks(
        self, stacked: StackedNetwork, calls: Sequence[Differentiation], x: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the factors of dropout layers, and the states of the clients' generators."""
        shapes = stacked.dropouts(x[0, :1], 0.0) if calls[0].training else []
        masks = [torch.zeros(*x.shape[:2], *shape) for _, shape in shapes]
        states = []
        for row, call in enumerate(calls):
            if not masks:
                states.append(call.random)
                continue
            generator = torch.Generator()
            generator.set_state(call.random)
            for mask, (share, shape) in zip(masks, shapes, strict=True):
                mask[row, : len(call.y)] = dropout_mask(share, (len(call.y), *shape), generator)
            states.append(generator.get_state())
        return [mask.to(self.device) for mask in masks], states


def _by_model(tests: Sequence[Test]) -> list[list[Test]]:
    """Group tests by their model."""
    groups: dict[bytes, list[list[Test]]] = {}
    for test in tests:
        weights = test.model.weights
        # Compared by a few weights first, which distinguish most models.
        alike = groups.setdefault(weights[:: max(1, len(weights) // 16)].numpy().tobytes(), [])
        for group in alike:
            if group[0].model.equals(test.model):
                group.append(test)
                break
        else:
            alike.append([test])
    return [group for alike in groups.values() for group in alike]


def _window(row: NDArray[np.int64], start: int, width: int) -> NDArray[np.int64]:
    """Return a part of a row, filled up with its first element."""
    window = np.full(width, row[start])
    own = row[start : start + width]
    window[: len(own)] = own
    return window


def _filled(values: Tensor, width: int) -> Tensor:
    """Return values repeated to a length."""
    return torch.cat([values, values[:1].expand(width - len(values), *values.shape[1:])])


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that GPU or main memory is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def exactness(device: torch.device, precision: str) -> Iterator[None]:
    """Set a GPU's precision of products within the context; by default exact float32."""
    if device.type != "cuda":
        yield
        return
    is_tf32 = precision == "tf32"
    former = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    try:
        with (
            torch.backends.cudnn.flags(
                enabled=True, benchmark=False, deterministic=True, allow_tf32=is_tf32
            ),
            # Casts of weights must not outlive a step: recorded ones would not see new weights.
            torch.autocast(
                "cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
            ),
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = former
