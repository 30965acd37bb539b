"""The run store: every event of a run in one SQLite file, ``run.sqlite``.

The file is a log with one row per event: number, time, kind and fields as JSON, which
:func:`read_events` restores in order, independent of kinds. Views with a column per field (`VIEWS`)
serve queries by hand; a method's own measures are in the view ``measures``. Contents depend neither
on wall time nor on randomness beyond the seed.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Union, get_args, get_origin, get_type_hints

from raceme.core import events
from raceme.core.errors import UserError
from raceme.core.events import Evaluated, Event, RunEnded, TasksTested
from raceme.records.folder import STORE

# -----------------------------------------------------------------------------
# Content of the file: one table, and views for queries.
# -----------------------------------------------------------------------------

FORMAT = 10
"""Stores of other formats are of unreleased versions and are not read."""

_TABLE = """
CREATE TABLE events (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX kinds ON events (kind);
"""


def _columns(*names: str, **renamed: str) -> str:
    """Return the columns of a view for fields of the events' JSON."""
    pairs = {**{name: name for name in names}, **renamed}
    return ", ".join(
        f"json_extract(body, '$.{path}') AS \"{name}\"" for name, path in pairs.items()
    )


def _view(kind: str, *names: str, **renamed: str) -> str:
    """Return the query of a view with a row per event of a kind, by default with all its fields."""
    if not names:
        every = (item.name for item in fields(getattr(events, kind)))
        names = tuple(name for name in every if name not in ("time", "mixture"))
    return f"SELECT event, time, {_columns(*names, **renamed)} FROM events WHERE kind = '{kind}'"


def _each(kind: str, path: str, columns: str, *names: str) -> str:
    """Return the query of a view with a row per entry of a field of a kind of event."""
    own = "".join(f", {_columns(name)}" for name in names)
    return (
        f"SELECT event, time{own}, {columns} "
        f"FROM events, json_each(body, '$.{path}') AS entry WHERE kind = '{kind}'"
    )


def _view_of_tests(kind: str, *names: str) -> str:
    """Return the query of a view of clients' tests, with the number of clients that answered."""
    answered = ", (SELECT count(*) FROM json_each(body, '$.per_client')) AS answered FROM"
    return _view(kind, *names, unit="measure.unit").replace(" FROM", answered, 1)


_KEY_AND_VALUE = "CAST(entry.key AS INTEGER) AS {}, entry.value AS {}"

VIEWS: Mapping[str, str] = {
    "client_events": (
        "SELECT event, time, json_extract(body, '$.client') AS client, "
        "CASE WHEN kind = 'ClientLeft' THEN 'left' WHEN json_extract(body, '$.returned') "
        "THEN 'returned' ELSE 'joined' END AS kind, "
        f"{_columns('num_examples', 'labels', group_id='group')} "
        "FROM events WHERE kind IN ('ClientJoined', 'ClientLeft')"
    ),
    "clients": (
        "SELECT client, time AS joined_at, num_examples, group_id, min(event) AS event "
        "FROM client_events WHERE kind <> 'left' GROUP BY client ORDER BY event"
    ),
    "refused_claims": _view("ClaimRefused"),
    "key_changes": _view("KeyChanged"),
    "versions": _view("VersionDecided"),
    "updates": _view("UpdateApplied"),
    "mixtures": _each(
        "UpdateApplied", "mixture", "entry.key AS distribution, entry.value AS share"
    ),
    "answers": _view("AnswerTaken"),
    "rejections": _view("UpdateRejected"),
    "evaluations": _view_of_tests(
        "Evaluated", "updates", "accuracy", "loss", "clusters", "asked", "weighted_accuracy"
    ),
    "client_evaluations": _each(
        "Evaluated",
        "per_client",
        "entry.key AS client, "
        + ", ".join(
            f"json_extract(entry.value, '$[{place}]') AS {name}"
            for place, name in enumerate(("cluster", "accuracy", "loss", "step", "group_id"))
        ),
        "updates",
    ),
    "cluster_scores": _each(
        "ClustersScored", "accuracies", _KEY_AND_VALUE.format("cluster", "accuracy"), "updates"
    ),
    "cluster_changes": _view("ClustersChanged", "updates", "change", "score", "threshold"),
    "changed_clusters": " UNION ALL ".join(
        _each("ClustersChanged", fate, f"entry.value AS cluster, '{fate}' AS fate")
        for fate in ("gone", "made")
    ),
    "memberships": (
        "SELECT event, time, entry.key AS client, CAST(inner.key AS INTEGER) AS cluster, "
        "inner.value AS weight FROM events, json_each(body, '$.memberships') AS entry "
        # A client that lost its clusters has a row without one.
        "LEFT JOIN json_each(entry.value) AS inner WHERE kind = 'ClustersChanged'"
    ),
    "data_changes": _view("DataChanged"),
    "measures": _view("Measured", "updates", "values", name="schema.name"),
    "task_tests": _view_of_tests("TasksTested", "updates", "step", "clusters", "asked"),
    "task_scores": (
        "SELECT event, time, entry.key AS client, CAST(inner.key AS INTEGER) AS step, "
        "json_extract(inner.value, '$[0]') AS cluster, "
        "json_extract(inner.value, '$[1]') AS accuracy, "
        "json_extract(inner.value, '$[2]') AS untrained "
        "FROM events, json_each(body, '$.per_client') AS entry, json_each(entry.value) AS inner "
        "WHERE kind = 'TasksTested'"
    ),
    "verdicts": _view("UpdateJudged"),
    "warnings": _view("Warned"),
    "endings": _view("RunEnded", "updates", "ending", "reason"),
}
"""The query of each view, by name."""

_SCHEMA = _TABLE + "".join(f"CREATE VIEW {name} AS {query};\n" for name, query in VIEWS.items())


def _view_of(schema: events.MeasureSchema) -> str:
    """Return the statement that creates the view of a method's measure."""
    if schema.per:
        key = "CAST(entry.key AS INTEGER)" if schema.per == "cluster" else "entry.key"
        columns = f'{key} AS {schema.per}, entry.value AS "{schema.value}"'
        query = _each("Measured", f"values.{schema.value}", columns, "updates")
    else:
        paths = {name: f"values.{name}" for name in schema.columns}
        query = _view("Measured", "updates", **paths)
    chosen = f"json_extract(body, '$.schema.name') = '{schema.name}'"
    return f"CREATE VIEW IF NOT EXISTS measure_{schema.name} AS {query} AND {chosen}"


# -----------------------------------------------------------------------------
# Events as JSON, and back.
# -----------------------------------------------------------------------------


_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}
_INFINITE = {math.inf: "\0inf", -math.inf: "\0-inf"}
"""Placeholders of infinite numbers, later written as too large numbers; no client text contains the
character."""


def plain(value: Any, infinite: Mapping[float, Any] | None = None) -> Any:
    """Convert a value to JSON; NaN becomes null, infinite numbers their placeholders.

    Parameters
    ----------
    value : Any
        A value of an event: a number of Python's or numpy's, text, an enumeration, a sequence, a
        mapping or a dataclass.
    infinite : Mapping[float, Any], optional
        Placeholders of infinite numbers; by default null.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else (infinite or {}).get(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, infinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, infinite) for item in value]
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name), infinite) for item in fields(value)}
    # A scalar of numpy's.
    return plain(value.item(), infinite)


def _body(event: Event) -> str:
    """Return the fields of an event as JSON, without its time."""
    tree = {item.name: getattr(event, item.name) for item in fields(event) if item.name != "time"}
    if change := _WRITTEN.get(type(event)):
        change(tree)
    text = json.dumps(plain(tree, _INFINITE), ensure_ascii=False, separators=(",", ":"))
    if "\\u0000" in text:
        text = text.replace('"\\u0000inf"', "9e999").replace('"\\u0000-inf"', "-9e999")
    return text


def _event(time: float, kind: str, body: str) -> Event:
    """Return the event of a row.

    Raises
    ------
    ValueError
        The row is no valid event.
    """
    try:
        time = float(time)
        tree, known = json.loads(body), _KINDS[kind]
        if change := _READ.get(known):
            change(tree)
        # mypy considers classes unhashable.
        read = _readers(known)  # type: ignore[arg-type]
        event: Event = known(time=time, **{name: read[name](value) for name, value in tree.items()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"an event of kind {kind} cannot be read: {error}") from None
    return event


def _write_evaluation(tree: dict[str, Any]) -> None:
    steps, groups = tree.pop("steps"), tree.pop("groups")
    tree["per_client"] = {
        client: (*score, steps.get(client, 0), groups.get(client))
        for client, score in tree["per_client"].items()
    }


def _read_evaluation(tree: dict[str, Any]) -> None:
    scores = tree["per_client"]
    tree["steps"] = {client: score[3] for client, score in scores.items() if score[3]}
    tree["groups"] = {client: score[4] for client, score in scores.items() if score[4] is not None}
    tree["per_client"] = {client: score[:3] for client, score in scores.items()}


def _read_measure(tree: dict[str, Any]) -> None:
    per = tree["schema"]["per"]
    tree["values"] = {name: _measured(value, per) for name, value in tree["values"].items()}


def _write_client(tree: dict[str, Any]) -> None:
    # Flower's node ids are random.
    del tree["node_id"]
    if not tree["labels"]:
        del tree["labels"]


_WRITTEN: Mapping[type[Any], Callable[[dict[str, Any]], Any]] = {
    events.ClientJoined: _write_client,
    # They are unsigned 64-bit numbers, which exceed SQLite's range.
    events.ClaimRefused: lambda tree: tree.update(node_id=str(tree["node_id"])),
    Evaluated: _write_evaluation,
}
_READ: Mapping[type[Any], Callable[[dict[str, Any]], Any]] = {
    events.ClientJoined: lambda tree: tree.update(node_id=0),
    Evaluated: _read_evaluation,
    events.Measured: _read_measure,
}
"""Conversions of stored fields that differ from the event's."""


def _measured(value: Any, per: str) -> Any:
    """Restore a measured value from JSON."""
    if isinstance(value, dict):
        keyed = int if per == "cluster" else str
        return {keyed(key): _measured(item, "") for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_measured(item, "") for item in value)
    return math.nan if value is None else value


@cache
def _readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {item.name: _reader(hints[item.name]) for item in fields(kind)}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the reader of JSON for an annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return _number
    if hint is int:
        return int
    if origin in (Union, types.UnionType):
        # None stays None for optional numbers.
        of = [argument for argument in inner if argument is not type(None)]
        read = _reader(of[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple and inner[-1] is Ellipsis:
        read = _reader(inner[0])
        return lambda value: tuple(map(read, value))
    if origin is tuple:
        reads = [_reader(argument) for argument in inner]
        return lambda value: tuple(read(x) for read, x in zip(reads, value, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        key, read = inner[0], _reader(inner[1])
        return lambda value: {key(name): read(x) for name, x in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if isinstance(hint, type) and issubclass(hint, tuple):
        reads = [_reader(kind) for kind in get_type_hints(hint).values()]
        return lambda value: hint(*(read(x) for read, x in zip(reads, value, strict=True)))
    if isinstance(hint, type) and is_dataclass(hint):
        made, read_fields = hint, _readers(hint)
        return lambda value: made(**{name: read_fields[name](x) for name, x in value.items()})
    return lambda value: value


# -----------------------------------------------------------------------------
# Writing and reading.
# -----------------------------------------------------------------------------


_APPLICATION = 0x52616365
"""SQLite's application id of a run store: "Race" in ASCII."""
_BATCH = 500
"""Maximum number of unwritten events, which a kill can lose."""
_MILESTONES = (Evaluated, TasksTested, RunEnded)
"""Kinds of events written immediately."""
_SECONDS = 1.0
"""Maximum time before events are written, for the dashboard."""
_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Pauses before retrying a transaction without free file descriptors."""

# Existing rows are kept: after Ctrl-C between the commit and the clearing of memory, rows are
# written again.
_INSERT = "INSERT INTO events VALUES (?, ?, ?, ?) ON CONFLICT (event) DO NOTHING"

_Row = tuple[int, float, str, str]


class RunStore(AbstractContextManager["RunStore"]):
    """The writer of ``run.sqlite``, an observer of the run.

    Events are written in one transaction per 500 events or evaluation, and once a second by a
    thread, so that the run does not wait for the disk. After ``close`` (or a ``with`` block) all
    events are on disk; after a kill, those of the last transaction. After a failed transaction,
    e.g. on a full disk, later events are dropped and `failure` has the reason.

    Parameters
    ----------
    folder : Path
        Folder of the file, created if missing.
    after : int, optional
        Number of events after which to resume the run in the folder; later ones are dropped.

    Attributes
    ----------
    failure : str
        Reason of unwritten events, else empty.

    Raises
    ------
    UserError
        The folder has a run already, or another than expected, or is not writable.
    """

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        self.path = folder / STORE
        self.failure = ""
        self._viewed: set[str] = set()
        self._schemas: list[events.MeasureSchema] = []
        self._event = self._written = after or 0
        self._rows: list[_Row] = []
        self._leaving: list[_Row] = []
        # The first guards rows and numbers, briefly; the second the connection.
        self._gathering, self._writing = threading.Lock(), threading.RLock()
        self._closing = threading.Event()
        self._connection: sqlite3.Connection | None = (
            _create(self.path) if after is None else _reopen(self.path, after)
        )
        self._thread = threading.Thread(target=self._write_regularly, name="store", daemon=True)
        self._thread.start()

    def observe(self, event: Event) -> None:
        """Append an event, unless an earlier one failed."""
        if self.failure:
            return
        with self._gathering:
            if isinstance(event, events.Measured) and event.name not in self._viewed:
                self._viewed.add(event.name)
                self._schemas.append(event.schema)
            self._event += 1
            kind = type(event).__name__
            self._rows.append((self._event, float(event.time), kind, _body(event)))
            is_due = len(self._rows) >= _BATCH
        if is_due or type(event) in _MILESTONES:
            with suppress(UserError):
                self.commit()

    def commit(self) -> int:
        """Write new events to disk; return the total number of events.

        Raises
        ------
        UserError
            Writing fails or failed before.
        """
        with self._writing:
            connection = self._connection
            if connection is None:
                raise ValueError(f"{self.path} is closed.")
            with self._gathering:
                self._leaving += self._rows
                self._rows, last = [], self._event
            if not self.failure:
                try:
                    self._insert(connection)
                except sqlite3.Error as error:
                    self.failure = f"{error}, after {self._written} of {last} events"
            # Ctrl-C before this line keeps the rows for the next commit.
            self._leaving.clear()
            if self.failure:
                raise UserError(f"Cannot write {self.path}: {self.failure}.")
            self._written = last
            return last

    def _insert(self, connection: sqlite3.Connection) -> None:
        """Write the rows; retry if no file can be opened."""
        schemas = list(self._schemas)
        for pause in (*_PAUSES, None):
            try:
                with connection:
                    connection.executemany(_INSERT, self._leaving)
                    for schema in schemas:
                        connection.execute(_view_of(schema))
            except sqlite3.OperationalError as error:
                # The journal needs a free file descriptor.
                if pause is None or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                    raise
                sleep(pause)
            else:
                del self._schemas[: len(schemas)]
                return

    def close(self) -> None:
        """Write the rest, if possible, and close the file; idempotent."""
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
        """Write new events once a second until the store is closed."""
        while not self._closing.wait(_SECONDS):
            if self._rows and not self.failure:
                with suppress(UserError):
                    self.commit()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """Read the events of a run store in order; see :func:`raceme.records.store.each_event`."""
    return list(each_event(path))


def each_event(path: Path, kind: type[Any] | None = None) -> Iterator[Event]:
    """Yield the events of a run store in order, so that a run of months needs little memory.

    Flower's random node ids are not stored: ``ClientJoined.node_id`` is 0. NaN is restored.

    Parameters
    ----------
    path : Path
        The file or its folder.
    kind : type, optional
        Class of the events; by default all of them.

    Raises
    ------
    UserError
        There is no such file, or it is not a run store.
    """
    file = path / STORE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"There is no run store {file}; expected a folder that `raceme run` wrote.")
    with closing(_open(file)) as connection:
        connection.execute("PRAGMA query_only = ON")
        check_format(connection, file)
        where = ("", ()) if kind is None else ("WHERE kind = ?", (kind.__name__,))
        try:
            yield from _events(connection, *where)
        # ValueError: an invalid or unknown event.
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(f"{file} is damaged: {error}.") from None


def _events(
    connection: sqlite3.Connection, where: str, values: Iterable[int | str] = ()
) -> Iterator[Event]:
    query = f"SELECT time, kind, body FROM main.events {where} ORDER BY event"
    return (_event(*row) for row in connection.execute(query, tuple(values)))


def _create(path: Path) -> sqlite3.Connection:
    """Create an empty run store."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise UserError(
                f"{path.parent} holds a run already; give another folder with --out, "
                f"or delete {path}."
            )
        # Two threads write to it, one at a time.
        connection = sqlite3.connect(path, check_same_thread=False)
        try:
            # Atomic: a program that follows the run sees a store or an empty file.
            kind = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {FORMAT};"
            connection.executescript(f"BEGIN; {kind} {_SCHEMA} COMMIT;")
        except BaseException:
            connection.close()
            # The empty file would block the next run.
            path.unlink(missing_ok=True)
            raise
    except (OSError, sqlite3.OperationalError) as error:
        raise UserError(f"Cannot write {path}: {error}. Give another folder with --out.") from None
    return connection


def _open(path: Path) -> sqlite3.Connection:
    # Writable, so that SQLite can undo a killed run's partial transaction; a write-protected file
    # opens for reading.
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, check_same_thread=False)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise UserError if a file is no run store of this format."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        if is_locked(error):
            raise UserError(f"{path} is locked by another program.") from None
        raise UserError(f"{path} is not a run store of Raceme: {error}.") from None
    if application != _APPLICATION:
        raise UserError(f"{path} is not a run store of Raceme but another SQLite database.")
    if version != FORMAT:
        raise UserError(
            f"{path} has format {version}, and format {FORMAT} is needed here. "
            "Use the version of Raceme that wrote it."
        )


def is_locked(error: Exception) -> bool:
    """Return whether SQLite reports a lock by another program."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _reopen(path: Path, after: int) -> sqlite3.Connection:
    """Open a run store and drop later events."""
    if not path.is_file():
        raise UserError(f"There is no run store {path} to resume.")
    connection = _open(path)
    try:
        check_format(connection, path)
        held = connection.execute("SELECT 1 FROM events WHERE event = ?", (after,)).fetchone()
        if after and not held:
            raise UserError(f"{path} is not of the same run as its checkpoint: events are missing.")
        with connection:
            connection.execute("DELETE FROM events WHERE event > ?", (after,))
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UserError(f"{path} cannot be continued: {error}.") from None
    except BaseException:
        connection.close()
        raise
    return connection


# -----------------------------------------------------------------------------
# Follow a run store while another process writes it, without locking it.
#
# A reader's lock would make the run wait, or lose events if the reader is stopped. So the file is
# read without locks, and the result used only if no write happened, according to SQLite's rollback
# journal and change counter.
# -----------------------------------------------------------------------------


_CHUNK = 5000
"""Events per reading."""
_ATTEMPTS = 5
"""Immediate retries of a reading that overlapped a transaction."""
_HOT_SECONDS = 3.0
"""Age of an unchanged journal of a killed or waiting process."""
_COUNTER = slice(24, 28)
"""Position of the change counter in SQLite's header."""


@dataclass(frozen=True)
class Reading:
    """New events of a run store.

    Attributes
    ----------
    events : list[Event]
        New events in order.
    restarted : bool
        Whether the store was replaced, or truncated by a resumed run: earlier readings are void,
        and `events` start from the first.
    more : bool
        Whether the store has more events.
    """

    events: list[Event]
    restarted: bool = False
    more: bool = False


@dataclass(frozen=True)
class _State:
    """File properties that change with a transaction."""

    inode: int
    size: int
    modified: int
    counter: bytes


_Mark = tuple[float, str]
"""Identification of an event: time and kind."""


@dataclass(frozen=True)
class _Found:
    reading: Reading
    last: int
    mark: _Mark | None


class StoreFollower:
    """Reads a run store incrementally.

    Parameters
    ----------
    folder : Path
        Folder of the run; its store may not exist so far.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STORE
        self._journal = folder / f"{STORE}-journal"
        self._last = 0
        self._mark: _Mark | None = None
        self._state: _State | None = None
        self._ahead = False
        self._hot: tuple[int, float] | None = None

    def read(self) -> Reading:
        """Return the new events; empty without a store.

        Raises
        ------
        UserError
            The file is no run store, is damaged, or another program keeps it locked.
        """
        for _ in range(_ATTEMPTS):
            state = self._file_state()
            if state is None or not state.size or (state == self._state and not self._ahead):
                return Reading([])
            if self._is_being_written():
                return self._read_hot(state) if self._stays_hot() else Reading([])
            try:
                with closing(_connect(self.path, "mode=ro&immutable=1")) as connection:
                    found = self._read(connection, state)
            except UserError:
                # Concurrent writes may look like damage.
                if self._untouched_since(state):
                    raise
                continue
            if self._untouched_since(state):
                return self._take(found, state)
        return Reading([])

    def _file_state(self) -> _State | None:
        """Return what shows a change of the file; None without the file."""
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
        """Return whether no transaction ended since or is in progress.

        The journal is checked first, when earlier writers have updated the counter.
        """
        return not self._is_being_written() and self._file_state() == state

    def _stays_hot(self) -> bool:
        """Return whether the journal is unchanged for some time."""
        try:
            modified = self._journal.stat().st_mtime_ns
        except OSError:
            return False
        if self._hot is None or self._hot[0] != modified:
            self._hot = modified, monotonic()
        return monotonic() - self._hot[1] > _HOT_SECONDS

    def _read_hot(self, state: _State) -> Reading:
        """Read with SQLite's locks, which undoes a killed run's partial transaction."""
        with closing(_connect(self.path, "mode=rw")) as connection:
            found = self._read(connection, state)
        return self._take(found, self._file_state() or state)

    def _read(self, connection: sqlite3.Connection, state: _State) -> _Found:
        """Return the next events, with number and mark of the last one."""
        try:
            check_format(connection, self.path)
            top = connection.execute("SELECT max(event) FROM events").fetchone()[0] or 0
            before = self._state or state
            restarted = self._last > 0 and (state.inode != before.inode or top < self._last)
            after = 0 if restarted else self._last
            if after and _mark(connection, after) != self._mark:
                # File systems reuse inodes.
                restarted, after = True, 0
            end = min(after + _CHUNK, top)
            found = list(_events(connection, "WHERE event > ? AND event <= ?", (after, end)))
            mark = _mark(connection, end) if found else self._mark
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(_read_error(self.path, error)) from None
        return _Found(Reading(found, restarted, end < top), end, mark)

    def _take(self, found: _Found, state: _State) -> Reading:
        reading, self._last, self._mark = found.reading, found.last, found.mark
        self._state, self._ahead = state, reading.more
        return reading


def _connect(path: Path, how: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, timeout=0.2)
    except sqlite3.Error as error:
        raise UserError(_read_error(path, error)) from None


def _read_error(path: Path, error: Exception) -> str:
    if is_locked(error):
        return f"{path} is locked by another program."
    return f"{path} is damaged: {error}."


def _mark(connection: sqlite3.Connection, number: int) -> _Mark | None:
    """Return the mark of an event by number."""
    row: _Mark | None = connection.execute(
        "SELECT time, kind FROM events WHERE event = ?", (number,)
    ).fetchone()
    return row
