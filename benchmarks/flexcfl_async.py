"""Compare FlexCFL with FlexCFL-Async while the clients' data change.

    python3 benchmarks/flexcfl_async.py --seeds 0,1,2 --json flexcfl-async.json

Digits, 40 clients in four label groups, 30 % of the devices five times slower; all clients take
part in every round. Both methods have the same number of updates, after which the data change.
Accuracy is the mean over the evaluations of the second half of a run, which begins after changes:
a single one shows by chance whether clients have just been exchanged.
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

UPDATES = 2000
SHIFTS = {
    "none": {"drift": "none"},
    "swap-all": {"drift": "swap-all"},
    "swap-part": {"drift": "swap-part"},
    "incremental": {"drift": "incremental", "drift-at": "500 updates, 1000 updates, 1500 updates"},
}
METHODS = ("flexcfl", "flexcfl-async")


def measure(method: str, shift: str, seed: int, every: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Run once; return accuracy over the second half, virtual time and placements."""
    settings = {"drift-at": f"every {every} updates"} if shift.startswith("swap") else {}
    settings |= {"dataset": "digits", "strategy": method, "seed": seed, "devices": "slow30x5"}
    settings |= {"max-updates": UPDATES, "eval-every": 40, "workers": "0", "stop-at-target": False}
    settings |= {f"{method}.pretrain": 4, **SHIFTS[shift]}
    settings |= {key: value for key, value in keys.items() if key.startswith(f"{method}.")}
    events: list[Event] = []
    with TemporaryDirectory() as folder:
        simulate(RunConfig.from_mapping({**settings, "out": folder}), events.append)
    record = RunRecord.of(events)
    late = record.evaluations.updates >= UPDATES / 2
    return {
        "shift": shift,
        "method": method,
        "seed": seed,
        "accuracy": float(np.mean(record.evaluations.accuracy[late])),
        "virtual_time": record.end,
        "placements": int(np.sum(record.updates.weight == 0)),
    }


def main() -> None:
    """Run all, and print a row for each shift."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--shifts", default=",".join(SHIFTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--every", type=int, default=200, help="updates between two swaps")
    parser.add_argument("--set", action="append", default=[], help="e.g. flexcfl-async.alpha=0.5")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = dict(item.split("=", 1) for item in arguments.set)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    table = Table("shift", "method", "accuracy %", "virtual time (s)", "placements")
    rows = []
    for shift in arguments.shifts.split(","):
        for method in arguments.methods.split(","):
            runs = [measure(method, shift, seed, arguments.every, keys) for seed in seeds]
            rows += runs
            shown = [100 * run["accuracy"] for run in runs]
            spread = f" ± {statistics.stdev(shown):.2f}" if len(shown) > 1 else ""
            table.add_row(
                shift,
                method,
                f"{statistics.mean(shown):.2f}{spread}",
                f"{statistics.mean(run['virtual_time'] for run in runs):.1f}",
                f"{statistics.mean(run['placements'] for run in runs):.1f}",
            )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
