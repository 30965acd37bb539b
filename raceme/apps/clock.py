"""The clock that a ServerApp reads: Python's own functions of time, on virtual time.

While the ServerApp runs, `time.sleep` moves the virtual clock, and `time.time`, `time.monotonic`
and `time.perf_counter` read it, for code of the app itself and of Flower's strategies. All others
(a library that waits for a socket, a ClientApp that measures itself) have the machine's clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raceme.apps.grid import AppGrid
from raceme.apps.halted import Halted
from raceme.compat import app as compat

EPOCH = 1_767_225_600.0
"""What `time.time()` says when the simulation begins: 2026-01-01, 00:00 UTC, in every run."""

_NANOSECONDS = 1_000_000_000
_CLOCKS = {
    "time": EPOCH,
    "monotonic": 0.0,
    "perf_counter": 0.0,
}
"""Functions that tell the time, and what they say at the beginning."""


class AppClock:
    """Python's functions of time for one ServerApp.

    Parameters
    ----------
    folders : Sequence[Path]
        Where the app's own code is.

    Attributes
    ----------
    grid : AppGrid or None
        Keeps the virtual clock; until there is one, everybody has the machine's.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.grid: AppGrid | None = None
        self._folders = tuple(f"{folder}/" for folder in (*folders, compat.STRATEGIES_FOLDER))
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the functions in the place of Python's.

        What imports them meanwhile by name keeps them; afterwards they do what Python's do.
        """
        before = {name: getattr(time, name) for name in ("sleep", *_names())}
        replaced: dict[str, Callable[..., Any]] = {"sleep": self._sleep(time.sleep)}
        for name, start in _CLOCKS.items():
            replaced[name] = self._clock(before[name], start, 1)
            nanoseconds = f"{name}_ns"
            replaced[nanoseconds] = self._clock(before[nanoseconds], start, _NANOSECONDS)
        self._is_running = True
        try:
            with compat.strategies_pause(self._pause_for_nodes):
                _put(replaced)
                yield
        finally:
            self._is_running = False
            _put(before)

    def _clock(self, real: Callable[[], Any], start: float, factor: int) -> Callable[[], Any]:
        """Make a function that tells the virtual time to the app, and the real one to others."""

        def virtual() -> Any:
            grid = self._asked_by_app()
            if grid is None:
                return real()
            now = start + grid.now()
            return now if factor == 1 else round(now * factor)

        return virtual

    def _sleep(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            grid = self._asked_by_app()
            if grid is None:
                real(seconds)
            elif seconds < 0:
                raise ValueError("sleep length must be non-negative")
            else:
                grid.pause(seconds)

        return sleep

    def _asked_by_app(self) -> AppGrid | None:
        """Return the grid if the ServerApp has called the function that calls this.

        A ClientApp has the same folder, but is called by the grid.
        """
        grid = self.grid
        if grid is None or grid.is_working or threading.get_ident() != grid.thread:
            return None
        if not self._is_running:
            return None
        return grid if sys._getframe(2).f_code.co_filename.startswith(self._folders) else None

    def _pause_for_nodes(self, seconds: float) -> None:
        """Pause while a strategy waits for nodes to connect.

        Raises
        ------
        Halted
            None ever will.
        """
        grid = self.grid
        assert grid is not None, "a strategy has been given one"
        if grid.is_still:
            online = len(list(grid.get_node_ids()))
            raise Halted(
                "the ServerApp would never return: its strategy waits for more clients than the "
                f"{online} that there are. Try more --clients, or a smaller min_available_nodes, "
                "min_train_nodes or min_evaluate_nodes"
            )
        grid.pause(seconds)


def _names() -> list[str]:
    return [name for clock in _CLOCKS for name in (clock, f"{clock}_ns")]


def _put(functions: dict[str, Callable[..., Any]]) -> None:
    """Set functions of Python's module."""
    for name, function in functions.items():
        setattr(time, name, function)
