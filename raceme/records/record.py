"""A run as columns of numbers, for plots, reports and comparisons."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raceme.core import events
from raceme.core.events import Event, EventHandler, Placement, grouped, home
from raceme.records.store import each_event
from raceme.records.summary import Floats, RunSummary

Integers = NDArray[np.int64]
Texts = NDArray[np.str_]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Updates:
    """The accepted updates, one element each; see :class:`raceme.core.events.UpdateApplied`.

    Unknown values are NaN: ``started_at`` and ``cpu_seconds`` on virtual time,
    accuracies and ``passes`` without scored uploads.
    """

    seq: Integers
    time: Floats
    client: Texts
    cluster: Integers
    base_version: Integers
    staleness: Integers
    weight: Floats
    dispatched_at: Floats
    train_loss: Floats
    bytes_down: Integers
    bytes_up: Integers
    started_at: Floats
    step: Integers
    accuracy_before: Floats
    accuracy_after: Floats
    passes: Floats
    phase: Texts
    cpu_seconds: Floats


@dataclass(frozen=True)
class Answers:
    """Answers to work other than training; see :class:`raceme.core.events.AnswerTaken`."""

    time: Floats
    client: Texts
    kind: Texts
    phase: Texts
    bytes_down: Integers
    bytes_up: Integers


@dataclass(frozen=True)
class Rejections:
    """The unused replies; see :class:`raceme.core.events.UpdateRejected`."""

    time: Floats
    client: Texts
    reason: Texts
    dispatched_at: Floats


@dataclass(frozen=True)
class Evaluations:
    """The evaluations; see :class:`raceme.core.events.Evaluated`."""

    time: Floats
    updates: Integers
    accuracy: Floats
    weighted_accuracy: Floats
    loss: Floats
    clusters: Integers
    asked: Integers
    answered: Integers
    counts: Flags


@dataclass(frozen=True)
class ClientEvaluations:
    """Each client's result of each evaluation.

    Attributes
    ----------
    evaluation : ndarray of int
        Index of the evaluation in :class:`Evaluations`, ascending.
    """

    evaluation: Integers
    client: Texts
    cluster: Integers
    accuracy: Floats
    loss: Floats
    step: Integers

    def means(self, chosen: Flags, count: int) -> Floats:
        """Return the mean accuracy of some rows at each of `count` evaluations; NaN without any."""
        index = self.evaluation[chosen]
        tests = np.bincount(index, minlength=count)
        total = np.bincount(index, weights=self.accuracy[chosen], minlength=count)
        return np.where(tests > 0, total / np.maximum(tests, 1), np.nan)


@dataclass(frozen=True)
class ClientRecord:
    """A client at its first greeting.

    Attributes
    ----------
    online : tuple of (float, float or None)
        Online periods; None: until the end.
    """

    client: str
    joined_at: float
    num_examples: int
    group: int | None
    online: tuple[tuple[float, float | None], ...]


class History:
    """The clusters of each client over time, from its placements in order."""

    def __init__(self, placements: Iterable[Placement] = ()) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._weights: defaultdict[str, list[Mapping[int, float]]] = defaultdict(list)
        for placed in placements:
            self.observe(placed)

    def observe(self, placed: Placement) -> None:
        """Add a change of a client's clusters."""
        self._times[placed.client].append(placed.time)
        self._weights[placed.client].append(placed.weights)

    def at(self, client: str, time: float) -> Mapping[int, float]:
        """Return the weights of a client's clusters at a time."""
        index = bisect_right(self._times[client], time)
        return self._weights[client][index - 1] if index else {}

    def trained(self, client: str, sent: float, cluster: int) -> int:
        """Return the cluster whose model a client trained.

        An update that arrives after a split is applied to one of the new clusters, which did not
        exist when the task was sent.
        """
        weights = self.at(client, sent)
        before = home(weights)
        return cluster if cluster in weights or before is None else before


@dataclass(frozen=True)
class RunRecord:
    """The content of a run store.

    Attributes
    ----------
    clients : tuple of ClientRecord
        Clients in order of joining.
    summary : RunSummary
        Numbers of the whole run: its end, groups and sizes, scores of uploads, tests of tasks.
    updates, answers, rejections, evaluations, client_evaluations
        Columns, in the order of events.
    changes : tuple of ClustersChanged
        All changes of the clusters.
    placements : tuple of Placement
        Every change of a client's clusters, including the first, in order.
    data_changes : tuple of DataChanged
        Drifts of clients' data.
    measured : dict[str, tuple of Measured]
        The method's own measures, by name.
    cluster_scores : tuple of ClustersScored
        All tests of the clusters' models on the server.
    judged : tuple of UpdateJudged
        Verdicts on updates other than acceptance.
    """

    clients: tuple[ClientRecord, ...]
    summary: RunSummary
    updates: Updates
    answers: Answers
    rejections: Rejections
    evaluations: Evaluations
    client_evaluations: ClientEvaluations
    changes: tuple[events.ClustersChanged, ...]
    placements: tuple[Placement, ...]
    data_changes: tuple[events.DataChanged, ...]
    measured: dict[str, tuple[events.Measured, ...]]
    cluster_scores: tuple[events.ClustersScored, ...]
    judged: tuple[events.UpdateJudged, ...]

    @classmethod
    def of(cls, observed: Iterable[Event]) -> RunRecord:
        """Convert events in order to columns."""
        summary, clients = RunSummary(), _Clients()
        placements: list[Placement] = []
        columns = {kind: _Columns(columns) for kind, columns in _IN_COLUMNS.items()}
        tests = _Columns(ClientEvaluations)
        of: defaultdict[type[Any], list[Any]] = defaultdict(list)
        for event in observed:
            if type(event) in columns:
                columns[type(event)].add(event)
            else:
                of[type(event)].append(event)
            if isinstance(event, events.Evaluated):
                for test in _tests(len(columns[events.Evaluated]) - 1, event):
                    tests.add(test)
            placements += summary.observe(event)
            clients(event)
        measured = grouped((event.name, event) for event in of[events.Measured])
        return cls(
            clients=clients.result(),
            summary=summary,
            updates=columns[events.UpdateApplied].arrays(),
            answers=columns[events.AnswerTaken].arrays(),
            rejections=columns[events.UpdateRejected].arrays(),
            evaluations=columns[events.Evaluated].arrays(),
            client_evaluations=tests.arrays(),
            changes=tuple(of[events.ClustersChanged]),
            placements=tuple(placements),
            data_changes=tuple(of[events.DataChanged]),
            measured={name: tuple(found) for name, found in measured.items()},
            cluster_scores=tuple(of[events.ClustersScored]),
            judged=tuple(of[events.UpdateJudged]),
        )

    @property
    def end(self) -> float:
        """End of the run in seconds; the time of the last event if it was killed."""
        return self.summary.time

    @property
    def measure(self) -> events.Measure:
        """Measure of the evaluations."""
        return self.summary.measure

    @property
    def drawn_measures(self) -> list[events.MeasureSchema]:
        """Schemas of the drawn measures."""
        schemas = (measured[0].schema for measured in self.measured.values())
        return [schema for schema in schemas if schema.figure != "none"]

    @property
    def on_devices(self) -> bool:
        """Whether the run was on real devices, which state their own times."""
        return bool(np.isfinite(self.updates.started_at).any())

    @property
    def splits(self) -> tuple[events.ClustersChanged, ...]:
        """The splits."""
        return tuple(event for event in self.changes if event.change is events.ClusterChange.SPLIT)

    def memberships(self, time: float = float("inf")) -> dict[str, Mapping[int, float]]:
        """Return the weights of each client's clusters at a time, by default the last."""
        found = {placed.client: placed.weights for placed in self.placements if placed.time <= time}
        return {client: weights for client, weights in found.items() if weights}

    def assignment(self, time: float = float("inf")) -> dict[str, int]:
        """Return each client's main cluster at a time."""
        homes = ((client, home(weights)) for client, weights in self.memberships(time).items())
        return {client: cluster for client, cluster in homes if cluster is not None}


def read_run(path: Path) -> RunRecord:
    """Read a run store.

    Parameters
    ----------
    path : Path
        The file ``run.sqlite`` or its folder.

    Raises
    ------
    UserError
        There is no such file, or it is not a run store.
    """
    return RunRecord.of(each_event(path))


_IN_COLUMNS: dict[type[Any], type[Any]] = {
    events.UpdateApplied: Updates,
    events.AnswerTaken: Answers,
    events.UpdateRejected: Rejections,
    events.Evaluated: Evaluations,
}
"""Events that may be millions in a long run, and the arrays that store them."""

_DTYPES = {"Integers": np.int64, "Floats": np.float64, "Texts": np.str_, "Flags": np.bool_}
_CODES = {"Integers": "q", "Floats": "d", "Flags": "b"}


class _Columns:
    """Collects objects as the columns of a dataclass of arrays, in a fraction of their memory."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind, self._types, self._rows = kind, kind.__annotations__, 0
        self._columns: dict[str, Any] = {
            name: array(_CODES[of]) if of in _CODES else [] for name, of in self._types.items()
        }
        self._values = attrgetter(*self._columns)

    def __len__(self) -> int:
        return self._rows

    def add(self, row: Any) -> None:
        """Append an object with attributes of the columns' names; None is NaN."""
        self._rows += 1
        for column, value in zip(self._columns.values(), self._values(row), strict=True):
            if type(value) is str:
                value = intern(value)
            column.append(math.nan if value is None else value)

    def arrays(self) -> Any:
        """Return the dataclass."""
        found: dict[str, Any] = {
            name: np.array(column, dtype=_DTYPES[self._types[name]])
            for name, column in self._columns.items()
        }
        return self._kind(**found)


class _Test(NamedTuple):
    """A client's result of an evaluation: a row of `ClientEvaluations`."""

    evaluation: int
    client: str
    cluster: int
    accuracy: float
    loss: float
    step: int


def _tests(index: int, event: events.Evaluated) -> Iterator[_Test]:
    for client, (cluster, accuracy, loss) in event.per_client.items():
        yield _Test(index, client, cluster, accuracy, loss, event.steps.get(client, 0))


class _Clients(EventHandler):
    """Collects the clients, as an observer of events in order."""

    def __init__(self) -> None:
        self._first: dict[str, events.ClientJoined] = {}
        self._online: dict[str, list[tuple[float, float | None]]] = {}

    def on_client_joined(self, event: events.ClientJoined) -> None:
        self._first.setdefault(event.client, event)
        periods = self._online.setdefault(event.client, [])
        if not periods or periods[-1][1] is not None:
            periods.append((event.time, None))

    def on_client_left(self, event: events.ClientLeft) -> None:
        if periods := self._online.get(event.client):
            start, end = periods[-1]
            periods[-1] = (start, event.time if end is None else end)

    def result(self) -> tuple[ClientRecord, ...]:
        return tuple(
            ClientRecord(name, join.time, join.num_examples, join.group, tuple(self._online[name]))
            for name, join in self._first.items()
        )
