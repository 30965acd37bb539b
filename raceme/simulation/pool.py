"""Worker processes that do simulated clients' work side by side, ahead of when it is needed."""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import Any

from raceme.core.errors import UserError
from raceme.core.signals import handled_by
from raceme.simulation.executor import (
    QUEUED,
    Job,
    Request,
    Response,
    Worker,
    WorkingAhead,
    open_desk,
    pack,
    sizes,
)

# -----------------------------------------------------------------------------
# Memory that both processes see: arrays' data are written there, and are never pickled, unless
# there is more than fits. What is small goes through a pipe.
# -----------------------------------------------------------------------------


_FOLDERS = ("/dev/shm", tempfile.gettempdir())
"""Where shared memory is looked for; what lies in the first is never written to a disk."""
_MEGABYTE = 1e6


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


# -----------------------------------------------------------------------------
# What a worker process does: it answers messages with a ClientApp until it is told to stop.
# -----------------------------------------------------------------------------


_SENT_TO_ALL = (signal.SIGINT, signal.SIGHUP)
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
    target, log_level, seed
        See :func:`~raceme.simulation.executor.open_desk`.
    """
    # The simulator decides what becomes of its processes.
    for number in _SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    desk = open_desk(target, seed, log_level)
    if isinstance(desk, str):
        connection.send(desk)
        return
    memory: SharedMemory | None = None
    try:
        connection.send(None)
        while True:
            received = connection.recv()
            if not isinstance(received, Request):
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
# Worker processes, started once, that keep models and data.
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


@dataclass(eq=False, kw_only=True)
class _Process(Worker):
    """A worker process.

    Attributes
    ----------
    memory : SharedMemory or None
        What it shares with this process, once it has been told.
    slots : dict[str, int]
        Slots of the shared memory that are in use, by message id.
    """

    process: Any
    connection: Any
    memory: SharedMemory | None = None
    slots: dict[str, int] = field(default_factory=dict)


class Pool(WorkingAhead[_Process]):
    """An executor of worker processes, which train while the server does its own part.

    Parameters
    ----------
    target, workers, seed
        See :class:`~raceme.simulation.executor.WorkingAhead`.
    slot_bytes : int, optional
        Shared memory for one message's arrays; larger ones go through a pipe, which is slower. By
        default it is what the first message with arrays needs, and half as much again.
    """

    never_ready = (
        "Worker processes end before they have loaded the ClientApp {target} ({how}); what they "
        "print says why. With --workers 0 there are none."
    )
    deadly = (
        "{deaths} worker processes died ({how}) at the same task: {job}. Signal 9 means that "
        "memory ran out, as a rule: try fewer --workers; --workers 0 does all work in one process."
    )

    def __init__(
        self, target: str, workers: int, slot_bytes: int | None = None, seed: int | None = None
    ) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, got {workers}.")
        super().__init__(target, workers, seed)
        self._slot_bytes = slot_bytes
        self._selector = selectors.DefaultSelector()
        self._workers = [self._start() for _ in range(workers)]

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            _bury(worker)
        self._selector.close()

    def _send(self, worker: _Process, job: Job) -> bool:
        """Send a task to a worker; return False if it cannot take it now."""
        content = pack(job.message.content)
        if content.data and self._slot_bytes is None:
            self._slot_bytes = math.ceil(_ROOM * sum(sizes(content.records)))
        slot = next(slot for slot in range(QUEUED) if slot not in worker.slots.values())
        try:
            if content.data and worker.memory is None:
                self._share_memory(worker)
            shared = worker.memory is not None and worker.memory.write(slot, content.data)
            data = None if shared else content.data
            request = self._request(worker, job, content.records, data, slot)
            pickled = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
            if len(pickled) > _PIPE_BYTES and worker.jobs:
                return False
            worker.connection.send_bytes(pickled)
        except OSError:
            # It has died; the next look at the workers finds out.
            return False
        worker.slots[job.message_id] = slot
        self._begin(worker, job, request)
        return True

    def _share_memory(self, worker: _Process) -> None:
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
        """Take in what has come from the workers; with `wait`, at least one thing."""
        events = self._selector.select(None if wait else 0)
        while events:
            for worker in {key.data: None for key, _ in events}:
                try:
                    if worker.connection.poll():
                        self._take(worker, worker.connection.recv())
                    elif not worker.process.is_alive():
                        self._lose(worker)
                except (EOFError, OSError):
                    self._lose(worker)
            events = self._selector.select(0)

    def _take(self, worker: _Process, received: Response | str | None) -> None:
        """Take in what a worker sends."""
        if isinstance(received, str):
            raise UserError(
                f"A worker process cannot load the ClientApp {self._target}: {received}. "
                "With --workers 0 there are none."
            )
        if received is None:
            self._welcome(worker)
            return
        slot, data = worker.slots.pop(received.message_id), received.data
        if data is None:
            assert worker.memory is not None, "the worker has written to it"
            data = worker.memory.read(slot, sizes(received.content))
        self._finish(worker, received, data)

    def _lose(self, worker: _Process) -> None:
        """Take in that a worker has died."""
        self._selector.unregister(worker.connection)
        self._selector.unregister(worker.process.sentinel)
        self._replace(worker, how=_bury(worker))

    def _start(self) -> _Process:
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
            # From its first moment on it ignores what all get at once.
            with handled_by(signal.SIG_IGN, *_SENT_TO_ALL), _script_hidden(self._target):
                process.start()
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "the process that forks it has ended"
            raise UserError(
                f"A worker process cannot start: {reason}. Try fewer --workers, or "
                "--workers 0, which starts none."
            ) from None
        other.close()
        worker = _Process(process=process, connection=own)
        self._selector.register(own, selectors.EVENT_READ, worker)
        self._selector.register(process.sentinel, selectors.EVENT_READ, worker)
        return worker


def _bury(worker: _Process) -> str:
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
        with handled_by(signal.SIG_IGN, *_SENT_TO_ALL):
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
