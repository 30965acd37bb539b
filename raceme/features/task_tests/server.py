"""The tests of ``eval-tasks``: when a step of clients' data is over, and at the end of the run.

At the end of a step, before any client trains on the next one, clients test on each step so far and
on the next one, there also the untrained model. Lopez-Paz and Ranzato ("Gradient Episodic Memory",
NeurIPS 2017) call the result the matrix R.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raceme.core.errors import UserError
from raceme.core.events import TaskScore, TasksTested, grouped
from raceme.core.feature import Feature, FeatureContext, StepTests
from raceme.core.progress import UNTRAINED, ClientScore, Evaluation, StepSchedule
from raceme.features.task_tests import Options

if TYPE_CHECKING:
    from raceme.core.strategy import Needs


@dataclass
class TaskTestsState:
    """State of the tests.

    Attributes
    ----------
    steps : dict[str, int]
        Step of each client's data at the last call; the common step has an empty name.
    tested_at : int
        Number of updates at the last start of tests; -1 before the first.
    """

    steps: dict[str, int] = field(default_factory=dict)
    tested_at: int = -1


class TaskTests(Feature):
    """Clients test their models on the data of all steps so far."""

    options_type = Options
    switch = "eval_tasks"
    state_type = TaskTestsState

    def check(self, needs: Needs) -> None:
        """Check that the run has steps."""
        if self.config is not None and self.config.drift == "none":
            raise UserError("eval-tasks needs a drift: choose one with drift.")

    def tests(self, context: FeatureContext, is_end: bool) -> StepTests | None:
        """Return the tests of clients whose step is over, or those due at the end."""
        schedule = context.drift
        if schedule is None:
            return None
        last = self._trained(context, schedule) if is_end else self._ended(context, schedule)
        if not last:
            return None
        self.state.tested_at = context.updates
        ahead = 0 if is_end else 1
        steps = {client: list(range(step + 1 + ahead)) for client, step in last.items()}
        return StepTests(steps, last, untrained=not is_end)

    def _ended(self, context: FeatureContext, schedule: StepSchedule) -> dict[str, int]:
        """Return the online clients whose step ended since the last call, with that step."""
        moved, before = dict[str, int](), self.state.steps
        for client in context.clients if schedule.per_client else [""]:
            if (now := context.step_of(client)) != before.get(client, 0):
                moved[client], before[client] = before.get(client, 0), now
        return dict.fromkeys(context.clients, moved[""]) if "" in moved else moved

    def _trained(self, context: FeatureContext, schedule: StepSchedule) -> dict[str, int]:
        """Return the online clients with the last trained step of models not tested since.

        With steps per client, clients that have not trained on their present step are left out,
        since the end of the former step was tested.
        """
        trained = context.trained_steps
        if not schedule.per_client:
            if context.updates == self.state.tested_at:
                return {}
            return dict.fromkeys(context.clients, max(trained.values(), default=0))
        steps = {client: context.step_of(client) for client in context.clients}
        return {name: step for name, step in steps.items() if trained.get(name, 0) == step}

    def on_tested(self, tests: Evaluation, context: FeatureContext) -> None:
        """Report the answers, by the last step of clients."""
        measure, scores = tests.alike()
        together = grouped((step, client) for client, step in tests.steps.items())
        for step, clients in sorted(together.items()):
            found = {name: by_step(scores[name]) for name in clients if name in scores}
            if any(found.values()):
                context.report(
                    TasksTested(
                        time=tests.time,
                        updates=tests.updates,
                        step=step,
                        clusters=tests.clusters,
                        per_client={name: scores for name, scores in found.items() if scores},
                        asked=len(clients),
                        measure=measure,
                    )
                )


def by_step(scores: Iterable[ClientScore]) -> dict[int, TaskScore]:
    """Return a client's scores by step, without untestable steps."""
    found: dict[int, TaskScore] = {}
    for score in scores:
        if math.isnan(score.accuracy):
            continue
        if score.cluster != UNTRAINED:
            found[score.step] = TaskScore(score.cluster, score.accuracy)
        elif score.step in found:
            found[score.step] = found[score.step]._replace(untrained=score.accuracy)
    return found
