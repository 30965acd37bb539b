"""Bookkeeping of the loop, whatever the method: the part of a run's state that no method owns."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol
from zlib import crc32

from raceme.core import events
from raceme.core.clients import Client, Fleet, largest_believed
from raceme.core.events import ACCURACY, Evaluated, Measure, TaskScore, TasksTested
from raceme.core.requests import InFlight

# -----------------------------------------------------------------------------
# Evaluations: the models of one moment, tested on cells: a client × a step of its data.
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
"""Step of a cell: the one that the client's data are at when it is asked."""
UNTRAINED = -1
"""Stands for a cluster: the model before any training."""


@dataclass(frozen=True)
class ClientScore:
    """A client's test of a model in one cell.

    Attributes
    ----------
    cluster : int
        The cluster of the model, of several that with the largest weight; `UNTRAINED` for none.
    accuracy, loss : float
        On the client's own test data; of a regression the mean absolute error. NaN if it could not
        test.
    step : int
        Step of the data that it tested on.
    examples : int
        How many they are; 0 if the client does not say.
    group : int or None
        True group of the data now, where data change and it is known; for reports only.
    measure : Measure
        Whether `accuracy` is an accuracy, or an error and its unit.
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
    """An evaluation under way.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        The moment of the models, updates applied by then, and how many models there were.
    cells : dict[str, dict[int, int]]
        Each client to the steps that it tests on, each with the main cluster of the model.
    of_steps : bool
        Whether the cells are of all steps so far; else of the present one.
    ahead : bool
        Whether the last cell of each client is of the step after those that models were trained on.
        The untrained model is tested there, too.
    waiting : dict[str, bool]
        Clients that have not been asked yet, in the order of asking.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    scores : dict[str, list[ClientScore]]
        What the clients have answered, in the order of their cells.
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
        """Whether no client is left that could answer."""
        return not self.waiting and not self.open

    def last_step(self, client: str) -> int:
        """Return the last step that the models which a client tests were trained on."""
        return max(self.cells[client]) - self.ahead

    def tests(self, client: str) -> list[tuple[int, int]]:
        """Return the tests that a client makes: of each the step, and the model's main cluster."""
        cells = list(self.cells[client].items())
        return [*cells, (cells[-1][0], UNTRAINED)] if self.ahead else cells

    def drop(self, client: str) -> None:
        """Stop waiting for a client."""
        self.waiting.pop(client, None)
        self.open = {key: name for key, name in self.open.items() if name != client}

    def reports(self) -> Iterator[Evaluated | TasksTested]:
        """Make the reports of the clients that have answered.

        Of the present step it is one; of all steps one for each step that was the last of clients.
        """
        if not self.scores:
            return
        # Accuracies and errors have no mean: what most of the clients have measured counts.
        measures = Counter(scores[0].measure for scores in self.scores.values())
        (measure, _), *_ = measures.most_common(1)
        alike = {name: of for name, of in self.scores.items() if of[0].measure == measure}
        if not self.of_steps:
            yield self._of_present({name: of[0] for name, of in alike.items()}, measure)
            return
        together: defaultdict[int, list[str]] = defaultdict(list)
        for client in self.cells:
            together[self.last_step(client)].append(client)
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
            # The papers' accuracy: every client counts the same, however little data it has.
            accuracy=math.fsum(score.accuracy for score in scores) / len(scores),
            loss=math.fsum(losses) / len(losses) if losses else math.nan,
            clusters=self.clusters,
            per_client={name: (s.cluster, s.accuracy, s.loss) for name, s in by_client.items()},
            asked=len(self.cells),
            steps={name: score.step for name, score in by_client.items() if score.step},
            weighted_accuracy=weighted_accuracy(scores),
            groups={name: s.group for name, s in by_client.items() if s.group is not None},
            measure=measure,
        )


def _by_step(scores: Iterable[ClientScore]) -> dict[int, TaskScore]:
    """Return a client's scores by step, without those of steps that it could not test."""
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

    What CSAFL's and FlexCFL's papers report. NaN if a client does not say how many it has.
    """
    if any(not score.examples for score in scores):
        return math.nan
    limit = largest_believed(sorted(score.examples for score in scores))
    counted = [(score.accuracy, min(score.examples, limit)) for score in scores]
    total = sum(examples for _, examples in counted)
    return math.fsum(accuracy * examples for accuracy, examples in counted) / total


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
    rejected_in_a_row : dict[str, int]
        Replies of each client that were refused since the last valid one of any client.
    last_refusal : str
        The client of the last reply that was refused, and why it was.
    checked_at, somebody_at : float
        When the list of online nodes was last looked at, and when a client was online last.
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
    evaluation : Evaluation or None
        The evaluation on the present data that is under way.
    task_steps : dict[str, int]
        Step of each client's data, as the tests on all steps know it; of all clients' data under
        the empty name, where the time or the number of updates decides it.
    tasks_tested_at : int
        Number of updates when these tests were begun last; -1 before the first.
    task_evaluation : Evaluation or None
        The one on all steps that is under way.
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
        """The evaluations under way."""
        return [each for each in (self.evaluation, self.task_evaluation) if each is not None]

    def count_update(self, client: str) -> None:
        """Count an update of a client that was applied."""
        self.updates += 1
        self.uploads[client] = self.uploads.get(client, 0) + 1

    def uselessness(self) -> str:
        """Return why it is of no use to go on: only unusable replies for long; else nothing.

        Each client's replies count up to an equal share, and more than half of the shares have to
        be full: a few clients do not end the run of the others.
        """
        clients = max(1, len(self.fleet.clients))
        limit, rejected = max(100, 10 * clients), sum(self.rejected_in_a_row.values())
        share = limit / clients
        counted = sum(min(count, share) for count in self.rejected_in_a_row.values())
        if rejected < limit or 2 * counted <= limit:
            return ""
        return f"the last {rejected} replies were unusable; the last one: {self.last_refusal}"


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
        Whether steps follow the number of completed rounds.
    """

    @property
    def per_client(self) -> bool:
        """Whether it counts each client's own uploads."""

    @property
    def in_rounds(self) -> bool:
        """Whether it counts rounds."""

    def step(self, time: float, updates: int, uploads: int, rounds: int | None) -> int:
        """Return the step at a time, after so many updates, uploads of the client, and rounds."""

    def next_time(self, time: float) -> float:
        """Return when time moves the step next; infinity if it never does."""


def rounds_over(count: int) -> str:
    """Say that a limit on rounds is reached."""
    return "1 round is over" if count == 1 else f"{count} rounds are over"


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
        Number of applied updates between two evaluations.
    eval_rounds : int
        Rounds or windows between two evaluations, of a method that has them; 0: `eval_every`.
    eval_steps : bool
        Evaluate also when all clients' data have moved on, before any client trains on them.
    eval_tasks : bool
        Test on the data of every step so far whenever a step is over, and at the end.
    eval_clients : int
        Clients that test the models at an evaluation; 0: all that are online.
    discrepancy : bool
        Measure how far clients' models are from that of their cluster.
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
    discrepancy: bool = False
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
            Time on the grid's clock, in seconds.
        rounds : int or None
            Rounds or windows that are over; None for a method without them.
        """
        if 0 < num_updates <= updates:
            return f"{num_updates} updates were applied"
        if self.max_rounds is not None and rounds is not None and rounds >= self.max_rounds:
            return rounds_over(self.max_rounds)
        if now >= self.deadline:
            return f"the time limit of {self.deadline:g} s was reached"
        return ""

    def places(self, online: int) -> int | None:
        """Return how many of so many clients train at a time; None stands for all."""
        return self.concurrency or None

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return the clients that test the models now, of those online.

        Of many, those whose ids have the least checksums: in effect a random sample, yet the same
        clients every time, whichever others come or go, so that evaluations can be compared.
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
            # Of a window in which no client was done there is nothing new to test.
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
        Called with a `DataChanged` for every change.
    tests_tasks : bool
        Whether models are to be tested on the data of all steps; see `ended`.
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
        """Report that all clients' data have moved on, if they have."""
        schedule, progress = self._schedule, self._progress
        if schedule is None or schedule.per_client:
            return
        step = schedule.step(self._now(), progress.updates, 0, self._rounds())
        if step != progress.step:
            progress.step = step
            self._observe(events.DataChanged(self._now(), progress.updates, None, step))

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
        """Return the clients of which a step is over since this was asked last, to that step.

        Of those that are online. Nothing if models are not to be tested on all steps. It reports
        nothing: what a run reports of its data is the same with and without these tests.
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
        """Return the clients that are online, to the last step that models were trained on.

        None if the present models were tested at the end of that step. Where each client has
        steps of its own, clients that have not trained on theirs yet are left out: the end of the
        one before has been tested.
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
            self._observe(events.DataChanged(self._now(), progress.updates, client, step))
        return step
