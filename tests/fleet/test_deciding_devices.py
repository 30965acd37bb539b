"""CDFL on real devices that decide when to upload: by the clock, and when their data change."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from processes import ROOT, Process, loopback, wait_until

from raceme.records.record import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLASSES = 3
INTERVAL = 2.0
WISHES = {
    "ticker": ("--when", f"interval={INTERVAL}s"),
    "rambler": ("--when", f"poisson={INTERVAL}s"),
    "drifter": ("--when", "drift=10%", "--look", "1s"),
}
"""The option of each device that determines its request times."""
DISTRIBUTIONS = {"ticker": 0, "rambler": 1, "drifter": 0}


def samples(
    count: int, distribution: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Draw samples: both distributions have the same inputs, with different labels."""
    kind = np.arange(count) % CLASSES
    x = 2.0 * np.eye(CLASSES, 4)[kind] + np.random.default_rng(seed).normal(0, 0.3, (count, 4))
    return x, (kind + distribution) % CLASSES


def write_proxies(folder: Path) -> None:
    """Write the server's proxy set of each distribution."""
    folder.mkdir()
    for distribution in (0, 1):
        parts = {"": 30, "_train": 30, "_test": 15}
        arrays = {}
        for seed, (part, count) in enumerate(parts.items()):
            drawn = samples(count, distribution, 10 * distribution + seed)
            arrays[f"x{part}"], arrays[f"y{part}"] = drawn
        np.savez(folder / f"{distribution}.npz", **arrays)


def write_data(path: Path, distribution: int) -> None:
    """Replace a device's data file atomically."""
    x_train, y_train = samples(30, distribution, 20)
    x_test, y_test = samples(15, distribution, 21)
    new = path.with_suffix(".new.npz")
    np.savez(new, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    os.replace(new, path)


def spoken(run: Process) -> list[str]:
    """Return the devices in the order of their logged updates."""
    return re.findall(r"^update +\d+ +(\w+) ", run.text(), re.MULTILINE)


def others_since_the_drifter(run: Process) -> list[str]:
    """Return the devices whose updates came after the drifter's last one."""
    names = spoken(run)[::-1]
    return names[: names.index("drifter")]


def test_cdfl_with_devices_that_speak_by_the_clock_and_when_their_data_change(
    tmp_path: Path,
) -> None:
    out, proxies = tmp_path / "out", tmp_path / "proxies"
    write_proxies(proxies)
    for name, distribution in DISTRIBUTIONS.items():
        write_data(tmp_path / f"{name}.npz", distribution)
    with loopback(tmp_path) as place:
        place.superlink()
        devices = {}
        for name, when in WISHES.items():
            node = f"data-file='{tmp_path}/{name}.npz'"
            known = ("--insecure", "--device-id", name, "--node-config", node)
            devices[name] = place.device(*known, *when)
        for device in devices.values():
            device.wait_for("online at", 120)
        # The server only has its proxy sets, which determine the shape of the model.
        keys = (
            f"strategy='cdfl' dataset='npz' proxy='{proxies}' pretrain=30 local-epochs=10 "
            f"max-updates=24 out='{out}' set=\"cdfl.requests='device'\""
        )
        run = place.flwr("run", str(ROOT), "here", "--stream", "--run-config", keys)
        run.wait_for(r"update +\d+ +drifter", 120)
        # While its data do not change, the drifter uploads nothing, however often others do.
        wait_until(lambda: len(others_since_the_drifter(run)) >= 6, 120, run.describe)
        assert spoken(run).count("drifter") == 1
        write_data(tmp_path / "drifter.npz", 1)
        wait_until(lambda: spoken(run).count("drifter") == 2, 60, devices["drifter"].describe)
        run.wait_for("Results are in", 120)
        assert run.wait() == 0
        assert "the loss rose from" in devices["drifter"].text()
        assert [device.stop() for device in devices.values()] == [0] * len(devices)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["ending"], summary["updates"], summary["clusters"]) == ("limit", 24, 2)
    assert summary["rejected_updates"] == 0
    assert summary["cluster_accuracies"] == {"0": 1.0, "1": 1.0}
    record = read_run(out)
    clients = record.updates.client
    assert list(clients) == spoken(run)
    assert {"ticker", "rambler", "drifter"} == set(clients)
    assert sum(clients == "drifter") == 2
    for placed in record.placements:
        assert sum(placed.weights.values()) == pytest.approx(1.0)
    assert record.assignment() == {"ticker": 0, "rambler": 1, "drifter": 1}
    # All start in the middle between the clusters; each upload carries its client's own estimate.
    shares = {
        name: [placed.weights[1] for placed in record.placements if placed.client == name]
        for name in DISTRIBUTIONS
    }
    assert [own[0] for own in shares.values()] == [0.5, 0.5, 0.5]
    assert max(shares["ticker"][1:]) < 0.1 < 0.9 < min(shares["rambler"][1:])
    first, second = shares["drifter"][1:]
    assert first < 0.1 < 0.9 < second
    # The others have uploaded more often than `oldest` permits since it received its model: the
    # upload is answered, and changes no cluster.
    staleness, weights = (
        column[clients == "drifter"].tolist()
        for column in (record.updates.staleness, record.updates.weight)
    )
    assert staleness[1] >= 6
    # On a busy machine its first upload may be as late.
    late = [uploads + 1 > len(DISTRIBUTIONS) for uploads in staleness]
    assert weights == [0.0 if is_late else 0.025 for is_late in late]
    # Without waiting it would have uploaded many times in an interval, on any machine.
    times = record.updates.time[clients == "ticker"]
    assert len(times) < 2 * (times[-1] - times[0]) / INTERVAL + 2
