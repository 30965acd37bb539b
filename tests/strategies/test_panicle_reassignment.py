"""Reassignment of clients from their clusters to the groups that were found."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raceme.strategies.panicle.probes import plan_reassignment


def test_a_group_that_has_no_cluster_is_split_off() -> None:
    plan = plan_reassignment(np.array([0, 0, 0, 0, 0]), np.array([0, 0, 0, 1, 1]))
    assert (plan.merges, plan.splits, plan.home) == ([], {0: [1]}, {0: 0})


def test_a_cluster_without_a_group_is_merged() -> None:
    plan = plan_reassignment(np.array([3, 3, 3, 5, 5]), np.zeros(5, np.int64))
    assert (plan.merges, plan.splits, plan.home) == ([[3, 5]], {}, {0: 3})


def test_a_client_in_the_wrong_cluster_is_moved() -> None:
    now, wanted = np.array([1, 1, 1, 2, 2, 2]), np.array([0, 0, 1, 1, 1, 1])
    plan = plan_reassignment(now, wanted)
    assert (plan.merges, plan.splits, plan.home) == ([], {}, {0: 1, 1: 2})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_every_group_has_one_origin(pairs: list[tuple[int, int]]) -> None:
    now = np.array([cluster for cluster, _ in pairs])
    wanted = np.unique([group for _, group in pairs], return_inverse=True)[1]
    plan = plan_reassignment(now, wanted)
    split_off = [group for groups in plan.splits.values() for group in groups]
    assert sorted([*plan.home, *split_off]) == list(range(int(wanted.max()) + 1))
    # Each cluster is merged at most once, and the merges leave one cluster per home.
    merged = [cluster for sources in plan.merges for cluster in sources]
    assert len(merged) == len(set(merged))
    left = len(set(now.tolist())) - len(merged) + len(plan.merges)
    assert left == len(plan.home)
