"""A stop flag that is safe to set in a signal handler."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any


class StopSignal:
    """A stop flag for threads that, unlike ``threading.Event``, a signal handler may set.

    A handler interrupts the main thread, which may hold the lock of the event at that time.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()

    def set(self) -> None:
        """End all waits."""
        if not self._is_set:
            self._is_set = True
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Return whether a signal has asked the process to stop."""
        return self._is_set

    def wait_or(self, file: int) -> bool:
        """Wait for the flag or input; return whether to stop."""
        if not self._is_set:
            self._poll(file).poll()
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for the flag with a time limit; return whether to stop."""
        if not self._is_set and seconds > 0:
            # The byte stays in the pipe and ends every later wait.
            self._poll().poll(math.ceil(1000 * seconds))
        return self._is_set

    def _poll(self, *files: int) -> select.poll:
        # Unlike select, poll has no limit on descriptor numbers.
        poll = select.poll()
        for file in (self._reader, *files):
            poll.register(file, select.POLLIN)
        return poll


# -----------------------------------------------------------------------------
# Signals that end a process, or a run at its next consistent state.
# -----------------------------------------------------------------------------


def ends_at_hang_up() -> bool:
    """Return whether SIGHUP ends this process, which ``nohup`` prevents."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


@contextmanager
def handled_by(handler: Any, *numbers: int) -> Iterator[None]:
    """Set a handler for some signals within the context, or only restore them at its end.

    Does nothing outside the main thread, which alone may set handlers.

    Parameters
    ----------
    handler : Callable or signal.Handlers or None
        Handler for `signal.signal`; None only restores handlers set by others.
    numbers : int
        Signal numbers, e.g. ``signal.SIGTERM``.
    """
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers if handler is not None else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            if former is not None:
                signal.signal(number, former)


log = logging.getLogger("raceme.checkpoints")

_TOGETHER_SECONDS = 1.0
"""Interval in which signals count as one request."""
_REASONS = {
    signal.SIGINT: "interrupted by the user",
    signal.SIGTERM: "interrupted by SIGTERM",
    signal.SIGHUP: "interrupted by the end of its terminal (SIGHUP)",
}


class StopRequest:
    """Records SIGINT, SIGTERM and SIGHUP within the context.

    The second SIGINT or SIGTERM interrupts at once. SIGHUP does not count as one: a terminal that
    is closed may send it several times. If it is ignored, as under ``nohup``, it stays ignored.

    Called, it returns the reason to end the run; empty if there is none.

    Parameters
    ----------
    numbers : signal.Signals
        Signals to record; by default all three.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers or tuple(_REASONS)
        self._reason = ""
        self._count = 0
        self._handlers = ExitStack()

    def __call__(self) -> str:
        """Return the reason to end the run; empty if there is none."""
        return self._reason

    def __enter__(self) -> StopRequest:
        numbers = [n for n in self._numbers if n is not signal.SIGHUP or ends_at_hang_up()]
        self._handlers.enter_context(handled_by(self._on_signal, *numbers))
        return self

    def __exit__(self, *_raised: object) -> None:
        self._handlers.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += number != signal.SIGHUP
        if self._count > 1:
            raise KeyboardInterrupt
        if not self._reason:
            self._reason = _REASONS[signal.Signals(number)]
            # The signal may have interrupted a write to the same file.
            with suppress(RuntimeError):
                log.warning("Stopping after this step. Press Ctrl-C again to stop at once.")


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    The end of a session sends both in quick succession: the second must not disturb the orderly
    end. A later SIGTERM ends at once.
    """
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if ends_at_hang_up() else [])]
    first: float | None = None

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is not None and (number == signal.SIGHUP or now < first + _TOGETHER_SECONDS):
            return
        first = now if first is None else first
        raise KeyboardInterrupt

    with handled_by(interrupt, *numbers):
        yield


# -----------------------------------------------------------------------------
# The end of a process whose parent has ended.
# -----------------------------------------------------------------------------


_LOOK_SECONDS = 0.5


def end_with_parent(parent: int, grace: float) -> None:
    """End this process some time after its parent.

    A server app is told to stop when its SuperLink dies. If it waits for an answer uninterruptibly,
    it would go on and block its folder. Work since its last checkpoint is repeated.

    Parameters
    ----------
    parent : int
        Process to observe.
    grace : float
        Seconds for an orderly end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        log.warning("The SuperLink of this run has died: the run ends within %.0f s", grace)
        time.sleep(grace)
        log.error("The run stops; it can be resumed from its last checkpoint")
        logging.shutdown()
        # Not sys.exit, which would wait for threads that wait for the SuperLink.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
