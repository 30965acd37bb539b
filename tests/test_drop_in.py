"""A user's own Flower app with one of Raceme's strategies, on Flower's own engines."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from adopted import write_quickstart
from processes import Process, loopback
from quickstarts import Net


def check(run: Process, out: Path, rounds: int) -> str:
    """Check that the user's lines were printed, the model loads, and no client raised an error."""
    run.wait_for("SAVED", 400)
    assert run.wait() == 0
    text = run.text()
    assert "Traceback" not in text
    assert "No query function" not in text
    listed = list(range(rounds + 1))
    assert f"ROUNDS {listed}" in text
    assert f"Round {rounds}/{rounds}: " in text
    assert "Accuracy is 'eval_acc'" in text
    assert re.search(r"Finished after \d+\.\d s", text)
    Net().load_state_dict(torch.load(out))
    return text


SIMULATION = """
import os
import sys

folder = sys.argv[1]
sys.path.insert(0, folder)
# Ray's actors import the app too.
os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])

from flwr.simulation import run_simulation
from quickstart.client_app import app as client
from quickstart.server_app import app as server

run_simulation(
    server_app=server,
    client_app=client,
    num_supernodes=6,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_a_quickstart_on_ray(tmp_path: Path) -> None:
    app = write_quickstart(tmp_path / "app", arguments="fraction_train=0.5, gamma=0.02")
    (tmp_path / "simulate.py").write_text(SIMULATION)
    with loopback(tmp_path) as place:
        run = place.start("simulation", [sys.executable, "simulate.py", str(app)])
        text = check(run, tmp_path / "model.pt", 3)
    assert re.findall(r"Round \d/3: (\d+) updates? of", text) == ["3"] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_trees_end_a_run_on_ray_with_one_line(tmp_path: Path) -> None:
    app = write_quickstart(tmp_path / "app", arguments="")
    server = app / "quickstart" / "server_app.py"
    trees = "ArrayRecord([np.frombuffer(b'a tree', np.uint8)])"
    text = server.read_text().replace("initial_arrays=initial_net()", f"initial_arrays={trees}")
    server.write_text(f"import numpy as np\n{text}")
    with loopback(tmp_path) as place:
        place.superlink("--insecure", "--simulation")
        run = place.flwr("run", str(app), "--stream")
        run.wait_for("Trees cannot be averaged", 240)
        run.wait()
        listed = place.flwr("ls", "--format", "json")
        listed.wait()
        assert "finished:failed" in listed.text()
        assert "Traceback" not in run.text()
        assert "Exit Code" not in run.text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quickstart_on_a_superlink_with_supernodes_and_devices(tmp_path: Path) -> None:
    app, out = write_quickstart(tmp_path / "app", arguments=""), tmp_path / "model.pt"
    with loopback(tmp_path) as place:
        place.superlink()
        place.supernode(0, of=2)
        device = place.device(
            *("--insecure", "--device-id", "kitchen"),
            *("--node-config", "partition-id=1 num-partitions=2"),
        )
        run = place.flwr(
            *("run", str(app), "--stream", "--run-config", f'num-server-rounds=2 out="{out}"')
        )
        check(run, out, 2)
        assert "train" in device.text()
        assert "Traceback" not in "".join(process.text() for process in place.processes)
