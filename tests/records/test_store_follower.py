"""A store is followed while it is written, without delaying the writer."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from processes import wait_until

from raceme.core.errors import UserError
from raceme.core.events import ClientJoined, Event, UpdateApplied
from raceme.records import store as following
from raceme.records.folder import STORE
from raceme.records.store import RunStore, StoreFollower, read_events


def update(seq: int) -> UpdateApplied:
    return UpdateApplied(seq, float(seq), f"c{seq % 3}", 0, 0, 0, 0.5, 0.0, 1.0, 8, 8)


def all_new(follower: StoreFollower) -> list[Event]:
    events: list[Event] = []
    while True:
        reading = follower.read()
        events += reading.events
        if not reading.more:
            return events


def test_new_events_are_read_once_and_in_order(tmp_path: Path) -> None:
    follower = StoreFollower(tmp_path)
    assert follower.read().events == []
    with RunStore(tmp_path) as store:
        store.observe(ClientJoined(0.0, "c1", 0, 12, 1))
        store.observe(update(1))
        store.commit()
        assert all_new(follower) == [ClientJoined(0.0, "c1", 0, 12, 1), update(1)]
        assert all_new(follower) == []
        store.observe(update(2))
        store.commit()
        assert all_new(follower) == [update(2)]


def test_a_long_store_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_CHUNK", 7)
    with RunStore(tmp_path) as store:
        for seq in range(1, 20):
            store.observe(update(seq))
    follower = StoreFollower(tmp_path)
    sizes = [len(follower.read().events) for _ in range(4)]
    assert sizes == [7, 7, 5, 0]
    assert all_new(StoreFollower(tmp_path)) == read_events(tmp_path)


def test_a_run_that_resumes_is_read_anew(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for seq in (1, 2, 3):
            store.observe(update(seq))
    follower = StoreFollower(tmp_path)
    assert len(all_new(follower)) == 3
    with RunStore(tmp_path, after=1):
        reading = follower.read()
    assert reading.restarted
    assert reading.events == [update(1)]


def test_another_run_in_a_file_of_the_same_number_is_read_anew(tmp_path: Path) -> None:
    folders = tmp_path / "mine", tmp_path / "other"
    for folder, late in zip(folders, (0.0, 0.5), strict=True):
        with RunStore(folder) as store:
            for seq in range(1, 4 if folder is folders[0] else 7):
                store.observe(replace(update(seq), time=seq + late))
    follower = StoreFollower(folders[0])
    assert len(all_new(follower)) == 3
    inode = (folders[0] / STORE).stat().st_ino
    shutil.copyfile(folders[1] / STORE, folders[0] / STORE)
    assert (folders[0] / STORE).stat().st_ino == inode
    reading = follower.read()
    assert reading.restarted
    assert reading.events == read_events(folders[1])
    assert all_new(follower) == []


@pytest.fixture
def transaction(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A store of one event, with an open transaction that has already written to the file."""
    with RunStore(tmp_path) as store:
        store.observe(update(1))
    with closing(sqlite3.connect(tmp_path / STORE, isolation_level=None)) as connection:
        # Without a page cache, pages are written to the file before the commit.
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("PRAGMA cache_spill = 1")
        connection.execute("BEGIN EXCLUSIVE")
        rows = [(seq, json.dumps({"client": f"client {seq}" * 20})) for seq in range(2, 400)]
        connection.executemany("INSERT INTO events VALUES (?, 0.0, 'ClientLeft', ?)", rows)
        yield connection
        connection.rollback()


def test_nothing_is_read_from_an_open_transaction_and_all_after_it(
    tmp_path: Path, transaction: sqlite3.Connection
) -> None:
    follower = StoreFollower(tmp_path)
    assert follower.read().events == []
    transaction.commit()
    assert len(all_new(follower)) == 399


def test_a_transaction_in_the_middle_of_reading_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path)
    store.observe(update(1))
    store.commit()
    follower, original, written = StoreFollower(tmp_path), following._events, []

    def read_slowly(*arguments: object) -> list[Event]:
        found = original(*arguments)
        if not written:
            written.append(True)
            store.observe(update(2))
            # This fails if the reader locks the store.
            store.commit()
        return found

    monkeypatch.setattr(following, "_events", read_slowly)
    assert follower.read().events == [update(1), update(2)]
    assert not store.failure
    store.close()


def test_a_partial_transaction_of_a_killed_run_is_undone(
    tmp_path: Path, transaction: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in (STORE, f"{STORE}-journal"):
        shutil.copy(tmp_path / name, killed)
    monkeypatch.setattr(following, "_HOT_SECONDS", -1.0)
    assert all_new(StoreFollower(killed)) == [update(1)]


def test_a_lock_that_stays_is_reported(
    tmp_path: Path, transaction: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_HOT_SECONDS", -1.0)
    with pytest.raises(UserError, match="is locked by another program"):
        StoreFollower(tmp_path).read()


def test_damage_is_said_in_one_line(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for seq in range(1, 2000):
            store.observe(update(seq))
    path = tmp_path / STORE
    content = bytearray(path.read_bytes())
    content[8192:-4096] = b"x" * (len(content) - 8192 - 4096)
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged") as raised:
        all_new(StoreFollower(tmp_path))
    assert "\n" not in str(raised.value)
    path.write_bytes(b"no database at all" * 99)
    with pytest.raises(UserError, match="is not a run store"):
        StoreFollower(tmp_path).read()


def test_a_store_is_written_without_further_events(tmp_path: Path) -> None:
    """Events are visible within about a second, even if no other event follows."""
    with RunStore(tmp_path) as store:
        store.observe(update(1))
        follower = StoreFollower(tmp_path)
        assert wait_until(lambda: follower.read().events, 30.0, lambda: "nothing came") == [
            update(1)
        ]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_store_follower import update
from raceme.records.folder import STORE
from raceme.records.store import RunStore
with RunStore(Path({folder!r})) as store:
    for seq in range(1, 601):
        store.observe(update(seq))
        if seq % 10 == 0:
            store.commit()
    assert not store.failure
"""


def test_a_process_is_followed_to_its_end(tmp_path: Path) -> None:
    program = WRITER.format(here=os.path.dirname(__file__), folder=str(tmp_path))
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}
    ) as writer:
        follower, events = StoreFollower(tmp_path), list[Event]()
        while writer.poll() is None:
            events += all_new(follower)
    assert writer.returncode == 0
    events += all_new(follower)
    assert events == read_events(tmp_path)
    assert len(events) == 600
