"""Groups that arrive together, traced by hand: local steps, and waiting clients."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from policies import Bench, run

from raceme.core import events
from raceme.simulation import Device
from raceme.strategies import FedCompass, FedCompassParameters
from raceme.strategies.fedcompass import ByArrival, steps_until


def bench(clients: int = 3) -> Bench:
    return Bench(ByArrival(fewest=2, most=10, patience=1.5, renewal=0.9), clients)


def steps(made: Bench) -> dict[str, int]:
    assert isinstance(made.policy, ByArrival)
    return {name: made.policy.steps_of(name) for name in made.tasks}


def two_in_a_group() -> Bench:
    """Let c0 found a group at 10 s that c1 joins at 15 s; the group is expected at 20 s."""
    made = bench()
    assert made.work(0.0) == ["c0", "c1", "c2"]
    assert steps(made) == {"c0": 10, "c1": 10, "c2": 10}
    # A client's first update is applied alone; c0 takes a second per step.
    assert made.answer("c0", 10.0) == ["c0"]
    assert made.policy.wake_at() == math.inf
    assert made.work(10.0) == ["c0"]
    assert made.policy.wake_at() == 25.0
    assert made.answer("c1", 15.0) == ["c1"]
    assert made.work(15.0) == ["c1"]
    # 5 s at 1.5 s per step.
    assert steps(made)["c1"] == 3
    return made


def test_who_is_early_waits_for_the_group() -> None:
    made = two_in_a_group()
    assert made.answer("c0", 20.0) == []
    assert made.work(20.0) == []
    assert made.answer("c1", 21.0) == ["c0", "c1"]
    # Both start again, the fastest first: c1's three steps took 6 s, v = 0.1 · 1.5 + 0.9 · 2.
    assert made.work(21.0) == ["c0", "c1"]
    assert made.policy.state.seconds == pytest.approx({"c0": 1.0, "c1": 1.95})
    # Expected at 31 s: 10 s at 1.95 s per step.
    assert steps(made) == {"c0": 10, "c1": 5, "c2": 10}


def test_a_client_that_fits_in_no_group_founds_one_that_meets_the_next_work_of_another() -> None:
    made = two_in_a_group()
    # 2.8 s per step (28 s for ten); the group is expected earlier.
    made.answer("c0", 20.0)
    made.answer("c1", 20.0)
    made.work(21.0)
    assert made.answer("c2", 28.0) == ["c2"]
    assert made.work(28.0) == ["c2"]
    # At the latest at 36 s, and ten steps of its fastest: (36 + 10 − 28) / 2.8 = 6.4.
    assert steps(made)["c2"] == 6
    assert made.policy.state.groups[2].expected == pytest.approx(28 + 6 * 2.8)
    assert made.policy.state.groups[2].latest == pytest.approx(28 + 1.5 * 6 * 2.8)


def test_the_next_work_of_a_group_is_as_fast_as_its_fastest_member() -> None:
    made = bench()
    made.work(0.0)
    # 1.5 s per step: expected at 25 s, at the latest at 32.5 s. c0 takes 1.1 s, and joins.
    made.answer("c1", 10.0)
    made.policy.state.seconds["c1"] = 1.5
    assert made.work(10.0) == ["c1"]
    made.answer("c0", 14.0)
    made.policy.state.seconds["c0"] = 1.1
    assert made.work(14.0) == ["c0"]
    assert made.policy.state.groups[0].fastest == 1.1
    made.answer("c2", 24.5)
    # At the latest at 32.5 s: (32.5 + 11 − 24.5) / 2.45 = 7.8.
    made.work(24.5)
    assert steps(made)["c2"] == 7


def test_a_group_that_is_over_is_not_met() -> None:
    made = two_in_a_group()
    # The group's deadline was 25 s, but the scheduler has not been woken since.
    made.answer("c2", 26.0)
    made.work(26.0)
    assert steps(made)["c2"] == 10


def test_what_comes_late_counts_with_the_next_group() -> None:
    made = two_in_a_group()
    assert made.answer("c0", 20.0) == []
    assert made.wake(25.0) == ([], ["c0"])
    assert made.work(25.0) == ["c0"]
    assert made.answer("c1", 26.0) == []
    # c1 does not wait: v = 0.15 + 0.9 · 11 / 3, and the new group is expected at 35 s.
    assert made.work(26.0) == ["c1"]
    assert steps(made)["c1"] == 2
    assert made.answer("c1", 34.0) == []
    assert made.answer("c0", 35.0) == ["c1", "c0", "c1"]


def test_a_group_does_not_wait_for_who_is_gone_or_has_failed() -> None:
    made = two_in_a_group()
    assert made.answer("c0", 20.0) == []
    assert made.leave("c1", 20.5) == ["c0"]
    assert made.work(21.0) == ["c0"]
    made.come_back("c1", 22.0)
    # 1.5 s per step, and 9 s left.
    assert made.work(22.0) == ["c1"]
    assert steps(made)["c1"] == 6
    failed = two_in_a_group()
    failed.answer("c0", 20.0)
    released = failed.policy.lost(failed.tasks["c1"], 20.5)
    assert [one.task.client for one in released] == ["c0"]


def test_what_a_client_has_brought_is_kept_when_it_goes() -> None:
    made = two_in_a_group()
    assert made.answer("c0", 20.0) == []
    assert made.leave("c0", 20.5) == []
    assert made.answer("c1", 21.0) == ["c0", "c1"]


def test_few_places_are_dealt_out_by_chance() -> None:
    made = bench(5)
    context = made.selection_context(0.0)
    assert len(made.policy.choose(context)) == 5
    few = bench(5)
    assert (
        len(few.policy.choose(type(context)(0.0, few.fleet, few.idle, context.rng, places=2))) == 2
    )


def test_a_client_that_needs_no_time_fits_in_anywhere() -> None:
    assert steps_until(3.0, 1.0, 0.0) > 10**6
    assert steps_until(3.0, 1.0, 0.3) == 6


def test_fast_and_slow_devices_arrive_together() -> None:
    """At five times the speed, five times the steps: all start together, without staleness."""
    devices = [Device(seconds_per_round=seconds) for seconds in (1.0, 1.0, 5.0, 5.0)]
    seen = run(FedCompass(FedCompassParameters(min_steps=20, max_steps=100)), devices, 120)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    begun = Counter(event.dispatched_at for event in applied if event.dispatched_at > 60.0)
    assert set(list(begun.values())[:-1]) == {4}
    assert all(event.staleness == 0 for event in applied if event.dispatched_at > 60.0)
