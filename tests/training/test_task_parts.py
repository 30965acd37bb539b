"""A client's parts for each of its tasks: training, tests of former tasks, borrowed weights."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import context

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.messages import InvalidModelError, ModelSpec, from_array, to_array
from raceme.training import models

TASKS = RunConfig(clients=4, partition="iid", drift="tasks", model="mlp")
START = models.initial_arrays(TASKS)
SPEC = ModelSpec.of(START)
SIZE = SPEC.size


def ask(
    node: Context,
    kind: str,
    model: np.ndarray | None = None,
    others: ArrayRecord | None = None,
    **settings: float | str,
) -> RecordDict:
    told = {name.replace("_", "-"): value for name, value in settings.items()}
    arrays = START if model is None else SPEC.pack(model)
    if kind == "evaluate-decomposed":
        kind, told = "evaluate", {**told, "completed-by": "task-parts"}
    config = ConfigRecord({"kind": kind, "task": 1, **told})
    content = RecordDict({"arrays": arrays, "config": config})
    if others is not None:
        content["others"] = others
    action = "evaluate" if kind.startswith("evaluate") else "train"
    return app(Message(content, 7, action), node).content


def trained(node: Context, kind: str, *others: ArrayRecord, **settings: float) -> np.ndarray:
    return SPEC.unpack(ask(node, kind, None, *others, **settings)["arrays"])


def loss_at(
    node: Context, model: np.ndarray, step: int, kind: str = "evaluate-decomposed"
) -> float:
    return float(ask(node, kind, model, step=step)["metrics"]["loss"])


def own(node: Context, step: int, name: str) -> np.ndarray:
    return np.asarray(from_array(node.state.array_records[f"part-{step}"][name]))


KINDS = pytest.mark.parametrize("kind", ["train-decomposed", "train-borrowing"])


@KINDS
def test_a_client_answers_with_the_shared_part_and_tests_with_its_own(kind: str) -> None:
    node = context(1, TASKS)
    shared = trained(node, kind, step=0, local_epochs=3, sparsity=0.001)
    mask = own(node, 0, "logits" if kind == "train-decomposed" else "mask")
    assert len(mask) == 64 + 10
    assert np.count_nonzero(own(node, 0, "adaptive")) > 100
    composed = loss_at(node, shared, 0)
    assert composed < 0.9 * loss_at(node, shared, 0, "evaluate")
    # A step without training on it is tested with the shared part alone.
    assert loss_at(node, shared, 1) == loss_at(node, shared, 1, "evaluate")


@KINDS
def test_a_former_task_is_held(kind: str) -> None:
    def before_and_after(strength: float) -> tuple[float, float]:
        node = context(1, TASKS)
        trained(node, kind, step=0, local_epochs=3)
        start = SPEC.unpack(START)
        before = loss_at(node, start, 0)
        shared = trained(node, kind, step=1, local_epochs=3, drift_strength=strength)
        return before, loss_at(node, shared, 0)

    before, after = before_and_after(1e9)
    assert after == pytest.approx(before, rel=1e-3)
    before, after = before_and_after(0.0)
    assert after > 1.2 * before


def test_where_data_never_change_there_is_one_part() -> None:
    node = context(1, TASKS.with_values(drift="none"))
    first = ask(node, "train-decomposed")["arrays"]
    ask(node, "train-decomposed", SPEC.unpack(first))
    assert list(node.state) == ["part-0"]
    content = ask(node, "evaluate-decomposed", SPEC.unpack(first))
    assert float(content["metrics"]["accuracy"]) > 0.2


def lent(*adaptive: dict[int, float]) -> ArrayRecord:
    arrays = {}
    for number, values in enumerate(adaptive):
        arrays[f"adaptive-indices-{number}"] = to_array(np.array(list(values), np.int32))
        arrays[f"adaptive-values-{number}"] = to_array(np.array(list(values.values()), np.float32))
    return ArrayRecord(arrays)


def test_a_client_tells_its_adaptive_weights() -> None:
    node = context(1, TASKS)
    numbers = ask(node, "train-borrowing", step=0, sparsity=0.05)["numbers"]
    told = np.zeros(SIZE, np.float32)
    told[from_array(numbers["adaptive-indices"])] = from_array(numbers["adaptive-values"])
    assert np.array_equal(told, own(node, 0, "adaptive"))
    assert 0 < len(from_array(numbers["adaptive-indices"])) < 0.9 * SIZE


def test_borrowed_weights_are_kept_while_a_task_lasts() -> None:
    node, alone = context(1, TASKS), context(1, TASKS)
    others = lent({0: 0.5, SIZE - 1: -1.0}, {7: 2.0})
    first = trained(node, "train-borrowing", others, step=1)
    assert not np.array_equal(first, trained(alone, "train-borrowing", step=1))
    shares = own(node, 1, "shares")
    assert shares.shape == (2, 4)
    # The second array of each, the bias of the hidden layer, is 0 for both.
    assert np.count_nonzero(shares, axis=1).tolist() == [2, 1]
    borrowed = np.zeros(SIZE, np.float32)
    borrowed[0], borrowed[-1], borrowed[7] = 0.5 * shares[0, 0], -shares[0, 3], 2 * shares[1, 0]
    assert own(node, 1, "borrowed") == pytest.approx(borrowed)
    # Weights that arrive later are ignored; the client keeps those it has for the task.
    copy = context(1, TASKS)
    copy.state = RecordDict(dict(node.state))
    later = trained(node, "train-borrowing", lent({3: 1.0}), step=1, task=2)
    assert np.array_equal(later, trained(copy, "train-borrowing", step=1, task=2))
    assert own(node, 1, "shares").shape == (2, 4)
    trained(node, "train-borrowing", step=2)
    assert sorted(node.state) == ["part-1", "part-2"]
    assert own(node, 2, "shares").shape == (0, 4)


@pytest.mark.parametrize("index", [-1, SIZE])
def test_adaptive_weights_of_another_network_are_refused(index: int) -> None:
    with pytest.raises(InvalidModelError, match="another client do not fit"):
        trained(context(1, TASKS), "train-borrowing", lent({index: 1.0}), step=0)


def test_uploads_are_scored_with_the_parts_of_their_tasks() -> None:
    node = context(1, TASKS)
    answer = ask(node, "train-decomposed", step=0, scored=True, local_epochs=3)
    shared = SPEC.unpack(answer["arrays"])
    kept = ask(node, "evaluate-decomposed", shared, step=0)["metrics"]["accuracy"]
    assert answer["metrics"]["accuracy-before"] == kept
    answer = ask(node, "train-decomposed", shared, step=1, scored=True, former_step=0)
    assert answer["metrics"]["accuracy-after"] == kept


@KINDS
def test_a_training_that_diverges_leaves_the_parts_as_they_were(kind: str) -> None:
    node = context(1, TASKS)
    trained(node, kind, step=0)
    before = {name: own(node, 0, name) for name in node.state.array_records["part-0"]}
    ask(node, kind, step=1, lr=1e30, local_epochs=3, drift_strength=1.0)
    assert list(node.state) == ["part-0"]
    for name, values in before.items():
        assert np.array_equal(values, own(node, 0, name))


def test_several_steps_are_tested_each_with_its_own_part() -> None:
    node = context(1, TASKS)
    shared = SPEC.unpack(ask(node, "train-decomposed", step=0, local_epochs=3)["arrays"])
    shared = SPEC.unpack(ask(node, "train-decomposed", shared, step=1)["arrays"])
    alone = [ask(node, "evaluate-decomposed", shared, step=step) for step in (0, 1, 2)]
    settings = {"kind": "test-steps", "tested-steps": [0, 1, 2], "tested-models": [0, 0, 0]}
    config = ConfigRecord({**settings, "completed-by": "task-parts", "step": 1})
    content = RecordDict({"arrays-0": SPEC.pack(shared), "config": config})
    answer = app(Message(content, 7, "train"), node).content
    together = from_array(answer.array_records["numbers"]["accuracies"])
    assert together.tolist() == [float(one["metrics"]["accuracy"]) for one in alone]
