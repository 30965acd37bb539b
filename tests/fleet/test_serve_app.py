"""`raceme serve APP_DIR`: a user's own Flower app for devices and Flower's SuperNodes."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from flower_apps import QUICKSTARTS, write_app
from processes import Loopback, Process, free_port, loopback, raceme

from raceme.cli.fleet import ServerArguments, serve
from raceme.core.errors import UserError
from raceme.core.signals import StopSignal
from raceme.fleet.device import PatientCalls, StoppedError
from raceme.flower.fleet_client import Endpoint, connect
from raceme.flower.fleet_protocol import generate_keys

APP = QUICKSTARTS / "numpy_app"


def start_server(bed: Loopback, *options: str) -> Process:
    bed.fleet_port, bed.http_port = free_port(), free_port()
    places = ("--address", bed.fleet_address, "--http", bed.http_address, "--metrics", "off")
    return bed.start("serve", raceme("serve", str(APP), *places, "--clients-min", "2", *options))


def start_device(bed: Loopback, number: int, trusted: str = "raceme/numpy-quickstart") -> Process:
    return bed.device(
        *("--insecure", "--trusted-app", trusted, "--device-id", f"device-{number}"),
        *("--node-config", f"partition-id={number} num-partitions=2"),
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_app_with_a_method_in_the_place_of_its_strategy(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        method = ("--strategy", "casa", "--casa.gamma", "0.2", "--out", "out")
        server = start_server(bed, *method, "--run-config", "num-server-rounds=2 local-epochs=5")
        devices = [start_device(bed, number) for number in range(2)]
        assert server.wait(200) == 0, server.describe()
        assert "casa replaces FedAvg" in server.text()
        assert "Traceback" not in server.text()
        assert all("train: done" in device.text() for device in devices)
    with closing(sqlite3.connect(tmp_path / "out" / "run.sqlite")) as store:
        assert store.execute("SELECT count(*) FROM updates").fetchone() == (4,)
    # The app's own ServerApp has saved the result.
    (weights,) = np.load(tmp_path / "final_model.npz").values()
    assert np.abs(weights - np.arange(8) / 8).max() < 0.3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_app_with_its_own_strategy_beside_a_stock_supernode(tmp_path: Path) -> None:
    with loopback(tmp_path) as bed:
        server = start_server(bed)
        start_device(bed, 0)
        bed.supernode(1, of=2)
        assert server.wait(200) == 0, server.describe()
        assert "Starting FedAvg strategy" in server.text()
        assert "Traceback" not in server.text()
    (weights,) = np.load(tmp_path / "final_model.npz").values()
    assert np.abs(weights).max() > 0.1


def test_an_impossible_app_is_refused_before_devices_join(tmp_path: Path) -> None:
    for keys, app, said in (
        ({}, tmp_path, "no pyproject.toml"),
        ({"seed": 1}, APP, "name a method with --strategy"),
        ({"strategy": "casa", "dataset": "digits"}, APP, "only keys of the strategy"),
        ({}, write_app(tmp_path, "has_no_fit_name", "pass"), "cannot be bundled: .* is invalid"),
        ({"strategy": "caza"}, APP, "Unknown strategy 'caza'"),
    ):
        with pytest.raises(UserError, match=said):
            serve(keys, ServerArguments(), app)
    with pytest.raises(UserError, match="--keep-versions is for Raceme's own app"):
        serve({}, ServerArguments(keep_versions=3), APP)
    with pytest.raises(UserError, match="APP_DIR"):
        serve({"strategy": "casa"}, ServerArguments(run_config=("rounds=1",)))


def test_a_serverapp_that_starts_nothing_for_a_method_to_replace(tmp_path: Path) -> None:
    app = write_app(tmp_path, "servesnothing", "pass")
    with pytest.raises(UserError, match="starts no strategy"):
        serve(
            {"strategy": "casa", "out": str(tmp_path / "out")},
            ServerArguments(address=f"127.0.0.1:{free_port()}", metrics="off"),
            app,
        )
    assert not (tmp_path / "out" / "run.sqlite").exists()


def test_a_serverapp_that_trains_without_a_strategy_is_refused_before_it_does(
    tmp_path: Path,
) -> None:
    app = write_app(
        tmp_path,
        "trainsalone",
        """
while not list(grid.get_node_ids()):
    sleep(0.1)
list(grid.send_and_receive(messages(grid)))
""",
    )
    address, stop, received = f"127.0.0.1:{free_port()}", StopSignal(), list[object]()
    endpoint = Endpoint(address, insecure=True)
    calls = PatientCalls(stop, endpoint)

    def take_part() -> None:
        keys = generate_keys()
        with suppress(StoppedError), connect(endpoint, keys, calls, register=True) as link:
            while not stop.is_set():
                received.append(link.receive(0.5))

    node = Thread(target=take_part)
    node.start()
    try:
        with pytest.raises(UserError, match="starts no strategy"):
            serve(
                {"strategy": "casa", "out": str(tmp_path / "out")},
                ServerArguments(address=address, metrics="off"),
                app,
            )
    finally:
        stop.set()
        node.join(30)
    assert not any(received)
