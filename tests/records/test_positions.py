"""``positions.jsonl``: snapshots come back, lie as those before, and are bounded and cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raceme.core.config import RunConfig
from raceme.records.folder import POSITIONS
from raceme.records.positions import SCALE, PositionsFile, PositionsReader
from raceme.runs.experiment import simulate

SQUARE = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
QUARTER = np.array([[0.0, 1.0], [-1.0, 0.0]])
NAMES = ["a", "b", "\u202e<b>", "d"]


def test_snapshots_come_back_and_lie_as_before(tmp_path: Path) -> None:
    file, reader = PositionsFile(tmp_path), PositionsReader(tmp_path)
    assert reader.read() == []
    file.write(1.0, NAMES[:3], SQUARE[:3])
    (first,) = reader.read()
    assert (first.time, first.clients) == (1.0, tuple(NAMES[:3]))
    assert first.points / SCALE == pytest.approx(SQUARE[:3])
    # Turned by a right angle, as principal components may be.
    file.write(2.0, NAMES, (SQUARE - SQUARE.mean(axis=0)) @ QUARTER)
    file.write(3.0, ["d", "a"], SQUARE[[3, 0]])
    second, third = reader.read()
    assert second.clients == tuple(NAMES)
    centred = SQUARE[:3] - SQUARE[:3].mean(axis=0)
    moved = second.points[:3] / SCALE
    assert np.sign(moved - moved.mean(axis=0)) == pytest.approx(np.sign(centred))
    assert third.clients == ("a", "d")
    assert reader.read() == []


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    PositionsFile(tmp_path).write(1.0, NAMES, SQUARE)
    path = tmp_path / "positions.jsonl"
    line = path.read_bytes()
    path.write_bytes(line + line[:20])
    reader = PositionsReader(tmp_path)
    assert len(reader.read()) == 1
    path.write_bytes(line + line.replace(b'["a"', b'["e"'))
    assert [one.time for one in reader.read()] == []


@pytest.mark.parametrize(
    "line",
    [
        "x",
        '{"time": 1, "new": ["a"], "dimensions": 0, "points": ""}',
        '{"time": 1, "new": ["a", "b"], "dimensions": 1, "points": "AAAAAA=="}',
        "[]",
        '{"time": 1, "new": ["a"], "dimensions": 2, "points": "AA=="}',
        '{"time": 1, "new": ["a"], "dimensions": 2, "points": "AAAAAA==", "clients": [3]}',
        '{"time": 1, "new": ["a"], "dimensions": 2, "points": "AAAAAA==", "clients": [-1]}',
        '{"time": NaN, "new": ["a"], "dimensions": 2, "points": "AAAAAA=="}',
        '{"time": 1, "new": 5, "dimensions": 2, "points": "AAAAAA=="}',
    ],
)
def test_what_is_no_snapshot_ends_the_reading(tmp_path: Path, line: str) -> None:
    (tmp_path / "positions.jsonl").write_text(f"{line}\n")
    assert PositionsReader(tmp_path).read() == []


def test_a_resumed_run_drops_what_came_later_and_goes_on_from_there(tmp_path: Path) -> None:
    file = PositionsFile(tmp_path)
    for time in (1.0, 2.0, 3.0):
        file.write(time, NAMES, SQUARE)
    reader = PositionsReader(tmp_path)
    assert [one.time for one in reader.read()] == [1.0, 2.0, 3.0]
    centred = (SQUARE - SQUARE.mean(axis=0)) @ QUARTER
    PositionsFile(tmp_path, after=2.0).write(4.0, [*NAMES, "e"], np.vstack([centred, [0.0, 0.0]]))
    found = PositionsReader(tmp_path).read()
    assert [one.time for one in found] == [1.0, 2.0, 4.0]
    assert found[-1].points[:4] / SCALE == pytest.approx(SQUARE, abs=1e-3)
    assert found[-1].clients == (*NAMES, "e")
    # Who has read what was dropped is told what is new.
    assert [one.clients for one in reader.read()] == [(*NAMES, "e")]


def test_snapshots_of_a_long_run_are_further_and_further_apart(tmp_path: Path) -> None:
    file = PositionsFile(tmp_path, most=28)
    for updates in range(10, 800, 10):
        if file.wants(updates):
            file.write(float(updates), NAMES, SQUARE, updates)
    # Four at once; then 121 updates apart or more; twice as far after seven snapshots of four.
    expected = [*range(10, 41, 10), 170, 300, 430, 680]
    assert [one.time for one in PositionsReader(tmp_path).read()] == expected
    # Who resumes goes on as if nothing had been.
    resumed = PositionsFile(tmp_path, after=600.0, most=28)
    assert [resumed.wants(updates) for updates in (670, 680)] == [False, True]


def test_the_end_of_a_run_that_is_resumed_leaves_no_trace(tmp_path: Path) -> None:
    file = PositionsFile(tmp_path)
    file.write(1.0, NAMES, SQUARE, 10)
    file.write(2.0, NAMES, SQUARE, 15, is_last=True)
    assert [one.is_last for one in PositionsReader(tmp_path).read()] == [False, True]
    resumed = PositionsFile(tmp_path, after=2.0)
    assert [one.time for one in PositionsReader(tmp_path).read()] == [1.0]
    resumed.write(3.0, NAMES, SQUARE, 20)
    whole = tmp_path / "whole"
    whole.mkdir()
    file = PositionsFile(whole)
    file.write(1.0, NAMES, SQUARE, 10)
    file.write(3.0, NAMES, SQUARE, 20)
    assert [(path / "positions.jsonl").read_text() for path in (tmp_path, whole)] == [
        (whole / "positions.jsonl").read_text()
    ] * 2


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    PositionsFile(tmp_path / "missing").write(1.0, NAMES, SQUARE)
    assert PositionsReader(tmp_path / "missing").read() == []


def test_a_run_that_is_resumed_at_its_end_keeps_all_snapshots(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = {
        **{"strategy": "fedasync", "clients": 3, "model": "mclr", "workers": 0},
        **{"max-updates": 12, "eval-every": 6, "checkpoint-every": 1},
    }
    simulate(RunConfig.from_mapping({**keys, "out": str(run)}))
    path = run / POSITIONS
    before = [json.loads(line)["updates"] for line in path.read_text().splitlines()]
    assert before == [6, 12]
    simulate(RunConfig.from_mapping({**keys, "resume": str(run)}))
    assert [json.loads(line)["updates"] for line in path.read_text().splitlines()] == before
