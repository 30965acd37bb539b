"""Measure updates per second of CASA on the digits, by executor.

    python3 benchmarks/executors.py 0 2 ray

measures the values of `--workers` in turns; with `RAY_ADDRESS=local`, `ray` is a cluster of this
machine's cores alone. Reported are the median and the range over the turns of two figures: the rate
after the first forty updates, when all workers have started, and the seconds until the fortieth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from raceme.core.config import RunConfig
from raceme.core.events import Event, UpdateApplied
from raceme.runs import experiment
from raceme.training import models

STARTED = 40


def timed(workers: str, updates: int) -> tuple[float, float]:
    config = experiment.resolve(RunConfig(max_updates=updates, workers=workers))
    start = time.perf_counter()
    times: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, UpdateApplied):
            times.append(time.perf_counter())

    grid, strategy = experiment.build_grid(config), experiment.build_strategy(config)
    try:
        strategy.run(
            grid,
            models.initial_arrays(config),
            max_updates=updates,
            train_config=experiment.training_settings(config),
            plan=experiment.plan(config),
            observe=observe,
        )
    finally:
        grid.close()
    rate = (len(times) - STARTED) / (times[-1] - times[STARTED - 1])
    return rate, times[STARTED - 1] - start


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", nargs="+")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.workers}
    for _ in range(arguments.turns):
        for name, results in measured.items():
            results.append(timed(name, arguments.updates))
            load, rate = os.getloadavg()[0], results[-1][0]
            print(f"--workers {name}: {rate:.1f} updates/s, load {load:.1f}", flush=True)
    for name, results in measured.items():
        rates, starts = (list(values) for values in zip(*results, strict=True))
        print(f"--workers {name}: {shown(rates)} updates/s, begun after {shown(starts)} s")


if __name__ == "__main__":
    main()
