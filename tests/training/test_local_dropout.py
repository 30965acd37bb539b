"""Networks with dropout: the dropped units depend on the task alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from asking import ask, message_to
from flwr.app import ConfigRecord, Context, Message, RecordDict

from raceme import client_app
from raceme.core.config import RunConfig
from raceme.core.messages import from_array
from raceme.records.record import read_run
from raceme.runs.experiment import resolve, simulate
from raceme.simulation import Executor, InProcess
from raceme.simulation.stacked import Stacked
from raceme.training import models

KEYS = {"model": "cnn3x3", "clients": 6, "partition": "iid", "lr": 0.05}


def work(kind: str, node: int) -> tuple[Message, Context]:
    """Return a message with the initial model for a client."""
    config = resolve(RunConfig.from_mapping(KEYS))
    action = "query" if kind == "losses" else kind
    told = ConfigRecord({"task": node, "version": 0, "kind": kind})
    message = message_to(node, action, config=told, arrays=models.initial_arrays(config))
    node_config = {"partition-id": node, "num-partitions": 6}
    return message, Context(1, node, node_config, RecordDict(), config.to_mapping())


def trained(executor: Executor, order: list[tuple[str, int]]) -> dict[int, np.ndarray]:
    """Let clients work in a given order; return the output layers of those that trained."""
    outputs = {}
    for kind, node in order:
        reply = ask(executor, *work(kind, node))
        if kind == "train":
            outputs[node] = from_array(reply.content["arrays"]["output.weight"])
    return outputs


def test_dropped_units_depend_on_neither_the_order_nor_torchs_generator() -> None:
    executor = InProcess(client_app.app)
    one = trained(executor, [("train", 0), ("train", 1), ("train", 2)])
    torch.manual_seed(99)
    before = torch.get_rng_state()
    other = trained(
        executor, [("train", 2), ("evaluate", 1), ("train", 1), ("losses", 0), ("train", 0)]
    )
    assert torch.equal(torch.get_rng_state(), before)
    for node, weights in one.items():
        assert np.array_equal(other[node], weights)
    assert not np.array_equal(one[0], one[1])


def test_nothing_is_dropped_in_a_test() -> None:
    executor = InProcess(client_app.app)
    trained(executor, [("train", 0)])
    replies = [ask(executor, *work("evaluate", 0)).content["metrics"] for _ in range(2)]
    assert dict(replies[0]) == dict(replies[1])


@pytest.mark.parametrize("first", ["train", "evaluate", "losses"])
def test_clients_that_are_stacked_drop_the_same(first: str) -> None:
    # A test leaves the network in evaluation mode, which must not affect later training.
    order = [(first, 0), ("train", 1), ("train", 2)]
    alone = trained(InProcess(client_app.app), order)
    client_app.forget()
    stacked = trained(Stacked(), order)
    for node, weights in alone.items():
        np.testing.assert_allclose(stacked[node], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_is_bit_for_bit_the_same_with_and_without_worker_processes(tmp_path: Path) -> None:
    found = []
    for workers in ("0", "2"):
        out = tmp_path / workers
        keys = {**KEYS, "max-updates": 24, "workers": workers, "out": str(out)}
        simulate(RunConfig.from_mapping(keys))
        record = read_run(out)
        models_ = sorted((out / "clusters").glob("*.safetensors"))
        found.append(
            (
                list(record.updates.client),
                list(record.updates.train_loss),
                [path.read_bytes() for path in models_],
            )
        )
    assert len(found[0][0]) == 24
    assert found[0] == found[1]
