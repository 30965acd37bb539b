"""The tables of a run store with what only some methods report; they came with format 6."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from raceme.protocol.events import AnswerTaken, SupportChanged, TaskScore, TasksTested
from raceme.protocol.measure import Measure
from raceme.records import protection
from raceme.records.store_rows import Numbered, Rows, columns_of, number_of

SCHEMA = f"""
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
{protection.SCHEMA}"""

TABLES = {
    "answers": (7, "event"),
    "task_tests": (8, "event"),
    "task_scores": (6, "event, client, step"),
    "support_changes": (3, "event"),
    "supporters": (3, "event, cluster, supporter"),
    **protection.TABLES,
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


WRITERS: dict[type[Any], Callable[[Rows, int, Any], None]] = {
    AnswerTaken: _write_answer,
    TasksTested: _write_task_tests,
    SupportChanged: _write_support,
    **protection.WRITERS,
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


READERS: tuple[Callable[[sqlite3.Connection], Numbered], ...] = (
    _read_answers,
    _read_task_tests,
    _read_support,
    *protection.READERS,
)
"""What reads these tables, each in any order."""
