"""CASA's, FedAsync's and FedBuff's decay functions against numbers worked out by hand."""

import math

import pytest

from raceme.strategies.shared import (
    client_decay,
    cluster_decay,
    omega,
    staleness_bound,
    staleness_factor,
)


def test_omega_starts_at_one_and_decays_slowly() -> None:
    # e / 2.8 = 0.970815 at κ t = 1, and its square at κ t = 2.
    assert omega(0, 0.001) == 1.0
    assert omega(1000, 0.001) == pytest.approx(0.970815, abs=1e-6)
    assert omega(2000, 0.001) == pytest.approx(0.942482, abs=1e-6)


def test_cluster_decay_uses_the_logarithm_to_base_two() -> None:
    # log2(1 + 3) = 2, log2(5 + 3) = 3, log2(100 + 3) = 6.686501.
    assert cluster_decay(1, 1.0, alpha0=2.0) == 1.0
    assert cluster_decay(5, 0.9, alpha0=2.0) == pytest.approx(0.6)
    assert cluster_decay(100, 1.0, alpha0=2.0) == pytest.approx(0.299111, abs=1e-6)


def test_staleness_bound_grows_from_one_to_two_cluster_sizes() -> None:
    assert staleness_bound(20, 1.0) == 20.0
    assert staleness_bound(20, 0.25) == 35.0


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(0, 0.3), (9, 0.3), (10, 0.3), (16, 0.075), (25, 0.06)],
)
def test_client_decay_on_both_sides_of_the_bound(staleness: int, expected: float) -> None:
    # The bound is 10: at it nothing happens; beyond it 0.3 / √16 = 0.075 and 0.3 / √25 = 0.06.
    assert client_decay(0.3, staleness, bound=10.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "staleness", "expected"),
    [
        ("constant", 50, 1.0),
        ("hinge", 4, 1.0),
        ("hinge", 5, 1 / 2),  # 1 / (1 · (5 − 4) + 1)
        ("hinge", 13, 1 / 10),
        ("polynomial", 0, 1.0),
        ("polynomial", 3, 1 / 4),  # (3 + 1)^−1
    ],
)
def test_staleness_factor(function: str, staleness: int, expected: float) -> None:
    assert staleness_factor(function, staleness, a=1.0, b=4.0) == pytest.approx(expected)


def test_polynomial_with_a_half_is_the_inverse_square_root() -> None:
    assert staleness_factor("polynomial", 8, a=0.5, b=0.0) == pytest.approx(1 / math.sqrt(9))
