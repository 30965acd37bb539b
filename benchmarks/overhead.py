"""Measure what grid and strategy cost per update, with clients that do nothing.

    python3 benchmarks/overhead.py
    python3 benchmarks/overhead.py --methods fedasync,casa,fedbuff --sizes 22000

Processor time of one thread, without that of the clients' app and of the start of a run. CASA
compares each update with the models of all clients, and is bound by memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from raceme.core.registry import STRATEGIES
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import Plan

TRAINING = ConfigRecord(
    {
        **{"local-epochs": 1, "local-steps": 0, "batch-size": 10, "lr": 0.05, "optimizer": "sgd"},
        **{"momentum": 0.0, "weight-decay": 0.0, "augment": False, "validation-share": 0.0},
    }
)
START = 200
"""Updates before the measurement starts."""


class TimedApp(ClientApp):
    """An app that counts the seconds of its work."""

    seconds = 0.0

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        started = time.process_time()
        reply = super().__call__(message, context)
        self.seconds += time.process_time() - started
        return reply


App = TypeVar("App", bound=ClientApp)


def idle_app(kind: type[App] = ClientApp) -> App:  # type: ignore[assignment]
    """Make an app that echoes messages."""
    app = kind()

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


def milliseconds_per_update(method: str, size: int, clients: int, updates: int) -> float:
    """Run a method with clients that do nothing; return the mean time of an update."""
    app, device = idle_app(TimedApp), Device(jitter=0.1)
    grid = VirtualGrid(app, [Node(1000 + i, device) for i in range(clients)])
    strategy, marks = STRATEGIES.make(method), list[tuple[int, float]]()

    def stop() -> str:
        done = strategy.progress.updates
        if done >= (START + updates if marks else START):
            marks.append((done, time.process_time() - app.seconds))
        return "measured" if len(marks) == 2 else ""

    strategy.run(
        grid,
        layers(size),
        max_updates=0,
        train_config=TRAINING,
        plan=Plan(eval_every=10**9),
        stop_check=stop,
    )
    (first, began), (last, ended) = marks
    return (ended - began) / (last - first) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="fedasync")
    parser.add_argument("--sizes", default="22000,100000,1000000")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"grid + method, {options.clients} clients that do nothing")
    for column in ("method", "parameters", "median ms per update", "best"):
        table.add_column(column, justify="right")
    results = []
    for method, size in product(options.methods.split(","), map(int, options.sizes.split(","))):
        updates = max(100, min(options.updates, 10**8 // size))
        with threadpool_limits(1):
            times = [
                milliseconds_per_update(method, size, options.clients, updates)
                for _ in range(options.repeats)
            ]
        median, best = statistics.median(times), min(times)
        results.append({"method": method, "size": size, "median_ms": median, "best_ms": best})
        table.add_row(method, f"{size:,}", f"{median:.3f}", f"{best:.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
