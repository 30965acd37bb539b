"""Losses of models on the server's own samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch import nn

from raceme.core.feature import Probe
from raceme.core.messages import ModelSpec, to_array
from raceme.flower.messages import array_record
from raceme.training.clients import ModelProbe
from raceme.training.models import Network, Samples


def probe() -> tuple[Probe, int]:
    """A probe of a linear model of two classes on two proxy sets of one input each."""
    module = nn.Linear(1, 2, bias=False)
    arrays = array_record({n: to_array(v.numpy()) for n, v in module.state_dict().items()})
    proxies = [
        Samples(np.array(xs, np.float32).reshape(-1, 1), np.array(ys, np.int64))
        for xs, ys in (([1.0, 0.0], [0, 1]), ([2.0], [1]))
    ]
    return ModelProbe(Network(module), ModelSpec.of(arrays), proxies), 2


def test_the_probe_returns_the_loss_of_each_sample_under_each_model() -> None:
    measure, size = probe()
    flat, steep = np.zeros(size, np.float32), np.array([math.log(3.0), 0.0], np.float32)
    # Scores of zero: log 2 each. Scores (log 3, 0) for x = 1: log(1 + 1/3); for x = 0 log 2 again.
    assert measure([flat, steep]) == pytest.approx(
        np.array([[math.log(2)] * 2, [math.log(4 / 3), math.log(2)]]), abs=1e-6
    )
    # x = 2: scores (2 log 3, 0), the second class is right: log(1 + 9).
    assert measure([steep], 1) == pytest.approx(np.array([[math.log(10)]]), abs=1e-6)
    with pytest.raises(ValueError, match="there is no proxy set 2: there are 2"):
        measure([flat], 2)
