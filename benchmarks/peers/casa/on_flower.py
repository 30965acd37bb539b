"""CASA in plain Flower: a ServerApp with its own clock: ``on_flower.py SEED PICTURE``."""

from __future__ import annotations

import heapq
import sys
import time
from pathlib import Path

import flower_client
import method
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

seed, picture = int(sys.argv[1]), Path(sys.argv[2]).resolve()
server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Take in replies one by one, in the order of virtual time."""
    data, groups = method.clients(seed)
    slow, rng = method.slowness(seed), np.random.default_rng(seed)
    casa = method.CASA(torch.nn.utils.parameters_to_vector(method.network().parameters()).detach())
    while len(nodes := sorted(grid.get_node_ids())) < method.CLIENTS:
        pass
    due: list[tuple[float, int, str]] = []

    def send(client: int, now: float) -> None:
        content = RecordDict(
            {
                "model": ArrayRecord([casa.send(client).numpy()]),
                "task": ConfigRecord({"client": client, "seed": seed}),
            }
        )
        message = Message(content, dst_node_id=nodes[client], message_type=MessageType.TRAIN)
        (number,) = grid.push_messages([message])
        heapq.heappush(due, (now + slow[client] * rng.uniform(0.9, 1.1), client, number))

    curve = []
    for client in range(method.CLIENTS):
        send(client, 0.0)
    for update in range(method.UPDATES):
        now, client, number = heapq.heappop(due)
        while not (replies := list(grid.pull_messages([number]))):
            time.sleep(0.001)
        if replies[0].has_error():
            raise RuntimeError(replies[0].error)
        array = replies[0].content["model"].to_numpy_ndarrays()[0]
        casa.receive(client, torch.from_numpy(array.copy()))
        send(client, now)
        if (update + 1) % method.TEST_EVERY == 0:
            curve.append((now, method.accuracy(data, casa)))
    method.report(curve, casa, groups, str(picture))


run_simulation(
    server_app=server,
    client_app=flower_client.app,
    num_supernodes=method.CLIENTS,
    backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}},
)
