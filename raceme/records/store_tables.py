"""The tables of a run store, and how events become their rows and rows become events again."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from raceme.protocol.events import (
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
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)
from raceme.protocol.measure import Measure
from raceme.records import method_tables
from raceme.records.store_rows import Numbered, Rows, columns_of, number_of

FORMAT = 8
"""3 to 7 have less, and are read alike; 1 and 2 are :mod:`raceme.records.old_stores`'."""

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
{method_tables.SCHEMA}"""

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
    **method_tables.TABLES,
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
    **method_tables.WRITERS,
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
    *method_tables.READERS,
)
"""What reads the tables of this format, each in any order."""
