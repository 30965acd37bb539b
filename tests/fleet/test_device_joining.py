"""A device that the server refuses: reasons and reactions, against Flower's Fleet API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from fleet_api import FleetApi, fleet_api
from nodes import write_device
from processes import free_port, loopback, raceme, wait_until

from raceme.core.signals import StopSignal
from raceme.fleet.device import DeviceOptions, PatientCalls, _stay_online
from raceme.fleet.tasks import Apps, Interrupter, TaskRunner
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_protocol import Keys, generate_keys


@contextmanager
def device(api: FleetApi, keys: Keys) -> Iterator[None]:
    """Let a device try to join."""
    stop = StopSignal()
    tasks = TaskRunner(Apps(), {}, Interrupter(0.0))
    options = DeviceOptions(api.endpoint, lambda: keys)
    thread = threading.Thread(target=_stay_online, args=(options, tasks, stop, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], bool]]:
    logger = logging.getLogger("raceme.device")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield lambda text: text in caplog.text
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


def test_a_device_that_has_just_been_registered_is_online_at_once(
    said: Callable[[str], bool],
) -> None:
    keys = generate_keys()
    with fleet_api() as api, device(api, keys):
        wait_until(lambda: said("not accepted: this key is not registered: copy its .pub"), 20)
        assert said("and device-keys, if the server has that file")
        api.register(keys)
        wait_until(lambda: said("online at"), 20)
    assert not said("joining again")
    assert not said("an earlier process")


def test_the_strategy_notices_a_device_that_joins_again(
    said: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raceme.fleet.device._ABSENCE_SECONDS", 0.1)
    keys = generate_keys()
    with fleet_api() as api, ExitStack() as former:
        api.register(keys)
        calls = PatientCalls(StopSignal(), api.endpoint)
        former.enter_context(fleet.connect(api.endpoint, keys, calls, register=False))
        with device(api, keys):
            wait_until(lambda: said("not accepted: an earlier process of this device"), 20)
            assert not said("is not registered")
            former.close()
            wait_until(lambda: said("joining again: an earlier process of this device was"), 20)
            wait_until(lambda: said("online at"), 20)


def test_a_device_joins_again_when_the_superlink_has_forgotten_it(
    said: Callable[[str], bool],
) -> None:
    address, keys = f"127.0.0.1:{free_port()}", generate_keys()
    with ExitStack() as stack:
        with fleet_api(address=address) as api:
            node = api.register(keys)
            stack.enter_context(device(api, keys))
            wait_until(lambda: said(f"online at {address} as node {node}"), 20)
        wait_until(lambda: said("cannot be reached, trying again"), 20)
        with fleet_api(address=address) as api:
            node = api.register(keys)
            wait_until(lambda: said("does not know this node"), 60)
            wait_until(lambda: said(f"online at {address} as node {node}"), 60)
            stack.close()


def test_data_that_do_not_fit_are_refused_at_the_start(tmp_path: Path) -> None:
    write_device(tmp_path / "sample.npz")
    wide = {name: np.ones((4, 5)) for name in ("x_train", "x_test")}
    classes = {name: np.arange(4) % 3 for name in ("y_train", "y_test")}
    np.savez(tmp_path / "wide.npz", **wide, **classes)
    with loopback(tmp_path) as place:
        place.fleet_port = free_port()
        keys = ["--dataset", "npz", "--data-file", "sample.npz", "--out", "out", "--metrics", "off"]
        server = place.start("serve", raceme("serve", "--address", place.fleet_address, *keys))
        wide_device, lost = (
            place.device("--insecure", "--device-id", name, *config)
            for name, config in (
                ("kitchen", ["--node-config", "data-file='wide.npz'"]),
                ("cellar", []),
            )
        )
        server.wait_for("Listening on", 240)
        said = (
            "Your file wide.npz has 5 features and 3 classes, the server's sample 4 features and 3"
        )
        wide_device.wait_for(said, 180)
        server.wait_for(f"A client is refused: .*{said}", 60)
        # The server's own file is where this device would find it.
        lost.wait_for("This device has no data file: start it with --node-config", 180)
        assert "done in" not in wide_device.text() + lost.text()
