"""Bookkeeping of the loop, whatever the method: the part of a run's state that no method owns."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol
from zlib import crc32

from flwr.app import Message

from raceme.core.clients import Client, Fleet, largest_believed
from raceme.core.errors import quoted
from raceme.core.events import (
    ACCURACY,
    DataChanged,
    Evaluated,
    Measure,
    Observer,
    TaskScore,
    TasksTested,
)
from raceme.core.messages import (
    CONFIG,
    GROUP,
    LOSS,
    NUM_EXAMPLES,
    STEP,
    UNIT,
    StatementError,
    count_of,
    number_of,
    unit_of,
)
from raceme.core.requests import InFlight

# -----------------------------------------------------------------------------
# Evaluations: the models of one moment, tested by the clients that are online then.
#
# Where testing costs no time all clients answer at once. On real devices each client tests its
# model
# when it is next free, before it trains again; what is reported is how many have answered.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientScore:
    """A client's test of the model that serves it.

    Attributes
    ----------
    cluster : int
        Its main cluster.
    accuracy, loss : float
        On the client's own test data; of a regression the mean absolute error.
    step : int
        Step of these data.
    examples : int
        How many they are; 0 if the client does not say.
    group : int or None
        True group of the data now, where data change and it is known; for reports only.
    measure : Measure
        What `accuracy` is.
    """

    cluster: int
    accuracy: float
    loss: float
    step: int = 0
    examples: int = 0
    group: int | None = None
    measure: Measure = ACCURACY


@dataclass
class Sweep:
    """An evaluation under way.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        The moment of the models, updates applied by then, and how many models there were.
    asked : int
        Clients that were online then.
    waiting : dict[str, int]
        Clients that have not been asked yet, to their main cluster.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    placed : dict[str, int]
        Main cluster of each client that was asked.
    scores : dict[str, ClientScore]
        What the clients have answered.
    """

    time: float
    updates: int
    clusters: int
    asked: int
    waiting: dict[str, int] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)
    scores: dict[str, ClientScore] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left who could answer."""
        return not self.waiting and not self.open

    def report(self) -> Evaluated:
        """Make the report, of those who have answered; at least one has."""
        # Accuracies and errors have no mean: what most of the clients have measured counts.
        measure, _ = Counter(score.measure for score in self.scores.values()).most_common(1)[0]
        by_client = {name: s for name, s in self.scores.items() if s.measure == measure}
        scores = by_client.values()
        accuracy, loss = mean_scores(scores)
        per_client = {name: (s.cluster, s.accuracy, s.loss) for name, s in by_client.items()}
        groups = {name: s.group for name, s in by_client.items() if s.group is not None}
        steps = {name: score.step for name, score in by_client.items() if score.step}
        return Evaluated(
            time=self.time,
            updates=self.updates,
            accuracy=accuracy,
            loss=loss,
            clusters=self.clusters,
            per_client=per_client,
            asked=self.asked,
            steps=steps,
            weighted_accuracy=weighted_accuracy(scores),
            groups=groups,
            measure=measure,
        )


def read_score(reply: Message, cluster: int, latest: int = 0) -> ClientScore | None:
    """Take accuracy and loss out of a reply; None if it states none.

    Parameters
    ----------
    reply : Message
        What came back.
    cluster : int
        Main cluster of the client.
    latest : int
        Latest step that its data can be at.

    Raises
    ------
    StatementError
        It states what cannot be.
    """
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    stated: Mapping[str, object] = reply.content.config_records.get(CONFIG, {})
    step, unit = stated.get(STEP, 0), unit_of(stated.get(UNIT))
    if not isinstance(step, int) or not 0 <= step <= latest:
        raise StatementError(f"it has tested on step {quoted(step)}, and its data are at {latest}")
    metrics = next(iter(reply.content.metric_records.values()))
    return score_from(metrics, cluster, step, ACCURACY if unit is None else Measure(unit))


def score_from(
    metrics: Mapping[str, object], cluster: int, step: int = 0, measure: Measure = ACCURACY
) -> ClientScore | None:
    """Take accuracy and loss out of a client's metrics; None if there are none.

    An error may be infinite: the prediction of a model that diverged. An accuracy may be NaN, as
    that of no samples is: then it is none.

    Raises
    ------
    StatementError
        The accuracy does not lie in 0…1, the error is below 0, or a number is too large.
    """
    value, loss = metrics.get(measure.name), metrics.get(LOSS, math.nan)
    if not isinstance(value, int | float) or not isinstance(loss, int | float):
        return None
    value, loss = number_of(measure.name, value), number_of(LOSS, loss)
    if math.isnan(value):
        if not measure.is_error:
            return None
        value = math.inf
    if value < 0 or (value > 1 and not measure.is_error):
        wanted = "from 0 on" if measure.is_error else "from 0 to 1"
        raise StatementError(f"its {measure.name} is {value:g}: it must be a number {wanted}")
    examples = count_of(metrics.get(NUM_EXAMPLES)) or 0
    group = count_of(metrics.get(GROUP, -1))
    return ClientScore(cluster, value, loss, step, examples, group, measure)


def mean_scores(scores: Collection[ClientScore]) -> tuple[float, float]:
    """Return the unweighted means of accuracy and loss over clients.

    The papers' accuracy: every client counts the same, however little data it has. Losses that
    are not finite are left out of the mean loss.
    """
    accuracy = math.fsum(score.accuracy for score in scores) / len(scores)
    losses = [score.loss for score in scores if math.isfinite(score.loss)]
    return accuracy, math.fsum(losses) / len(losses) if losses else math.nan


def weighted_accuracy(scores: Collection[ClientScore]) -> float:
    """Return the mean accuracy weighted by the clients' numbers of test examples.

    What CSAFL's and FlexCFL's papers report. NaN if a client does not say how many it has.
    """
    if any(not score.examples for score in scores):
        return math.nan
    limit = largest_believed(sorted(score.examples for score in scores))
    counted = [(score.accuracy, min(score.examples, limit)) for score in scores]
    total = sum(examples for _, examples in counted)
    return math.fsum(accuracy * examples for accuracy, examples in counted) / total


# -----------------------------------------------------------------------------
# Tests on the data of several steps, under way: whom was asked what, and what was answered.
# -----------------------------------------------------------------------------


@dataclass
class TaskSweep:
    """Tests on the data of several steps, under way.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        The moment of the models, updates applied by then, and how many models there were.
    ahead : bool
        Whether the step after the last one is tested too.
    last : dict[str, int]
        Each client that is asked to the step that its models were trained on last.
    waiting : dict[str, int]
        Those of them that have not been asked yet.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    placed : dict[str, list[int]]
        Main cluster of the model that a client tests on each step, from step 0 on.
    scores : dict[str, list[float]]
        What the clients have answered, in the same order, with the untrained model's score on the
        last step behind it; NaN where a client could not test.
    units : dict[str, str or None]
        Unit of each client's scores; None for accuracies.
    """

    time: float
    updates: int
    clusters: int
    ahead: bool
    last: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    placed: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str | None] = field(default_factory=dict)

    def reports(self) -> Iterator[TasksTested]:
        """Make the reports of those who have answered: one for each step that was the last."""
        if not self.units:
            return
        # Accuracies and errors have no mean: what most of the clients have measured counts.
        unit, _ = Counter(self.units.values()).most_common(1)[0]
        together: defaultdict[int, list[str]] = defaultdict(list)
        for client, step in self.last.items():
            together[step].append(client)
        for step, clients in sorted(together.items()):
            alike = [c for c in clients if c in self.units and self.units[c] == unit]
            found = {client: self._of(client) for client in alike}
            if any(found.values()):
                yield TasksTested(
                    time=self.time,
                    updates=self.updates,
                    step=step,
                    clusters=self.clusters,
                    per_client={client: of for client, of in found.items() if of},
                    asked=len(clients),
                    measure=ACCURACY if unit is None else Measure(unit),
                )

    def _of(self, client: str) -> dict[int, TaskScore]:
        """Return a client's scores by step."""
        placed, (*scores, untrained) = self.placed[client], self.scores[client]
        found = {
            step: TaskScore(cluster, score)
            for step, (cluster, score) in enumerate(zip(placed, scores, strict=True))
            if not math.isnan(score)
        }
        ahead = len(placed) - 1
        if self.ahead and ahead in found and not math.isnan(untrained):
            found[ahead] = TaskScore(found[ahead].cluster, found[ahead].accuracy, untrained)
        return found


# -----------------------------------------------------------------------------
# Bookkeeping of the loop, whatever the method: the part of a run's state that no method owns.
# -----------------------------------------------------------------------------


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
    in_flight : dict[str, InFlight]
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
    in_flight: dict[str, InFlight] = field(default_factory=dict)
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


# -----------------------------------------------------------------------------
# When to evaluate, how many clients to keep busy, and when to stop.
# -----------------------------------------------------------------------------


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


# -----------------------------------------------------------------------------
# Data that change: at which step each client's data are, and the report when they move on.
# -----------------------------------------------------------------------------


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
