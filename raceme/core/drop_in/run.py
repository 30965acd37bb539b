"""A method in a user's own Flower app, in the place of one of Flower's strategies."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.drop_in.arguments import FlowerArguments
from raceme.core.drop_in.grid import DtypeAdapter, FlowerGrid, Rounds, check_kinds, shown
from raceme.core.errors import UserError, unknown_name
from raceme.core.evaluation import EvaluateFn, Packer, tested_by_server
from raceme.core.interface import Probe, Questions, RunResult, StopCheck, never_stop
from raceme.core.membership import change_line, is_news
from raceme.core.messages import Vector
from raceme.core.progress import Plan, Progress, rounds_over
from raceme.core.scheduling import InRounds, sample
from raceme.core.timeline import timeline_of

# -----------------------------------------------------------------------------
# Flower-style log: what a run tells meanwhile, to Flower's logger.
# -----------------------------------------------------------------------------


log = logging.getLogger("flwr")

_MEGABYTE = 1024**2
_MOST_CLUSTERS = 8
"""Clusters that a line names."""


class FlowerLog:
    """Logs the progress of a run.

    Parameters
    ----------
    length : str
        How long the run is, in words of its head: ``"/3"`` rounds, or nothing.
    is_virtual : bool
        Whether seconds are virtual.
    """

    def __init__(self, length: str, is_virtual: bool) -> None:
        self._length, self._clock = length, "virtual s" if is_virtual else "s"
        self._updates: list[events.UpdateApplied] = []
        self._rejected = 0
        self._began = 0.0
        self._last: events.Evaluated | None = None
        self.time = 0.0

    def observe(self, event: events.Event) -> None:
        """Take note of an event; tell it if it is news by itself."""
        self.time = event.time
        if isinstance(event, events.UpdateApplied):
            self._updates.append(event)
        elif isinstance(event, events.UpdateRejected):
            self._rejected += 1
        elif isinstance(event, events.ClustersChanged) and is_news(event):
            line = change_line(event)
            log.info("\t├── %s", line[0].upper() + line[1:])

    def round_over(self, number: int, metrics: MetricRecord | None) -> None:
        """Tell what a round's worth of updates was."""
        updates = self._updates
        staleness = [update.staleness for update in updates]
        parts = [
            f"{len(updates)} update{'' if len(updates) == 1 else 's'} of "
            f"{len({update.client for update in updates})} clients in "
            f"{self.time - self._began:.1f} {self._clock}"
        ]
        if any(staleness):
            mean = sum(staleness) / len(staleness)
            parts.append(f"staleness {mean:.1f} on average, {max(staleness)} at most")
        if self._rejected:
            parts.append(f"{self._rejected} replies not used")
        _tell("", f"[ROUND {number}{self._length}]", f"\t├── {', '.join(parts)}")
        if metrics:
            _tell(f"\t├── Train: {shown(metrics)}")
        self._updates, self._rejected, self._began = [], 0, self.time

    def tested(
        self, number: int, report: events.Evaluated | None, metrics: MetricRecord | None
    ) -> None:
        """Tell what clients have measured of the models of a round, and in which cluster.

        Without a report none of it is an accuracy or a loss.
        """
        if report is None:
            if metrics is not None:
                _tell(f"\t├── Evaluate round {number}: {shown(metrics)}")
            return
        self._last = report
        found = shown(metrics or {report.measure.name: report.accuracy})
        of = f"{report.answered} of {report.asked} clients"
        _tell(f"\t├── Evaluate round {number} ({of}): {found}")
        if len(means := _by_cluster(report)) > 1:
            named = [
                f"{cluster}: {report.measure.shown(mean)} ({count})"
                for cluster, (mean, count) in sorted(means.items())
            ]
            more = f" and {len(named) - _MOST_CLUSTERS} more" if len(named) > _MOST_CLUSTERS else ""
            listed = ", ".join(named[:_MOST_CLUSTERS])
            _tell(f"\t│\t{report.measure.word} by cluster (clients): {listed}{more}")

    def tested_centrally(
        self, number: int, mean: MetricRecord, clusters: Mapping[int, MetricRecord]
    ) -> None:
        """Tell what the server has measured itself, of each cluster's model."""
        if not number:
            _tell(f"Initial global evaluation results: {shown(mean)}")
            return
        if len(clusters) > 1:
            for cluster, metrics in sorted(clusters.items())[:_MOST_CLUSTERS]:
                _tell(f"\t│\tcluster {cluster}: {shown(metrics)}")
        _tell(f"\t└── Global evaluation: {shown(mean)}")

    def ended(self, result: RunResult, seconds: float) -> None:
        """Tell what a run has come to: a table of the clusters, and the result."""
        last = self._last
        sizes = Counter(
            max(weights, key=lambda cluster: weights[cluster])
            for weights in result.client_clusters.values()
            if weights
        )
        means = {} if last is None else _by_cluster(last)
        _tell("", f"Strategy execution finished in {seconds:.2f}s", "")
        _tell(f"\t{'cluster':<8} {'clients':>8}  {last.measure.word if last else ''}")
        for cluster in sorted(result.clusters):
            score = last.measure.shown(means[cluster][0]) if last and cluster in means else "-"
            _tell(f"\t{cluster:<8} {sizes[cluster]:>8}  {score}")
        _tell("", "Final results:", "", *(f"\t{line}" for line in str(result).splitlines()), "")


def _tell(*lines: str) -> None:
    for line in lines:
        log.info("%s", line)


def tell_start(name: str, arguments: FlowerArguments, told: FlowerRun) -> None:
    """Tell with what a strategy begins, as Flower's own do."""
    size = sum(len(values.data) for values in told.initial_arrays.values()) / _MEGABYTE
    _tell(
        f"Starting {name} strategy:",
        f"\t├── {told.length}",
        f"\t├── ArrayRecord ({size:.2f} MB)",
    )
    for what, config in (("train", told.train_config), ("evaluate", told.evaluate_config)):
        values = {key: "<bytes>" if isinstance(v, bytes) else v for key, v in config.items()}
        _tell(f"\t├── ConfigRecord ({what}): {values or '(empty!)'}")
    fractions = arguments.fraction_train, arguments.fraction_evaluate
    least = arguments.min_train_nodes, arguments.min_evaluate_nodes
    _tell(
        "\t├──> Sampling:",
        f"\t│\t├── Fraction: train ({fractions[0]:.2f}) | evaluate ({fractions[1]:.2f})",
        f"\t│\t├── Minimum nodes: train ({least[0]}) | evaluate ({least[1]})",
        f"\t│\t└── Minimum available nodes: {arguments.min_available_nodes}",
        "\t└──> Keys in records:",
        f"\t\t├── Weighted by: '{arguments.weighted_by_key}'",
        f"\t\t├── ArrayRecord key: '{arguments.arrayrecord_key}'",
        f"\t\t└── ConfigRecord key: '{arguments.configrecord_key}'",
    )


def _by_cluster(report: events.Evaluated) -> dict[int, tuple[float, int]]:
    """Return the mean of the clients' scores and their number, by cluster."""
    scores: dict[int, list[float]] = {}
    for cluster, score, _ in report.per_client.values():
        scores.setdefault(cluster, []).append(score)
    return {k: (math.fsum(each) / len(each), len(each)) for k, each in scores.items()}


class _ToFlower(logging.Handler):
    """Hands Raceme's log lines on to Flower's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage())


@contextmanager
def through_flower() -> Iterator[None]:
    """Let what Raceme logs be seen with Flower's lines, unless it is seen already."""
    logger = logging.getLogger("raceme")
    if logger.handlers:
        yield
        return
    handler, before = _ToFlower(), (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


# -----------------------------------------------------------------------------
# A method in a user's own Flower app, in the place of one of Flower's strategies.
# -----------------------------------------------------------------------------


_LOOK_SECONDS = 1.0
"""From one look at who is connected to the next, before a run."""
_ASKING_SECONDS = 60.0
"""How long the first client is waited for that says what its ClientApp can do."""
_FEWEST_USELESS, _USELESS_EACH = 12, 3
"""Replies of no use, in all and for each client, after which no client is taken to be able."""


@dataclass(frozen=True, kw_only=True)
class FlowerRun:
    """What the `start` of one of Flower's strategies is told, and a little more.

    Attributes
    ----------
    grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        As for Flower's own strategies.
    max_updates : int or None
        Updates after which the run ends, instead of rounds.
    max_time : float or None
        Time at which it ends at the latest, in seconds.
    greet : bool
        Whether clients are asked who they are, as Raceme's own ClientApp expects.
    """

    grid: Grid
    initial_arrays: ArrayRecord
    num_rounds: int = 3
    timeout: float = 3600.0
    train_config: ConfigRecord = field(default_factory=ConfigRecord)
    evaluate_config: ConfigRecord = field(default_factory=ConfigRecord)
    evaluate_fn: EvaluateFn | None = None
    max_updates: int | None = None
    max_time: float | None = None
    greet: bool = False
    observe: events.Observer = events.ignore
    stop_check: StopCheck = never_stop
    probe: Probe | None = None
    starts: Sequence[Vector] = ()

    def check(self) -> None:
        """Raise UserError if the run could not begin, or would never end."""
        if not isinstance(self.initial_arrays, ArrayRecord) or not self.initial_arrays:
            raise UserError(
                "initial_arrays must be an ArrayRecord with the model's arrays, e.g. "
                "ArrayRecord(model.state_dict()): they say what a model looks like."
            )
        name = "max_updates" if self.max_updates is not None else "num_rounds"
        count = getattr(self, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {count!r}.")

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        if self.max_updates is not None:
            return f"Number of updates: {self.max_updates}"
        return f"Number of rounds: {self.num_rounds}"


def flower_run(**told: Any) -> FlowerRun:
    """Take what a `start` is told.

    Raises
    ------
    UserError
        There is no such argument.
    """
    known = [item.name for item in fields(FlowerRun)]
    for name in told:
        if name not in known:
            raise unknown_name("argument of start()", name, known)
    return FlowerRun(**told)


def start(
    method: Questions,
    arguments: FlowerArguments,
    told: FlowerRun,
    run: Callable[..., RunResult],
) -> RunResult:
    """Run a method with ClientApps that know nothing of Raceme.

    Parameters
    ----------
    method : Questions
        The method.
    arguments : FlowerArguments
        What it was made with.
    told : FlowerRun
        What it is started with.
    run : Callable
        The method's own `run`.

    Raises
    ------
    UserError
        The run cannot begin; the ClientApp cannot train, or cannot do what the method asks for; no
        client has returned anything of use.
    """
    told.check()
    began = time.monotonic()
    with through_flower():
        made = _Run(method, arguments, told)
        online = made.prepare()
        result = made.result(run, online)
    made.log.ended(result, time.monotonic() - began)
    return result


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowerPlan(Plan):
    """A plan by rounds: when to stop, when to test, and with which clients.

    Attributes
    ----------
    run : _Run
        The run that it belongs to.
    """

    run: _Run

    def places(self, online: int) -> int | None:
        """Return how many clients train at a time; None stands for all."""
        taking_part = self.run.arguments.trained(online)
        return None if self.run.rounds.are_of_method or taking_part >= online else taking_part

    def limit(self, updates: int, num_updates: int, now: float, rounds: int | None = None) -> str:
        """Return which limit is reached, in words."""
        over = self.run.look()
        if self.run.told.max_updates is None and over >= self.run.told.num_rounds:
            return rounds_over(self.run.told.num_rounds)
        return super().limit(updates, num_updates, now, rounds)

    def is_tested(self, progress: Progress, rounds: int | None) -> bool:
        """Return whether the next evaluation is due: after each round that changed a model."""
        counted = self.run.rounds
        counted.look()
        return progress.updates > progress.evaluated_at and counted.over > counted.last_test

    def testers(self, online: Sequence[Client]) -> Sequence[Client]:
        """Return who tests models now; as with Flower, nobody before the first round."""
        rounds = self.run.rounds
        number = rounds.over
        if not number or number in rounds.tests:
            # Before the first round, or what comes after the last whole one, at the end.
            number = rounds.number
        self.run.begin_test(number)
        count = self.run.arguments.tested(len(online)) if number and self.run.grid.tests else 0
        return sample(online, count, self.run.rng) if count else []


class _Run:
    """The parts of a run, and how they hear of each other."""

    def __init__(self, method: Questions, arguments: FlowerArguments, told: FlowerRun) -> None:
        self._method, self._name = method, type(method).__name__
        self.arguments, self.told = arguments, told
        self._clock = timeline_of(told.grid)
        self._dtypes = DtypeAdapter(told.initial_arrays)
        length = f"/{told.num_rounds}" if told.max_updates is None else ""
        self.log = FlowerLog(length, self._clock.is_virtual)
        self.rounds = Rounds(method, arguments, self.log.round_over)
        self.grid = FlowerGrid(
            told.grid,
            self._clock,
            arguments,
            self._dtypes,
            self.rounds,
            greets=told.greet or bool(method.asked_kinds),
            heard=self._heard,
        )
        self.rng = method.rng.spawn(1)[0]
        # The round whose models the server has tested last.
        self._tested = -1
        self._useless = 0

    def prepare(self) -> int:
        """Tell what begins, and wait for nodes enough; return how many are connected.

        Raises
        ------
        UserError
            The run cannot begin.
        """
        told, method = self.told, self._method
        self._check_server()
        tell_start(self._name, self.arguments, told)
        if carried := ", ".join(self._dtypes.carried):
            _tell(f"\t├── Sent along unchanged, since nothing of it can be averaged: {carried}")
        online = self._wait_for_nodes()
        if self._clock.is_virtual:
            method.check(online)
        if method.asked_kinds:
            patience = min(_ASKING_SECONDS, told.timeout)
            check_kinds(told.grid, self._clock, self._name, method.asked_kinds, patience)
        return online

    def result(self, run: Callable[..., RunResult], online: int) -> RunResult:
        """Run; return what it leaves, by rounds, with models that load, and clients' own names."""
        told, method, dtypes = self.told, self._method, self._dtypes
        if isinstance(method.dispatch, InRounds):
            method.dispatch.least = self.arguments.min_train_nodes
        before = method.progress.updates
        limit = 0 if told.max_updates is None else before + told.max_updates
        planned = limit or before + told.num_rounds * self.arguments.trained(online)
        result = run(
            self.grid,
            dtypes.initial,
            max_updates=limit,
            timeout=told.timeout,
            train_config=ConfigRecord(dict(told.train_config)),
            evaluate_config=ConfigRecord(dict(told.evaluate_config)),
            plan=FlowerPlan(max_time=told.max_time, planned_updates=planned, run=self),
            observe=self._observe,
            stop_check=told.stop_check,
            probe=told.probe,
            starts=told.starts,
        )
        self._close_test(None)
        self._test_centrally(self.rounds.number)
        result.train_metrics_clientapp = self.rounds.trained
        result.evaluate_metrics_clientapp = self.rounds.tested
        result.clusters = {k: dtypes.sent(model) for k, model in result.clusters.items()}
        result.arrays = dtypes.sent(result.arrays) if result.arrays else told.initial_arrays
        names = self.grid.names
        result.client_clusters = {
            names.told(client): weights
            for client, weights in result.client_clusters.items()
            if client not in names.mistaken
        }
        return result

    # The beginning.

    def _check_server(self) -> None:
        """Raise UserError if the method measures models on samples of the server's and has none."""
        probe, starts = self.told.probe, self.told.starts
        try:
            self._method.check_server(0 if probe is None else probe.sets, bool(starts))
        except UserError as error:
            if probe is not None or starts:
                raise
            raise UserError(
                f"{self._name} measures models on the server's own samples: give its "
                "start(probe=...) a raceme.core.interface.Probe. In `raceme run` it is an option: "
                f"{error}"
            ) from None

    def _wait_for_nodes(self) -> int:
        """Wait until nodes enough are connected; return how many are.

        Raises
        ------
        UserError
            On virtual time they do not come.
        """
        clock, timeout = self._clock, self.told.timeout
        wanted, last, began = max(1, self.arguments.min_available_nodes), -1, clock.now()
        while (online := len(list(self.told.grid.get_node_ids()))) < wanted:
            if online != last:
                _tell(
                    f"Waiting for nodes to connect: {online} connected (minimum required: "
                    f"{wanted})."
                )
                last = online
            if clock.is_virtual and clock.now() >= began + timeout:
                raise UserError(
                    f"Only {online} of min_available_nodes={wanted} nodes have come in "
                    f"{timeout:g} virtual seconds: simulate more, or ask for fewer."
                )
            clock.wait((), clock.now() + _LOOK_SECONDS)
        return online

    # What clients and the loop report.

    def _heard(self, name: str, examples: int) -> None:
        """Note a client's number of examples, which no greeting has told."""
        client = self._method.progress.fleet.clients.get(name)
        if client is not None and client.num_examples != examples:
            client.num_examples = examples
            self._method.count_examples(client)

    def _observe(self, event: events.Event) -> None:
        """Take note of an event, and pass it on under the clients' own names."""
        if isinstance(event, events.UpdateApplied):
            self.rounds.applied(event.client)
            self._useless = -1
        elif isinstance(event, events.UpdateRejected):
            self.rounds.refused(event.client)
            self._check_use(event)
        shown = self.grid.names.shown(event)
        self.log.observe(shown)
        if isinstance(shown, events.Evaluated):
            self._close_test(shown)
        self.told.observe(shown)

    def _check_use(self, event: events.UpdateRejected) -> None:
        """Raise UserError if no client is able to return anything of use."""
        if self._useless < 0:
            return
        self._useless += 1
        clients = len(self._method.progress.fleet.clients)
        if self._useless >= max(_FEWEST_USELESS, _USELESS_EACH * clients):
            # The refusal of that reply is still being handled: it is not shown beside this.
            raise UserError(
                f"None of {self._useless} replies could be used; the last one, of {event.client}: "
                f"{event.reason}"
            ) from None

    # Rounds and tests.

    def look(self) -> int:
        """Notice what is over by now, test on the server if a round is; return how many are."""
        self.rounds.look()
        self._test_centrally(self.rounds.over)
        return self.rounds.over

    def begin_test(self, number: int) -> None:
        """Gather the tests of the models of a round from now on."""
        self._close_test(None)
        self.rounds.tests.append(number)

    def _close_test(self, report: events.Evaluated | None) -> None:
        """Aggregate and tell the test under way; without a report it has no score."""
        self.log.tested(self.rounds.last_test, report, self.rounds.close_test())

    def _test_centrally(self, number: int) -> None:
        """Let the user's function test the models of a round, unless it has: 0 at the start."""
        test = self.told.evaluate_fn
        if test is None or number <= self._tested:
            return
        self._tested = number
        if self._method.models:
            packer = Packer(self._method.spec)
            mean, clusters = tested_by_server(
                self._method, packer, lambda arrays: test(number, self._dtypes.sent(arrays))
            )
        else:
            # A method whose clusters begin with their clients.
            mean, clusters = test(number, self.told.initial_arrays), {}
        if mean is not None:
            result = self._method.result
            result.evaluate_metrics_serverapp[number] = mean
            result.evaluate_metrics_clusters[number] = clusters
            self.log.tested_centrally(number, mean, clusters)
