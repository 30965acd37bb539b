"""Questions to clients before a round: label counts, losses, whatever a method must know first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from raceme.protocol.messages import TRAINING
from raceme.server.work import Task


@dataclass
class Asking:
    """Who is asked before a round, and has not answered yet.

    Attributes
    ----------
    unasked : dict[str, bool]
        Clients that are to be asked.
    awaited : dict[str, int]
        Clients that have been asked, to the number of the task.
    before : int
        Number of rounds that had begun when clients were asked last; −1 before the first time.
    until : float
        Until when answers are waited for, in seconds.
    held_until : float
        Until when clients that are busy are waited for before anybody is asked; 0: nobody is.
    """

    unasked: dict[str, bool] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    before: int = -1
    until: float = 0.0
    held_until: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether anybody is waited for."""
        return bool(self.unasked or self.awaited)

    def is_due(self, rounds: int, every: int) -> bool:
        """Return whether clients are to be asked: so many rounds since the last time."""
        return self.before < 0 or rounds >= self.before + every

    def holds(self, now: float, patience: float) -> bool:
        """Return whether to wait for clients that are busy: so many seconds at the most."""
        self.held_until = self.held_until or now + patience
        return now < self.held_until

    def begin(self, clients: Iterable[str], rounds: int, until: float) -> None:
        """Wait for the answers of some clients, until some time."""
        self.unasked, self.awaited = dict.fromkeys(clients, True), {}
        self.before, self.until, self.held_until = rounds, until, 0.0

    def sent(self, task: Task) -> None:
        """Note that a client was asked."""
        if task.kind not in TRAINING and self.unasked.pop(task.client, False):
            self.awaited[task.client] = task.number

    def close(self, task: Task) -> None:
        """Wait no more for an answer: it has come, or never will."""
        if self.awaited.get(task.client) == task.number:
            del self.awaited[task.client]

    def drop(self, client: str) -> None:
        """Wait no more for a client: it is gone."""
        self.unasked.pop(client, None)
        self.awaited.pop(client, None)

    def wake_at(self) -> float:
        """Return until when answers are waited for; infinity if none are."""
        if self.is_open:
            return self.until
        return self.held_until or math.inf

    def give_up(self) -> None:
        """Wait for nobody."""
        self.unasked, self.awaited = {}, {}
