"""Latest models count where their clients are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.strategies.panicle.strategy import ClientMemory


def test_a_model_takes_the_place_of_the_former_one() -> None:
    latest = ClientMemory()
    latest.renew("a", 0, np.float32([2.0, 0.0]))
    latest.renew("b", 0, np.float32([0.0, 4.0]))
    latest.renew("a", 0, np.float32([4.0, 2.0]))
    assert latest.mean(0).tolist() == pytest.approx([2.0, 3.0])


def test_who_is_in_no_cluster_does_not_count_until_it_is() -> None:
    latest = ClientMemory()
    latest.renew("a", 0, np.float32([2.0, 0.0]))
    latest.renew("b", 0, np.float32([0.0, 4.0]))
    # A split has left b out.
    latest.recount({"a": 1, "b": None}.__getitem__)
    assert latest.mean(1).tolist() == [2.0, 0.0]
    assert latest.counts_in("a", 1)
    assert not latest.counts_in("b", 1)
    # Placed elsewhere, it takes nothing away from where it never counted.
    latest.renew("b", 2, np.float32([0.0, 6.0]))
    assert latest.counts == {1: 1, 2: 1}
    assert latest.mean(1).tolist() == [2.0, 0.0]
    latest.withdraw("b")
    assert latest.counts == {1: 1, 2: 0}
    assert latest.totals[2].tolist() == [0.0, 0.0]


def test_a_cluster_that_was_given_up_may_still_be_somebodys_home() -> None:
    latest = ClientMemory()
    latest.renew("a", 0, np.float32([2.0, 0.0]))
    latest.drop(0)
    latest.withdraw("a")
    assert latest.totals == {}
    assert latest.models == {}
