"""An event queue on virtual time. It knows nothing of what is simulated."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

Key = str | int
"""What an event is about, in the words of whoever schedules it."""


class EventQueue:
    """A clock, and the events to come in order of time.

    Events are plain values, not callbacks, so that the queue can be saved. Equal times are ordered
    by priority (the lower number first), then by the order of scheduling: one order of calls has
    one order of events.

    Attributes
    ----------
    now : float
        The time in seconds: that of the last event popped, or of the last :meth:`advance`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # Heap of (time, priority, number, key). A cancelled event stays in it until it is the
        # first one: to search the heap for it would take longer.
        self._heap: list[tuple[float, int, int, Key]] = []
        self._cancelled: set[int] = set()
        self._scheduled = 0

    def schedule(self, time: float, priority: int, key: Key) -> int:
        """Schedule an event.

        Parameters
        ----------
        time : float
            When it happens, in seconds.
        priority : int
            Its place among events of the same time.
        key : str or int
            What :meth:`pop` returns.

        Returns
        -------
        int
            The event's number, for :meth:`cancel`.
        """
        number = self._scheduled
        self._scheduled += 1
        heapq.heappush(self._heap, (time, priority, number, key))
        return number

    def cancel(self, number: int) -> None:
        """Cancel an event that has not happened yet: it neither happens nor moves the clock."""
        self._cancelled.add(number)

    def __len__(self) -> int:
        """Return the number of events to come."""
        return len(self._heap) - len(self._cancelled)

    def next_time(self) -> float:
        """Return the time of the next event.

        Raises
        ------
        IndexError
            There is none.
        """
        while self._heap[0][2] in self._cancelled:
            self._cancelled.remove(heapq.heappop(self._heap)[2])
        return self._heap[0][0]

    def pop(self) -> tuple[int, Key]:
        """Move the clock to the next event, and return its priority and its key.

        Raises
        ------
        IndexError
            There is none.
        """
        self.next_time()
        time, priority, _, key = heapq.heappop(self._heap)
        self.advance(time)
        return priority, key

    def advance(self, time: float) -> None:
        """Move the clock to a time, never back."""
        self.now = max(self.now, time)

    def state_dict(self) -> dict[str, Any]:
        """Return clock and events as a tree of plain values."""
        return {
            "now": self.now,
            "scheduled": self._scheduled,
            "events": [event for event in self._heap if event[2] not in self._cancelled],
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.now, self._scheduled = tree["now"], tree["scheduled"]
        self._heap = [(time, priority, n, key) for time, priority, n, key in tree["events"]]
        heapq.heapify(self._heap)
        self._cancelled = set()
