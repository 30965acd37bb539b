"""Huge numbers from one client leave the state of every method finite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from runs import of

from raceme import client_app
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.messages import NUMBERS
from raceme.core.registry import STRATEGIES
from raceme.runs import experiment
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import Method
from raceme.training import models
from raceme.training.clients import probe_of

_CLIENTS, _UPDATES = 4, 24
_ATTACKER = "client-1"
HUGE = (3.4e38, 1e30, 1e19)
"""Their squares exceed the range of float32."""
LARGEST = 3e13
"""Largest value that is accepted in all 650 weights of digits' linear model."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "cdfl": {"proxy": "5"},
    # These methods keep the last of several layers on the client.
    "fedper": {"model": "mlp"},
    "fedrep": {"model": "mlp"},
}

CONFIG = {
    "clients": _CLIENTS,
    "max-updates": _UPDATES,
    "model": "mclr",
    "local-steps": 1,
    "groups": "0.5,0.5",
    "eval-every": 1000,
    "workers": 0,
    "stop-at-target": False,
}


def poisoned(values: Sequence[float], numbers: bool) -> ClientApp:
    """Return Raceme's ClientApp, in which one client sends these values in turn.

    Parameters
    ----------
    values : Sequence[float]
        Magnitude of all numbers in a reply, with alternating signs.
    numbers : bool
        Whether to replace the numbers beside the model instead of the model.
    """
    app, turns = ClientApp(), cycle(values)

    def respond(message: Message, context: Context) -> Message:
        reply = client_app.app(message, context)
        if int(context.node_config["partition-id"]) != 1:
            return reply
        value = next(turns)
        for name, record in reply.content.array_records.items():
            if (name == NUMBERS) == numbers:
                reply.content[name] = with_values(record, value)
        return reply

    app.train()(respond)
    app.evaluate()(respond)
    app.query()(respond)
    return app


def with_values(record: ArrayRecord, value: float) -> ArrayRecord:
    """Return a record with the same names and shapes; integer arrays are not changed."""
    return ArrayRecord({name: filled(array, value) for name, array in record.items()})


def filled(array: Array, value: float) -> Array:
    numbers = array.numpy()
    if numbers.dtype.kind != "f":
        return array
    signs = np.where(np.arange(numbers.size) % 3, 1.0, -1.0).reshape(numbers.shape)
    return Array((signs * value).astype(numbers.dtype))


def attacked(
    name: str, values: Sequence[float], numbers: bool = False
) -> tuple[Method, list[events.Event]]:
    """Run a method on digits with one attacker among four clients."""
    keys = {"strategy": name, **CONFIG, **OTHERWISE.get(name, {})}
    config = experiment.resolve(RunConfig.from_mapping(keys))
    strategy = experiment.build_strategy(config)
    strategy.check(_CLIENTS)
    nodes = [
        Node(100 + i, Device(1.0 + i), {"partition-id": i, "num-partitions": _CLIENTS}, examples=90)
        for i in range(_CLIENTS)
    ]
    grid = VirtualGrid(poisoned(values, numbers), nodes, config.to_mapping(), seed=0)
    initial = models.initial_arrays(config)
    seen: list[events.Event] = []
    strategy.run(
        grid,
        initial,
        _UPDATES,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
        observe=seen.append,
        probe=probe_of(config, initial),
    )
    return strategy, seen


def not_finite(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the paths in a tree that hold NaN or infinity."""
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from not_finite(inner, f"{path}/{name}")
    elif isinstance(tree, list):
        for index, inner in enumerate(tree):
            yield from not_finite(inner, f"{path}/{index}")
    elif (
        isinstance(tree, np.ndarray) and tree.dtype.kind == "f" and not np.isfinite(tree).all()
    ) or (isinstance(tree, float) and not math.isfinite(tree)):
        yield path


def kept(method: Method) -> list[str]:
    """Return the paths in a method's state that are not finite."""
    tree = method.state_dict()
    return [
        place
        for part in ("clusters", "bases", "state", "dispatch", "features")
        for place in not_finite(tree[part], part)
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_huge_update_is_refused_and_counted_and_nothing_else_suffers(name: str) -> None:
    method, seen = attacked(name, HUGE)
    assert method.progress.updates >= _UPDATES
    assert not kept(method)
    refused = [event for event in of(events.UpdateRejected, seen) if event.client == _ATTACKER]
    too_large = [
        event.reason for event in refused if re.match("not finite|too large", event.reason)
    ]
    assert too_large
    assert not [event for event in of(events.UpdateApplied, seen) if event.client == _ATTACKER]
    # The others' updates are rejected only if they are too late for a window.
    others = [e.reason for e in of(events.UpdateRejected, seen) if e.client != _ATTACKER]
    assert all("late" in reason or "window" in reason for reason in others)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_update_that_is_accepted_leaves_all_that_is_kept_finite(name: str) -> None:
    # A perceptron has more weights (4,810), and the same bound on the sum of their squares.
    method, seen = attacked(name, (LARGEST / 3 if "model" in OTHERWISE.get(name, {}) else LARGEST,))
    assert any(event.client == _ATTACKER for event in of(events.UpdateApplied, seen))
    assert method.progress.updates >= _UPDATES
    assert not kept(method)


@pytest.mark.parametrize("name", STRATEGIES)
def test_huge_numbers_beside_a_model_leave_all_that_is_kept_finite(name: str) -> None:
    method, _ = attacked(name, HUGE, numbers=True)
    assert method.progress.updates >= _UPDATES
    assert not kept(method)
