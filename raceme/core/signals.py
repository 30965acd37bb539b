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
    """Tells all threads to stop; unlike ``threading.Event`` it may be set by a signal handler.

    A handler runs between any two instructions of the main thread, which may just then hold the
    lock of the event that the handler wants to set.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()

    def set(self) -> None:
        """Let all waits end."""
        if not self._is_set:
            self._is_set = True
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Return whether a signal has asked the process to stop."""
        return self._is_set

    def wait_or(self, file: int) -> bool:
        """Wait for it, or until there is something to read; return whether it is time to stop."""
        if not self._is_set:
            self._poll(file).poll()
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for it, at most this long; return whether it is time to stop."""
        if not self._is_set and seconds > 0:
            # The byte stays in the pipe: it wakes every later wait as well.
            self._poll().poll(math.ceil(1000 * seconds))
        return self._is_set

    def _poll(self, *files: int) -> select.poll:
        # Unlike select, it takes files of any number: a process may have more than a thousand.
        poll = select.poll()
        for file in (self._reader, *files):
            poll.register(file, select.POLLIN)
        return poll


# -----------------------------------------------------------------------------
# Signals that end a process, or a run without losing anything: at the next moment it can be saved.
# -----------------------------------------------------------------------------


def heeds_hang_up() -> bool:
    """Return whether the end of its terminal ends this process: ``nohup`` has it ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


@contextmanager
def handled_by(handler: Any, *numbers: int) -> Iterator[None]:
    """Let a handler have some signals meanwhile, or leave them as they are and put them back later.

    Only the main thread may set handlers: in another one nothing is done.

    Parameters
    ----------
    handler : Callable or signal.Handlers or None
        As `signal.signal` takes it; None sets none, for others that do so meanwhile.
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
"""Signals that come within so long are one request."""
_REASONS = {
    signal.SIGINT: "interrupted by the user",
    signal.SIGTERM: "interrupted by SIGTERM",
    signal.SIGHUP: "interrupted by the end of its terminal (SIGHUP)",
}


class StopRequest:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered.

    The second SIGINT or SIGTERM interrupts at once. SIGHUP does not count as one: a terminal that
    is closed may send it several times. Where it is ignored, as under ``nohup``, it stays so.

    Called, it returns why the run is to end; nothing if it is not.

    Parameters
    ----------
    numbers : signal.Signals
        The signals to note; all three if none is given.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers or tuple(_REASONS)
        self._reason = ""
        self._told = 0
        self._handlers = ExitStack()

    def __call__(self) -> str:
        """Return why the run is to end; nothing if it is not."""
        return self._reason

    def __enter__(self) -> StopRequest:
        numbers = [n for n in self._numbers if n is not signal.SIGHUP or heeds_hang_up()]
        self._handlers.enter_context(handled_by(self._on_signal, *numbers))
        return self

    def __exit__(self, *_raised: object) -> None:
        self._handlers.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told += number != signal.SIGHUP
        if self._told > 1:
            raise KeyboardInterrupt
        if not self._reason:
            self._reason = _REASONS[signal.Signals(number)]
            # The signal may have come in the middle of another line to the same file.
            with suppress(RuntimeError):
                log.warning("Stopping after this step. Press Ctrl-C again to stop at once.")


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    What ends a session sends both, one right after the other, in any order: the second must not
    disturb the orderly end that the first began. A SIGTERM that comes later hurries it.
    """
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if heeds_hang_up() else [])]
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
# The end of a process that has outlived the one it works for.
# -----------------------------------------------------------------------------


_LOOK_SECONDS = 0.5


def end_with_parent(parent: int, grace: float) -> None:
    """End this process a while after its parent, whatever it waits for.

    A server app is told to stop when its SuperLink dies. But it may be waiting for an answer that
    will never come, deaf to signals, and its folder would be taken for ever. What it has done since
    its last checkpoint is done again.

    Parameters
    ----------
    parent : int
        The process to look at.
    grace : float
        Seconds for an orderly end, should the SuperLink be back by then.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        log.warning("The SuperLink of this run has died: the run ends within %.0f s", grace)
        time.sleep(grace)
        log.error("The run stops; it can be resumed from its last checkpoint")
        logging.shutdown()
        # Not sys.exit: other threads wait for the SuperLink, and would have to be waited for.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
