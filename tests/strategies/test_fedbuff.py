"""FedBuff: two buffers by hand, and statistics of batch normalisation in a buffer."""

import pytest
from clustered import at_version, step, update, with_clients, with_statistics

from raceme.strategies import FedBuff, FedBuffParameters


def test_two_buffers_by_hand() -> None:
    made = with_clients(FedBuff(FedBuffParameters(k=2, server_lr=0.5)), 3)
    late = update(made, "c2", 8, 0)
    # η_g s / K = 0.5 · 1 / 2.
    applied = step(made, "c0", 4, 0)
    assert (applied.staleness, applied.weight) == (0, 0.25)
    assert made.models[0].version == 0
    step(made, "c1", 0, 2)
    # 0.5 / 2 · ((4, 0) + (0, 2)).
    assert made.models[0].vector.tolist() == [1, 0.5]
    at_version(made, 3)
    # s(3) = 1 / √4: half of (8, 0), and then the fresh (1, 2.5) − (1, 0.5).
    applied = made.applied([late])[0]
    assert (applied.staleness, applied.weight) == (3, 0.125)
    step(made, "c0", 1, 2.5)
    assert made.models[0].vector.tolist() == [2, 1]
    assert made.state.count == 0


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    made = with_statistics(FedBuff(FedBuffParameters(k=2)), 3)
    late = update(made, "c2", 1, 0.2)
    step(made, "c0", 1, 0.5)
    step(made, "c1", 1, 0.1)
    assert made.models[0].vector.tolist() == pytest.approx([1, 0.3])
    # From a variance of 1 to 0.2: the difference added to 0.3 would be below 0.
    made.applied([late])
    step(made, "c0", 2, 0.4)
    assert made.models[0].vector.tolist() == pytest.approx([1 + (2**-0.5 + 1) / 2, 0.3])
