"""What a model was lately, on average: by hand, and where it begins anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.clusters import Model
from raceme.core.scheduling import from_tree, to_tree
from raceme.strategies.panicle.strategy import ModelAverages


def fed(values: list[float], share: float, members: int = 100) -> ModelAverages:
    averages = ModelAverages()
    for value in values:
        averages.take(0, np.array([value], np.float32), share, members)
    return averages


def shown(averages: ModelAverages) -> float:
    return float(averages.instead_of({0: Model(np.zeros(1))}, None)[0].vector[0])


def test_half_of_all_versions_by_hand() -> None:
    # 1; then 2 of max(1, ½ · 2): all of it; of 5 two thirds; of 9 one half.
    assert shown(fed([1.0], 0.5)) == 1.0
    assert shown(fed([1.0, 2.0], 0.5)) == 2.0
    assert shown(fed([1.0, 2.0, 5.0], 0.5)) == pytest.approx(4.0)
    assert shown(fed([1.0, 2.0, 5.0, 9.0], 0.5)) == pytest.approx(6.5)


def test_it_goes_back_one_update_of_each_member_at_most() -> None:
    before = fed([0.0] * 400, 0.5, members=4)
    before.take(0, np.ones(1, np.float32), 0.5, 4)
    assert shown(before) == pytest.approx(1 / 4)


def test_without_a_share_the_model_itself_is_used() -> None:
    assert fed([1.0, 2.0], 0.0).tails == {}
    model = Model(np.ones(1))
    assert fed([3.0], 0.0).instead_of({0: model}, None)[0] is model


def test_one_that_begins_anew_is_the_model_again() -> None:
    averages = fed([1.0, 2.0, 5.0], 0.5)
    averages.restart(0, 7, None)
    assert shown(averages) == 0.0
    averages.take(0, np.array([4.0], np.float32), 0.5, 100)
    averages.take(0, np.array([6.0], np.float32), 0.5, 100)
    assert shown(averages) == 6.0


def test_counters_are_the_models() -> None:
    averages = ModelAverages()
    for count in (1.0, 2.0, 7.0):
        averages.take(0, np.array([count, count], np.float32), 1.0, 10)
    model = Model(np.array([7.0, 7.0], np.float32))
    vector = averages.instead_of({0: model}, np.array([False, True]))[0].vector
    assert vector.tolist() == [pytest.approx(10 / 3), 7.0]


def test_the_model_that_is_averaged_may_change_later() -> None:
    averages, vector = ModelAverages(), np.ones(1, np.float32)
    averages.take(0, vector, 0.5, 1)
    vector += 1.0
    assert shown(averages) == 1.0


def test_a_restored_average_goes_on_as_the_original() -> None:
    averages = fed([1.0, 2.0, 5.0], 0.5)
    restored = from_tree(ModelAverages, to_tree(averages))
    for one in (averages, restored):
        one.take(0, np.array([9.0], np.float32), 0.5, 100)
    assert shown(restored) == shown(averages) == pytest.approx(6.5)


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_an_average_is_never_outside_of_what_was_seen(values: list[float], share: float) -> None:
    assert min(values) - 1e-4 <= shown(fed(values, share)) <= max(values) + 1e-4
