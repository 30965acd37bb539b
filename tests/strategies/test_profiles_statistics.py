"""Clients' statistics of their data: directions, moments, gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.messages import ModelSpec, to_array
from raceme.flower.messages import array_record, identify_process
from raceme.strategies.profiles.client import latent_features, main_directions, moments, projected
from raceme.training import models
from raceme.training.models import Network, Samples

CONFIG = RunConfig(clients=20, partition="iid", model="mclr", lr=0.05)


def context(config: RunConfig = CONFIG) -> Context:
    identify_process()
    node = {"partition-id": 3, "num-partitions": 20}
    return Context(1, 7, node, RecordDict(), config.to_mapping())


def ask(kind: str, node: Context, records: dict[str, Any] | None = None, **settings: Any) -> Any:
    told = {name.replace("_", "-"): value for name, value in settings.items()}
    config = ConfigRecord({"task": 1, "kind": kind, **told})
    return app(Message(RecordDict({**(records or {}), "config": config}), 7, "train"), node).content


def numbers_of(reply: Any, name: str) -> np.ndarray:
    return np.asarray(reply["numbers"][name].numpy())


def start_of(config: RunConfig = CONFIG) -> tuple[Any, ModelSpec]:
    record = models.initial_arrays(config)
    return record, ModelSpec.of(record)


def test_main_directions_by_hand() -> None:
    # Rows along (3, 4) / 5, twice as long as along (−4, 3) / 5.
    rows = np.array([[6.0, 8.0], [-4.0, 3.0]])
    first = main_directions(rows, 1)
    assert first[:, 0] == pytest.approx([0.6, 0.8])
    # Towards the mean of the samples, (1, 5.5), which fixes the second direction's sign.
    assert main_directions(rows, 2)[:, 1] == pytest.approx([-0.8, 0.6])
    assert main_directions(-rows, 1)[:, 0] == pytest.approx([-0.6, -0.8])
    assert main_directions(rows, 5).shape == (2, 2)


@pytest.mark.parametrize(("settings", "columns"), [({}, 20), ({"directions_in_all": 20}, None)])
def test_directions_are_of_length_one_for_each_class(
    settings: dict[str, int], columns: int | None
) -> None:
    told = numbers_of(
        ask("principal-directions", context(), directions_per_class=2, **settings),
        "principal-directions",
    )
    assert told.shape[0] == 64
    assert np.linalg.norm(told, axis=0) == pytest.approx(1, abs=1e-5)
    # At most ten classes; over all clients, each class weighted by its share.
    assert told.shape[1] <= 20 if columns else 10 <= told.shape[1] <= 25


def test_how_many_directions_must_be_said() -> None:
    with pytest.raises(ValueError, match="directions-per-class must be a whole number"):
        ask("principal-directions", context())


def test_moments_by_hand() -> None:
    latent = np.array([[1.0], [3.0], [8.0]])
    told = moments(latent, np.array([2, 2, 0]), 3)
    assert told[:, :, 0].tolist() == [
        [4.0, pytest.approx(np.sqrt(26 / 3))],
        [8.0, 0.0],
        [-1.0, -1.0],
        [2.0, 1.0],
    ]
    assert moments(latent, None, 0).shape == (1, 2, 1)


def test_projections_are_the_same_everywhere_and_missing_dimensions_are_zero() -> None:
    points = np.array([[0.0, 0.0], [4.0, 0.0], [2.0, 1.0], [2.0, -1.0]])
    # The points' centre is (2, 0), and their principal directions are the axes.
    assert projected(np.array([[5.0, 7.0]]), points, 3).tolist() == [[3.0, 7.0, 0.0]]


@pytest.mark.parametrize("convolves", [True, False])
def test_latent_features_are_what_comes_into_a_dense_layer(convolves: bool) -> None:
    first = nn.Conv2d(1, 2, 2) if convolves else nn.Identity()
    dense = nn.Linear(2 if convolves else 4, 3)
    module = nn.Sequential(first, nn.Flatten(), dense, nn.Linear(3, 5))
    x = np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2)
    network = Network(module)
    found = latent_features(network, Samples(x, np.zeros(2, np.int64)))
    with torch.no_grad():
        wanted = module[:2] if convolves else module[:3]
        assert found == pytest.approx(wanted(torch.from_numpy(x)).numpy(), abs=1e-5)
    assert not module[2]._forward_pre_hooks


def test_descriptors_of_a_client_answer_what_was_asked() -> None:
    node, (start, _) = context(), start_of()
    most = ask("latent-most", node, {"arrays": start})["metrics"]["latent-most"]
    told = [
        numbers_of(
            ask(
                "descriptors",
                node,
                {"arrays": start},
                latent_dimensions=3,
                latent_most=float(most),
            ),
            "descriptors",
        )
        for _ in range(2)
    ]
    assert told[0].shape == (11, 2, 3)
    assert (told[0] == told[1]).all()
    assert (told[0][0, 1] > 0).all()


def test_the_gradient_is_that_of_the_mean_loss_and_leaves_the_model_alone() -> None:
    node, (start, spec) = context(), start_of()
    told = numbers_of(ask("gradient", node, {"arrays": start}), "gradient")
    flat = spec.unpack(start)
    assert told.shape == flat.shape
    losses = []
    for sign in (1, -1):
        moved = spec.pack((flat + sign * 1e-2 * told / np.linalg.norm(told)).astype(np.float32))
        losses.append(numbers_of(ask("losses", node, {"arrays": moved}), "losses").mean())
    slope = (losses[0] - losses[1]) / 2e-2
    assert slope == pytest.approx(np.linalg.norm(told), rel=1e-2)


def test_samples_are_assigned_and_training_is_weighted_by_it() -> None:
    config = RunConfig(clients=20, partition="iid", model="mclr", lr=0.05, local_epochs=1)
    node, (start, spec) = context(config), start_of(config)
    flat = spec.unpack(start)
    with pytest.raises(ValueError, match="weighted-by must name a model"):
        ask("train-weighted", node, {"arrays-0": start}, weighted_by=0)
    worse = spec.pack(flat + np.random.default_rng(0).normal(0, 50, len(flat)).astype(np.float32))
    reply = ask("label-masses", node, {"arrays-0": start, "arrays-1": worse})
    masses = numbers_of(reply, "label-masses")
    examples = reply["metrics"]["num-examples"]
    assert masses.shape == (2, 10)
    assert masses.sum() == pytest.approx(examples)
    assert masses.sum(axis=0) == pytest.approx(np.round(masses.sum(axis=0)))
    assert masses[0].sum() > masses[1].sum()

    def trained(index: int) -> float:
        reply = ask("train-weighted", node, {"arrays-0": start}, weighted_by=index)
        return float(np.linalg.norm(spec.unpack(reply["arrays"]) - flat))

    assert trained(0) > trained(1)
    # With all of ω on the second model, it is responsible for all samples.
    mixing = array_record({"mixing": to_array(np.array([0.0, 1.0]))})
    masses = numbers_of(
        ask("label-masses", node, {"arrays-0": start, "arrays-1": worse, "mixing": mixing}),
        "label-masses",
    )
    assert masses[0].sum() == 0
    # A model that is not responsible for any sample hardly moves.
    assert trained(1) > 10 * trained(0)


def test_what_is_sent_with_the_models_must_fit() -> None:
    node, (start, _) = context(), start_of()
    mixing = array_record({"mixing": to_array(np.ones(3))})
    with pytest.raises(ValueError, match=r"mixing must have shape \(2,\)"):
        ask("label-masses", node, {"arrays-0": start, "arrays-1": start, "mixing": mixing})
