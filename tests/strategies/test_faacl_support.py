"""Support between clusters: tests by hand, merges, and partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.strategies.faacl.strategy import (
    ComparedClusters,
    Supported,
    disjoint_pairs,
    fewest_samples,
    no_worse,
)


def near(*values: float) -> np.ndarray:
    return np.array(values)


ONES = np.ones(5)
SPREAD = near(0.01, 0.02, 0.03, 0.04, 0.05)


def test_five_samples_that_all_agree_are_just_enough_at_a_level_of_5_percent() -> None:
    # The least p of five samples is 2^-5 = 0.03125, of four 2^-4 = 0.0625.
    assert no_worse(ONES, ONES - SPREAD, epsilon=0.0, alpha=0.05)
    assert not no_worse(ONES[:4], ONES[:4] - SPREAD[:4], epsilon=0.0, alpha=0.05)
    assert no_worse(ONES, ONES - SPREAD, epsilon=0.0, alpha=0.03125)
    assert not no_worse(ONES, ONES - SPREAD, epsilon=0.0, alpha=0.03)
    assert [fewest_samples(alpha) for alpha in (0.5, 0.25, 0.1, 0.05, 0.03125, 0.03)] == [
        *(1, 2, 4, 5, 5, 6)
    ]


def test_one_sample_of_five_against_it_decides_by_its_rank() -> None:
    # Differences -1, -2, -3, -4 and one against: its rank 1 gives p = 2/32, above 0.05.
    worse = near(0.5, -1.0, -2.0, -3.0, -4.0)
    assert not no_worse(np.zeros(5), worse, epsilon=0.0, alpha=0.06)
    assert no_worse(np.zeros(5), worse, epsilon=0.0, alpha=0.0625)


def test_up_to_13_tied_differences_count_by_the_distribution_without_ties() -> None:
    # The tied ones have rank 2 each. Of 2^13 signs, 3 give the ranks 1 to 13 a positive sum of at
    # most 2, but 4 the tied ranks: p = 3 / 8192, not 4 / 8192.
    other = near(1.0, -1.0, -1.0, *range(-11, -1))
    assert no_worse(np.zeros(13), other, epsilon=0.0, alpha=3 / 8192)
    assert not no_worse(np.zeros(13), other, epsilon=0.0, alpha=2.9 / 8192)


def test_a_model_may_be_worse_by_less_than_epsilon() -> None:
    other = ONES + 0.5 + SPREAD
    assert no_worse(ONES, other, epsilon=0.56, alpha=0.05)
    assert not no_worse(ONES, other, epsilon=0.49, alpha=0.05)


def test_equal_models_support_each_other_unless_epsilon_is_zero() -> None:
    # All differences are -ε; or all are zero, which is no evidence.
    assert no_worse(ONES, ONES, epsilon=0.1, alpha=0.05)
    assert not no_worse(ONES, ONES, epsilon=0.0, alpha=0.05)
    # Zeros are left out: the remaining four differences are too few.
    assert not no_worse(ONES, ONES - SPREAD * [0, 1, 1, 1, 1], epsilon=0.0, alpha=0.05)


def test_huge_losses_decide_as_other_bad_ones_do() -> None:
    huge = np.full(8, np.finfo(np.float32).max, np.float64)
    assert not no_worse(np.ones(8), huge, epsilon=0.7, alpha=0.05)
    assert no_worse(huge, np.ones(8), epsilon=0.7, alpha=0.05)


def test_all_clients_of_a_cluster_have_to_agree_and_the_first_that_does_not_ends_it() -> None:
    supported = Supported()
    good, bad = {1: ONES, 2: ONES - SPREAD}, {1: ONES, 2: ONES + SPREAD}
    assert supported.find(1, [2], [good, good], 0.0, 0.05) == [2]
    assert supported.tests == 2
    assert supported.find(1, [2], [bad, good], 0.0, 0.05) == []
    assert supported.tests == 3
    # No client, or a client that has not measured: no support, and no test.
    assert supported.find(1, [2], [], 0.0, 0.05) == []
    assert supported.find(1, [3], [good], 0.0, 0.05) == []
    assert supported.tests == 3


def test_what_two_merged_clusters_had_in_common_stays() -> None:
    supported = Supported(partitions=[ComparedClusters([1, 2, 3, 4, 5])])
    supported.support(1, [2, 3, 4])
    supported.support(2, [1, 3])
    supported.support(3, [1, 2])
    supported.support(4, [1])
    supported.unite((1, 2), 6)
    # 3 supported both; both supported 3; only 1 supported 4.
    assert supported.listed() == {3: (6,), 6: (3,)}
    assert supported.partitions[0].clusters == [3, 4, 5, 6]
    assert supported.supported_by(3) == [6]
    assert [supported.heir(cluster) for cluster in (1, 2, 3, 6)] == [6, 6, 3, 6]
    supported.unite((3, 6), 7)
    assert supported.heir(1) == 7
    assert supported.listed() == {}


def test_a_pass_merges_disjoint_pairs_only() -> None:
    rng = np.random.default_rng(0)
    assert disjoint_pairs([1, 2], lambda a, b: False, rng) == []
    all_of_three = {tuple(disjoint_pairs([1, 2, 3], lambda a, b: True, rng)) for _ in range(60)}
    assert all_of_three == {((1, 2),), ((1, 3),), ((2, 3),)}


@given(st.integers(0, 9), st.integers(0, 99))
def test_no_cluster_is_in_two_pairs_and_no_more_can_be_merged(count: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    mutual = drawn.random((count, count)) < 0.5
    pairs = disjoint_pairs(range(count), lambda a, b: bool(mutual[a, b]), drawn)
    used = [cluster for pair in pairs for cluster in pair]
    assert len(used) == len(set(used))
    left = [cluster for cluster in range(count) if cluster not in used]
    assert not any(mutual[a, b] for a in left for b in left if a < b)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_partitions_are_joined_in_pairs_and_an_odd_one_waits(count: int) -> None:
    supported = Supported(partitions=[ComparedClusters([k], settled=True) for k in range(count)])
    supported.join(np.random.default_rng(1))
    sizes = sorted(len(partition.clusters) for partition in supported.partitions)
    assert sizes == [1] * (count % 2) + [2] * (count // 2)
    assert sorted(c for p in supported.partitions for c in p.clusters) == list(range(count))
    # Joined pairs still have to be compared; the odd cluster has no partner.
    assert all(p.settled == (len(p.clusters) == 1) for p in supported.partitions)
    (pair, *_) = (p.clusters for p in supported.partitions) if count > 1 else ([0],)
    assert supported.compared_with(pair[0]) == pair[1:]
    assert supported.is_unsettled(pair[0]) == (count > 1)
