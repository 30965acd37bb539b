"""Rounds as Flower's users count them, also for methods that work in none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raceme.server.drop_in.arguments import FlowerArguments
from raceme.server.fleet import Client
from raceme.server.interface import Questions
from raceme.server.picking import sample
from raceme.server.plan import Plan
from raceme.server.progress import Progress


class Rounds:
    """Counts the rounds of a run.

    A method that works in rounds, or in windows, counts its own. Of another one a round is as many
    updates as clients take part: those that train at a time.

    Parameters
    ----------
    method : Questions
        Whose rounds.
    arguments : FlowerArguments
        Say how many clients take part.
    is_over : Callable
        Called with the number of each round that is over.

    Attributes
    ----------
    over : int
        Rounds that are over.
    """

    def __init__(
        self, method: Questions, arguments: FlowerArguments, is_over: Callable[[int], None]
    ) -> None:
        self._method, self._arguments, self._is_over = method, arguments, is_over
        self._before = method.dispatch.rounds or 0
        self._ended_at = method.progress.updates
        self._end = 0
        self.over = 0

    @property
    def are_of_method(self) -> bool:
        """Whether the method works in rounds itself."""
        return self._method.dispatch.rounds is not None

    @property
    def number(self) -> int:
        """Number of the round that is under way, or else of the last one; 0 before any update."""
        return self.over + (self._method.progress.updates > self._ended_at)

    def look(self) -> None:
        """Notice the rounds that are over by now."""
        updates = self._method.progress.updates
        own = self._method.dispatch.rounds
        if own is not None:
            while self.over < own - self._before:
                self._count(updates)
            return
        if updates == self._ended_at:
            # Who takes part in the first round is known when somebody has answered.
            return
        taking_part = max(1, self._arguments.trained(len(self._method.progress.fleet.by_node)))
        self._end = self._end or self._ended_at + taking_part
        while updates >= self._end:
            self._count(self._end)
            self._end += taking_part

    def _count(self, updates: int) -> None:
        self.over += 1
        self._ended_at = updates
        self._is_over(self.over)


@dataclass(frozen=True, eq=False)
class FlowerPlan(Plan):
    """A plan by rounds: when to stop, when to test, and with whom.

    Attributes
    ----------
    method : Questions
        Whose.
    arguments : FlowerArguments
        Say how many clients train and test.
    num_rounds : int
        Stop after so many; 0: another limit ends the run.
    rounds : Rounds
        Counts them.
    test_begins : Callable
        Called with the number of the round whose models are tested now.
    after_round : Callable
        Called when a round may be over, and before the first one.
    can_test : Callable
        Whether clients are able to test models.
    rng : numpy.random.Generator
        Draws those who test.
    tested : list[int]
        Numbers of the rounds that were tested.
    """

    method: Questions = field(kw_only=True)
    arguments: FlowerArguments = field(kw_only=True)
    num_rounds: int = field(kw_only=True)
    rounds: Rounds = field(kw_only=True)
    test_begins: Callable[[int], None] = field(kw_only=True)
    after_round: Callable[[], None] = field(kw_only=True)
    can_test: Callable[[], bool] = field(kw_only=True)
    rng: np.random.Generator = field(kw_only=True)
    tested: list[int] = field(default_factory=list, kw_only=True)

    def places(self, online: int) -> int | None:
        """Return how many clients train at a time; None stands for all."""
        taking_part = self.arguments.trained(online)
        return None if self.rounds.are_of_method or taking_part >= online else taking_part

    def limit(self, updates: int, num_updates: int, now: float, rounds: int | None = None) -> str:
        """Return which limit is reached, in words; empty if none is."""
        self.rounds.look()
        self.after_round()
        if 0 < self.num_rounds <= self.rounds.over:
            one = self.num_rounds == 1
            return "1 round is over" if one else f"{self.num_rounds} rounds are over"
        return super().limit(updates, num_updates, now, rounds)

    def is_tested(self, progress: Progress, rounds: int | None) -> bool:
        """Return whether the next evaluation is due: after each round that changed a model."""
        self.rounds.look()
        last = self.tested[-1] if self.tested else 0
        return progress.updates > progress.evaluated_at and self.rounds.over > last

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return who tests models now; as with Flower, nobody before the first round."""
        number = self.rounds.over
        if not number or number in self.tested:
            # Before the first round, or what comes after the last whole one, at the end.
            number = self.rounds.number
        self.tested.append(number)
        self.test_begins(number)
        count = self.arguments.tested(len(online)) if number and self.can_test() else 0
        return sample(online, count, self.rng) if count else []
