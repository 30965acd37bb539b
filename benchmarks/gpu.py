"""Compare stacked clients on a GPU with worker processes and a plain PyTorch loop, in five minutes.

    python3 benchmarks/gpu.py --synthetic --json gpu.json
    python3 benchmarks/gpu.py --data-root data
    python3 benchmarks/gpu.py --quick --device cpu

Runs the tests of stacking, measures updates per second, and profiles where the time goes. With
`--synthetic`, random samples in the shapes of the datasets replace their files. The plain loop
trains client after client, as one would write it without Raceme: all samples in the GPU's memory,
`optim.SGD`, a copy of the model for each client. `--quick` is a reduced version, a minute on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
# The synthetic datasets are named like a user's own dataset, which worker processes import.
sys.path.insert(0, str(ROOT))

from raceme import datasets  # noqa: E402
from raceme.core.config import RunConfig  # noqa: E402
from raceme.core.strategy import Plan  # noqa: E402
from raceme.datasets.source import Dataset  # noqa: E402
from raceme.runs import experiment  # noqa: E402
from raceme.training import models  # noqa: E402

SEED, MOST, EACH, FEW, TOKENS, LENGTH = 0, 60_000, 600, 40, 80, 80
"""At most `MOST` samples: `EACH` for every client, or `FEW` in small fleets."""
SHOWN = 12
"""Lines of a profile."""


# -----------------------------------------------------------------------------
# Random samples in the shapes of datasets.
# -----------------------------------------------------------------------------


def like_mnist(config: RunConfig) -> Dataset:
    """Return random grey images of 28x28 pixels."""
    return _images(config, (1, 28, 28))


def like_cifar10(config: RunConfig) -> Dataset:
    """Return random colour images of 32x32 pixels."""
    return _images(config, (3, 32, 32))


def like_text(config: RunConfig) -> Dataset:
    """Return random texts of 80 characters."""
    rng, count = np.random.default_rng(SEED), _count(config) // 2
    x = rng.integers(0, TOKENS, (count, LENGTH))
    return Dataset(x, rng.integers(0, TOKENS, count), TOKENS, tokens=TOKENS)


def _images(config: RunConfig, shape: tuple[int, ...]) -> Dataset:
    rng, count = np.random.default_rng(SEED), _count(config)
    x = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    return Dataset(x, rng.integers(0, 10, count), 10, mean=0.5, std=0.3)


def _count(config: RunConfig) -> int:
    return min(MOST, (EACH if config.num_clients >= 100 else FEW) * config.num_clients)


# -----------------------------------------------------------------------------
# Measurements.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A method with a network on a dataset.

    Attributes
    ----------
    label : str
        Name in the table.
    dataset, synthetic, model : str
        What Raceme calls its parts.
    clients : int
        Number of clients.
    strategy : str
        The method.
    evaluates : bool
        Whether its default evaluations take place.
    has_others : bool
        Whether worker processes and the plain loop are measured, too.
    """

    label: str
    dataset: str
    synthetic: str
    model: str
    clients: int = 100
    strategy: str = "fedasync"
    evaluates: bool = False
    has_others: bool = True

    def config(self, options: argparse.Namespace) -> RunConfig:
        """Return the configuration of the run, without a processor."""
        name = f"benchmarks.gpu:{self.synthetic}" if options.synthetic else self.dataset
        clients = min(self.clients, options.clients) if options.clients else self.clients
        keys: dict[str, Any] = {
            "dataset": name,
            "data-root": options.data_root or "",
            "model": self.model,
            "clients": clients,
            "max-updates": 10**6,
            "lr": 0.02,
            "strategy": self.strategy,
        }
        if name == "npz-folder":
            keys["data-folder"] = "shakespeare"
        if not self.evaluates:
            keys["eval-every"] = 10**9
        return RunConfig.from_mapping(keys)


_MNIST, _CIFAR = ("mnist", "like_mnist", "cnn"), ("cifar10", "like_cifar10", "cnn")
CASES = (
    Case("MNIST CNN, FedAsync", *_MNIST),
    Case("MNIST CNN, FedAsync", *_MNIST, clients=1000, has_others=False),
    Case("MNIST CNN, CASA", *_MNIST, strategy="casa"),
    Case("MNIST CNN, CASA, evaluated", *_MNIST, strategy="casa", evaluates=True),
    Case("MNIST CNN, Panicle", *_MNIST, strategy="panicle"),
    Case("MNIST CNN, Ditto", *_MNIST, strategy="ditto", has_others=False),
    Case("CIFAR-10 CNN, FedAsync", *_CIFAR),
    Case("CIFAR-10 CNN, FedAsync", *_CIFAR, clients=1000, has_others=False),
    Case("ResNet-18, FedAsync", "cifar10", "like_cifar10", "resnet18"),
    Case("text GRU, FedAsync", "npz-folder", "like_text", "gru"),
)


_PATIENCE = 3


def run_rate(config: RunConfig, seconds: float) -> tuple[float, float | None]:
    """Return updates per second of a run, and the mean number of clients trained at once.

    A stacked run makes its updates in bursts. The timed interval therefore covers a multiple of the
    number of clients in updates, and leaves out the start if possible.
    """
    grid, strategy = experiment.build_grid(config), experiment.build_strategy(config)
    initial, probe = experiment.fitted(config, strategy)
    plan = experiment.plan(config) if config.eval_every else Plan()
    started = time.perf_counter()
    rounds: list[float] = []

    def stop() -> str:
        now = time.perf_counter() - started
        while strategy.progress.updates >= (len(rounds) + 1) * config.num_clients:
            rounds.append(now)
        # Without a complete round there is nothing to measure: slow runs get more time.
        is_over = now > (seconds if rounds else _PATIENCE * seconds)
        return "measured" if is_over else ""

    strategy.run(
        grid,
        initial,
        max_updates=config.max_updates or 0,
        train_config=experiment.training_settings(config),
        evaluate_config=experiment.evaluation_settings(config),
        plan=plan,
        probe=probe,
        stop_check=stop,
    )
    took, mean = time.perf_counter() - started, grid.mean_batch
    grid.close()
    if len(rounds) > 1:
        return (len(rounds) - 1) * config.num_clients / (rounds[-1] - rounds[0]), mean
    return strategy.progress.updates / took, mean


def loop_rate(config: RunConfig, device: str, seconds: float) -> float:
    """Return updates per second of the plain loop."""
    shape = datasets.data_shape(config)
    server = models.build(
        str(config.model), shape.input_shape, shape.num_classes, tokens=shape.tokens
    ).to(device)
    held = []
    for client in range(min(config.num_clients, 100)):
        data = datasets.client_data(config, client)
        x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
        held.append((x.to(device), y.to(device)))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        local = copy.deepcopy(server)
        optimiser = torch.optim.SGD(local.parameters(), lr=float(config.lr or 0))
        for batch in torch.randperm(len(y), device=device).split(config.batch_size):
            optimiser.zero_grad()
            cross_entropy(local(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            for kept, new in zip(server.parameters(), local.parameters(), strict=True):
                kept.lerp_(new, 0.3)

    train(*held[0])
    _finish(device)
    started, updates = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        train(*held[updates % len(held)])
        _finish(device)
        updates += 1
    return updates / (time.perf_counter() - started)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table."""
    base, row = case.config(options), dict[str, Any]()
    stacked = experiment.resolve(
        base.with_values(
            device=options.device,
            vectorised=options.device == "cpu",
            workers="0",
            precision=options.precision,
        )
    )
    row["clients"] = stacked.num_clients
    row["stacked"], row["mean batch"] = run_rate(stacked, options.seconds)
    if case.has_others:
        pool = experiment.resolve(base.with_values(workers=str(options.workers)))
        row["processes"] = run_rate(pool, options.seconds)[0]
        if case.strategy == "fedasync":
            row["loop"] = loop_rate(stacked, options.device, options.seconds / 2)
    return row


# -----------------------------------------------------------------------------
# Tests and profiles.
# -----------------------------------------------------------------------------


def tested(options: argparse.Namespace) -> str:
    """Run the tests of stacking; return pytest's last line."""
    words = ["-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "tests/simulation"]
    words += ["-k", "stacked_graphs" if options.quick else "stacked and not stacked_methods"]
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=options.test_seconds,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {options.test_seconds:g} s"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no outcome"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed, lines[-1]])


def operations(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the operations that take most of a stacked run's time, by torch's profiler."""
    config = _profiled(case, options)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run_rate(config, 1.0)
    of_gpu = options.device == "cuda"

    def own(event: Any) -> float:
        return float(event.self_device_time_total if of_gpu else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=own, reverse=True)
    return [
        {"name": event.key[:60], "ms": own(event) / 1e3, "calls": int(event.count)}
        for event in events[:SHOWN]
    ]


def functions(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the Python functions that take most of a stacked run's time in the main thread."""
    profile, config = cProfile.Profile(), _profiled(case, options)
    profile.runcall(run_rate, config, options.seconds / 2)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = sorted(stats.items(), key=lambda item: -item[1][2])[:SHOWN]
    return [
        {"name": f"{Path(file).name}:{name}", "ms": 1e3 * own[2], "calls": own[1]}
        for (file, _, name), own in found
    ]


def _profiled(case: Case, options: argparse.Namespace) -> RunConfig:
    is_cpu = options.device == "cpu"
    base = case.config(options)
    return experiment.resolve(
        base.with_values(device=options.device, vectorised=is_cpu, workers="0")
    )


# -----------------------------------------------------------------------------
# The command.
# -----------------------------------------------------------------------------


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the description of the machine."""
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else None
    versions = {"torch": torch.__version__, "flwr": flwr.__version__, "numpy": np.__version__}
    return {
        "gpu": gpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "precision": options.precision,
        "synthetic": options.synthetic,
        "workers": options.workers,
    }


def main() -> None:
    """Print tests, table and profiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", help="folder of the datasets")
    parser.add_argument("--synthetic", action="store_true", help="random samples, without files")
    parser.add_argument("--quick", action="store_true", help="reduced, synthetic version")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--workers", type=int, default=16, help="worker processes to compare")
    parser.add_argument("--clients", type=int, default=0, help="clients at most (0: no limit)")
    parser.add_argument("--only", default="", help="words in case names: MNIST,...")
    parser.add_argument("--seconds", type=float, default=8.0, help="per measurement")
    parser.add_argument("--test-seconds", type=float, default=90.0, help="for the tests; 0: skip")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="total time; later measurements are skipped"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started, console = time.perf_counter(), Console()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("There is no CUDA device here: nothing to measure (see --device cpu).")
        return
    if options.quick:
        options.synthetic, options.clients = True, options.clients or 8
        options.seconds, options.workers = min(options.seconds, 3.0), min(options.workers, 2)
    if not options.synthetic and not options.data_root:
        parser.error("give --data-root, or --synthetic")
    results: dict[str, Any] = {"machine": machine(options), "rates": {}, "left out": []}

    def is_late() -> bool:
        return time.perf_counter() - started > 60 * options.minutes

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=2))

    if options.test_seconds:
        results["tests"] = tested(options)
        console.print(results["tests"])
    rows: dict[str, dict[str, Any]] = results["rates"]
    for case in CASES:
        is_wanted = any(word in case.label for word in options.only.split(","))
        name = f"{case.label}, {case.config(options).clients}"
        if not is_wanted or name in rows or (options.quick and case.model == "resnet18"):
            continue
        if is_late():
            results["left out"].append(name)
            continue
        rows[name] = measured(case, options)
        console.print(f"{name}: {rows[name]['stacked']:.1f} updates/s", style="dim")
        save()
    console.print(_table(rows, options.device))
    profiles: dict[str, Callable[[Case, argparse.Namespace], list[dict[str, Any]]]] = {
        "operations": operations,
        "functions": functions,
    }
    for name, profile in profiles.items():
        if is_late():
            results["left out"].append(name)
            continue
        results[name] = profile(CASES[0], options)
        table = Table("ms", "calls", name, title=f"{CASES[0].label}, stacked")
        for line in results[name]:
            table.add_row(f"{line['ms']:.1f}", str(line["calls"]), line["name"])
        console.print(table)
    if results["left out"]:
        console.print(f"Left out after {options.minutes:g} minutes: {results['left out']}")
    save()


def _table(rows: dict[str, dict[str, Any]], device: str) -> Table:
    table = Table(title=f"updates per second, {device}")
    columns = "stacked", "processes", "loop", "mean batch"
    for column in ("network, method, clients", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    for name, row in rows.items():
        cells = (row.get(column) for column in columns)
        table.add_row(name, *("–" if value is None else f"{value:.3g}" for value in cells))
    return table


if __name__ == "__main__":
    main()
