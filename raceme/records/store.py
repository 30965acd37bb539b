"""The run store: every event of a run in one SQLite file, ``run.sqlite``.

The file is a log. Each row carries the number of its event, so that :func:`read_events` gives
back what was observed, in order. Nothing in it depends on the wall clock of the machine or on
chance beyond the seed: two runs with one seed have the same contents.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing, suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType

from raceme.config.errors import UserError
from raceme.protocol.events import Evaluated, Event, RunEnded, TasksTested
from raceme.records import old_stores
from raceme.records.store_rows import Rows
from raceme.records.store_tables import (
    FORMAT,
    READ_ALIKE,
    READERS,
    SCHEMA,
    TABLES,
    WRITERS,
)

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
        stored = check_format(connection, file, (*old_stores.FORMATS, *READ_ALIKE))
        try:
            if stored in old_stores.FORMATS:
                return old_stores.read_old_events(connection)
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
