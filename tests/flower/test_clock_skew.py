"""A wall clock that is set while a server runs."""

from __future__ import annotations

import pytest

from raceme.flower.link_state import ClockSkew


def test_a_jump_is_told_once_and_small_corrections_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wall, steady = 1000.0, 5.0
    jumps = ClockSkew(lambda: wall, lambda: steady)
    wall, steady = wall + 3600 + 1, steady + 1
    assert jumps.seconds() == 3600
    assert jumps.seconds() == 0
    assert "set forward by 3600 s" in caplog.text
    wall += 5
    assert jumps.seconds() == 0
    wall -= 7205
    assert jumps.seconds() == pytest.approx(-7200)
    assert "set back by 7200 s" in caplog.text
