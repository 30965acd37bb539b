"""What a Flower Grid lacks: a clock with a wait for replies, and what can be relied on there."""

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
    """A clock, the wait for replies, and what this clock and its grid are capable of.

    Code that needs to know asks for a capability, never for a class.

    Attributes
    ----------
    is_virtual : bool
        True where seconds are not those of the wall clock: two runs with one seed are identical,
        and nothing that the machine's own clock says belongs in their results.
    free_evaluation : bool
        True where an evaluation message costs no time on this clock, so that a sweep over all
        clients disturbs nothing.
    keeps_messages : bool
        True for one that was restored together with all its open messages: their replies can still
        be waited for.
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
            Ids of messages, answered already or not; unknown ones are ignored.
        """


@runtime_checkable
class Forgetful(Protocol):
    """A grid that keeps something for replies that it is waiting for."""

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on the replies to these messages."""


@runtime_checkable
class Resumable(Protocol):
    """A grid that a checkpoint can save, with its clock and its open messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the run continues: a tree of plain values and arrays."""

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new grid of the same fleet."""


@runtime_checkable
class Foreseeing(Protocol):
    """A grid that knows its devices: which will ever come online, and how fast they are."""

    def arrivals_ahead(self) -> Mapping[int, bool]:
        """Map offline nodes that will come online to whether they were online before."""

    def expected_seconds(self, message: Message) -> float | None:
        """Return the mean time of a message's work on its node; None if there is no such node."""


@runtime_checkable
class Registering(Protocol):
    """A grid that admits registered devices only, and sees their keys change."""

    def key_changes(self) -> Iterable[tuple[str, str]]:
        """Return the devices whose keys have changed since the last call, and how."""


class WallTimeline:
    """The wall clock, and polling with back-off, for any Grid of Flower's.

    Parameters
    ----------
    grid : Grid
        Grid that is polled for replies.
    shortest, longest : float
        Bounds in seconds of the pause between two polls; it starts at the shortest after every
        reply and grows by half each time nothing has come.
    clock, sleep : Callable
        Read the time and pause, both in seconds; tests pass their own.
    start : float
        What time it is now.
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
        """Return the seconds since this object was made, and of a resumed run those before."""
        return self._clock() - self._start

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Poll until a reply has come or the deadline has passed."""
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
        """Give up on replies that were announced; Flower has no way to take a message back."""
        if isinstance(self._grid, Forgetful):
            self._grid.forget(message_ids)


def push(grid: Grid, clock: Timeline, message: Message) -> str | None:
    """Send one message.

    On the wall clock its id cannot be guessed. Flower makes that of what is in the message, of
    which only the time to the microsecond is not known beforehand, and takes a reply from any node
    that names it, in the name of the node that was asked.

    Parameters
    ----------
    clock : Timeline
        The clock of the grid.

    Returns
    -------
    str or None
        Its id; None if the grid would not take it.
    """
    if not clock.is_virtual:
        message.metadata.group_id = secrets.token_hex(16)
    return next(iter(grid.push_messages([message])), None)


def timeline_of(grid: Grid, start: float = 0.0) -> Timeline:
    """Return the grid itself if it keeps a clock of its own, else the wall clock on it.

    Parameters
    ----------
    start : float
        What time it is on the wall clock, in a resumed run.
    """
    if isinstance(grid, Timeline):
        return grid
    # With it come HTTP clients, which a simulation has no use for.
    from raceme.flower.grid import prompt

    return WallTimeline(prompt(grid), start=start)


# -----------------------------------------------------------------------------
# What a grid reports of its messages and of nodes that come and go: for accounts of time and bytes.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to a node and what became of it. Times are seconds on the grid's clock.

    Attributes
    ----------
    number : int
        Place of the message in the order of sending, from 0.
    node_id : int
        The node that it was sent to.
    kind : str
        Flower's message type, e.g. ``"train"``.
    sent : float
        When the server sent it.
    begun, ended : float
        When its device was at work for it: with the transfers, from the download to the end of the
        upload. Equal where it costs no time.
    answered : float
        When the reply, or the news that there will be none, was there; infinity if the run ended
        before.
    failure : str or None
        Why there is no usable reply; None if there is one, or if there may yet be one.
    bytes_down, bytes_up : int
        Size of what was sent, and of the reply.
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
"""Called with each of them when it is over, in the order of time."""
