"""CASA in AFL-Lib: its asynchronous base classes, in its folder: ``on_afl_lib.py SEED PICTURE``."""

from __future__ import annotations

import os
import random
import sys
from types import SimpleNamespace

import method
import torch

seed, picture = int(sys.argv[1]), os.path.abspath(sys.argv[2])
os.chdir(os.environ["PEERS_SOURCE"])
sys.path.insert(0, os.getcwd())
import alg.base  # noqa: E402
from alg.asyncbase import AsyncBaseClient, AsyncBaseServer  # noqa: E402

torch.manual_seed(seed)
random.seed(seed)
data, groups = method.clients(seed)
slow = method.slowness(seed)
alg.base.read_client_data = lambda dataset, number, is_train: (
    list(zip(data[number].x, data[number].y, strict=True))
    if is_train
    else list(zip(data[number].test_x, data[number].test_y, strict=True))
)
alg.base.load_model = lambda args: method.network()


class Client(AsyncBaseClient):
    """Trains with plain SGD, in virtual time."""

    def __init__(self, number: int, args: SimpleNamespace) -> None:
        super().__init__(number, args)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=args.lr)

    def run(self) -> None:
        """Train one epoch."""
        self.train()
        self.training_time = slow[self.id] * random.uniform(0.9, 1.1)

    def clone_model(self, server: Server) -> None:
        """Take the model of the client's cluster."""
        self.tensor2model(server.casa.send(self.id))


class Server(AsyncBaseServer):
    """CASA on every update."""

    def __init__(self, number: int, args: SimpleNamespace, parties: list[Client]) -> None:
        super().__init__(number, args, parties)
        self.casa = method.CASA(self.model2tensor())

    def run(self) -> None:
        """Take in one update."""
        self.sample()
        self.downlink()
        self.client_update()
        self.uplink()
        self.casa.receive(self.cur_client.id, self.cur_client.model2tensor())
        self.update_status()


args = SimpleNamespace(
    alg="base",
    dataset="digits",
    device="cpu",
    lr=method.RATE,
    bs=method.BATCH,
    epoch=1,
    gamma=1.0,
    total_num=method.CLIENTS,
    sr=1.0,
    rnd=1,
    decay=0.0,
)
server = Server(0, args, [Client(number, args) for number in range(method.CLIENTS)])
curve = []
for update in range(method.UPDATES):
    server.round = update
    server.run()
    if (update + 1) % method.TEST_EVERY == 0:
        curve.append((server.wall_clock_time, method.accuracy(data, server.casa)))
method.report(curve, server.casa, groups, picture)
