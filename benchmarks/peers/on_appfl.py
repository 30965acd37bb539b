"""APPFL's virtual-time simulator (`appfl.vsim`): its synchronous and its asynchronous driver."""

from __future__ import annotations

import copy
import logging
import os
from importlib.metadata import version
from typing import Any

import torch
import work  # first: it replaces torchvision
from appfl.agent.sim_client import SimClientAgent
from appfl.agent.sim_server import SimServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile, SyncSimDriver
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import TensorDataset

AS_SHIPPED = "PEERS_APPFL_AS_SHIPPED"
"""Environment variable: leave `optimize_memory` on, which collects garbage at every message."""


def configuration(job: work.Job) -> DictConfig:
    """Return the configuration that server and clients share."""
    spare = {"optimize_memory": AS_SHIPPED in os.environ}
    training = {
        "mode": "epoch",
        "num_local_epochs": 1,
        "optim": "SGD",
        "optim_args": {"lr": work.LEARNING_RATE},
        "loss_fn": "CrossEntropyLoss",
        "train_batch_size": work.BATCH,
        "train_data_shuffle": True,
        "do_validation": False,
        # APPFL always computes a metric on the training data, and requires one.
        "metric_path": work.__file__,
        "metric_name": "share_right",
    }
    is_sync = job.method == "fedavg"
    return OmegaConf.create(
        {
            **spare,
            "model_configs": {"model_path": work.__file__, "model_name": "network"},
            "algorithm_configs": {
                "scheduler": "SyncScheduler" if is_sync else "AsyncScheduler",
                "aggregator": "FedAvgAggregator" if is_sync else "FedAsyncAggregator",
                "aggregator_kwargs": {"client_weights_mode": "equal", **spare}
                | ({} if is_sync else {"alpha": work.MIXING}),
                "scheduler_kwargs": {"num_clients": work.CLIENTS, **spare},
                "trainer": "VanillaTrainer",
                "trainer_kwargs": {**training, **spare},
                "num_global_epochs": job.rounds if is_sync else job.rounds * work.PER_ROUND,
            },
            "server_configs": spare,
            "log_configs": {"logging_output_dirname": str(job.folder / "logs")},
        }
    )


class Client(SimClientAgent):
    """APPFL's client without its per-training table."""

    def _create_logger(self) -> None:
        self.logger = Quiet()


class Quiet(logging.LoggerAdapter):
    """A logger that writes nothing."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("none"))

    def log_title(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    set_title = log_content = log_banner = log_title


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    config = configuration(job)
    server = SimServerAgent(copy.deepcopy(config), num_clients=work.CLIENTS)
    agents = [
        Client(copy.deepcopy(config), client_id=f"{number}", client_dataset=TensorDataset(x, y))
        for number, (x, y) in enumerate(work.clients(job.data_root))
    ]
    for agent in agents:
        # The client builds its own configuration, which lacks this key.
        agent.optimize_memory = AS_SHIPPED in os.environ
    profiles = {f"{number}": ClientProfile() for number in range(work.CLIENTS)}
    told, done = server.global_update, 0

    def timed(*args: Any, **settings: Any) -> Any:
        nonlocal done
        result = told(*args, **settings)
        done += 1
        watch.note(done)
        return result

    server.global_update = timed
    common = {"logger": Quiet(), "seed": 0, "base_step_time": 0.001}
    if job.method == "fedavg":
        driver = SyncSimDriver(
            server,
            agents,
            profiles,
            participants_per_round=work.PER_ROUND,
            target_rounds=job.rounds,
            **common,
        )
    else:
        driver = AsyncSimDriver(server, agents, profiles, max_in_flight=work.PER_ROUND, **common)
    driver.run()
    state = server.get_parameters(serial_run=True)
    names = [name for name, _ in work.network().named_parameters()]
    watch.write(version("appfl"), [torch.as_tensor(state[name]) for name in names])


if __name__ == "__main__":
    main()
