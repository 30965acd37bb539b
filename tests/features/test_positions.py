"""Positions by similarity, and ``positions.jsonl``: snapshots are restored and aligned."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.features.client_map import POSITIONS
from raceme.features.client_map.positions import (
    DIMENSIONS,
    SCALE,
    PositionsFile,
    PositionsReader,
    aligned,
    flattened,
    positions_of_rows,
)
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
    # Rotated by a right angle, as principal components may be.
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
    # A reader whose snapshots were dropped gets the new ones only.
    assert [one.clients for one in reader.read()] == [(*NAMES, "e")]


def test_snapshots_of_a_long_run_are_further_and_further_apart(tmp_path: Path) -> None:
    file = PositionsFile(tmp_path, most=28)
    for updates in range(10, 800, 10):
        if file.wants(updates):
            file.write(float(updates), NAMES, SQUARE, updates)
    # Four at once; then gaps of 121 updates or more, doubled after seven snapshots of four clients.
    expected = [*range(10, 41, 10), 170, 300, 430, 680]
    assert [one.time for one in PositionsReader(tmp_path).read()] == expected
    # A resumed run continues with the same gaps.
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
        **{"strategy": "fedasync", "clients": 5, "model": "mclr", "workers": 0},
        **{"max-updates": 40, "eval-every": 20, "checkpoint-every": 1},
    }
    simulate(RunConfig.from_mapping({**keys, "out": str(run)}))
    path = run / POSITIONS
    before = [json.loads(line)["updates"] for line in path.read_text().splitlines()]
    assert before == [20, 40]
    simulate(RunConfig.from_mapping({**keys, "resume": str(run)}))
    assert [json.loads(line)["updates"] for line in path.read_text().splitlines()] == before


def test_two_groups_lie_apart_and_their_members_together() -> None:
    points = positions_of_rows(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    assert points[0] == pytest.approx(points[1])
    assert np.linalg.norm(points[0] - points[2]) > 1
    assert (points**2).sum(axis=1).mean() == pytest.approx(1.0)


@pytest.mark.parametrize("width", [8, 80])
def test_distances_are_those_of_directions_up_to_scale(width: int) -> None:
    # The rows span four dimensions, so that none is lost.
    rows = np.random.default_rng(1).normal(size=(30, 4)) @ np.eye(4, width)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # Lengths are ignored: a client may have trained longer, or be an attacker.
    found = positions_of_rows(rows * np.geomspace(1, 1e6, 30)[:, None])
    upper = np.triu_indices(30, 1)
    ratio = distances(found)[upper] / distances(units)[upper]
    assert ratio == pytest.approx(np.full(len(ratio), ratio[0]))


def distances(points: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(points[:, None] - points[None], axis=2))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_rows_that_overflowed_take_nobody_along(n: int) -> None:
    rows = np.vstack([np.eye(4)[: n + 1], np.full((1, 4), np.inf)])
    assert np.isfinite(positions_of_rows(rows)).all()
    assert positions_of_rows(np.empty((0, 4))).shape == (0, DIMENSIONS)


@given(angle=st.floats(0, 6.28), mirrored=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_turned_and_mirrored_map_is_turned_back(angle: float, mirrored: bool, seed: int) -> None:
    before = np.random.default_rng(seed).normal(size=(12, 2))
    before -= before.mean(axis=0)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    names = [str(number) for number in range(12)]
    now = before @ turn * ([-1, 1] if mirrored else [1, 1])
    held = dict(zip(names, before.tolist(), strict=True))
    assert aligned(now, names, held) == pytest.approx(before)


def test_four_groups_that_are_all_as_different_lie_apart_in_the_plane() -> None:
    """Corners of a tetrahedron: two principal components would put two of them together."""
    corners = np.eye(4)[np.arange(24) % 4]
    noise = np.random.default_rng(0).normal(scale=0.02, size=corners.shape)
    points = positions_of_rows(corners + noise)
    names = [str(number) for number in range(24)]
    flat = flattened(points, names, {})
    assert flat.shape == (24, 2)
    centres = np.stack([flat[group::4].mean(axis=0) for group in range(4)])
    gaps = np.linalg.norm(centres[:, None] - centres[None], axis=2)[np.triu_indices(4, 1)]
    assert gaps.min() > 0.6
    spread = max(float(np.linalg.norm(flat[g::4] - centres[g], axis=1).max()) for g in range(4))
    assert spread < gaps.min() / 4
    # The next map starts from these positions, and keeps them although the dimensions are permuted.
    held = dict(zip(names, flat.tolist(), strict=True))
    again = flattened(points[:, [2, 0, 1, 3]], names, held)
    assert again == pytest.approx(flat, abs=0.05)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_few_or_equal_points_lie_flat(n: int) -> None:
    flat = flattened(np.ones((n, DIMENSIONS)), [str(number) for number in range(n)], {})
    assert flat.shape == (n, 2)
    assert np.isfinite(flat).all()


def test_points_in_one_place_and_those_that_begin_there_lie_flat() -> None:
    clients = [str(number) for number in range(5)]
    places = {client: (1.0, float(client)) for client in clients}
    for points in (np.zeros((5, DIMENSIONS)), np.eye(5, DIMENSIONS, DIMENSIONS - 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not flattened(points, clients, places if not points.any() else {}).any()


def test_many_points_are_shown_by_their_first_dimensions() -> None:
    points = np.random.default_rng(0).normal(size=(500, DIMENSIONS))
    flat = flattened(points, [str(number) for number in range(500)], {})
    assert flat == pytest.approx(points[:, :2])
