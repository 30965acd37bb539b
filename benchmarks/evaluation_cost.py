"""Measure what evaluations cost with the default schedule of each dataset: FedAsync, one process.

    python3 benchmarks/evaluation_cost.py --data-root data

Processor time, the least of three evaluations by all clients and of the updates between them.
A dataset that is not below the folder is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import raceme
from raceme.core.errors import UserError
from raceme.core.evaluation import Evaluator

FOLDERS = {
    "digits": "",
    "synthetic": "",
    "mnist": "",
    "fashion-mnist": "",
    "cifar10": "",
    "image-folder": "CIFAR10-images",
    "characters": "",
    "npz-folder": "omniglot_small_by_drawer",
    "digits-by-origin": "digits-by-origin",
    "shakespeare": "shakespeare",
    "uci-har": "uci-har",
    "fsdd": "fsdd",
    "gas-drift": "gas-drift",
    "hit-bearing": "hit-bearing",
    "beijing-air": "beijing-air",
}
"""Folder of each dataset's files below the common one.

`convert_data.py` makes the folders of the last seven.
"""


class Cost(NamedTuple):
    """Processor time of a run.

    Attributes
    ----------
    clients : int
        Clients of the default fleet.
    network : str
        Name of the network.
    update, test : float
        Least time of an update, and of one client's test, in ms.
    """

    clients: int
    network: str
    update: float
    test: float

    @property
    def share(self) -> float:
        """Share of evaluations in a run that evaluates once per update of every client."""
        return self.test / (self.update + self.test)


def measure(dataset: str, data_root: str) -> Cost:
    """Run a dataset with its defaults, and measure its evaluations."""
    begun, ended = [], []
    begin = Evaluator.begin

    def timed(evaluator: Evaluator) -> None:
        begun.append(time.process_time())
        begin(evaluator)
        ended.append(time.process_time())

    Evaluator.begin = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            name = "npz-folder" if FOLDERS[dataset] == dataset else dataset
            settings = {"dataset": name, "data_root": data_root, "workers": "0"}
            short = raceme.run("fedasync", max_updates=1, out=f"{folder}/short", **settings)
            clients = short.summary["clients"]
            begun.clear()
            ended.clear()
            out = f"{folder}/long"
            run = raceme.run("fedasync", max_updates=3 * clients, out=out, **settings)
            network = run.config["model"]
    finally:
        Evaluator.begin = begin  # type: ignore[method-assign]
    tests = [end - start for start, end in zip(begun, ended, strict=True)]
    between = [start - end for start, end in zip(begun[1:], ended[:-1], strict=True)]
    return Cost(clients, network, 1e3 * min(between) / clients, 1e3 * min(tests) / clients)


def main() -> None:
    """Print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-root", default="", help="folder of the datasets' folders")
    parser.add_argument("--only", default="", help="datasets, separated by commas")
    parser.add_argument("--json", default="", help="write the figures to this file")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(FOLDERS)
    found: dict[str, Cost] = {}
    for dataset in wanted:
        try:
            found[dataset] = measure(dataset, str(Path(options.data_root) / FOLDERS[dataset]))
        except UserError as error:
            print(error)
    table = Table("dataset", "clients", "network", "ms per update", "per test", "share of the run")
    for dataset, cost in sorted(found.items(), key=lambda item: item[1].share):
        figures = [f"{cost.update:.3g}", f"{cost.test:.2g}", f"{100 * cost.share:.1f} %"]
        table.add_row(dataset, str(cost.clients), cost.network, *figures)
    Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
