"""Windows: time is cut into stretches in which some clients work again and again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import ClassVar

import numpy as np

from raceme.server.dispatch import Dispatch, Moment
from raceme.server.fleet import Client
from raceme.server.replies import InvalidReplyError, Update
from raceme.server.work import Task

log = getLogger("raceme")

_HOPELESS_WINDOWS = 3
"""After so many windows in which work was given and nobody was done, nobody ever will be."""

Members = Callable[[Sequence[Client], np.random.Generator], Sequence[Client]]
"""Chooses who takes part in a window: from the online clients, with a generator."""
GroupOf = Callable[[str], int | None]
"""Returns the group in which a client waits for others; None for a client without one."""
Idled = Callable[[str, int, float], None]
"""Told, when a window ends, who waited in it: client, number of the window, seconds."""


@dataclass
class WindowState:
    """A window of time.

    Attributes
    ----------
    number : int
        Number of the window, from 1; 0 before the first.
    ends_at : float
        When it ends; 0 before the first.
    members : dict[str, bool]
        Who takes part in it.
    open : dict[str, int]
        Members that work, to the number of their task.
    gathering : dict[int, bool]
        Groups whose members wait for each other, to update together.
    joint : dict[int, int]
        Tasks of updates that are made together, to their group.
    held : list[Update]
        Updates that came back and wait for those of the same group.
    waiting : dict[str, float]
        Since when a member has waited for others.
    waited : dict[str, float]
        How long it has waited in this window before that, in seconds.
    done : int
        Updates of this window so far.
    fruitless : int
        Windows in a row, up to the last, in which nobody was done before the end.
    """

    number: int = 0
    ends_at: float = 0.0
    members: dict[str, bool] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    gathering: dict[int, bool] = field(default_factory=dict)
    joint: dict[int, int] = field(default_factory=dict)
    held: list[Update] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    done: int = 0
    fruitless: int = 0


def _alone(client: str) -> int | None:
    return None


def _ignore(client: str, window: int, seconds: float) -> None:
    """Let nobody know."""


class InWindows(Dispatch):
    """Time is cut into windows; in each, some clients work again and again until it ends.

    A client's budget in a window is its length: what is not back by its end is given up. Updates
    are acted on at once, but for those that a group makes together: its members first wait until
    all of them are free, then all train, and what they bring is acted on when the last is back, or
    when the window ends.

    Parameters
    ----------
    budget : float
        Length of a window in seconds.
    members : Callable
        Chooses who takes part in a window: from the online clients, with a generator.
    group_of : Callable, optional
        Returns the group in which a client waits for others.
    together : bool
        All updates are made together; else those of a group after :meth:`gather`.
    idled : Callable, optional
        Told at the end of each window how long each of its members waited for others.
    """

    state: WindowState
    given_up_because: ClassVar[str] = "its window ended first"
    rests_when_late: ClassVar[bool] = False

    def __init__(
        self,
        budget: float,
        members: Members,
        group_of: GroupOf = _alone,
        together: bool = False,
        idled: Idled = _ignore,
    ) -> None:
        self._budget, self._members, self._group_of = budget, members, group_of
        self._together, self._idled = together, idled
        self.state = WindowState()

    # What a method may say and ask.

    def gather(self, group: int) -> None:
        """Let the members of a group make their next updates together."""
        self.state.gathering[group] = True

    def is_joint(self, update: Update) -> bool:
        """Return whether an update that was released is one of several made together."""
        return update.task.number in self.state.joint

    @property
    def rounds(self) -> int:
        """Windows that are over."""
        return self.state.number - bool(self.state.members)

    # Who works.

    def choose(self, moment: Moment) -> Sequence[Client]:
        """Return the window's members that are to work; begin a window if none is under way."""
        state = self.state
        if moment.now >= state.ends_at and not moment.greeting:
            online = moment.fleet.online()
            if online:
                chosen = self._members(online, moment.rng)
                number, fruitless = state.number + 1, state.fruitless
                self.state = state = WindowState(
                    number,
                    moment.now + self._budget,
                    {client.client_id: True for client in chosen},
                    fruitless=fruitless,
                )
        ready = [c for c in moment.idle.ready(moment.now) if c.client_id in state.members]
        together: dict[int, list[Client]] = {}
        alone = []
        for client in ready:
            group = self._group_of(client.client_id)
            if group is None or not (self._gathers(group) or self._is_under_way(group)):
                self._end_wait(client.client_id, moment.now)
                alone.append(client)
            else:
                state.waiting.setdefault(client.client_id, moment.now)
                together.setdefault(group, []).append(client)
        return [*alone, *self._that_start(together, moment.now)]

    def _that_start(self, together: dict[int, list[Client]], now: float) -> list[Client]:
        """Return the members of groups of which all are free now."""
        state, starting = self.state, []
        busy = {self._group_of(client) for client in state.open}
        for group, clients in together.items():
            if group in busy or self._is_under_way(group):
                continue
            for client in clients:
                self._end_wait(client.client_id, now)
            starting += clients
        return starting

    def sent(self, task: Task, now: float) -> None:
        """Note who works, and whether it does so together with others."""
        self.state.open[task.client] = task.number
        group = self._group_of(task.client)
        if group is not None and self._gathers(group):
            self.state.joint[task.number] = group

    # What came back.

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Act on an update of this window at once, unless its group makes updates together."""
        state, client = self.state, update.task.client
        if state.open.get(client) != update.task.number:
            raise InvalidReplyError("it came after its window was over")
        del state.open[client]
        state.done += 1
        group = state.joint.get(update.task.number)
        if group is None:
            return [update]
        state.held.append(update)
        state.waiting[client] = now
        return self._released(group)

    def lost(self, task: Task, now: float) -> Sequence[Update]:
        """Note that a member has nothing to do."""
        state = self.state
        if state.open.get(task.client) != task.number:
            return []
        del state.open[task.client]
        group = state.joint.pop(task.number, None)
        return [] if group is None else self._released(group)

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Wait no more for a client that is gone."""
        state = self.state
        self._end_wait(client, now)
        number = state.open.pop(client, None)
        group = None if number is None else state.joint.pop(number, None)
        return [] if group is None else self._released(group)

    def wake_at(self) -> float:
        """Return the end of the window."""
        return self.state.ends_at if self.state.members else math.inf

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """End the window: what is not back by now is not counted."""
        state = self.state
        late, released = list(state.open.values()), state.held
        state.fruitless = state.fruitless + 1 if late and not state.done else 0
        if state.fruitless == 1:
            log.warning(
                "Nobody was done within window %d: is the budget of %g s too short?",
                state.number,
                self._budget,
            )
        for client in list(state.waiting):
            self._end_wait(client, now)
        for client in state.members:
            self._idled(client, state.number, state.waited.get(client, 0.0))
        # Which updates were made together is still asked of those that are released here.
        state.members, state.open, state.held, state.gathering = {}, {}, [], {}
        return late, released

    def hopeless(self) -> str:
        """Return that the budget is too short, when nobody was ever done within it."""
        if self.state.fruitless < _HOPELESS_WINDOWS:
            return ""
        return (
            f"no update fits into the budget of {self._budget:g} s: in {self.state.fruitless} "
            "windows in a row nobody was done before the end: it must be longer"
        )

    # Groups that update together.

    def _gathers(self, group: int) -> bool:
        """Return whether a group's next updates are made together."""
        return self._together or group in self.state.gathering

    def _is_under_way(self, group: int) -> bool:
        """Return whether members of a group are making updates together."""
        state = self.state
        return any(state.joint.get(number) == group for number in state.open.values())

    def _released(self, group: int) -> list[Update]:
        """Return the updates that a group has made together, if all are back."""
        state = self.state
        if self._is_under_way(group):
            return []
        released = [u for u in state.held if state.joint[u.task.number] == group]
        state.held = [u for u in state.held if state.joint[u.task.number] != group]
        state.gathering.pop(group, None)
        return released

    def _end_wait(self, client: str, now: float) -> None:
        """Count how long a client has waited, if it has."""
        state = self.state
        if client in state.waiting:
            waited = now - state.waiting.pop(client)
            state.waited[client] = state.waited.get(client, 0.0) + waited
