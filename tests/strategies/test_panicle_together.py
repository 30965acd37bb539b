"""Panicle's clusters whose members' data change the same way (`together`)."""

from __future__ import annotations

import numpy as np
import pytest
from clustered import homes, step
from probing import NORTH, partition_of, probe, two_groups

from raceme.strategies import Panicle

START = [["c0", "c1", "c2"], ["c3", "c4", "c5"]]


def trained(**options: object) -> Panicle:
    """Two groups of three that have each trained twice, a little."""
    strategy = two_groups(**options)
    for _ in range(2):
        for client in strategy.clusters.members:
            moved_by(strategy, client, 0.1, 0.1)
    return strategy


def moved_by(strategy: Panicle, client: str, *change: float) -> float:
    """Let a client train, from its cluster's model by a change; return its weight."""
    start = strategy.models[strategy.clusters.main(client)].vector
    return float(step(strategy, client, *(start + np.float32(change))).weight)


def test_two_of_three_that_change_alike_are_where_their_cluster_goes_on_from() -> None:
    strategy = trained(together=True)
    k = strategy.clusters.main("c0")
    start = strategy.models[k].vector.copy()
    assert moved_by(strategy, "c0", 7.0, -9.0) == 0.0
    assert strategy.models[k].vector.tolist() == start.tolist()
    # Directions (7, -9) and (9, -7) have a cosine of 0.97: the model begins as the mean of both.
    assert moved_by(strategy, "c1", 9.0, -7.0) == 0.5
    assert strategy.models[k].vector == pytest.approx(start + np.float32([8.0, -8.0]))
    assert not strategy.state.detectors["c0"].suspected
    assert strategy.state.withheld == {}
    # The third is no surprise any more.
    assert moved_by(strategy, "c2", 5.0, -5.0) > 0.0
    assert partition_of(strategy) == START


def test_their_former_probes_are_compared_with_no_new_one() -> None:
    strategy = trained(together=True)
    moved_by(strategy, "c0", 7.0, -9.0)
    moved_by(strategy, "c1", 9.0, -7.0)
    assert set(strategy._clear()) == {"c3", "c4", "c5"}
    # By its new data c0 lies near the other group, and yet it is left with its own.
    for client in ("c0", "c1", "c2"):
        probe(strategy, client, *NORTH)
        assert partition_of(strategy) == START
    assert strategy.state.changes == {}
    # A second one of each tells that all are alike now.
    for client in ("c0", "c1", "c2"):
        probe(strategy, client, *NORTH)
    assert len(partition_of(strategy)) == 1


def test_without_the_option_each_is_suspected() -> None:
    strategy = trained()
    assert moved_by(strategy, "c0", 7.0, -9.0) == 0.0
    assert moved_by(strategy, "c1", 9.0, -7.0) == 0.0
    assert set(strategy.state.withheld) == {"c0", "c1"}


def test_members_that_change_in_different_ways_are_suspected() -> None:
    strategy = trained(together=True)
    assert moved_by(strategy, "c0", 7.0, -9.0) == 0.0
    # A cosine of 0.12, and of -0.99.
    assert moved_by(strategy, "c1", 9.0, 9.0) == 0.0
    assert moved_by(strategy, "c2", -7.0, 8.0) == 0.0
    assert set(strategy.state.withheld) == {"c0", "c1", "c2"}
    # Then each goes where its new data are.
    probe(strategy, "c0", *NORTH)
    assert homes(strategy)["c0"] == homes(strategy)["c3"]


def test_members_that_do_not_change_speak_against_it() -> None:
    strategy = trained(together=True)
    moved_by(strategy, "c0", 7.0, -9.0)
    for client in ("c1", "c2"):
        assert moved_by(strategy, client, 0.1, 0.1) > 0.0
    # Two are as many as those that have not changed: c1 has by now.
    assert moved_by(strategy, "c1", 9.0, -7.0) > 0.0
    strategy = trained(together=True)
    strategy._move("c3", strategy.clusters.main("c0"))
    moved_by(strategy, "c0", 7.0, -9.0)
    for client in ("c2", "c3"):
        assert moved_by(strategy, client, 0.1, 0.1) > 0.0
    assert moved_by(strategy, "c1", 9.0, -7.0) == 0.0


def test_a_client_that_changed_waits_for_its_cluster_unless_it_clearly_belongs_elsewhere() -> None:
    def home_after_a_probe(*direction: float, **options: object) -> str:
        strategy = trained(most=2, **options)
        moved_by(strategy, "c0", 7.0, -9.0)
        probe(strategy, "c0", *direction)
        return "own" if homes(strategy)["c0"] == homes(strategy)["c1"] else "other"

    # Far from both, a little less from the others: 1.72 and 1.76.
    assert home_after_a_probe(-3.2, -3.0) == "other"
    assert home_after_a_probe(-3.2, -3.0, together=True) == "own"
    assert home_after_a_probe(*NORTH, together=True) == "other"

    strategy = trained(most=2, together=True)
    moved_by(strategy, "c0", 7.0, -9.0)
    # One of its own has not changed, and so will not follow.
    moved_by(strategy, "c1", 0.1, 0.1)
    probe(strategy, "c0", -3.2, -3.0)
    assert homes(strategy)["c0"] == homes(strategy)["c3"]


def test_a_client_whose_new_data_are_clearly_anothers_goes_there_at_once() -> None:
    strategy = trained(together=True)
    moved_by(strategy, "c0", 7.0, -9.0)
    probe(strategy, "c0", *NORTH)
    assert homes(strategy)["c0"] == homes(strategy)["c3"]
    moved_by(strategy, "c1", 7.0, -9.0)
    # c0 has gone: one of two is not most of them.
    assert set(strategy.state.withheld) == {"c1"}
    probe(strategy, "c1", *NORTH)
    assert partition_of(strategy) == [["c0", "c1", "c3", "c4", "c5"], ["c2"]]
    # Those that have come speak against a change of their new cluster: two of five, and two.
    moved_by(strategy, "c3", 7.0, -9.0)
    assert moved_by(strategy, "c4", 9.0, -7.0) == 0.0
    assert moved_by(strategy, "c5", 8.0, -8.0) == pytest.approx(1 / 3)


def test_sudden_updates_are_part_of_a_checkpoint() -> None:
    strategy = trained(together=True)
    moved_by(strategy, "c0", 7.0, -9.0)
    copied = Panicle(strategy.parameters)
    copied.load_state_dict(strategy.state_dict())
    one, other = strategy.state.jumps["c0"], copied.state.jumps["c0"]
    assert (one.cluster, one.when, one.sent) == (other.cluster, other.when, other.sent)
    assert np.array_equal(one.direction, other.direction)
