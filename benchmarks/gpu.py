"""All clients stacked on a GPU against worker processes on the CPU: the same MNIST run.

    python3 benchmarks/gpu.py --data-root data

Says so, and ends, where there is no CUDA.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from raceme import experiment, models
from raceme.config import RunConfig


def seconds(config: RunConfig) -> float:
    """Return the wall time of a run without evaluations."""
    grid, strategy = experiment.build_grid(config), experiment.build_strategy(config)
    started = time.perf_counter()
    strategy.run(
        grid,
        models.initial_arrays(config),
        max_updates=config.max_updates,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )
    grid.close()
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("There is no CUDA device here: nothing to measure.")
        return
    base = RunConfig(
        dataset="mnist",
        data_root=options.data_root,
        clients=options.clients,
        max_updates=options.updates,
        eval_every=10**9,
    )
    results = {}
    for device in ("cpu", "cuda", "cpu", "cuda"):
        wall = seconds(experiment.resolve(base.with_values(device=device)))
        results[device] = min(wall, results.get(device, wall))
    table = Table(title=f"MNIST, {options.clients} clients, {options.updates} updates")
    table.add_column("device")
    table.add_column("seconds", justify="right")
    for device, wall in results.items():
        table.add_row(device, f"{wall:.1f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
