"""One message at a time: the ClientApp is called, or an error reply says why not."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from raceme.compat import (
    CLIENT_APP_RAISED_EXCEPTION,
    MESSAGE_UNAVAILABLE,
    NODE_UNAVAILABLE,
    fleet,
    identify_process,
)
from raceme.config import Value
from raceme.datasets.own_file import stamp_of
from raceme.deployment.apps import Apps, LoadedRun, RefusedAppError
from raceme.deployment.connection import Link, RejoinError
from raceme.deployment.invitations import Invitations, When
from raceme.protocol.messages import CONFIG, KIND, LOSSES, NUMBERS, ON, TASK, from_array

log = logging.getLogger("raceme.device")

_SHUTTING_DOWN = "the device is shutting down"


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
    invitations : Invitations, optional
        Holds those that the device does not accept at once; by default it accepts all.

    Attributes
    ----------
    answered_at : float
        When the last reply was sent, on the monotonic clock.
    """

    def __init__(
        self,
        apps: Apps,
        node_config: Mapping[str, Value],
        interrupter: Interrupter,
        invitations: Invitations | None = None,
    ) -> None:
        self._apps = apps
        self._node_config = dict(node_config)
        self._interrupter = interrupter
        self.invitations = invitations or Invitations(When())
        self.answered_at = float("-inf")
        self._states: dict[int, RecordDict] = {}
        self._folders: dict[int, str] = {}
        self._count = 0

    def answer(self, link: Link, head: Message, fetch: Callable[[], Message]) -> None:
        """Fetch a message; hold it, or compute the reply and send it. Log one line about it.

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
        self._identify(link, head.metadata.run_id)
        try:
            message = fetch()
        except fleet.ObjectPullError as error:
            self._send(link, head, _error(head, MESSAGE_UNAVAILABLE, str(error)), started)
            return
        if self.invitations.take(message):
            log.info("run %d: %s: invited", message.metadata.run_id, _label(message))
            return
        self._work(link, message, started)

    def follow_wish(self, link: Link) -> bool:
        """Do what the device wishes by now: look at its loss, or accept an invitation.

        Returns
        -------
        bool
            Whether there was anything to do.
        """
        held = self.invitations.due()
        if held is None:
            return False
        self._identify(link, held.run_id)
        stamp = stamp_of(self._node_config)
        if held.looks:
            self.invitations.looked(held, self._look(link, held.message), stamp)
            return True
        self.invitations.accept(held)
        reply = self._work(link, held.message, time.monotonic())
        if reply.has_error():
            self.invitations.failed(held.run_id)
        else:
            self.invitations.trained(held.run_id, _stated_loss(reply), stamp)
        return True

    def return_invitations(self, link: Link) -> None:
        """Say of what is still held that nothing will come of it."""
        for message in self.invitations.drop():
            self._identify(link, message.metadata.run_id)
            reply = _error(message, NODE_UNAVAILABLE, _SHUTTING_DOWN)
            self._send(link, message, reply, time.monotonic())

    def _identify(self, link: Link, run_id: int) -> None:
        """Say on whose behalf messages are made from now on."""
        self._count += 1
        identify_process(run_id, link.node_id, self._count)

    def _work(self, link: Link, message: Message, started: float) -> Message:
        """Compute the reply to a message and send it; return it."""
        try:
            with self._interrupter.working():
                reply = self._call(link, message)
        except InterruptedTaskError:
            reply = _error(message, NODE_UNAVAILABLE, _SHUTTING_DOWN)
        except RefusedAppError as error:
            reply = _error(message, error.code, str(error))
        self._send(link, message, reply, started)
        return reply

    def _send(self, link: Link, message: Message, reply: Message, started: float) -> None:
        """Send a reply, and log one line about it."""
        computed = time.monotonic()
        run_id, label = message.metadata.run_id, _label(message)
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

    def _look(self, link: Link, message: Message) -> float:
        """Return the loss of the model of a message on the device's present training samples.

        Raceme's ClientApp measures it there; another one by its own evaluation.

        Returns
        -------
        float
            NaN if it could not be measured; infinity if the ClientApp states none.
        """
        records = dict(message.content.items())
        settings = records.get(CONFIG)
        stated = dict(settings) if isinstance(settings, ConfigRecord) else {}
        records[CONFIG] = ConfigRecord({**stated, KIND: LOSSES, ON: "train"})
        look = Message(RecordDict(records), link.node_id, MessageType.EVALUATE)
        try:
            with self._interrupter.working():
                reply = self._call(link, look, keeps_state=False)
        except (InterruptedTaskError, RefusedAppError):
            return math.nan
        if reply.has_error():
            log.warning("the loss could not be measured: %s", reply.error.reason)
            return math.nan
        numbers = reply.content.array_records.get(NUMBERS)
        if numbers is None or LOSSES not in numbers:
            loss = _stated_loss(reply)
            return math.inf if math.isnan(loss) else loss
        # Of several models it would train the best.
        return float(from_array(numbers[LOSSES]).mean(axis=1).min())

    def _call(self, link: Link, message: Message, keeps_state: bool = True) -> Message:
        loaded = self._apps.of_run(message.metadata.run_id, link.run, link.bundle)
        series = loaded.series_id
        state = self._state_of(loaded)
        context = Context(
            run_id=message.metadata.run_id,
            node_id=link.node_id,
            node_config=dict(self._node_config),
            state=state if keeps_state else RecordDict(dict(state)),
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
        if keeps_state:
            self._states[series] = context.state
        return reply

    def _state_of(self, loaded: LoadedRun) -> RecordDict:
        """Return what this client keeps for a run; one that resumes takes up what was kept before.

        To Flower a run that resumes another is a new one. Its key ``resume`` names the folder of
        the one before, whose key ``out`` named it too, unless that was left to chance.
        """
        series, config = loaded.series_id, loaded.config
        if series not in self._states:
            resumed = str(config.get("resume", ""))
            former = [s for s, folder in self._folders.items() if folder in (resumed, "")]
            taken_up = self._states[former[-1]] if resumed and former else {}
            self._states[series] = RecordDict(dict(taken_up))
            self._folders[series] = resumed or str(config.get("out", ""))
        return self._states[series]


def _error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)


def _label(message: Message) -> str:
    """Return what a message is called in the log: its type, and the number of a Raceme task."""
    label = message.metadata.message_type
    record = message.content.get(CONFIG) if message.has_content() else None
    number = record.get(TASK) if isinstance(record, ConfigRecord) else None
    return f"{label} task {number}" if isinstance(number, int) else label


def _stated_loss(reply: Message) -> float:
    """Return the first metric that is called a loss; NaN if there is none."""
    records = reply.content.metric_records.values() if reply.has_content() else ()
    losses = (
        float(value)
        for record in records
        for name, value in record.items()
        if "loss" in name and isinstance(value, int | float)
    )
    return next(losses, math.nan)
