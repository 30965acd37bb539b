"""Measure what more threads, or a GPU, gain on one device: the same local training on each.

    python3 benchmarks/device_threads.py --threads 1,2 --rounds 5
    python3 benchmarks/device_threads.py --threads 1,2 --accelerators cpu,cuda

The images of 28x28 pixels are random, as speed does not depend on their content. The settings take
turns in one process, so that noise of the machine affects all of them; the fastest round of each
counts.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raceme.core.training_settings import TrainingSettings
from raceme.training import models
from raceme.training.local import train
from raceme.training.models import Network, Samples

SHAPE, CLASSES = (1, 28, 28), 10
WORK = (("cnn", 10), ("cnn", 64), ("mlp512", 10), ("cnn5x5", 10), ("cnn5x5", 64))
"""Networks of 22 thousand, 0.7 and 1.7 million weights, and sizes of mini-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--accelerators", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=320)
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]
    ways = [(place, count) for place in arguments.accelerators.split(",") for count in threads]
    rng = np.random.default_rng(0)
    x = rng.random((arguments.samples, *SHAPE), np.float32)
    y = rng.integers(CLASSES, size=arguments.samples)
    table = Table("network", "weights", "batch", *(f"{p}, {n} threads" for p, n in ways))
    for name, batch in WORK:
        seconds = dict.fromkeys(ways, float("inf"))
        for _, (place, count) in itertools.product(range(arguments.rounds), ways):
            torch.set_num_threads(count)
            network = Network(models.build(name, SHAPE, CLASSES))
            samples = Samples(x, y, network.channels_last)
            settings = TrainingSettings(lr=0.01, batch_size=batch)
            started = time.perf_counter()
            train(network, samples, settings, np.random.default_rng(0))
            seconds[place, count] = min(seconds[place, count], time.perf_counter() - started)
        weights = f"{len(network.weights):,}"
        shown = (f"{1000 * seconds[way]:.0f} ms" for way in ways)
        table.add_row(name, weights, str(batch), *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
