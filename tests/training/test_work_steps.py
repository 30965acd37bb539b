"""Work on the data of several steps: joint training, and scores for each."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import CONFIG, INITIAL, SPEC, context, several

from raceme import datasets
from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.messages import from_array
from raceme.training.clients import joined, load
from raceme.training.local import evaluate
from raceme.training.models import Samples

DRIFTING = CONFIG.with_values(drift="label-shift")
NODE = (("partition-id", 3), ("num-partitions", 20))


def ask(settings: dict[str, object], config: RunConfig = DRIFTING, **arrays: object) -> RecordDict:
    content = RecordDict({**arrays, "config": ConfigRecord(settings)})  # type: ignore[arg-type]
    node = context(3, config)
    reply = app(Message(content=content, dst_node_id=7, message_type="train"), node)
    content_of: RecordDict = reply.content
    return content_of


def trained(settings: dict[str, object]) -> tuple[np.ndarray, float]:
    reply = ask({"task": 4, "lr": 0.1, **settings}, arrays=INITIAL)
    return SPEC.unpack(reply.array_records["arrays"]), float(
        reply.metric_records["metrics"]["num-examples"]  # type: ignore[arg-type]
    )


def test_a_client_trains_on_the_data_of_several_steps_together() -> None:
    plain, count = trained({"step": 2})
    alone, same = trained({"step": 5, "steps": [2]})
    assert (same, np.array_equal(plain, alone)) == (count, True)
    both, twice = trained({"step": 2, "steps": [1, 2]})
    assert twice == 2 * count
    assert not np.array_equal(both, plain)
    # `step` only selects the test data; the order of `steps` is the order of the samples.
    assert np.array_equal(both, trained({"step": 9, "steps": [1, 2]})[0])


def test_the_samples_of_several_steps_are_those_of_each() -> None:
    items = tuple(DRIFTING.to_mapping().items())
    one, two = (load(items, NODE, step) for step in (1, 2))
    whole = joined(one, [one, two])
    assert whole.train.x.tolist() == [*one.train.x.tolist(), *two.train.x.tolist()]
    assert whole.train.y.tolist() == [*one.train.y.tolist(), *two.train.y.tolist()]
    assert whole.test is one.test
    assert Samples.joined([one.train]) is one.train


def test_images_are_joined_as_a_network_takes_them() -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    part = Samples(x, np.zeros(2, np.int64), channels_last=True)
    whole = Samples.joined([part, part])
    assert np.array_equal(whole.shaped(whole.x).numpy(), np.concatenate([x, x]))


def test_scores_are_mean_loss_and_accuracy_of_every_model_on_every_step() -> None:
    zero = SPEC.pack(np.zeros(SPEC.size, np.float32))
    settings: dict[str, object] = {"kind": "scores", "task": 9, "step": 2, "steps": [0, 2, 1]}
    reply = ask(settings, **several(zero, INITIAL))
    numbers = {key: from_array(array) for key, array in reply.array_records["numbers"].items()}
    assert set(numbers) == {"losses", "accuracies"}
    assert all((n.shape, n.dtype) == ((2, 3), np.float32) for n in numbers.values())
    items = tuple(DRIFTING.to_mapping().items())
    for row, model in enumerate((zero, INITIAL)):
        for column, step in enumerate((0, 2, 1)):
            client = load(items, NODE, step)
            client.network.read(model)
            accuracy, loss = evaluate(client.network, client.train)
            assert numbers["accuracies"][row, column] == pytest.approx(accuracy)
            assert numbers["losses"][row, column] == pytest.approx(loss)
    # A model of zeros gives all labels the same probability: ln 10.
    assert numbers["losses"][0] == pytest.approx([np.log(10)] * 3, rel=1e-5)
    count = len(datasets.client_data(DRIFTING, 3).y_train)
    assert dict(reply.metric_records["metrics"]) == {"num-examples": 3 * count}


def test_scores_are_of_the_step_of_the_message_where_none_is_named() -> None:
    named = ask({"kind": "scores", "step": 1, "steps": [1]}, **several(INITIAL))
    plain = ask({"kind": "scores", "step": 1}, **several(INITIAL))
    assert named["numbers"] == plain["numbers"]


def test_a_model_that_is_broken_scores_the_largest_loss() -> None:
    broken = SPEC.pack(np.full(SPEC.size, np.nan, np.float32))
    reply = ask({"kind": "scores"}, CONFIG, **several(broken))
    assert from_array(reply.array_records["numbers"]["losses"]) == np.finfo(np.float32).max


@pytest.mark.parametrize("steps", [[], [-1], [1, 1], 2, "1,2", [0.5]])
def test_invalid_steps_are_an_error(steps: object) -> None:
    with pytest.raises(ValueError, match="steps must be different whole numbers of at least 0"):
        trained({"steps": steps})
