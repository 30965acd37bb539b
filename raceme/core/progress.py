"""Bookkeeping of the loop: the part of a run's state independent of the method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from statistics import fmean
from typing import Protocol
from zlib import crc32

from raceme.core import events
from raceme.core.clients import Client, Fleet, largest_plausible_size
from raceme.core.events import ACCURACY, Evaluated, Measure
from raceme.core.labels import Labels
from raceme.core.limits import Limits
from raceme.core.requests import InFlight

StopCheck = Callable[[], str]
"""Called between two steps, when the state is consistent and can be saved. A non-empty return value
ends the run and is the reason."""


def never_stop() -> str:
    """Return the empty text: the run continues to its limit."""
    return ""


# -----------------------------------------------------------------------------
# Evaluations: the models of one moment, tested on cells (client × step of its data).
#
# An ordinary evaluation has one cell per online client, for its present data. Evaluations of
# features may have cells for any steps.
#
# If tests take no time, all clients answer at once. On real devices each client tests when it is
# next idle, before it trains again; the report states how many have answered.
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
        Cluster of the model; for several clusters, the one with the largest weight; `UNTRAINED` for
        the untrained model.
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
    cells : dict[str, list[tuple[int, int]]]
        Tests of each client: step of its data, and main cluster of the model.
    feature : str
        Name of the feature whose tests they are; empty for an ordinary evaluation.
    steps : dict[str, int]
        Step of each client's data at a feature's tests.
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
    cells: dict[str, list[tuple[int, int]]]
    feature: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, bool] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    scores: dict[str, list[ClientScore]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no answer is outstanding."""
        return not self.waiting and not self.open

    def drop(self, client: str) -> None:
        """Stop waiting for a client."""
        self.waiting.pop(client, None)
        self.open = {key: name for key, name in self.open.items() if name != client}

    def alike(self) -> tuple[Measure, dict[str, list[ClientScore]]]:
        """Return the measure of most clients and their scores.

        Accuracies and errors have no common mean.
        """
        measures = Counter(scores[0].measure for scores in self.scores.values())
        measure = max(measures, key=lambda one: measures[one])
        return measure, {name: of for name, of in self.scores.items() if of[0].measure == measure}

    def report(self) -> Evaluated:
        """Return the report of an ordinary evaluation that has answers."""
        measure, alike = self.alike()
        by_client = {name: of[0] for name, of in alike.items()}
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


def weighted_accuracy(scores: Collection[ClientScore]) -> float:
    """Return the mean accuracy weighted by the clients' numbers of test examples.

    As reported by CSAFL's and FlexCFL's papers. NaN if a client does not state its number.
    """
    if any(not score.examples for score in scores):
        return math.nan
    limit = largest_plausible_size(sorted(score.examples for score in scores))
    counted = [(score.accuracy, min(score.examples, limit)) for score in scores]
    total = sum(examples for _, examples in counted)
    return math.fsum(accuracy * examples for accuracy, examples in counted) / total


# -----------------------------------------------------------------------------
# Bookkeeping of the loop: the part of a run's state independent of the method.
# -----------------------------------------------------------------------------


_SAME_ERRORS = 3
"""Errors of each client after which a simulation ends, if all clients raise the same error."""


@dataclass
class Progress:
    """Counters and state of the run so far.

    Attributes
    ----------
    updates, weightless, tasks, rejected : int
        Numbers of applied updates, of applied updates that changed no model, of sent tasks, and of
        refused replies.
    rejected_in_a_row : dict[str, int]
        Refused replies per client since the last valid one of any client.
    last_refusal : str
        Client and reason of the last refused reply.
    raised : dict[str, str]
        Error that each client's app raised, for clients whose last reply was one.
    checked_at, last_online_at : float
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
    held : dict[str, InFlight]
        Open tasks whose updates a feature holds, by client.
    held_for : str
        Reason why the last held update waits; see `Held`.
    further : dict[str, InFlight]
        Requests for held updates, by message id.
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
    feature_tests : dict[str, Evaluation]
        The current tests of features, by their names.
    fleet : Fleet
        All clients that have been greeted, online or not.
    """

    updates: int = 0
    weightless: int = 0
    tasks: int = 0
    rejected: int = 0
    rejected_in_a_row: dict[str, int] = field(default_factory=dict)
    last_refusal: str = ""
    raised: dict[str, str] = field(default_factory=dict)
    checked_at: float = 0.0
    last_online_at: float = 0.0
    greeted_at: float = -math.inf
    evaluated_at: int = -1
    evaluated_round: int = 0
    evaluated_step: int = 0
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    held: dict[str, InFlight] = field(default_factory=dict)
    held_for: str = ""
    further: dict[str, InFlight] = field(default_factory=dict)
    idle: dict[str, bool] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    trained_steps: dict[str, int] = field(default_factory=dict)
    step: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    feature_tests: dict[str, Evaluation] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The current evaluations."""
        ordinary = [] if self.evaluation is None else [self.evaluation]
        return [*ordinary, *self.feature_tests.values()]

    def count_update(self, client: str, weight: float) -> None:
        """Count an applied update of a client."""
        self.updates += 1
        self.weightless += not weight
        self.uploads[client] = self.uploads.get(client, 0) + 1

    def reason_of_uselessness(self) -> str:
        """Return the reason if the run is useless (only unusable replies), else an empty text.

        Each client's replies count up to an equal share, and more than half of the shares must be
        full, so that few clients cannot end the run.
        """
        if not self.rejected_in_a_row:
            return ""
        clients = max(1, len(self.fleet.clients))
        limit, rejected = max(100, 10 * clients), sum(self.rejected_in_a_row.values())
        share = limit / clients
        counted = sum(min(count, share) for count in self.rejected_in_a_row.values())
        if rejected < limit or 2 * counted <= limit:
            return ""
        return f"the last {rejected} replies were unusable; the last one: {self.last_refusal}"

    def common_error(self) -> str:
        """Return the reason if all clients only raise the same error, else an empty text.

        Such an error lies in common code or data, and further attempts would repeat it.
        """
        if self.updates or not self.raised:
            return ""
        counts, found = self.rejected_in_a_row, set(self.raised.values())
        clients = self.fleet.clients.keys()
        if len(found) != 1 or self.raised.keys() != clients:
            return ""
        if min(counts.get(client, 0) for client in clients) < _SAME_ERRORS:
            return ""
        return f"every client raised the same error {_SAME_ERRORS} times: {found.pop()}"


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
class Plan(Limits):
    """Limits and schedule of a run, the same for every method.

    Attributes
    ----------
    eval_every : int
        Number of applied updates between two evaluations.
    drift : StepSchedule or None
        When clients' data change; None if they never do.
    highest_score : float
        Largest valid score of an upload: 1 for accuracies, infinity for errors.
    labels : Labels
        Labels of clients, and which of them take part.
    planned_updates : int
        Expected number of updates of a run without a limit on them, for schedules that depend on
        its length.
    computed : Callable
        Returns the clients' total time at work in seconds, of which `max_compute` is the limit.
    """

    eval_every: int = 20
    drift: StepSchedule | None = None
    highest_score: float = 1.0
    labels: Labels = field(default_factory=Labels)
    planned_updates: int = 0
    computed: Callable[[], float] = lambda: 0.0

    @property
    def deadline(self) -> float:
        """Time at which to stop; infinity without a limit."""
        return self.max_time or math.inf

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
        if self.max_rounds and rounds is not None and rounds >= self.max_rounds:
            return rounds_over(self.max_rounds)
        if now >= self.deadline:
            return f"the time limit of {self.deadline:g} s was reached"
        if self.max_compute and self.computed() >= self.max_compute:
            return f"clients worked for {self.max_compute:g} s in total"
        return ""

    def places(self, online: int) -> int | None:
        """Return the number of online clients that train at a time; None for all."""
        return self.concurrency or None

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return the online clients that test the models.

        A limited number are those whose ids have the smallest checksums: a random but stable
        sample, which makes evaluations comparable under churn.
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
            self.stop_at_target is not False
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
    """

    def __init__(
        self,
        schedule: StepSchedule | None,
        progress: Progress,
        now: Callable[[], float],
        rounds: Callable[[], int | None],
        observe: events.Observer,
    ) -> None:
        self.schedule, self._progress = schedule, progress
        self._now, self._rounds, self._observe = now, rounds, observe

    def report_common(self) -> None:
        """Report a common drift, if any."""
        schedule, progress = self.schedule, self._progress
        if schedule is None or schedule.per_client:
            return
        step = schedule.step(self._now(), progress.updates, 0, self._rounds())
        if step != progress.step:
            progress.step = step
            self._observe(events.DataChanged(self._now(), progress.updates, None, step))

    def next_time(self) -> float:
        """Return the next time of a drift; infinity if none."""
        return math.inf if self.schedule is None else self.schedule.next_time(self._now())

    def report_before_test(self) -> None:
        """Report a common drift before a test, unless steps follow rounds.

        A round's models are tested on that round's data: with steps in rounds, data change when
        work is sent next.
        """
        if self.schedule is not None and not self.schedule.in_rounds:
            self.report_common()

    def is_untested(self, wanted: bool) -> bool:
        """Return whether a common drift has not been tested so far.

        Parameters
        ----------
        wanted : bool
            Whether to test at once.
        """
        if wanted:
            self.report_common()
        return wanted and self._progress.step != self._progress.evaluated_step

    def _step(self, schedule: StepSchedule, client: str) -> int:
        """Return the current step of a client's data, reported or not."""
        uploads = self._progress.uploads.get(client, 0)
        return schedule.step(self._now(), self._progress.updates, uploads, self._rounds())

    def current(self, client: str) -> int:
        """Return the step of a client's data now without a report; 0 if data never change."""
        return 0 if self.schedule is None else self._step(self.schedule, client)

    def tested(self, client: str) -> int | None:
        """Return the step of the data that a client is tested on; None if data never change."""
        if self.schedule is not None and self.schedule.in_rounds:
            return self._progress.step
        return self.of(client)

    def of(self, client: str) -> int | None:
        """Return the step of a client's data now, reporting a change; None if data never change."""
        schedule, progress = self.schedule, self._progress
        if schedule is None:
            return None
        self.report_common()
        step = self._step(schedule, client)
        if schedule.per_client and step != progress.steps.get(client, 0):
            progress.steps[client] = step
            self._observe(events.DataChanged(self._now(), progress.updates, client, step))
        return step
