"""Ending a run from outside without losing anything: at the next moment when it can be saved."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from raceme.config.hang_up import heeds_hang_up

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
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> str:
        """Return why the run is to end; nothing if it is not."""
        return self._reason

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; elsewhere signals are someone else's.
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if number is not signal.SIGHUP or heeds_hang_up():
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told += number != signal.SIGHUP
        if self._told > 1:
            raise KeyboardInterrupt
        if not self._reason:
            self._reason = _REASONS[signal.Signals(number)]
            # The signal may have come in the middle of another line to the same file.
            with suppress(RuntimeError):
                log.warning("Stopping after this step; once more stops at once.")


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    What ends a session sends both, one right after the other, in any order: the second must not
    disturb the orderly end that the first began. A SIGTERM that comes later hurries it.
    """
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if heeds_hang_up() else [])]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    first: float | None = None

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is not None and (number == signal.SIGHUP or now < first + _TOGETHER_SECONDS):
            return
        first = now if first is None else first
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
