"""Partitions of clients: when clusters are split, merged, or kept."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.strategies.panicle.probes import ScoredGroups, best_partition, better_partition

LEVEL = 0.6


def better(distances: np.ndarray, now: np.ndarray) -> ScoredGroups | None:
    """Return the decision about clusters, for two identical estimates of the distances."""
    return better_partition(np.stack([distances, distances]), now, LEVEL)


def apart(across: float, sizes: tuple[int, ...] = (3, 3), within: float = 0.0) -> np.ndarray:
    """Distances of clients in groups of these sizes."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    distances = np.where(labels[:, None] == labels[None, :], within, across)
    np.fill_diagonal(distances, 0.0)
    return distances


@pytest.mark.parametrize(("across", "is_wanted"), [(0.29, False), (0.31, True), (0.5, True)])
def test_groups_from_the_level_on_are_wanted(across: float, is_wanted: bool) -> None:
    # b = `across`, a = 0, divided by the minimum denominator 0.5.
    found = better(apart(across), np.zeros(6, np.int64))
    assert (found is not None) == is_wanted
    if found is not None:
        assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert found.score == pytest.approx(across / 0.5)


def test_groups_that_are_there_already_are_left_alone() -> None:
    assert better(apart(1.0), np.array([7, 7, 7, 2, 2, 2])) is None


def test_a_client_moves_to_the_group_that_it_is_nearer_to() -> None:
    distances = apart(1.0, (4, 4))
    now = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    distances[0, 1:] = distances[1:, 0] = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1]
    found = better(distances, now)
    assert found is not None
    assert found.labels[0] == found.labels[4] != found.labels[1]


@pytest.mark.parametrize(("across", "is_given_up"), [(0.24, True), (0.26, False)])
def test_clusters_are_given_up_if_their_silhouette_score_is_clearly_too_low(
    across: float, is_given_up: bool
) -> None:
    # Forming clusters takes 0.6; they score `across` / 0.5, and are given up below 0.5.
    found = better(apart(across), np.repeat([0, 1], 3))
    assert (found is not None) == is_given_up
    if found is not None:
        assert found.labels.tolist() == [0] * 6
        assert found.score == pytest.approx(across / 0.5)


def test_near_groups_of_a_quantity_count_in_all_that_is_decided() -> None:
    distances, now = nested(0.2), np.zeros(16, np.int64)
    both = np.stack([distances, distances])
    # Nested groups: 0.2 / 0.2, without the minimum denominator of 0.5.
    found = better_partition(both, now, LEVEL, is_quantity=True)
    assert found is not None
    assert len(np.unique(found.labels)) == 4
    # Clusters: (0.3 − 0.14) / 0.3 is too little to form them, but enough to keep them.
    near = np.stack([apart(0.3, within=0.14)] * 2)
    assert better_partition(near, np.repeat([0, 1], 3), LEVEL, is_quantity=True) is None
    assert better_partition(near, np.repeat([0, 1], 3), LEVEL) is not None


def nested(near: float) -> np.ndarray:
    """Distances of two distant pairs of near groups, of four clients each."""
    groups = np.repeat(np.arange(4), 4)
    distances = np.where(groups[:, None] // 2 == groups[None, :] // 2, near, 1.0)
    return np.where(groups[:, None] == groups[None, :], 0.0, distances)


@pytest.mark.parametrize("before", [np.zeros(16), np.repeat([3, 5], 8), np.arange(16) // 2])
def test_groups_within_groups_are_found(before: np.ndarray) -> None:
    # Two groups score (1 − 0.2) / 1, four 0.35 / 0.5; within one of the two, two score 0.7.
    distances, now = nested(0.35), before.astype(np.int64)
    assert best_partition(np.stack([distances, distances])).labels.max() == 1
    found = better(distances, now)
    assert found is not None
    assert len(np.unique(found.labels)) == 4
    assert (found.labels.reshape(4, 4) == found.labels[::4, None]).all()
    assert better(distances, found.labels) is None


def test_a_single_client_is_no_group_within_a_group() -> None:
    distances = nested(0.0)
    distances[0, 1:8] = distances[1:8, 0] = 0.4
    found = better(distances, np.zeros(16, np.int64))
    assert found is not None
    assert found.labels.tolist() == np.repeat([0, 1], 8).tolist()


def test_groups_within_groups_need_the_level_too() -> None:
    found = better(nested(0.2), np.zeros(16, np.int64))
    assert found is not None
    assert found.labels.tolist() == np.repeat([0, 1], 8).tolist()
    # Clusters that were split nevertheless are merged.
    merged = better(nested(0.2), np.repeat([0, 1, 2, 3], 4))
    assert merged is not None
    assert merged.labels.tolist() == found.labels.tolist()


def test_two_clients_may_be_two_groups() -> None:
    # 0.3 from their own group: (1 − 0.3) / 1.
    found = better(apart(1.0, (1, 1)), np.zeros(2, np.int64))
    assert found is not None
    assert found.labels.tolist() == [0, 1]
    assert found.score == pytest.approx(0.7)


@pytest.mark.parametrize("clients", [0, 1])
def test_nothing_is_said_of_less_than_two_clients(clients: int) -> None:
    empty = np.zeros((clients, clients))
    assert better(empty, np.zeros(clients, np.int64)) is None
