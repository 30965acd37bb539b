"""What a grid reports of its messages and of who is online: for accounts of time and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to a node and what became of it. Times are seconds on the grid's clock.

    Attributes
    ----------
    number : int
        Place of the message in the order of sending, from 0.
    node_id : int
        Whom it was sent to.
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
