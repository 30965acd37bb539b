"""What grid and strategy cost per update: FedAsync, clients that do nothing.

python3 benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from rich.table import Table

from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import FedAsync, Plan

SIZES = (22_000, 100_000, 1_000_000)


def idle_app() -> ClientApp:
    """Make an app that sends back what it gets."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        records = {
            "metrics": MetricRecord({"num-examples": 100}),
            "config": ConfigRecord({"client-id": str(context.node_id)}),
        }
        return Message(RecordDict(records), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        records = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 100, "train-loss": 0.0}),
            "config": ConfigRecord({"task": message.content["config"]["task"]}),
        }
        return Message(RecordDict(records), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 0.0, "loss": 0.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def layers(size: int) -> ArrayRecord:
    """Make a model of eight layers."""
    parts = np.array_split(np.ones(size, np.float32), 8)
    return ArrayRecord({f"layer{i}": Array(part) for i, part in enumerate(parts)})


def milliseconds_per_update(size: int, clients: int, updates: int) -> float:
    """Run FedAsync with clients that do nothing, and return what an update took."""
    arrays, device = layers(size), Device(jitter=0.1)
    grid = VirtualGrid(idle_app(), [Node(1000 + i, device) for i in range(clients)])
    started = time.perf_counter()
    FedAsync().run(grid, arrays, max_updates=updates, plan=Plan(eval_every=10**9))
    return (time.perf_counter() - started) / updates * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"grid + FedAsync, {options.clients} clients that do nothing")
    for column in ("parameters", "median ms per update", "best"):
        table.add_column(column, justify="right")
    results = {}
    for size in SIZES:
        updates = max(100, min(options.updates, 10**8 // size))
        times = [
            milliseconds_per_update(size, options.clients, updates) for _ in range(options.repeats)
        ]
        results[size] = {"median_ms": statistics.median(times), "best_ms": min(times)}
        table.add_row(f"{size:,}", f"{statistics.median(times):.3f}", f"{min(times):.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
