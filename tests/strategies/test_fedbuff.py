"""FedBuff: what a buffer does with statistics of batch normalisation."""

import numpy as np
import pytest
from clustered import step, update

from raceme.core.clients import Client
from raceme.core.messages import ModelSpec
from raceme.strategies import FedBuff, FedBuffParameters


def test_running_statistics_are_averaged_and_never_extrapolated() -> None:
    made = FedBuff(FedBuffParameters(k=2))
    made._spec = ModelSpec(("weight", "running_var"), ((1,), (1,)), ("float32", "float32"))
    made.initialize(np.array([0, 1], np.float32))
    for index in range(3):
        made.on_join(Client(f"c{index}", num_examples=10))
    late = update(made, "c2", 1, 0.2)
    step(made, "c0", 1, 0.5)
    step(made, "c1", 1, 0.1)
    assert made.models[0].vector.tolist() == pytest.approx([1, 0.3])
    # From a variance of 1 to 0.2: added to 0.3 that would be below 0.
    made.applied([late])
    step(made, "c0", 2, 0.4)
    assert made.models[0].vector.tolist() == pytest.approx([1 + (2**-0.5 + 1) / 2, 0.3])
