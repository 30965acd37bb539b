"""When clients' data move on to their next step: the key ``drift-at``."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from raceme.config.errors import UserError

Unit = Literal["seconds", "updates", "uploads", "rounds"]

_UNITS: dict[str, tuple[Unit, float]] = {
    "s": ("seconds", 1.0),
    "min": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
    "update": ("updates", 1.0),
    "updates": ("updates", 1.0),
    "upload": ("uploads", 1.0),
    "uploads": ("uploads", 1.0),
    "round": ("rounds", 1.0),
    "rounds": ("rounds", 1.0),
}
_MOMENT = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)?\s*(?P<unit>[a-z]+)")
_EXPECTED = (
    "write moments, e.g. '60s', '120s, 240s', '500 updates' or '5 uploads', or a period, e.g. "
    "'every 60s' or 'every round' (units: s, min, h, updates, uploads, rounds)"
)
_ROUNDING = 1e-9
"""0.3 s are three periods of 0.1 s, although 0.3 / 0.1 is below 3 in floating point."""


@dataclass(frozen=True)
class Schedule:
    """When the step of clients' data moves.

    Attributes
    ----------
    unit : str
        What is counted: ``"seconds"`` of the run's clock, ``"updates"`` of the run, ``"uploads"``
        of the client whose step is asked for, or ``"rounds"`` (or windows of time) that are over.
    moments : tuple[float, ...]
        Each of them moves the step by one; ascending.
    every : float
        Instead of moments, the period that moves the step; 0 for none.
    """

    unit: Unit
    moments: tuple[float, ...] = ()
    every: float = 0.0

    def step(self, time: float, updates: int, uploads: int, rounds: int | None = None) -> int:
        """Return the step of a client's data, from 0; it has moved *at* its moment.

        Parameters
        ----------
        time : float
            Seconds on the run's clock.
        updates : int
            Updates that the run has applied.
        uploads : int
            Those of them that came from the client.
        rounds : int, optional
            Rounds that are over; None for a method that has none.

        Raises
        ------
        UserError
            Rounds are to be counted, and there are none.
        """
        counts = {"seconds": time, "updates": updates, "uploads": uploads, "rounds": rounds}
        now = counts[self.unit]
        if now is None:
            raise UserError(
                "drift-at counts rounds, and the method works in none: count seconds, updates or "
                "uploads, or take a method that works in rounds, such as fedavg."
            )
        if self.every:
            return math.floor(now / self.every + _ROUNDING)
        return bisect_right(self.moments, now)

    def next_time(self, time: float) -> float:
        """Return the first moment after `time` at which time moves the step, in seconds.

        Infinity if there is none, or if it is not time that moves it.
        """
        if self.unit != "seconds":
            return math.inf
        if self.every:
            return (math.floor(time / self.every + _ROUNDING) + 1) * self.every
        later = bisect_right(self.moments, time)
        return self.moments[later] if later < len(self.moments) else math.inf

    @property
    def per_client(self) -> bool:
        """Whether each client has a step of its own: its own uploads are counted."""
        return self.unit == "uploads"

    @property
    def in_rounds(self) -> bool:
        """Whether it counts rounds: the next round meets the next data."""
        return self.unit == "rounds"


def parse_schedule(text: str) -> Schedule:
    """Read the key ``drift-at``.

    Parameters
    ----------
    text : str
        Moments of one unit, separated by commas, or one period: ``"120s, 240s"``,
        ``"500 updates"``, ``"every 3 uploads"``, ``"every round"``.

    Raises
    ------
    UserError
        It is neither.
    """
    plain = text.strip().lower()
    period = plain.startswith("every ")
    parts = [_moment(part, text, period) for part in plain.removeprefix("every ").split(",")]
    units = {unit for unit, _ in parts}
    amounts = tuple(amount for _, amount in parts)
    if len(units) > 1:
        raise UserError(
            f"drift-at '{text}' mixes {' and '.join(sorted(units))}: count in one of them."
        )
    if period and len(parts) > 1:
        raise UserError(f"drift-at '{text}' has more than one period: {_EXPECTED}.")
    if any(later <= earlier for earlier, later in pairwise(amounts)):
        raise UserError(f"drift-at '{text}' must name later and later moments.")
    unit = parts[0][0]
    return Schedule(unit, every=amounts[0]) if period else Schedule(unit, amounts)


def _moment(part: str, text: str, period: bool) -> tuple[Unit, float]:
    """Read a number with its unit; a period may leave out the number 1."""
    match = _MOMENT.fullmatch(part.strip())
    if match is None or match["unit"] not in _UNITS or (match["number"] is None and not period):
        raise UserError(f"drift-at '{text}' cannot be read: {_EXPECTED}.")
    unit, scale = _UNITS[match["unit"]]
    amount = float(match["number"] or 1) * scale
    if amount <= 0 or (unit != "seconds" and not amount.is_integer()):
        kind = "a number above 0" if unit == "seconds" else "a whole number from 1"
        raise UserError(f"drift-at '{text}': {part.strip()} must be {kind} of {unit}.")
    return unit, amount
