"""How far one update moves a cluster's model: hand-computed."""

import numpy as np
import pytest

from raceme.strategies.panicle.strategy import calibration, carried, cut, share_of


def test_the_share_falls_from_casas_to_that_of_one_member() -> None:
    # 2 / log2(13 + 3) = 0.5; after ten rounds half of it; in the end 1/13.
    assert share_of(13, 0.0, 2.0, 10.0) == pytest.approx(0.5)
    assert share_of(13, 10.0, 2.0, 10.0) == pytest.approx(0.25)
    assert share_of(13, 1000.0, 2.0, 10.0) == pytest.approx(1 / 13)


def test_a_client_alone_has_its_own_model() -> None:
    assert share_of(1, 0.0, 2.0, 10.0) == 1.0
    assert share_of(1, 1000.0, 2.0, 10.0) == 1.0


def test_a_former_model_is_taken_back_whole_where_a_share_is_one_members() -> None:
    assert calibration(1 / 13, 13) == pytest.approx(1.0)
    assert calibration(0.5, 10) == pytest.approx(0.2)


def test_less_is_carried_where_many_are_under_way() -> None:
    # 7.5 / (0.3 · 100) = 0.25.
    assert carried(0.3, 100, 0.5) == pytest.approx(0.25)
    assert carried(0.5, 10, 0.5) == 0.5


def test_a_change_is_cut_to_a_length() -> None:
    model, change = np.array([5.0, 8.0], np.float32), np.array([3.0, 4.0], np.float32)
    # From (2, 4): a fifth of a change of length 5.
    assert cut(model, change, 5.0, 1.0).tolist() == pytest.approx([2.6, 4.8])
    for bound in (0.0, 5.0, 10.0):
        assert cut(model, change, 5.0, bound) is model
