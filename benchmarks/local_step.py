"""Measure the parts of a local step: kernels, their overhead, the data, the optimiser.

    python3 benchmarks/local_step.py

Processor time on one thread, which other load affects less than wall time; the minimum of many
short measurements. The parts are measured alone: mini-batches without training on them, loss and
gradient of one mini-batch that stays the same, and the optimiser's part without a gradient. The
time that torch.profiler finds inside the kernels is their share of loss and gradient; the rest is
dispatch, autograd's bookkeeping and the layers' Python code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from raceme.core.training_settings import TrainingSettings
from raceme.training import models
from raceme.training.local import differentiate, train
from raceme.training.models import Network, Samples

STEPS = 24
SHAPES = {"mlp": (1, 8, 8), "mlp128": (1, 28, 28), "mlp512": (1, 28, 28), "cnn": (1, 28, 28)}
KERNELS = ("conv", "mm", "pool", "relu", "threshold", "clamp", "tanh", "softmax", "nll_loss", "sum")
"""Parts of the names of computing operators; all others move, fill, view or record data."""


def least(work: Callable[[], object], repeats: int, count: int = STEPS) -> float:
    """Return the least processor time of a function, in ms per step."""
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return 1e3 * min(times) / count


def kernels_share(work: Callable[[], object]) -> float:
    """Return the share of the operators' own time that is spent in kernels."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    own = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    inside = [time for name, time in own.items() if any(part in name for part in KERNELS)]
    return float(sum(inside) / sum(own.values()))


def parts(model: str, batch: int, repeats: int) -> dict[str, float | str]:
    """Return the milliseconds of a step of a network, and of its parts."""
    rng, shape = np.random.default_rng(0), SHAPES[model]
    network = Network(models.build(model, shape, 10))
    count = STEPS * batch
    samples = Samples(
        rng.normal(size=(count, *shape)).astype(np.float32),
        rng.integers(0, 10, count),
        network.channels_last,
    )
    settings = TrainingSettings(lr=0.01, batch_size=batch)
    order = torch.randperm(count)
    x, y = next(samples.mini_batches(order, batch))

    def whole() -> None:
        train(network, samples, settings, np.random.default_rng(1))

    def data() -> None:
        for _ in samples.mini_batches(order, batch):
            pass

    def gradient() -> None:
        for _ in range(STEPS):
            differentiate(network, x, y)

    def optimiser() -> None:
        for _ in range(STEPS):
            network.gradient.zero_()
            network.weights.add_(network.gradient, alpha=-0.01)

    whole()
    spent = {
        name: least(work, repeats)
        for name, work in (
            ("step", whole),
            ("data", data),
            ("gradient", gradient),
            ("optimiser", optimiser),
        )
    }
    share = kernels_share(gradient)
    return {
        "network": model,
        "weights": len(network.weights),
        "batch": batch,
        "ms_per_step": spent["step"],
        "kernels": share * spent["gradient"],
        "around_kernels": (1 - share) * spent["gradient"],
        "data": spent["data"],
        "optimiser": spent["optimiser"],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--batches", default="10,32,64,128")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="milliseconds of processor time per step, one thread")
    rows = []
    for model in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            rows.append(parts(model, batch, options.repeats))
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
