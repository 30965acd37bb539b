"""How evaluations are made: at once where that costs nothing, else by each client when free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from raceme.compat.spill import Shelf
from raceme.protocol import messages as names
from raceme.protocol.events import Evaluated, TasksTested
from raceme.protocol.messages import Vector
from raceme.protocol.timeline import Timeline
from raceme.server.evaluation import Sweep, read_score
from raceme.server.fleet import Client
from raceme.server.idle import Idle
from raceme.server.interface import Questions
from raceme.server.packing import Packer
from raceme.server.steps import Steps
from raceme.server.sweeper import Sweeper
from raceme.server.task_tests import TaskTests
from raceme.server.together import Together

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

Report = Evaluated | TasksTested


class Evaluator(Sweeper):
    """Has the models of one moment tested by all clients that are online then.

    Parameters
    ----------
    method : Questions
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
        method: Questions,
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
        progress.evaluated_round = method.dispatch.rounds or 0
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
    method: Questions, packer: Packer, test: Callable[[ArrayRecord], MetricRecord | None]
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
