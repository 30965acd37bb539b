"""The share of a member's update in its cluster's model (Panicle), by hand."""

from __future__ import annotations

import pytest

from raceme.strategies.panicle.strategy import share_of


def test_the_share_falls_from_casas_to_that_of_one_member() -> None:
    # 2 / log2(13 + 3) = 0.5; after ten rounds half of it; in the end 1/13.
    assert share_of(13, 0.0) == pytest.approx(0.5)
    assert share_of(13, 10.0) == pytest.approx(0.25)
    assert share_of(13, 1000.0) == pytest.approx(1 / 13)
    # A client alone in its cluster replaces the model.
    assert share_of(1, 0.0) == share_of(1, 1000.0) == 1.0
