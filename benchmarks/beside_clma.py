"""Compare CLMA, another project's Flower strategy, with Raceme's methods on the same drifting data.

    pip install fed-clma==0.1.1
    python3 benchmarks/beside_clma.py --seeds 0,1,2

20 clients with IID parts of the digits, 40 rounds of all clients or 800 updates. After half of that
the labels of ten clients are shifted by one (``drift=label-shift``). CLMA runs unmodified on
`VirtualGrid`, with a ClientApp that trains the same network from the same weights with the same
mini-batches and learning rate, and reports its training loss, as CLMA requires.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import plain_torch
from clma import CLMA
from clma.client import DriftReporter
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn

import raceme
from raceme import datasets
from raceme.core.config import RunConfig
from raceme.simulation import Device, Node, VirtualGrid
from raceme.training import models

CLIENTS, ROUNDS = 20, 40
UPDATES = CLIENTS * ROUNDS
SETTINGS = {
    "dataset": "digits",
    "clients": CLIENTS,
    "partition": "iid",
    "drift": "label-shift",
    "drift-share": 0.5,
    "drift-at": f"{UPDATES // 2} updates",
    "devices": "uniform",
    "max-updates": UPDATES,
    "eval-every": CLIENTS,
}
METHODS = ("fedavg", "feddrift-async", "ifca-async", "casa", "panicle", "standalone")

Accuracies = NDArray[np.float64]
"""Accuracy of each client at the end of each round. Shape (rounds, clients)."""


def on_clma(config: RunConfig) -> tuple[Accuracies, int]:
    """Run CLMA; return its clients' accuracies and the number of its cohorts."""
    app, found = ClientApp(), np.zeros((ROUNDS, CLIENTS))
    config = datasets.with_defaults(config)
    initial = models.initial_arrays(config)

    def prepared(message: Message, done: int) -> tuple[nn.Module, datasets.ClientData]:
        """Return the received model, and the client's data after `done` rounds."""
        module = models.build(config.model, (1, 8, 8), 10)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        step = 0 if done < ROUNDS // 2 else 1
        return module, datasets.client_data(config, message.metadata.dst_node_id - 1, step)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        begun = message.content["config"]["server-round"] - 1
        module, data = prepared(message, begun)
        seed = [config.seed, message.metadata.dst_node_id, begun]
        loss = plain_torch.train(module, data, config, seed)
        arrays = message.content["arrays"].from_torch_state_dict(module.state_dict())
        return DriftReporter(context).build_reply(message, arrays, loss, len(data.y_train))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        done = message.content["config"]["server-round"]
        module, data = prepared(message, done)
        found[done - 1, message.metadata.dst_node_id - 1] = plain_torch.accuracy(module, data)
        metrics = MetricRecord({"num-examples": len(data.y_test)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = VirtualGrid(app, [Node(1 + client, Device()) for client in range(CLIENTS)])
    strategy = CLMA()
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS)
    grid.close()
    return found, len(strategy.registry.cohort_ids)


def on_raceme(method: str, seed: int) -> tuple[Accuracies, int]:
    """Run a method of Raceme; return the accuracies and the number of clusters."""
    with TemporaryDirectory() as folder:
        run = raceme.run(method, **SETTINGS, seed=seed, workers="0", out=Path(folder) / "run")
        found = run.client_evaluations.pivot(index="updates", columns="client", values="accuracy")
        # Clients are numbered from 0, and named client-0, client-1, ...
        found = found[sorted(found.columns, key=lambda name: int(name.split("-")[-1]))]
        return found.loc[found.index > 0].to_numpy(), len(run.clusters)


def scores(found: Accuracies, changed: NDArray[np.bool_]) -> list[float]:
    """Return the table's columns in percent: before the change, after it, and at the end."""
    half = len(found) // 2
    return [
        100.0 * float(part.mean())
        for part in (
            found[half - 2],
            found[half - 1 :],
            found[-1],
            found[-1][changed],
            found[-1][~changed],
        )
    ]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(("clma", *METHODS)))
    args = parser.parse_args()
    table = Table("method", "before", "after", "end", "changed", "others", "models")
    for method in args.methods.split(","):
        rows, models_found = [], []
        for seed in map(int, args.seeds.split(",")):
            config = RunConfig.from_mapping({**SETTINGS, "seed": seed})
            run = on_clma(config) if method == "clma" else on_raceme(method, seed)
            labels = [
                [datasets.client_data(config, client, step).y_test for step in (0, 1)]
                for client in range(CLIENTS)
            ]
            changed = np.array([not np.array_equal(*pair) for pair in labels])
            rows.append(scores(run[0], changed))
            models_found.append(str(run[1]))
        cells = [
            f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f}"
            for values in zip(*rows, strict=True)
        ]
        table.add_row(method, *cells, ", ".join(models_found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
