"""Ending a run from outside without losing anything: at the next moment when it can be saved."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("raceme.checkpoints")

_REASONS = {
    signal.SIGINT: "interrupted by the user",
    signal.SIGTERM: "interrupted by SIGTERM",
}


class StopRequest:
    """Notes SIGINT and SIGTERM while it is entered; the second of them interrupts at once.

    Called, it returns why the run is to end; nothing if it is not.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> str:
        """Return why the run is to end; nothing if it is not."""
        return self._reason

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; elsewhere signals are someone else's.
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
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
        if self._reason:
            raise KeyboardInterrupt
        self._reason = _REASONS[signal.Signals(number)]
        log.warning("Stopping after this step; once more stops at once.")
