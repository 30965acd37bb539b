"""All clients stacked on a GPU, worker processes on the CPU, and a plain PyTorch loop on the GPU.

    python3 benchmarks/gpu.py --data-root data

Four networks: the CNN on MNIST, the CNN on CIFAR-10, ResNet-18 with group normalisation on CIFAR-10
and a GRU on text, Shakespeare by role. The loop trains client after client, as one would write it
without Raceme: all samples in the GPU's memory, `optim.SGD`, a copy of the model for each client.
Says so, and ends, where there is no CUDA. `--device cpu` does the same on a CPU, to see that it
runs: `--only MNIST,CIFAR --clients 1000 --concurrency 2 --updates 20`. ResNet-18 stacked on a CPU
had not done two updates after four minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.runs import experiment
from raceme.training import models


@dataclass(frozen=True)
class Case:
    """A network on a dataset.

    Attributes
    ----------
    label, dataset, model : str
        What it is called, and what Raceme calls its parts.
    share : float
        Updates that are timed, as a share of what is asked for: a dear network needs fewer.
    """

    label: str
    dataset: str
    model: str
    share: float


CASES = (
    Case("MNIST CNN", "mnist", "cnn", 1.0),
    Case("CIFAR-10 CNN", "cifar10", "cnn", 1.0),
    Case("ResNet-18, GroupNorm", "cifar10", "resnet18", 0.1),
    Case("Shakespeare GRU", "text", "gru", 0.1),
)


def run_rate(config: RunConfig) -> float:
    """Return updates per second of a run without evaluations, its start left out."""
    grid, strategy = experiment.build_grid(config), experiment.build_strategy(config)
    started = time.perf_counter()
    strategy.run(
        grid,
        models.initial_arrays(config),
        max_updates=config.max_updates or 0,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )
    seconds = time.perf_counter() - started
    grid.close()
    return (config.max_updates or 0) / seconds


def loop_rate(config: RunConfig, device: str, updates: int) -> float:
    """Return updates per second of the loop."""
    shape = datasets.data_shape(config)
    server = models.build(
        str(config.model), shape.input_shape, shape.num_classes, tokens=shape.tokens
    ).to(device)
    held = []
    for client in range(min(config.num_clients, updates)):
        data = datasets.client_data(config, client)
        x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
        held.append((x.to(device), y.to(device)))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        local = copy.deepcopy(server)
        optimiser = torch.optim.SGD(local.parameters(), lr=float(config.lr or 0))
        for batch in torch.randperm(len(y), device=device).split(config.batch_size):
            optimiser.zero_grad()
            cross_entropy(local(x[batch]), y[batch]).backward()
            optimiser.step()
        with torch.no_grad():
            for kept, new in zip(server.parameters(), local.parameters(), strict=True):
                kept.lerp_(new, 0.3)

    train(*held[0])
    _finish(device)
    started = time.perf_counter()
    for number in range(updates):
        train(*held[number % len(held)])
    _finish(device)
    return updates / (time.perf_counter() - started)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True, help="folder of the datasets")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--concurrency", type=int, default=0, help="clients at work; 0: all")
    parser.add_argument("--only", default="", help="words of networks' names, e.g. MNIST,ResNet")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("There is no CUDA device here: nothing to measure.")
        return
    results: dict[str, dict[str, float]] = {}
    for case in CASES:
        if not any(word in case.label for word in options.only.split(",")):
            continue
        updates = max(1, round(options.updates * case.share))
        base = RunConfig(
            dataset=case.dataset,
            data_root=options.data_root,
            model=case.model,
            clients=options.clients,
            max_updates=updates,
            concurrency=options.concurrency,
            eval_every=10**9,
        )
        stacked = experiment.resolve(
            base.with_values(device=options.device, vectorised=options.device == "cpu")
        )
        pool = experiment.resolve(base)
        best = results.setdefault(case.label, {"stacked": 0.0, "pool": 0.0, "loop": 0.0})
        for _ in range(options.repeats):
            best["stacked"] = max(best["stacked"], run_rate(stacked))
            best["pool"] = max(best["pool"], run_rate(pool))
            best["loop"] = max(best["loop"], loop_rate(stacked, options.device, updates))
    table = Table(title=f"updates per second, {options.clients} clients, {options.device}")
    for column in ("network", "stacked", "CPU workers", "plain loop", "over CPU", "over the loop"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for label, rates in results.items():
        ratios = (rates["stacked"] / rates[other] for other in ("pool", "loop"))
        cells = (*rates.values(), *ratios)
        table.add_row(label, *(f"{value:.3g}" for value in cells))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
