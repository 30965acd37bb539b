"""Short runs for tests, and their reports."""

from __future__ import annotations

import numpy as np
from fleets import MODEL

from raceme.core import events
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import FedAsync, FedAsyncParameters, Method, Plan

ONES = np.ones(8, np.float32)


def devices(*seconds: float) -> list[Device]:
    return [Device(seconds_per_round=value) for value in seconds]


def of(kind: type, seen: list[events.Event]) -> list:
    return [event for event in seen if isinstance(event, kind)]


def run(
    strategy: Method,
    grid: VirtualGrid,
    num_rounds: int = 10,
    timeout: float = 3600.0,
    **plan: float | None,
) -> list[events.Event]:
    """Run a strategy and return all events."""
    seen: list[events.Event] = []
    strategy.run(grid, MODEL, num_rounds, timeout=timeout, plan=Plan(**plan), observe=seen.append)
    assert isinstance(seen[-1], events.RunEnded)
    return seen


def half() -> FedAsync:
    """FedAsync with the constant weight 1/2."""
    return FedAsync(FedAsyncParameters(alpha=0.5, decay="constant"))
