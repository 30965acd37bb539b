"""CA2FL: residuals, the cache and the mean from before the buffer, by hand."""

import numpy as np
import pytest
from clustered import check_it_can_be_restored, step, update, with_clients, with_statistics

from raceme.strategies import CA2FL, CA2FLParameters


def test_two_buffers_of_three_clients_by_hand() -> None:
    made = with_clients(CA2FL(CA2FLParameters(m=2)), 3)
    applied = step(made, "c0", 2, 0)
    assert applied.weight == 0.5
    assert made.models[0].version == 0
    step(made, "c1", 0, 4)
    # h is 0 before the first buffer: v = ((2, 0) + (0, 4)) / 2.
    assert made.models[0].vector.tolist() == [1, 2]
    # h = ((2, 0) + (0, 4) + 0) / 3, over all three clients, not only the two that reported.
    assert made.state.mean.tolist() == pytest.approx([2 / 3, 4 / 3])
    # From (1, 2): Δ = (3, 0) and, of the client without a cached update, (0, 6).
    step(made, "c0", 4, 2)
    step(made, "c2", 1, 8)
    # D = (3, 0) − (2, 0) + (0, 6) = (1, 6); v = h + D / 2 = (2/3 + 1/2, 4/3 + 3).
    assert made.models[0].vector == pytest.approx([1 + 7 / 6, 2 + 13 / 3])
    # h = ((3, 0) + (0, 4) + (0, 6)) / 3.
    assert made.state.mean.tolist() == pytest.approx([1, 10 / 3])
    assert made.state.count == 0


def test_a_client_that_reports_twice_in_a_buffer_is_measured_against_its_first_update() -> None:
    made = with_clients(CA2FL(CA2FLParameters(m=2)), 3)
    step(made, "c0", 2, 0)
    step(made, "c0", 3, 3)
    # D = (2, 0) + ((3, 3) − (2, 0)) = (3, 3).
    assert made.models[0].vector.tolist() == [1.5, 1.5]
    assert made.state.mean.tolist() == [1, 1]


def test_the_server_learning_rate_scales_the_corrected_mean() -> None:
    made = with_clients(CA2FL(CA2FLParameters(m=1, server_lr=0.5)), 3)
    step(made, "c0", 3, 0)
    assert made.models[0].vector.tolist() == [1.5, 0]
    # Δ = (3, 0) once more: D = 0, and v = h = (1, 0).
    step(made, "c0", 4.5, 0)
    assert made.models[0].vector.tolist() == [2, 0]


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    made = with_statistics(CA2FL(CA2FLParameters(m=2)), 2)
    for _ in range(3):
        step(made, "c0", *(made.models[0].vector[0] + 1, 0.5))
        step(made, "c1", *(made.models[0].vector[0] + 1, 0.1))
    # The weight moves by 1, then by h = 1 too, as D = 0. Variances are averaged.
    assert made.models[0].vector.tolist() == pytest.approx([3, 0.3])
    assert made.state.latest["c0"].tolist() == [1, 0]


def test_what_a_huge_update_has_left_in_the_cache_goes_with_it() -> None:
    made = with_clients(CA2FL(CA2FLParameters(m=1)), 2)
    for values in ((1, 1), (3e13, 3e13), (1, 1)):
        one = update(made, "c0", *(made.models[0].vector + np.array(values, np.float32)))
        made.applied([one])
        made.close_task(one.task)
    assert made.state.latest_total.tolist() == pytest.approx(
        made.state.latest["c0"].tolist(), abs=1e-2
    )


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(CA2FL)
