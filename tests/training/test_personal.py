"""Personal models: layers, a model or a part of one that never leave the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

import raceme
from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.messages import ModelSpec
from raceme.flower.messages import identify_process
from raceme.strategies import APFL, Ditto, FedPer, FedRep
from raceme.training import models
from raceme.training.personal import head_arrays

LR = 0.05
# One step takes all samples of a client, so that a task consists of few, large steps.
CONFIG = RunConfig(clients=20, partition="iid", model="mlp", lr=LR, batch_size=1000)
START = models.initial_arrays(CONFIG)
SPEC = ModelSpec.of(START)
ZERO = SPEC.unpack(START)
HEAD = slice(SPEC.size - sum(SPEC.sizes[-2:]), SPEC.size)
BODY = slice(0, HEAD.start)


class OneClient:
    """A client of the digits that keeps its state between messages."""

    def __init__(self) -> None:
        identify_process()
        node = {"partition-id": 3, "num-partitions": 20}
        self.context = Context(1, 7, node, RecordDict(), CONFIG.to_mapping())

    def ask(self, kind: str, vector: np.ndarray, **settings: Any) -> RecordDict:
        said = {name.replace("_", "-"): value for name, value in settings.items()}
        config = ConfigRecord({"kind": kind, "task": 1, **said})
        content = RecordDict({"arrays": SPEC.pack(vector), "config": config})
        kind_of_message = "evaluate" if kind == "evaluate" else "train"
        reply = app(Message(content, 7, kind_of_message), self.context)
        assert not reply.has_error(), reply.error
        return reply.content

    def train(self, kind: str, vector: np.ndarray, **settings: Any) -> np.ndarray:
        reply = self.ask(kind, vector, **settings)
        return np.asarray(SPEC.unpack(reply.array_records["arrays"]))

    def loss(self, vector: np.ndarray, **settings: Any) -> float:
        metrics = self.ask("evaluate", vector, **settings).metric_records["metrics"]
        return float(metrics["loss"])  # type: ignore[arg-type]

    def gradient(self, vector: np.ndarray) -> np.ndarray:
        """Return the gradient of the mean loss over all training samples."""
        return (vector - OneClient().train("train", vector)) / LR


def test_fedper_keeps_the_head_on_the_client_and_returns_the_body() -> None:
    client, plain = OneClient(), OneClient()
    trained = client.train("train-split", ZERO, head_layers=1)
    expected = plain.train("train", ZERO)
    # The first task trains both parts like plain training; the head is returned unchanged.
    assert np.array_equal(trained[BODY], expected[BODY])
    assert np.array_equal(trained[HEAD], ZERO[HEAD])
    # The next task continues from the received body with the client's own head.
    received = trained + 1.0
    again = client.train("train-split", received, head_layers=1)
    joined = np.concatenate([received[BODY], expected[HEAD]])
    assert np.array_equal(again[BODY], plain.train("train", joined)[BODY])
    assert np.array_equal(again[HEAD], received[HEAD])


def test_a_client_is_tested_with_its_own_head() -> None:
    client = OneClient()
    client.train("train-split", ZERO, head_layers=1)
    joined = np.concatenate([ZERO[BODY], OneClient().train("train", ZERO)[HEAD]])
    assert client.loss(ZERO, completed_by="own-head") == OneClient().loss(joined)
    assert client.loss(ZERO) == OneClient().loss(ZERO)
    # A client that has not trained yet is tested with the received model.
    assert OneClient().loss(ZERO, completed_by="own-head") == OneClient().loss(ZERO)


def test_fedrep_trains_the_head_first_and_then_the_body_for_it() -> None:
    client = OneClient()
    trained = client.train("train-split", ZERO, head_layers=1, head_epochs=2)
    # By hand: two steps of the head alone, then one of the body alone.
    weights = ZERO.copy()
    for part in (HEAD, HEAD, BODY):
        step = np.zeros_like(weights)
        step[part] = LR * client.gradient(weights)[part]
        weights = weights - step
    assert trained[BODY] == pytest.approx(weights[BODY], abs=1e-6)
    joined = np.concatenate([ZERO[BODY], weights[HEAD]])
    tested = client.loss(ZERO, completed_by="own-head")
    assert tested == pytest.approx(OneClient().loss(joined), rel=1e-5)


def test_a_head_must_leave_layers_to_share() -> None:
    with pytest.raises(ValueError, match="head-layers must leave layers to share"):
        OneClient().train("train-split", ZERO, head_layers=2)


def test_ditto_pulls_the_own_model_towards_the_received_one() -> None:
    client = OneClient()
    received = ZERO + 0.1
    # Two steps by hand, starting from the model received with the first task.
    returned = client.train("train-beside", ZERO, proximal_mu=0.5)
    assert np.array_equal(returned, OneClient().train("train", ZERO))
    own = ZERO - LR * client.gradient(ZERO)
    returned = client.train("train-beside", received, proximal_mu=0.5)
    assert np.array_equal(returned, OneClient().train("train", received))
    own = own - LR * (client.gradient(own) + 0.5 * (own - received))
    tested = client.loss(received, completed_by="pulled-model")
    assert tested == pytest.approx(OneClient().loss(own), rel=1e-5)
    # The returned model is trained without the pull, also from the second step on.
    returned = client.train("train-beside", received, proximal_mu=0.5, local_steps=2)
    assert np.array_equal(returned, OneClient().train("train", received, local_steps=2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_trains_its_own_model_by_the_gradient_of_the_interpolation(adaptive: bool) -> None:
    client = OneClient()
    own, alpha = ZERO.copy(), 0.25
    for received in (ZERO, ZERO + 0.1):
        said = {"own_share": 0.25, "adaptive": adaptive}
        returned = client.train("train-interpolated", received, **said)
        assert np.array_equal(returned, OneClient().train("train", received))
        mixed = alpha * own + (1 - alpha) * received
        gradient = client.gradient(mixed)
        if adaptive:
            # α ← α − η ⟨v − w, ∇f(v̄)⟩, before the step of v. At first v equals w.
            alpha -= LR * float((own - received) @ gradient)
        own = own - LR * alpha * gradient
    assert (alpha != 0.25) == adaptive
    mixed = alpha * own + (1 - alpha) * returned
    tested = client.loss(returned, completed_by="interpolation", own_share=0.25)
    assert tested == pytest.approx(OneClient().loss(mixed), rel=1e-4)


def test_statistics_of_apfls_interpolation_are_not_those_of_the_model_for_all(
    tmp_path: Path,
) -> None:
    model = "networks:small_batch_norm"
    # One round only, because training amplifies rounding errors in later rounds.
    said = {"clients": 4, "max_updates": 4, "model": model, "eval_every": 4}
    averaged = raceme.run("fedavg", **said, out=tmp_path / "fedavg")
    run = raceme.run("apfl", **said, alpha=0.5, adaptive=False, out=tmp_path / "apfl")
    expected = averaged.model(0)
    assert any("running_mean" in name for name in expected)
    for name, values in run.model(0).items():
        assert np.allclose(values, expected[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("kind", ["train-split", "train-beside", "train-interpolated"])
def test_a_training_that_diverges_leaves_what_the_client_had(kind: str) -> None:
    client, said = OneClient(), {"head_layers": 1, "proximal_mu": 0.1, "own_share": 0.5}
    client.train(kind, ZERO, **said)
    before = kept_by(client)
    client.ask(kind, ZERO, lr=1e30, local_steps=5, **said)
    after = kept_by(client)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def kept_by(client: OneClient) -> dict[str, np.ndarray]:
    """Return a copy of all arrays of a client's state."""
    records = client.context.state.array_records.items()
    return {
        f"{record}/{name}": array.numpy().copy()
        for record, arrays in records
        for name, array in arrays.items()
    }


def test_the_server_averages_by_examples_and_states_what_a_task_costs() -> None:
    from raceme.core.clients import Client
    from raceme.core.requests import InFlight, Update

    for method, scale in ((FedPer(), None), (FedRep(), 1.5), (Ditto(), 2.0), (APFL(), 2.0)):
        method.initialize(np.zeros(2, np.float32))
        method.train_config = ConfigRecord({"local-epochs": 2})
        for name in ("a", "b"):
            method.progress.fleet.clients[name] = Client(name, 10)
            method.clusters.join(name)
        said = method.request_for("a").settings
        assert said.get("compute-scale") == scale
        tasks = [InFlight(i, name, 0, 0, 0, 0.0, 0) for i, name in enumerate("ab")]
        vectors = [np.array([1.0, 2.0], np.float32), np.array([5.0, 6.0], np.float32)]
        updates = [
            Update(task, vector, examples, 0.0)
            for task, vector, examples in zip(tasks, vectors, (30, 10), strict=True)
        ]
        method.applied(updates)
        assert method.models[0].vector.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(models.mlp300, (8, 8)), (models.cnn, (1, 28, 28)), (models.resnet18, (3, 32, 32))],
)
def test_the_head_is_the_last_layer_with_weights(make: Any, shape: tuple[int, ...]) -> None:
    network = models.Network(make(shape, 10))
    assert head_arrays(network, 1) == ["output.weight", "output.bias"]
