"""ACE and ACED: the mean of the latest gradients by hand, and the bound on their age."""

from typing import Any

import numpy as np
import pytest
from clustered import (
    at_version,
    check_it_can_be_restored,
    round_of,
    run_on,
    step,
    three_groups,
    update,
    with_clients,
    with_statistics,
)
from runs import of

from raceme.core import events
from raceme.strategies import ACE, ACED, ACEDParameters, ACEParameters


def test_the_start_and_two_arrivals_by_hand() -> None:
    made = with_clients(ACE(), 3)
    applied = round_of(made, (3, 0), (0, 3), (3, 3))
    # One step along the mean, scaled to three arrivals, like a round of federated averaging.
    assert made.models[0].vector.tolist() == [2, 2]
    assert [what.weight for what in applied] == pytest.approx([1 / 3] * 3)
    assert [what.staleness for what in applied] == [0, 0, 0]
    # Δ = (0, 9) for (3, 0): the mean is (0 + 0 + 3, 9 + 3 + 3) / 3 = (1, 5), a third of which.
    assert step(made, "c0", 2, 11).weight == pytest.approx(1 / 3)
    assert made.models[0].vector == pytest.approx([2 + 1 / 3, 2 + 5 / 3])
    step(made, "c1", *(made.models[0].vector + np.array([3, 0])))
    # (0 + 3 + 3, 9 + 0 + 3) / 3 = (2, 4).
    assert made.models[0].vector == pytest.approx([3, 5])


def test_seen_starts_at_once_with_the_mean_of_those_seen() -> None:
    made = with_clients(ACE(ACEParameters(start="seen", server_lr=1.5)), 3)
    step(made, "c0", 2, 0)
    # 1.5 / 3 of the only one.
    assert made.models[0].vector.tolist() == [1, 0]
    step(made, "c1", 1, 4)
    assert made.models[0].vector.tolist() == [1.5, 1]


def test_aced_on_both_sides_of_the_delay() -> None:
    made = with_clients(ACED(ACEDParameters(start="seen", delay=2, server_lr=3.0)), 3)
    step(made, "c0", 4, 0)
    assert made.models[0].vector.tolist() == [4, 0]
    # Its update has version 0, the model version 1, then 2: both gradients still count.
    step(made, "c1", 4, 2)
    assert made.models[0].vector.tolist() == [6, 1]
    step(made, "c1", 6, 3)
    # Mean of (4, 0) and c1's previous gradient (0, 2).
    assert made.models[0].vector.tolist() == [8, 2]
    assert made.state.counted == {"c0": True, "c1": True}
    # At version 3 the gradient of version 0 is too old; that of c1 has version 2.
    step(made, "c2", 8, 4)
    assert made.models[0].vector.tolist() == [8, 4]
    assert made.state.counted == {"c1": True, "c2": True}


def test_aced_takes_no_step_if_all_are_too_old() -> None:
    made = with_clients(ACED(ACEDParameters(start="seen", delay=1)), 3)
    one = update(made, "c0", 5, 5)
    at_version(made, 2)
    applied = made.applied([one])[0]
    assert (applied.weight, applied.staleness) == (0.0, 2)
    assert made.models[0].version == 2
    assert made.models[0].vector.tolist() == [0, 0]


@pytest.mark.parametrize(("clock", "counts"), [("trained", False), ("sent", True)])
def test_the_clock_of_aced(clock: str, counts: bool) -> None:
    made = with_clients(ACED(ACEDParameters(start="seen", delay=1, clock=clock)), 3)
    step(made, "c0", 5, 5)
    # c0 is sent version 3 now, but its last gradient was computed from version 0.
    at_version(made, 3)
    update(made, "c0", 6, 6)
    step(made, "c1", 1, 1)
    assert ("c0" in made.state.counted) == counts
    assert "c1" in made.state.counted


def test_n_clients_are_the_default_delay() -> None:
    assert ACEDParameters().longest_delay(7) == 7
    assert ACEDParameters(delay=0).longest_delay(7) == 0
    assert ACEParameters().longest_delay(7) > 1e9


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    made = with_statistics(ACE(ACEParameters(start="seen", server_lr=20)), 2)
    step(made, "c0", 1, 0.5)
    step(made, "c1", 11, 0.1)
    # Ten times the mean change of 1, twice; variances are averaged.
    assert made.models[0].vector.tolist() == pytest.approx([20, 0.3])


@pytest.mark.parametrize("start", ["all", "seen"])
def test_the_first_step_waits_for_all_clients(start: str) -> None:
    seen = run_on(ACE(ACEParameters(start=start)), three_groups(), 40)
    applied = of(events.UpdateApplied, seen)
    first = [event.client for event in applied[:12]]
    # Three of the twelve devices need 5 s, the others 1 s.
    assert (len(set(first)) == 12) == (start == "all")
    assert len(applied) >= 40


@pytest.mark.parametrize("method", [ACE, ACED])
def test_it_can_be_restored(method: Any) -> None:
    check_it_can_be_restored(method)
