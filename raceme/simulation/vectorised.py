"""Vectorised training of many clients, for GPUs and CPUs.

The weights of all clients are stacked, and ``torch.func`` computes all gradients at once. Every
client takes the same steps on the same mini-batches as alone: results differ from
:class:`~raceme.simulation.executor.InProcess` by rounding only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from raceme import client_app
from raceme.core import messages as keys
from raceme.core.errors import UserError
from raceme.core.training_settings import TrainingSettings
from raceme.simulation.executor import PendingReply, answer
from raceme.training.clients import LocalClient
from raceme.training.local import epochs, torch_seed
from raceme.training.models import Network, Samples
from raceme.training.work import ClientWork, evaluation_answer, training_answer

# -----------------------------------------------------------------------------
# Samples of stacked clients on one device.
# -----------------------------------------------------------------------------


class SampleStore:
    """Concatenated samples of many clients on one device.

    Parameters
    ----------
    device : torch.device
        Device that holds the samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Samples] = {}
        self._offsets: dict[str, int] = {}
        self._shaped: Callable[[Tensor], Tensor] = torch.clone
        self._x = torch.empty(0)
        self._y = torch.empty(0)

    def hold(self, samples: Mapping[str, Samples]) -> None:
        """Add the samples of clients, by name.

        Changed samples of a client replace its former ones.
        """
        new = {name: own for name, own in samples.items() if self._held.get(name) is not own}
        if not new:
            return
        for name in list(new):
            held = self._held.get(name)
            if held is not None and len(held) == len(new[name]):
                self._held[name] = new.pop(name)
                self._write(name)
        if new:
            self._place({**self._held, **new})

    def _write(self, name: str) -> None:
        """Overwrite a client's samples by as many new ones."""
        own, start = self._held[name], self._offsets[name]
        self._x[start : start + len(own)] = own.x
        self._y[start : start + len(own)] = own.y

    def _place(self, samples: dict[str, Samples]) -> None:
        """Concatenate all samples; an unchanged prefix is not sent again."""
        kept = 0
        for name, own in self._held.items():
            if samples[name] is not own:
                break
            kept += len(own)
        xs, ys = ([self._x[:kept]], [self._y[:kept]]) if kept else ([], [])
        offset, self._held = 0, samples
        for name, own in samples.items():
            self._offsets[name] = offset
            offset += len(own)
            if offset > kept:
                xs.append(own.x.to(self._device))
                ys.append(own.y.to(self._device))
            self._shaped = own.shaped
        self._x, self._y = torch.cat(xs), torch.cat(ys)

    def offset(self, client: str) -> int:
        """Return the index of a client's first sample."""
        return self._offsets[client]

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at some indices, in the indices' shape, as inputs of a network."""
        flat = indices.reshape(-1)
        x, y = self._shaped(self._x.index_select(0, flat)), self._y.index_select(0, flat)
        return x.view(*indices.shape, *x.shape[1:]), y.view(indices.shape)


# -----------------------------------------------------------------------------
# Vectorised training of many clients, for GPUs and CPUs.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

_CPU_BYTES = 2**30
_GPU_SHARE = 0.5
"""Share of a GPU's free memory for one computation."""
_WEIGHT_COPIES = 6
"""Copies of the weights: current, received, gradients and temporaries."""
_ACTIVATIONS = 64
"""Memory of a network per sample, relative to the input: a generous estimate."""
_TEST_BATCH = 2048

_PLACE = {keys.KIND, keys.STEP, keys.TASK, keys.VERSION, keys.ROUND}
_COST = {keys.COMPUTE_SCALE, keys.TASK_SHARE, keys.INVITATION}
_SGD = {"lr", keys.BATCH_SIZE, keys.LOCAL_EPOCHS, keys.LOCAL_STEPS, keys.PROXIMAL_MU}
_STACKED = {
    keys.TRAIN: ({keys.ARRAYS, keys.MASK}, _PLACE | _COST | _SGD),
    keys.EVALUATE: ({keys.ARRAYS}, _PLACE),
}
"""Kinds of work that can be stacked, with their known array records and settings. The ClientApp
answers all other messages."""

_Gradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class _Training:
    """A training task, ready to be stacked with others.

    Attributes
    ----------
    start : Tensor
        The received weights, shape (d,).
    mask : Tensor or None
        Shape (d,), bool: False where weights are frozen.
    indices : NDArray
        Samples of each step, shape (steps, batch), padded with samples of the same step.
    shares : NDArray
        Weight of each sample in the mean of its step, shape (steps, batch); 0 for padding.
    """

    message: Message
    work: ClientWork
    settings: TrainingSettings
    spec: keys.ModelSpec
    start: Tensor
    mask: Tensor | None
    indices: NDArray[np.int64]
    shares: NDArray[np.float32]


class Vectorised:
    """An executor that trains all clients with pending work together on one device.

    Raceme's ClientApp answers in this process, one by one, what cannot be stacked: networks with
    batch normalisation, buffers or random numbers, optimisers other than plain SGD, and kinds of
    work other than plain training and evaluation.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda"``. All clients' samples are kept there.
    memory : int, optional
        Estimated bytes of one computation; by default 1 GiB on a CPU and half of the free memory on
        a GPU.

    Raises
    ------
    UserError
        There is no such device.
    """

    def __init__(self, device: str = "cpu", memory: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"--device cuda: torch {torch.__version__} finds no CUDA GPU on this machine. Use "
                "--device cpu, or install a GPU's driver and a CUDA build of torch."
            )
        self._device = torch.device(device)
        self._memory = memory
        self._jobs: dict[str, PendingReply] = {}
        self._replies: dict[str, Message] = {}
        self._train_data = SampleStore(self._device)
        self._test_data = SampleStore(self._device)
        self._gradients: dict[Network, _Gradients | None] = {}

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until a reply is needed."""
        self._jobs[message.metadata.message_id] = PendingReply(message, context, due)

    def result(self, message_id: str) -> Message:
        """Return a reply, and compute all pending work of the same kind with it."""
        if message_id not in self._replies:
            with self._exactness():
                self._work(message_id)
        return self._replies.pop(message_id)

    def cancel(self, message_id: str) -> None:
        """Drop the message and its reply."""
        self._jobs.pop(message_id, None)
        self._replies.pop(message_id, None)

    def close(self) -> None:
        """Drop all that is left, and the samples."""
        self._jobs, self._replies, self._gradients = {}, {}, {}
        self._train_data, self._test_data = SampleStore(self._device), SampleStore(self._device)

    def _exactness(self) -> AbstractContextManager[None]:
        """Disable TF32 on a GPU, whose convolutions would round inputs to 10 bits."""
        exact: AbstractContextManager[None] = nullcontext()
        if self._device.type == "cuda":
            exact = torch.backends.cudnn.flags(
                enabled=True, benchmark=False, deterministic=True, allow_tf32=False
            )
        return exact

    def _work(self, message_id: str) -> None:
        """Do the work of a message together with all that can be stacked with it."""
        asked = self._jobs[message_id]
        kind = _stacked_kind(asked.message)
        work = None if kind is None else _work(asked)
        if work is None or not self._can_stack(work.client):
            self._answer(message_id)
            return
        network = work.client.network
        pending = sorted(
            (key for key, job in self._jobs.items() if _stacked_kind(job.message) == kind),
            key=lambda key: (key != message_id, self._jobs[key].due),
        )
        if kind == keys.TRAIN:
            self._train(pending, network)
        else:
            same = _models_identity(asked.message)
            alike = [key for key in pending if _models_identity(self._jobs[key].message) == same]
            self._evaluate(alike, network)

    def _answer(self, message_id: str) -> None:
        job = self._jobs.pop(message_id)
        self._replies[message_id] = answer(client_app.app, job.message, job.context)

    def _can_stack(self, client: LocalClient) -> bool:
        """Return whether a client's work can be stacked with others'."""
        if client.network not in self._gradients:
            self._gradients[client.network] = self._gradients_of(client)
        return self._gradients[client.network] is not None

    def _gradients_of(self, client: LocalClient) -> _Gradients | None:
        """Return the function for the gradients of many clients; None if impossible."""
        network = client.network
        gradients = _stacked_gradients(network)
        # In training mode, since evaluation mode hides dropout.
        network.module.train()
        try:
            if network.needs_pairs or any(True for _ in network.module.buffers()):
                raise ValueError("it has buffers, which training changes")
            weights = network.weights.to(self._device).repeat(2, 1)
            x = torch.stack([client.train.shaped(client.train.x[:1]).to(self._device)] * 2)
            y = torch.stack([client.train.y[:1].to(self._device)] * 2)
            gradients(weights, x, y, torch.ones(2, 1, device=self._device))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            log.warning(
                "Clients are trained one by one because this network cannot be stacked: %s", reason
            )
            return None
        return gradients

    # Training.

    def _train(self, message_ids: Sequence[str], network: Network) -> None:
        """Train the clients of messages, in order, as far as memory allows."""
        chosen: dict[str, _Training] = {}
        # A client whose data changed between two messages trains on one version at a time.
        rows: dict[str, LocalClient] = {}
        needed = 0
        budget = self._budget()
        for message_id in message_ids:
            job = self._jobs[message_id]
            try:
                training = _prepare(job.message, job.context)
            except Exception:
                self._answer(message_id)
                continue
            client = training.work.client
            if client.network is not network or rows.get(client.id, client) is not client:
                continue
            sample_bytes = client.train.x[:1].nbytes * _ACTIVATIONS
            needed += _WEIGHT_COPIES * training.start.nbytes
            needed += training.indices.shape[1] * sample_bytes
            if needed > budget and chosen:
                break
            chosen[message_id], rows[client.id] = training, client
        if not chosen:
            return
        self._train_data.hold({name: client.train for name, client in rows.items()})
        try:
            trained = self._descend(list(chosen.values()), network)
        except torch.cuda.OutOfMemoryError:
            if len(chosen) == 1:
                raise
            self._memory = budget // 2
            self._train(list(chosen), network)
            return
        for (message_id, training), (weights, loss) in zip(chosen.items(), trained, strict=True):
            network.weights.copy_(weights)
            answered = training_answer(
                training.work, network.write(training.spec), {keys.TRAIN_LOSS: loss}
            )
            self._replies[message_id] = client_app.reply_to(
                training.message, training.work, answered
            )
            del self._jobs[message_id]

    def _budget(self) -> int:
        """Return the bytes available to one computation."""
        if self._memory is not None:
            return self._memory
        if self._device.type == "cuda":
            return int(_GPU_SHARE * torch.cuda.mem_get_info(self._device)[0])
        return _CPU_BYTES

    def _descend(
        self, trainings: Sequence[_Training], network: Network
    ) -> list[tuple[Tensor, float]]:
        """Return each client's weights after training, and its mean loss."""
        # Clients are sorted by decreasing number of steps, so that the first rows are those still
        # training and the others cost nothing.
        order = sorted(range(len(trainings)), key=lambda i: -len(trainings[i].indices))
        sorted_ = [trainings[i] for i in order]
        steps = np.array([len(training.indices) for training in sorted_])
        network.module.train()
        gradients = self._gradients[network]
        assert gradients is not None, "only networks that can be stacked come here"
        weights = self._stack([training.start for training in sorted_])
        start = weights.clone()
        lr = self._column([training.settings.lr for training in sorted_])
        mu = self._column([training.settings.proximal_mu for training in sorted_])
        frozen = None
        if any(training.mask is not None for training in sorted_):
            everything = torch.ones_like(sorted_[0].start, dtype=torch.bool)
            masks = [everything if t.mask is None else t.mask for t in sorted_]
            frozen = ~self._stack(masks)
        indices, shares = self._schedule(sorted_)
        losses = torch.zeros(len(sorted_), device=self._device)
        is_proximal = bool((mu > 0).any())
        for step in range(int(steps[0])):
            active = int((steps > step).sum())
            x, y = self._train_data.select(indices[step, :active])
            share = shares[step, :active]
            gradient, loss = gradients(weights[:active], x, y, share)
            if is_proximal:
                gradient = gradient + mu[:active] * (weights[:active] - start[:active])
            if frozen is not None:
                gradient = gradient.masked_fill(frozen[:active], 0.0)
            weights[:active] -= lr[:active] * gradient
            losses[:active] += loss * (share > 0).sum(dim=1)
        seen = torch.tensor([float((t.shares > 0).sum()) for t in sorted_])
        means = (losses.cpu() / seen).tolist()
        result: list[tuple[Tensor, float]] = [(weights[0], 0.0)] * len(order)
        for row, (position, values) in enumerate(zip(order, weights.cpu(), strict=True)):
            result[position] = (values, means[row])
        return result

    def _schedule(self, trainings: Sequence[_Training]) -> tuple[Tensor, Tensor]:
        """Return samples and their shares, each of shape (steps, clients, batch)."""
        longest = max(len(training.indices) for training in trainings)
        widest = max(training.indices.shape[1] for training in trainings)
        shape = (longest, len(trainings), widest)
        indices, shares = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for client, training in enumerate(trainings):
            steps, width = training.indices.shape
            offset = self._train_data.offset(training.work.client.id)
            # Padding repeats a sample of the step, so that it is finite whenever the step is.
            indices[:steps, client] = training.indices[:, :1] + offset
            indices[:steps, client, :width] = training.indices + offset
            shares[:steps, client, :width] = training.shares
        return (
            torch.from_numpy(indices).to(self._device),
            torch.from_numpy(shares).to(self._device),
        )

    def _stack(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)).to(self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

    # Evaluation.

    def _evaluate(self, message_ids: Sequence[str], network: Network) -> None:
        """Test the network's model on the samples of many clients."""
        works: dict[str, ClientWork] = {}
        clients: dict[str, LocalClient] = {}
        for message_id in message_ids:
            work = _work(self._jobs[message_id])
            if work is None or work.client.network is not network:
                continue
            if clients.setdefault(work.client.id, work.client) is work.client:
                works[message_id] = work
        self._test_data.hold({name: client.test for name, client in clients.items()})
        rows = [
            np.arange(len(work.client.test)) + self._test_data.offset(work.client.id)
            for work in works.values()
        ]
        indices = torch.from_numpy(np.concatenate(rows)).to(self._device)
        parameters = _parameters(network, network.weights.to(self._device))
        network.module.eval()
        losses, measured = [], []
        with torch.inference_mode():
            for part in torch.split(indices, _TEST_BATCH):
                x, y = self._test_data.select(part)
                outputs = functional_call(network.module, parameters, (x,))
                losses.append(network.objective.loss(outputs, y, "none").cpu())
                measured.append(network.objective.scores(outputs, y).cpu())
        lengths = [len(work.client.test) for work in works.values()]
        results = zip(
            works.items(),
            torch.split(torch.cat(losses), lengths),
            torch.split(torch.cat(measured), lengths),
            strict=True,
        )
        for (message_id, work), loss, scores in results:
            message = self._jobs.pop(message_id).message
            answered = evaluation_answer(
                work, float(scores.sum()) / len(scores), float(loss.sum()) / len(loss)
            )
            self._replies[message_id] = client_app.reply_to(message, work, answered)


def _work(job: PendingReply) -> ClientWork | None:
    """Return the work of a message, with the model loaded; None on failure.

    The ClientApp reports the error when it answers.
    """
    try:
        work = client_app.work_of(job.message, job.context)
        work.receive(work.model)
    except Exception:
        return None
    return work


def _prepare(message: Message, context: Context) -> _Training:
    """Parse a training message and draw its mini-batches.

    Raises
    ------
    ValueError
        The message cannot be stacked.
    """
    work = client_app.work_of(message, context)
    settings, network = work.training_settings(), work.client.network
    is_plain = settings.optimizer == "sgd" and not (settings.weight_decay or settings.augment)
    if not is_plain or client_app.is_private(context) or client_app.client_halves(context):
        raise ValueError("only plain SGD without client halves of features can be stacked")
    spec = work.receive(work.model)
    indices, shares = _mini_batches(work, settings)
    return _Training(
        message=message,
        work=work,
        settings=settings,
        spec=spec,
        start=network.weights.clone(),
        mask=network.read_mask(work.arrays[keys.MASK]) if keys.MASK in work.arrays else None,
        indices=indices,
        shares=shares,
    )


def _mini_batches(
    work: ClientWork, settings: TrainingSettings
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the samples of each step and their shares, each of shape (steps, batch)."""
    rng = work.generator()
    torch_seed(rng)
    count = len(work.client.train)
    size = min(settings.batch_size, count)
    rows, shares = [], []
    for order in epochs(count, settings, work.client.network.needs_pairs, rng):
        steps = -(-len(order) // size)
        filled = np.full(steps * size, order[-1])
        filled[: len(order)] = order
        real = np.arange(steps * size).reshape(steps, size) < len(order)
        rows.append(filled.reshape(steps, size))
        shares.append(real / real.sum(axis=1, keepdims=True))
    return np.concatenate(rows), np.concatenate(shares).astype(np.float32)


def _stacked_gradients(network: Network) -> _Gradients:
    """Return the gradients and losses of many clients as a function of stacks."""

    def loss(weights: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        outputs = functional_call(network.module, _parameters(network, weights), (x,))
        return (network.objective.loss(outputs, y, "none") * shares).sum()

    stacked: _Gradients = vmap(grad_and_value(loss))
    return stacked


def _parameters(network: Network, weights: Tensor) -> dict[str, Tensor]:
    """Return a network's parameters as views into a flat vector."""
    parameters = dict(network.module.named_parameters())
    return {
        name: weights[where].view(parameters[name].shape) for name, where in network.slices.items()
    }


def _stacked_kind(message: Message) -> str | None:
    """Return a message's kind of work if it can be stacked."""
    content = message.content
    asked, _, action = message.metadata.message_type.partition(".")
    if action not in ("", "default") or not {keys.CONFIG} >= set(content.config_records):
        return None
    settings = content.config_records.get(keys.CONFIG, ConfigRecord())
    kind = settings.get(keys.KIND, asked)
    known_arrays, known_settings = _STACKED.get(str(kind), (set(), set()))
    records = set(content.array_records)
    fits = keys.ARRAYS in records and records <= known_arrays and set(settings) <= known_settings
    return str(kind) if fits else None


def _models_identity(message: Message) -> tuple[int, ...]:
    """Return a key that is equal for messages with the same model only."""
    record = message.content.array_records.get(keys.ARRAYS)
    return () if record is None else tuple(id(array) for array in record.values())
