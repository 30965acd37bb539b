"""Real devices that decide when they speak: by the clock, and when their data have changed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from bundles import write_app
from nodes import write_device
from processes import Process, loopback, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SERVER = """
from flwr.serverapp import ServerApp

from raceme import models
from raceme.config import RunConfig
from raceme.protocol.events import UpdateApplied, UpdateRejected
from raceme.server.requests import OnRequest, RequestParameters
from raceme.strategies import FedAsync, Plan

app = ServerApp()


class Invites(FedAsync):
    def policy(self):
        return OnRequest(RequestParameters("device"))


@app.main()
def main(grid, context):
    seen = []

    def observe(event):
        if isinstance(event, UpdateApplied | UpdateRejected):
            seen.append(event)
            print(f"{type(event).__name__} {event.client} {event.time:.2f}", flush=True)

    def enough():
        return "enough" if sum(event.client == "drifter" for event in seen) == 2 else ""

    initial = models.initial_arrays(RunConfig.from_mapping(dict(context.run_config)))
    Invites().start(
        grid, initial, 0, plan=Plan(max_time=300, eval_every=10**6), observe=observe,
        stop_check=enough,
    )
    print("THE RUN IS OVER", flush=True)
"""

CLIENT = "from raceme import client_app\n\napp = client_app.app\n"


def uploads(run: Process, client: str) -> list[float]:
    """Return when the updates of a client were applied, by the server's clock."""
    return [float(time) for time in re.findall(rf"UpdateApplied {client} ([\d.]+)", run.text())]


def replace_labels(path: Path) -> None:
    """Replace a data file by one with the same inputs and other labels."""
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["y_train"] = (arrays["y_train"] + 1) % 3
    np.savez(path.with_suffix(".new.npz"), **arrays)
    os.replace(path.with_suffix(".new.npz"), path)


def test_devices_speak_by_their_clock_and_when_their_data_have_changed(tmp_path: Path) -> None:
    interval = 3.0
    wishes = {
        "ticker": ("--when", f"interval={interval}s"),
        "drifter": ("--when", "drift=5%", "--look", "1s"),
    }
    for name in wishes:
        write_device(tmp_path / f"{name}.npz")
    keys = {"dataset": "npz", "model": "mclr", "data-file": str(tmp_path / "ticker.npz")}
    lines = "\n".join(f"{key} = '{value}'" for key, value in keys.items())
    app = write_app(tmp_path / "app", CLIENT, SERVER, f"{lines}\nlocal-epochs = 30\nlr = 0.5")
    with loopback(tmp_path) as place:
        place.superlink()
        devices = {}
        for name, when in wishes.items():
            node = f"data-file='{tmp_path}/{name}.npz'"
            known = ("--insecure", "--device-id", name, "--node-config", node)
            devices[name] = place.device(*known, *when)
        for device in devices.values():
            device.wait_for("online at", 120)
        run = place.flwr("run", str(app), "here", "--stream")
        run.wait_for("UpdateApplied drifter", 120)
        # While the data stay as they are the drifter says nothing, however often the other speaks.
        wait_until(lambda: len(uploads(run, "ticker")) >= 4, 120, run.describe)
        assert len(uploads(run, "drifter")) == 1
        replace_labels(tmp_path / "drifter.npz")
        wait_until(lambda: len(uploads(run, "drifter")) == 2, 60, devices["drifter"].describe)
        run.wait_for("THE RUN IS OVER", 60)
        assert len(uploads(run, "drifter")) == 2
        assert "the loss rose from" in devices["drifter"].text()
        assert "UpdateRejected" not in run.text()
        # At once it would have spoken many times in an interval, on any machine.
        times = uploads(run, "ticker")
        assert len(times) < 2 * (times[-1] - times[0]) / interval + 2
        assert [device.stop() for device in devices.values()] == [0, 0]
