"""Probes as noisy sketches: the client half, the noise, and the groups that are found."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord
from nodes import INITIAL, SPEC, context, message
from scipy.stats import norm

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.gaussian import gaussian_epsilon, gaussian_mu
from raceme.core.messages import from_array
from raceme.core.sketches import Sketcher
from raceme.flower.messages import identify_process
from raceme.runs.experiment import simulate
from raceme.strategies.panicle.strategy import sketch_noise


@pytest.fixture(autouse=True)
def _identity() -> None:
    """Allow this process to make replies, as a worker or a device does."""
    identify_process()


PROBE = {"kind": "train-sketch", "task": 1, "task-share": 0.2, "local-steps": 2, "half": 0}


def answered(noise: float, **settings: object) -> dict[str, ArrayRecord]:
    asked = {**PROBE, "sketch-noise": noise, "sketch": 16, **settings}
    return dict(app(message("train", asked), context(0)).content)


def sketch_of(content: dict[str, ArrayRecord]) -> np.ndarray:
    return from_array(content["numbers"]["sketch"])


def test_the_noise_by_hand() -> None:
    # Two probes, any two of which are 2 apart: μ = √2 · 2 / σ.
    mu = math.sqrt(8) / sketch_noise(200.0)
    delta = norm.cdf(mu / 2 - 200 / mu) - math.exp(200 + norm.logcdf(-mu / 2 - 200 / mu))
    assert delta == pytest.approx(1e-5, rel=1e-3)
    for epsilon in (0.1, 3.0, 1000.0):
        assert gaussian_epsilon(gaussian_mu(epsilon, 1e-5), 1e-5) == pytest.approx(epsilon)


def test_only_a_noisy_sketch_leaves_the_device() -> None:
    content = answered(1e-9)
    assert content["arrays"] == INITIAL
    assert set(content["metrics"]) == {"num-examples"}
    plain = app(message("train", {**PROBE, "kind": "train"}), context(0)).content["arrays"]
    change = SPEC.unpack(plain) - SPEC.unpack(INITIAL)
    assert sketch_of(content) == pytest.approx(Sketcher(16).direction(change), abs=1e-6)


def test_noise_of_the_seed_in_simulations_and_secret_on_the_wall_clock() -> None:
    exact = sketch_of(answered(1e-9))
    noise = (sketch_of(answered(3.0)) - exact) / 3.0
    assert np.array_equal(sketch_of(answered(3.0)), sketch_of(answered(3.0)))
    # The deviation of 16 numbers is estimated with a relative standard error of 18 %.
    assert 0.4 < noise.std() < 1.8
    timed = {"report-timing": True}
    assert not np.array_equal(sketch_of(answered(3.0, **timed)), sketch_of(answered(3.0, **timed)))


@pytest.mark.parametrize(("noise", "size", "said"), [(0.0, 16, "sketch-noise"), (1.0, 0, "sketch")])
def test_settings_without_sense_are_refused(noise: float, size: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} must be"):
        answered(noise, **{"sketch": size})


@pytest.mark.parametrize(("epsilon", "clusters"), [(800.0, 4), (10.0, 1)])
def test_groups_are_found_as_far_as_noise_permits(
    epsilon: float, clusters: int, tmp_path: Path
) -> None:
    # With ε = 800 a fifth of a direction of 64 numbers is signal, with 10 a hundredth.
    keys = {
        "strategy": "panicle",
        "panicle.sketch-epsilon": epsilon,
        "clients": 12,
        "model": "mclr",
        "max-updates": 48,
        "eval-every": 48,
        "own-model": False,
    }
    outcome = simulate(RunConfig.from_mapping({**keys, "out": str(tmp_path / "run")}))
    assert outcome.summary["clusters"] == clusters
