"""Measure whether regression groups are told apart whose targets depend similarly on the inputs.

    python3 benchmarks/regression_groups.py --seeds 0,1,2,3,4

Eight devices with 120 samples each, in two groups. A sample has five independent normal inputs, and
its label is 20 + 10 (x · w) °C with noise of 1 °C, so that 0.8 °C is the best mean absolute error;
w is a unit vector of the group's, and the two have a given cosine: with 0 they have nothing in
common, with 1 they are the same. Each device makes 25 updates; all other settings are the defaults.
To test that a fleet without groups is not split:

    python3 benchmarks/regression_groups.py --cosines 1 --methods panicle --seeds 100,101,102
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.runs.experiment import simulate

INPUTS, TEST = 5, 40
UPDATES = 25
"""Updates per device."""
METHODS = ("panicle", "ifca-async", "standalone", "fedbuff")
MEAN, DEVIATION = 20.0, 10.0
LABELS = {"unit": "°C", "y_mean": MEAN, "y_std": DEVIATION}


def write(
    folder: Path, cosine: float, rng: np.random.Generator, clients: int, train: int, noise: float
) -> None:
    """Write a file for each device, alternating between the groups."""
    first, other = rng.normal(size=(2, INPUTS))
    first /= np.linalg.norm(first)
    other -= first * (first @ other)
    other /= np.linalg.norm(other)
    weights = first, cosine * first + np.sqrt(1 - cosine**2) * other

    def samples(client: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        x = rng.normal(size=(count, INPUTS)).astype(np.float32)
        errors = rng.normal(size=count) * noise
        return x, MEAN + DEVIATION * (x @ weights[client % 2]) + errors

    for client in range(clients):
        (x, y), (x_test, y_test) = samples(client, train), samples(client, TEST)
        np.savez(
            folder / f"device-{client}.npz",
            **{"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test},
            **{name: np.array(value) for name, value in LABELS.items()},
        )


def main() -> None:
    """Run all, and print a row for each cosine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cosines", default="0,0.3,0.6,0.8")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=120, help="training samples of a device")
    parser.add_argument("--noise", type=float, default=1.0, help="deviation of the noise in °C")
    parser.add_argument("--set", action="append", default=[], help="e.g. panicle.level=0.3")
    arguments = parser.parse_args()
    settings = dict(item.split("=", 1) for item in arguments.set)
    methods = arguments.methods.split(",")
    table = Table("cosine", *methods, title="MAE in °C (clusters), a line for each seed")
    for cosine in arguments.cosines.split(","):
        for seed in arguments.seeds.split(","):
            with TemporaryDirectory() as folder:
                fleet = arguments.clients, arguments.samples, arguments.noise
                write(Path(folder), float(cosine), np.random.default_rng(int(seed)), *fleet)
                cells = []
                for method in methods:
                    keys = {
                        "dataset": "npz",
                        "data-file": f"{folder}/device-{{client}}.npz",
                        "clients": arguments.clients,
                        "strategy": method,
                        "max-updates": UPDATES * arguments.clients,
                        "seed": seed,
                        "workers": "0",
                        "out": f"{folder}/{method}",
                        **settings,
                    }
                    summary = simulate(RunConfig.from_mapping(keys)).summary
                    cells.append(f"{summary['mae']:.2f} ({summary['clusters']})")
            table.add_row(cosine, *cells)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
