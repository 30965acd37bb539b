"""Groups by first updates: both measures, the nearest group, and changed label counts, by hand."""

import numpy as np
import pytest

from raceme.strategies.flexcfl import (
    ColdStart,
    find_groups,
    group_by_edc,
    madc,
    overlap,
)
from raceme.strategies.shared import has_shifted


def test_madc_by_hand() -> None:
    similarity = np.array(
        [[1.0, 0.9, 0.2, 0.1], [0.9, 1.0, 0.3, 0.1], [0.2, 0.3, 1.0, 0.8], [0.1, 0.1, 0.8, 1.0]]
    )
    distances = madc(similarity)
    # (0, 1): z = 2 and 3, (|0.2 − 0.3| + |0.1 − 0.1|) / 2; (0, 2): z = 1 and 3,
    # (|0.9 − 0.3| + |0.1 − 0.8|) / 2; (2, 3): z = 0 and 1, (|0.2 − 0.1| + |0.3 − 0.1|) / 2.
    assert distances[0, 1] == pytest.approx(0.05)
    assert distances[0, 2] == pytest.approx(0.65)
    assert distances[2, 3] == pytest.approx(0.15)
    assert np.array_equal(distances, distances.T)
    assert distances.diagonal().tolist() == [0.0] * 4
    assert madc(np.ones((2, 2))).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_edc_groups_by_direction_whatever_the_length() -> None:
    rng = np.random.default_rng(0)
    directions = np.eye(3, 50)
    lengths = rng.uniform(0.1, 10.0, size=12)
    deltas = np.stack(
        [lengths[i] * (directions[i % 3] + 0.05 * rng.normal(size=50)) for i in range(12)]
    )
    assert group_by_edc(deltas.astype(np.float32), 3, seed=0).tolist() == [0, 1, 2] * 4


@pytest.mark.filterwarnings("error")
def test_updates_that_are_all_alike_are_one_group() -> None:
    assert group_by_edc(np.zeros((5, 3), np.float32), 4, seed=0).tolist() == [0] * 5


def test_edc_does_not_centre_the_updates() -> None:
    spread = [-1.0, -0.6, -0.2, 0.2, 0.6, 1.0]
    deltas = np.array([(10, t, s) for t in spread for s in (-0.64, 0.64)], np.float32)
    # The uncentred directions are the first two axes (mean squares 100, 0.467, 0.41), so the second
    # splits. Centred, the third would win: 0.41 lies between its groups, in the second 0.36.
    assert group_by_edc(deltas, 2, seed=0).tolist() == [0] * 6 + [1] * 6


def test_edc_and_madc_of_three_clients_by_hand() -> None:
    # Cosines: (0, 1) 0.8, (0, 2) 0, (1, 2) 0.6.
    deltas = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    distances = madc(np.array([[1.0, 0.8, 0.0], [0.8, 1.0, 0.6], [0.0, 0.6, 1.0]]))
    # n − 2 = 1: |S(0,2) − S(1,2)| = 0.6, |S(0,1) − S(2,1)| = 0.2, |S(1,0) − S(2,0)| = 0.8.
    assert distances[np.triu_indices(3, 1)] == pytest.approx([0.6, 0.2, 0.8])
    # In the plane cosines to two main directions are coordinates: 0 and 1 are the nearest pair
    # (0.632), 0 and 2 the farthest (1.414).
    assert group_by_edc(deltas, 2, seed=0).tolist() in ([0, 0, 1], [0, 1, 1])
    # MADC joins 0 and 2, which have equal cosines to 1, as its formula implies.
    rng = np.random.default_rng(0)
    assert find_groups(deltas, 2, "madc", rng).tolist() == [0, 1, 0]
    assert find_groups(deltas, 3, "random-clients", rng).tolist() == [0, 1, 2]


def test_the_group_of_the_nearest_direction() -> None:
    start = ColdStart(np.zeros(2, np.float32))
    start.directions = {3: np.array([1, 0], np.float32), 5: np.array([0, 2], np.float32)}
    # Cosines 0.6 and 0.8, whatever the lengths: distances 0.2 and 0.1.
    assert start.nearest(np.array([30, 40], np.float32)) == 5
    assert start.nearest(np.array([4, 3], np.float32)) == 3
    assert start.is_nearest_to_other_group(3, np.array([3, 4], np.float32))
    assert not start.is_nearest_to_other_group(5, np.array([3, 4], np.float32))


def test_a_fifth_of_the_data_on_both_sides() -> None:
    then = [50, 30, 20, 0]
    # τ = 0.2 / 4 · 100 = 5: a mean difference over the four labels of 5 is not beyond it.
    assert not has_shifted([40, 40, 20, 0], then, 100)
    # Sorted, (0, 10, 30, 60) and (0, 20, 20, 60) differ by 20 in all: 5 is not beyond 5.
    assert has_shifted([60, 30, 10, 0], [0, 60, 20, 20], 100)
    assert not has_shifted([60, 30, 10, 0], [0, 60, 20, 20], 100, distance="wasserstein")
    # (0, 0, 40, 60) and (0, 20, 20, 60): 40 in all.
    assert has_shifted([60, 40, 0, 0], [0, 60, 20, 20], 100, distance="wasserstein")
    assert has_shifted([40, 40, 19, 0], then, 100)
    # A replaced sample counts twice: a tenth of the 100 is (10 + 10) / 4 = 5, 11 are beyond it.
    assert not has_shifted([40, 30, 20, 10], then, 100)
    assert has_shifted([39, 30, 20, 11], then, 100)
    # Two labels of equal size are exchanged, which the authors' sorting would not detect.
    assert has_shifted([0, 50], [50, 0], 50)


def test_a_client_is_cold_until_it_is_settled_with_what_it_has_now() -> None:
    start = ColdStart(np.zeros(2, np.float32))
    start.count("a", [10, 0], 10, 0.2)
    assert start.cold == {}
    start.count("a", [0, 10], 10, 0.2)
    assert start.cold == {"a": True}
    start.settle("a")
    start.count("a", [0, 10], 10, 0.2)
    assert start.cold == {}
    start.count("a", [10, 0], 10, 0.2)
    assert start.cold == {"a": True}
    # A client that is placed for the first time is placed by its latest counts.
    start.cold["b"] = True
    start.count("b", [5, 5], 10, 0.2)
    start.settle("b")
    start.count("b", [5, 5], 10, 0.2)
    assert "b" not in start.cold


def test_the_overlap_of_labels() -> None:
    # Shares (0.5, 0.5, 0) and (0.25, 0.25, 0.5).
    assert overlap(np.array([2.0, 2.0, 0.0]), np.array([5.0, 5.0, 10.0])) == 0.5
    assert overlap(np.array([3.0, 0.0]), np.array([0.0, 1.0])) == 0.0


def test_the_first_label_counts_do_not_decide_their_number() -> None:
    start = ColdStart(np.zeros(2, np.float32))
    assert start.usual_labels("liar", 3) == 3
    start.count("liar", [9, 0, 1], 10, 0.2)
    start.settle("liar")
    # A single other client decides nothing; from two on the majority does.
    assert start.usual_labels("a", 2) == 2
    start.count("a", [10, 0], 10, 0.2)
    assert start.usual_labels("liar", 3) == 3
    assert start.usual_labels("b", 2) == 2
    start.count("b", [10, 0], 10, 0.2)
    assert start.usual_labels("liar", 3) == 2
    # A client that agrees with the first one is deceived, but harms only itself.
    assert start.usual_labels("c", 3) == 3
    # Counts of an unusual length are ignored, and new ones of the usual length are a change.
    start.settle("a")
    assert start.group_by_labels("b", {"liar": 1}) is None
    assert start.group_by_labels("b", {"liar": 1, "a": 2}) == 2
    start.count("liar", [10, 0], 10, 0.2)
    assert start.cold == {"liar": True}


def test_a_group_by_labels_is_the_only_one_that_has_them() -> None:
    start = ColdStart(np.zeros(2, np.float32))
    for client, counts in {"a": [10, 0, 0], "b": [5, 0, 5], "c": [0, 0, 8]}.items():
        start.count(client, counts, 10, 0.2)
        start.settle(client)
    homes = {"a": 1, "b": 1, "c": 2}
    start.counts["new"] = [6, 4, 0]
    assert start.group_by_labels("new", homes) == 1
    # b has half of these labels too, c all.
    start.counts["new"] = [0, 0, 3]
    assert start.group_by_labels("new", homes) is None
    assert start.group_by_labels("new", {"a": 1, "c": 2}) == 2
    # No client has the label; a client is not compared with itself.
    start.counts["new"] = [0, 3, 0]
    assert start.group_by_labels("new", homes) is None
    assert start.group_by_labels("a", {"a": 1}) is None
