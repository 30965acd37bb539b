"""How evaluations are made: at once where that costs nothing, else by each client when free."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from logging import getLogger
from typing import Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from raceme.core import messages as names
from raceme.core.clients import Client, Idle
from raceme.core.clusters import Model, Weights, blended
from raceme.core.events import Evaluated, TasksTested, UpdateRejected
from raceme.core.messages import (
    ARRAYS,
    LARGEST,
    ModelSpec,
    StatementError,
    Vector,
    candidate,
    unit_of,
)
from raceme.core.progress import Steps, Sweep, TaskSweep, read_score
from raceme.core.strategy import Method
from raceme.core.timeline import Timeline, push
from raceme.flower.spill import BUDGET, Shelf, Spill, park

# -----------------------------------------------------------------------------
# Asking clients for a test each: when one is next free, before it trains again.
# -----------------------------------------------------------------------------


log = getLogger("raceme")

_BYTES = 1 << 28
"""Models under way at a time where all are asked at once, should each client have its own."""
_LAST_SECONDS = 60.0
"""How long the last tests of a run wait for clients that are still busy."""


class OpenTests(Protocol):
    """Tests under way.

    Attributes
    ----------
    waiting : dict[str, int]
        Clients that have not been asked yet.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    """

    waiting: dict[str, int]
    open: dict[str, str]


class Sweeper(ABC):
    """Asks every client of a sweep once, and takes the answers.

    Parameters
    ----------
    method : Method
        Whose models are tested.
    grid : Grid
        Where the clients are.
    clock : Timeline
        The grid's.
    ttl : float
        Time to live of the messages, in seconds.
    """

    def __init__(self, method: Method, grid: Grid, clock: Timeline, ttl: float) -> None:
        self._method, self._grid, self._clock, self._ttl = method, grid, clock, ttl
        self._progress = method.progress

    @property
    @abstractmethod
    def sweep(self) -> OpenTests | None:
        """The tests under way; None if there are none."""

    def _prepare(self, clients: Collection[str]) -> None:  # noqa: B027
        """Make ready what the messages to some clients are made of, as it is at this moment."""

    @abstractmethod
    def _message(self, client: str) -> Message:
        """Make the message that asks a client, who is online."""

    @abstractmethod
    def _score(self, client: str, reply: Message) -> None:
        """Take a client's answer, if it is one.

        Raises
        ------
        StatementError
            It states what cannot be.
        """

    def open_ids(self) -> Collection[str]:
        """Return the ids of messages without an answer."""
        return () if self.sweep is None else self.sweep.open.keys()

    def ask(self, idle: Idle) -> None:
        """Ask the clients that have time and have not been asked yet."""
        if self.sweep is None:
            return
        for client in list(self.sweep.waiting):
            if client in idle:
                if self._push(client):
                    idle.remove(client)
            elif self._method.scheduling.invited(client):
                self._push(client)

    def take(self, message_id: str, reply: Message, idle: Idle) -> None:
        """Take the answer to a message that is open, and let its client be idle."""
        progress = self._progress
        assert self.sweep is not None, "a message was asked about"
        client = self.sweep.open.pop(message_id)
        # One that holds an invitation has answered meanwhile, and holds it still.
        works = any(task.client == client for task in progress.in_flight.values())
        if not works and progress.fleet.clients[client].node_id is not None:
            idle.add(client)
        self._take_score(client, reply)

    def drop(self, client: str) -> None:
        """Wait no more for a client that is gone."""
        if self.sweep is not None:
            self.sweep.waiting.pop(client, None)
            kept = {key: name for key, name in self.sweep.open.items() if name != client}
            self.sweep.open = kept

    def _ask_at_once(self) -> None:
        """Ask everyone, where that costs no time: as many at a time as there is memory for."""
        assert self.sweep is not None, "tests are under way"
        by_node, waiting = self._progress.fleet.by_node, list(self.sweep.waiting)
        self.sweep.waiting = {}
        count = max(1, _BYTES // max(1, self._method.spec.num_bytes))
        for start in range(0, len(waiting), count):
            asked = waiting[start : start + count]
            self._prepare(asked)
            for reply in self._grid.send_and_receive([self._message(name) for name in asked]):
                client = by_node.get(reply.metadata.src_node_id)
                if client is not None:
                    self._take_score(client, reply)

    def _wait(self) -> None:
        """Ask everyone who is left, busy or not, and wait a while."""
        sweep, until = self.sweep, self._clock.now() + min(_LAST_SECONDS, self._ttl)
        assert sweep is not None, "tests are under way"
        for client in list(sweep.waiting):
            self._push(client)
        while sweep.open and self._clock.now() < until:
            for reply in self._clock.wait(sweep.open.keys(), until):
                self._take_score(sweep.open.pop(reply.metadata.reply_to_message_id), reply)
        sweep.open = {}

    def _take_score(self, client: str, reply: Message) -> None:
        """Take a client's answer; count and report one that states what cannot be."""
        try:
            self._score(client, reply)
        except StatementError as error:
            self._progress.rejected += 1
            log.warning("The test of %s was rejected: %s", client, error)
            now = self._clock.now()
            self._method.report(UpdateRejected(now, client, str(error), now))

    def _push(self, client: str) -> bool:
        """Ask one client; return whether the grid took the message."""
        assert self.sweep is not None, "tests are under way"
        del self.sweep.waiting[client]
        message_id = push(self._grid, self._clock, self._message(client))
        if message_id:
            self.sweep.open[message_id] = client
        return message_id is not None


# -----------------------------------------------------------------------------
# Models as they travel: packed once per version, however many clients receive them.
#
# Simulated clients hold the versions that they train from in the memory of this process. Those
# that
# are too many for it wait in a file.
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
        self._spec, self._spill = spec, Spill(budget)
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
            return {ARRAYS: packed[0][0]}, packed[0][1]
        records = {candidate(index): record for index, (record, _) in enumerate(packed)}
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
            park(arrays, self._spill)


# -----------------------------------------------------------------------------
# Tests on the data of every step so far: what a run has forgotten, and what it knows already.
#
# When a step of a client's data is over, before anybody trains on the next one, and at the end
# of
# the run each client that is online tests the models that serve it on its test data of every
# step so
# far, and of the next one. Lopez-Paz and Ranzato ("Gradient Episodic Memory", NeurIPS 2017) call
# the
# result the matrix R.
# -----------------------------------------------------------------------------


class TaskTests(Sweeper):
    """Has the models of the end of a step tested on the data of all steps so far.

    Parameters
    ----------
    method : Method
        Whose models.
    grid : Grid
        Where the clients are.
    clock : Timeline
        The grid's.
    packer : Packer
        Makes records of models.
    steps : Steps
        Knows at which step clients' data are.
    config : ConfigRecord
        Sent along.
    ttl : float
        Time to live of the messages, in seconds.
    """

    def __init__(
        self,
        method: Method,
        grid: Grid,
        clock: Timeline,
        packer: Packer,
        steps: Steps,
        config: ConfigRecord,
        ttl: float,
    ) -> None:
        super().__init__(method, grid, clock, ttl)
        self._packer, self._steps, self._config = packer, steps, config
        # What each client is sent: the models of the moment, which may move on before it is free.
        self._contents: dict[str, RecordDict] = {}

    @property
    def sweep(self) -> TaskSweep | None:
        """The tests under way; None if there are none."""
        return self._progress.task_sweep

    def look(self) -> Iterator[TasksTested]:
        """Begin tests if a step of anybody's data is over; yield what is known at once."""
        ended = self._steps.ended()
        if ended:
            yield from self._begin(ended, ahead=True)

    def finish(self) -> Iterator[TasksTested]:
        """End with what clients answer soon, and with tests of the run's last models."""
        if self.sweep is not None:
            self._wait()
            yield from self.close_if_over()
        last = self._steps.unfinished()
        if last:
            yield from self._begin(last, ahead=False)
            if self.sweep is not None:
                self._wait()
                yield from self.close_if_over()

    def close_if_over(self) -> Iterator[TasksTested]:
        """Yield the reports of tests to which nobody is left to answer."""
        sweep = self.sweep
        if sweep is not None and not sweep.waiting and not sweep.open:
            yield from self._close(sweep)

    def _begin(self, last: Mapping[str, int], ahead: bool) -> Iterator[TasksTested]:
        """Begin tests of these clients' models; where that costs no time, yield the reports."""
        if self.sweep is not None:
            # Another step is over before slow devices have answered: they will not, now.
            yield from self._close(self.sweep)
        method, progress = self._method, self._progress
        progress.tasks_tested_at = progress.updates
        sweep = TaskSweep(self._clock.now(), progress.updates, len(method.models), ahead)
        sweep.last, sweep.waiting = dict(last), dict(last)
        for client, step in last.items():
            weights = [method.serving(client, tested) for tested in range(step + 1 + ahead)]
            sweep.placed[client] = [_main(of) for of in weights]
            self._contents[client] = self._content(weights, step, ahead)
        progress.task_sweep = sweep
        if self._clock.free_evaluation:
            self._ask_at_once()
        yield from self.close_if_over()

    def _close(self, sweep: TaskSweep) -> Iterator[TasksTested]:
        self._progress.task_sweep, self._contents = None, {}
        yield from sweep.reports()

    def _content(self, serving: list[Weights], last: int, ahead: bool) -> RecordDict:
        """Make a message: each model once, and which of them is tested on which step."""
        records: list[ArrayRecord] = []
        served = self._method.served
        known: dict[tuple[tuple[int, float], ...], int] = {}
        which = []
        for weights in serving:
            key = tuple(sorted(weights.items()))
            if key not in known:
                known[key] = len(records)
                records.append(self._packer.serve(served, weights)[0])
            which.append(known[key])
        steps = list(range(len(serving)))
        if ahead:
            steps.append(steps[-1])
            which.append(len(records))
            records.append(self._method.initial)
        settings = {
            **self._config,
            names.KIND: names.TEST_STEPS,
            names.STEP: last,
            names.TESTED_STEPS: steps,
            names.TESTED_MODELS: which,
        }
        models = {names.candidate(index): record for index, record in enumerate(records)}
        return RecordDict({**models, names.CONFIG: ConfigRecord(settings)})

    def _message(self, client: str) -> Message:
        node = self._progress.fleet.clients[client].node_id
        assert node is not None, "clients that left are dropped"
        sweep = self.sweep
        assert sweep is not None, "tests are under way"
        if client not in self._contents:
            # The run was resumed in the middle of the tests: the models are those of now.
            tested = range(len(sweep.placed[client]))
            serving = [self._method.serving(client, step) for step in tested]
            self._contents[client] = self._content(serving, sweep.last[client], sweep.ahead)
        return Message(self._contents[client], node, MessageType.EVALUATE, ttl=self._ttl)

    def _score(self, client: str, reply: Message) -> None:
        sweep = self.sweep
        assert sweep is not None, "tests are under way"
        tested = len(sweep.placed[client])
        unit, scores = read_scores(reply, tested + sweep.ahead)
        if scores:
            sweep.units[client] = unit
            sweep.scores[client] = scores if sweep.ahead else [*scores, math.nan]


def read_scores(reply: Message, count: int) -> tuple[str | None, list[float]]:
    """Take the unit and so many scores out of a reply; none if it is an error or no answer.

    What is no accuracy, and of a regression no error, is NaN. An error may be infinite: the
    prediction of a model that diverged.

    Raises
    ------
    StatementError
        The unit is none.
    """
    if reply.has_error() or names.NUMBERS not in reply.content.array_records:
        return None, []
    told: Mapping[str, object] = reply.content.config_records.get(names.CONFIG, {})
    unit = unit_of(told.get(names.UNIT))
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
    highest = 1.0 if unit is None else LARGEST
    usable = (numbers >= 0) & ((numbers <= highest) | (np.isposinf(numbers) & (unit is not None)))
    return unit, [float(value) for value in np.where(usable, numbers, np.nan)]


def _main(weights: Weights) -> int:
    """Return the cluster with the largest weight."""
    return max(weights, key=lambda cluster: weights[cluster])


# -----------------------------------------------------------------------------
# Several collections seen as one, without a copy of any.
# -----------------------------------------------------------------------------


class Together(Collection[str]):
    """What is in any of some collections that have nothing in common.

    Parameters
    ----------
    *parts : Collection[str]
        The collections; what changes in them shows here.
    """

    def __init__(self, *parts: Collection[str]) -> None:
        self._parts = parts

    def __contains__(self, item: object) -> bool:
        return any(item in part for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


# -----------------------------------------------------------------------------
# How evaluations are made: at once where that costs nothing, else by each client when free.
# -----------------------------------------------------------------------------


EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

Report = Evaluated | TasksTested


class Evaluator(Sweeper):
    """Has the models of one moment tested by all clients that are online then.

    Parameters
    ----------
    method : Method
        Whose models.
    grid : Grid
        Where the clients are.
    clock : Timeline
        The grid's.
    packer : Packer
        Makes records of models.
    steps : Steps
        Knows at which step clients' data are.
    config : ConfigRecord
        Sent along.
    central : Callable, optional
        Evaluates models on the server.
    ttl : float
        Time to live of the messages, in seconds.
    testers : Callable
        Returns who tests, given who is online.
    """

    def __init__(
        self,
        method: Method,
        grid: Grid,
        clock: Timeline,
        packer: Packer,
        steps: Steps,
        config: ConfigRecord,
        central: EvaluateFn | None,
        ttl: float,
        testers: Callable[[Sequence[Client]], Sequence[Client]],
    ) -> None:
        super().__init__(method, grid, clock, ttl)
        self._testers = testers
        self._packer, self._steps, self._config, self._central = packer, steps, config, central
        self._tasks = TaskTests(method, grid, clock, packer, steps, config, ttl)
        # The models of the moment, by client: those of clusters, packed once for each, and those
        # that a client alone uses. In a large fleet these wait in a file.
        self._records: dict[str, ArrayRecord] = {}
        self._own: Mapping[str, Vector] = {}

    def begin(self) -> Evaluated | None:
        """Begin an evaluation; where it costs no time, return its report."""
        method, progress = self._method, self._progress
        progress.evaluated_at = progress.updates
        progress.evaluated_round = method.scheduling.rounds or 0
        progress.evaluated_step = progress.step
        online = self._testers(progress.fleet.online())
        waiting = {c.client_id: method.clusters.main(c.client_id) for c in online}
        sweep = Sweep(self._clock.now(), progress.updates, len(method.models), len(online), waiting)
        sweep.placed = dict(waiting)
        progress.sweep = sweep
        self._evaluate_centrally()
        if self._clock.free_evaluation:
            self._ask_at_once()
        else:
            self._prepare(waiting)
        return self._closed()

    @property
    def sweep(self) -> Sweep | None:
        """The evaluation under way; None if there is none."""
        return self._progress.sweep

    def forget(self) -> None:
        """Forget all tests under way: their messages are lost."""
        self._progress.sweep = self._progress.task_sweep = None

    def open_ids(self) -> Collection[str]:
        """Return the ids of messages without an answer, tests of tasks included."""
        return Together(super().open_ids(), self._tasks.open_ids())

    def ask(self, idle: Idle) -> None:
        """Ask the clients that have time and have not been asked yet."""
        super().ask(idle)
        self._tasks.ask(idle)

    def take_in(self, message_id: str, reply: Message, idle: Idle) -> Iterator[Report]:
        """Take a client's answer, and let it be idle; yield the reports if it was the last."""
        sweeper: Sweeper = self if message_id in super().open_ids() else self._tasks
        sweeper.take(message_id, reply, idle)
        yield from self.close_if_over()

    def drop(self, client: str) -> None:
        """Wait no more for a client that is gone."""
        super().drop(client)
        self._tasks.drop(client)

    def look_at_tasks(self) -> Iterator[TasksTested]:
        """Have all tasks tested if a step of anybody's data is over; yield what is known then."""
        yield from self._tasks.look()

    def finish(self, another: bool) -> Iterator[Report]:
        """End with what the clients answer soon; yield the reports that come of it.

        Parameters
        ----------
        another : bool
            The models have changed since the last evaluation began: one more is due.
        """
        if self._progress.sweep is not None:
            self._wait()
            yield from self.close_if_over()
        if another:
            report = self.begin()
            if report is not None:
                yield report
            elif self._progress.sweep is not None:
                self._wait()
                yield from self.close_if_over()
        yield from self._tasks.finish()

    def _message(self, client: str) -> Message:
        settings = dict(self._config)
        step = self._steps.tested(client)
        if step is not None:
            settings[names.STEP] = step
        node = self._progress.fleet.clients[client].node_id
        assert node is not None, "clients that left are dropped"
        if client not in self._records and client not in self._own:
            # The run was resumed in the middle of an evaluation: the models are those of now.
            self._prepare([client])
        own = self._own.get(client)
        record = self._records[client] if own is None else self._method.spec.pack(own)
        content = RecordDict({names.ARRAYS: record, names.CONFIG: ConfigRecord(settings)})
        return Message(content, node, MessageType.EVALUATE, ttl=self._ttl)

    def _prepare(self, clients: Collection[str]) -> None:
        method, served = self._method, self._method.served
        self._own = own = Shelf()
        for client, vector in method.used(clients):
            own[client] = vector
        self._records = {
            client: self._packer.serve(served, method.placement(client))[0]
            for client in clients
            if client not in own
        }

    def _score(self, client: str, reply: Message) -> None:
        """Take a client's score, if it has one."""
        sweep = self._progress.sweep
        assert sweep is not None, "an evaluation is under way"
        score = read_score(reply, sweep.placed[client], self._steps.tested(client) or 0)
        if score is not None:
            sweep.scores[client] = score

    def close_if_over(self) -> Iterator[Report]:
        """Yield the reports of tests to which nobody is left to answer."""
        report = self._closed()
        if report is not None:
            yield report
        yield from self._tasks.close_if_over()

    def _closed(self) -> Evaluated | None:
        """Return the report of an evaluation to which nobody is left to answer."""
        sweep = self._progress.sweep
        if sweep is None or not sweep.is_over:
            return None
        self._progress.sweep, self._records, self._own = None, {}, {}
        if not sweep.scores:
            return None
        report = sweep.report()
        self._method.result.evaluate_metrics_clientapp[report.updates] = MetricRecord(
            {report.measure.name: report.accuracy, names.LOSS: report.loss}
        )
        return report

    def _evaluate_centrally(self) -> None:
        """Let the server's own function test every cluster's model; average over the clients."""
        if self._central is None:
            return
        test, updates = self._central, self._progress.updates
        mean, _ = tested_by_server(self._method, self._packer, partial(test, updates))
        if mean is not None:
            self._method.result.evaluate_metrics_serverapp[updates] = mean


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
    if not found:
        return None, {}
    return mean_metrics([(record, sizes[cluster]) for cluster, record in found.items()]), found


def mean_metrics(measured: list[tuple[MetricRecord, float]]) -> MetricRecord:
    """Return the means of metrics that all records have, by weight; one record is its own mean.

    Lists are left out, unless there is one record only.
    """
    if len(measured) == 1:
        return measured[0][0]
    if not any(weight for _, weight in measured):
        measured = [(record, 1.0) for record, _ in measured]
    total = sum(weight for _, weight in measured)
    means = MetricRecord()
    for name in measured[0][0]:
        values = [record.get(name) for record, _ in measured]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            weights = (weight for _, weight in measured)
            means[name] = sum(n * w for n, w in zip(numbers, weights, strict=True)) / total
    return means
