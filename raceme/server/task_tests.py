"""Tests on the data of every step so far: what a run has forgotten, and what it knows already.

When a step of a client's data is over, before anybody trains on the next one, and at the end of
the run each client that is online tests the models that serve it on its test data of every step so
far, and of the next one. Lopez-Paz and Ranzato ("Gradient Episodic Memory", NeurIPS 2017) call the
result the matrix R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from raceme.clustering.clusters import Weights
from raceme.protocol import messages as names
from raceme.protocol.events import TasksTested
from raceme.protocol.stated import LARGEST, unit_of
from raceme.protocol.timeline import Timeline
from raceme.server.interface import Questions
from raceme.server.packing import Packer
from raceme.server.steps import Steps
from raceme.server.sweeper import Sweeper
from raceme.server.task_sweep import TaskSweep


class TaskTests(Sweeper):
    """Has the models of the end of a step tested on the data of all steps so far.

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
    ttl : float
        Time to live of the messages, in seconds.
    """

    def __init__(
        self,
        method: Questions,
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
