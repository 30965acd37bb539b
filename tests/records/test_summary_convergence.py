"""When a curve has converged, and how steadily."""

from __future__ import annotations

import math

import pytest

from raceme.records.summary import convergence_index, unrest


@pytest.mark.parametrize(
    ("accuracies", "index"),
    [
        # 0.945 is near 0.95, but the curve leaves again; 0.96 is exactly one point away.
        ([0.5, 0.945, 0.90, 0.96, 0.95], 3),
        ([0.95, 0.95], 0),
        ([0.1, 0.2, 0.3], 2),
        ([0.3], 0),
        ([0.3, math.nan, 0.3], 2),
        ([], None),
        ([0.3, math.nan], None),
    ],
)
def test_convergence_is_the_last_time_that_a_curve_comes_near_its_end(
    accuracies: list[float], index: int | None
) -> None:
    assert convergence_index(accuracies) == index


def test_unrest_by_hand() -> None:
    assert unrest([0.1, 0.2, 0.2, 0.5]) == 0.0
    # Below the best so far by 0, 0.2, 0 and 0.1: 0.3 / 4.
    assert unrest([0.5, 0.3, 0.6, 0.5]) == pytest.approx(0.075)
    assert unrest([0.5, math.nan, 0.3]) == pytest.approx(0.1)
    assert unrest([]) is None
