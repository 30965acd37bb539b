"""Elastic weight consolidation and dropout on a client, by hand and between tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import context
from torch import nn

from raceme.client_app import app, work_of
from raceme.core.config import RunConfig
from raceme.core.messages import ModelSpec, from_array, to_array
from raceme.core.training_settings import TrainingSettings
from raceme.strategies.continual.client import elastic, fisher_information
from raceme.training import models
from raceme.training.local import dropout, hidden_linear_layers, terms_of, train
from raceme.training.models import Network, Samples

TASKS = RunConfig(clients=4, partition="iid", drift="tasks", model="mlp")
START = models.initial_arrays(TASKS)
SPEC = ModelSpec.of(START)


def two_weights(first: float, second: float) -> ArrayRecord:
    """Return values for the matrix and the bias of a model with one input and one output."""
    return ArrayRecord(
        {
            "output.weight": to_array(np.array([[first]], np.float32)),
            "output.bias": to_array(np.array([second], np.float32)),
        }
    )


def elastic_gradient(strength: float, lr: float) -> list[float]:
    network = Network(models.build("mclr", (1,), 1))
    network.weights.copy_(torch.tensor([0.5, 1.0]))
    term = elastic(strength, fisher=two_weights(2.0, 0.5), former=two_weights(1.0, -1.0))
    settings = TrainingSettings(lr=lr)
    gradient = torch.zeros(2)
    for change in terms_of(network, settings, {}, [term]):
        change(network.weights, gradient)
    return [float(value) for value in gradient]


def test_the_elastic_term_of_two_weights_by_hand() -> None:
    # λF (w − w*): 3 · 2 · (0.5 − 1) and 3 · 0.5 · (1 + 1).
    assert elastic_gradient(3.0, lr=1e-9) == pytest.approx([-3.0, 3.0])
    # λF / (1 + η λF): 6 / 4 and 1.5 / 1.75.
    assert elastic_gradient(3.0, lr=0.5) == pytest.approx([-0.75, 12 / 7])
    assert elastic_gradient(0.0, lr=0.5) == [0.0, 0.0]


def test_the_elastic_gradient_is_that_of_the_penalty() -> None:
    def penalty(first: float, second: float) -> float:
        return 3.0 / 2 * (2.0 * (first - 1.0) ** 2 + 0.5 * (second + 1.0) ** 2)

    slopes = [
        (penalty(0.501, 1.0) - penalty(0.499, 1.0)) / 0.002,
        (penalty(0.5, 1.001) - penalty(0.5, 0.999)) / 0.002,
    ]
    assert elastic_gradient(3.0, lr=1e-9) == pytest.approx(slopes)


def test_an_elastic_step_goes_to_the_former_weights_and_never_past_them() -> None:
    gradient = elastic_gradient(1e9, lr=0.5)
    assert [0.5 - 0.5 * gradient[0], 1.0 - 0.5 * gradient[1]] == pytest.approx([1.0, -1.0])


def test_fisher_information_of_two_samples_by_hand() -> None:
    # Both classes have the probability 1/2. The gradients, matrix and then bias, are (1/2, 1, -1/2,
    # -1, 1/2, -1/2) and (-1, 0, 1, 0, -1/2, 1/2).
    network = Network(models.build("mclr", (2,), 2))
    network.weights.zero_()
    samples = Samples(np.array([[1, 2], [2, 0]], np.float32), np.array([1, 0]))
    expected = [0.625, 0.5, 0.625, 0.5, 0.25, 0.25]
    assert fisher_information(network, samples).tolist() == pytest.approx(expected)


# A client with several tasks in turn.


def ask(
    node: Context, step: int | None, kind: str = "train-elastic", **settings: float
) -> np.ndarray:
    """Let a client train the initial model at a step of its data; return the trained model."""
    told = {name.replace("_", "-"): value for name, value in settings.items()}
    config = ConfigRecord({"kind": kind, "task": 1, **told})
    if step is not None:
        config["step"] = step
    content = RecordDict({"arrays": START, "config": config})
    return SPEC.unpack(app(Message(content, 7, "train"), node).content["arrays"])


def kept(node: Context, name: str) -> np.ndarray:
    record = node.state.array_records[name]
    return np.concatenate([np.ravel(from_array(record[array])) for array in SPEC.names])


def information(node: Context, step: int, weights: np.ndarray) -> np.ndarray:
    """Return the Fisher information of a client's samples at a step."""
    content = RecordDict({"arrays": SPEC.pack(weights), "config": ConfigRecord({"step": step})})
    work = work_of(Message(content, 7, "train"), node)
    work.receive(work.model)
    return fisher_information(work.client.network, work.client.train).numpy().copy()


def test_a_client_measures_a_task_when_it_is_over_and_adds_it_to_those_before() -> None:
    node = context(1, TASKS)
    own = ask(node, 0, elastic_strength=10.0)
    own = ask(node, 0, elastic_strength=10.0, task=2)
    assert "fisher" not in node.state
    second = ask(node, 1, elastic_strength=10.0)
    first_information = information(node, 0, own)
    assert kept(node, "former") == pytest.approx(own)
    assert kept(node, "fisher") == pytest.approx(first_information)
    ask(node, 2, elastic_strength=10.0, elastic_memory=0.5)
    assert kept(node, "former") == pytest.approx(second)
    expected = 0.5 * first_information + information(node, 1, second)
    assert kept(node, "fisher") == pytest.approx(expected)


def test_a_training_that_diverges_is_not_kept() -> None:
    node = context(1, TASKS)
    own = ask(node, 0)
    content = RecordDict({"arrays": START})
    content["config"] = ConfigRecord({"kind": "train-elastic", "step": 1, "lr": 1e30})
    app(Message(content, 7, "train"), node)
    assert kept(node, "own-model") == pytest.approx(own)
    assert np.isfinite(kept(node, "fisher")).all()


def test_weights_that_matter_are_held() -> None:
    def second_task(strength: float) -> tuple[np.ndarray, np.ndarray]:
        node = context(1, TASKS)
        own = ask(node, 0, local_epochs=5, elastic_strength=strength)
        return ask(node, 1, local_epochs=5, elastic_strength=strength) - own, kept(node, "fisher")

    free, matters = second_task(0.0)
    held, same = second_task(1e6)
    assert np.array_equal(matters, same)
    assert np.linalg.norm(held[matters > 1e-4]) < 0.2 * np.linalg.norm(free[matters > 1e-4])


def test_where_data_never_change_it_is_fedprox() -> None:
    config = TASKS.with_values(drift="none")
    node, other = context(1, config), context(1, config)
    for task in (1, 2):
        elastic = ask(node, None, elastic_strength=10.0, proximal_mu=0.5, task=task)
        assert np.array_equal(elastic, ask(other, None, "train", proximal_mu=0.5, task=task))


# Stable SGD.


def test_a_share_of_the_learning_rate_is_that_much_of_it() -> None:
    node = context(1, TASKS)
    assert np.array_equal(
        ask(node, 0, "train", lr=0.2, lr_scale=0.5), ask(node, 0, "train", lr=0.1)
    )


@pytest.mark.parametrize(
    ("name", "layers"), [("mclr", []), ("mlp", ["output"]), ("cnn", ["hidden", "output"])]
)
def test_dropout_is_where_linear_layers_receive_hidden_units(name: str, layers: list[str]) -> None:
    module = models.build(name, (1, 8, 8), 4)
    found = hidden_linear_layers(module)
    assert [layer for layer, of in module.named_modules() if of in found] == layers


def test_a_hidden_unit_is_left_out_or_doubled_in_training_only() -> None:
    module = nn.Sequential(nn.Linear(1, 64, bias=False), nn.Linear(64, 64, bias=False))
    first, second = module[0], module[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    first.weight.data.fill_(1.0)
    second.weight.data.copy_(torch.eye(64))
    with dropout(module, 0.5):
        dropped = module(torch.ones(1, 1))
        whole = module.eval()(torch.ones(1, 1))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert (whole == 1).all()
    assert (module.train()(torch.ones(1, 1)) == 1).all()


def test_training_with_dropout_is_the_tasks_own_chance() -> None:
    node = context(1, TASKS)
    first = ask(node, 0, "train", dropout=0.5)
    torch.rand(3)
    assert np.array_equal(first, ask(node, 0, "train", dropout=0.5))
    assert not np.array_equal(first, ask(node, 0, "train", dropout=0.2))
    assert not np.array_equal(first, ask(node, 0, "train"))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_impossible_strengths_and_shares_are_errors(share: float) -> None:
    with pytest.raises(ValueError, match="dropout must be"):
        TrainingSettings(lr=0.1, dropout=share)
    with pytest.raises(ValueError, match="elastic-strength must be at least 0"):
        elastic(-1.0, two_weights(2.0, 0.5), two_weights(1.0, -1.0))


def test_without_dropout_a_network_is_trained_as_ever() -> None:
    samples = Samples(np.ones((4, 2), np.float32), np.array([0, 1, 0, 1]))
    weights = []
    for share in (None, 0.0):
        network = Network(models.build("mlp", (2,), 2))
        settings = TrainingSettings(0.1) if share is None else TrainingSettings(0.1, dropout=share)
        train(network, samples, settings, np.random.default_rng(0))
        weights.append(network.weights.numpy().tobytes())
    assert weights[0] == weights[1]
