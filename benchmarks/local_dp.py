"""Measure the accuracy under local differential privacy: CASA on digits with Gaussian noise.

    python3 benchmarks/local_dp.py --epsilon 1,3,10,30,100 --seeds 0,1,2 --json local-dp.json

Each device clips its update and adds Gaussian noise, as with ``raceme device --node-config
"local-dp-epsilon=... local-dp-clip=..."``. Reported are the final accuracy (the mean over all
clients) and the number of clusters; the first row is without privacy. ε is the setting of the mod;
the next columns are the ε that one update, and all updates of the busiest device, actually spend.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections import Counter
from pathlib import Path

from raceme.client_app import LocalPrivacy, client_app
from raceme.core.config import RunConfig
from raceme.core.events import Evaluated, Event, UpdateApplied
from raceme.datasets import client_data
from raceme.runs.experiment import build_strategy, plan, resolve, training_settings
from raceme.simulation import Node, VirtualGrid
from raceme.simulation.devices import fleet
from raceme.training.models import initial_arrays


def accuracy(config: RunConfig, epsilon: float, clip: float) -> tuple[float, int, int]:
    """Run once; return accuracy, number of clusters, and the busiest device's updates."""
    nodes = []
    for index, device in enumerate(fleet(config.devices, config.num_clients, config.seed)):
        node = {"partition-id": index, "num-partitions": config.num_clients}
        private = {"local-dp-epsilon": epsilon, "local-dp-clip": clip, "local-dp-seed": config.seed}
        examples = len(client_data(config, index).y_train)
        nodes.append(Node(1 + index, device, {**node, **(private if epsilon else {})}, examples))
    grid = VirtualGrid(client_app(), nodes, config.to_mapping(), seed=config.seed)
    seen: list[Event] = []
    build_strategy(config).run(
        grid,
        initial_arrays(config),
        config.planned_updates,
        train_config=training_settings(config),
        plan=plan(config),
        observe=seen.append,
    )
    last = [event for event in seen if isinstance(event, Evaluated)][-1]
    counts = Counter(event.client for event in seen if isinstance(event, UpdateApplied))
    return last.accuracy, last.clusters, max(counts.values())


def main() -> None:
    """Run every budget with every seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", default="1,3,10,30,100")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--strategy", default="casa")
    parser.add_argument("--model", default="mclr")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Silence Flower's mod, which logs for each update that it has added noise.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows = []
    for epsilon in [0.0, *(float(text) for text in options.epsilon.split(","))]:
        keys = {"strategy": options.strategy, "model": options.model, "dataset": "digits"}
        keys |= {"max-updates": options.updates, "eval-every": options.updates}
        found = []
        for seed in seeds:
            config = resolve(RunConfig.from_mapping({**keys, "workers": "0", "seed": seed}))
            found.append(accuracy(config, epsilon, options.clip))
        rows.append({"epsilon": epsilon, "accuracy": found})
        shown = " ".join(f"{value:.3f} ({clusters})" for value, clusters, _ in found)
        mean = statistics.fmean(value for value, _, _ in found)
        label = "none"
        if epsilon:
            privacy, most = LocalPrivacy(epsilon), max(updates for _, _, updates in found)
            spent = privacy.spent(1), privacy.spent(most)
            label = f"ε {epsilon:g}, really {spent[0]:.3g}, {spent[1]:.3g} after {most}"
        print(f"{label:<44} {mean:.3f}  by seed, with clusters: {shown}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"clip": options.clip, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
