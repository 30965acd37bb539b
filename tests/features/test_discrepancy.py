"""The distance of clients' models from that of their cluster, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import grid_of, pulled_app, write
from runs import devices, of

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.progress import Plan
from raceme.strategies import FedAvg

ONES = np.ones(8)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_discrepancy_of_a_round_by_hand(wanted: bool) -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app([8 * ONES, 0 * ONES, 0 * ONES]), devices(1.0, 1.0, 1.0))
    method = FedAvg()
    method.features = Chain.of(RunConfig.from_mapping({"discrepancy": wanted}))
    method.run(grid, write(0 * ONES), 3, plan=Plan(eval_every=10), observe=seen.append)
    # Clients move half way from 0: to 4, 0 and 0 in each number. By 10, 11 and 12 examples their
    # mean is m = 40/33, so that they are (4 − m, m, m) from the new model, times √8; from the old
    # one it would be (4, 0, 0).
    mean = 40 / 33
    expected = [3, pytest.approx((4 - mean + 2 * mean) / 3 * 8**0.5)]
    measured = of(events.Measured, seen)
    assert [[*event.values.values()] for event in measured] == ([expected] if wanted else [])
