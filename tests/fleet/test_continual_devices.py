"""C-FAACL on real devices: two tasks each, and a server that is killed in between."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from processes import ROOT, Loopback, Process, loopback, wait_until
from test_chaos import FIRST_UPDATE, applied, is_server_app

from raceme.fleet.testbed import descendants
from raceme.records.record import read_run
from raceme.runs.checkpoints import read_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVICES = 4
CHANGE = 8
"""Rounds until all devices have their second task: other labels for the same images."""
KEYS = (
    f"strategy='c-faacl' dataset='digits' clients={DEVICES} partition='iid' model='mclr' "
    "lr=0.1 batch-size=10 eval-every=8 checkpoint-every=1 drift='label-shift' max-rounds=14 "
    f"set='drift-at={CHANGE}rounds c-faacl.borrow=samples'"
)


def run(place: Loopback, where: str) -> Process:
    return place.flwr("run", str(ROOT), "here", "--stream", "--run-config", f"{KEYS} {where}")


@pytest.mark.parametrize("killed_at", ["first task", "second task"])
def test_four_devices_with_two_tasks_each_and_a_server_that_is_killed(
    tmp_path: Path, killed_at: str
) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as place:
        link = place.superlink("--insecure", "--database", str(tmp_path / "link.db"))
        devices = [
            place.device(
                "--insecure", "--node-config", f"partition-id={k} num-partitions={DEVICES}"
            )
            for k in range(DEVICES)
        ]
        for device in devices:
            device.wait_for("online at", 180)
        first = run(place, f"out='{out}'")
        first.wait_for("clusters 1|→ cluster" if killed_at == "first task" else "step 1 at", 240)
        at = applied(first)
        wait_until(partial(_is_past, first, at + 2), 120, first.describe)
        (server,) = (child for child in descendants(link.handle.pid) if is_server_app(child))
        os.kill(server, signal.SIGKILL)
        last = applied(first)
        second = run(place, f"resume='{out}'")
        resumed_at = int(second.wait_for(FIRST_UPDATE, 240).group(1))
        # At most the updates of the interrupted round are repeated.
        assert last - resumed_at <= 2 * DEVICES
        second.wait_for("Results are in", 300)
        assert second.wait() == 0
        assert [device.stop() for device in devices] == [0] * DEVICES
    record = read_run(out)
    assert list(record.updates.seq) == list(range(1, len(record.updates.seq) + 1))
    (change,) = record.data_changes
    # All clients have the same concept at a time, so
    # they share a cluster, a different one each time.
    before, after = record.assignment(change.time), record.assignment()
    assert len(set(before.values())) == len(set(after.values())) == 1
    assert set(before.values()) != set(after.values())
    tree, _ = read_tree(max((out / "checkpoint").iterdir()))
    memory = tree["strategy"]["state"]["memory"]
    assert {client: sorted(steps) for client, steps in memory.items()} == {
        f"client-{k}": ["0", "1"] for k in range(DEVICES)
    }


def _is_past(run: Process, update: int) -> bool:
    return applied(run) >= update
