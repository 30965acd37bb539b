"""The executor that trains all clients with pending work together on one device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from raceme import client_app
from raceme.core import messages as keys
from raceme.core.errors import UserError
from raceme.core.registry import CLIENT_WORK
from raceme.datasets.source import own_randomness
from raceme.flower.messages import copy_of, size_of
from raceme.simulation.executor import PendingReply, answer
from raceme.simulation.stacked.clients import (
    ClientEngine,
    NotStackedError,
    Suspendable,
)
from raceme.simulation.stacked.training import (
    Batches,
    Call,
    Differentiation,
    Stack,
    Test,
    Training,
    exactness,
)
from raceme.training.machine import ACCELERATOR

log = logging.getLogger("raceme")

_MOST_TOGETHER = 2048
_MOST_BYTES = 8 * 2**30
"""Main memory for the models of clients whose work is done together."""
_COPIES = 6
"""Number of models that a client's work holds."""
_ORDER: tuple[type[Call], ...] = (Test, Differentiation, Training)
"""Order of computations, so that as many clients as possible train together."""


@dataclass(eq=False)
class _Done:
    """A reply, with the client's state before and after the work."""

    reply: Message
    former: RecordDict
    state: RecordDict


class Stacked:
    """An executor that works for all clients with pending messages together.

    Trainings, tests and gradients are computed for all of them at once, see
    :class:`~raceme.simulation.stacked.training.Stack`; results differ from
    :class:`~raceme.simulation.executor.InProcess` by rounding only. Kinds of work of users, and
    networks that cannot be stacked, are done one by one, the latter on the device.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda"``. All clients' samples are kept there.
    memory : int, optional
        Estimated bytes of one computation; by default 1 GiB on a CPU and half of the free memory on
        a GPU.
    precision : str
        ``"float32"``, ``"tf32"`` or ``"bf16"``: how a GPU rounds the inputs of products.

    Raises
    ------
    UserError
        There is no such device.
    """

    def __init__(
        self, device: str = "cpu", memory: int | None = None, precision: str = "float32"
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"--device cuda: torch {torch.__version__} finds no CUDA GPU on this machine. Use "
                "--device cpu, or install a GPU's driver and a CUDA build of torch."
            )
        self._device = torch.device(device)
        self._stack = Stack(self._device, memory, precision)
        self._threads = ThreadPoolExecutor(_MOST_TOGETHER)
        self._jobs: dict[str, PendingReply] = {}
        self._done: dict[str, _Done] = {}

    @property
    def mean_batch(self) -> float:
        """Mean number of clients whose training was computed at once."""
        return self.batches.mean

    @property
    def batches(self) -> Batches:
        """Numbers of clients that were trained together."""
        return self._stack.batches

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until a reply is needed."""
        self._jobs[message.metadata.message_id] = PendingReply(message, context, due)

    def result(self, message_id: str) -> Message:
        """Return a reply, and do all pending work with it."""
        job = self._jobs[message_id]
        done = self._done.get(message_id)
        if done is None or done.former is not job.context.state:
            # Work on an outdated state of its client is repeated.
            self._done.pop(message_id, None)
            self._work(message_id)
            done = self._done[message_id]
        self.cancel(message_id)
        if not _is_same(done.former, done.state):
            job.context.state = done.state
        return done.reply

    def cancel(self, message_id: str) -> None:
        """Drop the message and its reply."""
        self._jobs.pop(message_id, None)
        self._done.pop(message_id, None)

    def close(self) -> None:
        """Drop unfinished work and the samples."""
        self._jobs, self._done = {}, {}
        self._stack.close()
        self._threads.shutdown()

    def _work(self, message_id: str) -> None:
        """Do the work of a message together with all other pending work."""
        chosen = sorted(
            (key for key in self._jobs if key not in self._done),
            key=lambda key: (key != message_id, self._jobs[key].due),
        )
        # Clients' work, done in turns, may use torch's generators, which are restored afterwards.
        with own_randomness([0]):
            most = most_together(self._jobs[message_id].message)
            self._work_on([self._jobs[key] for key in chosen[:most]])

    def _work_on(self, jobs: Sequence[PendingReply]) -> None:
        works: list[Suspendable[_Done]] = []
        try:
            for job in jobs:
                if _is_stackable(job.message):
                    works.append(Suspendable(partial(self._one, job), self._threads))
                else:
                    self._done[job.message_id] = self._alone(job)
            while waiting := [work for work in works if work.call is not None]:
                self._advance(waiting)
        finally:
            for work in works:
                work.cancel()

    def _advance(self, waiting: Sequence[Suspendable[_Done]]) -> None:
        """Do the computations of the first kind, and resume the work that waits for them."""
        kinds: dict[tuple[object, ...], list[Suspendable[_Done]]] = {}
        first = min(_rank(work) for work in waiting)
        for work in waiting:
            if _rank(work) == first and work.call is not None:
                kinds.setdefault(work.call.kind, []).append(work)
        for works in kinds.values():
            results: Sequence[object]
            try:
                results = self._stack.compute([w.call for w in works if w.call is not None])
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"The GPU's memory does not suffice for one client: {str(error)[:200]}"
                ) from None
            for work, result in zip(works, results, strict=True):
                work.resume(result)

    def _one(self, job: PendingReply, work: Suspendable[_Done]) -> _Done:
        """Do a message's work, suspended at its computations."""
        try:
            with ClientEngine(work, self._stack, self._device.type != "cpu"):
                done = _answered(job, job.context.node_config)
        except NotStackedError:
            done = self._alone(job)
        self._done[job.message_id] = done
        return done

    def _alone(self, job: PendingReply) -> _Done:
        """Do a message's work by itself."""
        node = dict(job.context.node_config)
        if self._device.type != "cpu":
            node[ACCELERATOR] = self._device.type
        with exactness(self._device, "float32"):
            return _answered(job, node)


def most_together(message: Message) -> int:
    """Return the number of clients with such a message that fit into main memory."""
    return max(1, min(_MOST_TOGETHER, _MOST_BYTES // max(1, _COPIES * size_of(message))))


def _answered(job: PendingReply, node_config: object) -> _Done:
    """Answer a message with a copy of its client's state."""
    context = job.context
    assert isinstance(node_config, dict)
    own = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=node_config,
        state=copy_of(context.state),
        run_config=context.run_config,
    )
    former = context.state
    reply = answer(client_app.app, job.message, own)
    return _Done(reply, former, own.state)


def _is_stackable(message: Message) -> bool:
    """Return whether a message's kind of work is Raceme's own."""
    settings = message.content.get(keys.CONFIG) if message.has_content() else None
    kind = settings.get(keys.KIND) if isinstance(settings, ConfigRecord) else None
    return kind is None or (isinstance(kind, str) and CLIENT_WORK.is_own(kind))


def _rank(work: Suspendable[_Done]) -> int:
    return next(rank for rank, kind in enumerate(_ORDER) if isinstance(work.call, kind))


def _is_same(one: RecordDict, other: RecordDict) -> bool:
    """Return whether two states hold the same arrays, and equal values."""
    if list(one) != list(other):
        return False
    for name, record in one.items():
        new = other[name]
        if isinstance(record, ArrayRecord) and isinstance(new, ArrayRecord):
            if list(record) != list(new) or any(record[key] is not new[key] for key in record):
                return False
        elif record != new:
            return False
    return True
