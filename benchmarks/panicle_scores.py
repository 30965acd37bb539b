"""Print the scores of Panicle's best groups by kind of fleet, the basis of its threshold 0.6.

    python3 benchmarks/panicle_scores.py --data-root data

For each kind of fleet, the table has the range over the seeds of the best score in Panicle's last
search within seven updates per client, for several minimum denominators of the silhouettes; and,
for the default one, the largest score of any search of any seed. Without `--data-root`, only the
digits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.runs.experiment import simulate
from raceme.strategies.panicle import probes, strategy

FLOORS = (0.3, probes.FLOOR, 0.8)
UPDATES = 7
"""Updates per client."""
DIRICHLET = {"partition": "dirichlet", "dirichlet-alpha": 0.1}
FLEET = {"dataset": "benchmarks.untuned_fleets:Fleet", "clients": 24}
SPOKEN = {"dataset": "npz-folder", "data-folder": "fsdd", "clients": 24, "model": "mlp"}
MOVEMENTS = {"dataset": "npz-folder", "data-folder": "uci-har", "clients": 30, "model": "mlp"}
ROTATIONS = {"partition": "rotation-groups"}
KINDS: Mapping[str, list[dict[str, Any]]] = {
    "IID, 4 to 20 clients": [{"partition": "iid", "clients": n} for n in (4, 6, 8, 10, 20)],
    "IID, 40 clients": [{"partition": "iid", "clients": 40}],
    "growing noise": [{"partition": "noise-groups"}],
    "Dirichlet(0.5)": [{"partition": "dirichlet", "dirichlet-alpha": 0.5}],
    "Dirichlet(0.1), 8 to 40 clients": [{**DIRICHLET, "clients": n} for n in (8, 10, 20, 40)],
    "Dirichlet(0.1), 4 and 6 clients": [{**DIRICHLET, "clients": n} for n in (4, 6)],
    "movements of 30 people": [MOVEMENTS],
    "spoken digits, 24 clients, 6 speakers": [SPOKEN],
    "rotations, 6, 10 and 20 clients": [{**ROTATIONS, "clients": n} for n in (6, 10, 20)],
    "rotations, 4 clients": [{**ROTATIONS, "clients": 4}],
    "label groups, 4 to 40 clients": [{"clients": n} for n in (4, 6, 20, 40)],
    "MNIST, overlapping label sets": [{**FLEET, "kind": "overlap"}],
    "MNIST, permuted labels, 4 groups of 6": [FLEET],
    "MNIST, the same, 20 groups of 3": [{**FLEET, "kind": "small", "clients": 60}],
    "MNIST, groups within groups": [{**FLEET, "kind": "hierarchy"}],
    "MNIST, inputs in three scales": [{**FLEET, "kind": "scale"}],
}


def looks(settings: Mapping[str, Any], seed: int) -> list[probes.Distances]:
    """Return the distances in each of Panicle's searches for groups."""
    seen: list[probes.Distances] = []
    plain = strategy.better_partition

    def better(distances: probes.Distances, *rest: Any) -> Any:
        seen.append(distances)
        return plain(distances, *rest)

    keys = {"strategy": "panicle", "dataset": "digits", "clients": 20, "seed": seed, **settings}
    keys["max-updates"] = keys["eval-every"] = UPDATES * keys["clients"]
    strategy.better_partition = better
    try:
        with TemporaryDirectory() as folder:
            keys |= {"devices": "slow30x5", "own-model": False, "workers": "0", "out": folder}
            simulate(RunConfig.from_mapping(keys))
    finally:
        strategy.better_partition = plain
    return seen


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="50,51,52,53,54,55")
    parser.add_argument("--data-root", default="")
    arguments = parser.parse_args()
    heads = [f"{floor:g}" for floor in FLOORS]
    table = Table("20 clients of digits unless stated", *heads, f"{probes.FLOOR:g}, any time")
    for kind, fleets in KINDS.items():
        if not arguments.data_root and "dataset" in fleets[0]:
            continue
        root = {"data-root": arguments.data_root} if arguments.data_root else {}
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        runs = [looks(fleet | root, seed) for fleet in fleets for seed in seeds]
        last = [
            [probes.best_partition(run[-1], floor).score for run in runs if run] for floor in FLOORS
        ]
        most = max(probes.best_partition(look).score for run in runs for look in run)
        table.add_row(kind, *(f"{min(s):.2f} to {max(s):.2f}" for s in last), f"{most:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
