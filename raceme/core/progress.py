"""Bookkeeping of the loop: the part of a run's state independent of the method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from statistics import fmean
from typing import Protocol
from zlib import crc32

from raceme.core import events
from raceme.core.clients import Client, Fleet, Labels, largest_believed
from raceme.core.events import ACCURACY, Evaluated, Measure, TaskScore, TasksTested, grouped
from raceme.core.requests import InFlight

StopCheck = Callable[[], str]
"""Called between two steps, when the state is consistent and can be saved. A non-empty return value
ends the run and is the reason."""


def never_stop() -> str:
    """Return the empty text: the run continues to its limit."""
    return ""


# -----------------------------------------------------------------------------
# Evaluations: the models of one time, tested on cells (client × step of its data).
#
# An ordinary evaluation has one cell for each client that is online, of its present data. With
# ``eval-tasks`` there is another one whenever a step of a client's data is over, before any client
# trains on the next one, and at the end: of each step so far, and of the next one. Lopez-Paz and
# Ranzato ("Gradient Episodic Memory", NeurIPS 2017) call its result the matrix R.
#
# Where testing costs no time all clients answer at once. On real devices each client tests when it
# is next free, before it trains again; the report says how many have answered.
# -----------------------------------------------------------------------------

PRESENT = -1
"""Step of a cell: the current one of the client's data."""
UNTRAINED = -1
"""Cluster number of the model before any training."""


@dataclass(frozen=True)
class ClientScore:
    """A client's test of a model in one cell.

    Attributes
    ----------
    cluster : int
        Cluster of the model, of several the one with the largest weight; `UNTRAINED` for none.
    accuracy, loss : float
        Accuracy (or mean absolute error) and loss on the client's test data; NaN if it could not
        test.
    step : int
        Step of the test data.
    examples : int
        Number of test examples; 0 if not stated.
    group : int or None
        Current true group under drift, if known; for reports only.
    measure : Measure
        Measure of `accuracy`.
    """

    cluster: int
    accuracy: float
    loss: float = math.nan
    step: int = 0
    examples: int = 0
    group: int | None = None
    measure: Measure = ACCURACY


@dataclass
class Evaluation:
    """An evaluation in progress.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        Time of the models, applied updates, and number of models.
    cells : dict[str, dict[int, int]]
        Steps that each client tests on, with the main cluster of the model.
    of_steps : bool
        Whether the cells cover all steps so far, else the current one.
    ahead : bool
        Whether the last cell of each client is the step after the trained ones, on which the
        untrained model is tested too.
    waiting : dict[str, bool]
        Clients still to be queried, in order.
    open : dict[str, str]
        Queried clients without an answer, by message id.
    scores : dict[str, list[ClientScore]]
        Clients' answers, in the order of their cells.
    """

    time: float
    updates: int
    clusters: int
    cells: dict[str, dict[int, int]]
    of_steps: bool = False
    ahead: bool = False
    waiting: dict[str, bool] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    scores: dict[str, list[ClientScore]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no answer is outstanding."""
        return not self.waiting and not self.open

    def last_step(self, client: str) -> int:
        """Return the last trained step of the models that a client tests."""
        return max(self.cells[client]) - self.ahead

    def tests(self, client: str) -> list[tuple[int, int]]:
        """Return a client's tests: step and main cluster of the model."""
        cells = list(self.cells[client].items())
        return [*cells, (cells[-1][0], UNTRAINED)] if self.ahead else cells

    def drop(self, client: str) -> None:
        """Stop waiting for a client."""
        self.waiting.pop(client, None)
        self.open = {key: name for key, name in self.open.items() if name != client}

    def reports(self) -> Iterator[Evaluated | TasksTested]:
        """Make the reports of the answers.

        One report for the current step; for all steps, one per last step of clients.
        """
        if not self.scores:
            return
        # Accuracies and errors have no common mean: the majority's measure counts.
        measures = Counter(scores[0].measure for scores in self.scores.values())
        (measure, _), *_ = measures.most_common(1)
        alike = {name: of for name, of in self.scores.items() if of[0].measure == measure}
        if not self.of_steps:
            yield self._of_present({name: of[0] for name, of in alike.items()}, measure)
            return
        together = grouped((self.last_step(client), client) for client in self.cells)
        for step, clients in sorted(together.items()):
            found = {name: _by_step(alike[name]) for name in clients if name in alike}
            if any(found.values()):
                yield TasksTested(
                    time=self.time,
                    updates=self.updates,
                    step=step,
                    clusters=self.clusters,
                    per_client={name: scores for name, scores in found.items() if scores},
                    asked=len(clients),
                    measure=measure,
                )

    def _of_present(self, by_client: Mapping[str, ClientScore], measure: Measure) -> Evaluated:
        scores = by_client.values()
        losses = [score.loss for score in scores if math.isfinite(score.loss)]
        return Evaluated(
            time=self.time,
            updates=self.updates,
            # The papers' accuracy: the unweighted mean over clients.
            accuracy=fmean(score.accuracy for score in scores),
            loss=fmean(losses) if losses else math.nan,
            clusters=self.clusters,
            per_client={name: (s.cluster, s.accuracy, s.loss) for name, s in by_client.items()},
            asked=len(self.cells),
            steps={name: score.step for name, score in by_client.items() if score.step},
            weighted_accuracy=weighted_accuracy(scores),
            groups={name: s.group for name, s in by_client.items() if s.group is not None},
            measure=measure,
        )


def _by_step(scores: Iterable[ClientScore]) -> dict[int, TaskScore]:
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


def weighted_accuracy(scores: Collection[ClientScore]) -> float:
    """Return the mean accuracy weighted by the clients' numbers of test examples.

    As reported by CSAFL's and FlexCFL's papers. NaN if a client does not state its number.
    """
    if any(not score.examples for score in scores):
        return math.nan
    limit = largest_believed(sorted(score.examples for score in scores))
    counted = [(score.accuracy, min(score.examples, limit)) for score in scores]
    total = sum(examples for _, examples in counted)
    return math.fsum(accuracy * examples for accuracy, examples in counted) / total


# -----------------------------------------------------------------------------
# Bookkeeping of the loop: the part of a run's state independent of the method.
# -----------------------------------------------------------------------------


@dataclass
class Progress:
    """Counters and state of the run so far.

    Attributes
    ----------
    updates, tasks, rejected : int
        Numbers of applied updates, sent tasks and refused replies.
    rejected_in_a_row : dict[str, int]
        Refused replies per client since the last valid one of any client.
    last_refusal : str
        Client and reason of the last refused reply.
    checked_at, somebody_at : float
        Times of the last check of online nodes, and of the last online client.
    greeted_at : float
        Time of the last greeting; -infinity before the first.
    evaluated_at : int
        Number of updates at the last evaluation; -1 before the first.
    evaluated_round : int
        Completed rounds or windows then.
    evaluated_step : int
        Step of all clients' data then.
    in_flight : dict[str, InFlight]
        Open tasks by message id.
    idle : dict[str, bool]
        Clients without a task, in the order in which they became idle.
    uploads : dict[str, int]
        Applied updates per client.
    trained_steps : dict[str, int]
        Step of each client's last valid update.
    step : int
        Common step of all clients' data, if determined by time or updates.
    steps : dict[str, int]
        Step of each client's data, if determined by its uploads.
    evaluation : Evaluation or None
        The current evaluation on current data.
    task_steps : dict[str, int]
        Step of each client's data for tests on all steps; the common step under the empty name.
    tasks_tested_at : int
        Number of updates at the last start of these tests; -1 before the first.
    task_evaluation : Evaluation or None
        The current evaluation on all steps.
    fleet : Fleet
        All clients that have been greeted, online or not.
    """

    updates: int = 0
    tasks: int = 0
    rejected: int = 0
    rejected_in_a_row: dict[str, int] = field(default_factory=dict)
    last_refusal: str = ""
    checked_at: float = 0.0
    somebody_at: float = 0.0
    greeted_at: float = -math.inf
    evaluated_at: int = -1
    evaluated_round: int = 0
    evaluated_step: int = 0
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    idle: dict[str, bool] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    trained_steps: dict[str, int] = field(default_factory=dict)
    step: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    task_steps: dict[str, int] = field(default_factory=dict)
    tasks_tested_at: int = -1
    task_evaluation: Evaluation | None = None
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The current evaluations."""
        return [each for each in (self.evaluation, self.task_evaluation) if each is not None]

    def count_update(self, client: str) -> None:
        """Count an applied update of a client."""
        self.updates += 1
        self.uploads[client] = self.uploads.get(client, 0) + 1

    def uselessness(self) -> str:
        """Return the reason if the run is useless (only unusable replies), else an empty text.

        Each client's replies count up to an equal share, and more than half of the shares must be
        full, so that few clients cannot end the run.
        """
        clients = max(1, len(self.fleet.clients))
        limit, rejected = max(100, 10 * clients), sum(self.rejected_in_a_row.values())
        share = limit / clients
        counted = sum(min(count, share) for count in self.rejected_in_a_row.values())
        if rejected < limit or 2 * counted <= limit:
            return ""
        return f"the last {rejected} replies were unusable; the last one: {self.last_refusal}"


# -----------------------------------------------------------------------------
# Schedule of evaluations, concurrency and limits.
# -----------------------------------------------------------------------------


class StepSchedule(Protocol):
    """Schedule of the steps of clients' data.

    Attributes
    ----------
    per_client : bool
        Whether it counts each client's own uploads.
    in_rounds : bool
        Whether steps follow the number of completed rounds.
    """

    @property
    def per_client(self) -> bool:
        """Whether it counts each client's own uploads."""

    @property
    def in_rounds(self) -> bool:
        """Whether it counts rounds."""

    def step(self, time: float, updates: int, uploads: int, rounds: int | None) -> int:
        """Return the step at a time and numbers of updates, uploads of the client and rounds."""

    def next_time(self, time: float) -> float:
        """Return the next time of a step change; infinity if none."""


def rounds_over(count: int) -> str:
    """Return the text for a reached limit of rounds."""
    return "1 round is over" if count == 1 else f"{count} rounds are over"


@dataclass(frozen=True)
class Plan:
    """Limits and schedule of a run, the same for every method.

    Attributes
    ----------
    max_time : float or None
        Stop at this time on the grid's clock, in seconds.
    target_accuracy : float or None
        Target mean client accuracy, or mean absolute error.
    stop_at_target : bool
        Whether reaching it ends the run.
    eval_every : int
        Number of applied updates between two evaluations.
    eval_rounds : int
        Rounds or windows between two evaluations, if the method has them; 0: `eval_every`.
    eval_steps : bool
        Whether to evaluate also after a common drift, before any training.
    eval_tasks : bool
        Whether to test on all steps so far at the end of each step and of the run.
    eval_clients : int
        Number of clients that test at an evaluation; 0: all online.
    concurrency : int
        Number of clients that train at a time; 0: all online.
    drift : StepSchedule or None
        When clients' data change; None if they never do.
    max_rounds : int or None
        Limit of rounds or windows, if the method has them.
    highest_score : float
        Largest valid score of an upload: 1 for accuracies, infinity for errors.
    labels : Labels
        Labels of clients, and which of them take part.
    planned_updates : int
        Expected number of updates of a run without a limit on them, for schedules that depend on
        its length.
    max_compute, computed : float, Callable
        Limit of the clients' total time at work in seconds, and a function that returns it.
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
    labels: Labels = field(default_factory=Labels)
    planned_updates: int = 0
    max_compute: float = math.inf
    computed: Callable[[], float] = lambda: 0.0

    @property
    def deadline(self) -> float:
        """Time at which to stop; infinity without a limit."""
        return math.inf if self.max_time is None else self.max_time

    def limit(self, updates: int, num_updates: int, now: float, rounds: int | None = None) -> str:
        """Return the reached limit in words; empty if none.

        Parameters
        ----------
        updates, num_updates : int
            Applied updates, and their limit; 0: none.
        now : float
            Time on the grid's clock, in seconds.
        rounds : int or None
            Completed rounds or windows; None for a method without them.
        """
        if 0 < num_updates <= updates:
            return "1 update was applied" if updates == 1 else f"{updates} updates were applied"
        if self.max_rounds is not None and rounds is not None and rounds >= self.max_rounds:
            return rounds_over(self.max_rounds)
        if now >= self.deadline:
            return f"the time limit of {self.deadline:g} s was reached"
        if self.computed() >= self.max_compute:
            return f"clients worked for {self.max_compute:g} s in total"
        return ""

    def places(self, online: int) -> int | None:
        """Return how many of the online clients train at a time; None for all."""
        return self.concurrency or None

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return the online clients that test the models.

        Of many, those whose ids have the smallest checksums: a random but stable sample, which
        makes evaluations comparable under churn.
        """
        if not self.eval_clients or len(online) <= self.eval_clients:
            return online
        return nsmallest(self.eval_clients, online, key=lambda c: crc32(c.client_id.encode()))

    def is_tested(self, progress: Progress, rounds: int | None) -> bool:
        """Return whether the next evaluation is due.

        Parameters
        ----------
        progress : Progress
            Numbers of updates and rounds, at the last evaluation and now.
        rounds : int or None
            Completed rounds or windows; None for a method without them.
        """
        updates = progress.updates - progress.evaluated_at
        if self.eval_rounds and rounds is not None:
            # A window without updates has nothing new to test.
            return updates > 0 and rounds - progress.evaluated_round >= self.eval_rounds
        return updates >= self.eval_every

    def is_reached(self, report: Evaluated) -> bool:
        """Return whether an evaluation reaches the target with enough answers."""
        return (
            self.stop_at_target
            and self.target_accuracy is not None
            and report.counts
            and report.measure.reaches(report.accuracy, self.target_accuracy)
        )


# -----------------------------------------------------------------------------
# Drift: current steps of clients' data, and reports of changes.
# -----------------------------------------------------------------------------


class Steps:
    """Tracks the steps of clients' data.

    Parameters
    ----------
    schedule : StepSchedule or None
        Schedule of the drift; None without drift.
    progress : Progress
        Storage of the steps.
    now : Callable
        Returns the time in seconds.
    rounds : Callable
        Returns the number of completed rounds; None without rounds.
    observe : Observer
        Receives a `DataChanged` for every change.
    tests_tasks : bool
        Whether models are tested on the data of all steps; see `ended`.
    """

    def __init__(
        self,
        schedule: StepSchedule | None,
        progress: Progress,
        now: Callable[[], float],
        rounds: Callable[[], int | None],
        observe: events.Observer,
        tests_tasks: bool = False,
    ) -> None:
        self._schedule, self._progress, self._tests_tasks = schedule, progress, tests_tasks
        self._now, self._rounds, self._observe = now, rounds, observe

    def look(self) -> None:
        """Report a common drift, if any."""
        schedule, progress = self._schedule, self._progress
        if schedule is None or schedule.per_client:
            return
        step = schedule.step(self._now(), progress.updates, 0, self._rounds())
        if step != progress.step:
            progress.step = step
            self._observe(events.DataChanged(self._now(), progress.updates, None, step))

    def next_time(self) -> float:
        """Return the next time of a drift; infinity if none."""
        return math.inf if self._schedule is None else self._schedule.next_time(self._now())

    def look_before_test(self) -> None:
        """Report a drift that applies before a test.

        A round's models are tested on that round's data: with steps in rounds, data change when
        work is sent next.
        """
        if self._schedule is not None and not self._schedule.in_rounds:
            self.look()

    def is_untested(self, wanted: bool) -> bool:
        """Return whether a common drift has not been tested so far.

        Parameters
        ----------
        wanted : bool
            Whether to test at once.
        """
        if wanted:
            self.look()
        return wanted and self._progress.step != self._progress.evaluated_step

    def ended(self) -> dict[str, int]:
        """Return the online clients whose step ended since the last call, with that step.

        Empty without tests on all steps. Reports nothing, so that a run's reports do not depend on
        these tests.
        """
        schedule, tested = self._schedule, self._progress.task_steps
        if schedule is None or not self._tests_tasks:
            return {}
        moved: dict[str, int] = {}
        for client in self._online() if schedule.per_client else [""]:
            before, now = tested.get(client, 0), self._step(schedule, client)
            if now != before:
                moved[client], tested[client] = before, now
        return dict.fromkeys(self._online(), moved[""]) if "" in moved else moved

    def unfinished(self) -> dict[str, int]:
        """Return the online clients with the last trained step of the models.

        None if the current models were tested at the end of that step. With steps per client,
        clients that have not trained on theirs are left out, as the previous end was tested.
        """
        schedule, progress = self._schedule, self._progress
        if schedule is None or not self._tests_tasks:
            return {}
        trained = progress.trained_steps
        if not schedule.per_client:
            is_new = progress.updates != progress.tasks_tested_at
            return dict.fromkeys(self._online(), max(trained.values(), default=0)) if is_new else {}
        steps = {client: self._step(schedule, client) for client in self._online()}
        return {name: step for name, step in steps.items() if trained.get(name, 0) == step}

    def _online(self) -> list[str]:
        return [client.client_id for client in self._progress.fleet.online()]

    def _step(self, schedule: StepSchedule, client: str) -> int:
        """Return the current step of a client's data, reported or not."""
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
            self._observe(events.DataChanged(self._now(), progress.updates, client, step))
        return step
