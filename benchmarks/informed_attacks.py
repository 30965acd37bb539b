"""Attacks that know the defence, on every method, without and with a protection, and an oracle.

    python3 benchmarks/informed_attacks.py --json FILE [--strategies casa,fedbuff]
        [--attacks min-max,replay] [--protections none,trust,oracle] [--seeds 921,922,923]
        [--set KEY=VALUE …]

The oracle knows the attackers and refuses all that they send, from their first update on. Accuracy
is that of the clients that do not attack, at the end of the run; in the clean run too. Runs that
FILE has already are not repeated. No figures are drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from raceme.core.config import RunConfig
from raceme.core.events import Evaluated, Event, Verdict
from raceme.core.protection import Guard, Ruling
from raceme.reporting import artefacts
from raceme.runs import experiment
from raceme.simulation.attacks import attackers_of

CLEAN, NONE, ORACLE = "clean", "none", "oracle"
BASE: dict[str, object] = {"dataset": "digits", "clients": 20, "max-updates": 400}
ALL: dict[str, object] = {"attack-knows": "all"}
ATTACKS: dict[str, dict[str, object]] = {
    CLEAN: {},
    "edge-anti": {"attack": "edge-anti"},
    "edge-push": {"attack": "edge-push"},
    "anti1": {"attack": "sign-flip"},
    "anti3": {"attack": "sign-flip", "attack-boost": 3},
    "mimic": {"attack": "mimic", "attack-boost": 3, "attack-turn": 0.25},
    "min-max": {"attack": "min-max"},
    "min-sum": {"attack": "min-sum"},
    "long-good": {"attack": "long-good", "attack-boost": 3},
    "replay": {"attack": "replay"},
    "hidden-push": {"attack": "hidden-push"},
    "hidden-anti": {"attack": "hidden-anti"},
    "pulse": {"attack": "pulse", "attack-boost": 3},
    "false-group": {"attack": "false-group"},
}
INFORMED = {"edge-anti", "edge-push", "min-max", "min-sum", "hidden-push", "hidden-anti"}
METHODS: dict[str, dict[str, object]] = {
    **{name: {} for name in ("casa", "flexcfl-async", "ifca-async", "panicle")},
    # All clients share a model: their attackers know all honest clients.
    **dict.fromkeys(("fedbuff", "fedasync"), ALL),
    "cdfl": {**ALL, "proxy": "20", "pretrain": 20},
}


class Oracle(Guard):
    """Refuses what attackers send, and counts them as gone."""

    def __init__(self, attackers: frozenset[str]) -> None:
        super().__init__()
        self.attackers = attackers

    def judge(self, client: str, *_judged: Any, **_named: Any) -> Ruling:
        """Refuse an attacker's update."""
        if client not in self.attackers:
            return Ruling()
        self.state.excluded[client] = True
        return Ruling(Verdict.REFUSED, 0.0)


def honest_accuracy(keys: dict[str, object], protection: str) -> float:
    """Run; return the mean accuracy of the clients that do not attack, in %."""
    if keys.get("attack") not in INFORMED:
        keys = {key: value for key, value in keys.items() if key != "attack-knows"}
    # The same clients attack whatever the attack, and are left out of the clean run too.
    config = experiment.resolve(RunConfig.from_mapping({"attack": "sign-flip", **keys}))
    bad = frozenset(f"client-{number}" for number in attackers_of(config))
    if "attack" not in keys:
        keys = {key: value for key, value in keys.items() if not key.startswith("attack")}
    oracle = protection == ORACLE
    keys = {**keys, "protection": NONE if oracle else protection, "workers": "0"}
    seen: list[Event] = []

    def guard(_config: RunConfig) -> Guard:
        return Oracle(bad) if oracle else original(_config)

    original = experiment.protection_of
    with (
        TemporaryDirectory() as folder,
        patch.object(artefacts, "write_all", lambda *_all, **_named: {}),
        patch.object(experiment, "protection_of", guard),
    ):
        run = {**keys, "out": folder, "stop-at-target": False, "eval-every": keys["max-updates"]}
        experiment.simulate(RunConfig.from_mapping(run), seen.append)
    last = [event for event in seen if isinstance(event, Evaluated)][-1]
    return 100 * fmean(score for name, (_, score, *_) in last.per_client.items() if name not in bad)


def main() -> None:
    """Run what FILE does not have, and add it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--strategies", default="casa,flexcfl-async,ifca-async,fedbuff,fedasync")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--protections", default="none,trust,oracle")
    parser.add_argument("--seeds", default="921,922,923")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys")
    arguments = parser.parse_args()
    more: dict[str, object] = dict(pair.split("=", 1) for pair in arguments.set)
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"runs": []}
    known = {tuple(row[:-1]) for row in found["runs"]}
    setting = " ".join(arguments.set)
    seeds = list(map(int, arguments.seeds.split(",")))
    for attack in arguments.attacks.split(","):
        for strategy in arguments.strategies.split(","):
            for protection in arguments.protections.split(","):
                for seed in seeds:
                    # The oracle makes every attack the same, and a clean run has none.
                    if protection == ORACLE and attack != "anti1":
                        continue
                    row = (strategy, attack, protection, setting, seed)
                    if row in known:
                        continue
                    keys = {**BASE, **METHODS[strategy], **ATTACKS[attack], **more}
                    keys |= {"strategy": strategy, "seed": seed}
                    accuracy = honest_accuracy(keys, protection)
                    found["runs"].append([*row, round(accuracy, 2)])
                    lines = ",\n".join(json.dumps(run) for run in found["runs"])
                    arguments.json.write_text(f'{{"runs": [\n{lines}\n]}}\n')
                    print(*row, round(accuracy, 2), flush=True)


if __name__ == "__main__":
    main()
