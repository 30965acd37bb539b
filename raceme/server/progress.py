"""Bookkeeping of the loop, whatever the method: the part of a run's state that no method owns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raceme.server.evaluation import Sweep
from raceme.server.fleet import Fleet
from raceme.server.task_sweep import TaskSweep
from raceme.server.work import Task


@dataclass
class Progress:
    """What has happened so far.

    Attributes
    ----------
    updates, tasks, rejected : int
        Updates applied, tasks handed out and replies refused so far.
    rejected_in_a_row : int
        Replies refused since the last valid one.
    last_refusal : str
        Why the last reply was refused, and whose it was.
    checked_at, somebody_at : float
        When the list of online nodes was last looked at, and when last anybody was there.
    greeted_at : float
        When a node was greeted last; -infinity before the first.
    evaluated_at : int
        Number of updates at the last evaluation; -1 before the first.
    evaluated_round : int
        Rounds or windows that were over then.
    evaluated_step : int
        Step of all clients' data then.
    in_flight : dict[str, Task]
        Open tasks by message id.
    idle : dict[str, bool]
        Clients without a task, in the order in which they got free.
    uploads : dict[str, int]
        Updates of each client that were applied.
    trained_steps : dict[str, int]
        Step of the data that each client's last valid update was trained on.
    step : int
        Step of all clients' data, where the time or the number of updates decides it.
    steps : dict[str, int]
        Step of each client's data, where its own uploads decide it.
    sweep : Sweep or None
        The evaluation that is under way.
    task_step : int
        Step of all clients' data, as the tests on all steps know it.
    task_steps : dict[str, int]
        The same of each client's data, where its own uploads decide it.
    tasks_tested_at : int
        Number of updates when these tests were begun last; -1 before the first.
    task_sweep : TaskSweep or None
        Those that are under way.
    fleet : Fleet
        The clients.
    """

    updates: int = 0
    tasks: int = 0
    rejected: int = 0
    rejected_in_a_row: int = 0
    last_refusal: str = ""
    checked_at: float = 0.0
    somebody_at: float = 0.0
    greeted_at: float = -math.inf
    evaluated_at: int = -1
    evaluated_round: int = 0
    evaluated_step: int = 0
    in_flight: dict[str, Task] = field(default_factory=dict)
    idle: dict[str, bool] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    trained_steps: dict[str, int] = field(default_factory=dict)
    step: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    sweep: Sweep | None = None
    task_step: int = 0
    task_steps: dict[str, int] = field(default_factory=dict)
    tasks_tested_at: int = -1
    task_sweep: TaskSweep | None = None
    fleet: Fleet = field(default_factory=Fleet)

    def count_update(self, client: str) -> None:
        """Count an update of a client that was applied."""
        self.updates += 1
        self.uploads[client] = self.uploads.get(client, 0) + 1

    def uselessness(self) -> str:
        """Return why it is of no use to go on: only unusable replies for long; else nothing."""
        if self.rejected_in_a_row < max(100, 10 * len(self.fleet.clients)):
            return ""
        return (
            f"the last {self.rejected_in_a_row} replies were unusable; the last one: "
            f"{self.last_refusal}"
        )
