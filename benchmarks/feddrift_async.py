"""Compare FedDrift-Async with methods that detect no drift, when some clients' concepts change.

    python3 benchmarks/feddrift_async.py --seeds 0,1,2 --json feddrift-async.json
    python3 benchmarks/feddrift_async.py --seeds 0,1,2 --drifts gas --data-root data

Digits, divided at random among 20 clients, 30 % of the devices five times slower, 1,200 updates.
After 400 of them half of the clients change to another concept; with four concepts, all clients
change three times, between updates 120 and 1,080. Accuracy is the mean over the evaluations, one
every 20 updates, from 100 updates after the first change to the end.

``gas`` is a real drift: 20 clients with data of a sensor array, in four parts. Each part is one
batch (some months) behind the one before, and all move on to their next batch after every 200 of
1,600 updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.core.events import Event
from raceme.records.record import RunRecord
from raceme.runs.experiment import simulate

UPDATES = 1200
CHANGE = 400
HALF = {"drift-share": 0.5, "drift-at": f"{CHANGE} updates"}
DRIFTS: dict[str, dict[str, Any]] = {
    "label-shift": {"drift": "label-shift", **HALF},
    "rotate": {"drift": "rotate", "rotate-degrees": 180, **HALF},
    "concepts": {"drift": "concepts", "concepts": 4, "concept-samples": "same"},
    "gas": {
        "dataset": "npz-folder",
        "drift": "in-order",
        "in-order-lag": 3,
        "drift-at": "every 200 updates",
        "max-updates": 1600,
    },
}
DIGITS = {"dataset": "digits", "partition": "iid", "max-updates": UPDATES}
FIRST = {"concepts": UPDATES // 10, "gas": 200}
"""Updates before the first change, for drifts in which it is not at a third of the run."""
METHODS = ("fedasync", "casa", "feddrift-async")


def measure(method: str, drift: str, seed: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Run once; return accuracy after the drift, and the number of models at the end."""
    settings: dict[str, Any] = {"strategy": method, "seed": seed, "clients": 20}
    settings |= {"devices": "slow30x5", "workers": "0", "eval-every": 20, "stop-at-target": False}
    settings |= {} if "dataset" in DRIFTS[drift] else DIGITS
    settings |= DRIFTS[drift]
    if drift == "gas":
        settings["data-folder"] = f"gas-drift-{seed}"
    settings |= {k: v for k, v in keys.items() if "." not in k or k.startswith(f"{method}.")}
    events: list[Event] = []
    with TemporaryDirectory() as folder:
        summary = simulate(RunConfig.from_mapping({**settings, "out": folder}), events.append)
    evaluations = RunRecord.of(events).evaluations
    late = evaluations.updates >= FIRST.get(drift, CHANGE) + 100
    return {
        "drift": drift,
        "method": method,
        "seed": seed,
        "accuracy": float(np.mean(evaluations.accuracy[late])),
        "accuracy_at_end": float(evaluations.accuracy[-1]),
        "clusters": summary.summary["clusters"],
        "virtual_time": summary.summary["virtual_time"],
    }


def main() -> None:
    """Run all, and print a row for each drift and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--drifts", default="label-shift,rotate,concepts")
    parser.add_argument("--data-root", default="", help="for gas: the folder of the datasets")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[], help="e.g. feddrift-async.delta=0.2")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = dict(item.split("=", 1) for item in arguments.set)
    keys |= {"data-root": arguments.data_root} if arguments.data_root else {}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    table = Table("drift", "method", "accuracy %", "at the end %", "models")
    rows = []
    for drift in arguments.drifts.split(","):
        for method in arguments.methods.split(","):
            runs = [measure(method, drift, seed, keys) for seed in seeds]
            rows += runs
            cells = [_spread([100 * run[name] for run in runs]) for name in _SHARES]
            models = statistics.mean(run["clusters"] for run in runs)
            table.add_row(drift, method, *cells, f"{models:.1f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


_SHARES = ("accuracy", "accuracy_at_end")


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()
