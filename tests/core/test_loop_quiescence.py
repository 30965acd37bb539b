"""Runs on virtual time end when no event can change anything any more (quiescence)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from fleets import MODEL, grid_of
from policies import updates_of
from requesting import Asks, asking, drifting_app

from raceme.core import events
from raceme.core.events import Ending
from raceme.datasets.drift import Schedule
from raceme.simulation import Device
from raceme.strategies import Plan

LONG = 500.0
"""Time limit of a run that does not detect its quiescence."""


def run(
    devices: Sequence[Device],
    rise: Sequence[float] = (1.0,),
    drift: Schedule | None = None,
    requests: str = "loss",
) -> list[events.Event]:
    """Let clients measure their losses every 10 s; return the events, with the end."""
    seen: list[events.Event] = []
    plan = Plan(eval_every=1000, drift=drift, max_time=LONG)
    grid = grid_of(drifting_app(rise), devices)
    Asks(asking(requests)).run(grid, MODEL, 0, plan=plan, observe=seen.append)
    return seen


def ended(seen: Sequence[events.Event]) -> events.RunEnded:
    last = seen[-1]
    assert isinstance(last, events.RunEnded)
    return last


def test_a_run_ends_when_all_clients_have_measured_and_no_data_will_change() -> None:
    seen = run([Device(), Device(seconds_per_round=3.0)])
    # They measure as soon as they have trained: the second one after 3 s.
    reason = "at rest: no client's loss rises, and no data will change"
    assert ended(seen) == events.RunEnded(3.0, 2, reason, Ending.AT_REST)


def test_data_that_change_with_uploads_are_measured_until_they_change_no_more() -> None:
    seen = run([Device()] * 3, [1.0, 1.2, 1.5, 1.8], Schedule("uploads", (1.0, 2.0, 3.0)))
    assert (ended(seen).updates, ended(seen).ending) == (12, Ending.AT_REST)


def test_clients_whose_changed_data_are_no_harder_are_quiescent() -> None:
    seen = run([Device()] * 3, [1.0, 0.0], Schedule("uploads", (1.0,)))
    assert (ended(seen).updates, ended(seen).ending) == (3, Ending.AT_REST)


def test_data_that_change_with_others_uploads_are_measured_again() -> None:
    # The data of all clients change at slow c1's upload, after c0 has measured.
    devices = [Device(), Device(seconds_per_round=30.0)]
    seen = run(devices, [1.0, 1.2], Schedule("updates", (2.0,)))
    assert [client for _, client, _ in updates_of(seen)].count("c0") == 2
    assert ended(seen).ending is Ending.AT_REST


@pytest.mark.parametrize(
    ("drift", "updates", "ending"),
    [
        (Schedule("seconds", (100.0,)), 2, Ending.AT_REST),
        (Schedule("seconds", every=100.0), 5, Ending.LIMIT),
    ],
)
def test_no_client_is_quiescent_before_the_last_change_by_time(
    drift: Schedule, updates: int, ending: Ending
) -> None:
    seen = run([Device()], [1.0, 1.2, 1.5, 1.8, 2.1, 2.4], drift)
    assert (ended(seen).updates, ended(seen).ending) == (updates, ending)
    assert (ended(seen).time < LONG) is (ending is Ending.AT_REST)


@pytest.mark.parametrize(
    ("online", "updates"),
    [
        # A newcomer; a client that comes back before it
        # has trained; a client that never comes back.
        (((70.0, math.inf),), 2),
        (((0.0, 0.5), (70.0, math.inf)), 2),
        (((0.0, 0.5),), 1),
        # A client that has measured, and will be back, is not waited for.
        (((0.0, 10.0), (400.0, math.inf)), 2),
    ],
)
def test_absent_clients_are_waited_for_unless_they_are_quiescent(
    online: tuple[tuple[float, float], ...], updates: int
) -> None:
    seen = run([Device(), Device(online=online)])
    assert (ended(seen).updates, ended(seen).ending) == (updates, Ending.AT_REST)
    assert ended(seen).time < 90.0


def test_devices_that_come_and_go_for_ever_become_quiescent() -> None:
    comes = Device(seconds_per_round=15.0, mean_online=20.0, mean_offline=30.0)
    seen = run([Device(), *[comes] * 4])
    # A client that loses its work by leaving is waited for, but not one that has measured.
    trained = updates_of(seen)
    assert {client for _, client, _ in trained} == {f"c{i}" for i in range(5)}
    assert (ended(seen).time, ended(seen).ending) == (trained[-1][2], Ending.AT_REST)
    assert {e.client for e in seen if isinstance(e, events.ClientLeft)}


@pytest.mark.parametrize("requests", ["poisson", "fixed"])
def test_clients_that_train_at_fixed_times_are_never_quiescent(requests: str) -> None:
    assert ended(run([Device()], requests=requests)).ending is Ending.LIMIT
