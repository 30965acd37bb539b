"""FLGo: its FedAvg and its FedAsync on its MNIST task."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import work  # first: it replaces torchvision

import flgo  # isort: skip
import flgo.algorithm.fedasync
import flgo.algorithm.fedavg
import flgo.benchmark
import flgo.benchmark.partition
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.experiment.logger import BasicLogger
from flgo.utils.fmodule import FModule


class Net(FModule):
    """The network as an FLGo module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        return self.layers(x)


class Model:
    """The model interface that FLGo requires."""

    @staticmethod
    def init_local_module(party: Any) -> None:
        """A client needs no module of its own."""

    @staticmethod
    def init_global_module(party: Any) -> None:
        """Give the server the initial model."""
        if "Server" in type(party).__name__:
            party.model = Net().to(party.device)


class Silent(BasicLogger):
    """A logger that neither evaluates nor writes."""

    def log_once(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate nothing."""


def main() -> None:
    """Run the benchmark."""
    job, watch = work.start()
    # torch 2.13 calls `__getitems__` of a subclass that overrides `__getitem__`.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda self, indices: [
        self[index] for index in indices
    ]
    task = job.folder / "mnist-iid"
    # FLGo's own reader takes the images one by one from torchvision's dataset.
    flgo.benchmark.data_root = str(job.folder / "raw")
    own = job.folder / "raw" / "MNIST"
    own.mkdir(parents=True, exist_ok=True)
    if not (own / "MNIST").exists():
        (own / "MNIST").symlink_to(job.data_root.resolve() / "MNIST")
    if not task.exists():
        partitioner = {"name": "IIDPartitioner", "para": {"num_clients": work.CLIENTS}}
        benchmark = {"name": "flgo.benchmark.mnist_classification"}
        flgo.gen_task({"benchmark": benchmark, "partitioner": partitioner}, task_path=str(task))
    algorithm = getattr(flgo.algorithm, job.method)
    done = 0
    handler = "aggregate" if job.method == "fedavg" else "package_handler"
    original = getattr(algorithm.Server, handler)

    def timed(self: Any, received: Any) -> Any:
        nonlocal done
        result = original(self, received)
        done += len(received if job.method == "fedavg" else received["model"])
        watch.note(done)
        return result

    setattr(algorithm.Server, handler, timed)
    runner = flgo.init(
        str(task),
        algorithm,
        {
            "num_rounds": job.rounds,
            "proportion": work.PER_ROUND / work.CLIENTS,
            "sample": "uniform",
            "aggregate": "uniform",
            "num_epochs": 1,
            "batch_size": work.BATCH,
            "learning_rate": work.LEARNING_RATE,
            "momentum": 0.0,
            # A client keeps a tenth of its 600 images for validation.
            "train_holdout": 60.5 / 600,
            "num_parallels": job.processes,
            "parallel_type": "p",
            "eval_interval": -1,
            "torch_num_threads": job.threads,
            "no_tqdm": True,
            "no_log_console": True,
            **(
                {"algo_para": [work.MIXING, 0.0, "constant", 0, 0, 0]}
                if job.method == "fedasync"
                else {}
            ),
        },
        model=Model,
        Logger=Silent,
    )
    sizes = {len(client.train_data) for client in runner.clients}
    assert sizes == {work.SAMPLES}, sizes
    runner.run()
    watch.write(version("flgo"), runner.model.parameters())


if __name__ == "__main__":
    main()
