"""Measure whether a client that joins during a run is placed in its true group at once.

    python3 benchmarks/newcomers.py --data-root data

FlexCFL and FlexCFL-Async, on digits and MNIST in four label groups. Five clients of each run join
late, one after another. Each is a case: it is placed correctly if its first answer puts it into the
group that holds most clients of its true group. No other client may be moved.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.core.events import Event
from raceme.records.record import RunRecord
from raceme.runs.experiment import simulate

NEWCOMERS = 5
SETTINGS = {
    "digits": {"clients": 40, "max-updates": 600},
    "mnist": {"clients": 40, "max-updates": 600, "model": "mclr", "local-steps": 30},
}


def profile(newcomers: list[int], folder: Path) -> Path:
    """Write a fleet whose newcomers join after 4, 5, 6, … s; an update takes a second."""
    groups = [
        f"[[group]]\nclients = [{client}]\nonline = [[{4 + place}.5, 1e9]]\n"
        for place, client in enumerate(newcomers)
    ]
    path = folder / "fleet.toml"
    head = 'description = "some come later"\n[device]\nseconds-per-round = 1.0\njitter = 0.1\n'
    path.write_text(head + "".join(groups))
    return path


def cases(dataset: str, method: str, seed: int, data_root: str) -> tuple[int, int]:
    """Return how many newcomers of a run were placed correctly, and how many others were moved."""
    settings = SETTINGS[dataset]
    late = np.random.default_rng(seed).choice(int(settings["clients"]), NEWCOMERS, replace=False)
    events: list[Event] = []
    with TemporaryDirectory() as folder:
        keys = {"strategy": method, "dataset": dataset, "data-root": data_root, "seed": seed}
        keys |= {"devices": str(profile(late.tolist(), Path(folder))), "workers": "0"}
        # Four of ten clients form the groups; the others are placed by their first answers.
        keys[f"{method}.pretrain"] = 4
        keys |= {"eval-every": 10**6, "out": folder, "stop-at-target": False, **settings}
        simulate(RunConfig.from_mapping(keys), events.append)
    return judged(RunRecord.of(events), {f"client-{client}" for client in late})


def judged(record: RunRecord, late: set[str]) -> tuple[int, int]:
    """Count correctly placed newcomers, and superfluous placements of other clients.

    Every client is placed once: when the groups are formed if it pre-trained, else by its first
    answer.
    """
    began = record.splits[0].time
    placed = [one for one in record.placements if one.time >= began and one.weights]
    times = Counter(one.client for one in placed)
    right, groups = 0, record.summary.membership.groups
    for client in late:
        first = next(one for one in placed if one.client == client)
        answered = record.updates.time[record.updates.client == client]
        peers = Counter(
            cluster
            for other, cluster in record.assignment(first.time).items()
            if other not in late and groups[other] == groups[client]
        )
        at_once = first.time == answered[0]
        right += at_once and set(first.weights) == {peers.most_common(1)[0][0]}
    return right, sum(times.values()) - len(times)


def main() -> None:
    """Run the cases, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--datasets", default="digits,mnist")
    parser.add_argument("--runs", type=int, default=10, help="runs of each method and dataset")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table("dataset", "method", "newcomers", "placed right", "others moved")
    rows = []
    for dataset in arguments.datasets.split(","):
        for method in ("flexcfl", "flexcfl-async"):
            found = [
                cases(dataset, method, seed, arguments.data_root) for seed in range(arguments.runs)
            ]
            right, moved = (sum(column) for column in zip(*found, strict=True))
            total = NEWCOMERS * arguments.runs
            rows.append({"dataset": dataset, "method": method, "cases": total})
            rows[-1] |= {"right": int(right), "moved": int(moved)}
            table.add_row(dataset, method, str(total), str(right), str(moved))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
