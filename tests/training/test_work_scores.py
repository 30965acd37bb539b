"""Scores beside a client's training, which they do not change."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from nodes import INITIAL, Settings, context, message, several

from raceme import datasets
from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.training_settings import TrainingSettings
from raceme.flower.messages import identify_process
from raceme.training.local import epoch_sizes, epochs
from raceme.training.models import Samples

CONFIG = RunConfig(clients=8, partition="label-groups", drift="mixture")
NODE = context(2, CONFIG)
SCORES = {"accuracy-before", "accuracy-after", "sample-passes"}


def train(settings: Settings, records: dict[str, ArrayRecord] | None = None) -> RecordDict:
    content = RecordDict({**(records or {"arrays": INITIAL}), "config": ConfigRecord(settings)})
    return app(Message(content, dst_node_id=7, message_type="train"), NODE).content


def accuracy(model: ArrayRecord, step: int) -> float:
    """Return the accuracy of a model on the client's test data of a step."""
    content = app(message("evaluate", {"step": step}, model), NODE).content
    found = content["metrics"]["accuracy"]
    assert isinstance(found, float)
    return found


@pytest.fixture(scope="module")
def other() -> ArrayRecord:
    """A trained model."""
    identify_process()
    return train({"task": 5, "step": 0, "lr": 0.1, "local-epochs": 5})["arrays"]


def test_upload_and_download_are_tested_on_the_data_of_the_upload(other: ArrayRecord) -> None:
    asked: Settings = {"task": 6, "step": 3, "scored": True, "former-step": 1}
    content = train(asked, {"arrays": other})
    metrics = content["metrics"]
    assert metrics["accuracy-before"] == accuracy(content["arrays"], 3)
    assert metrics["accuracy-after"] == accuracy(other, 1)
    assert metrics["accuracy-after"] != accuracy(other, 3)
    # The client has as many test samples as training samples, of the same mixture.
    assert len(datasets.client_data(CONFIG, 2, 3).y_test) == metrics["num-examples"]


def test_before_its_first_upload_a_client_has_no_second_score() -> None:
    assert SCORES & set(train({"step": 0, "scored": True})["metrics"]) == SCORES - {
        "accuracy-after"
    }


def test_nothing_is_tested_unless_it_is_asked_for() -> None:
    for settings in ({}, {"scored": False, "former-step": 0}):
        assert not SCORES & set(train(settings)["metrics"])


@pytest.mark.parametrize("kind", ["train", "train-best"])
def test_training_does_not_depend_on_the_tests(kind: str, other: ArrayRecord) -> None:
    records = several(INITIAL, other) if kind == "train-best" else {"arrays": other}
    asked: Settings = {"kind": kind, "task": 6, "step": 1}
    plain = train(asked, records)
    scored = train({**asked, "scored": True, "former-step": 0}, records)
    assert plain["arrays"] == scored["arrays"]
    assert plain["metrics"]["train-loss"] == scored["metrics"]["train-loss"]
    # With several models, the score is of the one that the client continues from.
    assert scored["metrics"]["accuracy-after"] == accuracy(other, 0)


def test_data_that_never_change_are_their_own_former_ones(other: ArrayRecord) -> None:
    content = train({"scored": True, "former-step": 0}, {"arrays": other})
    tested = app(message("evaluate", {}, other), NODE).content["metrics"]["accuracy"]
    assert content["metrics"]["accuracy-after"] == tested


@pytest.mark.parametrize("step", [-1, 0.5, "1"])
def test_an_invalid_former_step_is_an_error(step: int | float | str) -> None:
    with pytest.raises(ValueError, match="former-step must be a whole number of at least 0"):
        train({"scored": True, "former-step": step})


def test_a_sample_passes_once_forward_and_twice_backward() -> None:
    examples = len(datasets.client_data(CONFIG, 2, 0).y_train)
    epoch_wise = train({"scored": True, "step": 0, "local-epochs": 4})["metrics"]
    assert epoch_wise["sample-passes"] == 3 * 4 * examples
    by_steps = train({"scored": True, "step": 0, "local-steps": 2, "batch-size": 8})["metrics"]
    assert by_steps["sample-passes"] == 3 * 2 * 8
    # Two models are evaluated on every sample before one of them is trained.
    best = train({"scored": True, "step": 0, "kind": "train-best"}, several(INITIAL, INITIAL))
    assert best["metrics"]["sample-passes"] == (2 + 3) * examples


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("settings", [{"local_epochs": 3}, {"local_steps": 7}, {"local_steps": 3}])
def test_sizes_of_epochs_are_those_of_their_orders(settings: dict[str, int], pairs: bool) -> None:
    chosen = TrainingSettings(lr=0.1, batch_size=5, **settings)
    orders = epochs(16, chosen, pairs, np.random.default_rng(0))
    assert [len(order) for order in orders] == list(epoch_sizes(16, chosen, pairs))


def test_a_client_states_its_mixture_where_its_data_change() -> None:
    told = train({"step": 4})["metrics"]["mixture"]
    assert told == list(datasets.client_data(CONFIG, 2, 4).mixture or ())
    assert len(told) == 4
    assert sum(told) == pytest.approx(1)
    assert "mixture" not in train({})["metrics"]


def test_samples_of_two_steps_are_in_memory_together() -> None:
    from raceme.client_app import work_of

    content = RecordDict({"config": ConfigRecord({"step": 6, "former-step": 5})})
    work = work_of(Message(content, dst_node_id=7, message_type="train"), NODE)
    former = work.former()
    assert former is not None
    assert isinstance(former.test, Samples)
    assert work.former() is former
    assert work.at_step(6) is work.client
