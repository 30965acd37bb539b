"""How much of its own model a client uses: by hand, and in a large fleet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.strategies.panicle.probes import Probes, apartness, between, own_share

ANGLES = {"a": 0.0, "b": 60.0, "c": 90.0, "d": 180.0}


def probed(exact_up_to: int = 0) -> Probes:
    """Clients whose two probes point the same way."""
    probes = Probes(exact_up_to=exact_up_to)
    for _ in range(2):
        for client, angle in ANGLES.items():
            radians = np.deg2rad(angle)
            probes.add(client, np.array([np.cos(radians), np.sin(radians)], np.float32))
    return probes


def test_apartness_is_the_mean_distance_from_the_others_of_the_cluster() -> None:
    # Distances are 1 − cos: 0.5 and 1 from a; 0.5 and 1 − cos 30° = 0.134 from b; d is alone.
    found = apartness(probed(), {0: ["a", "b", "c"], 1: ["d"]}, {"a", "b", "c", "d"})
    assert found == pytest.approx({"a": 0.75, "b": 0.317, "c": 0.567}, abs=0.001)


def test_only_those_are_told_of_who_are_asked_about() -> None:
    assert set(apartness(probed(), {0: ["a", "b"], 1: ["c", "d"]}, {"b"})) == {"b"}


def test_opposites_are_not_more_apart_than_unrelated_clients() -> None:
    assert apartness(probed(), {0: ["a", "d"]}, {"a"}) == {"a": 1.0}


def test_in_a_large_fleet_the_first_members_stand_for_all() -> None:
    # The client itself is among them: the mean of 0, 0.5 and 1.
    found = apartness(probed(exact_up_to=3), {0: ["a", "b", "c"], 1: ["d"]}, {"a"})
    assert found == pytest.approx({"a": 0.5}, abs=1e-6)


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


def test_between_two_models() -> None:
    shared, own = np.array([0.0, 4.0], np.float32), np.array([1.0, 0.0], np.float32)
    assert between(shared, own, 0.25).tolist() == [0.25, 3.0]
    assert between(shared, own, 0.25).dtype == np.float32
