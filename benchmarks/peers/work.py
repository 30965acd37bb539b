"""The work that every framework is given, and how it is timed.

Each script ``on_*.py`` does it with one framework, in an environment without Raceme, so that this
module needs numpy and torch only. The network is that of PyTorch's MNIST example without its
dropout, 21,840 weights; each of 100 clients has 540 images and trains one epoch in mini-batches of
10 with plain SGD; ten clients make a round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

# A torchvision built for CUDA fails to import beside a CPU build of torch, because of operators
# that this benchmark does not use.
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("none"))

CLIENTS = 100
SAMPLES = 540
PER_ROUND = 10
BATCH = 10
STEPS = SAMPLES // BATCH
LEARNING_RATE = 0.05
MIXING = 0.6
"""Constant weight of an update in asynchronous methods, FedAsync's α without decay."""

_OF_EACH_CLIENT = 600
_MEAN, _DEVIATION = 0.1307, 0.3081


@dataclass(frozen=True)
class Job:
    """Command line of a script.

    Attributes
    ----------
    method : str
        ``"fedavg"``, ``"fedasync"``, or ``"idle"``: clients that echo the model.
    data_root : Path
        The folder with ``MNIST/raw``.
    folder : Path
        The framework's working folder.
    updates : int
        Number of updates that are timed, a multiple of a round's; one round more goes before.
    processes : int
        Number of processes that train.
    threads : int
        torch's threads in each of them.
    """

    method: str
    data_root: Path
    folder: Path
    updates: int
    processes: int
    threads: int

    @property
    def warm_up(self) -> int:
        """Number of updates before the clock starts: one round."""
        return CLIENTS if self.method == "idle" else PER_ROUND

    @property
    def rounds(self) -> int:
        """Number of rounds, with the first, which is not timed."""
        return 1 + self.updates // self.warm_up


class Watch:
    """Times updates from the end of the warm-up on."""

    def __init__(self, job: Job, result: Path) -> None:
        self.job = job
        self._result = result
        self._started = self._ended = (0, 0.0, 0.0)

    def note(self, updates: int) -> None:
        """Note the time, with the number of updates in the server's model so far."""
        if updates <= self.job.warm_up or updates >= self.job.warm_up + self.job.updates:
            self._ended = (updates, time.perf_counter(), processor_seconds())
        if updates <= self.job.warm_up:
            self._started = self._ended

    def write(self, version: str, weights: Iterable[Tensor] = ()) -> None:
        """Write the result.

        Parameters
        ----------
        version : str
            The framework's.
        weights : iterable of Tensor
            The server's model, its parameters in the order of :func:`network`.
        """
        (first, began, used), (last, ended, used_then) = self._started, self._ended
        values = list(weights)
        told = {
            "version": version,
            "torch": torch.__version__,
            "updates": last - first,
            "ms_per_update": 1e3 * (ended - began) / (last - first),
            "processor_ms_per_update": 1e3 * (used_then - used) / (last - first),
            "accuracy": accuracy(self.job.data_root, values) if values else None,
        }
        self._result.write_text(json.dumps(told))


def start() -> tuple[Job, Watch]:
    """Read the command line, and set torch's threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True)
    for name in ("--data-root", "--folder", "--result"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--updates", "--processes", "--threads"):
        parser.add_argument(name, type=int, required=True)
    given = vars(parser.parse_args())
    result = given.pop("result")
    job = Job(**given)
    torch.set_num_threads(job.threads)
    job.folder.mkdir(parents=True, exist_ok=True)
    return job, Watch(job, result)


def processor_seconds() -> float:
    """Return the processor time of this process and all its descendants, also ended ones."""
    times, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                process = int(entry.name)
                parents[process] = int(fields[1])
                times[process] = sum(map(int, fields[11:15]))
    ticks = 0
    for process, own in times.items():
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        ticks += own if ancestor == os.getpid() else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def network() -> nn.Sequential:
    """Make the network; its initial weights are the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )


def clients(data_root: Path) -> list[tuple[Tensor, Tensor]]:
    """Return each client's images, shape (540, 1, 28, 28), and labels: an even share, at random."""
    x, y = _images(data_root, "train"), _labels(data_root, "train")
    order = np.random.default_rng(0).permutation(len(y)).reshape(CLIENTS, _OF_EACH_CLIENT)
    return [(x[own[:SAMPLES]], y[own[:SAMPLES]]) for own in torch.from_numpy(order)]


def accuracy(data_root: Path, weights: Iterable[Tensor]) -> float:
    """Return the share of MNIST's test images that a model classifies correctly."""
    model = network().eval()
    with torch.no_grad():
        for own, given in zip(model.parameters(), weights, strict=True):
            own.copy_(given.reshape(own.shape))
        right = model(_images(data_root, "t10k")).argmax(dim=1) == _labels(data_root, "t10k")
    return float(right.float().mean())


def share_right(labels: np.ndarray, outputs: np.ndarray) -> float:
    """Return the share of outputs, shape (n, 10), that are largest at the label."""
    return float((outputs.argmax(axis=1) == labels).mean())


def split(vector: Tensor) -> list[Tensor]:
    """Cut a flat vector into the network's parameters."""
    sizes = [parameter.numel() for parameter in network().parameters()]
    return list(torch.split(vector, sizes))


def _images(data_root: Path, part: str) -> Tensor:
    raw = np.fromfile(data_root / "MNIST" / "raw" / f"{part}-images-idx3-ubyte", np.uint8)
    pixels = torch.from_numpy(raw[16:]).reshape(-1, 1, 28, 28).float() / 255
    return (pixels - _MEAN) / _DEVIATION


def _labels(data_root: Path, part: str) -> Tensor:
    raw = np.fromfile(data_root / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte", np.uint8)
    return torch.from_numpy(raw[8:].astype(np.int64))
