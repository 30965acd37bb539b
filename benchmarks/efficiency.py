"""How much of the cores' time is local training: CASA on MNIST, and a plain loop to compare with.

    python3 benchmarks/efficiency.py --data-root data --updates 1500

Three things are measured in turns, in one process, so that noise affects all of them:

- pure training: each client's local epoch alone, on one thread, model and data in memory;
- the run: CASA on the virtual grid with worker processes: their start, the data, evaluations;
- a plain sequential loop as a researcher would write it: DataLoader, optim.SGD, deepcopy, the model
  averaged into the global one after each update. It evaluates nothing.

Efficiency is the pure training time of all updates over cores times wall time of the run.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.events import Event, UpdateApplied
from raceme.core.training_settings import TrainingSettings
from raceme.runs import experiment
from raceme.training import models
from raceme.training.local import train
from raceme.training.models import Network, Samples


def training_seconds(config: RunConfig, clients: list[int]) -> float:
    """Return the mean seconds of a client's local epoch, alone on one thread."""
    shape = datasets.data_shape(config)
    module = models.build(str(config.model), shape.input_shape, shape.num_classes, config.seed)
    network = Network(module)
    settings = TrainingSettings(float(config.lr or 0), config.batch_size)
    seconds = []
    for client in clients:
        data = datasets.client_data(config, client)
        samples = Samples(data.x_train, data.y_train, network.channels_last)
        rng = np.random.default_rng(client)
        started = time.perf_counter()
        train(network, samples, settings, rng)
        seconds.append(time.perf_counter() - started)
    return statistics.mean(seconds)


def plain_loop_seconds(config: RunConfig, clients: list[int]) -> float:
    """Return the mean seconds per update of a plain loop on all of torch's threads."""
    shape = datasets.data_shape(config)
    server = models.build(str(config.model), shape.input_shape, shape.num_classes, config.seed)
    loaders = []
    for client in clients:
        data = datasets.client_data(config, client)
        held = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
        loaders.append(DataLoader(held, batch_size=config.batch_size, shuffle=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    started = time.perf_counter()
    for loader in loaders:
        local = copy.deepcopy(server)
        optimiser = torch.optim.SGD(local.parameters(), lr=float(config.lr or 0))
        for x, y in loader:
            optimiser.zero_grad()
            cross_entropy(local(x), y).backward()
            optimiser.step()
        with torch.no_grad():
            for kept, new in zip(server.parameters(), local.parameters(), strict=True):
                kept.mul_(0.7).add_(new, alpha=0.3)
    seconds = (time.perf_counter() - started) / len(clients)
    torch.set_num_threads(threads)
    return seconds


def run(config: RunConfig) -> tuple[float, Counter[str]]:
    """Run CASA; return the wall time and each client's updates."""
    started = time.perf_counter()
    grid, strategy = experiment.build_grid(config), experiment.build_strategy(config)
    updates: Counter[str] = Counter()

    def observe(event: Event) -> None:
        if isinstance(event, UpdateApplied):
            updates[event.client] += 1

    arrays = models.initial_arrays(config)
    with threadpool_limits(1):
        strategy.run(
            grid,
            arrays,
            max_updates=config.max_updates,
            train_config=experiment.training_settings(config),
            plan=experiment.plan(config),
            observe=observe,
        )
    wall = time.perf_counter() - started
    grid.close()
    return wall, updates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eval-every", type=int, help="updates between two (default: clients)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = experiment.resolve(
        RunConfig(
            dataset="mnist",
            data_root=options.data_root,
            clients=options.clients,
            max_updates=options.updates,
            workers=str(options.workers),
            eval_every=options.eval_every,
        )
    )
    everybody = list(range(options.clients))
    pure, plain, walls = [], [], []
    for _ in range(options.repeats):
        pure.append(training_seconds(config, everybody))
        plain.append(plain_loop_seconds(config, everybody[:30]))
        wall, updates = run(config)
        walls.append(wall / sum(updates.values()))
        pure.append(training_seconds(config, everybody))
    alone, wall_per_update = statistics.median(pure), min(walls)
    results = {
        "workers": options.workers,
        "updates": options.updates,
        "training_ms": alone * 1e3,
        "run_ms_per_update": wall_per_update * 1e3,
        "plain_loop_ms_per_update": statistics.median(plain) * 1e3,
        "efficiency": alone / (options.workers * wall_per_update),
        "speed_up_over_plain_loop": statistics.median(plain) / wall_per_update,
    }
    table = Table(title=f"CASA on MNIST, {options.clients} clients, {options.updates} updates")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:,.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
