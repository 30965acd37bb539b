"""Panicle's clients whose data change: what they use, and what they leave behind."""

from __future__ import annotations

import numpy as np
from clustered import homes, step
from probing import EAST, NORTH, fleet, probe, two_groups

from raceme.strategies import Panicle


def with_a_long_update(*values: float) -> Panicle:
    """Two groups of three, of which the first client's update is suddenly long."""
    strategy = two_groups()
    for _ in range(2):
        for client in ("c0", "c1", "c2"):
            step(strategy, client, *(0.1 + strategy.models[strategy.clusters.main(client)].vector))
    step(strategy, "c0", *values)
    return strategy


def used(strategy: Panicle) -> dict[str, list[float]]:
    return {client: own.tolist() for client, own in strategy.used(list(strategy.clusters.online))}


def test_a_long_update_that_went_wrong_is_not_what_its_client_uses() -> None:
    strategy = with_a_long_update(7.0, -9.0)
    assert used(strategy).get("c0") != [7.0, -9.0]
    # It is as before.
    probe(strategy, "c0", *EAST)
    assert used(strategy).get("c0") != [7.0, -9.0]
    assert strategy.state.withheld == {}


def test_where_many_others_have_changed_a_client_uses_what_it_has_just_trained() -> None:
    strategy = with_a_long_update(7.0, -9.0)
    strategy.state.detectors["c0"].called = True
    assert used(strategy)["c0"] == [7.0, -9.0]


def test_who_has_found_its_new_cluster_uses_that_model() -> None:
    strategy = with_a_long_update(7.0, -9.0)
    probe(strategy, "c0", *NORTH)
    assert homes(strategy)["c0"] == homes(strategy)["c3"]
    assert strategy.state.withheld == {}


def test_who_founds_a_cluster_starts_it_from_what_it_has_just_trained() -> None:
    strategy = with_a_long_update(7.0, -9.0)
    former = strategy.models[strategy.clusters.main("c0")].version
    probe(strategy, "c0", -3.0, -3.0)
    # One probe more is needed to be alone.
    assert homes(strategy)["c0"] == homes(strategy)["c1"]
    assert used(strategy)["c0"] == [7.0, -9.0]
    probe(strategy, "c0", -3.0, -3.0)
    own = strategy.models[strategy.clusters.main("c0")]
    assert own.vector.tolist() == [7.0, -9.0]
    assert own.version > former
    assert strategy.state.withheld == {}


def test_nothing_is_kept_of_a_client_that_leaves() -> None:
    strategy = with_a_long_update(7.0, -9.0)
    strategy.on_leave("c0")
    assert strategy.state.withheld == {}


def test_while_data_change_nobody_is_asked_for_more_probes() -> None:
    # 60 degrees between groups of two: it is open whether these are clusters.
    def after_probes(change: int | None) -> Panicle:
        strategy = fleet(4)
        strategy.state.changes = {} if change is None else {"c0": change}
        for _ in range(2):
            for client, direction in zip(("c0", "c1", "c2", "c3"), kinds, strict=True):
                probe(strategy, client, *direction)
        return strategy

    kinds = (EAST, EAST, (1.83, 3.57), (1.83, 3.57))
    assert after_probes(None).state.wanted == 4
    # The look comes with the eighth probe: a change is recent for two updates per client.
    assert after_probes(-1).state.wanted == 2
    assert after_probes(-2).state.wanted == 4
    assert np.all([len(after_probes(change).models) == 1 for change in (None, -1, -2)])
