"""Plato's server, timed, and its clients' data; imported after its configuration is written."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import torch
import work  # first: it replaces torchvision
from plato.clients import simple
from plato.datasources import base
from plato.servers import fedavg
from torch.utils.data import TensorDataset

DATA_ROOT = "PEERS_DATA_ROOT"
"""Environment variable, because each client's process creates the dataset."""


class Images(base.DataSource):
    """All clients' images, from which Plato's sampler draws each client's part."""

    def __init__(self) -> None:
        super().__init__()
        # One process per core.
        torch.set_num_threads(1)
        x, y = zip(*work.clients(Path(os.environ[DATA_ROOT])), strict=True)
        self.trainset = TensorDataset(torch.cat(x), torch.cat(y))

    def num_train_examples(self) -> int:
        """Return the number of images."""
        return len(self.trainset)


class Server(fedavg.Server):
    """Plato's server that notes the time after each round."""

    watch: work.Watch

    async def wrap_up(self) -> None:
        """End a round; after the last one write the result, because the process then exits."""
        job = self.watch.job
        done = self.current_round * job.processes
        self.watch.note(done)
        if done >= job.warm_up + job.updates:
            self.watch.write(version("plato-learn"), self.trainer.model.parameters())
        await super().wrap_up()


def serve(watch: work.Watch) -> None:
    """Run the server, which starts the clients."""
    server = Server(model=work.network)
    server.watch = watch
    server.run(simple.Client(model=work.network, datasource=Images))
