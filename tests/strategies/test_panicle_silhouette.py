"""Silhouette scores on an absolute scale, for fleets of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.strategies.panicle.probes import (
    FLOOR,
    ScoredGroups,
    best_partition,
    floor_by_chance,
    silhouettes,
)


def grouped(sizes: list[int], within: float, between: float) -> np.ndarray:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    distances = np.where(labels[:, None] == labels[None, :], within, between)
    np.fill_diagonal(distances, 0.0)
    return distances


def best(*estimates: np.ndarray) -> ScoredGroups:
    """The groups by two estimates of the distances, identical unless both are given."""
    return best_partition(np.stack([estimates[0], estimates[-1]]))


def test_a_silhouette_is_how_much_nearer_the_own_group_is() -> None:
    distances = grouped([2, 2], within=0.1, between=1.0)
    # (1 − 0.1) / 1 for all clients.
    assert silhouettes(distances, np.array([0, 0, 1, 1])) == pytest.approx([0.9] * 4)
    # The first two apart: 0.1 from the nearest other group, 0.3 from their own: −0.2 / 0.5.
    apart = silhouettes(distances, np.array([0, 1, 2, 2]))
    assert apart == pytest.approx([-0.4, -0.4, 0.9, 0.9])


def test_groups_that_are_all_much_alike_are_none() -> None:
    distances = grouped([10, 10], within=0.02, between=0.2)
    # (0.2 − 0.02) / 0.5, while Rousseeuw's score would be 0.9.
    assert silhouettes(distances, np.repeat([0, 1], 10)) == pytest.approx([0.36] * 20)


def test_a_least_denominator_is_four_deviations_of_chance() -> None:
    distances = grouped([10, 10], within=0.02, between=0.2)
    apart = np.where(np.eye(20), 0.0, 0.1)
    # The estimates differ by 0.1, each by a standard deviation of √(0.1² / 2) = 0.0707.
    noisy = np.stack([distances + apart, distances])
    assert floor_by_chance(noisy) == pytest.approx(0.2828, abs=1e-4)
    # (0.2 − 0.02) / 0.2828 by one, and (0.3 − 0.12) / 0.3 by the other.
    score = best_partition(noisy, floor_by_chance(noisy)).score
    assert score == pytest.approx((0.18 / 0.2828 + 0.18 / 0.3) / 2, abs=1e-4)
    assert best_partition(noisy).score == pytest.approx(0.18 / 0.5)
    # The floor is limited on both sides, for nearly exact distances and for pure noise.
    assert floor_by_chance(np.stack([distances, distances])) == 0.1
    assert floor_by_chance(np.stack([distances + 4 * apart, distances])) == FLOOR
    assert floor_by_chance(np.zeros((2, 1, 1))) == 0.1


def test_groups_whose_clients_are_alike_need_not_be_unrelated() -> None:
    near = grouped([3, 3], within=0.02, between=0.5)
    assert silhouettes(near, np.repeat([0, 1], 3)) == pytest.approx([0.96] * 6)
    far = grouped([3, 3], within=0.4, between=0.9)
    assert silhouettes(far, np.repeat([0, 1], 3)) == pytest.approx([0.5 / 0.9] * 6)


def test_one_group_has_a_silhouette_score_of_zero() -> None:
    distances = grouped([3], within=0.5, between=1.0)
    assert silhouettes(distances, np.zeros(3, np.int64)).tolist() == [0.0] * 3
    assert best(np.zeros((1, 1))).score == 0.0


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [1, 1, 2, 2], [2, 2, 2, 2], [20, 20, 30, 30]])
def test_groups_are_found_in_fleets_of_any_size(sizes: list[int]) -> None:
    found = best(grouped(sizes, within=0.2, between=1.1))
    assert found.labels.tolist() == np.repeat(np.arange(4), sizes).tolist()
    assert found.score > 0.7


@pytest.mark.parametrize(("apart", "groups"), [(0.46, 2), (0.5, 3)])
def test_of_partitions_with_nearly_equal_scores_that_with_fewer_groups_is_taken(
    apart: float, groups: int
) -> None:
    """Two groups of 20 at some distance from each other, and a third one at 1.0 from both.

    0.46 apart: as three groups (2 (0.46 − 0.1) / 0.5 + 0.9) / 3 = 0.780; as two, with the mean
    distance (19 · 0.1 + 20 · 0.46) / 39 = 0.285 in the first, (2 · 0.715 + 0.9) / 3 = 0.777: less
    by 0.003. 0.5 apart: 0.833 and 0.763, less by 0.070.
    """
    distances = grouped([20, 20, 20], within=0.1, between=1.0)
    distances[:20, 20:40] = distances[20:40, :20] = apart
    found = best(distances)
    assert int(found.labels.max()) + 1 == groups
    assert found.score == pytest.approx({2: 0.7769, 3: 0.8333}[groups], abs=1e-4)


def test_clients_that_are_all_alike_are_one_group() -> None:
    assert best(grouped([6], within=0.1, between=1.0)).score < 0.1


@given(st.integers(2, 12), st.integers(0, 1000))
def test_silhouette_scores_are_between_minus_one_and_one(count: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    distances = np.minimum(2.0, np.linalg.norm(points[:, None] - points[None], axis=2))
    found = best(distances)
    assert -1 <= found.score <= 1
    assert set(found.labels.tolist()) == set(range(int(found.labels.max()) + 1))
    assert found.score == pytest.approx(silhouettes(distances, found.labels).mean())


def test_as_many_groups_as_there_are_are_found() -> None:
    found = best(grouped([3] * 20, within=0.1, between=1.0))
    assert found.labels.tolist() == np.repeat(np.arange(20), 3).tolist()


@pytest.mark.parametrize(("size", "groups", "score"), [(2, 12, 0.8282), (3, 13, 0.8962)])
def test_more_than_twelve_groups_need_three_clients_each(
    size: int, groups: int, score: float
) -> None:
    """13 groups, two of which are 0.8 apart, all others 1.0.

    As 13 groups of three, 0.7 / 0.8 in these two: (33 · 0.9 + 6 · 0.875) / 39. As 12 groups, of
    pairs: (0.1 + 0.8 + 0.8) / 3 = 0.567 in the two, (22 · 0.9 + 4 · 0.433) / 26.
    """
    distances = grouped([size] * 13, within=0.1, between=1.0)
    distances[:size, size : 2 * size] = distances[size : 2 * size, :size] = 0.8
    found = best(distances)
    assert int(found.labels.max()) + 1 == groups
    assert found.score == pytest.approx(score, abs=1e-4)


def test_groups_that_only_one_estimate_has_are_chance() -> None:
    one, other = grouped([5, 5], within=0.1, between=1.0), np.full((10, 10), 0.5)
    np.fill_diagonal(other, 0.0)
    assert best(one).score == pytest.approx(0.9)
    # By the other estimate all are equally far apart: its groups do not fit the first estimate, nor
    # the first's groups this one.
    assert best(one, other).score < 0.3
