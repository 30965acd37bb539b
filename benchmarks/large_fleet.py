"""Ten thousand clients that do nothing: whether a run of them finishes, in what time and memory.

    python3 benchmarks/large_fleet.py

Every client is sent a model at once and sends it back; each method runs in a process of its own,
whose peak of resident memory is its own too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from overhead import idle_app, layers
from rich.console import Console
from rich.table import Table

from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import CASA, FedAsync, Method, Plan
from raceme.strategies.casa import CASAParameters

METHODS: dict[str, Callable[[], Method]] = {
    "fedasync": FedAsync,
    "casa, sketch 256": lambda: CASA(CASAParameters(sketch=256)),
}


def run(method: str, clients: int, updates: int, size: int) -> dict[str, float]:
    """Run a method; return its wall time and the peak memory of this process in megabytes."""
    arrays, device = layers(size), Device(jitter=0.1)
    grid = VirtualGrid(idle_app(), [Node(1000 + i, device) for i in range(clients)])
    strategy = METHODS[method]()
    before = _peak()
    started = time.perf_counter()
    strategy.run(grid, arrays, max_updates=updates, plan=Plan(eval_every=10**9))
    return {
        "seconds": time.perf_counter() - started,
        "updates": strategy.progress.updates,
        "peak_megabytes": _peak(),
        "megabytes_before": before,
    }


def _peak() -> float:
    """Return the most memory that this process has held so far, in megabytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--parameters", type=int, default=22_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"{options.clients:,} clients that do nothing")
    for column in ("method", "updates", "seconds", "updates/s", "peak MB", "before MB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    results = {}
    context = multiprocessing.get_context("spawn")
    for method in METHODS:
        with context.Pool(1) as pool:
            found = pool.apply(run, (method, options.clients, options.updates, options.parameters))
        results[method] = found
        table.add_row(
            method,
            f"{found['updates']:,.0f}",
            f"{found['seconds']:.1f}",
            f"{found['updates'] / found['seconds']:,.0f}",
            f"{found['peak_megabytes']:,.0f}",
            f"{found['megabytes_before']:,.0f}",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
