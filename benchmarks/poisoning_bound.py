"""Bound the loss under attack: runs with an oracle in the place of the filter.

    python3 benchmarks/poisoning_bound.py [--strategy fedasync] [--dataset digits] [--seeds 0,1,2]
        [--attacks sign-flip,label-flip] [--data-root data] [--json FILE]

The oracle knows the attackers, and rejects exactly their updates, from the first one on. Its loss
relative to the clean run is due to the missing clients: their work, and another order of events. No
filter can avoid it. Accuracy is that of the clients that do not attack, in the clean run too.

The attack ``collude`` is not one of Raceme's: all attackers send the same direction, at `TIMES` the
length of their honest update, which is just below the bound on lengths. With ``--set
attackers=0.3`` six of twenty clients attack.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from raceme.core.config import RunConfig
from raceme.core.events import Evaluated, Event, Verdict
from raceme.core.messages import Vector
from raceme.features.protection.guards import FilterProtection, Judged, Ruling
from raceme.runs import experiment
from raceme.simulation.attacks import SignFlip, attackers_of

CLEAN, ORACLE = "clean", "oracle"
COLLUDE, TIMES = "collude", 9.0
SETTINGS: dict[str, dict[str, object]] = {
    "digits": {"clients": 20, "max-updates": 500},
    "mnist": {
        **{"clients": 20, "max-updates": 1500, "model": "mlp"},
        **{"local-steps": 10, "batch-size": 32},
    },
}


def oracle(attackers: frozenset[str]) -> Callable[..., Ruling]:
    """Return a filter that judges updates by their client."""

    def judge(guard: FilterProtection, update: Judged) -> Ruling:
        if update.client not in attackers:
            return Ruling()
        guard.state.excluded[update.client] = True
        return Ruling(Verdict.REFUSED, 0.0)

    return judge


def colluding(_attack: SignFlip, delta: Vector, _rng: np.random.Generator) -> Vector:
    """Return the Δ of the attackers: one direction, scaled to each one's honest length."""
    common = np.random.default_rng(0).standard_normal(len(delta), np.float32)
    return np.asarray(common * np.float32(TIMES * np.linalg.norm(delta) / np.linalg.norm(common)))


def attacked(keys: dict[str, object], attack: str, honest: frozenset[str], last: int) -> float:
    """Return the accuracy under an attack, in %."""
    if attack != COLLUDE:
        return accuracy({**keys, "attack": attack}, honest, last)
    with patch.object(SignFlip, "update", colluding):
        return accuracy({**keys, "attack": "sign-flip"}, honest, last)


def accuracy(keys: dict[str, object], honest: frozenset[str], last: int) -> float:
    """Run; return the mean of some clients' accuracies in the last evaluations, in %."""
    seen: list[Event] = []
    with TemporaryDirectory() as folder:
        keys = {**keys, "out": folder, "workers": "0", "stop-at-target": False}
        experiment.simulate(RunConfig.from_mapping(keys), seen.append)
    tests = [event for event in seen if isinstance(event, Evaluated)][-last:]
    return 100 * fmean(test.per_client[client][1] for test in tests for client in honest)


def row(keys: dict[str, object], attacks: list[str], last: int) -> dict[str, float]:
    """Return the accuracies of the clean run, with the oracle, and with the filter."""
    protected = {**keys, "protection": "filter"}
    # The choice of attackers depends on their share only, not on the kind of attack.
    config = experiment.resolve(RunConfig.from_mapping({**keys, "attack": "sign-flip"}))
    bad = frozenset(f"client-{number}" for number in attackers_of(config))
    honest = frozenset(f"client-{number}" for number in range(config.num_clients)) - bad
    clean = {name: value for name, value in keys.items() if not name.startswith("attack")}
    found = {CLEAN: accuracy(clean, honest, last)}
    with patch.object(FilterProtection, "judge", oracle(bad)):
        found[ORACLE] = attacked(protected, attacks[0], honest, last)
    for attack in attacks:
        found[attack] = attacked(protected, attack, honest, last)
    return found


def main() -> None:
    """Run all seeds, and print a row of each and their means."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", default="fedasync")
    parser.add_argument("--dataset", default="digits", choices=SETTINGS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--attacks", default="scale,sign-flip,label-flip,noise")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--last", type=int, default=1, help="evaluations that are averaged")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    more = dict(pair.split("=", 1) for pair in arguments.set)
    attacks, rows = arguments.attacks.split(","), []
    table = Table("seed", CLEAN, ORACLE, *attacks)
    for seed in map(int, arguments.seeds.split(",")):
        keys = {"strategy": arguments.strategy, "dataset": arguments.dataset, "seed": seed}
        keys |= {"data-root": arguments.data_root, **SETTINGS[arguments.dataset], **more}
        rows.append({"seed": seed, **row(keys, attacks, arguments.last)})
        print(rows[-1], flush=True)
    for one in rows:
        table.add_row(str(one["seed"]), *(f"{one[name]:.1f}" for name in (CLEAN, ORACLE, *attacks)))
    means = (fmean(one[name] for one in rows) for name in (CLEAN, ORACLE, *attacks))
    table.add_row("mean", *(f"{mean:.1f}" for mean in means))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({**vars(arguments), "rows": rows}, default=str) + "\n")


if __name__ == "__main__":
    main()
