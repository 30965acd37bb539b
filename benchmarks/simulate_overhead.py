"""Measure what `raceme simulate` costs per message: clients that do nothing, one process.

Measures processor time, so that other programs do not count.

python3 benchmarks/simulate_overhead.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raceme.simulation.apps import AppEnding, Settings, simulate

SIZES = (22_000, 100_000, 1_000_000)

PROJECT = """
[project]
name = "idle"
version = "1.0.0"

[tool.flwr.app]
publisher = "raceme"

[tool.flwr.app.components]
serverapp = "idle.server_app:app"
clientapp = "idle.client_app:app"

[tool.flwr.app.config]
rounds = 10
weights = 100
"""

# No averaging, whose cost depends on the strategy and not on the engine.
SERVER = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    layers = np.array_split(np.ones(context.run_config["weights"], np.float32), 8)
    records = {"arrays": ArrayRecord(layers), "config": ConfigRecord({"lr": 0.1})}
    for _ in range(context.run_config["rounds"]):
        messages = [Message(RecordDict(records), node, "train") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
        assert not any(reply.has_error() for reply in replies)
"""

# Like most apps it uses torch, whose random state is kept apart from the server's.
CLIENT = """
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    metrics = MetricRecord({"num-examples": 10})
    records = {"arrays": msg.content["arrays"], "metrics": metrics}
    return Message(RecordDict(records), reply_to=msg)
"""


def write_app(folder: Path) -> None:
    (folder / "idle").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "idle" / "__init__.py").write_text("")
    (folder / "idle" / "server_app.py").write_text(SERVER)
    (folder / "idle" / "client_app.py").write_text(CLIENT)


def seconds(folder: Path, out: Path, weights: int, clients: int, rounds: int) -> float:
    """Simulate the app, and return the processor time that it took."""
    config = (f"weights={weights} rounds={rounds}",)
    started = time.process_time()
    simulated = simulate(Settings(folder, clients, run_config=config, workers=0, out=out))
    taken = time.process_time() - started
    assert simulated.ending is AppEnding.RETURNED
    assert len(simulated.fleet.tasks) == clients * rounds
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"raceme simulate, {options.clients} clients that do nothing")
    for column in ("weights", "median ms per message", "best"):
        table.add_column(column, justify="right")
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_app(folder)
        seconds(folder, folder / "warm", 1000, options.clients, 1)
        for weights in SIZES:
            messages = options.clients * options.rounds
            times = [
                1e3
                * seconds(
                    *(folder, folder / f"{weights}-{repeat}", weights),
                    *(options.clients, options.rounds),
                )
                / messages
                for repeat in range(options.repeats)
            ]
            results[weights] = {"median_ms": statistics.median(times), "best_ms": min(times)}
            table.add_row(f"{weights:,}", f"{statistics.median(times):.3f}", f"{min(times):.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
