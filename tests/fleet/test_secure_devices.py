"""Secure aggregation by devices: real processes over TLS, of which some are killed."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import Loopback, Process, free_port, loopback, raceme
from test_serve import are_applied_once, query, updates

from raceme.features.secure.protocol import MASKED, SHARES, UNMASK
from raceme.runs.checkpoints import CHECKPOINTS, read_tree

DEVICES = 7
VICTIMS = {0: (SHARES, 1), 1: (MASKED, 2), 2: (UNMASK, 3)}
"""Devices that are killed in a stage, each after a number of cohorts."""

# A device that keeps a copy of each of its updates, and kills itself at a given point. A late one
# sends no announcement until it is allowed.
PROGRAM = """
import os, sys, time
import numpy as np
from raceme.core.messages import from_array
from raceme.features.secure import client
name, stage, times, *arguments = sys.argv[1:]
honest, entered, seen = client._stage, 0, 0

def stopped(message, asked, context, options):
    global entered, seen
    change = from_array(context.state.array_records["secure-change"]["secure-change"])
    np.save(f"update-{name}-{seen}", change)
    seen += 1
    entered += asked["secure-stage"] == stage
    if entered == int(times):
        os.kill(os.getpid(), 9)
    return honest(message, asked, context, options)

def late():
    while not os.path.exists("go"):
        time.sleep(0.1)
    return announced()

announced = client.Secrets.new
if stage == "late":
    client.Secrets.new = staticmethod(late)
client._stage = stopped
sys.argv = ["raceme", *arguments]
from raceme.__main__ import main
main()
"""


def make_certificates(bed: Loopback) -> None:
    named = [part for number in range(DEVICES) for part in ("--device", f"d{number}")]
    certs = bed.start("certs", raceme("certs", "--host", "127.0.0.1", "--out", "certs", *named))
    assert certs.wait() == 0


def start_server(bed: Loopback, *options: str) -> Process:
    bed.fleet_port = bed.fleet_port or free_port()
    bed.http_port = bed.http_port or free_port()
    places = ("--address", bed.fleet_address, "--http", bed.http_address, "--metrics", "off")
    keys = {"strategy": "fedavg", "dataset": "digits", "model": "mclr", "clients": DEVICES}
    keys |= {"secure-least": 4, "secure-seconds": 20, "eval-every": 1000, "out": "out"}
    given = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    return bed.start("serve", raceme("serve", *places, *given, "--secure", *options))


def start_device(bed: Loopback, number: int, late: bool = False) -> Process:
    stage, times = ("late", 1) if late else VICTIMS.get(number, ("none", 1))
    command = [sys.executable, "-c", PROGRAM, str(number), stage, str(times)]
    command += ["device", "--superlink", bed.fleet_address]
    command += ["--root-certificates", "certs/ca.crt", "--key", f"certs/devices/d{number}"]
    command += ["--device-id", f"d{number}"]
    command += ["--node-config", f"partition-id={number} num-partitions={DEVICES}"]
    return bed.start(f"device-{number}", command)


NOISE = ("--privacy-central", "0.5", "--privacy-delta", "0.001")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("privacy", [(), NOISE], ids=["sums", "noise"])
def test_devices_that_are_killed_in_each_stage_and_what_the_server_keeps(
    privacy: tuple[str, ...], tmp_path: Path
) -> None:
    with loopback(tmp_path) as bed:
        make_certificates(bed)
        least = ("--clients-min", str(DEVICES), "--max-updates", "19")
        least += privacy
        server = start_server(bed, "--certificates", "certs", "--checkpoint-every", "1", *least)
        server.wait_for("Listening on", 240)
        devices = [start_device(bed, number) for number in range(DEVICES)]
        assert server.wait(300) == 0, server.text()
        for number in VICTIMS:
            assert devices[number].wait(60) == -9
    # Cohorts of 7, 6, 5 and 4 members; the last member sends its update before it dies.
    out = tmp_path / "out"
    sums = query(out, "SELECT * FROM measures WHERE name = 'secure_sum'")
    assert len(sums) == 4, sums
    assert bool(query(out, "SELECT * FROM measures WHERE name = 'privacy'")) == bool(privacy)
    are_applied_once(out, len(updates(out)))
    changes = [np.load(path) for path in tmp_path.glob("update-*.npy")]
    assert len(changes) >= 19
    kept = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    trees = [read_tree(path)[0] for path in sorted((out / CHECKPOINTS).glob("*.safetensors"))]
    kept += pickle.dumps(trees)
    assert trees
    for change in changes:
        parts = [change[at : at + 8] for at in range(0, len(change) - 7, 8)]
        for part in (part.tobytes() for part in parts if np.abs(part).min() > 0):
            assert part not in kept


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_goes_on_with_sums(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        make_certificates(bed)
        options = ("--certificates", "certs", "--checkpoint-every", "1", "--max-updates", "60")
        options += ("--clients-min", "5")
        server = start_server(bed, *options)
        server.wait_for("Listening on", 240)
        devices = [start_device(bed, number) for number in range(2, DEVICES)]
        server.wait_for(r"update +15 ", 240)
        server.handle.kill()
        server.wait()
        server = start_server(bed, *options)
        assert server.wait(240) == 0, server.text()
        assert any(device.handle.poll() is None for device in devices)
    are_applied_once(tmp_path / "out", len(updates(tmp_path / "out")))
    assert len(updates(tmp_path / "out")) >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_last_update_that_finds_no_cohort_ends_the_run(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        make_certificates(bed)
        options = ("--certificates", "certs", "--clients-min", "5", "--privacy-updates", "1")
        method = ("--strategy", "fedbuff", "--fedbuff.k", "4")
        server = start_server(bed, *options, *NOISE, *method)
        server.wait_for("Listening on", 240)
        for number in range(2, DEVICES):
            start_device(bed, number, late=number == 2)
        server.wait_for(r"update +1 ", 240)
        (tmp_path / "go").touch()
        assert server.wait(240) == 0, server.text()
    reason = json.loads((tmp_path / "out" / "summary.json").read_text())["reason"]
    assert "4 clients may contribute no more, and the others wait for cohorts of 4" in reason
