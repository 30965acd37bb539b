"""Held-out training samples: what is chosen by them has not seen the test samples."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets import client_data


def rows(x: np.ndarray) -> list[bytes]:
    return sorted(sample.tobytes() for sample in x)


def test_validation_samples_are_training_samples() -> None:
    whole = RunConfig(clients=8)
    for client in range(8):
        own = client_data(whole, client)
        trial = client_data(whole.with_values(validation_fraction=0.25), client)
        assert rows(np.concatenate([trial.x_train, trial.x_test])) == rows(own.x_train)
        assert not set(rows(trial.x_test)) & set(rows(own.x_test))
        assert len(trial.y_test) == round(0.25 * len(own.y_train))
        assert len(trial.x_test) == len(trial.y_test)


def test_the_held_out_samples_follow_from_the_seed() -> None:
    config = RunConfig(clients=8, validation_fraction=0.25)
    one, again = client_data(config, 3), client_data(config, 3)
    assert rows(one.x_test) == rows(again.x_test)
    # Not the last ones, which may all be of one label.
    kept = client_data(config.with_values(validation_fraction=0.0), 3).x_train
    assert rows(one.x_test) != rows(kept[-len(one.x_test) :])


def test_what_cannot_be_held_out_is_said() -> None:
    # 359 clients with five samples each: with four of them for testing, one is left to train.
    config = RunConfig(clients=359, partition="iid", test_fraction=0.8, validation_fraction=0.2)
    with pytest.raises(UserError, match="Client 0 has a single training sample"):
        client_data(config, 0)
    with pytest.raises(UserError, match="validation-fraction must be below 1"):
        RunConfig(validation_fraction=1.0)
