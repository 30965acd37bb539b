"""Panicle's clients and their single probes."""

from __future__ import annotations

import numpy as np
from clustered import homes, with_clients

from raceme.core.clients import Client
from raceme.core.requests import InFlight, Outcome, Update
from raceme.strategies import Panicle, PanicleParameters

EAST, NORTH, WEST = (4.0, 0.2), (0.2, 4.0), (-4.0, 0.1)


def fleet(count: int, **options: object) -> Panicle:
    """A strategy with some clients and a model of two zeros."""
    strategy = with_clients(Panicle(PanicleParameters(**options)), count)
    strategy.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 10) for i in range(count + 3)}
    strategy.restored()
    return strategy


def probe(strategy: Panicle, client: str, *values: float, examples: int = 10) -> Outcome:
    """Let a client answer a probe with a model."""
    cluster = strategy.clusters.main(client)
    version, updates = strategy.models[cluster].version, strategy.progress.updates
    task = InFlight(0, client, cluster, version, updates, 0.0, 0, phase="probe")
    strategy.open_task(task)
    (applied,) = strategy.applied([Update(task, np.array(values, np.float32), examples, 0.0)])
    strategy.close_task(task)
    strategy.progress.updates += 1
    return applied


def probed(directions: dict[str, tuple[float, float]], **options: object) -> Panicle:
    """A strategy whose clients have answered two probes each."""
    strategy = fleet(len(directions), **options)
    for _ in range(2):
        for client, direction in directions.items():
            probe(strategy, client, *direction)
    return strategy


def two_groups(**options: object) -> Panicle:
    """Three clients in the direction east, and three in the direction north."""
    east = {f"c{i}": EAST for i in range(3)}
    return probed(east | {f"c{i}": NORTH for i in range(3, 6)}, **options)


def partition_of(strategy: Panicle) -> list[list[str]]:
    """Return the clusters as lists of clients."""
    together: dict[int | None, list[str]] = {}
    for client, home in homes(strategy).items():
        together.setdefault(home, []).append(client)
    return sorted(sorted(part) for part in together.values())
