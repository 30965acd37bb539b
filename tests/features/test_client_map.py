"""The client map during a run: it shows the true groups, and does not change the run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from raceme.core.config import RunConfig
from raceme.features.client_map.positions import SCALE, PositionsReader
from raceme.records.record import read_run
from raceme.runs.experiment import simulate


def simulated(out: Path, **settings: object) -> Path:
    config = RunConfig(max_updates=60, clients=12, workers="0", out=str(out))
    simulate(config.with_values(**settings))
    return out


def contents(out: Path) -> list[str]:
    with sqlite3.connect(out / "run.sqlite") as connection:
        return list(connection.iterdump())


def models(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((out / "clusters").iterdir())]


@pytest.mark.parametrize("strategy", ["fedasync", "ifca", "panicle"])
def test_groups_lie_apart_whatever_the_method(tmp_path: Path, strategy: str) -> None:
    out = simulated(tmp_path / "run", strategy=strategy)
    groups = read_run(out).summary.membership.groups
    snapshot = PositionsReader(out).read()[-1]
    assert len(snapshot.clients) == 12
    points = snapshot.points / SCALE
    labels = np.array([groups[client] for client in snapshot.clients])
    centres = np.stack([points[labels == label].mean(axis=0) for label in np.unique(labels)])
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1)
    assert (np.unique(labels)[nearest] == labels).all()


def test_a_run_with_a_map_is_the_same_run(tmp_path: Path) -> None:
    with_map = simulated(tmp_path / "with")
    without = simulated(tmp_path / "without", client_map=False)
    assert not (without / "positions.jsonl").exists()
    assert contents(with_map) == contents(without)
    assert models(with_map) == models(without)
    again = simulated(tmp_path / "again")
    name = "positions.jsonl"
    assert (with_map / name).read_bytes() == (again / name).read_bytes()


def test_the_last_snapshot_is_of_the_end(tmp_path: Path) -> None:
    out = simulated(tmp_path / "run", eval_every=5)
    found = PositionsReader(out).read()
    # Snapshots come from the first four evaluations; the other seven follow too closely.
    assert [(one.updates, one.is_last) for one in found] == [
        *((updates, False) for updates in (5, 10, 15, 20)),
        (60, True),
    ]
