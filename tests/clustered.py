"""Fleets and steps for the tests of clustered methods."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from fleets import MODEL, grid_of, pulled_app

from raceme import events
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import Plan
from raceme.strategies.conduct import Conduct
from raceme.strategies.fleet import Client
from raceme.strategies.replies import Task, Update

GROUPS = [index % 3 for index in range(12)]
CENTRES = 0.5 + 3.0 * np.eye(3, 8)
"""Where the clients of three groups pull the model."""


def three_groups() -> VirtualGrid:
    """Twelve clients that pull in three directions, a quarter of them slow."""
    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS]
    devices = [Device(seconds_per_round=5.0 if index % 4 == 0 else 1.0) for index in range(12)]
    return grid_of(pulled_app(targets), devices, GROUPS)


def run_on(strategy: Any, grid: VirtualGrid, num_rounds: int = 360) -> list[events.Event]:
    """Run any strategy and return all that it reports."""
    seen: list[events.Event] = []
    strategy.start(grid, MODEL, num_rounds, plan=Plan(eval_every=60), observe=seen.append)
    return seen


def found(strategy: Conduct) -> list[int]:
    """Return how many clients there are of each group in each cluster."""
    clients = strategy.progress.fleet.clients.values()
    return sorted(Counter((strategy.cluster_of(c.client_id), c.group) for c in clients).values())


def last_accuracy(seen: list[events.Event]) -> float:
    return [event for event in seen if isinstance(event, events.Evaluated)][-1].accuracy


def with_clients(strategy: Any, count: int, size: int = 2) -> Any:
    """A strategy with a model of zeros, whose clients have not been given anything yet."""
    strategy.initialize(np.zeros(size, np.float32))
    for index in range(count):
        strategy.add_client(Client(f"c{index}", num_examples=10))
    return strategy


def update(
    strategy: Any, client: str, *values: float, examples: int = 10, number: int = 0
) -> Update:
    """Give a client a task from its present model, and return its answer to it."""
    cluster = strategy.cluster_of(client)
    version = strategy.models[cluster].version
    updates = strategy.progress.updates
    task = Task(number, client, cluster, version, updates, sent_at=0.0, bytes_down=0)
    strategy.on_dispatch(task)
    return Update(task, np.array(values, np.float32), examples, 0.0)


def round_of(strategy: Any, *models: tuple[float, ...]) -> list[Any]:
    """Let c0, c1, … answer with these models, all in one round."""
    updates = [update(strategy, f"c{index}", *model) for index, model in enumerate(models)]
    applied = strategy.aggregate(updates)
    for one in updates:
        strategy.on_close(one.task)
    return list(applied)


def step(strategy: Any, client: str, *values: float) -> Any:
    """Let a client be given a task and answer it, as the event loop would."""
    one = update(strategy, client, *values)
    applied = strategy.on_update(one)
    strategy.on_close(one.task)
    strategy.progress.updates += 1
    return applied
