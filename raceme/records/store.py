"""The run store: every event of a run in one SQLite file, ``run.sqlite``.

The file is a log. Each row carries the number of its event, so that :func:`read_events` gives
back what was observed, in order. Nothing in it depends on the wall clock of the machine or on
chance beyond the seed: two runs with one seed have the same contents.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from time import monotonic
from types import TracebackType
from typing import Any

from raceme.core.errors import UserError
from raceme.core.events import (
    ACCURACY,
    AnswerTaken,
    ClaimRefused,
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
    Measure,
    RunEnded,
    SupportChanged,
    TaskScore,
    TasksTested,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
)
from raceme.records.summary import time_to_target

# -----------------------------------------------------------------------------
# What all tables of a run store share: rows on their way in, and what older formats lack.
# -----------------------------------------------------------------------------


Rows = defaultdict[str, list[tuple[Any, ...]]]
"""Rows that are not written yet, by table."""

Numbered = Iterator[tuple[int, Event]]
"""Events with their numbers."""


def number_of(value: float | None) -> float:
    """Return a number, or NaN where SQLite stored NULL for it."""
    return math.nan if value is None else value


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns that a table has: older formats have fewer, or no such table."""
    return {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}


# -----------------------------------------------------------------------------
# What a run's protection has done: its table in a run store, and its numbers in the summary.
# -----------------------------------------------------------------------------


_VERDICT_SCHEMA = """
CREATE TABLE verdicts (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, verdict TEXT NOT NULL,
    measured REAL, bound REAL, reason TEXT NOT NULL, cluster INTEGER);
"""

_VERDICT_TABLES = {"verdicts": (8, "event")}
"""Number of columns and key of each table."""


def _write(rows: Rows, number: int, event: UpdateJudged) -> None:
    measured, bound = float(event.measured), float(event.bound)
    who, why = (event.client, event.verdict.value), (measured, bound, event.reason)
    rows["verdicts"].append((number, float(event.time), *who, *why, event.cluster))


_VERDICT_WRITERS: dict[type[Any], Callable[[Rows, int, Any], None]] = {UpdateJudged: _write}
"""How an event of each type becomes rows."""


def _read(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "verdicts"):
        # Formats before 7 have no such table.
        return
    query = "SELECT event, time, client, verdict, measured, bound, reason, cluster FROM verdicts"
    for number, time, client, verdict, measured, bound, reason, cluster in connection.execute(
        query
    ):
        numbers = number_of(measured), number_of(bound)
        yield number, UpdateJudged(time, client, Verdict(verdict), *numbers, reason, cluster)


_VERDICT_READERS: tuple[Callable[[sqlite3.Connection], Numbered], ...] = (_read,)
"""What reads these tables, each in any order."""


class ProtectionSummary:
    """How often which client's updates were accepted, scaled and refused: an observer of a run.

    Parameters
    ----------
    attackers : Collection[str]
        Clients that attack, where that is known: those that are left out of the honest accuracy.
    """

    def __init__(self, attackers: Collection[str] = ()) -> None:
        self.attackers = frozenset(attackers)
        self._counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
        self._excluded: dict[str, bool] = {}
        self._last: float | None = None
        self._measure = ACCURACY
        self._honest: list[Evaluated] = []

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, UpdateApplied):
            self._counts[event.client][Verdict.ACCEPTED] += 1
        elif isinstance(event, UpdateJudged):
            self._judged(event)
        elif isinstance(event, Evaluated):
            self._evaluated(event)

    def _evaluated(self, event: Evaluated) -> None:
        scores = [
            score for name, (_, score, _) in event.per_client.items() if name not in self.attackers
        ]
        self._last, self._measure = fmean(scores) if scores else None, event.measure
        if self.attackers and event.counts and scores:
            found = Evaluated(event.time, event.updates, fmean(scores), math.nan, event.clusters)
            self._honest.append(replace(found, measure=event.measure))

    def _judged(self, event: UpdateJudged) -> None:
        counts = self._counts[event.client]
        if event.verdict is Verdict.SCALED:
            # It is reported as applied, too.
            counts[Verdict.SCALED] += 1
            counts[Verdict.ACCEPTED] -= 1
        elif event.verdict.keeps_out:
            counts[Verdict.REFUSED] += 1
        if event.verdict is Verdict.EXCLUDED:
            self._excluded[event.client] = True
        elif event.verdict is Verdict.READMITTED:
            self._excluded.pop(event.client, None)

    @property
    def _has_judged(self) -> bool:
        return any(
            counts[Verdict.SCALED] or counts[Verdict.REFUSED] for counts in self._counts.values()
        )

    def result(self, target: float | None = None) -> dict[str, Any]:
        """Return what the summary of a run has of it; nothing where nobody attacked or was judged.

        ``protection`` has the counts by client, ``excluded_clients`` who was excluded at the end,
        ``attackers`` who attacked, ``honest_accuracy`` the mean accuracy of all others at the last
        evaluation, and ``honest_time_to_target`` when it first was as good as the target.
        """
        found: dict[str, Any] = {}
        if self._has_judged:
            kinds = (Verdict.ACCEPTED, Verdict.SCALED, Verdict.REFUSED)
            found["protection"] = {
                client: {kind.value: counts[kind] for kind in kinds}
                for client, counts in sorted(self._counts.items())
            }
            found["excluded_clients"] = sorted(self._excluded)
        if self.attackers and self._last is not None:
            found["attackers"] = sorted(self.attackers)
            found[f"honest_{self._measure.name}"] = self._last
            found["honest_time_to_target"] = time_to_target(self._honest, target)
        return found


# -----------------------------------------------------------------------------
# The tables of a run store with what only some methods report; they came with format 6.
# -----------------------------------------------------------------------------


_METHOD_SCHEMA = f"""
CREATE TABLE answers (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, kind TEXT NOT NULL,
    phase TEXT NOT NULL, bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL);
CREATE TABLE task_tests (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL, step INTEGER NOT NULL,
    clusters INTEGER NOT NULL, asked INTEGER NOT NULL, answered INTEGER NOT NULL, unit TEXT);
CREATE TABLE task_scores (
    event INTEGER NOT NULL REFERENCES task_tests, client TEXT NOT NULL, step INTEGER NOT NULL,
    cluster INTEGER NOT NULL, accuracy REAL, untrained REAL,
    PRIMARY KEY (event, client, step)) WITHOUT ROWID;
CREATE TABLE support_changes (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL);
CREATE TABLE supporters (
    event INTEGER NOT NULL REFERENCES support_changes, cluster INTEGER NOT NULL,
    supporter INTEGER NOT NULL, PRIMARY KEY (event, cluster, supporter)) WITHOUT ROWID;
{_VERDICT_SCHEMA}"""

_METHOD_TABLES = {
    "answers": (7, "event"),
    "task_tests": (8, "event"),
    "task_scores": (6, "event, client, step"),
    "support_changes": (3, "event"),
    "supporters": (3, "event, cluster, supporter"),
    **_VERDICT_TABLES,
}
"""Number of columns and key of each table."""


def _write_answer(rows: Rows, number: int, event: AnswerTaken) -> None:
    down, up = int(event.bytes_down), int(event.bytes_up)
    rows["answers"].append(
        (number, float(event.time), event.client, event.kind, event.phase, down, up)
    )


def _write_task_tests(rows: Rows, number: int, event: TasksTested) -> None:
    rows["task_tests"].append(
        (
            number,
            float(event.time),
            int(event.updates),
            int(event.step),
            int(event.clusters),
            int(event.asked),
            len(event.per_client),
            event.measure.unit,
        )
    )
    rows["task_scores"].extend(
        (
            number,
            client,
            int(step),
            int(score.cluster),
            float(score.accuracy),
            None if score.untrained is None else float(score.untrained),
        )
        for client, scores in event.per_client.items()
        for step, score in scores.items()
    )


def _write_support(rows: Rows, number: int, event: SupportChanged) -> None:
    rows["support_changes"].append((number, float(event.time), int(event.updates)))
    rows["supporters"].extend(
        (number, int(cluster), int(supporter))
        for cluster, supporters in event.supporters.items()
        for supporter in supporters
    )


_METHOD_WRITERS: dict[type[Any], Callable[[Rows, int, Any], None]] = {
    AnswerTaken: _write_answer,
    TasksTested: _write_task_tests,
    SupportChanged: _write_support,
    **_VERDICT_WRITERS,
}
"""How an event of each type becomes rows."""


def _read_answers(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "answers"):
        return
    query = "SELECT event, time, client, kind, phase, bytes_down, bytes_up FROM answers"
    for number, *values in connection.execute(query):
        yield number, AnswerTaken(*values)


def _read_task_tests(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "task_tests"):
        return
    found: defaultdict[int, dict[str, dict[int, TaskScore]]] = defaultdict(dict)
    query = "SELECT event, client, step, cluster, accuracy, untrained FROM task_scores"
    for number, client, step, cluster, accuracy, untrained in connection.execute(query):
        score = TaskScore(cluster, number_of(accuracy), untrained)
        found[number].setdefault(client, {})[step] = score
    query = "SELECT event, time, updates, step, clusters, asked, unit FROM task_tests"
    for number, time, updates, step, clusters, asked, unit in connection.execute(query):
        scores = found.get(number, {})
        yield (
            number,
            TasksTested(time, updates, step, clusters, scores, asked, Measure(unit)),
        )


def _read_support(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "support_changes"):
        return
    found: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    query = "SELECT event, cluster, supporter FROM supporters ORDER BY event, cluster, supporter"
    for number, cluster, supporter in connection.execute(query):
        found[number][cluster].append(supporter)
    query = "SELECT event, time, updates FROM support_changes"
    for number, time, updates in connection.execute(query):
        supporters = {cluster: tuple(of) for cluster, of in found[number].items()}
        yield number, SupportChanged(time, updates, supporters)


_METHOD_READERS: tuple[Callable[[sqlite3.Connection], Numbered], ...] = (
    _read_answers,
    _read_task_tests,
    _read_support,
    *_VERDICT_READERS,
)
"""What reads these tables, each in any order."""


# -----------------------------------------------------------------------------
# The tables of a run store, and how events become their rows and rows become events again.
# -----------------------------------------------------------------------------


FORMAT = 8
"""3 to 7 have less, and are read alike; 1 and 2 are :mod:`raceme.records.store`'."""

READ_ALIKE = (3, 4, 5, 6, 7, FORMAT)
"""Formats that the readers of this module read."""

SCHEMA = f"""
CREATE TABLE client_events (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('joined', 'returned', 'left')),
    num_examples INTEGER, group_id INTEGER);
CREATE VIEW clients AS
    SELECT client, time AS joined_at, num_examples, group_id, min(event) AS event
    FROM client_events WHERE kind IN ('joined', 'returned') GROUP BY client ORDER BY event;
CREATE TABLE refused_claims (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, node_id TEXT NOT NULL, client TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE updates (
    seq INTEGER NOT NULL UNIQUE, time REAL NOT NULL, client TEXT NOT NULL,
    cluster INTEGER NOT NULL, base_version INTEGER NOT NULL, staleness INTEGER NOT NULL,
    weight REAL, dispatched_at REAL NOT NULL, train_loss REAL,
    bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL, started_at REAL, finished_at REAL,
    step INTEGER NOT NULL, accuracy_before REAL, accuracy_after REAL, passes INTEGER,
    phase TEXT NOT NULL, cpu_seconds REAL, joules REAL, event INTEGER PRIMARY KEY);
CREATE TABLE mixtures (
    event INTEGER NOT NULL REFERENCES updates, distribution INTEGER NOT NULL, share REAL NOT NULL,
    PRIMARY KEY (event, distribution)) WITHOUT ROWID;
CREATE TABLE rejections (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, reason TEXT NOT NULL,
    dispatched_at REAL NOT NULL);
CREATE TABLE evaluations (
    event INTEGER PRIMARY KEY, updates INTEGER NOT NULL, time REAL NOT NULL,
    accuracy REAL, loss REAL, clusters INTEGER NOT NULL,
    asked INTEGER NOT NULL, answered INTEGER NOT NULL, weighted_accuracy REAL, unit TEXT);
CREATE TABLE client_evaluations (
    event INTEGER NOT NULL REFERENCES evaluations, updates INTEGER NOT NULL, client TEXT NOT NULL,
    cluster INTEGER NOT NULL, accuracy REAL, loss REAL, step INTEGER NOT NULL, group_id INTEGER,
    PRIMARY KEY (event, client)) WITHOUT ROWID;
CREATE TABLE cluster_scores (
    event INTEGER NOT NULL, time REAL NOT NULL, updates INTEGER NOT NULL,
    cluster INTEGER NOT NULL, accuracy REAL, PRIMARY KEY (event, cluster)) WITHOUT ROWID;
CREATE TABLE cluster_changes (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL,
    change TEXT NOT NULL, score REAL, threshold REAL);
CREATE TABLE changed_clusters (
    event INTEGER NOT NULL REFERENCES cluster_changes, cluster INTEGER NOT NULL,
    fate TEXT NOT NULL CHECK (fate IN ('gone', 'made')),
    UNIQUE (event, fate, cluster));
CREATE TABLE memberships (
    event INTEGER NOT NULL REFERENCES cluster_changes, client TEXT NOT NULL,
    cluster INTEGER NOT NULL, weight REAL NOT NULL,
    UNIQUE (event, client, cluster));
CREATE TABLE data_changes (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL,
    client TEXT, step INTEGER NOT NULL);
CREATE TABLE idle_times (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, window INTEGER NOT NULL,
    seconds REAL NOT NULL, budget REAL NOT NULL);
CREATE TABLE endings (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL,
    ending TEXT NOT NULL, reason TEXT NOT NULL);
{_METHOD_SCHEMA}"""

TABLES = {
    "client_events": (6, "event"),
    "refused_claims": (5, "event"),
    "updates": (21, "event"),
    "mixtures": (3, "event, distribution"),
    "rejections": (5, "event"),
    "evaluations": (10, "event"),
    "client_evaluations": (8, "event, client"),
    "cluster_scores": (5, "event, cluster"),
    "cluster_changes": (6, "event"),
    "changed_clusters": (3, "event, fate, cluster"),
    "memberships": (4, "event, client, cluster"),
    "data_changes": (5, "event"),
    "idle_times": (6, "event"),
    "endings": (5, "event"),
    **_METHOD_TABLES,
}
"""Number of columns and key of each table."""

# Conversions with int() and float() let numpy's scalars in, which sqlite3 does not know.


def _write_joined(rows: Rows, number: int, event: ClientJoined) -> None:
    kind = "returned" if event.returned else "joined"
    group = None if event.group is None else int(event.group)
    examples = int(event.num_examples)
    rows["client_events"].append((number, float(event.time), event.client, kind, examples, group))


def _write_left(rows: Rows, number: int, event: ClientLeft) -> None:
    rows["client_events"].append((number, float(event.time), event.client, "left", None, None))


def _write_claim(rows: Rows, number: int, event: ClaimRefused) -> None:
    # Flower's numbers of nodes have 64 bits without a sign, one more than SQLite's.
    rows["refused_claims"].append(
        (number, float(event.time), str(event.node_id), event.client, event.reason)
    )


def _write_update(rows: Rows, number: int, event: UpdateApplied) -> None:
    rows["updates"].append(
        (
            int(event.seq),
            float(event.time),
            event.client,
            int(event.cluster),
            int(event.base_version),
            int(event.staleness),
            float(event.weight),
            float(event.dispatched_at),
            float(event.train_loss),
            int(event.bytes_down),
            int(event.bytes_up),
            event.started_at,
            event.finished_at,
            int(event.step),
            event.accuracy_before,
            event.accuracy_after,
            event.passes,
            event.phase,
            event.cpu_seconds,
            event.joules,
            number,
        )
    )
    rows["mixtures"].extend(
        (number, distribution, float(share)) for distribution, share in enumerate(event.mixture)
    )


def _write_rejection(rows: Rows, number: int, event: UpdateRejected) -> None:
    rows["rejections"].append(
        (number, float(event.time), event.client, event.reason, float(event.dispatched_at))
    )


def _write_evaluation(rows: Rows, number: int, event: Evaluated) -> None:
    updates, steps, groups = int(event.updates), event.steps, event.groups
    rows["evaluations"].append(
        (
            number,
            updates,
            float(event.time),
            float(event.accuracy),
            float(event.loss),
            int(event.clusters),
            int(event.asked),
            event.answered,
            float(event.weighted_accuracy),
            event.measure.unit,
        )
    )
    rows["client_evaluations"].extend(
        (
            number,
            updates,
            client,
            int(cluster),
            float(accuracy),
            float(loss),
            int(steps.get(client, 0)),
            groups.get(client),
        )
        for client, (cluster, accuracy, loss) in event.per_client.items()
    )


def _write_cluster_scores(rows: Rows, number: int, event: ClustersScored) -> None:
    time, updates = float(event.time), int(event.updates)
    rows["cluster_scores"].extend(
        (number, time, updates, int(cluster), float(accuracy))
        for cluster, accuracy in event.accuracies.items()
    )


def _write_change(rows: Rows, number: int, event: ClustersChanged) -> None:
    score, threshold = float(event.score), float(event.threshold)
    rows["cluster_changes"].append(
        (number, float(event.time), int(event.updates), event.change.value, score, threshold)
    )
    rows["changed_clusters"].extend((number, int(cluster), "gone") for cluster in event.gone)
    rows["changed_clusters"].extend((number, int(cluster), "made") for cluster in event.made)
    rows["memberships"].extend(
        (number, client, int(cluster), float(weight))
        for client, weights in event.memberships.items()
        for cluster, weight in weights.items()
    )


def _write_data_change(rows: Rows, number: int, event: DataChanged) -> None:
    updates, step = int(event.updates), int(event.step)
    rows["data_changes"].append((number, float(event.time), updates, event.client, step))


def _write_idle(rows: Rows, number: int, event: ClientIdled) -> None:
    seconds, budget = float(event.seconds), float(event.budget)
    rows["idle_times"].append(
        (number, float(event.time), event.client, int(event.window), seconds, budget)
    )


def _write_ending(rows: Rows, number: int, event: RunEnded) -> None:
    rows["endings"].append(
        (number, float(event.time), int(event.updates), event.ending.value, event.reason)
    )


WRITERS: dict[type[Any], Callable[[Rows, int, Any], None]] = {
    ClientJoined: _write_joined,
    ClientLeft: _write_left,
    ClaimRefused: _write_claim,
    UpdateApplied: _write_update,
    UpdateRejected: _write_rejection,
    Evaluated: _write_evaluation,
    ClustersScored: _write_cluster_scores,
    ClustersChanged: _write_change,
    DataChanged: _write_data_change,
    ClientIdled: _write_idle,
    RunEnded: _write_ending,
    **_METHOD_WRITERS,
}
"""How an event of each type becomes rows."""


def read_clients(connection: sqlite3.Connection) -> Numbered:
    """Read who came and left."""
    query = (
        "SELECT event, time, client, kind, num_examples, group_id FROM client_events "
        "WHERE kind IN ('joined', 'returned', 'left')"
    )
    for event, time, client, kind, num_examples, group in connection.execute(query):
        if kind == "left":
            yield event, ClientLeft(time, client)
        else:
            yield event, ClientJoined(time, client, 0, num_examples, group, kind == "returned")


def _read_claims(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "refused_claims"):
        return
    query = "SELECT event, time, node_id, client, reason FROM refused_claims"
    for number, time, node_id, client, reason in connection.execute(query):
        yield number, ClaimRefused(time, int(node_id), client, reason)


def read_updates(connection: sqlite3.Connection) -> Numbered:
    """Read the updates that were accepted."""
    mixtures: defaultdict[int, list[float]] = defaultdict(list)
    if columns_of(connection, "mixtures"):
        # Format 4 has no such table.
        query = "SELECT event, share FROM mixtures ORDER BY event, distribution"
        for number, share in connection.execute(query):
            mixtures[number].append(share)
    stored = columns_of(connection, "updates")
    names = [item.name for item in fields(UpdateApplied) if item.name in stored]
    for number, *values in connection.execute(f"SELECT event, {', '.join(names)} FROM updates"):
        update = dict(zip(names, values, strict=True))
        update["weight"] = number_of(update["weight"])
        update["train_loss"] = number_of(update["train_loss"])
        yield number, UpdateApplied(**update, mixture=tuple(mixtures.get(number, ())))


def read_rejections(connection: sqlite3.Connection) -> Numbered:
    """Read the replies that were not used."""
    query = "SELECT event, time, client, reason, dispatched_at FROM rejections"
    for number, *values in connection.execute(query):
        yield number, UpdateRejected(*values)


def read_evaluations(connection: sqlite3.Connection) -> Numbered:
    """Read the evaluations; in a store that does not say who was asked, all who answered were."""
    per_client: defaultdict[int, dict[str, tuple[int, float, float]]] = defaultdict(dict)
    steps: defaultdict[int, dict[str, int]] = defaultdict(dict)
    groups: defaultdict[int, dict[str, int]] = defaultdict(dict)
    stored = columns_of(connection, "client_evaluations")
    step_of, group_of = (name if name in stored else "NULL" for name in ("step", "group_id"))
    query = (
        f"SELECT event, client, cluster, accuracy, loss, {step_of}, {group_of} "
        "FROM client_evaluations"
    )
    for number, client, cluster, accuracy, loss, step, group in connection.execute(query):
        per_client[number][client] = (cluster, number_of(accuracy), number_of(loss))
        if step:
            steps[number][client] = step
        if group is not None:
            groups[number][client] = group
    stored = columns_of(connection, "evaluations")
    asked_of, weighted_of, unit_of = (
        name if name in stored else "NULL" for name in ("asked", "weighted_accuracy", "unit")
    )
    query = (
        "SELECT event, time, updates, accuracy, loss, clusters, "
        f"{asked_of}, {weighted_of}, {unit_of} FROM evaluations"
    )
    for row in connection.execute(query):
        number, time, updates, accuracy, loss, clusters, asked, weighted, unit = row
        scores = per_client.get(number, {})
        yield (
            number,
            Evaluated(
                time,
                updates,
                number_of(accuracy),
                number_of(loss),
                clusters,
                scores,
                len(scores) if asked is None else asked,
                steps.get(number, {}),
                number_of(weighted),
                groups.get(number, {}),
                Measure(unit),
            ),
        )


def _read_cluster_scores(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "cluster_scores"):
        # Format 4 has no such table.
        return
    moments: dict[int, tuple[float, int]] = {}
    accuracies: defaultdict[int, dict[int, float]] = defaultdict(dict)
    query = "SELECT event, time, updates, cluster, accuracy FROM cluster_scores"
    for number, time, updates, cluster, accuracy in connection.execute(query):
        moments[number] = time, updates
        accuracies[number][cluster] = number_of(accuracy)
    for number, (time, updates) in moments.items():
        yield number, ClustersScored(time, updates, accuracies[number])


def _read_changes(connection: sqlite3.Connection) -> Numbered:
    fates: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    query = "SELECT event, fate, cluster FROM changed_clusters ORDER BY rowid"
    for number, fate, cluster in connection.execute(query):
        fates[number, fate].append(cluster)
    memberships: defaultdict[int, dict[str, dict[int, float]]] = defaultdict(dict)
    query = "SELECT event, client, cluster, weight FROM memberships ORDER BY rowid"
    for number, client, cluster, weight in connection.execute(query):
        memberships[number].setdefault(client, {})[cluster] = weight
    query = "SELECT event, time, updates, change, score, threshold FROM cluster_changes"
    for number, time, updates, change, score, threshold in connection.execute(query):
        yield (
            number,
            ClustersChanged(
                time,
                updates,
                ClusterChange(change),
                memberships.get(number, {}),
                tuple(fates.get((number, "gone"), ())),
                tuple(fates.get((number, "made"), ())),
                number_of(score),
                number_of(threshold),
            ),
        )


def _read_data_changes(connection: sqlite3.Connection) -> Numbered:
    query = "SELECT event, time, updates, client, step FROM data_changes"
    for number, *values in connection.execute(query):
        yield number, DataChanged(*values)


def _read_idle(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "idle_times"):
        # Format 3 has no such table.
        return
    query = "SELECT event, time, client, window, seconds, budget FROM idle_times"
    for number, *values in connection.execute(query):
        yield number, ClientIdled(*values)


def _read_endings(connection: sqlite3.Connection) -> Numbered:
    query = "SELECT event, time, updates, reason, ending FROM endings"
    for number, time, updates, reason, ending in connection.execute(query):
        yield number, RunEnded(time, updates, reason, Ending(ending))


READERS: tuple[Callable[[sqlite3.Connection], Numbered], ...] = (
    read_clients,
    _read_claims,
    read_updates,
    read_rejections,
    read_evaluations,
    _read_cluster_scores,
    _read_changes,
    _read_data_changes,
    _read_idle,
    _read_endings,
    *_METHOD_READERS,
)
"""What reads the tables of this format, each in any order."""


# -----------------------------------------------------------------------------
# Run stores of the formats 1 and 2, read as if their runs had reported what runs report now.
#
# These formats knew splits, and clients that were put into a cluster on their own, but not where
# the others were: that followed from their updates and evaluations. It is worked out here, so
# that
# everybody else reads memberships only. In format 1 updates had no times of the device's work.
# -----------------------------------------------------------------------------


FORMATS = (1, 2)


@dataclass(frozen=True)
class _Split:
    """A cluster was replaced by several."""

    time: float
    updates: int
    parent: int
    children: Mapping[int, Sequence[str]]
    gap: float
    threshold: float


@dataclass(frozen=True)
class _Assigned:
    """A client was put into a cluster on its own."""

    time: float
    client: str
    cluster: int


def read_old_events(connection: sqlite3.Connection) -> list[Event]:
    """Read the events of a store of an old format, with the placements that they imply."""
    readers = (
        read_clients,
        read_updates,
        read_rejections,
        read_evaluations,
        _read_assigned,
        _read_splits,
        _read_old_endings,
    )
    numbered = [pair for read in readers for pair in read(connection)]
    happened = [event for _, event in sorted(numbered, key=itemgetter(0))]
    return _with_first_placements(happened)


def _read_assigned(connection: sqlite3.Connection) -> Iterator[tuple[int, _Assigned]]:
    query = "SELECT event, time, client, cluster FROM client_events WHERE kind = 'assigned'"
    for number, *values in connection.execute(query):
        yield number, _Assigned(*values)


def _read_splits(connection: sqlite3.Connection) -> Iterator[tuple[int, _Split]]:
    members: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
    query = "SELECT event, child, client FROM split_members ORDER BY rowid"
    for number, child, client in connection.execute(query):
        members[number].setdefault(child, []).extend([] if client is None else [client])
    query = "SELECT event, time, updates, parent, gap, threshold FROM splits"
    for number, time, updates, parent, gap, threshold in connection.execute(query):
        measured = number_of(gap), number_of(threshold)
        yield number, _Split(time, updates, parent, members[number], *measured)


def _read_old_endings(connection: sqlite3.Connection) -> Iterator[tuple[int, RunEnded]]:
    query = "SELECT event, time, updates, reason FROM endings"
    for number, time, updates, reason in connection.execute(query):
        yield number, RunEnded(time, updates, reason, _ending(reason))


def _ending(reason: str) -> Ending:
    """Return the kind of end, which these formats told in words only."""
    for start, ending in (
        ("interrupted", Ending.INTERRUPTED),
        ("all clients are gone", Ending.NO_CLIENTS),
        ("the last ", Ending.USELESS_REPLIES),
        ("the target accuracy ", Ending.TARGET),
    ):
        if reason.startswith(start):
            return ending
    return Ending.LIMIT


@dataclass
class _Converter:
    """Follows the clusters' members through the events of an old store.

    An update or an evaluation of a model that has since been split says nothing about where its
    client is now.
    """

    clusters: dict[str, int] = field(default_factory=dict)
    split: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    updates: int = 0

    def convert(self, event: Any) -> list[Event]:
        """Return what would be reported now: the event, and placements that it implies."""
        if isinstance(event, UpdateApplied):
            self.updates = event.seq
            known = self.clusters.get(event.client) == event.cluster or event.cluster in self.split
            return [event] if known else [event, self._place(event, event.client, event.cluster)]
        if isinstance(event, _Split):
            return self._convert_split(event)
        if isinstance(event, _Assigned):
            known = self.clusters.get(event.client) == event.cluster
            return [] if known else [self._place(event, event.client, event.cluster)]
        if isinstance(event, Evaluated):
            found = [
                self._place(event, client, cluster)
                for client, (cluster, _, _) in event.per_client.items()
                if client not in self.clusters and cluster not in self.split
            ]
            return [*found, event]
        return [event]

    def _convert_split(self, event: _Split) -> list[Event]:
        members = {client: k for k, clients in event.children.items() for client in clients}
        # A member that never sent an update shows only now that it was in the parent.
        found: list[Event] = [
            self._place(event, client, event.parent)
            for client in members
            if client not in self.clusters
        ]
        self.clusters.update(members)
        # A method may have kept the parent's id for one of the children.
        made = tuple(child for child in event.children if child != event.parent)
        gone = (event.parent,) if len(made) == len(event.children) else ()
        self.split.update(gone)
        self.split.difference_update(made)
        self.made.update(made)
        change = ClustersChanged(
            event.time,
            event.updates,
            ClusterChange.SPLIT,
            {client: {cluster: 1.0} for client, cluster in members.items()},
            gone,
            made,
            event.gap,
            event.threshold,
        )
        return [*found, change]

    def _place(self, event: Any, client: str, cluster: int) -> ClustersChanged:
        change = ClusterChange.MOVE if client in self.clusters else ClusterChange.ASSIGN
        self.clusters[client] = cluster
        return ClustersChanged(event.time, self.updates, change, {client: {cluster: 1.0}})


def _with_first_placements(happened: Sequence[Any]) -> list[Event]:
    """Convert events; a client that starts in a cluster of the beginning is there on joining.

    What implies that, e.g. its first update, came later.
    """
    converter = _Converter()
    converted: list[tuple[bool, Event]] = [
        (isinstance(event, _Assigned), new)
        for event in happened
        for new in converter.convert(event)
    ]
    first: dict[str, ClustersChanged] = {}
    events: list[Event] = []
    joined = {event.client for event in happened if isinstance(event, ClientJoined)}
    for stated, event in converted:
        if isinstance(event, ClustersChanged) and event.change is ClusterChange.ASSIGN:
            ((client, weights),) = event.memberships.items()
            if not stated and client in joined and not converter.made.intersection(weights):
                first[client] = event
                continue
        events.append(event)
    placed: list[Event] = []
    updates = 0
    for event in events:
        placed.append(event)
        if isinstance(event, UpdateApplied):
            updates = event.seq
        elif isinstance(event, ClientJoined) and event.client in first:
            found = first.pop(event.client)
            placed.append(replace(found, time=event.time, updates=updates))
    return placed


# -----------------------------------------------------------------------------
# The run store: every event of a run in one SQLite file, ``run.sqlite``.
# -----------------------------------------------------------------------------


FILE_NAME = "run.sqlite"

_APPLICATION = 0x52616365
"""SQLite's application id of a run store: "Race" in ASCII."""
_BATCH = 500
"""Events kept in memory before they are written: what a kill can lose at most."""
_SECONDS = 1.0
"""Events are kept in memory no longer than this: whoever watches the run sees them by then."""

# A row that is there already is left alone: Ctrl-C can come between the end of a transaction and
# the moment at which the rows in memory are forgotten, and they are then written a second time.
_INSERT = {
    table: f"INSERT INTO {table} VALUES ({', '.join('?' * columns)}) ON CONFLICT ({key}) DO NOTHING"
    for table, (columns, key) in TABLES.items()
}


class RunStore:
    """The writer of ``run.sqlite``, an observer of the run.

    Events are gathered and written in one transaction per 500 events or evaluation, and once a
    second by a thread of its own: waiting for the disk must not hold up the run. After ``close``,
    and so after leaving a ``with`` block for whatever reason, everything observed is on disk; after
    a kill, everything up to the last such transaction. Where the disk is full, too: what comes
    after a transaction that failed is not kept, and `failure` says why.

    Parameters
    ----------
    folder : Path
        Where the file goes; created if it does not exist.
    replace : bool
        Replace a run that the folder holds already, instead of refusing.
    after : int, optional
        Resume the run that the folder holds, after so many of its events; what it holds of
        later ones is dropped.

    Attributes
    ----------
    failure : str
        Why events could not be written, and which; empty if all were.

    Raises
    ------
    UserError
        The folder holds a run already, or not the one that was expected, or cannot be written.
    """

    def __init__(self, folder: Path, *, replace: bool = False, after: int | None = None) -> None:
        self.path = folder / FILE_NAME
        self.failure = ""
        self._event = self._written = after or 0
        self._observed = 0
        self._rows: Rows = defaultdict(list)
        self._leaving: list[Rows] = []
        # The first guards rows and numbers and is held for moments only, the second the connection.
        self._gathering, self._writing = threading.Lock(), threading.RLock()
        self._closing = threading.Event()
        self._connection: sqlite3.Connection | None = (
            _create(self.path, replace) if after is None else _reopen(self.path, after)
        )
        self._thread = threading.Thread(target=self._write_regularly, name="store", daemon=True)
        self._thread.start()

    def observe(self, event: Event) -> None:
        """Append an event, unless one before it could not be written."""
        if self.failure:
            return
        with self._gathering:
            self._event += 1
            WRITERS[type(event)](self._rows, self._event, event)
            self._observed += 1
            is_due = self._observed >= _BATCH
        if is_due or isinstance(event, Evaluated | TasksTested | RunEnded):
            with suppress(UserError):
                self.commit()

    def commit(self) -> int:
        """Write what was observed since the last time to disk; return the number of all events.

        Raises
        ------
        UserError
            It cannot be written, now or before.
        """
        with self._writing:
            connection = self._connection
            if connection is None:
                raise ValueError(f"{self.path} is closed.")
            with self._gathering:
                self._leaving.append(self._rows)
                self._rows, self._observed, last = defaultdict(list), 0, self._event
            if not self.failure:
                try:
                    with connection:
                        for leaving in self._leaving:
                            for table, rows in leaving.items():
                                connection.executemany(_INSERT[table], rows)
                except sqlite3.Error as error:
                    self.failure = f"{error}, after {self._written} of {last} events"
            # Ctrl-C before this line leaves the rows for the next time.
            self._leaving.clear()
            if self.failure:
                raise UserError(f"Cannot write {self.path}: {self.failure}.")
            self._written = last
            return last

    def close(self) -> None:
        """Write what is left, if that is possible, and close the file; twice does no harm."""
        self._closing.set()
        if self._connection is None:
            return
        try:
            self._thread.join()
            with suppress(UserError):
                self.commit()
        finally:
            self._connection.close()
            self._connection = None

    def _write_regularly(self) -> None:
        """Write what was observed once a second, until the store is closed."""
        while not self._closing.wait(_SECONDS):
            if self._observed and not self.failure:
                with suppress(UserError):
                    self.commit()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """Read a run store back into the events that were observed, in their order.

    Flower's node ids are not kept: they are random. ``ClientJoined.node_id`` is 0. Numbers that
    were NaN come back as NaN. Of stores of older formats the events are those that a run would
    report now.

    Parameters
    ----------
    path : Path
        The file, or the folder that holds it.

    Raises
    ------
    UserError
        There is no such file, or it is not a run store.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"There is no run store {file}; expected a folder that `raceme run` wrote.")
    with closing(_open(file)) as connection:
        connection.execute("PRAGMA query_only = ON")
        stored = check_format(connection, file, (*FORMATS, *READ_ALIKE))
        try:
            if stored in FORMATS:
                return read_old_events(connection)
            numbered = [pair for read in READERS for pair in read(connection)]
        # ValueError: a verb or a kind of end that does not exist.
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(f"{file} is damaged: {error}.") from None
    return [event for _, event in sorted(numbered, key=itemgetter(0))]


def _create(path: Path, replace: bool) -> sqlite3.Connection:
    """Make an empty run store."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not replace:
                raise UserError(
                    f"{path.parent} holds a run already; give another folder with --out, "
                    f"or delete {path}."
                )
            path.unlink()
        # What writes to it one at a time is two threads.
        connection = sqlite3.connect(path, check_same_thread=False)
        try:
            # All at once: whoever follows the run sees a store, or an empty file.
            kind = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {FORMAT};"
            connection.executescript(f"BEGIN; {kind} {SCHEMA} COMMIT;")
        except BaseException:
            connection.close()
            # Nothing is in it yet; left there, it would be in the way of the next run.
            path.unlink(missing_ok=True)
            raise
    except (OSError, sqlite3.OperationalError) as error:
        raise UserError(f"Cannot write {path}: {error}. Give another folder with --out.") from None
    return connection


def _open(path: Path) -> sqlite3.Connection:
    # For writing, so that SQLite can undo what a killed run left half written. A write-protected
    # file opens for reading.
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, check_same_thread=False)


def check_format(connection: sqlite3.Connection, path: Path, formats: Collection[int]) -> int:
    """Return the format of a run store; raise UserError if it is not one of these."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        if is_locked(error):
            raise UserError(f"{path} is locked by another program.") from None
        raise UserError(f"{path} is not a run store of Raceme: {error}.") from None
    if application != _APPLICATION:
        raise UserError(f"{path} is not a run store of Raceme but another SQLite database.")
    if version not in formats:
        raise UserError(
            f"{path} has format {version}, and format {FORMAT} is needed here. "
            "Use the version of Raceme that wrote it."
        )
    return int(version)


def is_locked(error: Exception) -> bool:
    """Return whether SQLite says that another program keeps a database to itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _reopen(path: Path, after: int) -> sqlite3.Connection:
    """Open a run store and drop what came after an event."""
    if not path.is_file():
        raise UserError(f"There is no run store {path} to resume.")
    connection = _open(path)
    try:
        check_format(connection, path, (FORMAT,))
        held = any(
            connection.execute(f"SELECT 1 FROM {table} WHERE event = ?", (after,)).fetchone()
            for table in TABLES
        )
        if after and not held:
            raise UserError(f"{path} is not of the same run as its checkpoint: events are missing.")
        with connection:
            for table in TABLES:
                connection.execute(f"DELETE FROM {table} WHERE event > ?", (after,))
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UserError(f"{path} cannot be gone on with: {error}.") from None
    except BaseException:
        connection.close()
        raise
    return connection


# -----------------------------------------------------------------------------
# Follow a run store while another process writes it, without ever locking it.
#
# A reader that holds SQLite's lock makes the run wait, and one that is stopped while it does
# makes
# the run lose its events. So nothing is locked here: the file is read as if nobody wrote it, and
# what
# was read is used only if nobody has. SQLite's rollback journal and change counter tell.
# -----------------------------------------------------------------------------


_CHUNK = 5000
"""Events that are read at once."""
_ATTEMPTS = 5
"""So often a reading that a transaction fell into is repeated at once; then it is put off."""
_HOT_SECONDS = 3.0
"""A journal that stays as it is for so long is of a process that was killed, or waits."""
_COUNTER = slice(24, 28)
"""Where the header of an SQLite file counts its transactions."""


@dataclass(frozen=True)
class Reading:
    """What has come to a run store since the last reading.

    Attributes
    ----------
    events : list[Event]
        In their order.
    restarted : bool
        The store is another one than before, or was taken back to an earlier event by a run that
        was resumed: all that was read before is void, and `events` begin with the first.
    more : bool
        There is more already.
    """

    events: list[Event]
    restarted: bool = False
    more: bool = False


@dataclass(frozen=True)
class _State:
    """What of a file changes with a transaction."""

    inode: int
    size: int
    modified: int
    counter: bytes


_Mark = tuple[tuple[str, float], ...]
"""By which an event is known again: the tables that have it, and its times there."""


@dataclass(frozen=True)
class _Found:
    reading: Reading
    last: int
    mark: _Mark | None


class StoreFollower:
    """Reads a run store bit by bit.

    Parameters
    ----------
    folder : Path
        The folder of the run; its store need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._journal = folder / f"{FILE_NAME}-journal"
        self._last = 0
        self._mark: _Mark | None = None
        self._state: _State | None = None
        self._ahead = False
        self._hot: tuple[int, float] | None = None

    def read(self) -> Reading:
        """Return what has come since the last time: nothing if there is no store yet.

        Raises
        ------
        UserError
            The file is no run store, is damaged, or another program keeps it locked.
        """
        for _ in range(_ATTEMPTS):
            state = self._look()
            if state is None or not state.size or (state == self._state and not self._ahead):
                return Reading([])
            if self._is_being_written():
                return self._read_hot(state) if self._stays_hot() else Reading([])
            try:
                with closing(_connect(self.path, "mode=ro&immutable=1")) as connection:
                    found = self._read(connection, state)
            except UserError:
                # Read while it was written, anything may look like damage.
                if self._untouched_since(state):
                    raise
                continue
            if self._untouched_since(state):
                return self._take(found, state)
        return Reading([])

    def _look(self) -> _State | None:
        try:
            with self.path.open("rb") as file:
                header, status = file.read(_COUNTER.stop), os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.") from None
        return _State(status.st_ino, status.st_size, status.st_mtime_ns, header[_COUNTER])

    def _is_being_written(self) -> bool:
        with suppress(OSError):
            return self._journal.stat().st_size > 0
        self._hot = None
        return False

    def _untouched_since(self, state: _State) -> bool:
        """Return whether no transaction has ended since, and none is under way.

        The journal is looked at first: what wrote to the file before has counted by then.
        """
        return not self._is_being_written() and self._look() == state

    def _stays_hot(self) -> bool:
        """Return whether the journal has been the same for some time."""
        try:
            modified = self._journal.stat().st_mtime_ns
        except OSError:
            return False
        if self._hot is None or self._hot[0] != modified:
            self._hot = modified, monotonic()
        return monotonic() - self._hot[1] > _HOT_SECONDS

    def _read_hot(self, state: _State) -> Reading:
        """Read as everybody else does: SQLite undoes what a killed run has left half written."""
        with closing(_connect(self.path, "mode=rw")) as connection:
            found = self._read(connection, state)
        return self._take(found, self._look() or state)

    def _read(self, connection: sqlite3.Connection, state: _State) -> _Found:
        """Return the next events, with the number of the last one and what tells it."""
        try:
            stored = check_format(connection, self.path, (*FORMATS, *READ_ALIKE))
            top = _top(connection)
            before = self._state or state
            restarted = self._last > 0 and (state.inode != before.inode or top < self._last)
            after = 0 if restarted else self._last
            if stored in FORMATS:
                # These are of runs that ended long ago.
                events = read_old_events(connection) if after < top else []
                return _Found(Reading(events, restarted), top, None)
            if after and _mark(connection, after) != self._mark:
                # A file system gives the number of a file that is gone to the next one.
                restarted, after = True, 0
            end = min(after + _CHUNK, top)
            events = _events(connection, after, end)
            mark = _mark(connection, end) if events else self._mark
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(_said(self.path, error)) from None
        return _Found(Reading(events, restarted, end < top), end, mark)

    def _take(self, found: _Found, state: _State) -> Reading:
        reading, self._last, self._mark = found.reading, found.last, found.mark
        self._state, self._ahead = state, reading.more
        return reading


def _connect(path: Path, how: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, timeout=0.2)
    except sqlite3.Error as error:
        raise UserError(_said(path, error)) from None


def _said(path: Path, error: Exception) -> str:
    if is_locked(error):
        return f"{path} is locked by another program."
    return f"{path} is damaged: {error}."


def _tables(connection: sqlite3.Connection) -> list[str]:
    return [table for table in TABLES if columns_of(connection, table)]


def _top(connection: sqlite3.Connection) -> int:
    """Return the number of the last event."""
    highest = (
        connection.execute(f"SELECT max(event) FROM main.{table}").fetchone()[0]
        for table in _tables(connection)
        if "event" in columns_of(connection, table)
    )
    return max((number for number in highest if number is not None), default=0)


def _mark(connection: sqlite3.Connection, number: int) -> _Mark:
    """Return by what an event of this number is known again."""
    found = (
        (table, row[0])
        for table in _tables(connection)
        if {"event", "time"} <= set(columns_of(connection, table))
        for row in connection.execute(f"SELECT time FROM main.{table} WHERE event = ?", (number,))
    )
    return tuple(found)


def _events(connection: sqlite3.Connection, after: int, end: int) -> list[Event]:
    """Return the events after a number, up to and with another."""
    for table in _tables(connection):
        # A temporary view stands before a table of its name, so that what reads whole tables reads
        # a part of each. Bound parameters are not allowed in views.
        rowid = "" if _is_without_rowid(connection, table) else "rowid AS rowid, "
        connection.execute(
            f"CREATE TEMP VIEW {table} AS SELECT {rowid}* FROM main.{table} "
            f"WHERE event > {int(after)} AND event <= {int(end)}"
        )
    numbered = [pair for read in READERS for pair in read(connection)]
    return [event for _, event in sorted(numbered, key=itemgetter(0))]


def _is_without_rowid(connection: sqlite3.Connection, table: str) -> bool:
    query = "SELECT sql FROM main.sqlite_master WHERE name = ?"
    (sql,) = connection.execute(query, (table,)).fetchone()
    return "WITHOUT ROWID" in str(sql).upper()
