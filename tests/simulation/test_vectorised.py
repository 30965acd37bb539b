"""Stacked clients: the same as one by one, but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from asking import ask, message_to
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from raceme import client_app
from raceme.core.config import RunConfig
from raceme.core.messages import from_array, to_array
from raceme.runs import experiment
from raceme.simulation import Executor, InProcess
from raceme.simulation.vectorised import SampleStore, Vectorised
from raceme.training import models
from raceme.training.models import Samples


def training_messages(
    config: RunConfig, mask: float | None = None, kind: str = "train", **settings: float
) -> tuple[list[Message], list[Context]]:
    """Return a message of the initial model to every client, and their contexts."""
    record = models.initial_arrays(config)
    records: dict[str, object] = {"arrays": record}
    if mask is not None:
        rng = np.random.default_rng(0)
        records["mask"] = ArrayRecord(
            {
                name: to_array((rng.random(array.shape) < mask).astype(np.uint8))
                for name, array in record.items()
            }
        )
    messages, contexts = [], []
    for node in range(config.clients):
        told = ConfigRecord({"task": node, "version": 0, **settings})
        messages.append(message_to(node, kind, config=told, **records))
        node_config = {"partition-id": node, "num-partitions": config.clients}
        contexts.append(Context(1, node, node_config, RecordDict(), config.to_mapping()))
    return messages, contexts


def answers(
    executor: Executor, config: RunConfig, asked: slice = slice(None), **kinds: object
) -> list[RecordDict]:
    """Submit a message to every client; return the replies to some of them."""
    messages, contexts = training_messages(config, **kinds)  # type: ignore[arg-type]
    for message, context in zip(messages, contexts, strict=True):
        executor.submit(message, context, due=0.0)
    return [executor.result(message.metadata.message_id).content for message in messages[asked]]


def assert_close(one: RecordDict, other: RecordDict) -> None:
    assert one["config"] == other["config"]
    assert one["metrics"].keys() == other["metrics"].keys()
    for name, value in one["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-4)
    for name, array in one["arrays"].items():
        np.testing.assert_allclose(
            from_array(other["arrays"][name]), from_array(array), rtol=1e-4, atol=2e-6
        )


def ragged(model: str = "mlp") -> RunConfig:
    config = RunConfig(clients=7, model=model, lr=0.1).with_values(sizes="power-law")
    return experiment.resolve(config)


@pytest.mark.parametrize("model", ["mlp", "cnn", "mclr"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"local-epochs": 3, "batch-size": 7},
        {"proximal-mu": 0.5, "local-epochs": 2, "batch-size": 32},
        {"mask": 0.4, "proximal-mu": 0.1, "lr": 0.05},
        {"local-steps": 7, "step": 0},
    ],
    ids=["one epoch", "epochs", "proximal", "mask", "steps"],
)
def test_stacked_clients_learn_what_they_learn_alone(
    model: str, settings: dict[str, float]
) -> None:
    config = ragged(model)
    sizes = set()
    for one, other in zip(
        answers(InProcess(client_app.app), config, **settings),
        answers(Vectorised(), config, **settings),
        strict=True,
    ):
        assert_close(one, other)
        sizes.add(one["metrics"]["num-examples"])
    assert len(sizes) > 4


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("cnn", (1, 28, 28)),
        ("cnn", (3, 32, 32)),
        pytest.param("resnet18", (3, 16, 16), marks=pytest.mark.slow),
    ],
    ids=["MNIST", "CIFAR-10", "ResNet-18"],
)
def test_the_networks_of_images_learn_stacked_what_they_learn_alone(
    tmp_path: Path, model: str, shape: tuple[int, ...], device: str
) -> None:
    rng = np.random.default_rng(0)
    sizes = (5, 4) if model == "resnet18" else (11, 8, 4)
    for client, count in enumerate(sizes):
        x, y = rng.normal(size=(count, *shape)), rng.integers(0, 10, count)
        np.savez(
            tmp_path / f"{client}.npz", x=x, y=y, heldout=np.arange(count) == 0, num_classes=10
        )
    folder = RunConfig(dataset="npz-folder", data_root=str(tmp_path), model=model, lr=0.02)
    config = experiment.resolve(folder.with_values(clients=len(sizes), batch_size=4))
    stacked = Vectorised(device)
    start = training_messages(config)[0][0].content["arrays"]
    for one, other in zip(
        answers(InProcess(client_app.app), config), answers(stacked, config), strict=True
    ):
        assert one["metrics"].keys() == other["metrics"].keys()
        assert other["metrics"]["train-loss"] == pytest.approx(one["metrics"]["train-loss"], 1e-4)
        for name, array in one["arrays"].items():
            before, alone, together = map(from_array, (start[name], array, other["arrays"][name]))
            moved = np.abs(alone - before).max()
            # Rounding is a small part of what has been learned, not merely of the weights.
            assert moved > 0, name
            np.testing.assert_allclose(together, alone, rtol=0, atol=2e-3 * moved)
    assert all(gradients is not None for gradients in stacked._gradients.values())


@pytest.mark.parametrize("executor", [InProcess(client_app.app), Vectorised()])
def test_what_a_mask_leaves_out_stays_as_it_was_received(executor: Executor) -> None:
    config = ragged()
    messages, _ = training_messages(config, mask=0.5)
    start, mask = messages[0].content["arrays"], messages[0].content["mask"]
    for reply in answers(executor, config, mask=0.5):
        for name, array in reply["arrays"].items():
            before, after, trained = (from_array(a) for a in (start[name], array, mask[name]))
            np.testing.assert_array_equal(after[trained == 0], before[trained == 0])
            # Pixels that are always black have no gradient.
            assert name == "hidden.weight" or (after != before)[trained == 1].mean() > 0.5


def test_stacked_clients_are_tested_as_they_are_alone() -> None:
    config = ragged("cnn")
    for one, other in zip(
        answers(InProcess(client_app.app), config, kind="evaluate"),
        answers(Vectorised(), config, kind="evaluate"),
        strict=True,
    ):
        assert other["metrics"]["accuracy"] == one["metrics"]["accuracy"]
        assert other["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-5)


def test_stacking_keeps_to_its_memory_and_the_outcome_is_close_all_the_same() -> None:
    config = ragged()
    few, many = Vectorised(memory=1), Vectorised()
    for one, other in zip(answers(few, config), answers(many, config), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"mask": None},
        {"optimizer": "adam"},
        {"optimizer": "momentum", "momentum": 0.5},
        {"weight-decay": 0.1},
        {"scored": True, "former-step": 0},
        {"not-yet-invented": 3},
    ],
    ids=str,
)
def test_what_cannot_be_stacked_is_answered_one_by_one(settings: dict[str, float]) -> None:
    network = "pool_apps:with_dropout" if "mask" in settings else "mlp"
    config = ragged(network)
    messages, contexts = training_messages(config, **settings)
    one, other = (
        [
            ask(executor, message, context)
            for message, context in zip(messages, contexts, strict=True)
        ]
        for executor in (InProcess(client_app.app), Vectorised())
    )
    for alone, stacked in zip(one, other, strict=True):
        assert alone.has_error() == stacked.has_error() == ("lr" in settings)
        assert alone.has_error() or alone.content == stacked.content


def test_clients_that_augment_their_images_train_one_by_one() -> None:
    config = ragged().with_values(augment=True)
    alone = answers(InProcess(client_app.app), config)
    assert answers(Vectorised(), config) == alone
    assert answers(Vectorised(), ragged()) != alone


def test_a_message_with_arrays_of_unknown_use_is_not_stacked() -> None:
    config = ragged()
    replies = []
    for executor in (InProcess(client_app.app), Vectorised()):
        messages, contexts = training_messages(config)
        for message, context in zip(messages, contexts, strict=True):
            message.content["anchors"] = message.content["arrays"]
            executor.submit(message, context, due=0.0)
        replies.append([executor.result(m.metadata.message_id).content for m in messages])
    # To the last bit, which stacked clients would differ in.
    assert replies[0] == replies[1]


@pytest.mark.parametrize("kind", ["train-best", "losses", "label-counts", "no such kind"])
def test_other_kinds_of_work_are_not_stacked(kind: str) -> None:
    config = ragged()
    records = {f"arrays-{i}": models.initial_arrays(config.with_values(seed=i)) for i in (0, 1)}
    node_config = {"partition-id": 3, "num-partitions": config.clients}
    replies = []
    for executor in (InProcess(client_app.app), Vectorised()):
        context = Context(1, 3, node_config, RecordDict(), config.to_mapping())
        asked = message_to(3, "train", config=ConfigRecord({"kind": kind, "task": 2}), **records)
        replies.append(ask(executor, asked, context))
    one, other = replies
    assert one.has_error() == other.has_error() == (kind == "no such kind")
    assert one.has_error() or one.content == other.content


def test_kinds_that_are_named_are_stacked_as_those_that_are_not() -> None:
    config, executor = ragged(), Vectorised()
    record = models.initial_arrays(config)
    asked = []
    for node in range(4):
        told = ConfigRecord({"kind": "train" if node % 2 else "evaluate"})
        message = message_to(node, "train", config=told, arrays=record)
        node_config = {"partition-id": node, "num-partitions": config.clients}
        context = Context(1, node, node_config, RecordDict(), config.to_mapping())
        executor.submit(message, context, due=0.0)
        asked.append(message.metadata.message_id)
    answered = [executor.result(asked[node]).content for node in (1, 0)]
    assert ["arrays" in content for content in answered] == [True, False]
    # With one reply came the other of its kind.
    assert set(executor._replies) == set(asked[2:])


def test_stacked_clients_have_the_data_of_the_step_that_they_are_told() -> None:
    config = ragged().with_values(drift="label-shift")
    stacked = Vectorised()
    for step in (0, 1, 2):
        for kind in ("train", "evaluate"):
            for one, other in zip(
                answers(InProcess(client_app.app), config, kind=kind, step=step),
                answers(stacked, config, kind=kind, step=step),
                strict=True,
            ):
                assert other["metrics"] == pytest.approx(dict(one["metrics"]), rel=1e-4)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_two_steps_of_one_clients_data_are_told_apart_when_both_are_pending(kind: str) -> None:
    config = ragged().with_values(drift="label-shift")
    found, model = [], models.initial_arrays(config)
    for executor in (InProcess(client_app.app), Vectorised()):
        pending = []
        for step in (0, 1):
            messages, contexts = training_messages(config, kind=kind, step=step)
            messages[3].content["arrays"] = model
            executor.submit(messages[3], contexts[3], due=0.0)
            pending.append(messages[3].metadata.message_id)
        replies = [executor.result(asked).content for asked in reversed(pending)]
        name = "train-loss" if kind == "train" else "loss"
        found.append([reply["metrics"][name] for reply in replies])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][0] != pytest.approx(found[0][1], rel=1e-2)


# Samples of stacked clients: they stay where they are until a client has others.


def samples(count: int, value: float) -> Samples:
    return Samples(np.full((count, 2), value, np.float32), np.full(count, int(value)))


def held(store: SampleStore, name: str, count: int) -> list[float]:
    """What the store has at a client's place: the values of its inputs and its labels."""
    indices = torch.arange(count) + store.offset(name)
    x, y = store.select(indices)
    assert x.shape == (count, 2)
    assert x[:, 0].tolist() == y.tolist()
    return y.tolist()


@pytest.mark.parametrize("other", [2, 5, 1], ids=["as many", "more", "fewer"])
def test_a_clients_other_samples_replace_its_former_ones(other: int) -> None:
    store = SampleStore(torch.device("cpu"))
    store.hold({"a": samples(3, 1), "b": samples(2, 2)})
    store.hold({"c": samples(4, 3)})
    store.hold({"b": samples(other, 7), "d": samples(1, 4)})
    assert held(store, "a", 3) == [1] * 3
    assert held(store, "b", other) == [7] * other
    assert held(store, "c", 4) == [3] * 4
    assert held(store, "d", 1) == [4]


def test_nothing_piles_up_when_data_change_again_and_again() -> None:
    store = SampleStore(torch.device("cpu"))
    for step in range(20):
        store.hold({"a": samples(2 + step % 3, step), "b": samples(5, step)})
        assert held(store, "b", 5) == [step] * 5
        assert store.offset("b") == 2 + step % 3
