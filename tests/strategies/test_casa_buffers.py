"""CASA's buffers: compared pairs, dropped models, shared storage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.clusters import Clusters, Model
from raceme.strategies.casa.buffers import Code, Landmarks, ModelBuffers, WholeModels


def code(*values: float) -> Code:
    return WholeModels().encode(np.array(values, np.float32))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.intp)


def buffers_for(clients: int) -> ModelBuffers:
    buffers = ModelBuffers()
    buffers.resize(clients)
    return buffers


def test_cosines_by_hand() -> None:
    buffers = buffers_for(3)
    buffers.insert(1, code(3, 4), ids(0))
    buffers.insert(2, code(-2, 0), ids(0))
    owners, cosines = buffers.cosines(0, code(1, 0).query)
    # cos((1, 0), (3, 4)) = 3/5; cos((1, 0), (−2, 0)) = −1.
    assert owners.tolist() == [1, 2]
    assert cosines.tolist() == pytest.approx([0.6, -1.0])


def test_a_shared_model_is_stored_once_and_freed_with_its_last_reference() -> None:
    buffers = buffers_for(4)
    buffers.insert(0, code(1, 2), ids(1, 2, 3))
    assert buffers.total == 3
    assert np.count_nonzero(buffers.references) == 1
    for client in (1, 2, 3):
        buffers.clear(client)
    assert buffers.total == 0
    assert not buffers.references.any()


def test_the_store_doubles_when_full() -> None:
    buffers = buffers_for(18)
    for owner in range(17):
        assert len(buffers.codes) == (16 if owner else 0)
        buffers.insert(owner, code(1, 2), ids(17))
    assert len(buffers.codes) == len(buffers.norms) == len(buffers.references) == 32


def test_representative_is_the_data_weighted_mean() -> None:
    buffers = buffers_for(3)
    buffers.insert(1, code(3, 4), ids(0))
    buffers.insert(2, code(1, 0), ids(0))
    # (30 · (3, 4) + 10 · (1, 0)) / 40 = (2.5, 3).
    mean = buffers.mean_of(0, ids(1, 2), np.array([30.0, 10.0]))
    assert mean.tolist() == pytest.approx([2.5, 3.0])


def test_budget_drops_computed_pairs_first_then_buffers_of_large_alpha() -> None:
    buffers = buffers_for(4)
    buffers.insert(3, code(1, 0), ids(0, 1, 2))
    buffers.insert(2, code(0, 1), ids(0, 1))
    computed = np.eye(4, dtype=bool)
    computed[0, 3] = computed[3, 0] = True
    alphas = np.array([0.1, 0.3, 0.2, 0.3])
    # Of (0,3) (1,3) (2,3) (0,2) (1,2) only (0,3) is computed, so it is dropped first. Then the
    # items of client 1, whose α = 0.3 is the largest among the buffers' clients.
    buffers.enforce(4, computed, alphas, np.random.default_rng(0))
    assert buffers.owners(0).tolist() == [2]
    assert buffers.total == 4
    buffers.enforce(2, computed, alphas, np.random.default_rng(0))
    assert buffers.owners(1).tolist() == []
    assert buffers.owners(0).tolist() == [2]
    assert buffers.owners(2).tolist() == [3]


def test_a_budget_of_models_counts_each_once() -> None:
    buffers = buffers_for(5)
    buffers.insert(4, code(1, 0), ids(0, 1))
    buffers.insert(3, code(0, 1), ids(1, 2))
    buffers.insert(2, code(1, 1), ids(0, 3))
    computed = np.eye(5, dtype=bool)
    computed[0, 4] = computed[4, 0] = True
    alphas = np.array([0.3, 0.2, 0.1, 0.4, 0.5])
    enforced = computed, alphas, np.random.default_rng(0), "models"
    buffers.enforce(3, *enforced)
    assert buffers.total == 6
    # In order: (2,3), then (1,4) and (1,3) by chance, (0,2), (3,2), and the computed (0,4). So
    # the models of c3 and c4 are the first two, and keep all their items.
    buffers.enforce(2, *enforced)
    assert [buffers.owners(j).tolist() for j in range(4)] == [[4], [3, 4], [3], []]
    buffers.enforce(1, *enforced)
    assert [buffers.owners(j).tolist() for j in range(4)] == [[], [3], [3], []]


def dropped(alphas: list[float], times: int) -> list[int]:
    """Drop an item from the buffers of c0, c1 and c2; return how often each lost one."""
    counts = [0, 0, 0]
    for seed in range(times):
        buffers = buffers_for(4)
        buffers.insert(3, code(1, 0), ids(0, 1, 2))
        computed = np.eye(4, dtype=bool)
        buffers.enforce(2, computed, np.array([*alphas, 0.5]), np.random.default_rng(seed))
        (empty,) = (j for j in range(3) if not len(buffers.owners(j)))
        counts[empty] += 1
    return counts


def test_among_equal_alphas_chance_decides_whose_buffer_is_spared() -> None:
    counts = dropped([0.3, 0.3, 0.3], times=300)
    assert sum(counts) == 300
    # 100 ± 8.2 each.
    assert min(counts) > 70
    assert dropped([0.31, 0.3, 0.32], times=20) == [0, 0, 20]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 5)), st.booleans()), max_size=40),
    st.integers(0, 12),
)
def test_references_and_total_always_agree(
    steps: list[tuple[int, set[int], bool]], budget: int
) -> None:
    buffers = buffers_for(6)
    rng = np.random.default_rng(0)
    for owner, targets, clear in steps:
        if clear:
            buffers.clear(owner)
        free = [j for j in sorted(targets - {owner}) if not buffers.holds(owner)[j]]
        buffers.insert(owner, code(*rng.normal(size=3)), np.array(free, np.intp))
        buffers.enforce(budget, np.eye(6, dtype=bool), rng.uniform(size=6), rng)
        held = buffers.slots[buffers.slots >= 0]
        assert buffers.total == len(held) <= budget
        counts = np.bincount(held, minlength=len(buffers.references))
        assert counts.tolist() == buffers.references.tolist()


def test_a_newcomer_without_a_sketch_joins_the_largest_cluster() -> None:
    clusters = Clusters({k: Model(np.zeros(2, np.float32)) for k in range(2)})
    for client, cluster in (("a", 0), ("b", 1), ("c", 1)):
        clusters.join(client)
        clusters.assign(client, cluster)
    landmarks = Landmarks()
    landmarks.note("a", np.array([3, 4], np.float32))
    assert landmarks.cluster_near("new", ["a", "b"], clusters) == 1
    landmarks.note("new", np.array([3, 4], np.float32))
    # a is the only landmark with a sketch; without a landmark the largest cluster counts again.
    assert landmarks.cluster_near("new", ["a", "b"], clusters) == 0
    assert landmarks.cluster_near("new", ["b", "c"], clusters) == 1
