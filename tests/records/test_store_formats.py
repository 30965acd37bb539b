"""Stores of other formats: what those lack that have the same tables otherwise."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_store import ONE_OF_EACH, write

from raceme.core.errors import UserError
from raceme.core.events import (
    ACCURACY,
    AnswerTaken,
    ClaimRefused,
    ClientIdled,
    ClustersScored,
    Evaluated,
    Event,
    SupportChanged,
    TasksTested,
    UpdateApplied,
    UpdateJudged,
)
from raceme.records.store import _METHOD_TABLES as METHOD_TABLES
from raceme.records.store import FORMAT, RunStore, read_events


def test_a_store_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(UserError, match="format 99"):
        read_events(path)


def test_a_store_of_format_4_has_no_errors_but_accuracies(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE evaluations DROP COLUMN unit")
        connection.execute("PRAGMA user_version = 4")
    read = [event for event in read_events(path) if isinstance(event, Evaluated)]
    assert [event.measure for event in read] == [ACCURACY, ACCURACY]


def test_a_store_of_format_3_lacks_what_came_later(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        forget_format_5(connection)
        connection.execute("ALTER TABLE evaluations DROP COLUMN weighted_accuracy")
        connection.execute("ALTER TABLE evaluations DROP COLUMN unit")
        connection.execute("ALTER TABLE client_evaluations DROP COLUMN group_id")
        connection.execute("DROP TABLE idle_times")
        connection.execute("PRAGMA user_version = 3")
    expected = [
        replace(event, weighted_accuracy=math.nan, groups={}, measure=ACCURACY)
        if isinstance(event, Evaluated)
        else event
        for event in as_format_4(ONE_OF_EACH)
        if not isinstance(event, ClientIdled)
    ]
    assert read_events(path) == expected
    with pytest.raises(UserError, match=f"format 3, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=3)


def forget_format_8(connection: sqlite3.Connection) -> None:
    for column in ("cpu_seconds", "joules"):
        connection.execute(f"ALTER TABLE updates DROP COLUMN {column}")


def as_format_7(events: Iterable[Event]) -> list[Event]:
    return [
        replace(event, cpu_seconds=None, joules=None) if isinstance(event, UpdateApplied) else event
        for event in events
    ]


def test_a_store_of_format_7_lacks_costs(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        forget_format_8(connection)
        connection.execute("PRAGMA user_version = 7")
    assert read_events(path) == as_format_7(ONE_OF_EACH)
    with pytest.raises(UserError, match=f"format 7, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=3)


def forget_format_7(connection: sqlite3.Connection) -> None:
    forget_format_8(connection)
    connection.execute("DROP TABLE refused_claims")
    connection.execute("DROP TABLE verdicts")


def as_format_6(events: Iterable[Event]) -> list[Event]:
    return [
        event for event in as_format_7(events) if not isinstance(event, ClaimRefused | UpdateJudged)
    ]


def test_a_store_of_format_6_lacks_claims_and_verdicts(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        forget_format_7(connection)
        connection.execute("PRAGMA user_version = 6")
    assert read_events(path) == as_format_6(ONE_OF_EACH)
    with pytest.raises(UserError, match=f"format 6, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=3)


def forget_format_6(connection: sqlite3.Connection) -> None:
    forget_format_7(connection)
    connection.execute("ALTER TABLE updates DROP COLUMN phase")
    for table in METHOD_TABLES:
        connection.execute(f"DROP TABLE IF EXISTS {table}")


def as_format_5(events: Iterable[Event]) -> list[Event]:
    return [
        replace(event, phase="train") if isinstance(event, UpdateApplied) else event
        for event in as_format_6(events)
        if not isinstance(event, AnswerTaken | SupportChanged | TasksTested)
    ]


def test_a_store_of_format_5_lacks_what_only_some_methods_report(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        forget_format_6(connection)
        connection.execute("PRAGMA user_version = 5")
    assert read_events(path) == as_format_5(ONE_OF_EACH)
    with pytest.raises(UserError, match=f"format 5, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=3)


def forget_format_5(connection: sqlite3.Connection) -> None:
    forget_format_6(connection)
    for column in ("accuracy_before", "accuracy_after", "passes"):
        connection.execute(f"ALTER TABLE updates DROP COLUMN {column}")
    for table in ("mixtures", "cluster_scores"):
        connection.execute(f"DROP TABLE {table}")


def as_format_4(events: Iterable[Event]) -> list[Event]:
    unknown: dict[str, Any] = {"accuracy_before": None, "accuracy_after": None, "passes": None}
    return [
        replace(event, **unknown, mixture=()) if isinstance(event, UpdateApplied) else event
        for event in as_format_5(events)
        if not isinstance(event, ClustersScored)
    ]


def test_a_store_of_format_4_lacks_the_scores(tmp_path: Path) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        forget_format_5(connection)
        connection.execute("PRAGMA user_version = 4")
    assert read_events(path) == as_format_4(ONE_OF_EACH)
    with pytest.raises(UserError, match=f"format 4, and format {FORMAT} is needed"):
        RunStore(tmp_path, after=3)
