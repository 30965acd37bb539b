"""Batch normalisation that stays on the client (FedBN), by hand and in all kinds of work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import CONFIG, message, node_context, several

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import from_array, to_array
from raceme.flower.messages import identify_process, set_message_id
from raceme.simulation import InProcess, Pool
from raceme.training import models

# Two samples, one of each class. Normalised they are (1, -1) and (-1, 1), whatever their size.
PAIR = np.array([[5.0, 1.0], [1.0, 3.0]], np.float32)
LABELS = np.array([0, 1])


def own_batch_norm(folder: Path, **keys: object) -> Context:
    """A device with a network of one batch normalisation layer; it trains for one step."""
    np.savez(folder / "pair.npz", x_train=PAIR, y_train=LABELS, x_test=PAIR + 0.5, y_test=LABELS)
    config = RunConfig(
        dataset="npz",
        model="networks:batch_norm_only",
        lr=1.0,
        batch_norm="local",
    )
    config = config.with_values(data_file=str(folder / "pair.npz"), **keys)
    return node_context({"device-id": "a"}, config)


def batch_norm(weight: float, mean: float, count: int) -> ArrayRecord:
    arrays = {
        "weight": np.full(2, weight, np.float32),
        "bias": np.zeros(2, np.float32),
        "running_mean": np.full(2, mean, np.float32),
        "running_var": np.ones(2, np.float32),
        "num_batches_tracked": np.array(count),
    }
    return ArrayRecord({name: to_array(values) for name, values in arrays.items()})


def numbers(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: from_array(array) for name, array in record.items()}


def test_local_batch_normalisation_over_two_rounds_by_hand(tmp_path: Path) -> None:
    node = own_batch_norm(tmp_path)
    # The first feature is +γ for one sample and -γ for the other, the second the other way
    # round: both have the right class with p = 1 / (1 + exp(-2γ)), and the gradient of γ is p - 1.
    gamma, mean, var = 1.0, np.zeros(2), np.ones(2)
    for count, received in ((1, batch_norm(1.0, 0.0, 0)), (2, batch_norm(7.0, 9.0, 100))):
        gamma += 1 - 1 / (1 + np.exp(-2 * gamma))
        mean = 0.9 * mean + 0.1 * np.array([3.0, 2.0])
        var = 0.9 * var + 0.1 * np.array([8.0, 2.0])  # of two samples, with the divisor n - 1
        reply = app(message("train", {"task": count}, received), node).content
        # The returned arrays are the received ones.
        assert reply["arrays"] == received
        own = numbers(node.state["batch-norm"])  # type: ignore[arg-type]
        assert own["weight"] == pytest.approx(gamma, rel=1e-4)
        assert own["bias"] == pytest.approx(0, abs=1e-6)
        assert own["running_mean"] == pytest.approx(mean, rel=1e-5)
        assert own["running_var"] == pytest.approx(var, rel=1e-5)
        assert own["num_batches_tracked"] == count
    tested = app(message("evaluate", arrays=batch_norm(-1.0, 50.0, 0)), node).content["metrics"]
    scores = gamma * (PAIR + 0.5 - mean) / np.sqrt(var + 1e-5)
    expected = np.log1p(np.exp(scores[[0, 1], 1 - LABELS] - scores[[0, 1], LABELS])).mean()
    assert tested["loss"] == pytest.approx(expected, rel=1e-4)
    assert tested["accuracy"] == (scores.argmax(axis=1) == LABELS).mean()


def test_a_training_that_diverges_spoils_none_that_follow(tmp_path: Path) -> None:
    node = own_batch_norm(tmp_path)
    app(message("train", {"task": 1}, batch_norm(1.0, 0.0, 0)), node)
    before = numbers(node.state["batch-norm"])  # type: ignore[arg-type]
    app(message("train", {"task": 2, "lr-scale": 1e30}, batch_norm(1.0, 0.0, 0)), node)
    own = numbers(node.state["batch-norm"])  # type: ignore[arg-type]
    assert {name: values.tolist() for name, values in own.items()} == {
        name: values.tolist() for name, values in before.items()
    }


def test_shared_batch_normalisation_travels_and_leaves_nothing(tmp_path: Path) -> None:
    node = own_batch_norm(tmp_path, batch_norm="shared")
    reply = app(message("train", {"task": 1}, batch_norm(1.0, 0.0, 0)), node).content
    own = numbers(reply["arrays"])
    assert own["running_mean"] == pytest.approx([0.3, 0.2])
    assert own["num_batches_tracked"] == 1
    assert not node.state


def test_the_change_of_an_own_model_moves_weights_and_replaces_statistics(tmp_path: Path) -> None:
    received = batch_norm(3.0, 9.0, 7)
    asked = {"task": 1, "own-model": 0.2, "own-rule": "alone"}
    for kept in ("shared", "local"):
        node = own_batch_norm(tmp_path, batch_norm=kept)
        node.state["own-line"] = batch_norm(1.0, 0.0, 0)
        reply = app(message("train", asked, received), node).content["arrays"]
        if kept == "local":
            assert reply == received
            continue
        sent = numbers(reply)
        # As above, gamma moves from 1 by 1 - p; here this change is added to 3.
        assert sent["weight"] == pytest.approx(3 + 1 - 1 / (1 + np.exp(-2)), rel=1e-4)
        assert sent["running_mean"] == pytest.approx([0.3, 0.2])
        assert sent["num_batches_tracked"] == 1


def test_every_kind_of_work_uses_the_clients_own_batch_normalisation(tmp_path: Path) -> None:
    node = own_batch_norm(tmp_path)
    app(message("train", {"task": 1}, batch_norm(1.0, 0.0, 0)), node)
    one, other = batch_norm(-1.0, 4.0, 3), batch_norm(2.0, -4.0, 5)
    content = RecordDict({**several(one, other), "config": ConfigRecord({"kind": "losses"})})
    asked = Message(content, dst_node_id=7, message_type="train")
    measured = from_array(app(asked, node).content["numbers"]["losses"])
    # The models differ in batch normalisation only, which the client replaces by its own.
    assert measured[0].tolist() == measured[1].tolist()


def test_an_own_model_goes_on_from_the_clients_own_batch_normalisation(tmp_path: Path) -> None:
    node = own_batch_norm(tmp_path)
    x, y = np.tile(PAIR, (4, 1)), np.tile(LABELS, 4)
    np.savez(tmp_path / "pair.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    app(message("train", {"task": 1, "own-model": 0.25}, batch_norm(1.0, 0.0, 0)), node)
    scales = [numbers(node.state[name])["weight"] for name in ("batch-norm", "own-line")]  # type: ignore[arg-type]
    # At a negligible learning rate, it is a mixture of the two, independent of the received model.
    asked = {"task": 2, "lr": 1e-9, "own-model": 0.25}
    app(message("train", asked, batch_norm(7.0, 9.0, 100)), node)
    mixed = numbers(node.state["own-line"])["weight"]  # type: ignore[arg-type]
    assert (np.min(scales, axis=0) <= mixed).all()
    assert (mixed <= np.max(scales, axis=0)).all()


def test_of_a_residual_network_all_but_batch_normalisation_travels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 3, 32, 32)).astype(np.float32)
    np.savez(
        tmp_path / "x.npz", x_train=x, y_train=np.arange(6) % 3, x_test=x, y_test=np.zeros(6, int)
    )
    config = RunConfig(dataset="npz", model="networks:resnet18", lr=0.01, batch_norm="local")
    config = config.with_values(data_file=str(tmp_path / "x.npz"))
    initial = models.initial_arrays(config)
    node = node_context({"device-id": "a"}, config)
    reply = app(message("train", {"task": 1}, initial), node).content["arrays"]
    own = node.state["batch-norm"]
    assert isinstance(own, ArrayRecord)
    assert len(own) == 20 * 5
    for name in initial:
        travelled = not np.array_equal(from_array(reply[name]), from_array(initial[name]))
        assert travelled == (name not in own), name
    moved = [name for name in own if own[name].data != initial[name].data]
    assert len(moved) == len(own)


def test_stored_batch_normalisation_is_the_same_in_worker_processes(tmp_path: Path) -> None:
    replies, states = [], []
    for executor in (InProcess(app), Pool("raceme.client_app:app", workers=1)):
        identify_process()
        node = own_batch_norm(tmp_path)
        models_sent = (batch_norm(1.0, 0.0, 0), batch_norm(7.0, 9.0, 100))
        kinds = ("train", "train", "evaluate")
        for number, (kind, sent) in enumerate(
            zip(kinds, (*models_sent, models_sent[0]), strict=True)
        ):
            asked = message(kind, {"task": number}, sent)
            set_message_id(asked, f"m{number}")
            executor.submit(asked, node, due=0.0)
        replies.append([executor.result(f"m{number}").content for number in range(3)])
        states.append(node.state)
        executor.close()
    assert replies[0] == replies[1]
    assert states[0] == states[1]
    assert states[0]


def test_a_network_without_batch_normalisation_has_none_to_keep_at_home() -> None:
    with pytest.raises(UserError, match=r"batch-norm=local .* model 'mlp' has none"):
        models.initial_arrays(CONFIG.with_values(batch_norm="local"))
