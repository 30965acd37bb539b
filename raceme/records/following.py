"""Follow a run store while another process writes it, without ever locking it.

A reader that holds SQLite's lock makes the run wait, and one that is stopped while it does makes
the run lose its events. So nothing is locked here: the file is read as if nobody wrote it, and what
was read is used only if nobody has. SQLite's rollback journal and change counter tell.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from raceme.config.errors import UserError
from raceme.protocol.events import Event
from raceme.records import old_stores
from raceme.records.store import FILE_NAME, check_format, is_locked
from raceme.records.store_rows import columns_of
from raceme.records.store_tables import READ_ALIKE, READERS, TABLES

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
            self._hot = modified, time.monotonic()
        return time.monotonic() - self._hot[1] > _HOT_SECONDS

    def _read_hot(self, state: _State) -> Reading:
        """Read as everybody else does: SQLite undoes what a killed run has left half written."""
        with closing(_connect(self.path, "mode=rw")) as connection:
            found = self._read(connection, state)
        return self._take(found, self._look() or state)

    def _read(self, connection: sqlite3.Connection, state: _State) -> _Found:
        """Return the next events, with the number of the last one and what tells it."""
        try:
            stored = check_format(connection, self.path, (*old_stores.FORMATS, *READ_ALIKE))
            top = _top(connection)
            before = self._state or state
            restarted = self._last > 0 and (state.inode != before.inode or top < self._last)
            after = 0 if restarted else self._last
            if stored in old_stores.FORMATS:
                # These are of runs that ended long ago.
                events = old_stores.read_old_events(connection) if after < top else []
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
