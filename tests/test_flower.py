"""The same strategy and ClientApp on Flower's own engines: gRPC with real processes, and Ray."""

import importlib.util
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from superlink import REPOSITORY, flwr_run, free_ports, superlink, supernode

from raceme.reporting.record import read_run

ARTEFACTS = {
    "accuracy.png",
    "clusters",
    "clusters.png",
    "config.toml",
    "devices.png",
    "run.log",
    "run.sqlite",
    "similarity.png",
    "summary.json",
}


def check_run(output: str, out: Path, updates: int, clients: int) -> None:
    """Updates were logged one by one, in order, and all artefacts are there."""
    logged = [int(number) for number in re.findall(r"^update +(\d+)", output, re.MULTILINE)]
    assert logged == list(range(1, updates + 1)), output[-3000:]
    assert {path.name for path in out.iterdir()} == ARTEFACTS
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == updates
    assert summary["clients"] == clients
    assert summary["accuracy"] is not None
    times = read_run(out).updates.time
    assert len(set(times.tolist())) > updates // 2, "updates are to arrive one by one"


def test_casa_over_grpc_with_two_supernodes(tmp_path: Path) -> None:
    home, out = tmp_path / "flwr", tmp_path / "out"
    with (
        superlink(home, tmp_path) as (_, fleet),
        supernode(home, tmp_path, fleet, 0, of=2),
        supernode(home, tmp_path, fleet, 1, of=2),
    ):
        output = flwr_run(
            home, f'max-updates=6 groups="0.5,0.5" clients=2 eval-every=3 out="{out}"'
        )
    check_run(output, out, updates=6, clients=2)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_casa_on_ray_with_four_supernodes(tmp_path: Path) -> None:
    home, out = tmp_path / "flwr", tmp_path / "out"
    http, control = free_ports(2)
    home.mkdir()
    # `flwr run` starts a local SuperLink that stays alive: on ports of this test's own, it is
    # known by them at the end.
    os.environ["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = str(http)
    os.environ["FLWR_LOCAL_CONTROL_API_PORT"] = str(control)
    try:
        output = flwr_run(
            home,
            f'max-updates=20 clients=4 out="{out}"',
            "--federation-config",
            "num-supernodes=4 client-resources-num-cpus=1",
        )
    finally:
        del os.environ["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
        del os.environ["FLWR_LOCAL_CONTROL_API_PORT"]
        listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            if "flower-superlink" in line and f"--port {http}" in line:
                os.kill(int(line.split()[0]), signal.SIGTERM)
    check_run(output, out, updates=20, clients=4)


def test_the_flower_app_lists_every_key_with_its_default() -> None:
    import tomllib

    from raceme.config import SET, all_keys

    tree = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    listed = tree["tool"]["flwr"]["app"]["config"]
    flat = {key: value for key, value in listed.items() if not isinstance(value, dict)}
    assert flat.pop(SET) == ""
    keys = {key: default for key, (default, _) in all_keys().items()}
    assert flat == {key: default for key, default in keys.items() if "." not in key}
    for strategy, options in listed.items():
        if isinstance(options, dict):
            expected = {k.split(".")[1]: d for k, d in keys.items() if k.startswith(f"{strategy}.")}
            assert options == expected
