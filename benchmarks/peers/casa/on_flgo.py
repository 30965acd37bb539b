"""CASA in FLGo, on its asynchronous server and its clock: ``on_flgo.py SEED PICTURE``."""

from __future__ import annotations

import copy
import importlib
import os
import random
import sys
import tempfile
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

seed, picture = int(sys.argv[1]), str(Path(sys.argv[2]).resolve())
os.environ["PEERS_SEED"] = str(seed)
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("none"))
import flgo  # noqa: E402
import flgo_data  # noqa: E402
import method  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from flgo.algorithm.asyncbase import AsyncServer  # noqa: E402
from flgo.algorithm.fedbase import BasicClient  # noqa: E402
from flgo.benchmark.partition import BasicPartitioner  # noqa: E402
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe  # noqa: E402
from flgo.experiment.logger import BasicLogger  # noqa: E402
from flgo.simulator.base import BasicSimulator  # noqa: E402

SECOND = 20
"""Units of FLGo's clock, which is integral, per virtual second."""
slow = method.slowness(seed)
random.seed(seed)
# torch 2.13 calls `__getitems__` of a subclass that overrides `__getitem__`.
FromDatasetPipe.TaskDataset.__getitems__ = lambda self, indices: [self[index] for index in indices]


class Partitioner(BasicPartitioner):
    """Gives every client its samples."""

    num_clients = method.CLIENTS

    def __call__(self, data: Any) -> list[list[int]]:
        """Return the samples of each client."""
        ends = np.cumsum([0] + [len(own.y) for own in flgo_data.DATA]).tolist()
        return [list(range(start, end)) for start, end in pairwise(ends)]


class Simulator(BasicSimulator):
    """30 % of the clients are five times slower."""

    def __init__(self, objects: list[Any], option: Any = None) -> None:
        super().__init__(objects)

    def update_client_responsiveness(self, clients: list[int], *args: Any, **kwargs: Any) -> None:
        """Draw how long the next training takes."""
        seconds = [slow[client] * random.uniform(0.9, 1.1) for client in clients]
        self.set_variable(clients, "latency", [round(SECOND * value) for value in seconds])


class Server(AsyncServer):
    """CASA on every update."""

    def initialize(self) -> None:
        """Start with one cluster."""
        self.casa = method.CASA(self._vector(self.model))
        self.curve: list[tuple[float, float]] = []

    def sample(self) -> list[int]:
        """Return all idle clients."""
        return [number for number in range(method.CLIENTS) if number not in self.concurrent_clients]

    def pack(self, client: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Send a client its cluster's model."""
        model = copy.deepcopy(self.model)
        torch.nn.utils.vector_to_parameters(self.casa.send(client), model.parameters())
        return {"model": model}

    def package_handler(self, received: dict[str, Any]) -> bool:
        """Take in the updates that arrive at the same time, one after another."""
        if self.is_package_empty(received):
            return False
        for client, model in zip(received["__cid"], received["model"], strict=True):
            self.casa.receive(client, self._vector(model))
            if self.casa.updates % method.TEST_EVERY == 0:
                now = self.gv.clock.current_time / SECOND
                self.curve.append((now, method.accuracy(flgo_data.DATA, self.casa)))
        return True

    @staticmethod
    def _vector(model: torch.nn.Module) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


class Client(BasicClient):
    """A client of FLGo's."""


os.chdir(folder := tempfile.mkdtemp())
sys.path.insert(0, folder)
benchmark = flgo.gen_benchmark_from_file("digits", flgo_data.__file__)
# FLGo's plot of the clients' labels would take minutes.
importlib.import_module(benchmark).visualize = lambda *args: None
flgo.gen_task({"benchmark": benchmark, "partitioner": Partitioner()}, task_path="task")
runner = flgo.init(
    "task",
    types.SimpleNamespace(__name__="casa", Server=Server, Client=Client),
    {
        "num_epochs": 1,
        "batch_size": method.BATCH,
        "learning_rate": method.RATE,
        "train_holdout": 0.0,
        "eval_interval": -1,
        "seed": seed,
        "no_tqdm": True,
        "no_log_console": True,
    },
    Logger=BasicLogger,
    Simulator=Simulator,
)
runner.register_exit_condition(lambda server: server.casa.updates >= method.UPDATES)
runner.run()
method.report(runner.curve, runner.casa, flgo_data.GROUPS, picture)
