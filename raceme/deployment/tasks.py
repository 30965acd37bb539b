"""One message at a time: the ClientApp is called, or an error reply says why not."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from raceme.compat import (
    CLIENT_APP_RAISED_EXCEPTION,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    fleet,
    identify_process,
)
from raceme.config import Value
from raceme.deployment.apps import Apps, RefusedAppError
from raceme.deployment.connection import Link, RejoinError
from raceme.protocol.messages import CONFIG, TASK

log = logging.getLogger("raceme.device")


class InterruptedTaskError(BaseException):
    """Ends a task in the middle; no ClientApp should catch it."""


class Interrupter:
    """Ends the task in work a while after the device was told to stop.

    Parameters
    ----------
    grace : float
        Seconds that a task has left to finish.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._working = False
        self._stopping = False

    def stop(self) -> None:
        """Give the task in work its last seconds; the second time, end it now."""
        if self._working and self._stopping:
            raise InterruptedTaskError
        self._stopping = True
        if self._working:
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the time during which a task can be ended."""
        previous = signal.signal(signal.SIGALRM, self._on_alarm)
        self._working = True
        try:
            if self._stopping:
                raise InterruptedTaskError
            yield
        finally:
            self._working = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def _on_alarm(self, _signal: int, _frame: FrameType | None) -> None:
        if self._working:
            raise InterruptedTaskError


class Tasks:
    """Answers messages with the ClientApps of their runs.

    Parameters
    ----------
    apps : Apps
        Loads them.
    node_config : Mapping
        What the device says about itself.
    interrupter : Interrupter
        May end a task.

    Attributes
    ----------
    answered_at : float
        When the last reply was sent, on the monotonic clock.
    """

    def __init__(
        self, apps: Apps, node_config: Mapping[str, Value], interrupter: Interrupter
    ) -> None:
        self._apps = apps
        self._node_config = dict(node_config)
        self._interrupter = interrupter
        self.answered_at = float("-inf")
        self._states: dict[int, RecordDict] = {}
        self._count = 0

    def answer(self, link: Link, head: Message, fetch: Callable[[], Message]) -> None:
        """Fetch a message, compute the reply, send it, and log one line about it.

        Parameters
        ----------
        link : Link
            Where it came from.
        head : Message
            The message without its content.
        fetch : Callable
            Returns the whole message.
        """
        started = time.monotonic()
        self._count += 1
        run_id = head.metadata.run_id
        identify_process(run_id, link.node_id, self._count)
        label = head.metadata.message_type
        try:
            message = fetch()
            label += _number(message)
            with self._interrupter.working():
                reply = self._call(link, message)
        except InterruptedTaskError:
            reply = _error(head, NODE_UNAVAILABLE, "the device is shutting down")
        except fleet.ObjectPullError as error:
            reply = _error(head, MESSAGE_UNAVAILABLE, str(error))
        except RefusedAppError as error:
            reply = _error(head, error.code, str(error))
        computed = time.monotonic()
        try:
            link.send(reply, computed - started)
        except fleet.ObjectPushError as error:
            log.warning("run %d: %s: the reply could not be delivered: %s", run_id, label, error)
            # Whoever waits for it learns that it will not come only when this node has left.
            raise RejoinError("a reply could not be delivered") from None
        self.answered_at = time.monotonic()
        if reply.has_error():
            log.error("run %d: %s: answered with an error: %s", run_id, label, reply.error.reason)
        else:
            seconds = computed - started
            sent = self.answered_at - computed
            log.info("run %d: %s: done in %.2f s, sent in %.2f s", run_id, label, seconds, sent)

    def _call(self, link: Link, message: Message) -> Message:
        loaded = self._apps.of_run(message.metadata.run_id, link.run, link.bundle)
        series = loaded.series_id
        context = Context(
            run_id=message.metadata.run_id,
            node_id=link.node_id,
            node_config=dict(self._node_config),
            state=self._states.setdefault(series, RecordDict()),
            run_config=dict(loaded.config),
            series_id=series,
        )
        try:
            reply = loaded.app(message, context)
        except (Exception, SystemExit) as error:
            log.debug("The ClientApp raised an exception", exc_info=error)
            # Worded as Flower's own runtime does.
            reason = f"{type(error)}:<'{error}'>"
            return _error(message, CLIENT_APP_RAISED_EXCEPTION, reason)
        self._states[series] = context.state
        return reply


def _error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)


def _number(message: Message) -> str:
    """Return the number of a Raceme task, for the log."""
    record = message.content.get(CONFIG) if message.has_content() else None
    number = record.get(TASK) if isinstance(record, ConfigRecord) else None
    return f" task {number}" if isinstance(number, int) else ""
