"""When clusters are split, merged, or left as they are."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.strategies.panicle.probes import PartitionDecision, decided

LEVEL, MOST = 0.45, 12


def apart(across: float, sizes: tuple[int, ...] = (3, 3), within: float = 0.0) -> np.ndarray:
    """Distances of clients in groups of these sizes."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    distances = np.where(labels[:, None] == labels[None, :], within, across)
    np.fill_diagonal(distances, 0.0)
    return distances


def test_groups_with_evidence_enough_are_wanted() -> None:
    found = decided(apart(1.0), np.zeros(6, np.int64), LEVEL, MOST)
    assert found.wanted is not None
    assert found.wanted.tolist() == [0, 0, 0, 1, 1, 1]
    # b = 1, a = 0, over the floor of 1 of two groups of six clients.
    assert found.score == pytest.approx(1.0)


def test_groups_that_are_there_already_are_left_alone() -> None:
    assert decided(apart(1.0), np.array([7, 7, 7, 2, 2, 2]), LEVEL, MOST).wanted is None


def test_a_move_that_brings_those_who_move_little_is_not_made() -> None:
    # A client midway between two groups: its silhouette is near 0 in either.
    distances = apart(1.0, (4, 4))
    distances[0, 1:] = distances[1:, 0] = [0.5, 0.5, 0.5, 0.48, 0.48, 0.48, 0.48]
    now = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert decided(distances, now, LEVEL, MOST).wanted is None
    # One that is clearly nearer to the other group moves.
    distances[0, 1:] = distances[1:, 0] = [0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1]
    found = decided(distances, now, LEVEL, MOST)
    assert found.wanted is not None
    assert found.wanted[0] == found.wanted[4] != found.wanted[1]


@pytest.mark.parametrize(("across", "is_open"), [(0.35, False), (0.37, True), (0.5, True)])
def test_a_little_too_little_evidence_leaves_it_open(across: float, is_open: bool) -> None:
    # Two groups of six clients need 0.51; from 0.36 on more may be known later.
    assert decided(apart(across), np.zeros(6, np.int64), LEVEL, MOST) == PartitionDecision(
        None, 0.0, is_open
    )


@pytest.mark.parametrize(("across", "is_given_up"), [(0.4, True), (0.42, False)])
def test_clusters_are_given_up_if_their_evidence_is_clearly_too_little(
    across: float, is_given_up: bool
) -> None:
    # They needed 0.51, and have `across`: given up below 0.41.
    found = decided(apart(across), np.repeat([0, 1], 3), LEVEL, MOST)
    assert (found.wanted is not None) == is_given_up
    assert found.score == pytest.approx(across)
    assert found.wanted is None or found.wanted.tolist() == [0] * 6


@pytest.mark.parametrize("clients", [0, 1])
def test_nothing_is_said_of_less_than_two_clients(clients: int) -> None:
    empty = np.zeros((clients, clients))
    assert decided(empty, np.zeros(clients, np.int64), LEVEL, MOST) == PartitionDecision(None)
