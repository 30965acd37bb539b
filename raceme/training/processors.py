"""On which processor a real device computes, and on how many threads: the fastest way here.

In a simulation every client trains on one thread of the CPU: see :mod:`raceme.client_app`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raceme.config.errors import UserError
from raceme.training.hardware import processors
from raceme.training.local import step, train
from raceme.training.network import Network
from raceme.training.samples import Samples
from raceme.training.settings import TrainingSettings

log = logging.getLogger("raceme.device")

ACCELERATOR, THREADS = "accelerator", "threads"
"""Keys of a node's configuration."""
AUTO = "auto"
CPU = "cpu"
GPUS = ("cuda", "mps")
"""What torch calls NVIDIA's GPUs and Apple's."""
MOST_THREADS = 1024

_TOLERANCE = 1e-2
"""Relative; GPUs may round the inputs of convolutions to 10 bits."""
_WORTHWHILE = 0.9
"""Share of the time that a way with more threads, or a GPU, may take at most to be taken."""
_ROUNDS = 4
_LONGEST_SECONDS = 5.0
"""Time after which no further round is measured."""


class Way(NamedTuple):
    """How to compute.

    Attributes
    ----------
    accelerator : str
        ``"cpu"``, ``"cuda"`` or ``"mps"``.
    threads : int
        Threads of the CPU.
    """

    accelerator: str
    threads: int

    def __str__(self) -> str:
        number = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return number if self.accelerator == CPU else self.accelerator


def ways_of(node: Mapping[str, object]) -> list[Way]:
    """Return the ways to compute that the owner of a node allows, the simplest first.

    Parameters
    ----------
    node : Mapping[str, object]
        Its configuration. Without the keys ``accelerator`` and ``threads`` there is one way: one
        thread of the CPU.

    Raises
    ------
    UserError
        A key has no such value, or the accelerator is not here, or cannot be used.
    """
    places = accelerators(node.get(ACCELERATOR, CPU))
    counts = thread_counts(node.get(THREADS, 1))
    # What a GPU is fed by is one thread.
    return [Way(p, n) for p in places for n in (counts if p == CPU else counts[:1])]


def accelerators(wanted: object) -> list[str]:
    """Return the accelerators that can be used: the one that is wanted, or all for ``"auto"``.

    A GPU can be used if it trains a small network as the CPU does.

    Raises
    ------
    UserError
        There is no such accelerator here, it fails, or it computes something else.
    """
    if wanted == CPU:
        return [CPU]
    if wanted == AUTO:
        there = [name for name in GPUS if _is_there(name)]
        for name in there:
            if _failure(name) is not None:
                log.warning("the accelerator '%s' is left aside: %s", name, _failure(name))
        return [CPU, *(name for name in there if _failure(name) is None)]
    if wanted not in GPUS:
        valid = ", ".join((AUTO, CPU, *GPUS))
        raise UserError(f"There is no accelerator '{wanted}'. Valid: {valid}.")
    name = str(wanted)
    if not _is_there(name):
        raise UserError(
            f"torch {torch.__version__} finds no accelerator '{name}' here: install a torch that "
            "is built for it, or leave out --accelerator."
        )
    if _failure(name) is not None:
        raise UserError(f"The accelerator '{name}' cannot be used: {_failure(name)}")
    return [name]


def thread_counts(wanted: object) -> list[int]:
    """Return the numbers of threads to choose from: the one that is wanted, or for ``"auto"`` some.

    Those are 1, 2, 4 and so on up to the number of cores that this process may use, or that
    ``OMP_NUM_THREADS`` says.

    Raises
    ------
    UserError
        It is no number of threads.
    """
    if wanted == AUTO:
        stated = os.environ.get("OMP_NUM_THREADS", "")
        most = int(stated) if stated.isdecimal() and int(stated) else processors()
        return sorted({*(2**power for power in range(int(math.log2(most)) + 1)), most})
    text = str(wanted)
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise UserError(
            f"threads must be auto, or a number from 1 to {MOST_THREADS}, got '{text[:40]}'."
        )
    return [int(text)]


def fastest(
    ways: Sequence[Way],
    build: Callable[[str], Network],
    x: NDArray[np.float32],
    y: NDArray[np.generic],
) -> Way:
    """Return the way in which a step on a mini-batch is fastest; a simpler one if it hardly is.

    Parameters
    ----------
    ways : Sequence[Way]
        To choose from, the simplest first.
    build : Callable
        Returns the network on an accelerator. Its weights stay, its gradient and statistics do not.
    x, y : NDArray
        Inputs and labels of the mini-batch.
    """
    if len(ways) == 1:
        return ways[0]
    seconds = _seconds(ways, build, x, y)
    chosen = ways[0]
    for way in ways[1:]:
        if seconds[way] < _WORTHWHILE * seconds[chosen]:
            chosen = way
    told = ", ".join(f"{1000 * seconds[way]:.1f} ms on {way}" for way in ways)
    log.info("a mini-batch of %d takes %s: trains on %s", len(y), told, chosen)
    return chosen


def _seconds(
    ways: Iterable[Way],
    build: Callable[[str], Network],
    x: NDArray[np.float32],
    y: NDArray[np.generic],
) -> dict[Way, float]:
    """Return the least seconds of a step in each way; they take turns."""
    before = torch.get_num_threads()
    seconds = dict.fromkeys(ways, math.inf)
    started = time.perf_counter()
    try:
        # The first step in each way is slower than all others.
        for number in range(1 + _ROUNDS):
            for way in seconds:
                took = _timed_step(way, build(way.accelerator), x, y)
                seconds[way] = min(seconds[way], took) if number else math.inf
            if number and time.perf_counter() - started > _LONGEST_SECONDS:
                break
    finally:
        torch.set_num_threads(before)
    return seconds


def _timed_step(
    way: Way, network: Network, x: NDArray[np.float32], y: NDArray[np.generic]
) -> float:
    torch.set_num_threads(way.threads)
    samples = Samples(x, y, network.channels_last, way.accelerator)
    network.module.train()
    ((inputs, labels),) = samples.slices(len(y))
    started = time.perf_counter()
    # Reading the loss waits for the end of the computation.
    float(step(network, inputs, labels, lr=0.0))
    return time.perf_counter() - started


def _is_there(name: str) -> bool:
    return bool(torch.get_device_module(name).is_available())


@cache
def _failure(name: str) -> str | None:
    """Return why an accelerator cannot be used; None if it can.

    A torch that was built for other GPUs finds this one and fails at the first computation.
    """
    try:
        found, expected = trial(name), trial(CPU)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    if np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return "it trains a small network to other weights than the CPU does"


def trial(name: str) -> NDArray[np.float32]:
    """Train a small convolutional network for some steps on an accelerator, always the same.

    Returns
    -------
    NDArray[np.float32]
        Its weights afterwards, shape (d,).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)
    network = Network(nn.Sequential(*layers), accelerator=name)
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 1, 8, 8), np.float32), rng.integers(3, size=24)
    samples = Samples(x, y, network.channels_last, name)
    train(network, samples, TrainingSettings(lr=0.1, batch_size=8), rng)
    weights: NDArray[np.float32] = network.weights.cpu().numpy()
    return weights
