"""CSAFL and FlexCFL on real devices: windows of seconds, groups and migrations over gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ROOT, Process, loopback

from raceme.records.record import RunRecord, read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEVICES = 4
DATA = 'groups="0.5,0.5" model="mclr" local-epochs=2'


def run_on_four_devices(home: Path, keys: str, options: str) -> RunRecord:
    """Run on the digits over gRPC on loopback; return what the store holds."""
    out = home / "out"
    with loopback(home) as place:
        place.superlink()
        devices: list[Process] = []
        for number in range(DEVICES):
            node = f"partition-id={number} num-partitions={DEVICES}"
            name = ("--device-id", f"board-{number}")
            devices.append(place.device("--insecure", *name, "--node-config", node))
        for device in devices:
            device.wait_for("online at", 120)
        settings = f"clients={DEVICES} eval-every=1000 out=\"{out}\" {keys} set='{DATA} {options}'"
        run = place.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        run.wait_for("Results are in", 300)
        assert run.wait() == 0
        assert [device.stop() for device in devices] == [0] * DEVICES
    return read_run(out)


def test_csafl_in_windows_of_seconds(tmp_path: Path) -> None:
    budget = 3.0
    record = run_on_four_devices(
        tmp_path,
        'strategy="csafl" max-rounds=3',
        f"csafl.groups=2 csafl.picked=4 csafl.threshold=0 csafl.budget={budget}",
    )
    idle = [event.values for event in record.measured["idle"]]
    # Each of the four members reports once in each of
    # three windows, and waits no longer than its length.
    assert sorted((own["window"], own["client"]) for own in idle) == [
        (window, f"board-{number}") for window in (1, 2, 3) for number in range(DEVICES)
    ]
    assert all(0.0 <= own["seconds"] <= budget + 0.5 for own in idle)
    # Two groups that contain all clients; in each window at least one client answered in time.
    assert len(record.splits) == 1
    assert len(set(record.assignment().values())) == 2
    assert len(record.assignment()) == DEVICES
    assert len(record.updates.time) > 2 * DEVICES


def test_flexcfl_moves_devices_that_have_exchanged_their_data(tmp_path: Path) -> None:
    # With this seed of the drift, boards 0 and 3, and 1 and 2, exchange all data after round 2.
    record = run_on_four_devices(
        tmp_path,
        'strategy="flexcfl" max-rounds=4',
        "flexcfl.groups=2 flexcfl.fraction=1.0 flexcfl.pretrain=2 flexcfl.detect=label-counts "
        "drift=swap-all swap-chance=1.0 drift-at=2rounds drift-seed=2",
    )
    (change,) = record.data_changes
    before, after = record.assignment(change.time), record.assignment()
    one, other = sorted(set(before.values()))
    boards = [f"board-{number}" for number in range(DEVICES)]
    # Boards 0 and 1 have the labels of one group, 2 and 3 those of the other.
    assert [before[board] for board in boards] in (
        [one, one, other, other],
        [other, other, one, one],
    )
    assert [after[board] for board in boards] == [before[board] for board in reversed(boards)]
    moved = [placed.client for placed in record.placements if placed.time > change.time]
    assert sorted(moved) == boards
