"""Executors of simulated clients' work: the interface, in-process and worker processes.

A result depends only on the message and the client's state, so an executor may work early, in any
order and in parallel without changing the outcome of a run.
"""

from __future__ import annotations

import heapq
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.errors import UserError, one_line
from raceme.core.options import Value
from raceme.core.registry import define, definitions, users_line
from raceme.datasets.source import own_randomness, without_operators
from raceme.flower import messages as flower

# -----------------------------------------------------------------------------
# The contract, and work in this process.
# -----------------------------------------------------------------------------


class Executor(Protocol):
    """Computes the replies to messages, some time between `submit` and `result`."""

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Take on the work of a message.

        Parameters
        ----------
        message : Message
            The request, identified by its message id; it must not change.
        context : Context
            The client's context. Its state at the call of `result` applies: work done early on
            another state is repeated.
        due : float
            Time at which the result is needed, on any clock; decides the order of work.
        """
        ...

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message, once; wait for it if necessary."""
        ...

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message whose reply is no longer needed."""
        ...

    def close(self) -> None:
        """Release what the executor holds."""
        ...


@dataclass(eq=False)
class PendingReply:
    """A message with an outstanding reply.

    Attributes
    ----------
    due : float
        Time at which the reply is needed.
    order : int
        Order among messages of the same time.
    queued : bool
        Whether it waits for a worker.
    state : RecordDict or None
        The client's state at the last hand-out.
    deaths : int
        Number of workers that died at it.
    """

    message: Message
    context: Context
    due: float
    order: int = 0
    queued: bool = False
    state: RecordDict | None = None
    deaths: int = 0

    @property
    def message_id(self) -> str:
        """Id of the message, which names the job."""
        return self.message.metadata.message_id

    def __str__(self) -> str:
        metadata = self.message.metadata
        return (
            f"message {metadata.message_id}, {metadata.message_type} on node {metadata.dst_node_id}"
        )

    def request(
        self, content: Records, data: list[bytes] | None = None, slot: int = 0
    ) -> WorkerRequest:
        """Return the request to a worker on the client's current state."""
        context, metadata = self.context, self.message.metadata
        self.state = context.state
        return WorkerRequest(
            slot=slot,
            head=head_of(self.message),
            sender=(metadata.run_id, metadata.src_node_id),
            content=content,
            data=data,
            run_id=context.run_id,
            node_config=dict(context.node_config),
            run_config=dict(context.run_config),
            state=pack(context.state) if context.state else None,
        )

    def reply(self, response: Response, data: Sequence[bytes]) -> Message:
        """Return the reply of a response, whose array data are given."""
        flower.start_now(self.message)
        if response.error is not None:
            return Message(Error(*response.error), reply_to=self.message)
        content = unpack(Packed(response.content, list(data)))
        return Message(content, reply_to=self.message)


class InProcess:
    """Runs the ClientApp in this process when the reply is needed.

    Parameters
    ----------
    client_app : ClientApp
        The app that answers messages. An exception in it becomes Flower's error reply.
    seed : int, optional
        Seed of apps that draw from the process's own random numbers; see :func:`answer`.
    """

    def __init__(self, client_app: ClientApp, seed: int | None = None) -> None:
        self._client_app = client_app
        self._seed = seed
        self._waiting: dict[str, tuple[Message, Context]] = {}

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Keep the message until its reply is needed."""
        self._waiting[message.metadata.message_id] = (message, context)

    def result(self, message_id: str) -> Message:
        """Run the ClientApp and return its reply."""
        message, context = self._waiting.pop(message_id)
        return answer(self._client_app, message, context, self._seed)

    def cancel(self, message_id: str) -> None:
        """Drop the message without running anything."""
        self._waiting.pop(message_id, None)

    def close(self) -> None:
        """Drop unfinished work."""
        self._waiting.clear()


def answer(
    client_app: ClientApp, message: Message, context: Context, seed: int | None = None
) -> Message:
    """Answer a message with a ClientApp, as a SuperNode does: exceptions become error replies.

    Parameters
    ----------
    message : Message
        The request; its id is the number of the message.
    context : Context
        Context of the answering client.
    seed : int, optional
        Seeds, with client and message, the process's random numbers, for apps that may draw from
        them.
    """
    flower.start_now(message)
    try:
        with ExitStack() as stack:
            if seed is not None:
                drawn = [seed, context.node_id, int(message.metadata.message_id)]
                stack.enter_context(own_randomness(drawn))
            reply = client_app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp must return a Message, got {reply!r}")
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            raise ValueError(
                "the ClientApp returned a Message that is not a reply to the received one"
            )
        return reply
    except Exception as error:
        where = f" ({line})" if (line := users_line(error)) else ""
        reason = f"{type(error).__name__}: {error}{where}\n{traceback.format_exc()}"
        return flower.error_reply(message, flower.CLIENT_APP_RAISED_EXCEPTION, reason)


# -----------------------------------------------------------------------------
# Messages and records as plain values, for workers, checkpoints and comparison.
# -----------------------------------------------------------------------------


Records = list[tuple[str, str, Any]]
"""Records without their arrays' data: name, kind, content."""

_ARRAYS, _METRICS, _CONFIG = "arrays", "metrics", "config"
_RECORDS = {_METRICS: MetricRecord, _CONFIG: ConfigRecord}


class Packed(NamedTuple):
    """Records and the concatenated data of their arrays."""

    records: Records
    data: list[bytes]


def pack(records: RecordDict) -> Packed:
    """Convert records to plain values, without copying array data."""
    packed = Packed([], [])
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays = [(key, a.dtype, a.shape, a.stype, len(a.data)) for key, a in record.items()]
            packed.records.append((name, _ARRAYS, arrays))
            packed.data.extend(array.data for array in record.values())
        else:
            kind = _METRICS if isinstance(record, MetricRecord) else _CONFIG
            packed.records.append((name, kind, dict(record)))
    return packed


def unpack(packed: Packed) -> RecordDict:
    """Restore records from plain values, without copying array data."""
    data, records = iter(packed.data), RecordDict()
    for name, kind, content in packed.records:
        if kind == _ARRAYS:
            # Checkpoints turn tuples into lists.
            records[name] = flower.array_record(
                {
                    key: flower.array(dtype, tuple(shape), stype, next(data))
                    for key, dtype, shape, stype, _ in content
                }
            )
        else:
            records[name] = _RECORDS[kind](content)
    return records


def sizes(records: Records) -> list[int]:
    """Return the number of bytes of each array's data."""
    return [array[-1] for _, kind, content in records if kind == _ARRAYS for array in content]


def head_of(message: Message) -> dict[str, Any]:
    """Return a message's metadata."""
    metadata = message.metadata
    return {
        "id": metadata.message_id,
        "node": metadata.dst_node_id,
        "type": metadata.message_type,
        "ttl": metadata.ttl,
        "group": metadata.group_id,
    }


def message_of(head: Mapping[str, Any], content: RecordDict) -> Message:
    """Restore a message from metadata and content."""
    message = Message(content, head["node"], head["type"], ttl=head["ttl"], group_id=head["group"])
    flower.set_message_id(message, head["id"])
    return message


# -----------------------------------------------------------------------------
# The worker's side: answers requests with a ClientApp in another process or machine.
# -----------------------------------------------------------------------------


class WorkerRequest(NamedTuple):
    """A message for a worker, as sent.

    Attributes
    ----------
    slot : int
        Slot of the shared memory, if any; the response uses the same one.
    sender : tuple[int, int]
        Run and node on whose behalf the message was made.
    data : list[bytes] or None
        The arrays' data; None if they come by another way.
    run_id : int
        The client's run id; `node_config` and `run_config` are its settings.
    state : Packed or None
        The client's state; None if it is empty.
    """

    slot: int
    head: dict[str, Any]
    sender: tuple[int, int]
    content: Records
    data: list[bytes] | None
    run_id: int
    node_config: Mapping[str, Value]
    run_config: Mapping[str, Value]
    state: Packed | None


class Response(NamedTuple):
    """A worker's reply, as sent.

    Attributes
    ----------
    error : tuple[int, str | None] or None
        Code and reason of an error reply.
    data : list[bytes] or None
        The arrays' data; None if they are in the request's slot.
    state : Packed or None
        The client's state; None if it is unchanged.
    """

    message_id: str
    error: tuple[int, str | None] | None
    content: Records
    data: list[bytes] | None
    state: Packed | None


def received(request: WorkerRequest, data: list[bytes]) -> tuple[Message, Context]:
    """Return a request's message, with these array data, and its client's context."""
    context = Context(
        run_id=request.run_id,
        node_id=request.head["node"],
        node_config=dict(request.node_config),
        state=RecordDict() if request.state is None else unpack(request.state),
        run_config=dict(request.run_config),
    )
    flower.identify_process(*request.sender)
    return message_of(request.head, unpack(Packed(request.content, data))), context


def response_of(request: WorkerRequest, reply: Message, context: Context) -> Response:
    """Return the response to a request, given the reply and the client's context after it."""
    state = pack(context.state)
    content = Packed([], []) if reply.has_error() else pack(reply.content)
    return Response(
        message_id=request.head["id"],
        error=(reply.error.code, reply.error.reason) if reply.has_error() else None,
        content=content.records,
        data=content.data,
        state=None if state == (request.state or Packed([], [])) else state,
    )


class Desk:
    """Answers requests.

    Parameters
    ----------
    app : ClientApp
        The ClientApp that answers requests.
    seed : int or None
        Seed of apps that draw from the process's own random numbers; see :func:`answer`.
    """

    def __init__(self, app: ClientApp, seed: int | None) -> None:
        self._app, self._seed = app, seed

    def respond(self, request: WorkerRequest, data: list[bytes]) -> Response:
        """Answer a request with these array data."""
        message, context = received(request, data)
        return response_of(request, answer(self._app, message, context, self._seed), context)


def load(target: str) -> ClientApp:
    """Import a ClientApp.

    Raises
    ------
    Exception
        Any exception of the import; TypeError if the object is not a ClientApp.
    """
    module, _, attribute = target.partition(":")
    app = attrgetter(attribute)(without_operators(lambda: import_module(module)))
    if not isinstance(app, ClientApp):
        raise TypeError(f"{target} must be a flwr.clientapp.ClientApp, got {type(app).__name__}")
    return app


def open_desk(target: str, seed: int | None, log_level: int) -> Desk | str:
    """Prepare to answer requests in this process; return the reason on failure.

    Parameters
    ----------
    target : str
        Import path of the ClientApp, as ``module:attribute``.
    seed : int, optional
        Seed of apps that draw from the process's own random numbers; see :func:`answer`.
    log_level : int
        Level of Flower's logger in this process, e.g. ``logging.INFO``.
    """
    logging.getLogger("flwr").setLevel(log_level)
    try:
        app = load(target)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {one_line(error) or 'no reason given'}"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return Desk(app, seed)


# -----------------------------------------------------------------------------
# Shared memory for array data, which are pickled only if they do not fit. Everything small goes
# through a pipe.
# -----------------------------------------------------------------------------


_FOLDERS = ("/dev/shm", tempfile.gettempdir())
"""Candidate folders of shared memory; the first is never written to disk."""
_MEGABYTE = 1e6


class SharedMemory:
    """Memory shared by two processes, divided into slots of equal size.

    Parameters
    ----------
    handle : int
        File descriptor of the memory, `slots` times `slot_bytes` long; owned by this object.
    slot_bytes : int
        Size of each slot in bytes.
    """

    def __init__(self, handle: int, slots: int, slot_bytes: int) -> None:
        self.handle = handle
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(handle, slots * slot_bytes)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SharedMemory:
        """Reserve memory.

        Raises
        ------
        UserError
            There is too little.
        """
        size = slots * slot_bytes
        for folder in _FOLDERS:
            if _free(folder) >= size:
                with suppress(OSError):
                    return cls(_reserve(folder, size), slots, slot_bytes)
        free = ", ".join(f"{folder} {_free(folder) / _MEGABYTE:,.0f} MB" for folder in _FOLDERS)
        raise UserError(
            f"Each worker process needs {size / _MEGABYTE:,.0f} MB of shared memory to exchange "
            f"models, more than is free ({free}). Free some, or use --workers 0, which needs none."
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
        """Copy the parts written into a slot, given their lengths."""
        start, data = slot * self.slot_bytes, []
        for length in lengths:
            data.append(self._memory[start : start + length])
            start += length
        return data

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.handle)


def _reserve(folder: str, size: int) -> int:
    """Return the descriptor of a new unnamed file, which disappears when closed."""
    with tempfile.TemporaryFile(prefix="raceme-", dir=folder) as file:
        os.ftruncate(file.fileno(), size)
        if hasattr(os, "posix_fallocate"):
            # Without it, a write beyond the free space would kill the process.
            os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


def _free(folder: str) -> int:
    usable = Path(folder).is_dir() and os.access(folder, os.W_OK)
    return shutil.disk_usage(folder).free if usable else 0


# -----------------------------------------------------------------------------
# The worker process: answers messages with a ClientApp until it is told to stop.
# -----------------------------------------------------------------------------


_SENT_TO_ALL = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals sent to all processes of a terminal or service: Ctrl-C, hang-up, `timeout`, systemd."""
_END = signal.SIGUSR1
"""Signal with which the simulator ends a worker."""


def work(
    connection: Connection[Any, Any],
    target: str,
    log_level: int,
    seed: int | None = None,
    pickled: Mapping[str, bytes] | None = None,
) -> None:
    """Answer messages until the other end of the connection is closed, or its process ends.

    Parameters
    ----------
    connection : Connection
        Connection to the simulator. The first value sent is None, or the reason of a failed start.
        Then each :class:`WorkerRequest` is answered by one :class:`Response`, in order. A pair of
        numbers announces shared memory: slots and bytes per slot.
    target, log_level, seed
        See :func:`~raceme.simulation.executor.open_desk`.
    pickled : Mapping[str, bytes], optional
        See :func:`~raceme.core.registry.define`.
    """
    # The simulator ends its workers; processes of the app end as usual.
    worker = os.getpid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None if os.getpid() == worker else sys.exit(0))
    # The default action would leave locks and temporary folders of the app behind.
    signal.signal(_END, lambda *_: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT_TO_ALL)
    define(pickled or {})
    # Daemons may not start processes, which an app's DataLoader(num_workers=…) does.
    multiprocessing.current_process().daemon = False
    # They use the default start method; this process's own would import the app again.
    multiprocessing.set_start_method(None, force=True)
    memory: SharedMemory | None = None
    try:
        desk = open_desk(target, seed, log_level)
        if isinstance(desk, str):
            connection.send(desk)
            return
        connection.send(None)
        while True:
            received = connection.recv()
            if not isinstance(received, WorkerRequest):
                memory = SharedMemory(recv_handle(connection), *received)
                continue
            data = received.data
            if data is None:
                assert memory is not None, "shared memory is sent before it is used"
                data = memory.read(received.slot, sizes(received.content))
            response = desk.respond(received, data)
            if memory is not None and memory.write(received.slot, response.data or []):
                response = response._replace(data=None)
            connection.send(response)
    except (EOFError, OSError):
        return


# -----------------------------------------------------------------------------
# Persistent worker processes, which keep models and data.
# -----------------------------------------------------------------------------


QUEUED = 2
"""Tasks per worker: one in progress and one waiting."""
MOST_DEATHS = 3
"""Maximum number of workers that die at the same task, or consecutively before they are ready."""
_AHEAD, _AHEAD_PER_WORKER = 64, 8
"""Maximum number of results held in advance: the larger of a total and a number per worker."""
_ROOM = 1.5
"""Size of a slot of shared memory relative to the first model sent."""
_PIPE_BYTES = 32_768
"""Size that certainly fits into a pipe. More is sent only to an idle worker: a busy one might be
sending a large message itself, which would deadlock."""
_PRELOADED = ["raceme.client_app"]
"""Modules that the fork server imports. No module of a user: an exception on import would end that
process."""
_GRACE_SECONDS = 2.0
"""Time for a process to end before it is killed."""


def most_ahead(workers: int) -> int:
    """Return how many results are held in advance at most."""
    return max(_AHEAD, _AHEAD_PER_WORKER * workers)


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes
    ----------
    memory : SharedMemory or None
        Memory shared with this process, once announced.
    ready : bool
        Whether it has loaded the ClientApp.
    jobs : dict[str, PendingReply]
        Its jobs in order, by message id.
    slots : dict[str, int]
        Slots of the shared memory that are in use, by message id.
    """

    process: Any
    connection: Any
    memory: SharedMemory | None = None
    ready: bool = False
    jobs: dict[str, PendingReply] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)


class Pool:
    """An executor of worker processes, which train in parallel with the server.

    They start on submitted work at once, in order of due time. Replies equal those of
    :class:`InProcess`: work done on an outdated client state is repeated, and so is the work of a
    worker that died, by its replacement.

    Parameters
    ----------
    target : str
        The ClientApp, as ``module:attribute``; every worker imports it.
    workers : int
        Number of worker processes.
    slot_bytes : int, optional
        Shared memory for one message's arrays; larger ones go through a pipe, which is slower. By
        default 1.5 times the size of the first message with arrays.
    seed : int, optional
        Seed of apps that draw from the process's own random numbers; see :func:`answer`.
    """

    def __init__(
        self, target: str, workers: int, slot_bytes: int | None = None, seed: int | None = None
    ) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, got {workers}.")
        self._target, self._seed, self._slot_bytes = target, seed, slot_bytes
        self._jobs: dict[str, PendingReply] = {}
        # Reply, and the client's state if changed.
        self._results: dict[str, tuple[Message, RecordDict | None]] = {}
        # Heap of (due, order, message id). Entries with an outdated due time are ignored, so that a
        # task can be moved forward without a search.
        self._waiting: list[tuple[float, int, str]] = []
        self._order = self._failed_starts = 0
        self._bound = most_ahead(workers)
        self._selector = selectors.DefaultSelector()
        self._workers = [self._start() for _ in range(workers)]

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Submit a message, and start its work if a worker is free."""
        self._order += 1
        job = PendingReply(message, context, due, self._order)
        self._jobs[job.message_id] = job
        self._queue(job)
        self._receive(wait=False)
        self._assign_tasks()

    def result(self, message_id: str) -> Message:
        """Return the reply to a submitted message; wait for it if necessary.

        Raises
        ------
        UserError
            Workers cannot start, or die repeatedly at the same task.
        """
        job = self._jobs[message_id]
        self._receive(wait=False)
        while not self._is_done(job):
            if job.due > -math.inf:
                job.due = -math.inf
                if job.queued:
                    self._queue(job)
            self._assign_tasks(urgent=job)
            self._receive(wait=True)
        reply, state = self._results.pop(message_id)
        del self._jobs[message_id]
        if state is not None:
            job.context.state = state
        self._assign_tasks()
        return reply

    def cancel(self, message_id: str) -> None:
        """Drop a submitted message; the result of work in progress is discarded."""
        self._jobs.pop(message_id, None)
        self._results.pop(message_id, None)

    def close(self) -> None:
        """End all workers and drop unfinished work."""
        for worker in self._workers:
            if worker.process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, _END)
        for worker in self._workers:
            _end_worker(worker)
        self._selector.close()
        self._workers = []
        self._jobs, self._results, self._waiting = {}, {}, []

    def _queue(self, job: PendingReply) -> None:
        """Queue a task for a worker, or update the due time of a queued one."""
        job.queued = True
        heapq.heappush(self._waiting, (job.due, job.order, job.message_id))

    def _assign_tasks(self, urgent: PendingReply | None = None) -> None:
        """Hand waiting tasks to workers with room, within the bound on results held in advance."""
        while self._waiting:
            due, _, message_id = self._waiting[0]
            job = self._jobs.get(message_id)
            if job is None or not job.queued or due != job.due:
                heapq.heappop(self._waiting)
                continue
            ahead = len(self._results) + sum(len(worker.jobs) for worker in self._workers)
            if ahead >= self._bound and job is not urgent:
                return
            free = [w for w in self._workers if w.ready and len(w.jobs) < QUEUED]
            if not free or not self._send(min(free, key=lambda w: len(w.jobs)), job):
                return
            heapq.heappop(self._waiting)

    def _is_done(self, job: PendingReply) -> bool:
        """Return whether a task's result is available and valid.

        A result computed from an outdated client state is discarded and the task repeated.
        """
        if job.message_id not in self._results:
            return False
        if job.state is job.context.state:
            return True
        del self._results[job.message_id]
        self._queue(job)
        return False

    def _send(self, worker: _Worker, job: PendingReply) -> bool:
        """Send a task to a worker; return False if it cannot take it now."""
        content = pack(job.message.content)
        if content.data and self._slot_bytes is None:
            self._slot_bytes = math.ceil(_ROOM * sum(sizes(content.records)))
        slot = next(slot for slot in range(QUEUED) if slot not in worker.slots.values())
        try:
            if content.data and worker.memory is None:
                self._share_memory(worker)
            shared = worker.memory is not None and worker.memory.write(slot, content.data)
            request = job.request(content.records, None if shared else content.data, slot)
            pickled = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
            if len(pickled) > _PIPE_BYTES and worker.jobs:
                return False
            worker.connection.send_bytes(pickled)
        except OSError:
            # The worker has died, which the next `_receive` detects.
            return False
        worker.slots[job.message_id] = slot
        worker.jobs[job.message_id], job.queued = job, False
        return True

    def _share_memory(self, worker: _Worker) -> None:
        """Set up a worker's shared memory.

        Raises
        ------
        UserError
            There is too little.
        """
        assert self._slot_bytes is not None, "the first message with arrays decides it"
        worker.memory = SharedMemory.create(QUEUED, self._slot_bytes)
        worker.connection.send((QUEUED, self._slot_bytes))
        send_handle(worker.connection, worker.memory.handle, worker.process.pid)

    def _receive(self, wait: bool) -> None:
        """Process results of the workers; with `wait`, at least one."""
        events = self._selector.select(None if wait else 0)
        while events:
            for worker in {key.data: None for key, _ in events}:
                try:
                    if worker.connection.poll():
                        self._take(worker, worker.connection.recv())
                    elif not worker.process.is_alive():
                        self._replace(worker)
                except (EOFError, OSError):
                    self._replace(worker)
            events = self._selector.select(0)

    def _take(self, worker: _Worker, received: Response | str | None) -> None:
        """Process a worker's result."""
        if isinstance(received, str):
            raise UserError(
                f"A worker process cannot load the ClientApp {self._target}: {received}. "
                "--workers 0 starts none."
            )
        if received is None:
            worker.ready, self._failed_starts = True, 0
            return
        slot, data = worker.slots.pop(received.message_id), received.data
        if data is None:
            assert worker.memory is not None, "the worker has written to it"
            data = worker.memory.read(slot, sizes(received.content))
        job = worker.jobs.pop(received.message_id)
        if self._jobs.get(job.message_id) is job:
            state = None if received.state is None else unpack(received.state)
            self._results[job.message_id] = job.reply(received, data), state

    def _replace(self, worker: _Worker) -> None:
        """Replace a worker that died, and queue its tasks again."""
        self._selector.unregister(worker.connection)
        self._selector.unregister(worker.process.sentinel)
        how, index = _end_worker(worker), self._workers.index(worker)
        del self._workers[index]
        self._failed_starts += not worker.ready
        if self._failed_starts >= MOST_DEATHS:
            raise UserError(
                f"Worker processes ended before they loaded the ClientApp {self._target} ({how}); "
                "their output says why. --workers 0 starts none."
            )
        for position, job in enumerate(worker.jobs.values()):
            # It died at its first task.
            job.deaths += position == 0
            if job.deaths >= MOST_DEATHS:
                raise UserError(
                    f"{job.deaths} worker processes died ({how}) at the same task: {job}. Signal 9 "
                    "usually means that memory ran out: try fewer --workers; --workers 0 does all "
                    "work in one process."
                )
            self._queue(job)
        self._workers.insert(index, self._start())

    def _start(self) -> _Worker:
        """Start a worker process, which reports when it is ready."""
        context = _pool_context()
        own, other = context.Pipe()
        level = logging.getLogger("flwr").level
        process = context.Process(
            target=work,
            args=(other, self._target, level, self._seed, definitions()),
            name="raceme-worker",
            daemon=True,
        )
        try:
            with _blocked_signals(), script_hidden(self._target):
                process.start()
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "the process that forks it has ended"
            raise UserError(
                f"A worker process cannot start: {reason}. Try fewer --workers, or "
                "--workers 0, which starts none."
            ) from None
        other.close()
        worker = _Worker(process=process, connection=own)
        self._selector.register(own, selectors.EVENT_READ, worker)
        self._selector.register(process.sentinel, selectors.EVENT_READ, worker)
        return worker


def _end_worker(worker: _Worker) -> str:
    """Wait for a worker to end, and return how it ended."""
    worker.connection.close()
    worker.process.join(_GRACE_SECONDS)
    worker.process.kill()
    worker.process.join()
    code = worker.process.exitcode
    worker.process.close()
    if worker.memory is not None:
        worker.memory.close()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals sent to all processes, so that a process started meanwhile ignores them.

    This process receives them afterwards; ignoring them meanwhile would lose them.
    """
    # Starting the resource tracker later would unblock them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_processes() -> None:
    """Start the fork server, whose imports take one or two seconds.

    Pools do so themselves; calling it before other work saves the wait.
    """
    if _pool_context().get_start_method() == "forkserver":
        with _blocked_signals():
            forkserver.ensure_running()


def _pool_context() -> Any:
    """Return the process context: forking from a server that has imported torch, where safe.

    Workers then share the imported modules. The fork server only imports; forking this process,
    which may have threads, would be unsafe. Apple's libraries are unsafe even so.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextmanager
def script_hidden(target: str = "") -> Iterator[None]:
    """Prevent processes started in the context from running the user's script again.

    Workers do not need the script, and one without ``if __name__ == "__main__"`` would start the
    run again.
    """
    if target.partition(":")[0] == "__main__":
        yield
        return
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
