"""Evaluations: clients test the models of one moment; models are packed once per version."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import getLogger
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from raceme.core import messages as names
from raceme.core.clients import Client, Idle
from raceme.core.clusters import Model, Weights, blended
from raceme.core.errors import about, quoted
from raceme.core.events import (
    ACCURACY,
    Evaluated,
    Measure,
    Measured,
    MeasureSchema,
    UpdateRejected,
    grouped,
)
from raceme.core.feature import StepTests
from raceme.core.messages import InvalidReplyError, ModelSpec
from raceme.core.progress import PRESENT, UNTRAINED, ClientScore, Evaluation, Steps
from raceme.core.timeline import Timeline, push
from raceme.flower.messages import BUDGET, SpillFile, spill_arrays

if TYPE_CHECKING:
    from raceme.core.strategy import Method

log = getLogger("raceme")

# -----------------------------------------------------------------------------
# Packing of models, once per version for all receivers.
#
# Simulated clients keep the versions that they train from in this process's memory; beyond a budget
# these are moved to a file.
# -----------------------------------------------------------------------------


class Packer:
    """Converts models to records, and caches the record of each cluster's current version.

    Parameters
    ----------
    spec : ModelSpec
        Names and shapes of a model's arrays.
    budget : int
        Maximum bytes of former versions in memory.
    """

    def __init__(self, spec: ModelSpec, budget: int = BUDGET) -> None:
        self._spec, self._spill = spec, SpillFile(budget)
        self._packed: dict[int, tuple[Model, int, ArrayRecord, int]] = {}

    def pack(self, cluster: int, model: Model) -> tuple[ArrayRecord, int]:
        """Return a cluster's model as a record, and its size in bytes."""
        if not self._has(cluster, model):
            self._drop(cluster)
            record = self._spec.pack(model.vector)
            self._packed[cluster] = (model, model.version, record, record.count_bytes())
        _, _, record, size = self._packed[cluster]
        return record, size

    def _has(self, cluster: int, model: Model) -> bool:
        """Return whether the record of a cluster is current."""
        # A separate method: local variables of `pack` would keep the former version in memory.
        packed = self._packed.get(cluster)
        return packed is not None and packed[0] is model and packed[1] == model.version

    def serve(self, models: Mapping[int, Model], weights: Weights) -> tuple[ArrayRecord, int]:
        """Return the model that serves a client of these clusters, and its size in bytes."""
        if len(weights) == 1:
            cluster = next(iter(weights))
            return self.pack(cluster, models[cluster])
        record = self._spec.pack(blended(models, weights))
        return record, record.count_bytes()

    def pack_some(
        self, models: Mapping[int, Model], clusters: tuple[int, ...], numbered: bool
    ) -> tuple[dict[str, ArrayRecord], int]:
        """Return the models for a client by record name, and their size.

        A model to train is called ``arrays``; models of other work are numbered.
        """
        packed = [self.pack(cluster, models[cluster]) for cluster in clusters]
        if len(packed) == 1 and not numbered:
            return {names.ARRAYS: packed[0][0]}, packed[0][1]
        records = {names.candidate(index): record for index, (record, _) in enumerate(packed)}
        return records, sum(size for _, size in packed)

    def keep_only(self, models: Mapping[int, Model]) -> None:
        """Drop the records of gone clusters."""
        # Called after every update, so records are compared only if there are too many.
        if len(self._packed) > len(models):
            for cluster in self._packed.keys() - models.keys():
                self._drop(cluster)

    def _drop(self, cluster: int) -> None:
        """Drop a record; arrays still held by clients may be moved to a file."""
        if cluster in self._packed:
            _, _, record, _ = self._packed.pop(cluster)
            arrays = [weakref.ref(array) for array in record.values()]
            del record
            spill_arrays(arrays, self._spill)


# -----------------------------------------------------------------------------
# Clients' answers.
# -----------------------------------------------------------------------------


def read_score(reply: Message, cluster: int, latest: int = 0) -> ClientScore | None:
    """Extract accuracy and loss of a reply; None if missing.

    Parameters
    ----------
    reply : Message
        Reply to a test of a model.
    cluster : int
        Main cluster of the client.
    latest : int
        Latest possible step of its data.

    Raises
    ------
    InvalidReplyError
        A statement is impossible.
    """
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    stated: Mapping[str, object] = reply.content.config_records.get(names.CONFIG, {})
    step, unit = stated.get(names.STEP, 0), names.unit_of(stated.get(names.UNIT))
    if not isinstance(step, int) or not 0 <= step <= latest:
        raise InvalidReplyError(
            f"it tested on step {quoted(step)}, although its data are at step {latest}"
        )
    metrics = next(iter(reply.content.metric_records.values()))
    return score_from(metrics, cluster, step, Measure(unit))


def score_from(
    metrics: Mapping[str, object], cluster: int, step: int = 0, measure: Measure = ACCURACY
) -> ClientScore | None:
    """Extract accuracy and loss of a client's metrics; None if missing.

    An error may be infinite, for a diverged model. A NaN accuracy, e.g. of a client without test
    samples, counts as missing.

    Raises
    ------
    InvalidReplyError
        The accuracy does not lie in 0…1, the error is below 0, or a number is too large.
    """
    value, loss = metrics.get(measure.name), metrics.get(names.LOSS, math.nan)
    if not isinstance(value, int | float) or not isinstance(loss, int | float):
        return None
    value, loss = names.number_of(measure.name, value), names.number_of(names.LOSS, loss)
    if math.isnan(value):
        if not measure.is_error:
            return None
        value = math.inf
    if value < 0 or (value > 1 and not measure.is_error):
        wanted = "from 0 on" if measure.is_error else "from 0 to 1"
        raise InvalidReplyError(f"its {measure.name} is {value:g}: it must be a number {wanted}")
    examples = names.count_of(metrics.get(names.NUM_EXAMPLES)) or 0
    group = names.count_of(metrics.get(names.GROUP, -1))
    return ClientScore(cluster, value, loss, step, examples, group, measure)


def read_scores(reply: Message, count: int) -> tuple[str | None, list[float]]:
    """Extract unit and a number of scores of a reply; empty for errors.

    Invalid values are NaN. An error may be infinite, for a diverged model.

    Raises
    ------
    InvalidReplyError
        The unit is invalid.
    """
    if reply.has_error() or names.NUMBERS not in reply.content.array_records:
        return None, []
    told: Mapping[str, object] = reply.content.config_records.get(names.CONFIG, {})
    unit = names.unit_of(told.get(names.UNIT))
    record = reply.content.array_records[names.NUMBERS]
    if names.ACCURACIES not in record:
        return unit, []
    try:
        values = names.from_array(record[names.ACCURACIES])
    except names.InvalidModelError:
        return unit, []
    if values.shape != (count,) or values.dtype.kind != "f":
        return unit, []
    numbers = np.asarray(values, np.float64)
    highest = 1.0 if unit is None else names.LARGEST
    usable = (numbers >= 0) & ((numbers <= highest) | (np.isposinf(numbers) & (unit is not None)))
    return unit, [float(value) for value in np.where(usable, numbers, np.nan)]


# -----------------------------------------------------------------------------
# Tests by clients: all at once if a test takes no time, else when each client is idle.
# -----------------------------------------------------------------------------

_BYTES = 1 << 28
"""Maximum bytes of models in one batch of messages, if clients test models of their own."""
_LAST_SECONDS = 60.0
"""Time that the last tests of a run wait for busy clients."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

BACKDOOR_SUCCESS = MeasureSchema(
    "backdoor_success", "backdoor success", ("backdoor_success",), summary="column"
)
"""Share of triggered test samples that are classified as the target: the honest clients' mean."""
BACKDOOR_BY_CLUSTER = MeasureSchema(
    "backdoor_by_cluster", "backdoor success by cluster", ("success",), per="cluster", figure="none"
)
"""The same by cluster: a backdoor inside one is a small share of all clients."""


class Evaluator:
    """Lets clients test the models of one moment, on the cells of an `Evaluation`.

    One evaluation on current data and one per feature may be in progress at a time.

    Parameters
    ----------
    method : Method
        Method whose models are tested.
    clock : Timeline
        Clock of the grid, which dates the reports.
    steps : Steps
        Steps of clients' data.
    config : ConfigRecord
        Settings of every test, the `evaluate_config` of a run.
    central : Callable, optional
        Evaluates models on the server.
    ttl : float
        Time to live of the messages, in seconds.
    testers : Callable
        Returns the online clients that test on current data.
    report : Callable
        Receives the report of each completed evaluation on current data.
    """

    def __init__(
        self,
        method: Method,
        grid: Grid,
        clock: Timeline,
        packer: Packer,
        steps: Steps,
        *,
        config: ConfigRecord,
        central: EvaluateFn | None,
        ttl: float,
        testers: Callable[[Sequence[Client]], Sequence[Client]],
        report: Callable[[Evaluated], None],
    ) -> None:
        self._method, self._grid, self._clock, self._ttl = method, grid, clock, ttl
        self._packer, self._steps, self._config = packer, steps, config
        self._central, self._testers, self._report = central, testers, report
        self._progress = method.progress
        # Models at the start of the evaluation, since they may change before a client is idle: the
        # model of each cell, per feature and client.
        self._records: dict[str, dict[str, list[ArrayRecord]]] = {}
        # Idle clients that tested since the method last sent work. They get work before another
        # test; otherwise a slow client would only test and never train.
        self._tested: set[str] = set()
        # Not part of checkpoints: backdoors are tested in simulations only, where tests take no
        # time.
        self._successes: list[tuple[int, float]] = []

    # Start and end.

    def begin(self) -> None:
        """Begin an evaluation on current data; report it at once if it takes no time."""
        method, progress = self._method, self._progress
        progress.evaluated_at = progress.updates
        progress.evaluated_round = method.scheduling.rounds or 0
        progress.evaluated_step = progress.step
        self._successes = []
        testers = [client.client_id for client in self._testers(progress.fleet.online())]
        cells = {client: [(PRESENT, method.clusters.main(client))] for client in testers}
        progress.evaluation = self._evaluation(cells)
        if (test := self._central) is not None:
            updates = progress.updates
            mean, _ = tested_by_server(method, self._packer, lambda model: test(updates, model))
            if mean is not None:
                method.result.evaluate_metrics_serverapp[updates] = mean
        self._ask_first(progress.evaluation)

    def begin_tests_of_features(self, is_end: bool) -> None:
        """Begin the tests that features ask for now."""
        for name, tests in self._method.features.tests(is_end):
            self._begin_tests(name, tests)

    def finish(self, another: bool) -> None:
        """Wait for the outstanding answers for a limited time, and report.

        Parameters
        ----------
        another : bool
            Whether models changed since the last evaluation began, so that another is due.
        """
        self._end(self._progress.evaluation)
        if another:
            self.begin()
            self._end(self._progress.evaluation)
        self._end_tests_of_features()
        self.begin_tests_of_features(is_end=True)
        self._end_tests_of_features()

    def _end_tests_of_features(self) -> None:
        for tests in list(self._progress.feature_tests.values()):
            self._end(tests)

    def close_if_over(self) -> None:
        """Report complete evaluations."""
        for evaluation in self._progress.evaluations:
            if evaluation.is_over:
                self._close(evaluation)

    def forget(self) -> None:
        """Drop all tests in progress, whose messages are lost."""
        self._progress.evaluation = None
        self._progress.feature_tests.clear()
        self._tested.clear()

    def _begin_tests(self, feature: str, tests: StepTests) -> None:
        """Begin the tests of a feature; answers to its earlier ones are no longer awaited."""
        current = self._progress.feature_tests
        if feature in current:
            self._close(current[feature])

        def main(client: str, step: int) -> int:
            weights = self._method.serving(client, step)
            return max(weights, key=lambda cluster: weights[cluster])

        cells = {
            client: [
                *((step, main(client, step)) for step in steps),
                *([(steps[-1], UNTRAINED)] if tests.untrained else []),
            ]
            for client, steps in tests.steps.items()
        }
        current[feature] = self._evaluation(cells, feature, dict(tests.present))
        self._ask_first(current[feature])

    def _evaluation(
        self,
        cells: dict[str, list[tuple[int, int]]],
        feature: str = "",
        steps: dict[str, int] | None = None,
    ) -> Evaluation:
        now, updates, clusters = self._clock.now(), self._progress.updates, self._method.models
        waiting = dict.fromkeys(cells, True)
        return Evaluation(now, updates, len(clusters), cells, feature, steps or {}, waiting)

    def _end(self, evaluation: Evaluation | None) -> None:
        """Query all remaining clients, busy or not, wait for some time, and report."""
        if evaluation is None:
            return
        until = self._clock.now() + min(_LAST_SECONDS, self._ttl)
        for client in list(evaluation.waiting):
            self._push(evaluation, client)
        while evaluation.open and self._clock.now() < until:
            for reply in self._clock.wait(evaluation.open.keys(), until):
                client = evaluation.open.pop(reply.metadata.reply_to_message_id)
                self._process_scores(evaluation, client, reply)
        self._close(evaluation)

    def _close(self, evaluation: Evaluation) -> None:
        self._records.pop(evaluation.feature, None)
        if evaluation.feature:
            del self._progress.feature_tests[evaluation.feature]
            if evaluation.scores:
                self._method.features.tested(evaluation.feature, evaluation)
            return
        self._progress.evaluation = None
        if evaluation.scores:
            report = evaluation.report()
            self._method.result.evaluate_metrics_clientapp[report.updates] = MetricRecord(
                {report.measure.name: report.accuracy, names.LOSS: report.loss}
            )
            self._report(report)
        if self._successes:
            everywhere = fmean(success for _, success in self._successes)
            by_cluster = {k: fmean(values) for k, values in grouped(self._successes).items()}
            for schema, value in (
                (BACKDOOR_SUCCESS, everywhere),
                (BACKDOOR_BY_CLUSTER, dict(sorted(by_cluster.items()))),
            ):
                at = evaluation.time, evaluation.updates
                self._method.report(Measured(*at, schema, {schema.value: value}))

    # Asking.

    def ask(self, idle: Idle, again: bool = False) -> None:
        """Query idle clients that were not queried so far.

        Parameters
        ----------
        idle : Idle
            The idle clients.
        again : bool
            Whether to query clients just tested too, because the method gave them no work.
        """
        if again:
            self._tested.clear()
        for evaluation in self._progress.evaluations:
            for client in list(evaluation.waiting):
                if client in self._tested:
                    continue
                if client in idle:
                    if self._push(evaluation, client):
                        idle.remove(client)
                elif self._method.scheduling.invited(client):
                    self._push(evaluation, client)

    def _ask_first(self, evaluation: Evaluation) -> None:
        """Query all clients if this takes no time, in batches that fit into memory.

        Otherwise keep the current models until each client is idle.
        """
        clients = list(evaluation.cells)
        if not self._clock.free_evaluation:
            self._prepare(evaluation, clients)
        else:
            by_node, evaluation.waiting = self._progress.fleet.by_node, {}
            count = max(1, _BYTES // max(1, self._method.spec.num_bytes))
            for start in range(0, len(clients), count):
                asked = clients[start : start + count]
                self._prepare(evaluation, asked)
                messages = [self._message(evaluation, client) for client in asked]
                for reply in self._grid.send_and_receive(messages):
                    client = by_node.get(reply.metadata.src_node_id)
                    if client is not None:
                        self._process_scores(evaluation, client, reply)
        self.close_if_over()

    def _push(self, evaluation: Evaluation, client: str) -> bool:
        """Query a client; return whether the grid accepted the message."""
        del evaluation.waiting[client]
        message_id = push(self._grid, self._clock, self._message(evaluation, client))
        if message_id:
            evaluation.open[message_id] = client
        return message_id is not None

    def _prepare(self, evaluation: Evaluation, clients: Collection[str]) -> None:
        """Prepare the current models for some clients' tests."""
        method, feature, served = self._method, evaluation.feature, self._method.served
        prepared: dict[str, list[ArrayRecord]] = {}
        self._records[feature] = prepared
        for client in clients:
            # Steps with the same clusters share a record, so that each model is sent once.
            packed: dict[tuple[tuple[int, float], ...], ArrayRecord] = {}
            prepared[client] = models = []
            for step, cluster in evaluation.cells[client]:
                if cluster == UNTRAINED:
                    models.append(method.initial)
                    continue
                weights = method.serving(client, step) if feature else method.placement(client)
                key = tuple(sorted(weights.items()))
                if key not in packed:
                    packed[key] = self._packer.serve(served, weights)[0]
                models.append(packed[key])

    def _models(self, evaluation: Evaluation, client: str) -> list[ArrayRecord]:
        """Return the models that a client tests, one per cell."""
        if client not in self._records.get(evaluation.feature, {}):
            # After a resumption during an evaluation, current models are used.
            self._prepare(evaluation, [client])
        return self._records[evaluation.feature][client]

    def _message(self, evaluation: Evaluation, client: str) -> Message:
        node = self._progress.fleet.clients[client].node_id
        assert node is not None, "clients that left are dropped"
        models, settings = self._models(evaluation, client), dict(self._config)
        if evaluation.feature:
            cells = evaluation.cells[client]
            different = {id(model): model for model in models}
            records = {names.candidate(k): model for k, model in enumerate(different.values())}
            settings |= {
                names.KIND: names.TEST_STEPS,
                names.STEP: evaluation.steps[client],
                names.TESTED_STEPS: [step for step, _ in cells],
                names.TESTED_MODELS: [list(different).index(id(model)) for model in models],
                names.UNTRAINED: cells[-1][1] == UNTRAINED,
            }
        else:
            records, step = {names.ARRAYS: models[0]}, self._steps.tested(client)
            if step is not None:
                settings[names.STEP] = step
        content = RecordDict({**records, names.CONFIG: ConfigRecord(settings)})
        return Message(content, node, MessageType.EVALUATE, ttl=self._ttl)

    # Answers.

    def process_reply(self, message_id: str, reply: Message, idle: Idle) -> bool:
        """Process a client's answer and mark it idle; return False for other replies.

        Reports the evaluation after the last answer.
        """
        progress = self._progress
        awaiting = (each for each in progress.evaluations if message_id in each.open)
        if (evaluation := next(awaiting, None)) is None:
            return False
        client = evaluation.open.pop(message_id)
        # Only a client with an invitation may have a task during a test; it keeps the invitation.
        is_invited = self._method.scheduling.invited(client)
        works = is_invited and any(t.client == client for t in progress.in_flight.values())
        if not works and progress.fleet.clients[client].node_id is not None:
            idle.add(client)
            self._tested.add(client)
        self._process_scores(evaluation, client, reply)
        self.close_if_over()
        return True

    def drop(self, client: str) -> None:
        """Drop a client that left."""
        self._tested.discard(client)
        for evaluation in self._progress.evaluations:
            evaluation.drop(client)

    def _process_scores(self, evaluation: Evaluation, client: str, reply: Message) -> None:
        """Process a client's answer; count and report an invalid one."""
        try:
            scores = self._read(evaluation, client, reply)
        except InvalidReplyError as error:
            self._progress.rejected += 1
            text = "The test of %s was rejected: %s"
            log.warning(text, client, error, extra=about(client))
            now = self._clock.now()
            self._method.report(UpdateRejected(now, client, str(error), now))
        else:
            if scores:
                evaluation.scores[client] = scores

    def _read(self, evaluation: Evaluation, client: str, reply: Message) -> list[ClientScore]:
        cells = evaluation.cells[client]
        if not evaluation.feature:
            score = read_score(reply, cells[0][1], self._steps.tested(client) or 0)
            if score is None:
                return []
            if names.BACKDOOR_SUCCESS in self._config:
                metrics = next(iter(reply.content.metric_records.values()))
                success = metrics.get(names.BACKDOOR_SUCCESS)
                if isinstance(success, float):
                    self._successes.append((score.cluster, success))
            return [score]
        unit, values = read_scores(reply, len(cells))
        return [
            ClientScore(cluster, value, step=step, measure=Measure(unit))
            for (step, cluster), value in zip(cells, values, strict=bool(values))
        ]


def tested_by_server(
    method: Method, packer: Packer, test: Callable[[ArrayRecord], MetricRecord | None]
) -> tuple[MetricRecord | None, dict[int, MetricRecord]]:
    """Test every cluster's model by a server function.

    Returns
    -------
    tuple[MetricRecord or None, dict[int, MetricRecord]]
        Metrics averaged over the clusters' clients, and per cluster; empty if it returns None.
    """
    sizes = dict.fromkeys(method.models, 0.0)
    for client in method.progress.fleet.clients:
        for cluster, weight in method.placement(client).items():
            sizes[cluster] += weight
    found: dict[int, MetricRecord] = {}
    for cluster, model in method.served.items():
        if measured := test(packer.pack(cluster, model)[0]):
            found[cluster] = measured
    if len(found) <= 1:
        return next(iter(found.values()), None), found
    return mean_metrics([(record, sizes[cluster]) for cluster, record in found.items()]), found


def mean_metrics(measured: Sequence[tuple[Mapping[str, object], float]]) -> MetricRecord:
    """Return the weighted mean of each metric common to all records.

    If all weights are 0, records count equally. Lists of equal length are averaged elementwise.

    Parameters
    ----------
    measured : Sequence[tuple[Mapping[str, object], float]]
        Metrics by name with a weight of at least 0.
    """
    records, weights = [record for record, _ in measured], [weight for _, weight in measured]
    if not any(weights):
        weights = [1.0] * len(weights)
    total = math.fsum(weights)

    def mean(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total

    means = MetricRecord()
    for name in records[0] if records else ():
        values = [record.get(name) for record in records]
        lists = [value for value in values if isinstance(value, list)]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            means[name] = mean(numbers)
        elif len(lists) == len(values) and len({len(value) for value in lists}) == 1:
            means[name] = [mean(column) for column in zip(*lists, strict=True)]
    return means
