"""Evaluations: the models of one moment, tested by clients on their data, and how they travel."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from raceme.core import messages as names
from raceme.core.clients import Client, Idle
from raceme.core.clusters import Model, Weights, blended
from raceme.core.errors import quoted
from raceme.core.events import ACCURACY, Evaluated, Measure, TasksTested, UpdateRejected
from raceme.core.messages import InvalidReplyError, ModelSpec, Vector
from raceme.core.progress import PRESENT, ClientScore, Evaluation, Steps
from raceme.core.strategy import Method
from raceme.core.timeline import Timeline, push
from raceme.flower.messages import BUDGET, Shelf, SpillFile, spill_arrays

log = getLogger("raceme")

# -----------------------------------------------------------------------------
# Models as they travel: packed once per version, however many clients receive them.
#
# Simulated clients hold the versions that they train from in the memory of this process. Those
# that are too many for it wait in a file.
# -----------------------------------------------------------------------------


class Packer:
    """Turns models into records, and keeps the record of each cluster's present version.

    Parameters
    ----------
    spec : ModelSpec
        What a model looks like.
    budget : int
        Bytes of former versions in memory at most.
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
        """Return whether the record of a cluster is that of its present version."""
        # Not in `pack`: what it refers to would keep the former version in memory.
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
        """Return the models that a client is sent, by the names of their records, and their size.

        A model to be trained is called ``arrays``; those of other work are numbered.
        """
        packed = [self.pack(cluster, models[cluster]) for cluster in clusters]
        if len(packed) == 1 and not numbered:
            return {names.ARRAYS: packed[0][0]}, packed[0][1]
        records = {names.candidate(index): record for index, (record, _) in enumerate(packed)}
        return records, sum(size for _, size in packed)

    def keep_only(self, models: Mapping[int, Model]) -> None:
        """Forget the records of clusters that do not exist any more."""
        # Asked after every update: looked at only when there are records too many.
        if len(self._packed) > len(models):
            for cluster in self._packed.keys() - models.keys():
                self._drop(cluster)

    def _drop(self, cluster: int) -> None:
        """Forget a record; what clients still have of it may have to leave the memory."""
        if cluster in self._packed:
            _, _, record, _ = self._packed.pop(cluster)
            arrays = [weakref.ref(array) for array in record.values()]
            del record
            spill_arrays(arrays, self._spill)


# -----------------------------------------------------------------------------
# What clients answer.
# -----------------------------------------------------------------------------


def read_score(reply: Message, cluster: int, latest: int = 0) -> ClientScore | None:
    """Take accuracy and loss out of a reply; None if it states none.

    Parameters
    ----------
    reply : Message
        Reply to a test of a model.
    cluster : int
        Main cluster of the client.
    latest : int
        Latest step that its data can be at.

    Raises
    ------
    InvalidReplyError
        It states what cannot be.
    """
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    stated: Mapping[str, object] = reply.content.config_records.get(names.CONFIG, {})
    step, unit = stated.get(names.STEP, 0), names.unit_of(stated.get(names.UNIT))
    if not isinstance(step, int) or not 0 <= step <= latest:
        raise InvalidReplyError(
            f"it has tested on step {quoted(step)}, and its data are at {latest}"
        )
    metrics = next(iter(reply.content.metric_records.values()))
    return score_from(metrics, cluster, step, Measure(unit))


def score_from(
    metrics: Mapping[str, object], cluster: int, step: int = 0, measure: Measure = ACCURACY
) -> ClientScore | None:
    """Take accuracy and loss out of a client's metrics; None if there are none.

    An error may be infinite: the prediction of a model that diverged. An accuracy may be NaN, as
    that of no samples is: then it is none.

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
    """Take the unit and so many scores out of a reply; none if it is an error or no answer.

    What is no accuracy, and of a regression no error, is NaN. An error may be infinite: the
    prediction of a model that diverged.

    Raises
    ------
    InvalidReplyError
        The unit is none.
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
# Asking clients and taking their answers: at once where that costs nothing, else each when free.
# -----------------------------------------------------------------------------

_BYTES = 1 << 28
"""Models under way at a time where all are asked at once, should each client have its own."""
_LAST_SECONDS = 60.0
"""How long the last tests of a run wait for clients that are still busy."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

Report = Evaluated | TasksTested


class Evaluator:
    """Has the models of one moment tested by clients, on the cells of an `Evaluation`.

    One on the present data and one on all steps may be under way together.

    Parameters
    ----------
    method : Method
        The method whose models are tested.
    clock : Timeline
        Clock of the grid, which dates the reports.
    steps : Steps
        Knows at which step clients' data are.
    config : ConfigRecord
        Settings that travel with every test, the `evaluate_config` of a run.
    central : Callable, optional
        Evaluates models on the server.
    ttl : float
        Time to live of the messages, in seconds.
    testers : Callable
        Returns the clients that test on the present data, of those online.
    report : Callable
        Called with the report of each evaluation that is over.
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
        report: Callable[[Report], None],
    ) -> None:
        self._method, self._grid, self._clock, self._ttl = method, grid, clock, ttl
        self._packer, self._steps, self._config = packer, steps, config
        self._central, self._testers, self._report = central, testers, report
        self._progress = method.progress
        # The models of the moment, which may move on before a client is free: by the kind of
        # evaluation and client those of clusters, one for each cell, and models that a client alone
        # uses. In a large fleet these wait in a file.
        self._records: dict[bool, dict[str, list[ArrayRecord]]] = {}
        self._own: Mapping[str, Vector] = {}
        # Idle clients that have been tested since the method last handed out work. They come first
        # when it does so again: a slow client would otherwise be tested for ever, and never train.
        self._tested: set[str] = set()

    # Beginning and ending.

    def begin(self) -> None:
        """Begin an evaluation on the present data; where it costs no time, report it."""
        method, progress = self._method, self._progress
        progress.evaluated_at = progress.updates
        progress.evaluated_round = method.scheduling.rounds or 0
        progress.evaluated_step = progress.step
        testers = [client.client_id for client in self._testers(progress.fleet.online())]
        cells = {client: {PRESENT: method.clusters.main(client)} for client in testers}
        progress.evaluation = self._evaluation(cells)
        if (test := self._central) is not None:
            updates = progress.updates
            mean, _ = tested_by_server(method, self._packer, lambda model: test(updates, model))
            if mean is not None:
                method.result.evaluate_metrics_serverapp[updates] = mean
        self._ask_first(progress.evaluation)

    def look_at_steps(self) -> None:
        """Begin an evaluation on all steps if one of them is over."""
        if ended := self._steps.ended():
            self._begin_of_steps(ended, ahead=True)

    def finish(self, another: bool) -> None:
        """End with what the clients answer soon, and report it.

        Parameters
        ----------
        another : bool
            The models have changed since the last evaluation began: one more is due.
        """
        self._end(self._progress.evaluation)
        if another:
            self.begin()
            self._end(self._progress.evaluation)
        self._end(self._progress.task_evaluation)
        if last := self._steps.unfinished():
            self._begin_of_steps(last, ahead=False)
            self._end(self._progress.task_evaluation)

    def close_if_over(self) -> None:
        """Report the evaluations to which no client is left to answer."""
        for evaluation in self._progress.evaluations:
            if evaluation.is_over:
                self._close(evaluation)

    def forget(self) -> None:
        """Forget all tests under way: their messages are lost."""
        self._progress.evaluation = self._progress.task_evaluation = None
        self._tested.clear()

    def _begin_of_steps(self, last: Mapping[str, int], ahead: bool) -> None:
        """Begin an evaluation on each step up to the last one of each client, and one ahead."""
        method, progress = self._method, self._progress
        if progress.task_evaluation is not None:
            # Another step is over before slow devices have answered: they will not, now.
            self._close(progress.task_evaluation)
        progress.tasks_tested_at = progress.updates

        def main(client: str, step: int) -> int:
            weights = method.serving(client, step)
            return max(weights, key=lambda cluster: weights[cluster])

        cells = {
            client: {tested: main(client, tested) for tested in range(step + 1 + ahead)}
            for client, step in last.items()
        }
        progress.task_evaluation = self._evaluation(cells, of_steps=True, ahead=ahead)
        self._ask_first(progress.task_evaluation)

    def _evaluation(
        self, cells: dict[str, dict[int, int]], of_steps: bool = False, ahead: bool = False
    ) -> Evaluation:
        now, updates, clusters = self._clock.now(), self._progress.updates, self._method.models
        waiting = dict.fromkeys(cells, True)
        return Evaluation(now, updates, len(clusters), cells, of_steps, ahead, waiting)

    def _end(self, evaluation: Evaluation | None) -> None:
        """Ask all clients that are left, busy or not, wait a while, and report."""
        if evaluation is None:
            return
        until = self._clock.now() + min(_LAST_SECONDS, self._ttl)
        for client in list(evaluation.waiting):
            self._push(evaluation, client)
        while evaluation.open and self._clock.now() < until:
            for reply in self._clock.wait(evaluation.open.keys(), until):
                client = evaluation.open.pop(reply.metadata.reply_to_message_id)
                self._take_scores(evaluation, client, reply)
        self._close(evaluation)

    def _close(self, evaluation: Evaluation) -> None:
        self._records.pop(evaluation.of_steps, None)
        if evaluation.of_steps:
            self._progress.task_evaluation = None
        else:
            self._progress.evaluation, self._own = None, {}
        for report in evaluation.reports():
            if isinstance(report, Evaluated):
                self._method.result.evaluate_metrics_clientapp[report.updates] = MetricRecord(
                    {report.measure.name: report.accuracy, names.LOSS: report.loss}
                )
            self._report(report)

    # Asking.

    def ask(self, idle: Idle, again: bool = False) -> None:
        """Ask the clients that have time and have not been asked yet.

        Parameters
        ----------
        idle : Idle
            The clients that have time.
        again : bool
            Ask also clients that have just been tested: the method has passed them over.
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
        """Ask all clients where that costs no time: as many at a time as there is memory for.

        Elsewhere keep the models of this moment until each client is free.
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
                        self._take_scores(evaluation, client, reply)
        self.close_if_over()

    def _push(self, evaluation: Evaluation, client: str) -> bool:
        """Ask one client; return whether the grid took the message."""
        del evaluation.waiting[client]
        message_id = push(self._grid, self._clock, self._message(evaluation, client))
        if message_id:
            evaluation.open[message_id] = client
        return message_id is not None

    def _prepare(self, evaluation: Evaluation, clients: Collection[str]) -> None:
        """Make ready what some clients test, as it is at this moment."""
        method, of_steps, served = self._method, evaluation.of_steps, self._method.served
        if not of_steps:
            self._own = own = Shelf()
            for client, vector in method.used(clients):
                own[client] = vector
        prepared: dict[str, list[ArrayRecord]] = {}
        self._records[of_steps] = prepared
        for client in clients:
            if client in self._own and not of_steps:
                continue
            # Steps that the same clusters serve share a record: each model travels once.
            packed: dict[tuple[tuple[int, float], ...], ArrayRecord] = {}
            prepared[client] = models = []
            for step in evaluation.cells[client]:
                weights = method.serving(client, step) if of_steps else method.placement(client)
                key = tuple(sorted(weights.items()))
                if key not in packed:
                    packed[key] = self._packer.serve(served, weights)[0]
                models.append(packed[key])
            if evaluation.ahead:
                models.append(method.initial)

    def _models(self, evaluation: Evaluation, client: str) -> list[ArrayRecord]:
        """Return the models that a client tests: one for each cell, and an untrained one ahead."""
        own: Mapping[str, Vector] = {} if evaluation.of_steps else self._own
        if client not in self._records.get(evaluation.of_steps, {}) and client not in own:
            # The run was resumed in the middle of an evaluation: the models are those of now.
            self._prepare(evaluation, [client])
            own = {} if evaluation.of_steps else self._own
        if client in own:
            return [self._method.spec.pack(own[client])]
        return self._records[evaluation.of_steps][client]

    def _message(self, evaluation: Evaluation, client: str) -> Message:
        node = self._progress.fleet.clients[client].node_id
        assert node is not None, "clients that left are dropped"
        models, settings = self._models(evaluation, client), dict(self._config)
        if evaluation.of_steps:
            different = {id(model): model for model in models}
            records = {names.candidate(k): model for k, model in enumerate(different.values())}
            settings |= {
                names.KIND: names.TEST_STEPS,
                names.STEP: evaluation.last_step(client),
                names.TESTED_STEPS: [step for step, _ in evaluation.tests(client)],
                names.TESTED_MODELS: [list(different).index(id(model)) for model in models],
            }
        else:
            records, step = {names.ARRAYS: models[0]}, self._steps.tested(client)
            if step is not None:
                settings[names.STEP] = step
        content = RecordDict({**records, names.CONFIG: ConfigRecord(settings)})
        return Message(content, node, MessageType.EVALUATE, ttl=self._ttl)

    # Taking answers.

    def take_in(self, message_id: str, reply: Message, idle: Idle) -> bool:
        """Take a client's answer and let it be idle; return False for a reply to another message.

        The evaluation is reported if this answer was the last one.
        """
        progress = self._progress
        awaiting = (each for each in progress.evaluations if message_id in each.open)
        if (evaluation := next(awaiting, None)) is None:
            return False
        client = evaluation.open.pop(message_id)
        # One that holds an invitation has answered meanwhile, and holds it still.
        works = any(task.client == client for task in progress.in_flight.values())
        if not works and progress.fleet.clients[client].node_id is not None:
            idle.add(client)
            self._tested.add(client)
        self._take_scores(evaluation, client, reply)
        self.close_if_over()
        return True

    def drop(self, client: str) -> None:
        """Wait no more for a client that is gone."""
        self._tested.discard(client)
        for evaluation in self._progress.evaluations:
            evaluation.drop(client)

    def _take_scores(self, evaluation: Evaluation, client: str, reply: Message) -> None:
        """Take a client's answer, if it is one; count and report one that states what cannot be."""
        try:
            scores = self._read(evaluation, client, reply)
        except InvalidReplyError as error:
            self._progress.rejected += 1
            log.warning("The test of %s was rejected: %s", client, error)
            now = self._clock.now()
            self._method.report(UpdateRejected(now, client, str(error), now))
        else:
            if scores:
                evaluation.scores[client] = scores

    def _read(self, evaluation: Evaluation, client: str, reply: Message) -> list[ClientScore]:
        tests = evaluation.tests(client)
        if not evaluation.of_steps:
            score = read_score(reply, tests[0][1], self._steps.tested(client) or 0)
            return [] if score is None else [score]
        unit, values = read_scores(reply, len(tests))
        return [
            ClientScore(cluster, value, step=step, measure=Measure(unit))
            for (step, cluster), value in zip(tests, values, strict=bool(values))
        ]


def tested_by_server(
    method: Method, packer: Packer, test: Callable[[ArrayRecord], MetricRecord | None]
) -> tuple[MetricRecord | None, dict[int, MetricRecord]]:
    """Let a function of the server test every cluster's model.

    Returns
    -------
    tuple[MetricRecord or None, dict[int, MetricRecord]]
        What it has measured, averaged over the clusters' clients, and of each cluster; nothing
        where it returns nothing.
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
    """Return the mean of each metric that all records have, by weight.

    Where all weights are 0 all records count alike. Lists are averaged number by number, if they
    are of one length.

    Parameters
    ----------
    measured : Sequence[tuple[Mapping[str, object], float]]
        Metrics by name, each with its weight of at least 0.
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
