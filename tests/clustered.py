"""Fleets and steps for the tests of clustered methods."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from fleets import MODEL, grid_of, pulled_app

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Model
from raceme.core.messages import ModelSpec, Vector
from raceme.core.requests import InFlight, Update
from raceme.core.scheduling import InRounds
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import Method, Plan

NUMBERS = itertools.count()
"""Numbers of requests, which are unique."""
GROUPS = [index % 3 for index in range(12)]
CENTRES = 0.5 + 3.0 * np.eye(3, 8)
TIMEOUT = 60.0
"""Targets of the clients of three groups."""


def centre_losses(vectors: Sequence[Vector], proxy: int = 0) -> np.ndarray:
    """A probe whose losses are the distances of models from the centre of a group."""
    return np.array([[np.linalg.norm(vector - CENTRES[proxy])] for vector in vectors], np.float32)


centre_losses.sets = 3


def three_groups() -> VirtualGrid:
    """Twelve clients with targets in three directions, a quarter of them slow."""
    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS]
    devices = [Device(seconds_per_round=5.0 if index % 4 == 0 else 1.0) for index in range(12)]
    return grid_of(pulled_app(targets), devices, GROUPS)


def run_on(strategy: Any, grid: VirtualGrid, num_rounds: int = 360) -> list[events.Event]:
    """Run a strategy and return all events."""
    seen: list[events.Event] = []
    strategy.run(grid, MODEL, num_rounds, plan=Plan(eval_every=60), observe=seen.append)
    return seen


def found(strategy: Method) -> list[int]:
    """Return the number of clients of each group in each cluster."""
    clients = strategy.progress.fleet.clients.values()
    return sorted(Counter((strategy.clusters.main(c.client_id), c.group) for c in clients).values())


def last_accuracy(seen: list[events.Event]) -> float:
    return [event for event in seen if isinstance(event, events.Evaluated)][-1].accuracy


def with_clients(strategy: Any, count: int, size: int = 2) -> Any:
    """A strategy with a model of zeros, whose clients have not been sent anything yet."""
    strategy._spec = ModelSpec(("weights",), ((size,),), ("float32",))
    strategy.initialize(np.zeros(size, np.float32))
    for index in range(count):
        strategy.on_join(Client(f"c{index}", num_examples=10))
    return strategy


def with_statistics(strategy: Any, count: int) -> Any:
    """A strategy with a model of a weight, 0, and a running variance, 1."""
    strategy._spec = ModelSpec(("weight", "running_var"), ((1,), (1,)), ("float32", "float32"))
    strategy.initialize(np.array([0, 1], np.float32))
    for index in range(count):
        strategy.on_join(Client(f"c{index}", num_examples=10))
    return strategy


def at_version(strategy: Any, version: int, cluster: int = 0) -> None:
    """Set a model's version, as if it had been changed that often."""
    model = strategy.models[cluster]
    strategy.clusters.models[cluster] = Model(model.vector.copy(), version)


def homes(strategy: Any) -> dict[str, int | None]:
    """Return the cluster of each client; None for clients without one."""
    clusters = strategy.clusters
    return {c: clusters.main(c) if clusters.is_placed(c) else None for c in clusters.members}


def placed(seen: list[events.Event], change: events.ClusterChange) -> list[events.ClustersChanged]:
    """Return the reports of one kind of change."""
    return [e for e in seen if isinstance(e, events.ClustersChanged) and e.change is change]


def update(
    strategy: Any, client: str, *values: float, examples: int = 10, number: int | None = None
) -> Update:
    """Send a client its present model, and return its answer."""
    cluster = strategy.clusters.main(client)
    version = strategy.models[cluster].version
    updates = strategy.progress.updates
    number = next(NUMBERS) if number is None else number
    task = InFlight(number, client, cluster, version, updates, sent_at=0.0, bytes_down=0)
    strategy.open_task(task)
    return Update(task, np.array(values, np.float32), examples, 0.0)


def round_of(strategy: Any, *models: tuple[float, ...]) -> list[Any]:
    """Let c0, c1, … answer with these models, all in one round."""
    updates = [update(strategy, f"c{index}", *model) for index, model in enumerate(models)]
    applied = strategy.applied(updates)
    for one in updates:
        strategy.close_task(one.task)
    return list(applied)


def step(strategy: Any, client: str, *values: float, examples: int = 10) -> Any:
    """Send a client a task and process its answer, as the event loop does."""
    one = update(strategy, client, *values, examples=examples)
    applied = strategy.applied([one])[0]
    strategy.close_task(one.task)
    strategy.progress.updates += 1
    return applied


def check_it_can_be_restored(method: type[Any], parameters: Any = None) -> None:
    """Save a strategy during a run; the restored copy must have the same state, and continue."""
    strategy = method(parameters)
    run_on(strategy, three_groups(), 60)
    saved = copy.deepcopy(strategy.state_dict())
    restored = method(parameters, seed=99)
    restored.load_state_dict(saved)
    assert plain(restored.state_dict()) == plain(strategy.state_dict())
    seen = run_on(restored, three_groups(), 120)
    first = next(event for event in seen if isinstance(event, events.UpdateApplied))
    assert first.seq == strategy.progress.updates + 1
    assert restored.progress.updates >= 120
    assert not any(isinstance(event, events.UpdateRejected) for event in seen)
    # Between rounds no work is in flight that could be lost.
    if isinstance(strategy.scheduling, InRounds):
        whole = method(parameters)
        run_on(whole, three_groups(), 120)
        for part in ("clusters", "state", "bases"):
            assert plain(whole.state_dict()[part]) == plain(restored.state_dict()[part])


def whole(strategy: Method, grid: VirtualGrid) -> dict[str, Any]:
    """Return a copy of the state of a run."""
    return copy.deepcopy({"strategy": strategy.state_dict(), "grid": grid.state_dict()})


def plain(tree: Any) -> Any:
    """Return a tree with its arrays as text, for comparison."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [plain(value) for value in tree]
    return (str(tree.dtype), tree.shape, tree.tobytes()) if isinstance(tree, np.ndarray) else tree
