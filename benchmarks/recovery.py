"""Measure how many uploads a client needs to recover after a swap with another group's data.

    python3 benchmarks/recovery.py --seeds 0,1,2 --plot recovery.png

Digits, rotated by 0, 90, 180 or 270 degrees in four groups of four clients; 480 updates. Half way
each client exchanges all its data with another. The model that a client receives in return for an
upload is tested on the client's test data at that upload. The table averages this over the clients
whose group has changed, by the number of uploads since the exchange, and compares it with their
last upload before it. All methods get the same data and number of updates; with asynchronous
methods clients upload continually.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.events import Event, UpdateApplied
from raceme.reporting.style import new_figure, save_figure, series_colour, style
from raceme.runs.experiment import simulate

CLIENTS, UPDATES, SHOWN = 16, 480, 6
METHODS = ("cdfl", "fedsoft-async", "casa", "ifca-async", "fedasync")
SETTINGS = {
    "dataset": "digits",
    "clients": CLIENTS,
    "partition": "rotation-groups",
    "groups": "4",
    "drift": "swap-all",
    "swap-chance": 1.0,
    "drift-at": f"{UPDATES // 2} updates",
    "devices": "uniform",
    "local-epochs": 10,
    "max-updates": UPDATES,
    "eval-every": UPDATES,
    "score-uploads": True,
    "workers": "0",
    "stop-at-target": False,
}
SOFT = {"proxy": "60", "pretrain": 100}
OWN = {
    "cdfl": {**SOFT, "cdfl.sharpness": "40", "cdfl.beta0": 0.2, "cdfl.loss-bar": "min"},
    "fedsoft-async": {**SOFT, "fedsoft-async.beta0": 0.2},
    "ifca-async": {"ifca-async.k": 4},
}


def measure(method: str, seed: int, settings: dict[str, str]) -> list[float]:
    """Run once; return the mean accuracy before the exchange, and of the uploads after it."""
    own = {key: value for key, value in settings.items() if key.startswith(f"{method}.")}
    keys = {**SETTINGS, **OWN.get(method, {}), **own, "strategy": method, "seed": seed}
    events: list[Event] = []
    with TemporaryDirectory() as folder:
        config = RunConfig.from_mapping({**keys, "out": folder})
        simulate(config, events.append)
    before, after = (datasets.true_groups(config, step) for step in (0, 1))
    moved = {f"client-{c}" for c in range(CLIENTS) if before[c] != after[c]}
    steps: dict[str, int] = {}
    told: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for event in events:
        if isinstance(event, UpdateApplied) and event.client in moved:
            # An upload reports the accuracy of the model received for the previous one.
            if event.accuracy_after is not None:
                told[event.client][steps[event.client]].append(event.accuracy_after)
            steps[event.client] = event.step
    full = [(old[-1], new[:SHOWN]) for old, new in told.values() if old and len(new) >= SHOWN]
    rows = np.array([[last, *since] for last, since in full])
    return [float(value) for value in rows.mean(axis=0)]


def main() -> None:
    """Run all, and print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[], help="e.g. cdfl.sharpness=20")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    settings = dict(item.split("=", 1) for item in arguments.set)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    columns = ["before", *(str(number) for number in range(1, SHOWN + 1))]
    table = Table("method", *columns, "recovered after", title="own uploads after the exchange")
    curves = {}
    for method in arguments.methods.split(","):
        runs = 100 * np.array([measure(method, seed, settings) for seed in seeds])
        curves[method] = runs
        needed = [recovered(run) for run in runs]
        cells = [f"{mean:.1f}" for mean in runs.mean(axis=0)]
        spread = statistics.stdev(runs[:, 0]) if len(seeds) > 1 else 0.0
        table.add_row(method, f"{cells[0]} ± {spread:.1f}", *cells[1:], ", ".join(needed))
    Console().print(table)
    if arguments.plot:
        save_figure(drawn(curves), arguments.plot)


def recovered(run: np.ndarray) -> str:
    """Return the first upload within 2 points of the accuracy before."""
    near = np.flatnonzero(run[1:] >= run[0] - 2.0)
    return str(near[0] + 1) if len(near) else "–"


def drawn(curves: dict[str, np.ndarray]) -> Figure:
    """Draw the means over the seeds, each method's accuracy before the exchange at 0."""
    with style():
        figure = new_figure(7.2, 3.6)
        axes = figure.add_subplot()
        axes.set_title("What clients get in return, before and after their data were exchanged")
        axes.set_xlabel("own uploads since the exchange (0: the last one before it)")
        axes.set_ylabel("accuracy, %")
        axes.grid(axis="y")
        for index, (method, runs) in enumerate(curves.items()):
            axes.plot(runs.mean(axis=0), marker="o", color=series_colour(index), label=method)
        axes.legend()
        return figure


if __name__ == "__main__":
    main()
