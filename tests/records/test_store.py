"""The run store: events are read back in order, and existing runs are not overwritten."""

from __future__ import annotations

import math
import sqlite3
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.core.errors import UserError
from raceme.core.events import (
    AnswerTaken,
    ClaimRefused,
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    ClustersScored,
    DataChanged,
    Ending,
    Evaluated,
    Event,
    KeyChanged,
    Measure,
    Measured,
    RunEnded,
    TaskScore,
    TasksTested,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
    VersionDecided,
    Warned,
)
from raceme.records.folder import STORE
from raceme.records.record import read_run
from raceme.records.store import RunStore, each_event, read_events
from raceme.strategies.csafl import IDLE
from raceme.strategies.faacl.strategy import SUPPORTERS

UPDATE = UpdateApplied(
    seq=1,
    time=2.5,
    client="b",
    cluster=0,
    base_version=3,
    staleness=2,
    weight=0.25,
    dispatched_at=0.5,
    train_loss=1.75,
    bytes_down=100,
    bytes_up=90,
)
SPLIT = ClustersChanged(
    3.5,
    2,
    ClusterChange.SPLIT,
    {"b": {2: 1.0}, "a": {1: 1.0}, "c": {2: 0.25, 1: 0.75}},
    gone=(0,),
    made=(2, 1),
    score=0.5,
    threshold=0.25,
)
ONE_OF_EACH: list[Event] = [
    ClientJoined(0.0, "b", 0, 12, 1),
    ClientJoined(0.0, "a", 0, 7, None, labels="room=kitchen,floor=1"),
    UPDATE,
    UpdateRejected(3.0, "a", "task lost", 0.25),
    ClaimRefused(3.25, 2**64 - 1, "a", "its key is that of 'b'"),
    KeyChanged(3.25, "a", "rotated"),
    VersionDecided(3.25, 2, 7, "held", 0.25, "accuracy 0.25, 0.5 of the one in use"),
    UpdateJudged(3.0, "a", Verdict.SCALED, 12.5, 10.0, "an update of length 12.5", 2),
    UpdateJudged(3.0, "a", Verdict.REFUSED, 0.1, 0.5, "none of others'", None),
    replace(
        UPDATE,
        seq=2,
        time=3.5,
        client="a",
        started_at=100.5,
        finished_at=103.0,
        cpu_seconds=1.5,
    ),
    Evaluated(3.5, 2, 0.5, 1.25, 1, {"b": (0, 0.75, 1.0), "a": (0, 0.25, 1.5)}, 2),
    SPLIT,
    ClientLeft(4.0, "a"),
    ClientJoined(5.0, "a", 0, 8, None, returned=True),
    DataChanged(5.0, 2, None, 1),
    DataChanged(5.5, 2, "a", 2),
    replace(UPDATE, seq=3, time=5.75, step=1, accuracy_before=0.5, accuracy_after=0.75),
    Measured(5.75, 3, IDLE, {"client": "a", "window": 2, "seconds": 1.25, "budget": 5.0}),
    Evaluated(
        5.75,
        3,
        0.5,
        1.0,
        2,
        {"b": (2, 0.5, 1.0), "c": (1, 0.5, 1.0)},
        3,
        {"b": 1},
        0.25,
        {"c": 0},
        Measure("µg/m³"),
    ),
    ClustersScored(5.75, 3, {0: 0.75, 2: 0.5}),
    Measured(5.8, 3, SUPPORTERS, {"supporters": {1: (0, 2), 4: (1,)}}),
    Measured(5.85, 3, SUPPORTERS, {"supporters": {}}),
    TasksTested(
        5.855,
        3,
        1,
        2,
        {
            "b": {0: TaskScore(2, 0.5), 2: TaskScore(1, 0.75, 0.125)},
            "a": {1: TaskScore(0, 0.25)},
        },
        3,
    ),
    TasksTested(5.857, 3, 0, 2, {"c": {0: TaskScore(1, 20.5)}}, 1, Measure("µg/m³")),
    AnswerTaken(5.86, "a", "losses", "support", 1000, 40),
    replace(UPDATE, seq=4, time=5.875, passes=90, mixture=(0.25, 0.0, 0.75), phase="init"),
    Warned(5.9, "3 clients are few"),
    RunEnded(6.0, 4, "all clients are gone", Ending.NO_CLIENTS),
]


def write(folder: Path, events: Iterable[Event]) -> Path:
    with RunStore(folder) as store:
        for event in events:
            store.observe(event)
    return folder / STORE


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(rows)


def test_the_sample_has_every_type_of_event() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(Event.__args__)


def test_every_type_of_event_comes_back_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "new" / "run", ONE_OF_EACH)
    assert read_events(path) == ONE_OF_EACH
    assert read_events(path.parent) == ONE_OF_EACH


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_each_event_comes_back_alone(tmp_path: Path, event: Event) -> None:
    assert read_events(write(tmp_path, [event])) == [event]


def test_a_run_of_months_is_read_in_little_memory(tmp_path: Path) -> None:
    """A run of real devices has a million updates in a week, and is read when it is resumed."""
    count = 5_000
    path = write(tmp_path, (replace(UPDATE, seq=n, time=n / 8) for n in range(count)))

    def peak_of(read: Callable[[], Any]) -> float:
        tracemalloc.start()
        try:
            read()
            return tracemalloc.get_traced_memory()[1] / count
        finally:
            tracemalloc.stop()

    assert peak_of(lambda: deque(each_event(path), maxlen=0)) < 50, "bytes per update"
    # Via a list of objects, the columns would take 770 bytes per update.
    assert peak_of(lambda: read_run(path)) < 500, "bytes per update, of 19 columns"


def test_events_of_one_kind_are_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    expected = [event for event in ONE_OF_EACH if isinstance(event, UpdateRejected)]
    assert expected
    assert list(each_event(path, UpdateRejected)) == expected


def test_an_empty_run_has_no_events(tmp_path: Path) -> None:
    assert read_events(write(tmp_path, [])) == []


def test_node_ids_are_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path, [ClientJoined(0.0, "a", 2**63 + 5, 7, 0)])
    assert read_events(path) == [ClientJoined(0.0, "a", 0, 7, 0)]


@pytest.mark.parametrize("change", ClusterChange)
def test_each_change_of_clusters_comes_back(tmp_path: Path, change: ClusterChange) -> None:
    # Also without clients, without clusters, and without both.
    events: list[Event] = [
        ClustersChanged(1.0, 1, change, {"a": {3: 0.5, 1: 0.5}}, (2, 1), (3, 4), 0.5, 0.25),
        ClustersChanged(2.0, 2, change, {}, (3,), (), 0.5, 0.25),
        ClustersChanged(3.0, 3, change, {}, (), (5,), 0.5, 0.25),
        ClustersChanged(4.0, 4, change, {}, (), (), 0.5, 0.25),
    ]
    assert read_events(write(tmp_path, events)) == events


@pytest.mark.parametrize("ending", Ending)
def test_each_kind_of_end_comes_back(tmp_path: Path, ending: Ending) -> None:
    events: list[Event] = [RunEnded(1.0, 1, "so", ending)]
    assert read_events(write(tmp_path, events)) == events


def test_the_tables_say_who_belongs_where_and_who_answered(tmp_path: Path) -> None:
    with closing(sqlite3.connect(write(tmp_path, ONE_OF_EACH))) as connection:
        members = connection.execute("SELECT client, cluster, weight FROM memberships").fetchall()
        fates = connection.execute("SELECT fate, cluster FROM changed_clusters").fetchall()
        asked = connection.execute("SELECT asked, answered FROM evaluations").fetchall()
        steps = connection.execute(
            "SELECT client, step FROM client_evaluations ORDER BY event DESC, client LIMIT 2"
        ).fetchall()
    assert members == [("b", 2, 1.0), ("a", 1, 1.0), ("c", 2, 0.25), ("c", 1, 0.75)]
    assert fates == [("gone", 0), ("made", 2), ("made", 1)]
    assert asked == [(2, 2), (3, 2)]
    assert steps == [("b", 1), ("c", 0)]


def test_the_documented_query_knows_clients_without_a_cluster(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "artefacts.md"
    about = "-- Clusters and weights of each client at the end, NULL without a cluster\n"
    query = page.read_text(encoding="utf-8").partition(about)[2].partition(";")[0]
    placed = {"a": {0: 1.0}, "b": {0: 1.0}, "c": {0: 1.0}}
    events: list[Event] = [
        ClustersChanged(0.0, 0, ClusterChange.ASSIGN, placed),
        # Client b was offline at the split; c was released.
        ClustersChanged(1.0, 9, ClusterChange.SPLIT, {"a": {1: 1.0}, "b": {}}, (0,), (1, 2)),
        ClustersChanged(2.0, 9, ClusterChange.MOVE, {"c": {}}),
    ]
    with closing(sqlite3.connect(write(tmp_path, events))) as connection:
        found = connection.execute(query).fetchall()
    assert sorted(found) == [("a", 1, 1.0), ("b", None, None), ("c", None, None)]


def test_nan_comes_back_as_nan(tmp_path: Path) -> None:
    nan = float("nan")
    path = write(
        tmp_path,
        [
            replace(SPLIT, score=nan, threshold=nan),
            replace(UPDATE, weight=nan, train_loss=nan),
            Evaluated(1.0, 1, nan, nan, 1, {"a": (1, nan, nan)}),
        ],
    )
    split, update, evaluated = read_events(path)
    assert isinstance(split, ClustersChanged)
    assert isinstance(update, UpdateApplied)
    assert isinstance(evaluated, Evaluated)
    cluster, *values = evaluated.per_client["a"]
    assert cluster == 1
    values += [split.score, split.threshold, update.weight, update.train_loss]
    values += [evaluated.accuracy, evaluated.loss]
    assert all(math.isnan(value) for value in values)


def test_numpy_scalars_are_stored_as_numbers(tmp_path: Path) -> None:
    one: Any = np.int64(1)
    half: Any = np.float32(0.5)
    given_update = replace(UPDATE, seq=one, weight=half / 2, dispatched_at=half)
    evaluated = Evaluated(3.0, one, half, 2 * half, one, {"a": (one, half, half)}, one, {"a": one})
    change = ClustersChanged(
        half, one, ClusterChange.SPLIT, {"a": {one: 2 * half}}, (one,), (one,), half, half
    )
    idled = Measured(
        half, one, IDLE, {"client": "a", "window": one, "seconds": half, "budget": 2 * half}
    )
    drifted = DataChanged(half, one, "a", one)
    path = write(tmp_path, [given_update, evaluated, change, drifted, idled])
    assert read_events(path) == [
        UPDATE,
        Evaluated(3.0, 1, 0.5, 1.0, 1, {"a": (1, 0.5, 0.5)}, 1, {"a": 1}),
        ClustersChanged(0.5, 1, ClusterChange.SPLIT, {"a": {1: 1.0}}, (1,), (1,), 0.5, 0.5),
        DataChanged(0.5, 1, "a", 1),
        Measured(0.5, 1, IDLE, {"client": "a", "window": 1, "seconds": 0.5, "budget": 1.0}),
    ]


_TIMES = st.floats(0, 1e9)
_NUMBERS = st.floats(allow_nan=False)
_COUNTS = st.integers(0, 2**62)
_CLIENTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
_CLUSTERS = st.lists(_COUNTS, max_size=3, unique=True).map(tuple)
_WEIGHTS = st.dictionaries(_COUNTS, st.floats(0, 1, exclude_min=True), min_size=1, max_size=3)
_EVENTS = st.one_of(
    st.builds(
        ClientJoined,
        _TIMES,
        _CLIENTS,
        st.just(0),
        _COUNTS,
        st.none() | _COUNTS,
        st.booleans(),
    ),
    st.builds(ClientLeft, _TIMES, _CLIENTS),
    st.builds(DataChanged, _TIMES, _COUNTS, st.none() | _CLIENTS, _COUNTS),
    st.builds(UpdateRejected, _TIMES, _CLIENTS, _CLIENTS, _TIMES),
    st.builds(
        UpdateJudged, _TIMES, _CLIENTS, st.sampled_from(Verdict), _TIMES, _TIMES, _CLIENTS, _COUNTS
    ),
    st.builds(
        Evaluated,
        _TIMES,
        _COUNTS,
        _NUMBERS,
        _NUMBERS,
        _COUNTS,
        st.dictionaries(_CLIENTS, st.tuples(_COUNTS, _NUMBERS, _NUMBERS), max_size=3),
        _COUNTS,
    ),
    st.builds(
        ClustersChanged,
        _TIMES,
        _COUNTS,
        st.sampled_from(ClusterChange),
        st.dictionaries(_CLIENTS, _WEIGHTS, max_size=3),
        _CLUSTERS,
        _CLUSTERS,
        _NUMBERS,
        _NUMBERS,
    ),
    st.builds(AnswerTaken, _TIMES, _CLIENTS, _CLIENTS, _CLIENTS, _COUNTS, _COUNTS),
    st.builds(
        TasksTested,
        *(_TIMES, _COUNTS, _COUNTS, _COUNTS),
        st.dictionaries(
            _CLIENTS,
            st.dictionaries(
                _COUNTS, st.builds(TaskScore, _COUNTS, _NUMBERS, st.none() | _NUMBERS), min_size=1
            ),
            max_size=2,
        ),
        _COUNTS,
    ),
    st.builds(
        Measured,
        _TIMES,
        _COUNTS,
        st.just(SUPPORTERS),
        st.fixed_dictionaries(
            {
                "supporters": st.dictionaries(
                    _COUNTS,
                    st.sets(_COUNTS, min_size=1, max_size=3).map(lambda of: tuple(sorted(of))),
                )
            }
        ),
    ),
    st.builds(Warned, _TIMES, _CLIENTS),
    st.builds(RunEnded, _TIMES, _COUNTS, _CLIENTS, st.sampled_from(Ending)),
)


# Each example writes a file, so there are only a few.
@settings(max_examples=25)
@given(events=st.lists(_EVENTS, max_size=8))
def test_any_events_come_back(
    events: list[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert read_events(write(tmp_path_factory.mktemp("run"), events)) == events


def test_the_same_events_give_the_same_contents(tmp_path: Path) -> None:
    first = write(tmp_path / "first", ONE_OF_EACH)
    # Flower draws its node ids at random; only they may differ.
    others = [
        replace(event, node_id=99) if isinstance(event, ClientJoined) else event
        for event in ONE_OF_EACH
    ]
    assert dump(write(tmp_path / "second", others)) == dump(first)
    assert dump(write(tmp_path / "third", ONE_OF_EACH[:-1])) != dump(first)


def test_the_contents_do_not_depend_on_when_they_were_written(tmp_path: Path) -> None:
    with RunStore(tmp_path / "often") as store:
        for event in ONE_OF_EACH:
            store.observe(event)
            store.commit()
    assert dump(store.path) == dump(write(tmp_path / "once", ONE_OF_EACH))


def test_events_are_stored_after_an_exception(tmp_path: Path) -> None:
    done = ONE_OF_EACH[:5]

    def fail() -> None:
        with RunStore(tmp_path) as store:
            for event in done:
                store.observe(event)
            raise RuntimeError("the run broke")

    with pytest.raises(RuntimeError, match="the run broke"):
        fail()
    assert read_events(tmp_path) == done


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_events_are_stored_after_an_interruption(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), RunStore(tmp_path) as store:  # noqa: PT012
        store.observe(UPDATE)
        raise error
    assert read_events(tmp_path) == [UPDATE]


def test_an_evaluation_or_500_events_are_on_disk_at_once(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.observe(UPDATE)
        assert count(store.path, "updates") == 0
        store.observe(Evaluated(3.0, 1, 0.5, 1.0, 1))
        assert count(store.path, "updates") == count(store.path, "evaluations") == 1
        for seq in range(2, 501):
            store.observe(replace(UPDATE, seq=seq))
        assert count(store.path, "updates") == 1
        store.observe(replace(UPDATE, seq=501))
        assert count(store.path, "updates") == 501


def test_a_closed_store_takes_nothing_more(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.observe(UPDATE)
    store.close()
    store.close()
    assert read_events(tmp_path) == [UPDATE]
    with pytest.raises(ValueError, match="closed"):
        store.commit()


def test_the_view_lists_each_client_as_it_joined_first(tmp_path: Path) -> None:
    with closing(sqlite3.connect(write(tmp_path, ONE_OF_EACH))) as connection:
        rows = connection.execute("SELECT * FROM clients").fetchall()
    assert rows == [("b", 0.0, 12, 1, 1), ("a", 0.0, 7, None, 2)]


def test_an_existing_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    before = dump(write(tmp_path, ONE_OF_EACH))
    with pytest.raises(UserError, match=r"holds a run already.*--out"):
        RunStore(tmp_path)
    assert dump(tmp_path / STORE) == before


@pytest.mark.parametrize("after", range(len(ONE_OF_EACH) + 1))
def test_resumed_gives_the_same_contents_as_one_run(tmp_path: Path, after: int) -> None:
    whole = dump(write(tmp_path / "whole", ONE_OF_EACH))
    path = write(tmp_path / "resumed", ONE_OF_EACH)
    with RunStore(path.parent, after=after) as store:
        store.commit()
        assert read_events(path) == ONE_OF_EACH[:after]
        for event in ONE_OF_EACH[after:]:
            store.observe(event)
        assert store.commit() == len(ONE_OF_EACH)
    assert dump(path) == whole


def test_resumed_with_fewer_events_than_expected_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ONE_OF_EACH)
    with pytest.raises(UserError, match="events are missing"):
        RunStore(tmp_path, after=len(ONE_OF_EACH) + 1)
    assert read_events(tmp_path) == ONE_OF_EACH


def test_resumed_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run store"):
        RunStore(tmp_path, after=3)
    assert not (tmp_path / STORE).exists()


def test_reading_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / STORE):
        with pytest.raises(UserError, match="There is no run store"):
            read_events(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / STORE
    path.write_bytes(b"time,accuracy\n" * 100)
    with pytest.raises(UserError, match="not a run store"):
        read_events(path)
    with pytest.raises(UserError, match="not a run store"):
        RunStore(tmp_path, after=1)
    assert path.read_bytes() == b"time,accuracy\n" * 100


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / STORE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE updates (event INTEGER)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(UserError, match="another SQLite database"):
        read_events(path)
    with pytest.raises(UserError, match="another SQLite database"):
        RunStore(tmp_path, after=0)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("kind", "field"), [("ClustersChanged", "change"), ("RunEnded", "ending")])
def test_a_word_that_does_not_exist_is_said_to_be_damage(
    tmp_path: Path, kind: str, field: str
) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            f"UPDATE events SET body = json_set(body, '$.{field}', 'explode') WHERE kind = ?",
            (kind,),
        )
        connection.commit()
    with pytest.raises(UserError, match=r"damaged.*explode"):
        read_events(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("kind", "Explosion"),
        ("body", "{"),
        ("body", "[]"),
        ("body", "{}"),
        ("body", '{"nothing": 1}'),
    ],
)
def test_a_row_that_is_no_event_is_said_to_be_damage(
    tmp_path: Path, column: str, value: str
) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE events SET {column} = ? WHERE event = 5", (value,))
        connection.commit()
    with pytest.raises(UserError, match="damaged"):
        read_events(path)


def test_a_store_without_its_tables_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE events")
        connection.commit()
    with pytest.raises(UserError, match="damaged"):
        read_events(path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        RunStore(tmp_path / "file" / "run")


@pytest.mark.parametrize("time", [None, "soon"])
def test_a_forged_time_is_named(tmp_path: Path, time: str | None) -> None:
    with RunStore(tmp_path) as store:
        store.observe(UpdateApplied(1, 1.0, "a", 0, 0, 0, 0.5, 0.5, 0.1, 4, 4))
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as connection, connection:
        connection.execute("PRAGMA writable_schema = 1")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'time REAL NOT NULL', 'time REAL')"
        )
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as connection, connection:
        connection.execute("UPDATE events SET time = ?", (time,))
    with pytest.raises(UserError, match="an event of kind UpdateApplied cannot be read"):
        read_events(tmp_path)
