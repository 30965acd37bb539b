"""A method in a user's own Flower app, in the place of one of Flower's strategies."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from raceme.core import events
from raceme.core.drop_in.arguments import FlowerArguments
from raceme.core.drop_in.grid import FlowerGrid, FlowerPlan, Rounds, Tally, Wire, check_kinds, shown
from raceme.core.errors import UserError, unknown_name
from raceme.core.evaluation import EvaluateFn, Packer, tested_by_server
from raceme.core.membership import change_line, is_news
from raceme.core.messages import Vector
from raceme.core.scheduling import InRounds
from raceme.core.strategy import Method, Probe, RunResult, StopCheck, never_stop
from raceme.core.timeline import Timeline, timeline_of

# -----------------------------------------------------------------------------
# What a run tells meanwhile, in the manner of Flower's strategies and to Flower's logger.
# -----------------------------------------------------------------------------


log = logging.getLogger("flwr")

_MEGABYTE = 1024**2
_MOST_CLUSTERS = 8
"""Clusters that a line names."""


class Teller:
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
        log.info("")
        log.info("[ROUND %d%s]", number, self._length)
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
        log.info("\t├── %s", ", ".join(parts))
        if metrics:
            log.info("\t├── Train: %s", shown(metrics))
        self._updates, self._rejected, self._began = [], 0, self.time

    def tested(self, number: int, report: events.Evaluated, metrics: MetricRecord | None) -> None:
        """Tell what clients have measured of the models of a round, and in which cluster."""
        self._last = report
        if metrics is None:
            metrics = MetricRecord({report.measure.name: report.accuracy})
        log.info(
            "\t├── Evaluate round %d (%d of %d clients): %s",
            *(number, report.answered, report.asked, shown(metrics)),
        )
        if len(means := _by_cluster(report)) > 1:
            named = [
                f"{cluster}: {report.measure.shown(mean)} ({count})"
                for cluster, (mean, count) in sorted(means.items())
            ]
            more = f" and {len(named) - _MOST_CLUSTERS} more" if len(named) > _MOST_CLUSTERS else ""
            log.info(
                "\t│\t%s by cluster (clients): %s%s",
                report.measure.word,
                ", ".join(named[:_MOST_CLUSTERS]),
                more,
            )

    def tested_without_score(self, number: int, metrics: MetricRecord) -> None:
        """Tell what clients have measured, where none of it is an accuracy or a loss."""
        log.info("\t├── Evaluate round %d: %s", number, shown(metrics))

    def tested_centrally(
        self, number: int, mean: MetricRecord, clusters: Mapping[int, MetricRecord]
    ) -> None:
        """Tell what the server has measured itself, of each cluster's model."""
        if not number:
            log.info("Initial global evaluation results: %s", shown(mean))
            return
        if len(clusters) > 1:
            for cluster, metrics in sorted(clusters.items())[:_MOST_CLUSTERS]:
                log.info("\t│\tcluster %d: %s", cluster, shown(metrics))
        log.info("\t└── Global evaluation: %s", shown(mean))

    def ended(self, result: RunResult, seconds: float) -> None:
        """Tell what a run has come to: a table of the clusters, and the result."""
        log.info("")
        log.info("Strategy execution finished in %.2fs", seconds)
        log.info("")
        log.info(
            "\t%-8s %8s  %s", "cluster", "clients", self._last.measure.word if self._last else ""
        )
        sizes = Counter(
            max(weights, key=lambda cluster: weights[cluster])
            for weights in result.client_clusters.values()
            if weights
        )
        means = {} if self._last is None else _by_cluster(self._last)
        for cluster in sorted(result.clusters):
            value = means.get(cluster)
            score = (
                "-" if value is None or self._last is None else self._last.measure.shown(value[0])
            )
            log.info("\t%-8d %8d  %s", cluster, sizes[cluster], score)
        log.info("")
        log.info("Final results:")
        log.info("")
        for line in str(result).splitlines():
            log.info("\t%s", line)
        log.info("")


def tell_start(
    name: str,
    arguments: FlowerArguments,
    length: str,
    arrays: ArrayRecord,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
) -> None:
    """Tell with what a strategy begins, as Flower's own do."""
    log.info("Starting %s strategy:", name)
    log.info("\t├── %s", length)
    size = sum(len(values.data) for values in arrays.values()) / _MEGABYTE
    log.info("\t├── ArrayRecord (%.2f MB)", size)
    for what, config in (("train", train_config), ("evaluate", evaluate_config)):
        told = {
            key: "<bytes>" if isinstance(value, bytes) else value for key, value in config.items()
        }
        log.info("\t├── ConfigRecord (%s): %s", what, told or "(empty!)")
    log.info("\t├──> Sampling:")
    log.info(
        "\t│\t├── Fraction: train (%.2f) | evaluate (%.2f)",
        arguments.fraction_train,
        arguments.fraction_evaluate,
    )
    log.info(
        "\t│\t├── Minimum nodes: train (%d) | evaluate (%d)",
        arguments.min_train_nodes,
        arguments.min_evaluate_nodes,
    )
    log.info("\t│\t└── Minimum available nodes: %d", arguments.min_available_nodes)
    log.info("\t└──> Keys in records:")
    log.info("\t\t├── Weighted by: '%s'", arguments.weighted_by_key)
    log.info("\t\t├── ArrayRecord key: '%s'", arguments.arrayrecord_key)
    log.info("\t\t└── ConfigRecord key: '%s'", arguments.configrecord_key)


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
        counts = {"num_rounds": self.num_rounds}
        if self.max_updates is not None:
            counts = {"max_updates": self.max_updates}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UserError(f"{name} must be a whole number of at least 1, got {count!r}.")


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
    method: Method,
    arguments: FlowerArguments,
    told: FlowerRun,
    run: Callable[..., RunResult],
) -> RunResult:
    """Run a method with ClientApps that know nothing of Raceme.

    Parameters
    ----------
    method : Method
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
    began, name = time.monotonic(), type(method).__name__
    with through_flower():
        clock = timeline_of(told.grid)
        wire = Wire(told.initial_arrays)
        _check_server(method, told)
        length = _length(told)
        tell_start(
            name, arguments, length, told.initial_arrays, told.train_config, told.evaluate_config
        )
        if wire.carried:
            log.info(
                "\t├── Sent along unchanged, since nothing of it can be averaged: %s",
                ", ".join(wire.carried),
            )
        online = _wait_for_nodes(told.grid, clock, arguments, told.timeout)
        if clock.is_virtual:
            method.check(online)
        if method.needs.kinds:
            check_kinds(
                told.grid, clock, name, method.needs.kinds, min(_ASKING_SECONDS, told.timeout)
            )
        result, teller = _Run(method, arguments, told, wire, clock).result(run, online)
    teller.ended(result, time.monotonic() - began)
    return result


class _Run:
    """The parts of a run, and how they hear of each other."""

    def __init__(
        self,
        method: Method,
        arguments: FlowerArguments,
        told: FlowerRun,
        wire: Wire,
        clock: Timeline,
    ) -> None:
        self._method, self._arguments, self._told, self._wire = method, arguments, told, wire
        self._tally = Tally(arguments)
        self._rounds = rounds = Rounds(method, arguments, self._round_over)
        in_rounds = told.max_updates is None
        self._teller = Teller(f"/{told.num_rounds}" if in_rounds else "", clock.is_virtual)
        self._grid = FlowerGrid(
            *(told.grid, clock, arguments, wire, self._tally, rounds),
            greets=told.greet or bool(method.needs.kinds),
            heard=self._heard,
        )
        self._plan = FlowerPlan(
            max_time=told.max_time,
            method=method,
            arguments=arguments,
            num_rounds=told.num_rounds if in_rounds else 0,
            rounds=rounds,
            test_begins=self._test_begins,
            after_round=lambda: self._test_centrally(self._rounds.over),
            can_test=lambda: self._grid.tests,
            rng=method.rng.spawn(1)[0],
        )
        # The round whose models the server has tested last.
        self._tested = -1
        self._useless = 0

    def result(self, run: Callable[..., RunResult], online: int) -> tuple[RunResult, Teller]:
        """Run; return what it leaves, by rounds and under the names that clients state."""
        told, method = self._told, self._method
        if isinstance(method.scheduling, InRounds):
            method.scheduling.least = self._arguments.min_train_nodes
        before = method.progress.updates
        limit = 0 if told.max_updates is None else before + told.max_updates
        planned = limit or before + told.num_rounds * self._arguments.trained(online)
        result = run(
            self._grid,
            self._wire.initial,
            max_updates=limit,
            timeout=told.timeout,
            train_config=ConfigRecord(dict(told.train_config)),
            evaluate_config=ConfigRecord(dict(told.evaluate_config)),
            plan=replace(self._plan, planned_updates=planned),
            observe=self._observe,
            stop_check=told.stop_check,
            probe=told.probe,
            starts=told.starts,
        )
        self._close_test(None)
        self._test_centrally(self._rounds.number)
        return self._finished(result), self._teller

    def _heard(self, name: str, examples: int) -> None:
        """Note a client's number of examples, which no greeting has told."""
        client = self._method.progress.fleet.clients.get(name)
        if client is not None and client.num_examples != examples:
            client.num_examples = examples

    # What the loop reports.

    def _observe(self, event: events.Event) -> None:
        """Take note of an event, and pass it on under the clients' own names."""
        if isinstance(event, events.UpdateApplied):
            self._tally.applied(event.client)
            self._useless = -1
        elif isinstance(event, events.UpdateRejected):
            self._tally.refused(event.client)
            self._check_use(event)
        shown = self._grid.names.shown(event)
        self._teller.observe(shown)
        if isinstance(shown, events.Evaluated):
            self._close_test(shown)
        self._told.observe(shown)

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

    def _round_over(self, number: int) -> None:
        self._teller.round_over(number, self._tally.close_round(number))

    # Tests.

    def _test_begins(self, number: int) -> None:
        self._close_test(None)
        self._tally.begin_test(number)

    def _close_test(self, report: events.Evaluated | None) -> None:
        """Aggregate and tell the test under way; without a report it has no score."""
        made, number = self._tally.close_test(), self._tally.round
        if report is not None:
            self._teller.tested(number, report, made)
        elif made is not None:
            self._teller.tested_without_score(number, made)

    def _test_centrally(self, number: int) -> None:
        """Let the user's function test the models of a round, unless it has: 0 at the start."""
        test = self._told.evaluate_fn
        if test is None or number <= self._tested:
            return
        self._tested = number
        packer = Packer(self._method.spec)
        if self._method.models:
            mean, clusters = tested_by_server(
                self._method, packer, lambda arrays: test(number, self._wire.sent(arrays))
            )
        else:
            # A method whose clusters begin with their clients.
            mean, clusters = test(number, self._told.initial_arrays), {}
        if mean is not None:
            result = self._method.result
            result.evaluate_metrics_serverapp[number] = mean
            result.evaluate_metrics_clusters[number] = clusters
            self._teller.tested_centrally(number, mean, clusters)

    # The end.

    def _finished(self, result: RunResult) -> RunResult:
        """Return a result as Flower's users know it: by rounds, with models that load."""
        wire = self._wire
        result.train_metrics_clientapp = self._tally.trained
        result.evaluate_metrics_clientapp = self._tally.tested
        result.clusters = {k: wire.sent(model) for k, model in result.clusters.items()}
        largest = wire.sent(result.arrays) if result.arrays else self._told.initial_arrays
        result.arrays = largest
        names = self._grid.names
        result.client_clusters = {
            names.told(client): weights
            for client, weights in result.client_clusters.items()
            if client not in names.mistaken
        }
        return result


def _check_server(method: Method, told: FlowerRun) -> None:
    """Raise UserError if the method measures models on samples of the server's and has none."""
    sets = 0 if told.probe is None else told.probe.sets
    try:
        method.check_server(sets, bool(told.starts))
    except UserError as error:
        if told.probe is not None or told.starts:
            raise
        name = type(method).__name__
        raise UserError(
            f"{name} measures models on the server's own samples: give its start(probe=...) a "
            f"raceme.core.strategy.Probe. In `raceme run` it is an option: {error}"
        ) from None


def _length(told: FlowerRun) -> str:
    """Say how long a run is."""
    if told.max_updates is not None:
        return f"Number of updates: {told.max_updates}"
    return f"Number of rounds: {told.num_rounds}"


def _wait_for_nodes(grid: Grid, clock: Timeline, arguments: FlowerArguments, timeout: float) -> int:
    """Wait until nodes enough are connected; return how many are.

    Raises
    ------
    UserError
        On virtual time they do not come.
    """
    wanted, last, began = max(1, arguments.min_available_nodes), -1, clock.now()
    while (online := len(list(grid.get_node_ids()))) < wanted:
        if online != last:
            log.info(
                "Waiting for nodes to connect: %d connected (minimum required: %d).", online, wanted
            )
            last = online
        if clock.is_virtual and clock.now() >= began + timeout:
            raise UserError(
                f"Only {online} of min_available_nodes={wanted} nodes have come in {timeout:g} "
                "virtual seconds: simulate more, or ask for fewer."
            )
        clock.wait((), clock.now() + _LOOK_SECONDS)
    return online
