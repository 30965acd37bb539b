"""What executors have in common that let others work ahead of when a result is needed."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Context, Error, Message, RecordDict

from raceme import compat
from raceme.simulation.transfer import Packed, Response, unpack

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
    compat.start_now(message)
    if response.error is not None:
        return _Result(Message(Error(*response.error), reply_to=message), state)
    content = unpack(Packed(response.content, list(data)))
    return _Result(Message(content, reply_to=message), state)
