"""FADAS: AMSGrad by hand, and the learning rate by the largest staleness."""

import pytest
from clustered import (
    at_version,
    check_it_can_be_restored,
    step,
    update,
    with_clients,
    with_statistics,
)

from raceme.strategies import FADAS, FADASParameters


def test_two_steps_by_hand() -> None:
    made = with_clients(FADAS(FADASParameters(m=2, server_lr=0.1, beta1=0.5, beta2=0.75)), 3)
    step(made, "c0", 4, 0)
    assert made.models[0].version == 0
    step(made, "c1", 0, 0)
    # Δ = (2, 0): m = (1, 0), v = 0.25 · 4 = (1, 0); 0.1 · 1 / 1.
    assert made.models[0].vector == pytest.approx([0.1, 0])
    # From (0.1, 0), Δ = (0, 2) and (0, 2): m = (0.5, 1), v = (0.75, 1), v̂ = max = (1, 1).
    step(made, "c0", 0.1, 2)
    step(made, "c2", 0.1, 2)
    assert made.state.square.tolist() == pytest.approx([0.75, 1])
    assert made.state.largest_square.tolist() == pytest.approx([1, 1])
    assert made.models[0].vector == pytest.approx([0.1 + 0.05, 0.1])


def test_bias_correction_by_hand() -> None:
    options = FADASParameters(m=1, server_lr=0.1, beta1=0.5, beta2=0.75, bias_correction=True)
    made = with_clients(FADAS(options), 3)
    step(made, "c0", 2, 0)
    # m / (1 − 0.5) = 2, √v̂ / √(1 − 0.75) = 1 / 0.5 = 2.
    assert made.models[0].vector == pytest.approx([0.1, 0])
    step(made, "c0", 0.1, 0)
    # m = 0.5, over 0.75; √v̂ = 1 over √(1 − 0.5625).
    assert made.models[0].vector == pytest.approx([0.1 + 0.1 * (0.5 / 0.75) * 0.4375**0.5, 0])


def test_the_rate_on_both_sides_of_the_delay() -> None:
    divide = FADASParameters(server_lr=0.8, calm_delay=2)
    assert [divide.rate(delay) for delay in (0, 2, 3, 4)] == pytest.approx([0.8, 0.8, 0.8 / 3, 0.2])
    least = FADASParameters(server_lr=0.3, calm_delay=1, delay_rule="least")
    assert [least.rate(delay) for delay in (1, 3, 4)] == pytest.approx([0.3, 0.3, 0.25])
    assert FADASParameters(server_lr=0.3, delay_rule="none").rate(100) == 0.3


def test_the_stalest_update_of_a_buffer_decides_and_is_forgotten_with_it() -> None:
    made = with_clients(FADAS(FADASParameters(m=2, server_lr=0.4, beta1=0.0, beta2=0.0)), 3)
    stale, fresh = update(made, "c0", 1, 1), update(made, "c1", 1, 1)
    at_version(made, 4)
    assert made.applied([stale])[0].staleness == 4
    made.applied([fresh])
    # Δ / √Δ² = 1, at the rate 0.4 / 4.
    assert made.models[0].vector == pytest.approx([0.1, 0.1])
    for client in ("c0", "c1"):
        step(made, client, 1.1, 1.1)
    assert made.models[0].vector == pytest.approx([0.5, 0.5])


def test_running_statistics_are_averaged() -> None:
    made = with_statistics(FADAS(FADASParameters(m=2, server_lr=0.1, beta1=0.0, beta2=0.0)), 2)
    step(made, "c0", 1, 0.5)
    step(made, "c1", 1, 0.1)
    assert made.models[0].vector.tolist() == pytest.approx([0.1, 0.3])


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FADAS)
