"""The run store: every event of a run in one SQLite file, ``run.sqlite``.

The file is a log. Each row carries the number of its event, so that :func:`read_events` gives
back what was observed, in order. Nothing in it depends on the wall clock of the machine or on
chance beyond the seed: two runs with one seed have the same contents.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

from raceme.errors import UserError
from raceme.events import (
    ClientAssigned,
    ClientJoined,
    ClientLeft,
    ClusterSplit,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)

FILE_NAME = "run.sqlite"

_APPLICATION = 0x52616365
"""SQLite's application id of a run store: "Race" in ASCII."""
_FORMAT = 2
"""In format 1 updates had no times of the device's work; it can still be read."""
_BATCH = 500
"""Events kept in memory before they are written: what a kill can lose at most."""

_SCHEMA = """
CREATE TABLE client_events (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('joined', 'returned', 'left', 'assigned')),
    cluster INTEGER, num_examples INTEGER, group_id INTEGER);
CREATE VIEW clients AS
    SELECT client, time AS joined_at, num_examples, group_id, min(event) AS event
    FROM client_events WHERE kind IN ('joined', 'returned') GROUP BY client ORDER BY event;
CREATE TABLE updates (
    seq INTEGER NOT NULL UNIQUE, time REAL NOT NULL, client TEXT NOT NULL,
    cluster INTEGER NOT NULL, base_version INTEGER NOT NULL, staleness INTEGER NOT NULL,
    weight REAL, dispatched_at REAL NOT NULL, train_loss REAL,
    bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL, started_at REAL, finished_at REAL,
    event INTEGER PRIMARY KEY);
CREATE TABLE rejections (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, reason TEXT NOT NULL,
    dispatched_at REAL NOT NULL);
CREATE TABLE evaluations (
    event INTEGER PRIMARY KEY, updates INTEGER NOT NULL, time REAL NOT NULL,
    accuracy REAL, loss REAL, clusters INTEGER NOT NULL);
CREATE TABLE client_evaluations (
    event INTEGER NOT NULL REFERENCES evaluations, updates INTEGER NOT NULL, client TEXT NOT NULL,
    cluster INTEGER NOT NULL, accuracy REAL, loss REAL,
    PRIMARY KEY (event, client)) WITHOUT ROWID;
CREATE TABLE splits (
    event INTEGER PRIMARY KEY, updates INTEGER NOT NULL, time REAL NOT NULL,
    parent INTEGER NOT NULL, gap REAL, threshold REAL);
CREATE TABLE split_members (
    event INTEGER NOT NULL REFERENCES splits, child INTEGER NOT NULL, client TEXT,
    UNIQUE (event, child, client));
CREATE TABLE endings (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, updates INTEGER NOT NULL, reason TEXT NOT NULL);
"""

_TABLES = {
    "client_events": (7, "event"),
    "updates": (14, "event"),
    "rejections": (5, "event"),
    "evaluations": (6, "event"),
    "client_evaluations": (6, "event, client"),
    "splits": (6, "event"),
    "split_members": (3, "event, child, client"),
    "endings": (4, "event"),
}
"""Number of columns and key of each table."""

# A row that is there already is left alone: Ctrl-C can come between the end of a transaction and
# the moment at which the rows in memory are forgotten, and they are then written a second time.
_INSERT = {
    table: f"INSERT INTO {table} VALUES ({', '.join('?' * columns)}) ON CONFLICT ({key}) DO NOTHING"
    for table, (columns, key) in _TABLES.items()
}


class RunStore:
    """The writer of ``run.sqlite``, an observer of the run.

    Events are gathered and written in one transaction per 500 events or evaluation. After
    ``close``, and so after leaving a ``with`` block for whatever reason, everything observed is
    on disk; after a kill, everything up to the last such transaction.

    Parameters
    ----------
    folder : Path
        Where the file goes; created if it does not exist.
    replace : bool
        Replace a run that the folder holds already, instead of refusing.
    after : int, optional
        Go on with the run that the folder holds, after so many of its events; what it holds of
        later ones is dropped.

    Raises
    ------
    UserError
        The folder holds a run already, or not the one that was expected, or cannot be written.
    """

    def __init__(self, folder: Path, *, replace: bool = False, after: int | None = None) -> None:
        self.path = folder / FILE_NAME
        self._event = after or 0
        self._observed = 0
        self._rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._connection: sqlite3.Connection | None = (
            _create(self.path, replace) if after is None else _reopen(self.path, after)
        )

    def observe(self, event: Event) -> None:
        """Append an event."""
        self._event += 1
        _WRITERS[type(event)](self._rows, self._event, event)
        self._observed += 1
        if self._observed >= _BATCH or isinstance(event, Evaluated | RunEnded):
            self.commit()

    def commit(self) -> int:
        """Write what was observed since the last time to disk; return the number of all events."""
        connection = self._connection
        if connection is None:
            raise ValueError(f"{self.path} is closed.")
        try:
            with connection:
                for table, rows in self._rows.items():
                    connection.executemany(_INSERT[table], rows)
        except sqlite3.OperationalError as error:
            raise UserError(f"Cannot write {self.path}: {error}.") from None
        self._rows.clear()
        self._observed = 0
        return self._event

    def close(self) -> None:
        """Write what is left and close the file. Closing twice does no harm."""
        if self._connection is None:
            return
        try:
            self.commit()
        finally:
            self._connection.close()
            self._connection = None

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
    were NaN come back as NaN.

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
    with contextlib.closing(_open(file)) as connection:
        connection.execute("PRAGMA query_only = ON")
        _check_format(connection, file, (1, _FORMAT))
        try:
            numbered = [pair for read in _READERS for pair in read(connection)]
        except sqlite3.DatabaseError as error:
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
        connection = sqlite3.connect(path)
        try:
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.OperationalError) as error:
        raise UserError(f"Cannot write {path}: {error}. Give another folder with --out.") from None
    return connection


def _open(path: Path) -> sqlite3.Connection:
    # For writing, so that SQLite can undo what a killed run left half written. A write-protected
    # file opens for reading.
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)


def _check_format(connection: sqlite3.Connection, path: Path, formats: Collection[int]) -> None:
    """Raise UserError unless this is a run store in one of the formats."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is not a run store of Raceme: {error}.") from None
    if application != _APPLICATION:
        raise UserError(f"{path} is not a run store of Raceme but another SQLite database.")
    if version not in formats:
        raise UserError(
            f"{path} has format {version}; this Raceme reads format {_FORMAT}. "
            "Use the version of Raceme that wrote it."
        )


def _reopen(path: Path, after: int) -> sqlite3.Connection:
    """Open a run store and drop what came after an event."""
    if not path.is_file():
        raise UserError(f"There is no run store {path} to go on with.")
    connection = _open(path)
    try:
        _check_format(connection, path, (_FORMAT,))
        held = any(
            connection.execute(f"SELECT 1 FROM {table} WHERE event = ?", (after,)).fetchone()
            for table in _TABLES
        )
        if after and not held:
            raise UserError(f"{path} is not of the same run as its checkpoint: events are missing.")
        with connection:
            for table in _TABLES:
                connection.execute(f"DELETE FROM {table} WHERE event > ?", (after,))
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UserError(f"{path} cannot be gone on with: {error}.") from None
    except BaseException:
        connection.close()
        raise
    return connection


# Conversions with int() and float() let numpy's scalars in, which sqlite3 does not know.

_Rows = defaultdict[str, list[tuple[Any, ...]]]


def _write_joined(rows: _Rows, number: int, event: ClientJoined) -> None:
    kind = "returned" if event.returned else "joined"
    group = None if event.group is None else int(event.group)
    examples = int(event.num_examples)
    rows["client_events"].append(
        (number, float(event.time), event.client, kind, None, examples, group)
    )


def _write_left(rows: _Rows, number: int, event: ClientLeft) -> None:
    rows["client_events"].append(
        (number, float(event.time), event.client, "left", None, None, None)
    )


def _write_assigned(rows: _Rows, number: int, event: ClientAssigned) -> None:
    cluster = int(event.cluster)
    rows["client_events"].append(
        (number, float(event.time), event.client, "assigned", cluster, None, None)
    )


def _write_update(rows: _Rows, number: int, event: UpdateApplied) -> None:
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
            number,
        )
    )


def _write_rejection(rows: _Rows, number: int, event: UpdateRejected) -> None:
    rows["rejections"].append(
        (number, float(event.time), event.client, event.reason, float(event.dispatched_at))
    )


def _write_evaluation(rows: _Rows, number: int, event: Evaluated) -> None:
    updates, clusters = int(event.updates), int(event.clusters)
    accuracy, loss = float(event.accuracy), float(event.loss)
    rows["evaluations"].append((number, updates, float(event.time), accuracy, loss, clusters))
    rows["client_evaluations"].extend(
        (number, updates, client, int(cluster), float(client_accuracy), float(client_loss))
        for client, (cluster, client_accuracy, client_loss) in event.per_client.items()
    )


def _write_split(rows: _Rows, number: int, event: ClusterSplit) -> None:
    updates, parent = int(event.updates), int(event.parent)
    gap, threshold = float(event.gap), float(event.threshold)
    rows["splits"].append((number, updates, float(event.time), parent, gap, threshold))
    rows["split_members"].extend(
        (number, int(child), client)
        for child, clients in event.children.items()
        for client in clients or (None,)
    )


def _write_ending(rows: _Rows, number: int, event: RunEnded) -> None:
    rows["endings"].append((number, float(event.time), int(event.updates), event.reason))


_WRITERS: dict[type[Any], Callable[[_Rows, int, Any], None]] = {
    ClientJoined: _write_joined,
    ClientLeft: _write_left,
    ClientAssigned: _write_assigned,
    UpdateApplied: _write_update,
    UpdateRejected: _write_rejection,
    Evaluated: _write_evaluation,
    ClusterSplit: _write_split,
    RunEnded: _write_ending,
}

_Numbered = Iterator[tuple[int, Event]]


def _number(value: float | None) -> float:
    """Return a number, or NaN where SQLite stored NULL for it."""
    return float("nan") if value is None else value


def _read_client_events(connection: sqlite3.Connection) -> _Numbered:
    query = "SELECT event, time, client, kind, cluster, num_examples, group_id FROM client_events"
    for event, time, client, kind, cluster, num_examples, group in connection.execute(query):
        if kind == "left":
            yield event, ClientLeft(time, client)
        elif kind == "assigned":
            yield event, ClientAssigned(time, client, cluster)
        else:
            yield event, ClientJoined(time, client, 0, num_examples, group, kind == "returned")


def _read_updates(connection: sqlite3.Connection) -> _Numbered:
    stored = {name for _, name, *_ in connection.execute("PRAGMA table_info(updates)")}
    names = [item.name for item in fields(UpdateApplied) if item.name in stored]
    for number, *values in connection.execute(f"SELECT event, {', '.join(names)} FROM updates"):
        update = dict(zip(names, values, strict=True))
        update["weight"] = _number(update["weight"])
        update["train_loss"] = _number(update["train_loss"])
        yield number, UpdateApplied(**update)


def _read_rejections(connection: sqlite3.Connection) -> _Numbered:
    query = "SELECT event, time, client, reason, dispatched_at FROM rejections"
    for number, *values in connection.execute(query):
        yield number, UpdateRejected(*values)


def _read_evaluations(connection: sqlite3.Connection) -> _Numbered:
    per_client: defaultdict[int, dict[str, tuple[int, float, float]]] = defaultdict(dict)
    query = "SELECT event, client, cluster, accuracy, loss FROM client_evaluations"
    for number, client, cluster, accuracy, loss in connection.execute(query):
        per_client[number][client] = (cluster, _number(accuracy), _number(loss))
    query = "SELECT event, time, updates, accuracy, loss, clusters FROM evaluations"
    for number, time, updates, accuracy, loss, clusters in connection.execute(query):
        means = _number(accuracy), _number(loss)
        yield number, Evaluated(time, updates, *means, clusters, per_client.get(number, {}))


def _read_splits(connection: sqlite3.Connection) -> _Numbered:
    members: defaultdict[int, dict[int, tuple[str, ...]]] = defaultdict(dict)
    query = "SELECT event, child, client FROM split_members ORDER BY rowid"
    for number, child, client in connection.execute(query):
        others = members[number].get(child, ())
        members[number][child] = others if client is None else (*others, client)
    query = "SELECT event, time, updates, parent, gap, threshold FROM splits"
    for number, time, updates, parent, gap, threshold in connection.execute(query):
        numbers = _number(gap), _number(threshold)
        yield number, ClusterSplit(time, updates, parent, members[number], *numbers)


def _read_endings(connection: sqlite3.Connection) -> _Numbered:
    query = "SELECT event, time, updates, reason FROM endings"
    for number, *values in connection.execute(query):
        yield number, RunEnded(*values)


_READERS: tuple[Callable[[sqlite3.Connection], _Numbered], ...] = (
    _read_client_events,
    _read_updates,
    _read_rejections,
    _read_evaluations,
    _read_splits,
    _read_endings,
)
