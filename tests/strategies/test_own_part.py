"""Panicle's shares, by hand: of an update in a model, of its own model in what a client uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.strategies.panicle.strategy import own_share, share_of


def test_the_share_falls_from_casas_to_that_of_one_member() -> None:
    # 2 / log2(13 + 3) = 0.5; after ten rounds half of it; in the end 1/13.
    assert share_of(13, 0.0) == pytest.approx(0.5)
    assert share_of(13, 10.0) == pytest.approx(0.25)
    assert share_of(13, 1000.0) == pytest.approx(1 / 13)
    # A client alone has its own model.
    assert share_of(1, 0.0) == share_of(1, 1000.0) == 1.0


def test_the_share_grows_with_the_samples_and_the_distance() -> None:
    assert own_share(0.5, 500, 500.0) == 0.5
    assert own_share(0.75, 500, 500.0) == 0.75
    assert own_share(0.5, 250, 500.0) == pytest.approx(1 / 3)
    assert own_share(0.8, 125, 500.0) == pytest.approx(0.5)
    # More than the prior's samples count as so many.
    assert own_share(0.2, 10_000, 500.0) == pytest.approx(0.2)
    assert own_share(0.0, 10_000, 500.0) == 0.0


@given(samples=st.integers(1, 10**9), prior=st.floats(1e-3, 1e9))
def test_a_client_that_has_nothing_in_common_uses_its_own_model(samples: int, prior: float) -> None:
    assert own_share(1.0, samples, prior) == 1.0


@given(apart=st.floats(0, 1), samples=st.integers(1, 10**9), prior=st.floats(1e-3, 1e9))
def test_it_is_a_share_up_to_the_distance(apart: float, samples: int, prior: float) -> None:
    assert 0.0 <= own_share(apart, samples, prior) <= apart * (1 + 1e-12)
