"""Questions to clients before a round: label counts, losses, whatever a method must know first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from raceme.server.dispatch import InRounds, Moment

PATIENCE_SECONDS = 60.0
"""How long a round waits for answers."""


@dataclass
class Asking:
    """Who is asked before a round, and has not answered yet; part of a method's state.

    Attributes
    ----------
    open : dict[str, bool]
        Clients whose answers are awaited.
    before : int
        Number of rounds that were over when clients were asked last; −1 before the first time.
    until : float
        Until when answers are waited for, in seconds.
    """

    open: dict[str, bool] = field(default_factory=dict)
    before: int = -1
    until: float = 0.0

    def is_due(self, rounds: InRounds, moment: Moment, every: int = 1) -> bool:
        """Return whether a round is about to begin before which nobody was asked yet.

        Parameters
        ----------
        rounds : InRounds
            The method's policy.
        moment : Moment
            What the loop tells.
        every : int
            Rounds from one time to the next.
        """
        if rounds.state.running or moment.greeting:
            return False
        return self.before < 0 or rounds.state.number >= self.before + every

    def ask(self, clients: Iterable[str], rounds: InRounds, now: float) -> list[str]:
        """Note that clients are asked before the next round, and return them."""
        self.open = dict.fromkeys(clients, True)
        self.before, self.until = rounds.state.number, now + PATIENCE_SECONDS
        return list(self.open)

    def is_waiting(self, rounds: InRounds) -> bool:
        """Return whether the next round waits for answers."""
        return bool(self.open) and not rounds.state.running

    def close(self, client: str) -> None:
        """Wait no more for a client: it has answered, or never will."""
        self.open.pop(client, None)

    def wake_at(self) -> float:
        """Return until when answers are waited for; infinity if none are."""
        return self.until if self.open else math.inf

    def give_up(self) -> None:
        """Wait for nobody."""
        self.open = {}
