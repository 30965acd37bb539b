"""Failures around a server: each is reported in one line, and no update is lost."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import free_port, loopback, raceme

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.fleet.serve import ServeOptions, prepare, serve
from raceme.records.folder import only_writer
from raceme.records.store import read_events
from raceme.runs.experiment import simulate

KEYS: dict[str, Any] = {"strategy": "fedasync", "dataset": "digits", "clients": 2, "eval-every": 99}
KEYS |= {"groups": "0.5,0.5"}


def served(out: Path) -> str:
    """Return the error of a server that cannot use a folder."""
    options = ServeOptions(f"127.0.0.1:{free_port()}", metrics="off")
    with pytest.raises(UserError) as refused:
        serve(prepare({**KEYS, "max-updates": 9, "out": str(out)}), options)
    (line,) = str(refused.value).splitlines()
    return line


def test_a_fleet_is_as_large_as_training_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where devices have their own data, the server's dataset has a single client, its sample."""
    ones, classes = np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])
    arrays = {"x_train": ones, "y_train": classes, "x_test": ones, "y_test": classes}
    np.savez(tmp_path / "sample.npz", **arrays, num_classes=2)
    keys = {"dataset": "npz", "data-file": str(tmp_path / "sample.npz"), "out": str(tmp_path / "o")}
    for strategy, said in (("panicle", ""), ("casa", "3 clients are too few for CASA")):
        caplog.clear()
        prepare({**keys, "strategy": strategy}, clients_min=3)
        assert "alone" not in caplog.text
        assert said in caplog.text
        assert bool(caplog.text) is bool(said)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder with a checkpoint of a simulated run."""
    out = tmp_path_factory.mktemp("other") / "out"
    keys = {**KEYS, "max-updates": 2, "workers": "0", "checkpoint-every": 1, "out": str(out)}
    simulate(RunConfig.from_mapping(keys))
    return out


def test_a_folder_that_a_server_app_of_a_superlink_writes_to_is_refused(simulated: Path) -> None:
    before = read_events(simulated)
    with only_writer(simulated, 0.0):
        assert "Another process is still writing to" in served(simulated)
    assert read_events(simulated) == before


def test_a_checkpoint_of_another_kind_of_server_is_refused(simulated: Path) -> None:
    before = read_events(simulated)
    assert "it belongs to a run of `raceme run`: resume it with that" in served(simulated)
    assert read_events(simulated) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_ends_the_server_in_order_and_the_same_command_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["serve", "--strategy", "fedasync", "--dataset", "digits", "--eval-every", "99"]
    command += ["--clients", "1", "--groups", "1", "--max-updates", "12", "--checkpoint-every", "1"]
    with loopback(tmp_path) as bed:
        bed.fleet_port = free_port()
        command += ["--address", bed.fleet_address, "--out", "out", "--metrics", "off"]
        server = bed.start("serve", raceme(*command))
        device = bed.device("--insecure", "--node-config", "partition-id=0 num-partitions=1")
        server.wait_for(r"update +4 ", 240)
        # Limits the size of files, like a full disk.
        resource.prlimit(server.handle.pid, resource.RLIMIT_FSIZE, (2000, 2000))
        assert server.wait(240) == 1
        assert "run.sqlite can no longer be written" in server.text()
        assert "could not be written (" in server.text().splitlines()[-1]
        assert "Traceback" not in server.text()
        again = bed.start("serve", raceme(*command))
        assert again.wait(240) == 0
        # The device has waited meanwhile.
        assert device.text().count("online at") == 1
    updates = [e.seq for e in read_events(out) if type(e).__name__ == "UpdateApplied"]
    assert updates == list(range(1, 13))
