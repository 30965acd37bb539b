"""When clusters are split, merged, or left as they are."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.strategies.panicle.probes import Partition, better_partition

LEVEL = 0.45


def better(distances: np.ndarray, now: np.ndarray) -> Partition | None:
    """What becomes of clusters, by two estimates that are alike."""
    return better_partition(np.stack([distances, distances]), now, LEVEL)


def apart(across: float, sizes: tuple[int, ...] = (3, 3), within: float = 0.0) -> np.ndarray:
    """Distances of clients in groups of these sizes."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    distances = np.where(labels[:, None] == labels[None, :], within, across)
    np.fill_diagonal(distances, 0.0)
    return distances


@pytest.mark.parametrize(("across", "is_wanted"), [(0.44, False), (0.46, True), (1.0, True)])
def test_groups_from_the_level_on_are_wanted(across: float, is_wanted: bool) -> None:
    # b = `across`, a = 0, over the floor of 1 of two groups of six clients.
    found = better(apart(across), np.zeros(6, np.int64))
    assert (found is not None) == is_wanted
    if found is not None:
        assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert found.score == pytest.approx(across)


def test_groups_that_are_there_already_are_left_alone() -> None:
    assert better(apart(1.0), np.array([7, 7, 7, 2, 2, 2])) is None


def test_a_move_that_brings_those_who_move_little_is_not_made() -> None:
    # A client midway between two groups: its silhouette is near 0 in either.
    distances = apart(1.0, (4, 4))
    distances[0, 1:] = distances[1:, 0] = [0.5, 0.5, 0.5, 0.48, 0.48, 0.48, 0.48]
    now = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    assert better(distances, now) is None
    # One that is clearly nearer to the other group moves.
    distances[0, 1:] = distances[1:, 0] = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1]
    found = better(distances, now)
    assert found is not None
    assert found.labels[0] == found.labels[4] != found.labels[1]


@pytest.mark.parametrize(("across", "is_given_up"), [(0.34, True), (0.36, False)])
def test_clusters_are_given_up_if_their_evidence_is_clearly_too_little(
    across: float, is_given_up: bool
) -> None:
    # They needed 0.45, and have `across`: given up below 0.35.
    found = better(apart(across), np.repeat([0, 1], 3))
    assert (found is not None) == is_given_up
    if found is not None:
        assert found.labels.tolist() == [0] * 6
        assert found.score == pytest.approx(across)


@pytest.mark.parametrize("clients", [0, 1])
def test_nothing_is_said_of_less_than_two_clients(clients: int) -> None:
    empty = np.zeros((clients, clients))
    assert better(empty, np.zeros(clients, np.int64)) is None
