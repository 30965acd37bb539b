"""A wall clock that is set while a server runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("raceme.serve")

_LEAST_SECONDS = 10.0
"""What clocks are corrected by without a jump comes in smaller steps."""


class ClockJumps:
    """Compares the wall clock, by which Flower knows who is online, with one that never jumps.

    Parameters
    ----------
    wall, steady : Callable
        The clocks, in seconds; replaceable for tests.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._between = wall() - steady()

    def seconds(self) -> float:
        """Return by how much the wall clock has jumped since it was asked last; 0 if it has not."""
        between = self._wall() - self._steady()
        jump = between - self._between
        if abs(jump) < _LEAST_SECONDS:
            return 0.0
        self._between = between
        log.warning(
            "The clock has been set %s by %.0f s, or the host has slept: who was online still is, "
            "and no message expires for that. Devices with a clock of their own that differs by "
            "more than 5 minutes are refused",
            "forward" if jump > 0 else "back",
            abs(jump),
        )
        return jump
