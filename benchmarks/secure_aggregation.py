"""Flower's SecAgg+ inside the clusters of a run: a prototype, and what it costs.

    python3 benchmarks/secure_aggregation.py --seeds 0,1,2

`ocfl` finds the clusters of 20 clients in the open. From its models each cluster goes on with
FedAvg for 20 rounds: once in the clear, and once with Flower's `SecAggPlusWorkflow`, a workflow for
each cluster, so that the server sees sums of a cluster's updates only. Same clients, data and
mini-batches. SecAgg+ needs three clients; smaller clusters go on in the clear in both.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import plain_torch
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn

import raceme
from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.timeline import Exchange
from raceme.simulation import Device, Node, VirtualGrid
from raceme.training import models

CLIENTS, ROUNDS, LEAST = 20, 20, 3
SETTINGS = {"dataset": "digits", "clients": CLIENTS, "max-updates": 400, "devices": "uniform"}

Weights = list[NDArray[np.float32]]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows: dict[str, list[tuple[float, ...]]] = {"in the clear": [], "SecAgg+": []}
    furthest = 0.0
    for seed in map(int, args.seeds.split(",")):
        with TemporaryDirectory() as folder:
            run = raceme.run("ocfl", **SETTINGS, seed=seed, workers="0", out=Path(folder) / "run")
            clusters = [[number(name) for name in own] for own in run.clusters.values()]
            found_models = list(run.models.values())
        config = datasets.with_defaults(RunConfig.from_mapping({**SETTINGS, "seed": seed}))
        names = models.build(config.model, (1, 8, 8), 10).state_dict()
        start = [[model[name] for name in names] for model in found_models]
        found = {}
        for name in rows:
            went = goes_on(config, clusters, start, secure=name == "SecAgg+")
            rows[name].append((went.accuracy, went.messages, went.up, went.down))
            found[name] = went.models
        for one, other in zip(*found.values(), strict=True):
            gaps = [np.abs(a - b).max() for a, b in zip(one, other, strict=True)]
            furthest = max(furthest, *map(float, gaps))
        print(f"seed {seed}: clusters of {sorted(map(len, clusters))}")
    table = Table("", "accuracy %", "messages", "kB up", "kB down", title="a client and a round")
    for name, runs in rows.items():
        table.add_row(
            name, *(f"{statistics.mean(column):.2f}" for column in zip(*runs, strict=True))
        )
    Console().print(table)
    print(f"largest difference of a weight at the end: {furthest:.1e}")


def number(name: str) -> int:
    """Return the position of a client: client-7 is 7."""
    return int(name.split("-")[-1])


@dataclass(frozen=True)
class Went:
    """What came of the rounds: the clients' accuracy in percent, and costs per client and round."""

    models: list[Weights]
    accuracy: float
    messages: float
    up: float
    down: float


def goes_on(
    config: RunConfig, clusters: list[list[int]], start: list[Weights], *, secure: bool
) -> Went:
    """Train each cluster's model for the rounds, and test it."""
    exchanges: list[Exchange] = []

    def observe(event: object) -> None:
        if isinstance(event, Exchange):
            exchanges.append(event)

    nodes = [Node(1 + client, Device()) for client in range(CLIENTS)]
    grid = VirtualGrid(client_app(config), nodes, observe=observe)
    ended = [
        of_cluster(grid, own, weights, secure and len(own) >= LEAST)
        for own, weights in zip(clusters, start, strict=True)
    ]
    grid.close()
    tests = [
        plain_torch.accuracy(module_of(config, weights), datasets.client_data(config, client))
        for own, weights in zip(clusters, ended, strict=True)
        for client in own
    ]
    each = CLIENTS * ROUNDS
    return Went(
        ended,
        100.0 * statistics.mean(tests),
        len(exchanges) / each,
        sum(exchange.bytes_up for exchange in exchanges) / each / 1e3,
        sum(exchange.bytes_down for exchange in exchanges) / each / 1e3,
    )


def of_cluster(grid: VirtualGrid, own: Sequence[int], weights: Weights, secure: bool) -> Weights:
    """Train one cluster's model by FedAvg, its sums in the clear or by SecAgg+."""
    manager = SimpleClientManager()
    for client in own:
        manager.register(GridClientProxy(1 + client, grid, grid.run.run_id))
    everybody = {"min_fit_clients": len(own), "min_available_clients": len(own)}
    strategy = FedAvg(**everybody, fraction_evaluate=0.0)
    state = RecordDict()
    context = LegacyContext(
        Context(run_id=0, node_id=0, node_config={}, state=state, run_config={}),
        strategy=strategy,
        client_manager=manager,
    )
    parameters = ndarrays_to_parameters(weights)
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(parameters, True)
    # Shares for all of the cluster, any two thirds of which suffice.
    workflow = SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.67)
    for done in range(1, ROUNDS + 1):
        if secure:
            state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: done})
            workflow(grid, context)
            continue
        now = compat.arrayrecord_to_parameters(state.array_records[MAIN_PARAMS_RECORD], True)
        asked = strategy.configure_fit(done, now, manager)
        results = [(proxy, proxy.fit(ins, None, done)) for proxy, ins in asked]
        mean, _ = strategy.aggregate_fit(done, results, [])
        state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(mean, True)
    last = compat.arrayrecord_to_parameters(state.array_records[MAIN_PARAMS_RECORD], True)
    return parameters_to_ndarrays(last)


def client_app(config: RunConfig) -> ClientApp:
    """Make an app that trains the received model, and masks it if SecAgg+ asks for it."""

    def masked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # The mod expects its own keys in every training message.
        asked = RECORD_KEY_CONFIGS in message.content.config_records
        return secaggplus_mod(message, context, call_next) if asked else call_next(message, context)

    app = ClientApp(mods=[masked])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        ins: FitIns = compat.recorddict_to_fitins(message.content, True)
        node_id = message.metadata.dst_node_id
        data = datasets.client_data(config, node_id - 1)
        module = module_of(config, parameters_to_ndarrays(ins.parameters))
        done = context.state.config_records.get("rounds", ConfigRecord({"done": 0}))["done"]
        plain_torch.train(module, data, config, [config.seed, node_id, int(done)])
        context.state.config_records["rounds"] = ConfigRecord({"done": int(done) + 1})
        trained = [array.numpy() for array in module.state_dict().values()]
        reply = FitRes(
            Status(Code.OK, ""), ndarrays_to_parameters(trained), len(data.y_train), metrics={}
        )
        return Message(compat.fitres_to_recorddict(reply, False), reply_to=message)

    return app


def module_of(config: RunConfig, weights: Weights) -> nn.Module:
    """Return the run's network with these weights."""
    module = models.build(config.model, (1, 8, 8), 10)
    names = module.state_dict()
    arrays = (torch.as_tensor(np.asarray(array)) for array in weights)
    module.load_state_dict(dict(zip(names, arrays, strict=True)))
    return module


if __name__ == "__main__":
    main()
