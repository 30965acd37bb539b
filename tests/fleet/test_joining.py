"""A device that is not let in: why, and what it does then; against Flower's Fleet API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fleet_api import FleetApi, fleet_api
from processes import wait_until

from raceme.core.signals import StopSignal
from raceme.fleet.device import DeviceOptions, PatientCalls, _stay_online
from raceme.fleet.tasks import Apps, Interrupter, Tasks
from raceme.flower import fleet_client as fleet
from raceme.flower.fleet_protocol import Keys, generate_keys


@contextmanager
def device(api: FleetApi, keys: Keys) -> Iterator[None]:
    """Let a device try to be online."""
    stop = StopSignal()
    tasks = Tasks(Apps(), {}, Interrupter(0.0))
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


def test_a_device_whose_former_self_was_online_lets_the_strategy_notice(
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
