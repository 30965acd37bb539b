"""Ids bound to keys, with real devices: TLS, registered keys, and a thief."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from processes import ROOT, Loopback, Process, free_port, loopback, raceme, wait_until

from raceme.fleet.certificates import make_certificates
from raceme.records.control import command

TASK = r"train task \d+: done"


def device(bed: Loopback, key: str, claimed: str) -> Process:
    folder = bed.home / "certs"
    return bed.device(
        *("--root-certificates", f"{folder}/ca.crt", "--key", f"{folder}/devices/{key}"),
        *("--device-id", claimed, "--node-config", "partition-id=0 num-partitions=2"),
    )


@pytest.mark.slow
def test_a_device_has_the_id_of_its_key_and_keeps_its_place(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", ["127.0.0.1"], ["kitchen", "garden"])
    run = ["--strategy", "fedasync", "--dataset", "digits", "--clients", "2", "--eval-every", "999"]
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        address = ["--address", bed.fleet_address, "--metrics", "off", "--certificates", "certs"]
        server = bed.start("serve", raceme("serve", *address, *run, "--out", "out"))
        server.wait_for("Listening on", 240)
        garden_key = ["--root-certificates", "certs/ca.crt", "--key", "certs/devices/garden"]
        part = ["--node-config", "partition-id=0 num-partitions=2"]
        garden = bed.device(*garden_key, *part)
        garden.wait_for(TASK, 180)
        second = bed.device(*garden_key, *part, "--device-id", "kitchen")
        assert second.wait(180) == 2
        said = "It states the id 'kitchen', but its key is that of 'garden'"
        assert said in second.text().splitlines()[-1]
        assert said in server.text()
        done = len(re.findall(TASK, garden.text()))
        wait_until(lambda: len(re.findall(TASK, garden.text())) > done + 1, 60, garden.describe)
        assert [row["device"] for row in command(tmp_path / "out", "devices")] == ["garden"]


@pytest.mark.slow
def test_a_thief_with_a_registered_key_gets_nothing_and_locks_nobody_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as bed:
        folder = bed.secure_superlink("kitchen", "garden")
        for name in ("kitchen", "garden"):
            bed.register(name)
        # The thief joins while the device that it claims to be is offline.
        thief = device(bed, "garden", "kitchen")
        thief.wait_for("online at")
        settings = "strategy='fedasync' groups='0.5,0.5' max-updates=4 eval-every=10 "
        settings += f"device-keys='{folder}/device-keys' out='{out}'"
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        run.wait_for("says it is 'kitchen', but its key is that of 'garden'", 180)
        assert "on trust" not in run.text()
        thief.wait_for("no work: .*'kitchen', but its key is that of 'garden'", 60)
        right = device(bed, "kitchen", "kitchen")
        right.wait_for(TASK, 180)
        run.wait_for("Results are in", 180)
        assert "train task" not in thief.text()
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        assert connection.execute("SELECT DISTINCT client FROM updates").fetchall() == [
            ("kitchen",)
        ]
        assert connection.execute("SELECT client FROM refused_claims").fetchall() == [("kitchen",)]
    assert json.loads((out / "summary.json").read_text())["refused_claims"] == 1


@pytest.mark.slow
def test_without_a_list_of_keys_a_run_says_that_it_trusts(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        bed.superlink()
        bed.device("--insecure", "--node-config", "partition-id=0 num-partitions=2")
        settings = f"strategy='fedasync' groups='0.5,0.5' max-updates=1 out='{tmp_path}/out'"
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        run.wait_for("Devices' ids are taken on trust", 120)
        run.wait_for("Results are in", 180)
