"""Raceme: FedAvg, FedAsync and clients that do nothing, on its virtual grid."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import work
from threadpoolctl import threadpool_limits

import raceme
from raceme.core.config import RunConfig
from raceme.core.events import Event, UpdateApplied
from raceme.runs import experiment
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import FedAsync, Plan
from raceme.training import models

NEVER = 10**9


def people(job: work.Job) -> Path:
    """Write the clients' samples in the format of a user's own data: one file per client."""
    folder = job.folder / "clients"
    folder.mkdir(exist_ok=True)
    for number, (x, y) in enumerate(work.clients(job.data_root)):
        # One image is held out, as Raceme requires a test sample of each client.
        held_out = np.arange(len(y) + 1) == len(y)
        np.savez(
            folder / f"{number}.npz",
            x=np.concatenate([x.numpy(), x[:1].numpy()]),
            y=np.concatenate([y.numpy(), y[:1].numpy()]),
            heldout=held_out,
        )
    return folder


def train(job: work.Job, watch: work.Watch) -> None:
    """Run a method on the 100 clients, without evaluations."""
    updates = work.PER_ROUND * job.rounds
    share = work.PER_ROUND / work.CLIENTS
    options = (
        {"fedavg.fraction": share}
        if job.method == "fedavg"
        else {"fedasync.alpha": work.MIXING, "fedasync.decay": "constant"}
    )
    config = experiment.resolve(
        RunConfig(
            strategy=job.method,
            dataset="npz-folder",
            data_root=str(people(job)),
            model="cnn",
            clients=work.CLIENTS,
            lr=work.LEARNING_RATE,
            batch_size=work.BATCH,
            max_updates=updates,
            eval_every=NEVER,
            concurrency=0 if job.method == "fedavg" else work.PER_ROUND,
            workers="0" if job.processes == 1 else str(job.processes),
        ).with_values(**options)
    )
    strategy = experiment.build_strategy(config)
    grid = experiment.build_grid(config, strategy)
    done = 0

    def observe(event: Event) -> None:
        nonlocal done
        if isinstance(event, UpdateApplied):
            done += 1
            watch.note(done)

    with threadpool_limits(1):
        strategy.run(
            grid,
            models.initial_arrays(config),
            max_updates=updates,
            train_config=experiment.training_settings(config),
            plan=experiment.plan(config),
            observe=observe,
        )
    grid.close()
    vector = torch.from_numpy(np.array(strategy.models[0].vector))
    watch.write(raceme.__version__, work.split(vector))


def idle(job: work.Job, watch: work.Watch) -> None:
    """Send the model to clients that echo it."""
    sys.path.append(str(Path(__file__).parents[1]))
    from flwr.app import ArrayRecord
    from overhead import idle_app

    grid = VirtualGrid(
        idle_app(), [Node(1000 + i, Device(jitter=0.1)) for i in range(work.CLIENTS)]
    )
    done = 0

    def observe(event: Event) -> None:
        nonlocal done
        if isinstance(event, UpdateApplied):
            done += 1
            watch.note(done)

    with threadpool_limits(1):
        FedAsync().run(
            grid,
            ArrayRecord(work.network().state_dict()),
            job.warm_up * job.rounds,
            plan=Plan(eval_every=NEVER),
            observe=observe,
        )
    grid.close()
    watch.write(raceme.__version__)


if __name__ == "__main__":
    job, watch = work.start()
    idle(job, watch) if job.method == "idle" else train(job, watch)
