"""Estimated mixtures: α, β1 and β2 by hand, on both sides of every threshold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raceme.strategies.cdfl.strategy import (
    Bar,
    above_bar,
    bar_of,
    cluster_shares,
    estimated_shares,
    lateness_share,
    others_shares,
)


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float64)


def test_alpha_of_two_clusters() -> None:
    # The others' shares: of l (3/4, 1/4), of d1 (1, 0), of d2 (1/2, 1/2); K − 1 = 1.
    # 0.5 · 0.75 + 0.4 · 1 + 0.1 · 0.5 = 0.825, and 0.175; softmax(3 α): 1 / (1 + e^(−3 · 0.65)).
    alpha = estimated_shares(values(1, 3), values(0, 2), values(2, 2), 0.5, 0.4, [3.0])
    assert alpha[0] == pytest.approx(1 / (1 + math.exp(-1.95)))
    assert alpha.sum() == pytest.approx(1.0)


def test_alpha_of_three_clusters() -> None:
    # (5/6, 4/6, 3/6), (1, 1/2, 1/2), (3/4, 3/4, 1/2), weighted 1/2, 1/4, 1/4, divided by K − 1 = 2:
    before = values(0.4270833, 0.3229167, 0.25)
    alpha = estimated_shares(values(1, 2, 3), values(0, 1, 1), values(1, 1, 2), 0.5, 0.25, [3.0])
    expected = np.exp(3 * before) / np.exp(3 * before).sum()
    assert alpha == pytest.approx(expected, abs=1e-6)
    # A second value of A is applied to the result of the first.
    twice = estimated_shares(
        values(1, 2, 3), values(0, 1, 1), values(1, 1, 2), 0.5, 0.25, [3.0, 10.0]
    )
    assert twice == pytest.approx(np.exp(10 * expected) / np.exp(10 * expected).sum(), abs=1e-6)


def test_one_cluster_has_all() -> None:
    assert estimated_shares(values(2), values(1), values(0), 0.5, 0.25, [3.0]).tolist() == [1.0]


def test_bars_are_below_every_value() -> None:
    losses = values(0.7, 0.9)
    assert above_bar(losses, Bar(0.5)) == pytest.approx([0.2, 0.4])
    assert above_bar(losses, Bar(0.7)) == pytest.approx([0.0, 0.2])
    # A bar of 0.8 would make the better cluster's term −0.1: it is lowered to 0.7.
    assert above_bar(losses, Bar(0.8)) == pytest.approx([0.0, 0.2])
    assert above_bar(losses, bar_of("loss-bar", "min")) == pytest.approx([0.0, 0.2])


def test_a_bar_that_follows_the_losses_is_a_share_of_their_smallest() -> None:
    bar = bar_of("loss-bar", "50%")
    assert above_bar(values(0.8, 1.0), bar) == pytest.approx([0.4, 0.6])
    assert above_bar(values(0.2, 1.0), bar) == pytest.approx([0.1, 0.9])


@pytest.mark.parametrize(
    ("bar", "as_printed", "expected", "others"),
    [
        # A fixed bar of 0.5 above the smallest loss, as printed: Σ (l − 0.5) = 1.3, and
        # 1 − (−0.2 / 1.3) = 1.15385 for the best, 1 − 0.5 / 1.3 = 0.61538 for the others.
        (Bar(0.5), True, [-0.2, 0.5, 0.5, 0.5], [1.15385, 0.61538]),
        # With the bar lowered to 0.3: Σ = 2.1, which gives 1 and 2/3.
        (Bar(0.5), False, [0.0, 0.7, 0.7, 0.7], [1.0, 0.66667]),
        # With the bar at half of the smallest loss, 0.15:
        # Σ = 2.7, so 1 − 0.15 / 2.7 and 1 − 0.85 / 2.7.
        (Bar(0.5, follows=True), False, [0.15, 0.85, 0.85, 0.85], [0.94444, 0.68519]),
        # As printed, a bar above the mean, 0.825, favours the worse cluster: Σ (l − 0.9) = −0.3.
        (Bar(0.9), True, [-0.6, 0.1, 0.1, 0.1], [-1.0, 1.33333]),
    ],
)
def test_bars_of_four_losses(
    bar: Bar,
    as_printed: bool,
    expected: list[float],
    others: list[float],
) -> None:
    """For losses of 0.3, 1, 1, 1 and A = 7, with c1 = 1."""
    above = above_bar(values(0.3, 1, 1, 1), bar, as_printed)
    assert above == pytest.approx(expected)
    assert others_shares(above)[:2] == pytest.approx(others, abs=1e-5)
    alpha = estimated_shares(above, values(1, 1, 1, 1), values(1, 1, 1, 1), 1.0, 0.0, [7.0])
    # α_1 of four, softmax over K − 1 = 3: 0.539, 0.421, 0.387 and 0.001.
    best, other = math.exp(7 * others[0] / 3), math.exp(7 * others[1] / 3)
    assert alpha[0] == pytest.approx(best / (best + 3 * other), abs=1e-4)


def test_where_all_values_are_zero_the_clusters_are_alike() -> None:
    assert others_shares(values(0, 0, 0)) == pytest.approx([2 / 3] * 3)
    assert others_shares(values(0, 2, 2)) == pytest.approx([1.0, 0.5, 0.5])


def test_beta1_on_both_sides_of_the_mean() -> None:
    assert cluster_shares(values(0.5, 0.3, 0.2)).tolist() == [1.0, 0.0, 0.0]
    assert cluster_shares(values(0.45, 0.35, 0.2)) == pytest.approx([1.0, 0.35 / 0.45, 0.0])
    # A share equal to the bar is not below it, despite the rounding of 1/3.
    assert cluster_shares(values(1 / 3, 1 / 3, 1 / 3)).tolist() == [1.0, 1.0, 1.0]
    assert cluster_shares(values(0.5, 0.3, 0.2), bar=0.2) == pytest.approx([1.0, 0.6, 0.4])


def test_beta2_on_both_sides_of_b() -> None:
    assert lateness_share(last=10, received=6, a=10.0, b=5.0) == 1.0
    # e_k − τ = 5 is not below b, and b is not subtracted in the denominator.
    assert lateness_share(last=10, received=5, a=10.0, b=5.0) == pytest.approx(1 / 51)
    # A cluster that has not been updated since the client received its model.
    assert lateness_share(last=3, received=9, a=10.0, b=5.0) == 1.0


@given(
    arrays(np.float64, (3, 4), elements=st.floats(0, 1e6)),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.sampled_from([[1.0], [3.0], [15.0], [10.0, 10.0]]),
)
def test_alpha_is_always_a_mixture(
    told: np.ndarray, c1: float, c2: float, sharpness: list[float]
) -> None:
    alpha = estimated_shares(told[0], told[1], told[2], c1, c2, sharpness)
    assert np.all(alpha > 0)
    assert alpha.sum() == pytest.approx(1.0)
    assert cluster_shares(alpha).max() == 1.0
