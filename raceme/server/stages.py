"""One policy after another: a round of pre-training, say, and then what the method is about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raceme.config.options import Value
from raceme.server.dispatch import Dispatch, Moment
from raceme.server.fleet import Client
from raceme.server.replies import Update
from raceme.server.work import Task, Work


class Then(Dispatch):
    """A policy until something has happened, and another one from then on.

    What is still open of the first when the second begins is for the second to take or to refuse.

    Parameters
    ----------
    first, second : Dispatch
        The policies.
    is_over : Callable
        Returns whether the first one's time is over; it follows from the method's state.
    """

    def __init__(self, first: Dispatch, second: Dispatch, is_over: Callable[[], bool]) -> None:
        self.first, self.second, self._is_over = first, second, is_over

    @property
    def current(self) -> Dispatch:
        """The policy whose time it is."""
        return self.second if self._is_over() else self.first

    @property
    def rounds(self) -> int | None:
        """Rounds or windows of the second policy that are over; None if it has none."""
        return self.second.rounds

    @property
    def given_up_because(self) -> str:  # type: ignore[override]
        """Why a task that `wake` gives up is of no use any more."""
        return self.current.given_up_because

    @property
    def rests_when_late(self) -> bool:  # type: ignore[override]
        """Whether a client whose task is given up rests before it is given work again."""
        return self.current.rests_when_late

    def choose(self, moment: Moment) -> Sequence[Client]:
        """Return the idle clients that are given work now."""
        return self.current.choose(moment)

    def settings(self, work: Work) -> Mapping[str, Value]:
        """Return what the message of some work says because of the policy."""
        return self.current.settings(work)

    def sent(self, task: Task, now: float) -> None:
        """Note that a client was sent its work."""
        self.current.sent(task, now)

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Take an update; return those that the method is to act on now."""
        return self.current.accept(update, now)

    def lost(self, task: Task, now: float) -> Sequence[Update]:
        """Note that work brought no update."""
        return self.current.lost(task, now)

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Note that a client went offline."""
        return self.current.left(client, now)

    def joined(self, client: str) -> None:
        """Note that a client is there."""
        self.current.joined(client)

    def wake_at(self) -> float:
        """Return when it wants to be woken."""
        return self.current.wake_at()

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Return the numbers of tasks to be given up, and updates to be acted on."""
        return self.current.wake(now)

    def invited(self, client: str) -> bool:
        """Return whether a client that was given work may wait with it, and answer meanwhile."""
        return self.current.invited(client)

    def hopeless(self) -> str:
        """Return why going on can bring nothing; empty as long as it may."""
        return self.current.hopeless()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.first.load_state_dict(tree["first"])
        self.second.load_state_dict(tree["second"])
