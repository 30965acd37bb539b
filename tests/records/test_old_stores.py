"""Stores of earlier formats: what they did not say about memberships is worked out on reading."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from raceme.core.errors import UserError
from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    Ending,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.records.record import read_run
from raceme.records.store import FILE_NAME, FORMAT, RunStore, read_events

_SCHEMA = """
CREATE TABLE client_events (
    event INTEGER PRIMARY KEY, time REAL, client TEXT, kind TEXT, cluster INTEGER,
    num_examples INTEGER, group_id INTEGER);
CREATE TABLE updates (
    seq INTEGER, time REAL, client TEXT, cluster INTEGER, base_version INTEGER, staleness INTEGER,
    weight REAL, dispatched_at REAL, train_loss REAL, bytes_down INTEGER, bytes_up INTEGER,
    {times} event INTEGER PRIMARY KEY);
CREATE TABLE rejections (
    event INTEGER PRIMARY KEY, time REAL, client TEXT, reason TEXT, dispatched_at REAL);
CREATE TABLE evaluations (
    event INTEGER PRIMARY KEY, updates INTEGER, time REAL, accuracy REAL, loss REAL,
    clusters INTEGER);
CREATE TABLE client_evaluations (
    event INTEGER, updates INTEGER, client TEXT, cluster INTEGER, accuracy REAL, loss REAL,
    PRIMARY KEY (event, client)) WITHOUT ROWID;
CREATE TABLE splits (
    event INTEGER PRIMARY KEY, updates INTEGER, time REAL, parent INTEGER, gap REAL,
    threshold REAL);
CREATE TABLE split_members (event INTEGER, child INTEGER, client TEXT);
CREATE TABLE endings (event INTEGER PRIMARY KEY, time REAL, updates INTEGER, reason TEXT);
PRAGMA application_id = 0x52616365;
PRAGMA user_version = {version};
"""


class OldStore:
    """Writes a store of an old format, row by row."""

    def __init__(self, folder: Path, version: int = 2) -> None:
        self.path = folder / FILE_NAME
        self._version = version
        self._event = 0
        times = "started_at REAL, finished_at REAL," if version == 2 else ""
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(_SCHEMA.format(times=times, version=version))

    def add(self, table: str, *rows: tuple[object, ...]) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            for row in rows:
                marks = ", ".join("?" * len(row))
                connection.execute(f"INSERT INTO {table} VALUES ({marks})", row)
            connection.commit()

    def client(self, time: float, client: str, kind: str, cluster: int | None = None) -> None:
        self._event += 1
        self.add("client_events", (self._event, time, client, kind, cluster, 10, None))

    def update(self, seq: int, time: float, client: str, cluster: int) -> None:
        self._event += 1
        times = (None, None) if self._version == 2 else ()
        self.add(
            "updates",
            (seq, time, client, cluster, 0, 0, 0.5, 0.0, 1.0, 10, 10, *times, self._event),
        )

    def evaluation(self, updates: int, time: float, clusters: dict[str, int]) -> None:
        self._event += 1
        self.add("evaluations", (self._event, updates, time, 0.5, 1.0, 1))
        self.add(
            "client_evaluations",
            *((self._event, updates, client, k, 0.5, 1.0) for client, k in clusters.items()),
        )

    def split(self, updates: int, time: float, parent: int, children: dict[int, list[str]]) -> None:
        self._event += 1
        self.add("splits", (self._event, updates, time, parent, 0.5, None))
        self.add(
            "split_members",
            *((self._event, k, name) for k, names in children.items() for name in names or [None]),
        )

    def end(self, time: float, reason: str) -> None:
        self._event += 1
        self.add("endings", (self._event, time, 2, reason))


def placed(
    time: float,
    updates: int,
    client: str,
    cluster: int,
    change: ClusterChange = ClusterChange.ASSIGN,
) -> ClustersChanged:
    return ClustersChanged(time, updates, change, {client: {cluster: 1.0}})


def applied(seq: int, time: float, client: str, cluster: int) -> UpdateApplied:
    return UpdateApplied(seq, time, client, cluster, 0, 0, 0.5, 0.0, 1.0, 10, 10)


@pytest.mark.parametrize("version", [1, 2])
def test_a_client_is_where_its_first_update_shows_it_from_its_joining(
    tmp_path: Path, version: int
) -> None:
    store = OldStore(tmp_path, version)
    store.client(0.0, "a", "joined")
    store.client(0.0, "b", "joined")
    store.update(1, 1.0, "a", 0)
    store.evaluation(1, 1.0, {"a": 0, "b": 0})
    store.update(2, 2.0, "b", 0)
    store.end(2.0, "2 updates were applied")
    expected: list[Event] = [
        ClientJoined(0.0, "a", 0, 10, None),
        placed(0.0, 0, "a", 0),
        ClientJoined(0.0, "b", 0, 10, None),
        placed(0.0, 0, "b", 0),
        applied(1, 1.0, "a", 0),
        # Whoever answered was asked: an old evaluation counts, as it did then.
        Evaluated(1.0, 1, 0.5, 1.0, 1, {"a": (0, 0.5, 1.0), "b": (0, 0.5, 1.0)}, 2),
        applied(2, 2.0, "b", 0),
        RunEnded(2.0, 2, "2 updates were applied", Ending.LIMIT),
    ]
    assert read_events(tmp_path) == expected


def test_a_split_moves_all_that_it_names_and_ends_its_parent(tmp_path: Path) -> None:
    store = OldStore(tmp_path)
    for name in "abc":
        store.client(0.0, name, "joined")
    store.update(1, 1.0, "a", 0)
    store.split(1, 1.5, 0, {2: ["b"], 1: ["a", "c"], 3: []})
    # A late update of the model that was split says nothing about where its client is now.
    store.update(2, 2.0, "b", 0)
    record = read_run(tmp_path)
    (split,) = record.splits
    assert (split.gone, split.made) == ((0,), (2, 1, 3))
    assert split.memberships == {"b": {2: 1.0}, "a": {1: 1.0}, "c": {1: 1.0}}
    assert split.score == 0.5
    assert split.threshold != split.threshold
    # b and c sent nothing before: that they were in the parent shows in the split.
    assert record.assignment(time=1.0) == {"a": 0, "b": 0, "c": 0}
    assert record.assignment() == {"a": 1, "b": 2, "c": 1}


def test_a_parent_whose_number_a_child_keeps_goes_on(tmp_path: Path) -> None:
    store = OldStore(tmp_path)
    store.client(0.0, "a", "joined")
    store.client(0.0, "b", "joined")
    store.split(0, 1.0, 0, {0: ["a"], 1: ["b"]})
    (split,) = read_run(tmp_path).splits
    assert (split.gone, split.made) == ((), (1,))


def test_a_client_that_was_assigned_is_placed_then_and_moved_after(tmp_path: Path) -> None:
    store = OldStore(tmp_path)
    store.client(0.0, "a", "joined")
    store.update(1, 1.0, "a", 0)
    store.split(1, 1.5, 0, {1: ["a"], 2: []})
    store.client(2.0, "n", "joined")
    store.client(3.0, "n", "assigned", 1)
    store.client(3.0, "n", "assigned", 1)
    store.client(4.0, "n", "assigned", 2)
    store.client(5.0, "n", "left")
    store.update(2, 6.0, "a", 2)
    assert read_events(tmp_path)[4:] == [
        ClientJoined(2.0, "n", 0, 10, None),
        placed(3.0, 1, "n", 1),
        placed(4.0, 1, "n", 2, ClusterChange.MOVE),
        ClientLeft(5.0, "n"),
        # What a format did not say, an update of another living model does.
        applied(2, 6.0, "a", 2),
        placed(6.0, 2, "a", 2, ClusterChange.MOVE),
    ]


def test_a_client_that_was_assigned_later_is_not_there_before(tmp_path: Path) -> None:
    store = OldStore(tmp_path)
    store.client(0.0, "a", "joined")
    store.client(3.0, "a", "assigned", 0)
    assert read_events(tmp_path) == [ClientJoined(0.0, "a", 0, 10, None), placed(3.0, 0, "a", 0)]


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        ("500 updates were applied", Ending.LIMIT),
        ("the time limit of 5 s was reached", Ending.LIMIT),
        ("the target accuracy of 0.9 was reached", Ending.TARGET),
        ("interrupted by SIGTERM", Ending.INTERRUPTED),
        ("all clients are gone", Ending.NO_CLIENTS),
        ("the last 10 rounds brought no valid update", Ending.USELESS_REPLIES),
        ("the last 100 replies were unusable; the last one: c", Ending.USELESS_REPLIES),
    ],
)
def test_why_a_run_ended_is_known_from_its_words(
    tmp_path: Path, reason: str, ending: Ending
) -> None:
    OldStore(tmp_path).end(1.0, reason)
    assert read_events(tmp_path) == [RunEnded(1.0, 2, reason, ending)]


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_in_an_old_format_is_not_gone_on_with(tmp_path: Path, version: int) -> None:
    store = OldStore(tmp_path, version)
    store.client(0.0, "a", "joined")
    with pytest.raises(UserError, match=f"format {version}, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=1)


def test_an_old_store_that_misses_a_table_is_damaged(tmp_path: Path) -> None:
    store = OldStore(tmp_path)
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DROP TABLE splits")
    with pytest.raises(UserError, match="damaged"):
        read_events(tmp_path)
