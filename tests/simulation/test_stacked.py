"""Stacked clients: the same results as one by one, except for rounding."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, message_to
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch.utils._python_dispatch import TorchDispatchMode

from raceme import client_app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import TRAIN_BESIDE, from_array, to_array
from raceme.runs import experiment
from raceme.simulation import Executor, InProcess, executor_for
from raceme.simulation.stacked import Stacked
from raceme.simulation.stacked.samples import SampleStore
from raceme.training import models
from raceme.training.models import Samples


def training_messages(
    config: RunConfig, mask: float | None = None, kind: str = "train", **settings: float
) -> tuple[list[Message], list[Context]]:
    """Return a message with the initial model for every client, and their contexts."""
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
    assert one.config_records == other.config_records
    assert one["metrics"].keys() == other["metrics"].keys()
    for name, value in one["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-4)
    assert one.array_records.keys() == other.array_records.keys()
    for record, arrays in one.array_records.items():
        for name, array in arrays.items():
            np.testing.assert_allclose(
                from_array(other[record][name]), from_array(array), rtol=1e-4, atol=1e-5
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
        answers(Stacked(), config, **settings),
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
    stacked = Stacked(device)
    start = training_messages(config)[0][0].content["arrays"]
    for one, other in zip(
        answers(InProcess(client_app.app), config), answers(stacked, config), strict=True
    ):
        assert one["metrics"].keys() == other["metrics"].keys()
        assert other["metrics"]["train-loss"] == pytest.approx(one["metrics"]["train-loss"], 1e-4)
        for name, array in one["arrays"].items():
            before, alone, together = map(from_array, (start[name], array, other["arrays"][name]))
            moved = np.abs(alone - before).max()
            # Rounding errors are small relative to the change of the weights.
            assert moved > 0, name
            np.testing.assert_allclose(together, alone, rtol=0, atol=2e-3 * moved)
    assert stacked.batches.clients == len(sizes)


@pytest.mark.parametrize("executor", [InProcess(client_app.app), Stacked()])
def test_masked_weights_stay_as_received_in_a_stack(executor: Executor) -> None:
    config = ragged()
    messages, _ = training_messages(config, mask=0.5)
    start, mask = messages[0].content["arrays"], messages[0].content["mask"]
    for reply in answers(executor, config, mask=0.5):
        for name, array in reply["arrays"].items():
            before, after, trained = (from_array(a) for a in (start[name], array, mask[name]))
            np.testing.assert_array_equal(after[trained == 0], before[trained == 0])
            # Weights of pixels that are always black do not change.
            assert name == "hidden.weight" or (after != before)[trained == 1].mean() > 0.5


def test_stacked_clients_are_tested_as_they_are_alone() -> None:
    config = ragged("cnn")
    for one, other in zip(
        answers(InProcess(client_app.app), config, kind="evaluate"),
        answers(Stacked(), config, kind="evaluate"),
        strict=True,
    ):
        assert other["metrics"]["accuracy"] == one["metrics"]["accuracy"]
        assert other["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-5)


def test_stacking_keeps_to_its_memory_and_the_outcome_is_close_all_the_same() -> None:
    config = ragged()
    few, many = Stacked(memory=1), Stacked()
    for one, other in zip(answers(few, config), answers(many, config), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"optimizer": "adam", "local-epochs": 2, "lr": 0.001},
        {"optimizer": "momentum", "momentum": 0.5},
        {"weight-decay": 0.1, "proximal-mu": 0.2},
        {"weight-decay": 0.1, "weight-decay-on": "kernels", "mask": 0.5},
        {"half": 1, "local-steps": 3},
        {"dropout": 0.3, "local-epochs": 2},
        {"scored": True, "former-step": 0},
        {"not-yet-invented": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("network", ["mlp", "pool_apps:with_dropout"])
def test_all_training_settings_are_stacked(network: str, settings: dict[str, float]) -> None:
    config, stacked = ragged(network), Stacked()
    found = []
    for executor in (InProcess(client_app.app), stacked):
        messages, contexts = training_messages(config, **settings)
        for message, context in zip(messages, contexts, strict=True):
            executor.submit(message, context, due=0.0)
        found.append([executor.result(message.metadata.message_id) for message in messages])
    for alone, together in zip(*found, strict=True):
        assert alone.has_error() == together.has_error() == ("lr" in settings and alone.has_error())
        if not alone.has_error():
            assert_close(alone.content, together.content)
    assert stacked.batches.clients == (0 if settings == {"lr": -1.0} else config.clients)


def test_clients_that_augment_their_images_are_stacked() -> None:
    config, stacked = ragged("cnn").with_values(augment=True), Stacked()
    alone = answers(InProcess(client_app.app), config, **{"local-epochs": 2})
    for one, other in zip(alone, answers(stacked, config, **{"local-epochs": 2}), strict=True):
        assert_close(one, other)
    assert stacked.batches.clients == config.clients


@pytest.mark.parametrize("batch_norm", ["shared", "local"])
def test_batch_normalisation_is_stacked(batch_norm: str) -> None:
    config = ragged("networks:small_batch_norm").with_values(batch_norm=batch_norm, batch_size=7)
    stacked, found = Stacked(), []
    for executor in (InProcess(client_app.app), stacked):
        messages, contexts = training_messages(config)
        rounds = []
        for kind in ("train", "train", "evaluate"):
            messages, _ = training_messages(config, kind=kind)
            for message, context in zip(messages, contexts, strict=True):
                executor.submit(message, context, due=0.0)
            rounds.append([executor.result(m.metadata.message_id).content for m in messages])
        found.append(rounds)
    for one, other in zip(*found, strict=True):
        for alone, together in zip(one, other, strict=True):
            assert_close(alone, together)
    assert stacked.batches.clients == 2 * config.clients


class Limited(TorchDispatchMode):
    """Memory in which no tensor may have more than some number of elements."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.refused = most, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.numel() > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made


def test_where_memory_does_not_suffice_fewer_clients_are_stacked() -> None:
    config, stacked = ragged("mlp512"), Stacked()
    alone = answers(InProcess(client_app.app), config)
    with Limited(6 * models.initial_arrays(config).count_bytes() // 4) as memory:
        together = answers(stacked, config)
    for one, other in zip(alone, together, strict=True):
        assert_close(one, other)
    assert memory.refused
    assert stacked.batches.clients == config.clients
    assert stacked.batches.count > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_where_a_gpus_memory_does_not_suffice_fewer_clients_are_stacked() -> None:
    config = ragged("mlp512")
    alone = answers(InProcess(client_app.app), config)
    torch.cuda.empty_cache()
    share = 64 * models.initial_arrays(config).count_bytes()
    torch.cuda.set_per_process_memory_fraction(
        share / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        stacked = Stacked("cuda")
        for one, other in zip(alone, answers(stacked, config), strict=True):
            assert_close(one, other)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert stacked.batches.clients == config.clients


@pytest.mark.parametrize("kind", ["train-best", "losses", "label-counts", "no such kind"])
def test_other_kinds_of_work_give_the_same(kind: str) -> None:
    config = ragged()
    records = {f"arrays-{i}": models.initial_arrays(config.with_values(seed=i)) for i in (0, 1)}
    node_config = {"partition-id": 3, "num-partitions": config.clients}
    replies = []
    for executor in (InProcess(client_app.app), Stacked()):
        context = Context(1, 3, node_config, RecordDict(), config.to_mapping())
        asked = message_to(3, "train", config=ConfigRecord({"kind": kind, "task": 2}), **records)
        replies.append(ask(executor, asked, context))
    one, other = replies
    assert one.has_error() == other.has_error() == (kind == "no such kind")
    if not one.has_error():
        assert_close(one.content, other.content)


def test_work_on_a_state_that_has_changed_since_is_repeated() -> None:
    config = ragged().with_values(batch_norm="shared")
    found = []
    for executor in (InProcess(client_app.app), Stacked()):
        context = Context(1, 0, {"partition-id": 0}, RecordDict(), config.to_mapping())
        model, ids = models.initial_arrays(config), []
        for task in (0, 1):
            told = ConfigRecord({"kind": "train-own", "task": task, "proximal-mu": 0.1})
            message = message_to(0, "train", config=told, arrays=model)
            executor.submit(message, context, due=float(task))
            ids.append(message.metadata.message_id)
        found.append([executor.result(message_id).content for message_id in ids])
        assert list(context.state) == ["own-model"]
    for alone, together in zip(*found, strict=True):
        assert_close(alone, together)
    first, second = (from_array(reply["arrays"]["hidden.weight"]) for reply in found[1])
    assert np.abs(first - second).max() > 1e-3


def test_a_network_that_cannot_be_stacked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = ragged("networks:choosing")
    stacked = Stacked()
    with caplog.at_level("WARNING", logger="raceme"):
        assert answers(stacked, config) == answers(InProcess(client_app.app), config)
    told = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(told) == 1
    assert stacked.batches.clients == 0


def test_kinds_that_are_named_are_stacked_as_those_that_are_not() -> None:
    config, executor = ragged(), Stacked()
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
    # The other replies of the same kind were computed in the same batch.
    assert set(executor._done) == set(asked[2:])


def test_stacked_clients_have_the_data_of_the_step_that_they_are_told() -> None:
    config = ragged().with_values(drift="label-shift")
    stacked = Stacked()
    for step in (0, 1, 2):
        for kind in ("train", "evaluate"):
            for one, other in zip(
                answers(InProcess(client_app.app), config, kind=kind, step=step),
                answers(stacked, config, kind=kind, step=step),
                strict=True,
            ):
                assert other["metrics"] == pytest.approx(dict(one["metrics"]), rel=1e-4)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_two_steps_of_one_clients_data_are_distinguished_when_both_are_pending(kind: str) -> None:
    config = ragged().with_values(drift="label-shift")
    found, model = [], models.initial_arrays(config)
    for executor in (InProcess(client_app.app), Stacked()):
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


def test_a_run_says_how_many_clients_worked_at_once(tmp_path: Path) -> None:
    keys = {"clients": 6, "max-updates": 12, "strategy": "fedavg", "eval-every": 12}
    for vectorised in (True, False):
        out = str(tmp_path / str(vectorised))
        told = {**keys, "vectorised": vectorised, "workers": 0, "out": out}
        summary = experiment.simulate(RunConfig.from_mapping(told)).summary
        assert summary.get("mean_batch") == (6.0 if vectorised else None)


def test_a_precision_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="--device cuda"):
        executor_for("raceme.client_app:app", 0, precision="tf32")


# Stacked clients on a Ray cluster.


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs raceme[simulation]")
def test_actors_of_a_cluster_do_what_one_stack_does() -> None:
    from raceme.simulation.ray_cluster import Cluster, RayStacks

    config, cluster = ragged(), Cluster("ray", 3)
    try:
        for count in (1, 2):
            actors, here = RayStacks("ray", 3, actors=count), Stacked()
            messages, contexts = training_messages(config)
            _, others = training_messages(config)
            for message in messages:
                message.content["config"]["kind"] = TRAIN_BESIDE
            # The second time starts from the state that the first has left.
            for _ in range(2):
                for executor, own in ((actors, contexts), (here, others)):
                    for message, context in zip(messages, own, strict=True):
                        executor.submit(message, context, due=0.0)
                for message in messages:
                    of_actors, of_here = (
                        executor.result(message.metadata.message_id).content
                        for executor in (actors, here)
                    )
                    assert_close(of_here, of_actors)
                for one, other in zip(others, contexts, strict=True):
                    assert len(one.state.array_records)
                    for name, record in one.state.array_records.items():
                        for key, array in record.items():
                            np.testing.assert_allclose(
                                from_array(other.state[name][key]), from_array(array), atol=1e-6
                            )
            # Each actor gets its share of the clients of each batch.
            assert actors.mean_batch == pytest.approx(here.mean_batch / count)
            actors.close()
    finally:
        cluster.close()


# Samples of stacked clients keep their place for as long as they exist.


def samples(count: int, value: float) -> Samples:
    return Samples(np.full((count, 2), value, np.float32), np.full(count, int(value)))


def held(store: SampleStore, own: Samples) -> bool:
    """Whether the store has samples at their offset."""
    x, y = store.select(torch.arange(len(own)) + store.offset(own))
    return torch.equal(x, own.x) and torch.equal(y, own.y)


def test_samples_stay_and_others_are_added() -> None:
    store = SampleStore(torch.device("cpu"))
    first, second, third = samples(3, 1), samples(2, 2), samples(5000, 3)
    store.hold([first, second, first])
    offset = store.offset(first)
    store.hold([third, second])
    assert store.offset(first) == offset
    assert all(held(store, own) for own in (first, second, third))
    assert store.moves == 2


def test_nothing_piles_up_when_samples_change_again_and_again() -> None:
    store = SampleStore(torch.device("cpu"))
    kept = samples(5, 99)
    for step in range(2000):
        own = samples(2 + step % 3, step)
        store.hold([own, kept])
        assert held(store, own)
        assert held(store, kept)
    assert store.moves == 1
    assert len(store) < 2000
