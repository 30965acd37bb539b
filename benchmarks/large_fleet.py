"""Measure time and memory of a run with a hundred thousand clients that do nothing.

    python3 benchmarks/large_fleet.py
    python3 benchmarks/large_fleet.py --clients 10000 --updates 20000 --methods fedasync,casa
    python3 benchmarks/large_fleet.py --concurrency 1000

Every client is sent a model and sends it back, all at once or `--concurrency` at a time. Each
method runs in its own process, so that the peak of resident memory is the method's. The start, in
which every client introduces itself and is given its first task, is measured apart from the
updates. Processor time is reported too, as it depends less on other load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from overhead import idle_app, layers
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from raceme.core.events import Event, UpdateApplied
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import CASA, FedAsync, Method, Panicle, Plan
from raceme.strategies.casa.strategy import CASAParameters

METHODS: dict[str, Callable[[], Method]] = {
    "fedasync": FedAsync,
    # Ω(t) falls with the updates of all clients: κ is
    # scaled from the paper's 100 clients to 100,000.
    "casa": lambda: CASA(CASAParameters(sketch=256, kappa=1e-6)),
    "panicle": Panicle,
}


class Clock:
    """Notes when the first update was applied, in seconds of the wall and of the processor."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def observe(self, event: Event) -> None:
        """Look at an event."""
        if self.first is None and isinstance(event, UpdateApplied):
            self.first = time.perf_counter(), time.process_time()


def run(
    method: str, clients: int, updates: int, size: int, concurrency: int = 0
) -> dict[str, float]:
    """Run a method; return its times, and the memory of this process in megabytes."""
    before, clock = peak(), Clock()
    started, cpu_started = time.perf_counter(), time.process_time()
    arrays, device = layers(size), Device(jitter=0.1)
    grid = VirtualGrid(idle_app(), [Node(1000 + i, device) for i in range(clients)])
    strategy, plan = (
        METHODS[method](),
        Plan(concurrency=concurrency, eval_every=10**9, eval_clients=100),
    )
    with threadpool_limits(1):
        strategy.run(grid, arrays, max_updates=updates, plan=plan, observe=clock.observe)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    assert clock.first is not None, "updates were applied"
    applied = strategy.progress.updates
    return {
        "clients": clients,
        "weights": size,
        "updates": applied,
        "start_seconds": clock.first[0] - started,
        "start_cpu_seconds": clock.first[1] - cpu_started,
        "ms_per_update": (ended - clock.first[0]) / applied * 1e3,
        "cpu_ms_per_update": (cpu_ended - clock.first[1]) / applied * 1e3,
        "peak_megabytes": peak(),
        "megabytes_before": before,
        "load": os.getloadavg()[0],
    }


def in_own_process(*arguments: object) -> dict[str, float]:
    """Run in a fresh process, so that its peak of memory is the run's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def peak() -> float:
    """Return the most memory that this process has held so far, in megabytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=200_000)
    parser.add_argument("--parameters", type=int, default=22_000)
    parser.add_argument(
        "--concurrency", type=int, default=0, help="clients working at once; 0: all"
    )
    parser.add_argument("--methods", default="fedasync,casa,panicle")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"{options.clients:,} clients that do nothing")
    for column in ("method", "updates", "start s", "ms/update", "of the processor", "peak MB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    table.add_column("load", justify="right")
    results = {}
    for method in options.methods.split(","):
        sizes = options.clients, options.updates, options.parameters
        found = in_own_process(method, *sizes, options.concurrency)
        results[method] = found
        table.add_row(
            method,
            f"{found['updates']:,.0f}",
            f"{found['start_seconds']:.1f}",
            f"{found['ms_per_update']:.2f}",
            f"{found['cpu_ms_per_update']:.2f}",
            f"{found['peak_megabytes']:,.0f}",
            f"{found['load']:.1f}",
        )
        if options.json:
            options.json.write_text(json.dumps(results, indent=2))
    Console().print(table)


if __name__ == "__main__":
    main()
