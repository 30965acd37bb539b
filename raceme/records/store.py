"""The run store: every event of a run in one SQLite file, ``run.sqlite``.

The file is a log: one row per event, with its number, its time, its kind and its fields as JSON, so
that :func:`read_events` gives back what was observed, in order. An event of a new kind needs
nothing here. For queries by hand there are views with a column per field (`VIEWS`); a method's own
measures are in the view ``measures``. Nothing depends on the wall clock of the machine or on chance
beyond the seed: two runs with one seed have the same contents.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import types
from collections.abc import Callable, Iterable, Mapping
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

# -----------------------------------------------------------------------------
# What is in the file: one table, and views for people.
# -----------------------------------------------------------------------------

FORMAT = 9
"""Stores of other formats are of unreleased versions and are not read."""

_TABLE = """
CREATE TABLE events (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX kinds ON events (kind);
"""


def _columns(*names: str, **renamed: str) -> str:
    """Return the columns of a view that are fields of the events' JSON."""
    pairs = {**{name: name for name in names}, **renamed}
    return ", ".join(
        f"json_extract(body, '$.{path}') AS \"{name}\"" for name, path in pairs.items()
    )


def _view(kind: str, *names: str, **renamed: str) -> str:
    """Return the query of a view with a row per event of a kind."""
    return f"SELECT event, time, {_columns(*names, **renamed)} FROM events WHERE kind = '{kind}'"


def _each(kind: str, path: str, columns: str, *names: str) -> str:
    """Return the query of a view with a row for each entry of a field of events of a kind."""
    own = "".join(f", {_columns(name)}" for name in names)
    return (
        f"SELECT event, time{own}, {columns} "
        f"FROM events, json_each(body, '$.{path}') AS entry WHERE kind = '{kind}'"
    )


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
    "refused_claims": _view("ClaimRefused", "node_id", "client", "reason"),
    "key_changes": _view("KeyChanged", "client", "change"),
    "updates": _view(
        "UpdateApplied",
        *(
            item.name
            for item in fields(events.UpdateApplied)
            if item.name not in ("time", "mixture")
        ),
    ),
    "mixtures": _each(
        "UpdateApplied", "mixture", "entry.key AS distribution, entry.value AS share"
    ),
    "answers": _view("AnswerTaken", "client", "kind", "phase", "bytes_down", "bytes_up"),
    "rejections": _view("UpdateRejected", "client", "reason", "dispatched_at"),
    "evaluations": (
        _view(
            "Evaluated",
            "updates",
            "accuracy",
            "loss",
            "clusters",
            "asked",
            "weighted_accuracy",
            unit="measure.unit",
        ).replace(
            " FROM", ", (SELECT count(*) FROM json_each(body, '$.per_client')) AS answered FROM", 1
        )
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
        "inner.value AS weight FROM events, json_each(body, '$.memberships') AS entry, "
        "json_each(entry.value) AS inner WHERE kind = 'ClustersChanged'"
    ),
    "data_changes": _view("DataChanged", "updates", "client", "step"),
    "measures": _view("Measured", "updates", "values", name="schema.name"),
    "task_tests": (
        _view("TasksTested", "updates", "step", "clusters", "asked", unit="measure.unit").replace(
            " FROM", ", (SELECT count(*) FROM json_each(body, '$.per_client')) AS answered FROM", 1
        )
    ),
    "task_scores": (
        "SELECT event, time, entry.key AS client, CAST(inner.key AS INTEGER) AS step, "
        "json_extract(inner.value, '$[0]') AS cluster, "
        "json_extract(inner.value, '$[1]') AS accuracy, "
        "json_extract(inner.value, '$[2]') AS untrained "
        "FROM events, json_each(body, '$.per_client') AS entry, json_each(entry.value) AS inner "
        "WHERE kind = 'TasksTested'"
    ),
    "verdicts": _view(
        "UpdateJudged", "client", "verdict", "measured", "bound", "reason", "cluster"
    ),
    "endings": _view("RunEnded", "updates", "ending", "reason"),
}
"""The query of each view, by name."""

_SCHEMA = _TABLE + "".join(f"CREATE VIEW {name} AS {query};\n" for name, query in VIEWS.items())


def _view_of(schema: events.MeasureSchema) -> str:
    """Return the statement that makes a view with the columns of a method's measure."""
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
"""What stands for an infinite number until it is written as one that is too large; no text of a
client holds such a letter."""


def plain(value: Any, infinite: Mapping[float, Any] | None = None) -> Any:
    """Return a value as JSON has it; NaN is null, infinite numbers what stands for them.

    Parameters
    ----------
    value : Any
        A value of an event: a number of Python's or numpy's, text, an enumeration, a sequence, a
        mapping or a dataclass.
    infinite : Mapping[float, Any], optional
        What stands for each of the two; null by default.
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
    """Return the event that a row holds.

    Raises
    ------
    ValueError
        It holds none.
    """
    try:
        time = float(time)
        tree, known = json.loads(body), _KINDS[kind]
        if change := _READ.get(known):
            change(tree)
        # mypy takes a class for an object without a hash.
        read = _readers(known)  # type: ignore[arg-type]
        event: Event = known(time=time, **{name: read[name](value) for name, value in tree.items()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no {kind} can be read from an event: {error}") from None
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
    events.ClientJoined: lambda tree: _write_client(tree),
    # They have 64 bits without a sign, one more than SQLite's numbers.
    events.ClaimRefused: lambda tree: tree.update(node_id=str(tree["node_id"])),
    Evaluated: _write_evaluation,
}
_READ: Mapping[type[Any], Callable[[dict[str, Any]], Any]] = {
    events.ClientJoined: lambda tree: tree.update(node_id=0),
    Evaluated: _read_evaluation,
    events.Measured: _read_measure,
}
"""How the stored fields of a kind of event differ from those of the event, and back."""


def _measured(value: Any, per: str) -> Any:
    """Return a measured value from what JSON has of it."""
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


def _same(value: Any) -> Any:
    return value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what turns JSON into a value of an annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return _number
    if hint is int:
        return int
    if origin in (Union, types.UnionType):
        # None of an optional number stands for itself.
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
    return _same


# -----------------------------------------------------------------------------
# Writing and reading.
# -----------------------------------------------------------------------------


FILE_NAME = "run.sqlite"

_APPLICATION = 0x52616365
"""SQLite's application id of a run store: "Race" in ASCII."""
_BATCH = 500
"""Events kept in memory before they are written: what a kill can lose at most."""
_MILESTONES = (Evaluated, TasksTested, RunEnded)
"""Kinds of events that are written at once."""
_SECONDS = 1.0
"""Events are kept in memory no longer than this: a dashboard shows them by then."""
_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds before a transaction is tried again for which no file could be opened."""

# A row that is there already is left alone: Ctrl-C can come between the end of a transaction and
# the moment at which the rows in memory are forgotten, and they are then written a second time.
_INSERT = "INSERT INTO events VALUES (?, ?, ?, ?) ON CONFLICT (event) DO NOTHING"

_Row = tuple[int, float, str, str]


class RunStore(AbstractContextManager["RunStore"]):
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
        self._viewed: set[str] = set()
        self._schemas: list[events.MeasureSchema] = []
        self._event = self._written = after or 0
        self._rows: list[_Row] = []
        self._leaving: list[_Row] = []
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
                self._leaving += self._rows
                self._rows, last = [], self._event
            if not self.failure:
                try:
                    self._insert(connection)
                except sqlite3.Error as error:
                    self.failure = f"{error}, after {self._written} of {last} events"
            # Ctrl-C before this line leaves the rows for the next time.
            self._leaving.clear()
            if self.failure:
                raise UserError(f"Cannot write {self.path}: {self.failure}.")
            self._written = last
            return last

    def _insert(self, connection: sqlite3.Connection) -> None:
        """Write the rows that are leaving; wait a while for a file that cannot be opened now."""
        schemas = list(self._schemas)
        for pause in (*_PAUSES, None):
            try:
                with connection:
                    connection.executemany(_INSERT, self._leaving)
                    for schema in schemas:
                        connection.execute(_view_of(schema))
            except sqlite3.OperationalError as error:
                # The journal of a transaction is a file: all descriptors may be in use.
                if pause is None or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                    raise
                sleep(pause)
            else:
                del self._schemas[: len(schemas)]
                return

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
            if self._rows and not self.failure:
                with suppress(UserError):
                    self.commit()

    def __exit__(self, *error: object) -> None:
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
    with closing(_open(file)) as connection:
        connection.execute("PRAGMA query_only = ON")
        check_format(connection, file)
        try:
            return _events(connection, "")
        # ValueError: no event, or one of a kind that does not exist.
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(f"{file} is damaged: {error}.") from None


def _events(connection: sqlite3.Connection, where: str, numbers: Iterable[int] = ()) -> list[Event]:
    query = f"SELECT time, kind, body FROM main.events {where} ORDER BY event"
    return [_event(*row) for row in connection.execute(query, tuple(numbers))]


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
            # All at once: a program that follows the run sees a store, or an empty file.
            kind = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {FORMAT};"
            connection.executescript(f"BEGIN; {kind} {_SCHEMA} COMMIT;")
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
# Follow a run store while another process writes it, without ever locking it.
#
# A reader that holds SQLite's lock makes the run wait, and one that is stopped while it does makes
# the run lose its events. So nothing is locked here: the file is read as if no run wrote it, and
# what was read is used only if none has. SQLite's rollback journal and change counter tell.
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
        New events, in the order in which they were stored.
    restarted : bool
        The store is another one than before, or was taken back to an earlier event by a run that
        was resumed: all that was read before is void, and `events` begin with the first.
    more : bool
        Whether the store has more events that are not read yet.
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


_Mark = tuple[float, str]
"""By which an event is known again: its time and its kind."""


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
        """Read with SQLite's locks: it undoes what a killed run has left half written."""
        with closing(_connect(self.path, "mode=rw")) as connection:
            found = self._read(connection, state)
        return self._take(found, self._look() or state)

    def _read(self, connection: sqlite3.Connection, state: _State) -> _Found:
        """Return the next events, with the number of the last one and what tells it."""
        try:
            check_format(connection, self.path)
            top = connection.execute("SELECT max(event) FROM events").fetchone()[0] or 0
            before = self._state or state
            restarted = self._last > 0 and (state.inode != before.inode or top < self._last)
            after = 0 if restarted else self._last
            if after and _mark(connection, after) != self._mark:
                # A file system gives the number of a file that is gone to the next one.
                restarted, after = True, 0
            end = min(after + _CHUNK, top)
            found = _events(connection, "WHERE event > ? AND event <= ?", (after, end))
            mark = _mark(connection, end) if found else self._mark
        except (sqlite3.DatabaseError, ValueError) as error:
            raise UserError(_said(self.path, error)) from None
        return _Found(Reading(found, restarted, end < top), end, mark)

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


def _mark(connection: sqlite3.Connection, number: int) -> _Mark | None:
    """Return by what an event of this number is known again."""
    row: _Mark | None = connection.execute(
        "SELECT time, kind FROM events WHERE event = ?", (number,)
    ).fetchone()
    return row
