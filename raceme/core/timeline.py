"""Additions to Flower's Grid: a clock, waiting for replies, and capabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid


@runtime_checkable
class Timeline(Protocol):
    """A clock with waiting for replies, and capabilities of the grid.

    Other code tests for these capabilities, never for classes of grids.

    Attributes
    ----------
    is_virtual : bool
        Whether seconds are virtual: runs with the same seed are then identical, and results contain
        no wall time.
    free_evaluation : bool
        Whether evaluation takes no time, so that all clients can be evaluated at once.
    keeps_messages : bool
        Whether it was restored with its open messages, whose replies still arrive.
    """

    is_virtual: bool
    free_evaluation: bool
    keeps_messages: bool

    def now(self) -> float:
        """Return the time in seconds."""

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Wait for the next replies.

        Parameters
        ----------
        message_ids : Collection[str]
            Ids of the messages whose replies are wanted.
        until : float, optional
            Time at which to give up.

        Returns
        -------
        list[Message]
            At least one reply in order of arrival, or none: the deadline has come, or clients
            came online or went offline.
        """

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on the replies to some messages.

        Parameters
        ----------
        message_ids : Iterable[str]
            Ids of messages, answered or not; unknown ones are ignored.
        """


@runtime_checkable
class Forgetful(Protocol):
    """A grid with state per awaited reply."""

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on the replies to these messages."""


@runtime_checkable
class Resumable(Protocol):
    """A grid that checkpoints can save, with clock and open messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the run as a tree of plain values and arrays."""

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new grid of the same fleet."""


@runtime_checkable
class Foreseeing(Protocol):
    """A grid that knows future arrivals and speeds of its devices."""

    def arrivals_ahead(self) -> Mapping[int, bool]:
        """Map offline nodes that will come online to whether they were online before."""

    def expected_seconds(self, message: Message) -> float | None:
        """Return the mean time of a message's work on its node; None if there is no such node."""


@runtime_checkable
class Registering(Protocol):
    """A grid of registered devices, which notices changes of their keys."""

    def key_changes(self) -> Iterable[tuple[str, str]]:
        """Return the changes of devices' keys since the last call."""


class WallTimeline:
    """Wall clock and polling with back-off, for any Flower Grid.

    Parameters
    ----------
    grid : Grid
        Grid that is polled for replies.
    shortest, longest : float
        Bounds of the polling interval in seconds; it is reset by a reply and grows by half after
        each empty poll.
    clock, sleep : Callable
        Clock and sleep function, in seconds.
    start : float
        Current time of the run.
    """

    is_virtual = False
    free_evaluation = False
    keeps_messages = False

    def __init__(
        self,
        grid: Grid,
        shortest: float = 0.02,
        longest: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        start: float = 0.0,
    ) -> None:
        self._grid = grid
        self._shortest = shortest
        self._longest = longest
        self._clock = clock
        self._sleep = sleep
        self._start = clock() - start

    def now(self) -> float:
        """Return the seconds since the start, including those before a resumption."""
        return self._clock() - self._start

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Poll until a reply or the deadline."""
        pause = self._shortest
        while True:
            replies = list(self._grid.pull_messages(list(message_ids))) if message_ids else []
            if replies:
                return replies
            left = float("inf") if until is None else until - self.now()
            if left <= 0:
                return []
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, self._longest)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Ignore replies; Flower cannot withdraw messages."""
        if isinstance(self._grid, Forgetful):
            self._grid.forget(message_ids)


def push(grid: Grid, clock: Timeline, message: Message) -> str | None:
    """Send one message.

    On the wall clock its id is random: Flower derives ids from the message's content, of which only
    the time in microseconds is unpredictable, and accepts a reply from any node that names the id.

    Parameters
    ----------
    clock : Timeline
        The clock of the grid.

    Returns
    -------
    str or None
        Its id; None if the grid refused it.
    """
    if not clock.is_virtual:
        message.metadata.group_id = secrets.token_hex(16)
    return next(iter(grid.push_messages([message])), None)


def timeline_of(grid: Grid, start: float = 0.0) -> Timeline:
    """Return the grid itself if it has a clock, else a wall clock on it.

    Parameters
    ----------
    start : float
        Initial time of the wall clock, for a resumed run.
    """
    if isinstance(grid, Timeline):
        return grid
    # Imported late, as it imports HTTP clients, which simulations do not need.
    from raceme.flower.grid import prompt

    return WallTimeline(prompt(grid), start=start)


# -----------------------------------------------------------------------------
# Reports of a grid's messages and of nodes that come and go, for accounts of time and bytes.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to a node with its result. Times are seconds on the grid's clock.

    Attributes
    ----------
    number : int
        Index of the message in order of sending, from 0.
    node_id : int
        The receiving node.
    kind : str
        Flower's message type, e.g. ``"train"``.
    sent : float
        Time of sending.
    begun, ended : float
        Start and end of the device's work, transfers included; equal if it takes no time.
    answered : float
        Time of the reply or its failure; infinity if the run ended before.
    failure : str or None
        Reason of a missing or unusable reply, else None.
    bytes_down, bytes_up : int
        Sizes of message and reply.
    """

    number: int
    node_id: int
    kind: str
    sent: float
    begun: float
    ended: float
    answered: float
    failure: str | None
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, slots=True)
class Switched:
    """A node came online, or went offline."""

    node_id: int
    time: float
    online: bool


ExchangeObserver = Callable[[Exchange | Switched], None]
"""Receives each of them on completion, in order of time."""
