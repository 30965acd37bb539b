"""Measure the server's time and memory per update for CASA, by phase, and Panicle.

    python3 benchmarks/server_cost.py
    python3 benchmarks/server_cost.py --methods panicle --clients 1000 --sizes 22000

Updates come from clients in turn, and look like those of a run: a common model, a direction for
each of four groups, and noise. Fleets of 1,000 and more compare sketches (``--sketch``), as the
docs recommend. Only `on_update` is timed: no grid, no messages, no training. Memory is traced in a
second pass over the same updates, because tracing slows them down.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from raceme.core.clients import Client
from raceme.core.messages import ModelSpec
from raceme.core.requests import InFlight, Update
from raceme.strategies import CASA, CASAParameters, FedAsync, Panicle

PHASES = {"_compare": "compare", "_split_if_due": "split", "_buffer": "buffer"}
GROUPS = 4
MOST_BYTES = 12e9


def timed(strategy: Any, spent: dict[str, float]) -> None:
    """Instrument a strategy to count the seconds of each phase."""
    for name, phase in PHASES.items():
        inner: Callable[..., Any] = getattr(strategy, name)

        def outer(*arguments: Any, inner: Any = inner, phase: str = phase) -> Any:
            started = time.perf_counter()
            result = inner(*arguments)
            spent[phase] += time.perf_counter() - started
            return result

        setattr(strategy, name, outer)


def measure(make: Callable[[], Any], clients: int, size: int, updates: int) -> dict[str, float]:
    """Feed updates to a strategy; return milliseconds per update, and peak memory in MB."""
    # Methods import some modules on first use.
    feed(make(), clients=100, size=1000, updates=300)
    row = feed(make(), clients, size, updates)
    tracemalloc.start()
    feed(make(), clients, size, updates)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {**row, "peak_mb": peak / 1e6}


def feed(strategy: Any, clients: int, size: int, updates: int) -> dict[str, float]:
    """Feed updates to a strategy; return milliseconds per update, by phase and in all."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=size).astype(np.float32)
    groups = 0.1 * rng.normal(size=(GROUPS, size)).astype(np.float32)
    noise = 0.02 * rng.normal(size=(4, size)).astype(np.float32)
    spent: dict[str, float] = defaultdict(float)
    if isinstance(strategy, CASA):
        timed(strategy, spent)
    strategy._spec = ModelSpec(("weights",), ((size,),), ("float32",))
    strategy.initialize(base.copy())
    strategy.restored()
    for client in range(clients):
        strategy.on_join(Client(str(client), 100))
        strategy.progress.fleet.clients[str(client)] = Client(str(client), 100)
    sent: dict[int, InFlight] = {}

    def send(client: int, number: int) -> None:
        cluster = strategy.clusters.main(str(client))
        version = strategy.models[cluster].version
        phase = strategy.request_for(str(client)).phase
        done = strategy.progress.updates
        sent[client] = InFlight(number, str(client), cluster, version, done, 0.0, 0, phase=phase)
        strategy.open_task(sent[client])

    for client in range(clients):
        send(client, 0)
    total = 0.0
    for number in range(updates):
        client = number % clients
        vector = base + groups[client % GROUPS] + noise[number % len(noise)]
        update = Update(sent[client], vector, 100, 0.0)
        started = time.perf_counter()
        strategy.applied([update])[0]
        total += time.perf_counter() - started
        strategy.close_task(sent[client])
        strategy.progress.updates += 1
        send(client, number)
    per_update = {phase: seconds / updates * 1e3 for phase, seconds in spent.items()}
    return {**per_update, "total": total / updates * 1e3}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="100,1000,10000")
    parser.add_argument("--sizes", default="22000,1000000,10000000")
    parser.add_argument("--methods", default="casa,panicle")
    parser.add_argument("--sketch", type=int, default=256)
    parser.add_argument("--passes", type=float, default=3.0, help="updates per client")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title="On the server: ms per update")
    for column in ("method", "clients", "parameters", "codes", "compare", "split", "buffer"):
        table.add_column(column, justify="right")
    table.add_column("C-phase", justify="right")
    table.add_column("all", justify="right")
    table.add_column("peak MB", justify="right")
    results = []
    console = Console(width=120)
    with threadpool_limits(1):
        for size in (int(text) for text in options.sizes.split(",")):
            count = max(10, min(300, 10**9 // size))
            row = measure(FedAsync, 100, size, count)
            results.append({"method": "fedasync", "clients": 100, "size": size, **row})
            cells = ["-"] * 5 + [f"{row['total']:.3f}", f"{row['peak_mb']:.0f}"]
            table.add_row("fedasync", "100", f"{size:,}", *cells)
            for clients in (int(text) for text in options.clients.split(",")):
                if "panicle" in options.methods.split(","):
                    row = measure(Panicle, clients, size, int(clients * options.passes))
                    results.append({"method": "panicle", "clients": clients, "size": size, **row})
                    cells = [*["-"] * 5, f"{row['total']:.3f}", f"{row['peak_mb']:.0f}"]
                    table.add_row("panicle", f"{clients:,}", f"{size:,}", *cells)
                if "casa" not in options.methods.split(","):
                    continue
                sketch = options.sketch if clients >= 1000 or size > 10**6 else 0
                code = sketch + 3 if sketch else size
                if code * 4 * 2 * clients > MOST_BYTES:
                    continue
                updates = int(clients * options.passes)
                if size > 10**6:
                    updates = min(updates, 300)
                row = measure(partial(CASA, CASAParameters(sketch=sketch)), clients, size, updates)
                results.append({"method": "casa", "clients": clients, "size": size, **row})
                phases = [row.get(phase, 0.0) for phase in PHASES.values()]
                table.add_row(
                    "casa",
                    f"{clients:,}",
                    f"{size:,}",
                    f"sketch {sketch}" if sketch else "whole",
                    *(f"{value:.3f}" for value in (*phases, sum(phases), row["total"])),
                    f"{row['peak_mb']:.0f}",
                )
                console.print(f"{clients:,} clients, {size:,} parameters: done", style="dim")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
