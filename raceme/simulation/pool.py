"""What a worker process does: it answers messages with a ClientApp until it is told to stop."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import selectors
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import attrgetter
from types import ModuleType
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.errors import UserError
from raceme.datasets.cache import without_operators
from raceme.flower.messages import identify_process, set_message_id
from raceme.simulation.executor import (
    MOST_DEATHS,
    QUEUED,
    Node,
    Packed,
    Request,
    Response,
    SharedMemory,
    Task,
    WorkingAhead,
    answer,
    node_of,
    pack,
    request_of,
    sizes,
    unpack,
)

SENT_TO_ALL = (signal.SIGINT, signal.SIGHUP)
"""Signals that all processes of a terminal get: Ctrl-C, and its end."""


def work(
    connection: Connection[Any, Any], target: str, log_level: int, seed: int | None = None
) -> None:
    """Answer messages until the other end of the connection is closed, or its process ends.

    Parameters
    ----------
    connection : Connection
        To the simulator. What comes first from here is None, or else why there will be nothing
        more. Then there is one :class:`Response` for every :class:`Request`, in the same order.
        A pair of numbers announces shared memory: slots, and bytes per slot.
    target : str
        The ClientApp, as ``module:attribute``.
    log_level : int
        Of Flower's logger.
    seed : int, optional
        See :func:`~raceme.simulation.executor.answer`.
    """
    # The simulator decides what becomes of its processes.
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(log_level)
    try:
        app = load(target)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        connection.send(f"{type(error).__name__}: {reason}")
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    desk = Desk(app, seed)
    try:
        connection.send(None)
        while True:
            received = connection.recv()
            if isinstance(received, Request):
                connection.send(desk.respond(received))
            else:
                desk.memory = SharedMemory(recv_handle(connection), *received)
    except (EOFError, OSError):
        return


def load(target: str) -> ClientApp:
    """Import a ClientApp.

    Raises
    ------
    Exception
        Whatever the import raises; TypeError if it is no ClientApp.
    """
    module, _, attribute = target.partition(":")
    app = attrgetter(attribute)(without_operators(lambda: import_module(module)))
    if not isinstance(app, ClientApp):
        raise TypeError(f"{target} must be a flwr.clientapp.ClientApp, got {type(app).__name__}")
    return app


class Desk:
    """Where requests become messages, and replies responses.

    Parameters
    ----------
    app : ClientApp
        Answers.
    seed : int or None
        See :func:`~raceme.simulation.executor.answer`.
    """

    def __init__(self, app: ClientApp, seed: int | None) -> None:
        self._app, self._seed = app, seed
        self._nodes: dict[int, Node] = {}
        self.memory: SharedMemory | None = None

    def respond(self, request: Request) -> Response:
        """Answer a request."""
        if request.node is not None:
            self._nodes[request.node_id] = request.node
        state = RecordDict() if request.state is None else unpack(request.state)
        context = _context(request.node_id, self._nodes[request.node_id], state)
        reply = answer(self._app, self._message(request), context, self._seed)
        before = request.state or Packed([], [])
        after = pack(context.state)
        packed = Packed([], []) if reply.has_error() else pack(reply.content)
        fits = self.memory is not None and self.memory.write(request.slot, packed.data)
        return Response(
            message_id=request.message_id,
            error=(reply.error.code, reply.error.reason) if reply.has_error() else None,
            content=packed.records,
            data=None if fits else packed.data,
            state=None if after == before else after,
        )

    def _message(self, request: Request) -> Message:
        data = request.data
        if data is None:
            assert self.memory is not None, "shared memory is sent before it is used"
            data = self.memory.read(request.slot, sizes(request.content))
        identify_process(*request.sender)
        message = Message(
            unpack(Packed(request.content, data)),
            request.node_id,
            request.message_type,
            ttl=request.ttl,
            group_id=request.group_id,
        )
        set_message_id(message, request.message_id)
        return message


def _context(node_id: int, node: Node, state: RecordDict) -> Context:
    return Context(
        run_id=node.run_id,
        node_id=node_id,
        node_config=dict(node.node_config),
        state=state,
        run_config=dict(node.run_config),
    )


# -----------------------------------------------------------------------------
# Worker processes that do simulated clients' work side by side, ahead of when it is needed.
# -----------------------------------------------------------------------------


_ROOM = 1.5
"""Size of a slot of shared memory, in sizes of the first model that is sent."""
_PIPE_BYTES = 32_768
"""What certainly goes into a pipe at once. More is sent only to a worker that has nothing to do:
another might itself be sending something large, and both would wait for ever."""
_PRELOADED = ["raceme.client_app"]
"""What a process is forked from has imported already. Nothing that a user names: what raises on
import would end that process."""
_GRACE_SECONDS = 2.0
"""Time for a process to end before it is made to."""


@dataclass(eq=False)
class _Worker:
    """A worker process as the simulator sees it.

    Attributes
    ----------
    ready : bool
        It has loaded the ClientApp.
    memory : SharedMemory or None
        What it shares with this process, once it has been told.
    tasks : dict[str, Task]
        What it has to do, by message id, in its order.
    slots : dict[str, int]
        Slots of the shared memory that are in use, by message id.
    nodes : dict[int, Node]
        The clients that it knows.
    """

    process: Any
    connection: Any
    ready: bool = False
    memory: SharedMemory | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)

    @property
    def free_slot(self) -> int:
        """A slot that no task uses."""
        return next(slot for slot in range(QUEUED) if slot not in self.slots.values())


class Pool(WorkingAhead):
    """An executor of worker processes that are started once and keep models and data.

    Work is handed out as soon as it is submitted, what is due first comes first, so that workers
    train while the server does its own part. Replies are those of
    :class:`~raceme.simulation.executor.InProcess`: a worker that dies is replaced, and what it had
    to do is done again.

    Parameters
    ----------
    target : str
        The ClientApp, as ``module:attribute``; every worker imports it.
    workers : int
        Number of worker processes.
    slot_bytes : int, optional
        Shared memory for one message's arrays; larger ones go through a pipe, which is slower. By
        default it is what the first message with arrays needs, and half as much again.
    seed : int, optional
        See :func:`~raceme.simulation.executor.answer`.
    """

    def __init__(
        self,
        target: str,
        workers: int,
        slot_bytes: int | None = None,
        seed: int | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, got {workers}.")
        super().__init__(workers)
        self._target, self._seed = target, seed
        self._slot_bytes = slot_bytes
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._workers = [self._start() for _ in range(workers)]

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            _bury(worker)
        self._selector.close()
        self._workers = []

    # Handing work out.

    def _at_work(self) -> int:
        return sum(len(worker.tasks) for worker in self._workers)

    def _give(self, task: Task) -> bool:
        """Give a task to a worker that has room; return False if none can take it now."""
        free = [w for w in self._workers if w.ready and len(w.tasks) < QUEUED]
        return bool(free) and self._send(min(free, key=lambda worker: len(worker.tasks)), task)

    def _send(self, worker: _Worker, task: Task) -> bool:
        """Give a task to a worker; return False if it cannot take it now."""
        try:
            return self._try_to_send(worker, task)
        except OSError:
            # It has died; the next look at the workers finds out.
            return False

    def _try_to_send(self, worker: _Worker, task: Task) -> bool:
        content = pack(task.message.content)
        if content.data and self._slot_bytes is None:
            self._slot_bytes = math.ceil(_ROOM * sum(sizes(content.records)))
        if content.data and worker.memory is None:
            self._share_memory(worker)
        slot = worker.free_slot
        shared = worker.memory is not None and worker.memory.write(slot, content.data)
        context = task.context
        node = node_of(context)
        known = worker.nodes.get(context.node_id) == node
        request = request_of(
            task.message,
            context,
            content.records,
            None if shared else content.data,
            None if known else node,
            slot,
        )
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        if len(data) > _PIPE_BYTES and worker.tasks:
            return False
        worker.connection.send_bytes(data)
        worker.nodes[context.node_id] = node
        worker.tasks[task.message_id] = task
        worker.slots[task.message_id] = slot
        self._begin(task)
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

    # Taking results in.

    def _receive(self, wait: bool) -> None:
        """Take in what has come from the workers; with `wait`, at least one thing.

        Raises
        ------
        UserError
            Workers cannot start, or die again and again at the same task.
        """
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
        """Take in what a worker sends."""
        if isinstance(received, str):
            raise UserError(
                f"A worker process cannot load the ClientApp {self._target}: {received}. "
                "With --workers 0 there are none."
            )
        if received is None:
            worker.ready, self._failed_starts = True, 0
            return
        message_id = received.message_id
        task, slot = worker.tasks.pop(message_id), worker.slots.pop(message_id)
        data = received.data
        if data is None:
            assert worker.memory is not None, "the worker has written to it"
            data = worker.memory.read(slot, sizes(received.content))
        self._finish(task, received, data)

    # Workers' lives.

    def _start(self) -> _Worker:
        """Start a worker process; it is ready when it says so."""
        context = _pool_context()
        own, other = context.Pipe()
        level = logging.getLogger("flwr").level
        process = context.Process(
            target=work,
            args=(other, self._target, level, self._seed),
            name="raceme-worker",
            daemon=True,
        )
        try:
            with _interrupts_ignored(), _script_hidden(self._target):
                process.start()
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "the process that forks it has ended"
            raise UserError(
                f"A worker process cannot start: {reason}. Try fewer --workers, or "
                "--workers 0, which starts none."
            ) from None
        other.close()
        worker = _Worker(process, own)
        self._selector.register(own, selectors.EVENT_READ, worker)
        self._selector.register(process.sentinel, selectors.EVENT_READ, worker)
        return worker

    def _replace(self, worker: _Worker) -> None:
        """Start a worker in the place of one that has died, and let its tasks wait again."""
        self._selector.unregister(worker.connection)
        self._selector.unregister(worker.process.sentinel)
        index = self._workers.index(worker)
        del self._workers[index]
        exit_code = _bury(worker)
        if not worker.ready:
            self._failed_starts += 1
        if self._failed_starts >= MOST_DEATHS:
            raise UserError(
                f"Worker processes end before they have loaded the ClientApp {self._target} "
                f"({exit_code}); what they print says why. With --workers 0 there are none."
            )
        fatal = self._redo(worker.tasks.values())
        if fatal is not None:
            raise UserError(
                f"{fatal.deaths} worker processes died ({exit_code}) at the same task: {fatal}. "
                "Signal 9 means that memory ran out, as a rule: try fewer --workers; --workers 0 "
                "does all work in one process."
            )
        self._workers.insert(index, self._start())


def _bury(worker: _Worker) -> str:
    """Wait for the end of a worker that has nothing more to do, and say how it ended."""
    worker.connection.close()
    worker.process.join(_GRACE_SECONDS)
    worker.process.kill()
    worker.process.join()
    code = worker.process.exitcode
    worker.process.close()
    if worker.memory is not None:
        worker.memory.close()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def prepare() -> None:
    """Let what processes are forked from begin to import, which takes a second or two.

    Pools do it themselves; before other work that takes time, it is done meanwhile.
    """
    if _pool_context().get_start_method() == "forkserver":
        with _interrupts_ignored():
            forkserver.ensure_running()


def _pool_context() -> Any:
    """Return how processes are made: forked from one that has imported torch, where that is safe.

    It saves each worker's import, and workers share what was imported. The process that they are
    forked from has done nothing but import: forking this one, which may have threads, would not be
    safe. Apple's libraries are not safe to fork even so.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextmanager
def _script_hidden(target: str) -> Iterator[None]:
    """Let a process that is started here not run the user's script again, as Python has it do.

    A worker does not need it, it costs the script's imports, and a script that does not guard
    what it does by ``if __name__ == "__main__"`` would start the run again.
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


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let a process that is started here ignore, from its first moment on, what all get at once.

    Ctrl-C, and the end of the terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SENT_TO_ALL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
