"""How long to wait before asking again."""

from __future__ import annotations

import random
from collections.abc import Callable


class Pause:
    """A pause that grows each time nothing has come, with jitter, and starts small again.

    Jitter keeps devices that lost their server in the same moment from coming back in one.

    Parameters
    ----------
    shortest, longest : float
        Bounds in seconds, before jitter.
    growth : float
        Factor from one pause to the next.
    jitter : float
        Largest relative deviation.
    uniform : Callable
        Source of chance: takes bounds, returns a number between them.
    """

    def __init__(
        self,
        shortest: float,
        longest: float,
        growth: float = 1.5,
        jitter: float = 0.2,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._growth = growth
        self._jitter = jitter
        self._uniform = uniform
        self._next = shortest

    def next(self) -> float:
        """Return the seconds to wait now."""
        seconds = self._next
        self._next = min(seconds * self._growth, self._longest)
        return seconds * self._uniform(1 - self._jitter, 1 + self._jitter)

    def reset(self) -> None:
        """Start with the shortest pause again."""
        self._next = self._shortest
