"""The dashboard's data of the client map: all snapshots, a selection, or the last one."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np

from raceme.core.events import ClientJoined
from raceme.features.client_map.positions import PositionsFile
from raceme.records.folder import CONTROL, STORE
from raceme.records.store import RunStore
from raceme.reporting.dashboard.source import RunSource

NAMES = ["a", "b", "c"]
POINTS = np.array([[1.0, 0.0], [-1.0, 0.5], [0.0, -0.5]])


def frames(source: RunSource) -> list[dict]:
    source.read_all()
    pieces = map(json.loads, source.pieces)
    return [piece["frame"] for piece in pieces if "frame" in piece]


def points_of(frame: dict) -> list[list[int]]:
    found = np.frombuffer(base64.b64decode(frame["points"]), "<i2").reshape(-1, 2)
    return [list(map(int, point)) for point in found]


def test_a_server_that_waits_for_devices_has_no_virtual_time(tmp_path: Path) -> None:
    source = RunSource(tmp_path)
    with RunStore(tmp_path):
        source.read_all()
        assert not any("clock" in piece for piece in source.pieces)
        (tmp_path / CONTROL).touch()
        source.read_all()
    assert json.loads(source.pieces[-1]) == {"clock": "time"}


def test_snapshots_are_told_as_they_come(tmp_path: Path) -> None:
    file, source = PositionsFile(tmp_path), RunSource(tmp_path)
    assert frames(source) == []
    file.write(1.0, NAMES[:2], POINTS[:2])
    assert [frame["time"] for frame in frames(source)] == [1.0]
    file.write(2.0, NAMES, POINTS)
    first, second = frames(source)
    assert (first["new"], first["clients"]) == (["a", "b"], [0, 1])
    assert points_of(first) == [[2000, 0], [-2000, 1000]]
    assert (second["new"], second["clients"]) == (["c"], [0, 1, 2])


def test_of_many_snapshots_some_are_told(tmp_path: Path) -> None:
    file = PositionsFile(tmp_path)
    for time in range(9):
        file.write(float(time), NAMES, POINTS)
    told = frames(RunSource(tmp_path, most_positions=6))
    assert [frame["time"] for frame in told] == [0, 1, 2, 4, 6]


def test_a_run_that_begins_anew_tells_its_own(tmp_path: Path) -> None:
    source = RunSource(tmp_path)
    for name, clients in (("x", 3), ("y", 2)):
        (tmp_path / STORE).unlink(missing_ok=True)
        with RunStore(tmp_path) as store:
            for number in range(clients):
                store.observe(ClientJoined(0.0, f"{number}", 0, 10, None))
        (tmp_path / "positions.jsonl").unlink(missing_ok=True)
        PositionsFile(tmp_path).write(1.0, [name, *NAMES[1:]], POINTS)
        assert [frame["new"] for frame in frames(source)] == [[name, "b", "c"]]
