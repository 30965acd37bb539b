"""A finished run as columns of numbers: what plots, reports and comparisons read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.events import (
    AnswerTaken,
    ClientIdled,
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    DataChanged,
    Ending,
    Evaluated,
    Event,
    RunEnded,
    SupportChanged,
    TasksTested,
    UpdateApplied,
    UpdateRejected,
)
from raceme.protocol.measure import ACCURACY, Measure
from raceme.protocol.verdicts import UpdateJudged
from raceme.records.membership import Membership, Placement, home
from raceme.records.store import read_events
from raceme.records.uploads import Uploads

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Texts = NDArray[np.str_]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Updates:
    """The accepted updates, one element each; see :class:`raceme.protocol.events.UpdateApplied`.

    What is not known is NaN: ``started_at``, ``cpu_seconds`` and ``joules`` on virtual time,
    accuracies and ``passes`` of runs whose uploads are not scored.
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
    joules: Floats


@dataclass(frozen=True)
class Answers:
    """Answers to work that was not training; see :class:`raceme.protocol.events.AnswerTaken`."""

    time: Floats
    client: Texts
    kind: Texts
    phase: Texts
    bytes_down: Integers
    bytes_up: Integers


@dataclass(frozen=True)
class Rejections:
    """The replies that were not used; see :class:`raceme.protocol.events.UpdateRejected`."""

    time: Floats
    client: Texts
    reason: Texts
    dispatched_at: Floats


@dataclass(frozen=True)
class Evaluations:
    """The evaluations; see :class:`raceme.protocol.events.Evaluated`."""

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
    """What each evaluation found for each client.

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


@dataclass(frozen=True)
class IdleTimes:
    """How long clients waited in windows; see :class:`raceme.protocol.events.ClientIdled`."""

    time: Floats
    client: Texts
    window: Integers
    seconds: Floats
    budget: Floats
    share: Floats


@dataclass(frozen=True)
class Client:
    """A client as it was greeted first.

    Attributes
    ----------
    online : tuple of (float, float or None)
        From when until when it was online; None: until the end.
    """

    client: str
    joined_at: float
    num_examples: int
    group: int | None
    online: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run store holds.

    Attributes
    ----------
    clients : tuple of Client
        In the order in which they joined.
    groups : dict[str, int or None]
        Client id to the true group of its data; where data change, that of the last evaluation.
    updates, answers, rejections, evaluations, client_evaluations
        Columns, in the order of events.
    changes : tuple of ClustersChanged
        All changes of the clusters, as they were observed.
    placements : tuple of Placement
        Every change of a client's clusters, its first ones included, in the order of events.
    data_changes : tuple of DataChanged
        When clients' data moved on to another step.
    idle_times : IdleTimes
        How long clients waited in windows, of methods that report it.
    uploads : Uploads
        How good uploads were, and how well mixtures were estimated.
    cluster_scores : tuple of ClustersScored
        All tests of the clusters' models on the server.
    task_tests : tuple of TasksTested
        All tests on the data of every step so far.
    support_changes : tuple of SupportChanged
        Which clusters supported which, whenever that changed.
    judged : tuple of UpdateJudged
        Whatever the run's protection did with updates but accept them.
    end : float
        When the run ended in seconds; the time of the last event if it was killed.
    reason : str or None
        Why the run ended; None if it was killed.
    ending : Ending or None
        The kind of end; None if it was killed.
    measure : Measure
        What the accuracies of the evaluations are: of a regression the mean absolute error.
    """

    clients: tuple[Client, ...]
    groups: dict[str, int | None]
    updates: Updates
    answers: Answers
    rejections: Rejections
    evaluations: Evaluations
    client_evaluations: ClientEvaluations
    changes: tuple[ClustersChanged, ...]
    placements: tuple[Placement, ...]
    data_changes: tuple[DataChanged, ...]
    idle_times: IdleTimes
    uploads: Uploads
    cluster_scores: tuple[ClustersScored, ...]
    task_tests: tuple[TasksTested, ...]
    support_changes: tuple[SupportChanged, ...]
    judged: tuple[UpdateJudged, ...]
    end: float
    reason: str | None
    ending: Ending | None
    measure: Measure = ACCURACY

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunRecord:
        """Put events, in their order, into columns."""
        listed = list(events)
        evaluated = [event for event in listed if isinstance(event, Evaluated)]
        endings = [event for event in listed if isinstance(event, RunEnded)]
        # Tasks that nobody was left to answer may have been given up after the end.
        last = max((float(event.time) for event in endings or listed), default=0.0)
        membership = Membership()
        uploads = Uploads(membership)
        placements: list[Placement] = []
        for event in listed:
            placements += membership.observe(event)
            uploads.observe(event)
        return cls(
            clients=_clients(listed),
            groups=membership.groups,
            updates=_columns(Updates, [e for e in listed if isinstance(e, UpdateApplied)]),
            answers=_columns(Answers, [e for e in listed if isinstance(e, AnswerTaken)]),
            rejections=_columns(Rejections, [e for e in listed if isinstance(e, UpdateRejected)]),
            evaluations=_columns(Evaluations, evaluated),
            client_evaluations=_client_evaluations(evaluated),
            changes=tuple(event for event in listed if isinstance(event, ClustersChanged)),
            placements=tuple(placements),
            data_changes=tuple(event for event in listed if isinstance(event, DataChanged)),
            idle_times=_columns(IdleTimes, [e for e in listed if isinstance(e, ClientIdled)]),
            uploads=uploads,
            cluster_scores=tuple(event for event in listed if isinstance(event, ClustersScored)),
            task_tests=tuple(event for event in listed if isinstance(event, TasksTested)),
            support_changes=tuple(event for event in listed if isinstance(event, SupportChanged)),
            judged=tuple(event for event in listed if isinstance(event, UpdateJudged)),
            end=last,
            reason=endings[-1].reason if endings else None,
            ending=endings[-1].ending if endings else None,
            measure=evaluated[-1].measure if evaluated else ACCURACY,
        )

    @property
    def on_devices(self) -> bool:
        """Whether real machines did the work: only they tell when by their own clocks."""
        return bool(np.isfinite(self.updates.started_at).any())

    @property
    def splits(self) -> tuple[ClustersChanged, ...]:
        """The changes that replaced a cluster by several."""
        return tuple(event for event in self.changes if event.change is ClusterChange.SPLIT)

    def memberships(self, time: float = float("inf")) -> dict[str, Mapping[int, float]]:
        """Return the weights of each client's clusters at a time: the last ones, if not stated."""
        found = {placed.client: placed.weights for placed in self.placements if placed.time <= time}
        return {client: weights for client, weights in found.items() if weights}

    def assignment(self, time: float = float("inf")) -> dict[str, int]:
        """Return each client's cluster at a time, of several that with the largest weight."""
        homes = ((client, home(weights)) for client, weights in self.memberships(time).items())
        return {client: cluster for client, cluster in homes if cluster is not None}


def read_run(path: Path) -> RunRecord:
    """Read a run store.

    Parameters
    ----------
    path : Path
        The file ``run.sqlite``, or the folder that holds it.

    Raises
    ------
    UserError
        There is no such file, or it is not a run store.
    """
    return RunRecord.of(read_events(path))


_DTYPES = {"Integers": np.int64, "Floats": np.float64, "Texts": np.str_, "Flags": np.bool_}


def _columns(kind: type[Any], rows: Sequence[Any]) -> Any:
    """Build a dataclass of arrays from objects with attributes of the same names."""
    return kind(
        **{
            name: np.array([getattr(row, name) for row in rows], dtype=_DTYPES[annotation])
            for name, annotation in kind.__annotations__.items()
        }
    )


def _client_evaluations(evaluated: Sequence[Evaluated]) -> ClientEvaluations:
    rows = [
        (index, client, *values, event.steps.get(client, 0))
        for index, event in enumerate(evaluated)
        for client, values in event.per_client.items()
    ]
    evaluation, client, cluster, accuracy, loss, step = (
        zip(*rows, strict=True) if rows else [()] * 6
    )
    return ClientEvaluations(
        evaluation=np.array(evaluation, np.int64),
        client=np.array(client, np.str_),
        cluster=np.array(cluster, np.int64),
        accuracy=np.array(accuracy, np.float64),
        loss=np.array(loss, np.float64),
        step=np.array(step, np.int64),
    )


def _clients(events: Sequence[Event]) -> tuple[Client, ...]:
    first: dict[str, ClientJoined] = {}
    online: dict[str, list[tuple[float, float | None]]] = {}
    for event in events:
        if isinstance(event, ClientJoined):
            first.setdefault(event.client, event)
            periods = online.setdefault(event.client, [])
            if not periods or periods[-1][1] is not None:
                periods.append((event.time, None))
        elif isinstance(event, ClientLeft) and online.get(event.client):
            start, end = online[event.client][-1]
            online[event.client][-1] = (start, event.time if end is None else end)
    return tuple(
        Client(name, join.time, join.num_examples, join.group, tuple(online[name]))
        for name, join in first.items()
    )
