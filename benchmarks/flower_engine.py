"""Raceme's simulator against Flower's own Ray engine: same strategy, same ClientApps, 100 nodes.

    python3 -m pip install -e '.[simulation]'
    python3 benchmarks/flower_engine.py

A client that does nothing shows the cost of the engines, CASA on digits the difference that remains
with training. Both engines start before the clock does; on Ray the first updates, which warm up its
actors, are left out. Compared are updates per second of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import overhead
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from raceme.core.config import RunConfig
from raceme.core.events import Event, UpdateApplied
from raceme.runs import experiment
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import FedAsync, Method, Plan
from raceme.training import models

NEVER = 10**9


class Clock:
    """Counts the seconds from the update after the warm-up to the last."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.started = self.ended = 0.0
        self.updates = 0

    def observe(self, event: Event) -> None:
        """Note the time of an update."""
        if isinstance(event, UpdateApplied):
            self.ended = time.perf_counter()
            if event.seq == self.warm_up:
                self.started = self.ended
            self.updates = event.seq

    def rate(self) -> float:
        """Return updates per second."""
        return (self.updates - self.warm_up) / (self.ended - self.started)


def configured(config: RunConfig) -> ClientApp:
    """Make Raceme's ClientApp with a configuration, which Flower's `run_simulation` cannot pass."""
    from raceme.client_app import app

    keys, wrapped = config.to_mapping(), ClientApp()

    def answer(message: Message, context: Context) -> Message:
        node = dict(context.node_config)
        return app(message, Context(context.run_id, context.node_id, node, context.state, keys))

    for handler in (wrapped.train(), wrapped.evaluate(), wrapped.query()):
        handler(answer)
    return wrapped


def on_ray(
    app: ClientApp,
    strategy: Method,
    arrays: ArrayRecord,
    nodes: int,
    updates: int,
    config: RunConfig | None,
) -> float:
    """Return updates per second on Flower's Ray engine."""
    clock = Clock(warm_up=nodes)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        settings = experiment.training_settings(config) if config else None
        plan = Plan(eval_every=NEVER)
        # As in every run of Raceme: torch uses one thread, and cores are left to parallel clients.
        with threadpool_limits(1):
            strategy.run(
                grid,
                arrays,
                updates + nodes,
                train_config=settings,
                plan=plan,
                observe=clock.observe,
            )

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=nodes,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return clock.rate()


def on_virtual_grid(
    grid: VirtualGrid,
    strategy: Method,
    arrays: ArrayRecord,
    nodes: int,
    updates: int,
    config: RunConfig | None,
) -> float:
    """Return updates per second on Raceme's simulator."""
    clock = Clock(warm_up=nodes)
    settings = experiment.training_settings(config) if config else None
    plan = Plan(eval_every=NEVER)
    with threadpool_limits(1):
        strategy.run(
            grid, arrays, updates + nodes, train_config=settings, plan=plan, observe=clock.observe
        )
    grid.close()
    return clock.rate()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--data-root", default="", help="train on MNIST instead of digits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    results = {}

    arrays = overhead.layers(100_000)
    idle_nodes = [Node(1000 + i, Device(jitter=0.1)) for i in range(options.nodes)]
    count = options.nodes, options.updates
    ours = on_virtual_grid(
        VirtualGrid(overhead.idle_app(), idle_nodes), FedAsync(), arrays, *count, None
    )
    theirs = on_ray(overhead.idle_app(), FedAsync(), arrays, *count, None)
    results["do-nothing client, 100k parameters"] = (ours, theirs)

    dataset = "mnist" if options.data_root else "digits"
    config = experiment.resolve(
        RunConfig(dataset=dataset, data_root=options.data_root, clients=options.nodes, workers="0")
    )
    arrays = models.initial_arrays(config)
    grid = experiment.build_grid(config.with_values(workers=str(os.cpu_count())))
    ours = on_virtual_grid(grid, experiment.build_strategy(config), arrays, *count, config)
    theirs = on_ray(configured(config), experiment.build_strategy(config), arrays, *count, config)
    results[f"CASA, training on {dataset}"] = (ours, theirs)

    table = Table(title=f"updates per second, {options.nodes} nodes")
    for column in ("what", "Raceme", "Flower on Ray", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, (mine, other) in results.items():
        table.add_row(name, f"{mine:.1f}", f"{other:.1f}", f"{mine / other:.1f}")
    Console().print(table)
    if options.json:
        rates = {k: {"raceme": a, "flower_ray": b} for k, (a, b) in results.items()}
        options.json.write_text(json.dumps(rates, indent=2))


if __name__ == "__main__":
    main()
