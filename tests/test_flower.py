"""The same strategy and ClientApp on Flower's own engines: gRPC with real processes, and Ray."""

import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, loopback

from raceme.core.config import SET, all_keys, general_keys
from raceme.core.events import Ending
from raceme.records.record import RunRecord, read_run

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
    """Check that updates were logged one by one, in order, and that all artefacts exist."""
    logged = [int(number) for number in re.findall(r"^update +(\d+)", output, re.MULTILINE)]
    assert logged == list(range(1, updates + 1)), output[-3000:]
    assert {path.name for path in out.iterdir()} >= ARTEFACTS
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == updates
    assert summary["clients"] == clients
    assert summary["accuracy"] is not None
    # In rounds all updates would have the staleness 0.
    assert read_run(out).updates.staleness.max() >= 1


@pytest.mark.slow
def test_casa_over_grpc_with_two_supernodes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as place:
        place.superlink()
        place.supernode(0, of=2)
        place.supernode(1, of=2)
        # As in the README, without the number of devices and groups.
        keys = f'max-updates=4 eval-every=4 out="{out}"'
        run = place.flwr("run", str(ROOT), "--stream", "--run-config", keys)
        run.wait(240)
        check_run(run.text(), out, updates=4, clients=2)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_casa_on_ray_with_four_supernodes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with loopback(tmp_path) as place:
        # The SuperLink that `flwr run .` starts would outlive the test; this one does not.
        place.superlink("--insecure", "--simulation")
        # A single process, in which all greetings precede the tasks: a second one that is still
        # starting would delay its greetings until the first has made all updates.
        keys = f'max-updates=12 clients=4 out="{out}"'
        fleet = f"num-supernodes=4 client-resources-num-cpus={os.cpu_count()}"
        run = place.flwr(
            "run", str(ROOT), "--stream", "--federation-config", fleet, "--run-config", keys
        )
        run.wait(240)
        check_run(run.text(), out, updates=12, clients=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_windows_and_migration_on_ray(tmp_path: Path) -> None:
    data = 'groups="0.5,0.5" model="mclr"'
    runs = {
        "csafl": f"{data} csafl.groups=2 csafl.picked=4 csafl.budget=5 csafl.threshold=0",
        "flexcfl": f"{data} flexcfl.groups=2 flexcfl.pretrain=2 drift=swap-all swap-chance=1.0 "
        "drift-at=2rounds drift-seed=2",
    }
    with loopback(tmp_path) as place:
        place.superlink("--insecure", "--simulation")
        for strategy, options in runs.items():
            out = tmp_path / strategy
            keys = f'strategy="{strategy}" max-rounds=4 clients=4 eval-every=1000 out="{out}" '
            fleet = "num-supernodes=4 client-resources-num-cpus=1"
            run = place.flwr(
                *("run", str(ROOT), "--stream", "--federation-config", fleet),
                *("--run-config", f"{keys} set='{options}'"),
            )
            run.wait_for("Results are in", 240)
            assert run.wait() == 0
            record = read_run(out)
            assert len(record.splits) == 1
            if strategy == "csafl":
                windows = {event.values["window"] for event in record.measured["idle"]}
                assert windows == {1, 2, 3, 4}
            else:
                (change,) = record.data_changes
                before, after = record.assignment(change.time), record.assignment()
                # All four have exchanged their data with a client of the other group.
                assert all(after[client] != before[client] for client in before)


def check_mixtures(record: RunRecord) -> None:
    """Check that all four clients have worked, changed their data, and are in two clusters."""
    clients = {f"client-{number}" for number in range(4)}
    assert set(record.updates.client) == clients
    assert {change.client for change in record.data_changes} == clients
    assert record.summary.ending is Ending.LIMIT
    assert not len(record.rejections.client)
    memberships = record.memberships()
    assert set(memberships) == clients
    # Each client's mixture is estimated separately, from the same start.
    assert len({weights[0] for weights in memberships.values()}) > 1
    for weights in memberships.values():
        assert sum(weights.values()) == pytest.approx(1.0)
        assert set(weights) == {0, 1}
    # The server tests the pre-trained clusters' models on its samples of each distribution.
    last = record.cluster_scores[-1]
    assert min(last.accuracies.values()) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs raceme[simulation]")
def test_mixtures_that_drift_on_ray(tmp_path: Path) -> None:
    data = (
        "partition=rotation-groups groups=2 drift=mixture proxy=60 pretrain=100 local-epochs=2 "
        "model=mlp score-uploads=true"
    )
    # Clients of the first method request work themselves, those of the second work in rounds.
    runs = {
        "cdfl": ("max-updates=24", "cdfl.requests=poisson cdfl.request-seconds=0.5"),
        "fedsoft": ("max-rounds=4", "fedsoft.drawn=3"),
    }
    with loopback(tmp_path) as place:
        place.superlink("--insecure", "--simulation")
        for strategy, (length, options) in runs.items():
            out = tmp_path / strategy
            keys = f'strategy="{strategy}" {length} clients=4 eval-every=4 out="{out}" '
            fleet = "num-supernodes=4 client-resources-num-cpus=1"
            run = place.flwr(
                *("run", str(ROOT), "--stream", "--federation-config", fleet),
                *("--run-config", f"{keys} set='{data} {options}'"),
            )
            run.wait_for("Results are in", 240)
            assert run.wait() == 0
            record = read_run(out)
            check_mixtures(record)
            # Only clients that request work themselves can become stale.
            assert record.updates.staleness.any() == (strategy == "cdfl")


def test_the_flower_app_lists_keys_with_their_defaults() -> None:
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = tree["tool"]["flwr"]["app"]["config"]
    keys = all_keys()
    flat = {key: value for key, value in listed.items() if not isinstance(value, dict)}
    tables = {strategy: options for strategy, options in listed.items() if strategy not in flat}
    flat |= {f"{name}.{key}": value for name, own in tables.items() for key, value in own.items()}
    assert flat.pop(SET) == ""
    # General keys are listed; those of a strategy, a dataset or a partition need not be. Flower
    # accepts listed keys only, so the key `set` takes all others.
    assert flat == {name: keys[name].default for name in flat}
    # Trust is given on the command line only, never by a file.
    assert set(flat) >= set(general_keys()) - {"trust"}
