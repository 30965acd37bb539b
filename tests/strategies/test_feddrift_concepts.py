"""Concepts: detection, distances, merging and assignments, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.strategies.feddrift import (
    ConceptAssignments,
    cluster_distances,
    complete_linkage,
    has_drifted,
)


def test_a_loss_that_has_grown_by_more_than_delta_is_drift() -> None:
    assert has_drifted(0.5, before=0.25, delta=0.125)
    assert not has_drifted(0.375, before=0.25, delta=0.125)
    assert not has_drifted(0.1, before=0.25, delta=0.125)
    assert not has_drifted(9.0, before=None, delta=0.125)


def test_distances_by_hand() -> None:
    losses = np.array([[0.1, 0.3, 0.2], [0.15, 0.2, 0.9], [0.1, 0.4, 0.5]])
    # d(0, 1) = max(0.3 − 0.1, 0.15 − 0.2, 0) = 0.2; d(0, 2) = max(0.2 − 0.1, 0.1 − 0.5) = 0.1;
    # d(1, 2) = max(0.9 − 0.2, 0.4 − 0.5) = 0.7.
    expected = np.array([[0, 0.2, 0.1], [0.2, 0, 0.7], [0.1, 0.7, 0]])
    assert cluster_distances(losses) == pytest.approx(expected)


def test_a_model_that_does_better_on_others_data_is_not_nearer_than_zero() -> None:
    assert cluster_distances(np.array([[0.5, 0.1], [0.2, 0.6]])).tolist() == [[0, 0], [0, 0]]


def test_an_unmeasured_distance_is_infinite() -> None:
    losses = np.array([[0.1, np.nan, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1, np.nan]])
    far = np.inf
    assert cluster_distances(losses).tolist() == [[0, far, far], [far, 0, far], [far, far, 0]]


def test_complete_linkage_looks_at_the_farthest_members() -> None:
    # 0, 1 and 2 are in a row, 3 is near 2: 0 and 1 merge first, then 2 and 3; {0, 1} and {2, 3} are
    # 5 apart, although 1 and 2 are 2 apart.
    distances = np.array(
        [[0, 1.0, 3.0, 5.0], [1.0, 0, 2.0, 4.0], [3.0, 2.0, 0, 1.5], [5.0, 4.0, 1.5, 0]]
    )
    assert complete_linkage(distances, 3.5) == [[0, 1], [2, 3]]
    assert complete_linkage(distances, 5.0) == [[0, 1], [2, 3]]
    assert complete_linkage(distances, 5.1) == [[0, 1, 2, 3]]
    # A distance equal to the bound is not below it.
    assert complete_linkage(distances, 1.5) == [[0, 1]]
    assert complete_linkage(distances, 1.0) == []
    assert complete_linkage(np.zeros((0, 0)), 1.0) == []
    assert complete_linkage(np.full((2, 2), np.inf), 9.0) == []


def filled() -> ConceptAssignments:
    """c0 has gone from model 0 to model 1 and back, c1 has only had model 1."""
    concepts = ConceptAssignments()
    for client, steps in {"c0": [0, 0, 1, 0], "c1": [1, 1]}.items():
        for step, model in enumerate(steps):
            concepts.assign(client, step, model)
    return concepts


def test_a_client_trains_each_of_its_models_on_all_data_that_belong_to_it() -> None:
    concepts = filled()
    assert concepts.by_model("c0", now=3) == {0: [0, 1, 3], 1: [2]}
    assert list(concepts.by_model("c0", now=3)) == [0, 1]
    assert list(concepts.by_model("c0", now=2)) == [1, 0]
    assert concepts.by_model("c0", now=3, memory=2) == {0: [3], 1: [2]}
    assert concepts.by_model("c0", now=3, memory=1) == {0: [3]}
    assert concepts.by_model("c9", now=3) == {}
    assert (concepts.pairs(0), concepts.pairs(1)) == (3, 3)


def test_models_are_measured_on_new_data_and_those_remembered() -> None:
    concepts = filled()
    assert concepts.to_score("c0", 4) == [0, 1, 2, 3, 4]
    assert concepts.to_score("c0", 3) == [0, 1, 2, 3]
    assert concepts.to_score("c0", 4, memory=2) == [3, 4]
    assert concepts.to_score("c0", 4, memory=1) == concepts.to_score("c0", 4, newest=True) == [4]


def test_what_was_merged_keeps_its_data() -> None:
    concepts = filled()
    concepts.unite([0, 1], 2)
    assert concepts.by_model("c0", now=3) == {2: [0, 1, 2, 3]}
    concepts.unite([2, 5], 6)
    assert (concepts.heir(0), concepts.heir(6), concepts.heir(7)) == (6, 6, 7)
    # Losses measured before the merges: the merged model gets the least one of its sources.
    concepts.take("c0", {3: {0: 0.5, 1: 0.25, 9: 0.1}}, there=[6])
    assert concepts.losses == {"c0": {3: {6: 0.25}}}


def test_what_was_given_up_has_no_data() -> None:
    concepts = filled()
    concepts.forget(0)
    assert concepts.assigned == {"c0": {2: 1}, "c1": {0: 1, 1: 1}}


def test_mean_losses_by_hand() -> None:
    concepts = filled()
    concepts.take("c0", {2: {0: 0.8, 1: 0.2}, 3: {0: 0.1, 1: 0.7}}, there=[0, 1])
    concepts.take("c1", {1: {0: 0.6, 1: 0.4}}, there=[0, 1])
    # Data of model 0: c0's step 3; of model 1: c0's step 2 and c1's step 1.
    expected = np.array([[0.1, 0.7], [0.7, 0.3]])
    assert concepts.mean_losses([0, 1]) == pytest.approx(expected)
    # d = max(0.7 − 0.1, 0.7 − 0.3) = 0.6.
    assert concepts.alike([0, 1], below=0.5) == []
    assert concepts.alike([0, 1], below=0.7) == [[0, 1]]
    assert np.isnan(concepts.mean_losses([0, 7])[1]).all()


def test_no_other_client_takes_an_isolated_model() -> None:
    concepts = ConceptAssignments(isolated={1: 2})
    concepts.take("c0", {0: {0: 0.5, 1: 0.1}}, there=[0, 1])
    assert concepts.best("c0", 0, own=0) == (0, 0.5)
    assert concepts.best("c0", 0, own=1) == (1, 0.1)
    concepts.age([1])
    assert concepts.best("c0", 0, own=0) == (0, 0.5)
    concepts.age([1])
    assert concepts.best("c0", 0, own=0) == (1, 0.1)
    # If all models are isolated, a newcomer may take any of them.
    concepts.isolated = {0: 1, 1: 1}
    assert concepts.best("c0", 0, own=None) == (1, 0.1)
