"""Measure how cost grows with clients, weights and workers, and predict that of larger machines.

    python3 benchmarks/scaling.py --json scaling.json --png scaling.png
    python3 benchmarks/scaling.py --axes clients --clients 100,1000,10000,100000 --methods casa
    python3 benchmarks/scaling.py --axes workers --workers 0,1,2,ray --flower

Each point runs in its own process, so that the peak of resident memory is the point's. Clients and
weights are measured with a client that does nothing, workers with one that trains on digits; all
values of the run option ``workers`` are accepted. Points are saved to the JSON file as they are
measured, and not measured again. Lines fitted to the points estimate the cost of a client, a weight
and a core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from large_fleet import METHODS, in_own_process
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter
from rich.console import Console
from rich.table import Table

from raceme.core.events import Event, UpdateApplied
from raceme.reporting.style import new_figure, save_figure, series_colour, series_line, style

FLOWER = "fedasync on Flower's Ray"
LONGEST = 100
"""Largest number of clients with which Flower's Ray engine is run."""
STARTED = 80
"""Updates after which workers count as started: twice the number of clients."""
Point = dict[str, Any]


def updates_for(clients: int, weights: int) -> int:
    """Return the number of updates of a point: two per client, within bounds."""
    return int(max(2 * clients, min(2000, 10**8 // weights)))


def trained(workers: str, updates: int) -> Point:
    """Train CASA on digits with some workers; return updates per second after their start."""
    from raceme.core.config import RunConfig
    from raceme.runs.experiment import simulate

    moments: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, UpdateApplied):
            moments.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            dataset="digits",
            clients=40,
            workers=workers,
            local_epochs=20,
            max_updates=updates,
            eval_every=10**6,
            out=f"{folder}/run",
        )
        started = time.perf_counter()
        simulate(config, observe)
    rate = (updates - STARTED) / (moments[-1] - moments[STARTED - 1])
    start = moments[STARTED - 1] - started
    found = {"workers": workers, "updates_per_second": rate, "start_seconds": start}
    return {**found, "load": os.getloadavg()[0]}


def on_flower(clients: int, weights: int) -> Point:
    """Run clients that do nothing on Flower's Ray engine; return updates per second."""
    import overhead
    from flower_engine import on_ray

    from raceme.strategies import FedAsync

    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    arrays, updates = overhead.layers(weights), 200
    rate = on_ray(overhead.idle_app(), FedAsync(), arrays, clients, updates, None)
    found = {"clients": clients, "weights": weights, "updates_per_second": rate}
    return {**found, "load": os.getloadavg()[0]}


def apart(function: Any, *arguments: object) -> Point:
    """Call a function in a new process, which may start others."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found: Point = pool.submit(function, *arguments).result()
    return found


def fitted(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return a and b of y = a + b x, by least squares of relative errors; both at least 0."""
    from scipy.optimize import nnls

    known, wanted = np.asarray(x, float), np.asarray(y, float)
    design = np.stack([1 / wanted, known / wanted], axis=1)
    scale = design.max(axis=0)
    (a, b), _ = nnls(design / scale, np.ones(len(known)))
    return float(a / scale[0]), float(b / scale[1])


def models_of_cost(points: Sequence[Point]) -> list[str]:
    """Return the fitted costs in words."""
    said = []
    for method in METHODS:
        own = [p for p in points if p["axis"] == "clients" and p["method"] == method]
        if len(own) > 1:
            n = [p["clients"] for p in own]
            a, b = fitted(n, [p["peak_megabytes"] * 1e6 for p in own])
            t, u = fitted(n, [p["cpu_ms_per_update"] for p in own])
            said.append(
                f"{method}: memory = {a / 1e6:.0f} MB + {b / 1e3:.1f} kB per client; "
                f"an update = {t:.2f} ms + {u * 1e6:.2f} ns per client, of a core"
            )
        own = [p for p in points if p["axis"] == "weights" and p["method"] == method]
        if len(own) > 1:
            t, u = fitted([p["weights"] for p in own], [p["cpu_ms_per_update"] for p in own])
            said.append(f"{method}: an update = {t:.2f} ms + {u * 1e6:.2f} ns per weight")
    rates = {p["workers"]: p["updates_per_second"] for p in points if p["axis"] == "workers"}
    if "0" in rates:
        for workers, rate in rates.items():
            if workers != "0":
                said.append(f"workers={workers}: {rate / rates['0']:.2f} times one process")
    return said


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw updates per second and memory over clients, and updates per second over the others."""
    with style():
        figure = new_figure(10.5, 6.6)
        axes = figure.subplots(2, 2).ravel()
        panels = (
            (axes[0], "clients", "updates_per_second", "updates per second", "Clients"),
            (axes[1], "clients", "peak_megabytes", "peak memory (MB)", "Memory"),
            (axes[2], "weights", "updates_per_second", "updates per second", "Weights"),
        )
        names = [*METHODS, FLOWER]
        for panel, axis, value, label, title in panels:
            for index, method in enumerate(names):
                own = [p for p in points if p["axis"] == axis and p["method"] == method]
                own = sorted((p for p in own if value in p), key=lambda p: p[axis])
                if own:
                    panel.plot(
                        [p[axis] for p in own],
                        [p[value] for p in own],
                        color=series_colour(index),
                        linestyle=series_line(index),
                        marker="o",
                        markersize=4,
                        label=method,
                    )
            panel.set(xscale="log", yscale="log", xlabel=axis, ylabel=label, title=title)
            panel.xaxis.set_major_locator(LogLocator(10))
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            for line in (panel.xaxis, panel.yaxis):
                line.set_minor_locator(NullLocator())
            panel.grid(True)
        axes[0].set_ylim(bottom=50)
        axes[0].legend(frameon=False, loc="lower center")
        own = [p for p in points if p["axis"] == "workers"]
        axes[3].bar(
            [p["workers"] for p in own],
            [p["updates_per_second"] for p in own],
            width=0.5,
            color=series_colour(0),
        )
        axes[3].set(xlabel="workers", ylabel="updates per second", title="Workers, training")
        save_figure(figure, path)


def numbers(text: str) -> list[int]:
    """Parse a list of numbers."""
    return [int(float(part)) for part in text.split(",") if part]


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", default="clients,weights,workers")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--clients", default="100,1000,10000,100000")
    parser.add_argument("--weights", default="10000,100000,1000000,10000000")
    parser.add_argument("--workers", default="0,1,2", help="values of the run option workers")
    parser.add_argument("--size", type=int, default=22_000, help="weights when clients vary")
    parser.add_argument("--updates", type=int, default=0, help="instead of two per client")
    parser.add_argument("--flower", action="store_true", help="Flower's Ray engine, too")
    parser.add_argument("--json", type=Path, default=Path("scaling.json"))
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    points: list[Point] = json.loads(options.json.read_text()) if options.json.exists() else []
    done = {(p["axis"], p["method"], p.get(p["axis"])) for p in points}
    console = Console(width=110)

    def keep(axis: str, method: str, point: Point) -> None:
        points.append({"axis": axis, "method": method, **point})
        options.json.write_text(json.dumps(points, indent=2))
        console.print(axis, method, {k: v for k, v in point.items() if k != "megabytes_before"})

    sweeps = {
        "clients": [(n, options.size, n) for n in numbers(options.clients)],
        "weights": [(100, d, d) for d in numbers(options.weights)],
    }
    wanted = options.axes.split(",")
    for axis, sweep in sweeps.items():
        for clients, weights, value in sweep if axis in wanted else ():
            for method in options.methods.split(","):
                if (axis, method, value) not in done:
                    updates = options.updates or updates_for(clients, weights)
                    point = in_own_process(method, clients, updates, weights)
                    rate = 1e3 / point["ms_per_update"]
                    keep(axis, method, {**point, "updates_per_second": rate})
            is_asked = options.flower and clients <= LONGEST and weights <= 10**6
            if is_asked and (axis, FLOWER, value) not in done:
                keep(axis, FLOWER, apart(on_flower, clients, weights))
    for workers in options.workers.split(",") if "workers" in wanted else ():
        if ("workers", "casa", workers) not in done:
            keep("workers", "casa", apart(trained, workers, options.updates or 800))

    table = Table(title="How cost grows")
    for column in ("axis", "method", "value", "updates/s", "ms of a core", "peak MB", "load"):
        table.add_column(column, justify="left" if column in ("axis", "method") else "right")
    for p in points:
        cpu, peak = p.get("cpu_ms_per_update"), p.get("peak_megabytes")
        value = p[p["axis"]]
        table.add_row(
            *(p["axis"], p["method"], value if isinstance(value, str) else f"{value:,}"),
            f"{p['updates_per_second']:,.1f}",
            "" if cpu is None else f"{cpu:.2f}",
            "" if peak is None else f"{peak:,.0f}",
            f"{p['load']:.1f}",
        )
    console.print(table)
    for line in models_of_cost(points):
        console.print(line)
    if options.png:
        draw(points, options.png)


if __name__ == "__main__":
    main()
