"""The processor and the number of threads that a device trains with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from nodes import context
from other_memory import PLACE, gpu

from raceme.client_app import app, forget
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, to_array
from raceme.flower.messages import identify_process
from raceme.training import clients, models
from raceme.training import machine as hardware
from raceme.training import machine as processors
from raceme.training.machine import Way, accelerators, fastest, thread_counts, ways_of
from raceme.training.models import Network

TASKS = RunConfig(clients=16, partition="iid", drift="tasks", model="mlp", batch_size=40)
IMAGES = RunConfig(clients=16, partition="iid", model="cnn3x3", batch_size=40)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find the stand-in for a GPU."""
    there = SimpleNamespace(is_available=lambda: True, manual_seed=lambda seed: None)
    others = torch.get_device_module
    # A CUDA build of torch also queries its own device.
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda name: there if torch.device(name) == PLACE else others(name),
    )
    monkeypatch.setattr(processors, "GPUS", (str(PLACE),))


def lent(size: int) -> ArrayRecord:
    values = {"adaptive-indices-0": np.array([0, size - 1]), "adaptive-values-0": np.ones(2)}
    return ArrayRecord({name: to_array(array) for name, array in values.items()})


def replies(config: RunConfig, **node: Any) -> list[tuple[str, np.ndarray]]:
    """Have a client do all kinds of work, and return every number in its answers."""
    identify_process()
    torch.manual_seed(0)
    start = models.initial_arrays(config)
    spec = ModelSpec.of(start)
    other = spec.pack(0.5 * spec.unpack(start))
    client = context(1, config)
    client.node_config.update(node)
    size = spec.size
    mask = {n: to_array(np.ones(a.shape, np.uint8)) for n, a in start.items()}
    several = {"arrays-0": start, "arrays-1": other}
    tasks = config.drift == "tasks"
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "train",
            {"arrays": start, "anchor": other, "mask": ArrayRecord(mask)},
            {"proximal-mu": 1.0},
        ),
        ("train", {"arrays": start}, {"optimizer": "momentum", "weight-decay": 0.1}),
        ("train", {"arrays": start}, {"optimizer": "adam", "dropout": 0.1}),
        ("train-best", several, {}),
        ("train-mixed", several, {}),
        ("train-own", {"arrays": start}, {"proximal-mu": 0.1}),
        ("learn", {"arrays": start}, {"validation-share": 0.2, "remembered": 3}),
        ("match", several, {"on": "validation", "validation-share": 0.2, "memory-steps": [0]}),
        ("lend", {}, {"memory-steps": [0]}),
        ("evaluate", {"arrays": other}, {}),
        ("losses", several, {"on": "test"}),
        ("scores", several, {}),
        ("label-counts", {}, {}),
        ("test-steps", several, {"tested-steps": [0, 0], "tested-models": [0, 1]}),
    ]
    if tasks:
        for step in (0, 1):
            told = {"step": step, "elastic-strength": 1.0, "drift-strength": 1.0, "sparsity": 1e-3}
            asked += [
                ("train-elastic", {"arrays": start}, told),
                ("train-decomposed", {"arrays": start}, told),
                ("evaluate", {"arrays": start}, {"completed-by": "task-parts", "step": step}),
            ]
        asked.append(("train-borrowing", {"arrays": start, "others": lent(size)}, {"step": 2}))
    found = []
    for number, (kind, arrays, told) in enumerate(asked):
        content = RecordDict(
            {
                **arrays,
                "config": ConfigRecord({"kind": kind, "task": number, "local-steps": 3, **told}),
            }
        )
        reply = app(Message(content, 7, "train"), client).content
        records = [*reply.array_records.items(), *client.state.array_records.items()]
        for name, record in records:
            found += [(f"{kind} {name}", values) for values in record.to_numpy_ndarrays()]
        for record in reply.metric_records.values():
            found += [(f"{kind} {name}", np.asarray(value)) for name, value in record.items()]
    forget()
    return found


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("config", [TASKS, IMAGES], ids=["tasks", "images"])
def test_every_kind_of_work_is_done_in_a_gpus_memory_with_the_same_outcome(
    config: RunConfig,
) -> None:
    expected = replies(config)
    with gpu():
        found = replies(config, accelerator=str(PLACE))
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, values), (_, other) in zip(found, expected, strict=True):
        if config is IMAGES and name.endswith((" numbers", " loss")):
            # A CPU tests convolutions in another memory layout, which rounds differently.
            np.testing.assert_allclose(values, other, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert np.array_equal(values, other, equal_nan=True), name


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_that_computes_something_else_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(PLACE)
    processors._failure.cache_clear()
    with gpu():
        assert accelerators("auto") == ["cpu", name]
    processors._failure.cache_clear()
    # Outside the stand-in these tensors are unusable, like those of a torch build for other GPUs.
    assert accelerators("auto") == ["cpu"]
    assert f"'{name}' is not used" in caplog.text
    with pytest.raises(UserError, match=f"'{name}' cannot be used"):
        accelerators(name)
    processors._failure.cache_clear()


def test_a_gpu_that_is_not_there_is_an_error_and_another_word_is_too() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match="no accelerator 'cuda' here"):
        accelerators("cuda")
    with pytest.raises(UserError, match="no accelerator 'gpu'"):
        accelerators("gpu")


def test_threads_are_those_that_are_wanted_or_up_to_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "processors", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_counts("auto") == [1, 2, 4, 6]
    assert thread_counts(3) == thread_counts("3") == [3]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert thread_counts("auto") == [1, 2]
    for wrong in (0, "two", -1, 1.5, 10**6):
        with pytest.raises(UserError, match="threads must be auto"):
            thread_counts(wrong)


def test_a_node_without_the_keys_trains_on_one_thread_of_the_cpu() -> None:
    assert ways_of({"device-id": "kitchen"}) == [Way("cpu", 1)]
    assert ways_of({"threads": 2, "accelerator": "cpu"}) == [Way("cpu", 2)]


def test_a_container_counts_the_cores_that_it_has_a_share_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda of: set(range(4)))
    share = tmp_path / "cpu.max"
    monkeypatch.setattr(hardware, "_CONTAINER_SHARE", share)
    assert hardware.processors() == 4
    for text, cores in {"max 100000": 4, "250000 100000": 2, "5000 100000": 1}.items():
        share.write_text(f"{text}\n")
        assert hardware.processors() == cores


def test_the_simplest_way_is_taken_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = [Way("cpu", 1), Way("cpu", 2), Way("cpu", 4)]
    seconds = dict(zip(ways, (1.0, 0.95, 0.5), strict=True))
    monkeypatch.setattr(processors, "_timed_step", lambda way, *_: seconds[way])
    x, y = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
    assert fastest(ways, lambda name: None, x, y) == Way("cpu", 4)
    assert fastest(ways[:2], lambda name: None, x, y) == Way("cpu", 1)


def test_measuring_leaves_weights_and_threads_as_they_were() -> None:
    network = Network(models.build("mlp", (4,), 3))
    before, threads = network.weights.clone(), torch.get_num_threads()
    x, y = np.ones((2, 4), np.float32), np.zeros(2, np.int64)
    assert fastest([Way("cpu", 1), Way("cpu", 2)], lambda name: network, x, y).accelerator == "cpu"
    assert torch.equal(network.weights, before)
    assert torch.get_num_threads() == threads


def test_a_device_measures_once_for_a_network_and_trains_as_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[Way, ...]]()

    def found(ways: tuple[Way, ...], *_: object) -> Way:
        asked.append(ways)
        return ways[-1]

    monkeypatch.setattr(clients, "fastest", found)
    monkeypatch.setattr(clients, "_ways", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    identify_process()
    start = models.initial_arrays(TASKS)
    client = context(1, TASKS)
    client.node_config["threads"] = "auto"
    for step in (0, 1):
        config = ConfigRecord({"kind": "train", "step": step, "local-steps": 1})
        app(Message(RecordDict({"arrays": start, "config": config}), 7, "train"), client)
        assert torch.get_num_threads() == 2
    assert asked == [(Way("cpu", 1), Way("cpu", 2))]
    torch.set_num_threads(1)
    forget()
