"""The kind of work test-steps: models on the test data of several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import CONFIG, SPEC, context, node_context, several, write_device

from raceme import datasets
from raceme.client_app import app, forget
from raceme.core.config import RunConfig
from raceme.core.messages import from_array
from raceme.training import models
from raceme.training.clients import load

DRIFTING = CONFIG.with_values(drift="tasks")
NODE = (("partition-id", 3), ("num-partitions", 20))
ZERO = SPEC.pack(np.zeros(SPEC.size, np.float32))


@pytest.fixture(autouse=True)
def _nothing_loaded() -> None:
    forget()


def ask(node: Context, settings: dict[str, object], **arrays: object) -> list[float]:
    config = ConfigRecord({"kind": "test-steps", **settings})  # type: ignore[dict-item]
    content = RecordDict({**arrays, "config": config})  # type: ignore[arg-type]
    reply = app(Message(content=content, dst_node_id=7, message_type="evaluate"), node)
    found: list[float] = from_array(reply.content["numbers"]["accuracies"]).tolist()
    return found


def saying(label: int) -> ArrayRecord:
    """Return a model that predicts one label for every input."""
    vector = np.zeros(SPEC.size, np.float32)
    vector[label - 10] = 1.0
    return SPEC.pack(vector)


def test_each_model_is_tested_on_the_test_data_of_its_step() -> None:
    items = tuple(DRIFTING.to_mapping().items())
    labels = [load(items, NODE, step).test.y for step in range(3)]
    first, last = (int(labels[step][0]) for step in (0, 2))
    tests = {"tested-steps": [0, 1, 2, 2], "tested-models": [1, 0, 1, 0]}
    node = context(3, DRIFTING)
    found = ask(node, {"step": 2, **tests}, **several(saying(last), saying(first)))
    wanted = ((0, first), (1, last), (2, first), (2, last))
    assert found == [float((labels[step] == label).double().mean()) for step, label in wanted]
    assert found[0] > 0 == found[2]
    assert found[3] > 0 == found[1]


@pytest.mark.parametrize(
    ("record", "completion"),
    [
        ("own-model", "pulled-model"),
        ("head", "own-head"),
        ("own-line", "own-mixture"),
        ("batch-norm", ""),
    ],
)
def test_the_untrained_model_is_tested_without_what_the_client_has_trained(
    record: str, completion: str
) -> None:
    batch_norm = "local" if record == "batch-norm" else "shared"
    node = context(3, DRIFTING.with_values(batch_norm=batch_norm))
    there = load(tuple(DRIFTING.to_mapping().items()), NODE, 1)
    label = int(there.train.y[0])
    untrained, own = saying((label + 1) % 10), saying(label)
    node.state[record] = own
    tests = {"tested-steps": [1, 1], "tested-models": [0, 0], "completed-by": completion}
    asked: dict[str, object] = {"step": 1, "own-model": 0.25, **tests}
    right = [float((there.test.y == said).double().mean()) for said in (label, (label + 1) % 10)]
    assert right[0] != right[1]
    assert ask(node, {**asked, "untrained": True}, **several(untrained)) == right
    assert ask(node, asked, **several(untrained)) == [right[0]] * 2


def test_the_own_model_is_chosen_by_present_samples_whatever_step_is_tested() -> None:
    items = tuple(DRIFTING.to_mapping().items())
    now, later = (load(items, NODE, step) for step in (0, 1))
    label, other = int(now.train.y[0]), int(later.train.y[0])
    node = context(3, DRIFTING)
    node.state["own-line"] = saying(label)
    tests = {"tested-steps": [0, 1], "tested-models": [0, 0]}
    mixed = {"completed-by": "own-mixture", "own-model": 0.25}
    found = ask(node, {"step": 0, **tests, **mixed}, **several(saying(other)))
    # The client has no own model for the next step, and the received model predicts its label.
    node.state["own-line"] = saying(other)
    assert found == ask(node, {"step": 0, **tests}, **several(saying(label)))
    assert found[0] > 0 == found[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "two lists of equal length"),
        ({"tested-steps": [0, 1], "tested-models": [0]}, "two lists of equal length"),
        ({"tested-steps": [-1], "tested-models": [0]}, "two lists of equal length"),
        ({"tested-steps": [0], "tested-models": [1]}, "were not sent"),
    ],
)
def test_a_message_that_does_not_say_what_is_tested_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(context(3, DRIFTING), settings, **several(ZERO))


def test_a_device_whose_file_was_replaced_does_not_test_on_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    write_device(path, classes=4)
    config = RunConfig(dataset="npz", model="mclr", drift="tasks", clients=1)
    config = config.with_values(data_file=str(path), tasks_count=2)
    node = node_context({"device-id": "a", "data-file": str(path)}, config)
    initial = models.initial_arrays(config)
    wanted: dict[str, object] = {"step": 1, "tested-steps": [0, 1, 2], "tested-models": [0, 0, 0]}
    assert np.isfinite(ask(node, wanted, **several(initial))).all()
    ask(node, {"step": 2, "tested-steps": [2], "tested-models": [0]}, **several(initial))
    other = tmp_path / "other.npz"
    write_device(other, classes=4)
    other.replace(path)
    found = ask(node, {**wanted, "step": 2}, **several(initial))
    assert np.isfinite(found).tolist() == [False, False, True]
    # This stays so during the run; a new run, after `forget`, starts with the file's data.
    again = ask(node, {**wanted, "step": 3}, **several(initial))
    assert np.isfinite(again).tolist() == [False, False, True]
    forget()
    assert np.isfinite(ask(node, wanted, **several(initial))).all()


def test_data_that_cannot_be_loaded_have_no_score(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    write_device(path, classes=4)
    config = RunConfig(dataset="npz", model="mclr", drift="tasks", clients=1)
    config = config.with_values(data_file=str(path), tasks_count=2)
    node = node_context({"device-id": "a", "data-file": str(path)}, config)
    initial = models.initial_arrays(config)
    ask(node, {"step": 0, "tested-steps": [0], "tested-models": [0]}, **several(initial))
    datasets.forget()
    path.unlink()
    wanted: dict[str, object] = {"step": 0, "tested-steps": [0, 1], "tested-models": [0, 0]}
    assert np.isfinite(ask(node, wanted, **several(initial))).tolist() == [True, False]
