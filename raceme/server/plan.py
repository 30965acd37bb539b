"""When to evaluate, how many clients to keep busy, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol
from zlib import crc32

from raceme.protocol.events import Evaluated
from raceme.server.fleet import Client
from raceme.server.progress import Progress


class StepSchedule(Protocol):
    """When clients' data move on to the next step.

    Attributes
    ----------
    per_client : bool
        Whether it counts each client's own uploads.
    in_rounds : bool
        Whether it counts rounds.
    """

    @property
    def per_client(self) -> bool:
        """Whether it counts each client's own uploads."""
        ...

    @property
    def in_rounds(self) -> bool:
        """Whether it counts rounds."""
        ...

    def step(self, time: float, updates: int, uploads: int, rounds: int | None) -> int:
        """Return the step at a time, after so many updates, uploads of the client, and rounds."""
        ...

    def next_time(self, time: float) -> float:
        """Return when time moves the step next; infinity if it never does."""
        ...


@dataclass(frozen=True)
class Plan:
    """Limits and schedule of a run, the same for every method.

    Attributes
    ----------
    max_time : float or None
        Stop at this time on the grid's clock, in seconds.
    target_accuracy : float or None
        Mean client accuracy to look out for, or of a regression the mean absolute error.
    stop_at_target : bool
        Whether reaching it ends the run.
    eval_every : int
        Updates between two evaluations.
    eval_rounds : int
        Rounds or windows between two evaluations, of a method that has them; 0: `eval_every`.
    eval_steps : bool
        Evaluate also when all clients' data have moved on, before anybody trains on them.
    eval_tasks : bool
        Test on the data of every step so far whenever a step is over, and at the end.
    eval_clients : int
        Clients that test the models at an evaluation; 0: all that are online.
    concurrency : int
        Clients that train at a time; 0 means all that are online.
    drift : StepSchedule or None
        When clients' data change; None if they never do.
    max_rounds : int or None
        Stop after so many rounds or windows, of a method that has them.
    highest_score : float
        Highest score of an upload that a client can state: 1 of accuracies, infinity of errors.
    planned_updates : int
        Client updates that a run without a limit on them is expected to come to, for schedules that
        depend on its length.
    """

    max_time: float | None = None
    target_accuracy: float | None = None
    stop_at_target: bool = True
    eval_every: int = 20
    eval_rounds: int = 0
    eval_steps: bool = False
    eval_tasks: bool = False
    eval_clients: int = 0
    concurrency: int = 0
    drift: StepSchedule | None = None
    max_rounds: int | None = None
    highest_score: float = 1.0
    planned_updates: int = 0

    @property
    def deadline(self) -> float:
        """Time at which to stop; infinity without a limit."""
        return math.inf if self.max_time is None else self.max_time

    def limit(self, updates: int, num_updates: int, now: float, rounds: int | None = None) -> str:
        """Return which limit is reached, in words; empty if none is.

        Parameters
        ----------
        updates, num_updates : int
            Updates applied, and their limit; 0 stands for none.
        now : float
            The time.
        rounds : int or None
            Rounds or windows that are over; None for a method without them.
        """
        if 0 < num_updates <= updates:
            return f"{num_updates} updates were applied"
        if self.max_rounds is not None and rounds is not None and rounds >= self.max_rounds:
            one = self.max_rounds == 1
            return "1 round is over" if one else f"{self.max_rounds} rounds are over"
        if now >= self.deadline:
            return f"the time limit of {self.deadline:g} s was reached"
        return ""

    def places(self, online: int) -> int | None:
        """Return how many of so many clients train at a time; None stands for all."""
        return self.concurrency or None

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return who tests the models now, of those who are online.

        Of many, those whose ids have the least checksums: drawn by chance, as it were, yet the same
        ones every time, whoever else comes or goes, so that evaluations can be compared.
        """
        if not self.eval_clients or len(online) <= self.eval_clients:
            return online
        return nsmallest(self.eval_clients, online, key=lambda c: crc32(c.client_id.encode()))

    def is_tested(self, progress: Progress, rounds: int | None) -> bool:
        """Return whether the next evaluation is due.

        Parameters
        ----------
        progress : Progress
            Has the numbers of updates and of rounds, at the last evaluation and now.
        rounds : int or None
            Rounds or windows that are over; None for a method without them.
        """
        updates = progress.updates - progress.evaluated_at
        if self.eval_rounds and rounds is not None:
            # Of a window in which nobody was done there is nothing new to test.
            return updates > 0 and rounds - progress.evaluated_round >= self.eval_rounds
        return updates >= self.eval_every

    def is_reached(self, report: Evaluated) -> bool:
        """Return whether an evaluation ends the run: enough clients answered, and well enough."""
        return (
            self.stop_at_target
            and self.target_accuracy is not None
            and report.counts
            and report.measure.reaches(report.accuracy, self.target_accuracy)
        )
