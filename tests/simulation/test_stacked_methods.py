"""Clients of every registered method give the same answers stacked and alone, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict

from raceme import client_app
from raceme.core.config import RunConfig
from raceme.core.messages import from_array
from raceme.core.registry import STRATEGIES
from raceme.flower.messages import copy_of
from raceme.runs import experiment
from raceme.simulation import InProcess, VirtualGrid, nodes_of
from raceme.simulation.stacked import Stacked

NEEDS: dict[str, dict[str, Any]] = {"cdfl": {"proxy": "20"}}
"""Keys without which a method does not start."""
SMOKE = ("casa", "panicle", "ditto", "apfl", "fedrep", "ewc", "fedweit", "fedrc", "flux")
TOLERANCE = 1e-5


class Compared:
    """Works alone, and compares each reply and state with those of stacked clients."""

    def __init__(self) -> None:
        self.alone, self.stacked = InProcess(client_app.app), Stacked()
        self.contexts: dict[str, Context] = {}
        self.kinds: dict[str, int] = {}

    def submit(self, message: Message, context: Context, due: float) -> None:
        self.contexts[message.metadata.message_id] = context
        self.alone.submit(message, context, due)
        self.stacked.submit(message, context, due)

    def result(self, message_id: str) -> Message:
        context = self.contexts.pop(message_id)
        state = copy_of(context.state)
        together = self.stacked.result(message_id)
        state, context.state = context.state, state
        alone = self.alone.result(message_id)
        assert alone.has_error() == together.has_error()
        if not alone.has_error():
            assert_close(alone.content, together.content)
        assert_close(context.state, state)
        return alone

    def cancel(self, message_id: str) -> None:
        self.contexts.pop(message_id, None)
        self.alone.cancel(message_id)
        self.stacked.cancel(message_id)

    def close(self) -> None:
        self.alone.close()
        self.stacked.close()


def assert_close(one: RecordDict, other: RecordDict) -> None:
    assert list(one) == list(other)
    for name, record in one.items():
        if not isinstance(record, ArrayRecord):
            assert list(record) == list(other[name])
            for key, value in record.items():
                is_number = isinstance(value, int | float | list)
                expected = pytest.approx(value, rel=1e-4, abs=1e-5) if is_number else value
                assert other[name][key] == expected, key
            continue
        for key, array in record.items():
            alone, together = from_array(array), from_array(other[name][key])
            scale = max(1.0, float(np.abs(alone).max(initial=0.0)))
            np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE * scale)


def work(method: str, **settings: Any) -> Stacked:
    """Let some clients work for a method; return the executor with the stacked ones."""
    keys = {"strategy": method, "clients": 6, "eval-every": 6, "max-updates": 18, "seed": 1}
    config = experiment.resolve(RunConfig.from_mapping(keys | NEEDS.get(method, {}) | settings))
    executor, strategy = Compared(), experiment.build_strategy(config)
    initial, probe = experiment.fitted(config, strategy)
    examples = [40] * config.clients
    nodes = nodes_of(config.devices, examples, config.seed)
    grid = VirtualGrid(
        client_app.app, nodes, config.to_mapping(), seed=config.seed, executor=executor
    )
    strategy.run(
        grid,
        initial,
        max_updates=config.max_updates or 0,
        train_config=experiment.training_settings(config),
        evaluate_config=experiment.evaluation_settings(config),
        plan=experiment.plan(config),
        probe=probe,
    )
    return executor.stacked


@pytest.mark.parametrize(
    "method",
    [name if name in SMOKE else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES],
)
def test_the_clients_of_each_method_are_stacked(method: str) -> None:
    stacked = work(method)
    assert stacked.batches.clients
    assert stacked.batches.mean > 1


@pytest.mark.parametrize("method", ["panicle", "ewc", "apd", "fedweit", "c-faacl"])
@pytest.mark.slow
def test_clients_whose_data_change_are_stacked(method: str) -> None:
    work(method, drift="label-shift", **{"own-model": True} if method == "panicle" else {})


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.slow
def test_clients_with_another_optimiser_are_stacked(optimizer: str) -> None:
    work("apfl", optimizer=optimizer, lr=0.001)
