"""Replies on disk, for a restart after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from raceme.fleet.served_grid import Journal


def test_entries_come_back_in_order_from_a_file_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new")
    entries = [[b"a", b"", b"bc"], [b"d"], []]
    first = journal.begin()
    journal.append(entries[0])
    second = journal.begin()
    journal.append(entries[1])
    journal.append(entries[2])
    # As after a crash: nothing was closed.
    again = Journal(tmp_path / "new")
    assert list(again.read(first)) == entries
    assert list(again.read(second)) == entries[1:]
    third = again.begin()
    assert third > second
    again.drop(second)
    assert list(again.read(first)) == entries[1:]


@pytest.mark.parametrize("left", [3, 12, 40])
def test_an_entry_that_was_not_written_wholly_is_not_there(tmp_path: Path, left: int) -> None:
    journal = Journal(tmp_path)
    number = journal.begin()
    journal.append([b"whole", b"entry"])
    journal.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:left])
    assert list(Journal(tmp_path).read(number)) == [[b"whole", b"entry"]]
    path.write_bytes(whole[:-40] + b"?" + whole[-39:])
    assert list(Journal(tmp_path).read(number)) == []


def test_what_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.append([b"before there is a file"])
    journal.begin()
    with Path("/dev/full").open("wb", buffering=0) as full:
        journal._file = full  # type: ignore[assignment]
        journal.append([b"an entry"])
        journal.append([b"an entry"])
    assert caplog.text.count("No space left on device") == 1
