"""FAACL's clusters: when they are found, in rounds and asynchronously, and how many tests it takes.

    python3 benchmarks/faacl.py clusters --data-root data --seeds 10,55,2077 --json clusters.json
    python3 benchmarks/faacl.py tests --data-root data --json tests.json

``clusters``: the scenarios of the thesis on MNIST, 20 clients, 30 % of the devices five times
slower, FAACL for 25 rounds and FAACL-Async for 600 updates. Reported are the clusters at the end,
their purity, and the virtual time of the last change of the assignment. ``--methods`` and ``--set``
choose others.

``tests``: MNIST divided among 20, 50, 100 and 200 clients in two groups of labels, logistic
regression, until the clusters are found: device tests, rounds and seconds of wall time, flat and in
partitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.core.events import Event
from raceme.records.record import RunRecord
from raceme.runs.experiment import build_grid, build_strategy, resolve, simulate, training_settings
from raceme.training.models import initial_arrays

EPSILON = {"s0": 0.7, "s1": 0.7, "s2": 0.7, "a1": 0.5, "a2": 0.4}
"""ε of the thesis, for MNIST."""
LENGTH: dict[str, dict[str, Any]] = {
    "faacl": {"max-rounds": 25},
    "faacl-async": {"max-updates": 600},
}

TESTED: dict[str, Any] = {
    **{"dataset": "mnist", "model": "mclr", "partition": "label-groups", "groups": 2},
    **{"lr": 0.05, "batch-size": 32, "workers": "0", "max-rounds": 100, "eval-every": 10**6},
}
"""Settings of the runs in which tests are counted."""


def found(method: str, scenario: str, seed: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Run once; return the clusters, and the time of the last change of the assignment."""
    settings: dict[str, Any] = {
        **{"dataset": "mnist", "model": "mlp128", "partition": "scenario", "scenario": scenario},
        **{"clients": 20, "lr": 0.01, "batch-size": 32, "devices": "slow30x5", "workers": "0"},
        **{"eval-every": 5000, "stop-at-target": False, "strategy": method, "seed": seed},
        **{f"{method}.epsilon": EPSILON[scenario], **LENGTH[method]},
    }
    settings |= {k: v for k, v in keys.items() if "." not in k or k.startswith(f"{method}.")}
    events: list[Event] = []
    with TemporaryDirectory() as folder:
        summary = simulate(
            RunConfig.from_mapping({**settings, "out": folder}), events.append
        ).summary
    record = RunRecord.of(events)
    sizes = Counter(record.assignment().values())
    return {
        "scenario": scenario,
        "method": method,
        "seed": seed,
        "clusters": len(sizes),
        "sizes": sorted(sizes.values(), reverse=True),
        "purity": summary["purity"],
        "accuracy": summary["accuracy"],
        "found_at": max(change.time for change in record.changes),
        "supporters": summary.get("supporters"),
    }


def tests(clients: int, hierarchical: bool, keys: dict[str, Any]) -> dict[str, Any]:
    """Find the clusters of a number of clients; return tests, rounds and seconds."""
    own = {"strategy": "faacl", "clients": clients, "faacl.hierarchical": hierarchical}
    config = resolve(RunConfig.from_mapping({**TESTED, **own, **keys}))
    strategy: Any = build_strategy(config)
    grid = build_grid(config, strategy)
    started = time.perf_counter()
    strategy.run(
        grid,
        initial_arrays(config),
        0,
        train_config=training_settings(config),
        stop_check=lambda: "found" if strategy.state.supported.is_settled else "",
    )
    seconds = time.perf_counter() - started
    grid.close()
    return {
        "clients": clients,
        "hierarchical": hierarchical,
        "tests": strategy.state.supported.tests,
        "rounds": strategy.scheduling.rounds,
        "clusters": len(strategy.models),
        "virtual_time": strategy.now(),
        "seconds": seconds,
    }


def main() -> None:
    """Run one of the two, and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("clusters", "tests"))
    parser.add_argument("--seeds", default="10,55,2077")
    parser.add_argument("--scenarios", default="s0,s1,s2,a1")
    parser.add_argument("--methods", default="faacl,faacl-async")
    parser.add_argument("--clients", default="20,50,100,200")
    parser.add_argument("--data-root", default="", help="the folder of the datasets")
    parser.add_argument("--set", action="append", default=[], help="e.g. faacl-async.compared=3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = dict(item.split("=", 1) for item in arguments.set)
    keys |= {"data-root": arguments.data_root} if arguments.data_root else {}
    rows = _clusters(arguments, keys) if arguments.what == "clusters" else _tests(arguments, keys)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def _clusters(arguments: argparse.Namespace, keys: dict[str, Any]) -> list[dict[str, Any]]:
    table = Table("scenario", "method", "clusters", "purity", "found at (virtual s)")
    rows: list[dict[str, Any]] = []
    for scenario in arguments.scenarios.split(","):
        for method in arguments.methods.split(","):
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
            runs = [found(method, scenario, seed, keys) for seed in seeds]
            rows += runs
            sizes = "; ".join("+".join(map(str, run["sizes"])) for run in runs)
            purity = ", ".join("-" if r["purity"] is None else f"{r['purity']:.2f}" for r in runs)
            when = ", ".join(f"{run['found_at']:.1f}" for run in runs)
            mean = statistics.mean(run["found_at"] for run in runs)
            table.add_row(scenario, method, sizes, purity, f"{when} (mean {mean:.1f})")
    Console().print(table)
    return rows


def _tests(arguments: argparse.Namespace, keys: dict[str, Any]) -> list[dict[str, Any]]:
    table = Table("clients", "FAACL", "tests", "rounds", "clusters", "virtual s", "seconds")
    rows: list[dict[str, Any]] = []
    for clients in map(int, arguments.clients.split(",")):
        for hierarchical in (True, False):
            row = tests(clients, hierarchical, keys)
            rows.append(row)
            table.add_row(
                str(clients),
                "in partitions" if hierarchical else "flat",
                *(str(row[name]) for name in ("tests", "rounds", "clusters")),
                *(f"{row[name]:.1f}" for name in ("virtual_time", "seconds")),
            )
    Console().print(table)
    return rows


if __name__ == "__main__":
    main()
