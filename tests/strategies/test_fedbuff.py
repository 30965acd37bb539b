"""FedBuff: statistics of batch normalisation in a buffer."""

import pytest
from clustered import step, update, with_statistics

from raceme.strategies import FedBuff, FedBuffParameters


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    made = with_statistics(FedBuff(FedBuffParameters(k=2)), 3)
    late = update(made, "c2", 1, 0.2)
    step(made, "c0", 1, 0.5)
    step(made, "c1", 1, 0.1)
    assert made.models[0].vector.tolist() == pytest.approx([1, 0.3])
    # From a variance of 1 to 0.2: added to 0.3 that would be below 0.
    made.applied([late])
    step(made, "c0", 2, 0.4)
    assert made.models[0].vector.tolist() == pytest.approx([1 + (2**-0.5 + 1) / 2, 0.3])
