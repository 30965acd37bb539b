"""Stores of other formats are refused, with what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_store import ONE_OF_EACH, write

from raceme.core.errors import UserError
from raceme.records.store import FORMAT, RunStore, StoreFollower, read_events


@pytest.mark.parametrize("other", [1, 2, 3, 8, 99])
def test_a_store_of_another_format_is_refused(tmp_path: Path, other: int) -> None:
    path = write(tmp_path, ONE_OF_EACH)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {other}")
    before = path.read_bytes()
    refusal = f"format {other}, and format {FORMAT} is needed here. Use the version of Raceme"
    with pytest.raises(UserError, match=refusal):
        read_events(path)
    with pytest.raises(UserError, match=refusal):
        RunStore(tmp_path, after=3)
    with pytest.raises(UserError, match=refusal):
        StoreFollower(tmp_path).read()
    assert path.read_bytes() == before
