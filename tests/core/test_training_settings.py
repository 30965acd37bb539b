"""Settings of local training: of a run, of a message, and impossible ones."""

from __future__ import annotations

import math

import pytest

from raceme.core.config import RunConfig
from raceme.core.training_settings import TrainingSettings


def test_a_message_replaces_settings_of_the_run() -> None:
    run = RunConfig(lr=0.5, batch_size=4, weight_decay=0.1)
    told = {"batch-size": 8, "proximal-mu": 1, "lr-scale": 0.5, "task": 3}
    assert TrainingSettings.of(told, run, lr_scale=0.5) == TrainingSettings(
        lr=0.25, batch_size=8, weight_decay=0.1, proximal_mu=1.0
    )


def test_messages_state_what_differs_from_the_defaults() -> None:
    stated = {"lr": 0.5, "batch-size": 10, "local-epochs": 1}
    assert RunConfig(lr=0.5).in_messages() == stated
    more = RunConfig(lr=0.5, optimizer="momentum", momentum=0.5).in_messages()
    assert more == {**stated, "optimizer": "momentum", "momentum": 0.5}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"lr": -1.0}, "lr must be greater than 0"),
        ({"lr": math.nan}, "lr must be a number"),
        ({"lr": math.inf}, "lr must be a number"),
        ({"lr": None}, "lr must be a number"),
        ({"batch_size": 0}, "batch-size must be at least 1"),
        ({"local_epochs": 0}, "local-epochs must be at least 1"),
        ({"local_steps": -1}, "local-steps must be at least 0"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"optimizer": "lion"}, "sgd"),
        ({"weight_decay": math.inf}, "weight-decay must be a number"),
        ({"proximal_mu": -0.1}, "proximal-mu must be at least 0"),
        ({"proximal_mu": math.nan}, "proximal-mu must be a number"),
        ({"dropout": 1.0}, "dropout must be below 1"),
    ],
)
def test_impossible_settings_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**{"lr": 0.1, **keys})  # type: ignore[arg-type]
