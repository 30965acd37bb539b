"""A method written from the docs: clusters with a shared parent model."""

from __future__ import annotations

import re
from pathlib import Path

import hierarchical
import numpy as np
from clustered import check_it_can_be_restored, found, run_on, three_groups
from hierarchical import PARENT, Hierarchy, HierarchyParameters

from raceme.core import events

SOURCE = Path(hierarchical.__file__).read_text(encoding="utf-8")


def test_it_is_one_short_file_without_a_name_of_ours_that_is_private() -> None:
    assert len(SOURCE.splitlines()) <= 90
    assert not re.search(r"[.\s]_[a-z]", SOURCE)


def test_the_groups_are_found_and_served_by_parent_and_cluster() -> None:
    strategy = Hierarchy()
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    assert len(strategy.models) == 4
    weights = {tuple(strategy.clusters.of(client).values()) for client in strategy.clusters.members}
    assert weights == {(0.7, 0.3)}
    changes = [event.change for event in seen if isinstance(event, events.ClustersChanged)]
    # All clients join the parent, three clusters are founded, and all clients move once.
    assert [changes.count(change) for change in events.ClusterChange] == [12, 12, 0, 0, 3, 0]
    last = [event for event in seen if isinstance(event, events.Evaluated)][-1]
    assert last.accuracy > 0.4


def test_a_client_is_sent_the_weighted_mean() -> None:
    strategy = Hierarchy(HierarchyParameters(share=0.25))
    run_on(strategy, three_groups(), 60)
    client = next(iter(strategy.clusters.members))
    cluster = strategy.clusters.main(client)
    served = strategy.result.client_clusters[client]
    assert served == {cluster: 0.75, PARENT: 0.25}
    assert not np.array_equal(strategy.models[cluster].vector, strategy.models[PARENT].vector)


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(Hierarchy)
