"""Data that change: at which step each client's data are, and the report when they move on."""

from __future__ import annotations

import math
from collections.abc import Callable

from raceme.protocol.events import DataChanged, Observer
from raceme.server.plan import StepSchedule
from raceme.server.progress import Progress


class Steps:
    """Keeps track of the steps of clients' data.

    Parameters
    ----------
    schedule : StepSchedule or None
        When data change; None if they never do.
    progress : Progress
        Where the steps are noted.
    now : Callable
        Returns the time in seconds.
    rounds : Callable
        Returns how many rounds are over; None if the method works in none.
    observe : Observer
        Told of every change.
    tests_tasks : bool
        Whether models are to be tested on the data of all steps; see `ended`.
    """

    def __init__(
        self,
        schedule: StepSchedule | None,
        progress: Progress,
        now: Callable[[], float],
        rounds: Callable[[], int | None],
        observe: Observer,
        tests_tasks: bool = False,
    ) -> None:
        self._schedule, self._progress, self._tests_tasks = schedule, progress, tests_tasks
        self._now, self._rounds, self._observe = now, rounds, observe

    def look(self) -> None:
        """Report that all clients' data have moved on, if they have."""
        schedule, progress = self._schedule, self._progress
        if schedule is None or schedule.per_client:
            return
        step = schedule.step(self._now(), progress.updates, 0, self._rounds())
        if step != progress.step:
            progress.step = step
            self._observe(DataChanged(self._now(), progress.updates, None, step))

    def next_time(self) -> float:
        """Return when time moves clients' data on next; infinity if it never does."""
        return math.inf if self._schedule is None else self._schedule.next_time(self._now())

    def look_before_test(self) -> None:
        """Report what has moved on, if it counts for a test.

        What a round has trained is tested on the data of that round: where rounds are counted,
        data move on when work is next handed out.
        """
        if self._schedule is not None and not self._schedule.in_rounds:
            self.look()

    def is_untested(self, wanted: bool) -> bool:
        """Return whether all clients' data have moved on and no test has been made of them yet.

        Parameters
        ----------
        wanted : bool
            Whether there is to be one at once.
        """
        if wanted:
            self.look()
        return wanted and self._progress.step != self._progress.evaluated_step

    def ended(self) -> dict[str, int]:
        """Return the clients for whom a step is over since this was asked last, to that step.

        Of those that are online. Nothing if models are not to be tested on all steps. It reports
        nothing: what a run reports of its data is the same with and without these tests.
        """
        schedule, progress = self._schedule, self._progress
        if schedule is None or not self._tests_tasks:
            return {}
        if not schedule.per_client:
            before, now = progress.task_step, self._step(schedule, "")
            progress.task_step = now
            online = progress.fleet.online() if now != before else ()
            return {client.client_id: before for client in online}
        found = {}
        for client in progress.fleet.online():
            name = client.client_id
            before, now = progress.task_steps.get(name, 0), self._step(schedule, name)
            if now != before:
                found[name], progress.task_steps[name] = before, now
        return found

    def unfinished(self) -> dict[str, int]:
        """Return the clients that are online, to the last step that models were trained on.

        Nobody if the present models were tested at the end of that step. Where each client has
        steps of its own, those are left out who have not trained on theirs yet: the end of the one
        before has been tested.
        """
        schedule, progress = self._schedule, self._progress
        if schedule is None or not self._tests_tasks:
            return {}
        online, trained = progress.fleet.online(), progress.trained_steps
        if not schedule.per_client:
            last = max(trained.values(), default=0)
            is_new = progress.updates != progress.tasks_tested_at
            return {client.client_id: last for client in online if is_new}
        steps = {client.client_id: self._step(schedule, client.client_id) for client in online}
        return {name: step for name, step in steps.items() if trained.get(name, 0) == step}

    def _step(self, schedule: StepSchedule, client: str) -> int:
        """Return the step of a client's data now, whether reported or not."""
        uploads = self._progress.uploads.get(client, 0)
        return schedule.step(self._now(), self._progress.updates, uploads, self._rounds())

    def now_of(self, client: str) -> int:
        """Return the step of a client's data now, whether reported or not; 0 if they never move."""
        return 0 if self._schedule is None else self._step(self._schedule, client)

    def tested(self, client: str) -> int | None:
        """Return the step of the data that a client is tested on; None if data never change."""
        if self._schedule is not None and self._schedule.in_rounds:
            return self._progress.step
        return self.of(client)

    def of(self, client: str) -> int | None:
        """Return the step of a client's data now; None if data never change."""
        schedule, progress = self._schedule, self._progress
        if schedule is None:
            return None
        self.look()
        step = self._step(schedule, client)
        if schedule.per_client and step != progress.steps.get(client, 0):
            progress.steps[client] = step
            self._observe(DataChanged(self._now(), progress.updates, client, step))
        return step
