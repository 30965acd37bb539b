"""Where simulated clients' work is done.

A message's result depends only on its content and on its client's state, so an executor may work
early, in any order, and side by side; the outcome of a run does not change.
"""

from __future__ import annotations

import heapq
import math
import mmap
import os
import random
import shutil
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.errors import UserError
from raceme.flower.messages import CLIENT_APP_RAISED_EXCEPTION, array_record, error_reply, start_now
from raceme.flower.messages import array as flower_array

# -----------------------------------------------------------------------------
# The process's own random numbers, for ClientApps that draw from them: one seed decides all.
#
# An app may draw from Python's, numpy's and torch's generators, which are one each for a
# process. In
# a simulation several clients and the server share a process, or clients are spread over
# several;
# what one of them draws must not depend on who else is there.
# -----------------------------------------------------------------------------


def seed_process(entropy: Sequence[int]) -> None:
    """Seed Python's, numpy's and, if it is loaded, torch's generator of this process."""
    words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` takes a millisecond where there is no GPU: it keeps the call's trace.
        torch.default_generator.manual_seed(words[2])
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(words[2])


@contextmanager
def own_randomness(entropy: Sequence[int]) -> Iterator[None]:
    """Give what happens meanwhile random numbers of its own, and bring back those from before."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    drawn = torch.get_rng_state() if torch is not None else None
    seed_process(entropy)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(drawn)


# -----------------------------------------------------------------------------
# How messages travel between the simulator and its worker processes.
#
# What is small goes through a pipe. Arrays' data are written into memory that both processes
# see, and
# are never pickled, unless there is more than fits there.
# -----------------------------------------------------------------------------


Value = str | int | float | bool

Records = list[tuple[str, str, Any]]
"""Records without their arrays' data: name, kind, content."""

_ARRAYS, _METRICS, _CONFIG = "arrays", "metrics", "config"
_FOLDERS = ("/dev/shm", tempfile.gettempdir())
"""Where shared memory is looked for; what lies in the first is never written to a disk."""
_MEGABYTE = 1e6


class Packed(NamedTuple):
    """Records, and the data of their arrays one after the other."""

    records: Records
    data: list[bytes]


class Node(NamedTuple):
    """What a worker has to know of a client: its context but for the state."""

    run_id: int
    node_config: Mapping[str, Value]
    run_config: Mapping[str, Value]


class Request(NamedTuple):
    """A message on its way to a worker.

    Attributes
    ----------
    slot : int
        Of the shared memory; the response uses the same one.
    sender : tuple[int, int]
        Run and node on whose behalf the message was made.
    data : list[bytes] or None
        The arrays' data; None if they are in the slot.
    node : Node or None
        None if the worker knows the client already.
    state : Packed or None
        The client's state; None if it is empty.
    """

    slot: int
    message_id: str
    message_type: str
    node_id: int
    group_id: str
    ttl: float
    sender: tuple[int, int]
    content: Records
    data: list[bytes] | None
    node: Node | None
    state: Packed | None


class Response(NamedTuple):
    """A reply on its way back.

    Attributes
    ----------
    error : tuple[int, str | None] or None
        Code and reason of an error reply.
    state : Packed or None
        The client's state; None if it is what it was.
    """

    message_id: str
    error: tuple[int, str | None] | None
    content: Records
    data: list[bytes] | None
    state: Packed | None


def request_of(
    message: Message,
    context: Context,
    content: Records,
    data: list[bytes] | None,
    node: Node | None,
    slot: int = 0,
) -> Request:
    """Make a request of a message, its client, and what is sent of both."""
    metadata = message.metadata
    return Request(
        slot=slot,
        message_id=metadata.message_id,
        message_type=metadata.message_type,
        node_id=metadata.dst_node_id,
        group_id=metadata.group_id,
        ttl=metadata.ttl,
        sender=(metadata.run_id, metadata.src_node_id),
        content=content,
        data=data,
        node=node,
        state=pack(context.state) if context.state else None,
    )


def node_of(context: Context) -> Node:
    """Return what a worker has to know of a client."""
    return Node(context.run_id, dict(context.node_config), dict(context.run_config))


def pack(records: RecordDict) -> Packed:
    """Take records apart. Arrays' data are not copied."""
    packed = Packed([], [])
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays = [
                (key, array.dtype, array.shape, array.stype, len(array.data))
                for key, array in record.items()
            ]
            packed.records.append((name, _ARRAYS, arrays))
            packed.data.extend(array.data for array in record.values())
        else:
            kind = _METRICS if isinstance(record, MetricRecord) else _CONFIG
            packed.records.append((name, kind, dict(record)))
    return packed


def unpack(packed: Packed) -> RecordDict:
    """Put records together again. Arrays' data are not copied."""
    data = iter(packed.data)
    return RecordDict(
        {name: _record(kind, content, data) for name, kind, content in packed.records}
    )


def sizes(records: Records) -> list[int]:
    """Return the number of bytes of each array's data."""
    return [array[-1] for _, kind, content in records if kind == _ARRAYS for array in content]


class SharedMemory:
    """Memory that two processes see, divided into slots of equal size.

    Parameters
    ----------
    handle : int
        File descriptor of the memory, `slots` times `slot_bytes` long; owned by this object.
    slots : int
        Number of slots.
    slot_bytes : int
        Size of each.
    """

    def __init__(self, handle: int, slots: int, slot_bytes: int) -> None:
        self.handle = handle
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(handle, slots * slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SharedMemory:
        """Set memory aside.

        Raises
        ------
        UserError
            There is not so much.
        """
        size = slots * slot_bytes
        for folder in _FOLDERS:
            if _free(folder) >= size:
                with suppress(OSError):
                    return cls(_reserve(folder, size), slots, slot_bytes)
        free = ", ".join(f"{folder} {_free(folder) / _MEGABYTE:,.0f} MB" for folder in _FOLDERS)
        raise UserError(
            f"Each worker process needs {size / _MEGABYTE:,.0f} MB of shared memory to exchange "
            f"models, and there is less (free: {free}). Make room, or run with --workers 0, which "
            "needs none."
        )

    def write(self, slot: int, data: Sequence[bytes]) -> bool:
        """Write into a slot; return False, with nothing written, if it does not fit."""
        if sum(len(part) for part in data) > self.slot_bytes:
            return False
        start = slot * self.slot_bytes
        for part in data:
            self._memory[start : start + len(part)] = part
            start += len(part)
        return True

    def read(self, slot: int, lengths: Sequence[int]) -> list[bytes]:
        """Copy what was written into a slot, by the length of each part."""
        start, data = slot * self.slot_bytes, []
        for length in lengths:
            data.append(self._memory[start : start + length])
            start += length
        return data

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self.handle)


def _reserve(folder: str, size: int) -> int:
    """Return the descriptor of a new file without a name: it is gone when nobody has it open."""
    with tempfile.TemporaryFile(prefix="raceme-", dir=folder) as file:
        os.ftruncate(file.fileno(), size)
        if hasattr(os, "posix_fallocate"):
            # Without it, room that is missing is found out when it is written to, and that kills.
            os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _free(folder: str) -> int:
    usable = Path(folder).is_dir() and os.access(folder, os.W_OK)
    return shutil.disk_usage(folder).free if usable else 0


def _record(
    kind: str, content: Any, data: Iterator[bytes]
) -> ArrayRecord | MetricRecord | ConfigRecord:
    if kind == _METRICS:
        return MetricRecord(content)
    if kind == _CONFIG:
        return ConfigRecord(content)
    return array_record(
        {
            key: flower_array(dtype, shape, stype, next(data))
            for key, dtype, shape, stype, _ in content
        }
    )


# -----------------------------------------------------------------------------
# What executors have in common that let others work ahead of when a result is needed.
# -----------------------------------------------------------------------------


QUEUED = 2
"""Tasks that a worker has at a time: one that it works on, and one so that it need not wait."""
MOST_DEATHS = 3
"""Workers that may die at the same task, or one after the other before they are ready."""
_AHEAD, _AHEAD_PER_WORKER = 64, 8
"""Results that may wait to be asked for: so many, or so many per worker if that is more."""


@dataclass(eq=False)
class Task:
    """A message whose reply has not been asked for.

    Attributes
    ----------
    queued : bool
        It waits to be handed to a worker.
    state : RecordDict or None
        The client's state that it was last handed out with.
    deaths : int
        Workers that died at it.
    """

    message: Message
    context: Context
    due: float
    order: int
    queued: bool = False
    state: RecordDict | None = None
    deaths: int = 0

    @property
    def message_id(self) -> str:
        """What it is known by."""
        return self.message.metadata.message_id

    def __str__(self) -> str:
        metadata = self.message.metadata
        return (
            f"message {metadata.message_id}, {metadata.message_type} on node {metadata.dst_node_id}"
        )


@dataclass(frozen=True)
class _Result:
    """A reply, and the client's state if it has changed."""

    reply: Message
    state: RecordDict | None


class WorkingAhead(ABC):
    """An executor whose workers begin as soon as work is submitted; what is due first comes first.

    Replies are those of :class:`~raceme.simulation.executor.InProcess`: work that was done on
    another state than its client then has is done again, and so is what a worker died at.

    Parameters
    ----------
    workers : int
        Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._tasks: dict[str, Task] = {}
        self._results: dict[str, _Result] = {}
        # Heap of (due, order, message id); an entry counts only while it states the task's due
        # time, so that a task can be put first without a search.
        self._waiting: list[tuple[float, int, str]] = []
        self._order = 0
        self._bound = max(_AHEAD, _AHEAD_PER_WORKER * workers)

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Take on the work of a message, and start it if a worker is free."""
        self._order += 1
        task = Task(message, context, due, self._order)
        self._tasks[task.message_id] = task
        self._queue(task)
        self._receive(wait=False)
        self._hand_out()

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message; wait for it if need be."""
        task = self._tasks[message_id]
        self._receive(wait=False)
        while not self._is_done(task):
            if task.due > -math.inf:
                task.due = -math.inf
                if task.queued:
                    self._queue(task)
            self._hand_out(urgent=task)
            self._receive(wait=True)
        result = self._results.pop(message_id)
        del self._tasks[message_id]
        if result.state is not None:
            task.context.state = result.state
        self._hand_out()
        return result.reply

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message; if a worker is at it, what it makes of it is thrown away."""
        self._tasks.pop(message_id, None)
        self._results.pop(message_id, None)

    def close(self) -> None:
        """End the workers."""
        self._end_workers()
        self._tasks, self._results, self._waiting = {}, {}, []

    @abstractmethod
    def _end_workers(self) -> None:
        """End the workers."""

    @abstractmethod
    def _receive(self, wait: bool) -> None:
        """Take in what has come from the workers; with `wait`, at least one thing."""

    @abstractmethod
    def _give(self, task: Task) -> bool:
        """Give a task to a worker that has room; return False if none has.

        A task that is given is told so with :meth:`_begin`.
        """

    @abstractmethod
    def _at_work(self) -> int:
        """Return how many tasks the workers have."""

    def _begin(self, task: Task) -> None:
        """Note that a worker has a task."""
        task.queued, task.state = False, task.context.state

    def _finish(self, task: Task, response: Response, data: Sequence[bytes]) -> None:
        """Keep what a worker has made of a task, if anybody still wants it."""
        if self._tasks.get(task.message_id) is task:
            self._results[task.message_id] = _result(task.message, response, data)

    def _redo(self, tasks: Iterable[Task]) -> Task | None:
        """Let the tasks of a worker that has died wait again.

        Returns
        -------
        Task or None
            The one that it died at, if too many have by now.
        """
        fatal = None
        for position, task in enumerate(tasks):
            task.deaths += position == 0
            if task.deaths >= MOST_DEATHS:
                fatal = task
            self._queue(task)
        return fatal

    def _is_done(self, task: Task) -> bool:
        """Return whether a task's result can be given out.

        One that started from another state than its client now has is done again: an earlier
        message has changed it since.
        """
        if task.message_id not in self._results:
            return False
        if task.state is task.context.state:
            return True
        del self._results[task.message_id]
        self._queue(task)
        return False

    def _queue(self, task: Task) -> None:
        """Let a task wait for a worker; if it does already, its new due time counts."""
        task.queued = True
        heapq.heappush(self._waiting, (task.due, task.order, task.message_id))

    def _hand_out(self, urgent: Task | None = None) -> None:
        """Give waiting tasks to workers that have room, but not too far ahead of the results."""
        while self._waiting:
            due, _, message_id = self._waiting[0]
            task = self._tasks.get(message_id)
            if task is None or not task.queued or due != task.due:
                heapq.heappop(self._waiting)
                continue
            ahead = len(self._results) + self._at_work()
            if (ahead >= self._bound and task is not urgent) or not self._give(task):
                return
            heapq.heappop(self._waiting)


def _result(message: Message, response: Response, data: Sequence[bytes]) -> _Result:
    """Make of a response what the ClientApp would have returned in this process."""
    state = None if response.state is None else unpack(response.state)
    start_now(message)
    if response.error is not None:
        return _Result(Message(Error(*response.error), reply_to=message), state)
    content = unpack(Packed(response.content, list(data)))
    return _Result(Message(content, reply_to=message), state)


# -----------------------------------------------------------------------------
# Where simulated clients' work is done.
# -----------------------------------------------------------------------------


class Executor(Protocol):
    """Does the work that messages ask for, some time between `submit` and `result`."""

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Take on the work of a message.

        Parameters
        ----------
        message : Message
            What is asked; it is known by its message id from here on, and does not change.
        context : Context
            Of the client that is asked. The ClientApp finds its state as it is when the result is
            asked for: work that was done early, on another state, is done again.
        due : float
            When the result will be asked for, on any clock: work that is due first comes first.
        """
        ...

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message, once; wait for it if need be."""
        ...

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message: its device went offline, or nobody wants its reply."""
        ...

    def close(self) -> None:
        """Release what the executor holds."""
        ...


class InProcess:
    """Runs the ClientApp in this process at the moment when the reply is needed.

    Parameters
    ----------
    client_app : ClientApp
        The app that answers messages. An exception in it becomes Flower's error reply.
    seed : int, optional
        See :func:`answer`.
    """

    def __init__(self, client_app: ClientApp, seed: int | None = None) -> None:
        self._client_app = client_app
        self._seed = seed
        self._waiting: dict[str, tuple[Message, Context]] = {}

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until its reply is asked for."""
        self._waiting[message.metadata.message_id] = (message, context)

    def result(self, message_id: str) -> Message:
        """Run the ClientApp and return its reply."""
        message, context = self._waiting.pop(message_id)
        return answer(self._client_app, message, context, self._seed)

    def cancel(self, message_id: str) -> None:
        """Drop the message without running anything."""
        self._waiting.pop(message_id, None)

    def close(self) -> None:
        """Drop all that is left."""
        self._waiting.clear()


def answer(
    client_app: ClientApp, message: Message, context: Context, seed: int | None = None
) -> Message:
    """Let a ClientApp answer a message, as a SuperNode would: its exceptions are error replies.

    Parameters
    ----------
    client_app : ClientApp
        The app.
    message : Message
        What is asked; its id is the number of the message.
    context : Context
        Of the client that is asked.
    seed : int, optional
        Decides, with the client and the message, what the app draws from the process's own random
        numbers, for apps that are not known to leave them alone.
    """
    start_now(message)
    try:
        if seed is None:
            reply = client_app(message, context)
        else:
            with own_randomness([seed, context.node_id, int(message.metadata.message_id)]):
                reply = client_app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned no Message but {reply!r}")
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            raise ValueError("the ClientApp returned a Message that is no reply to its own")
        return reply
    except Exception as error:
        reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return error_reply(message, CLIENT_APP_RAISED_EXCEPTION, reason)
