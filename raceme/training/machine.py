"""A device's machine: processors, and the fastest way to compute.

In a simulation every client trains on one thread of the CPU: see :mod:`raceme.client_app`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raceme.core.errors import UserError
from raceme.core.training_settings import TrainingSettings
from raceme.training.local import step, train
from raceme.training.models import Network, Samples

# -----------------------------------------------------------------------------
# Description of a machine: processors, memory, torch.
# -----------------------------------------------------------------------------


_MIB = 1024 * 1024
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_SHARE = Path("/sys/fs/cgroup/cpu.max")


def describe() -> dict[str, str | int]:
    """Return the number of processors, the memory in MiB, and torch's version.

    Limits of a container apply.
    """
    return {
        "cpu-count": processors(),
        "memory-mib": _memory() // _MIB,
        "torch-version": _torch_version(),
    }


@cache
def _torch_version() -> str:
    """Cached, as each of many simulated clients needs it and a look-up takes milliseconds."""
    return metadata.version("torch")


def processors() -> int:
    """Return the number of cores available to this process, within a container's limits."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    try:
        # "150000 100000": CPU microseconds per period; "max" means no limit.
        quota, period = map(int, _CONTAINER_SHARE.read_text().split())
    except (OSError, ValueError):
        return there
    return max(1, min(there, quota // period)) if period else there


def _memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        # "max" means no limit.
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        return physical


# -----------------------------------------------------------------------------
# Choice of the fastest processor and number of threads on a real device.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.device")

ACCELERATOR, THREADS = "accelerator", "threads"
"""Keys of a node's configuration."""
AUTO = "auto"
CPU = "cpu"
GPUS = ("cuda", "mps")
"""torch's names of NVIDIA's and Apple's GPUs."""
MOST_THREADS = 1024

_TOLERANCE = 1e-2
"""Relative tolerance, since GPUs may round the inputs of convolutions to 10 bits."""
_WORTHWHILE = 0.9
"""Maximum relative time of more threads or a GPU to be preferred."""
_ROUNDS = 4
_LONGEST_SECONDS = 5.0
"""Time limit for starting further rounds of measurement."""


class Way(NamedTuple):
    """A way to compute.

    Attributes
    ----------
    accelerator : str
        ``"cpu"``, ``"cuda"`` or ``"mps"``.
    threads : int
        Number of CPU threads that torch uses.
    """

    accelerator: str
    threads: int

    def __str__(self) -> str:
        number = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return number if self.accelerator == CPU else self.accelerator


def ways_of(node: Mapping[str, object]) -> list[Way]:
    """Return the ways to compute that a node's owner allows, the simplest first.

    Parameters
    ----------
    node : Mapping[str, object]
        Node configuration. Without the keys ``accelerator`` and ``threads`` the only way is one CPU
        thread.

    Raises
    ------
    UserError
        A value is invalid, or the accelerator is missing or unusable.
    """
    places = accelerators(node.get(ACCELERATOR, CPU))
    counts = thread_counts(node.get(THREADS, 1))
    # With a GPU, one CPU thread suffices.
    return [Way(p, n) for p in places for n in (counts if p == CPU else counts[:1])]


def accelerators(wanted: object) -> list[str]:
    """Return the usable accelerators: the wanted one, or all for ``"auto"``.

    A GPU is usable if it trains a small network to the CPU's result.

    Raises
    ------
    UserError
        The accelerator is missing, fails, or computes other results.
    """
    if wanted == CPU:
        return [CPU]
    if wanted == AUTO:
        there = [name for name in GPUS if _is_there(name)]
        for name in there:
            if _failure(name) is not None:
                log.warning("the accelerator '%s' is not used: %s", name, _failure(name))
        return [CPU, *(name for name in there if _failure(name) is None)]
    if wanted not in GPUS:
        valid = ", ".join((AUTO, CPU, *GPUS))
        raise UserError(f"There is no accelerator '{wanted}'. Valid: {valid}.")
    name = str(wanted)
    if not _is_there(name):
        raise UserError(
            f"torch {torch.__version__} finds no accelerator '{name}' here: install a torch build "
            "that supports it, or leave --accelerator out."
        )
    if _failure(name) is not None:
        raise UserError(f"The accelerator '{name}' cannot be used: {_failure(name)}")
    return [name]


def thread_counts(wanted: object) -> list[int]:
    """Return the candidate numbers of threads: the wanted one, or several for ``"auto"``.

    Those are 1, 2, 4 and so on up to the available cores or ``OMP_NUM_THREADS``.

    Raises
    ------
    UserError
        The number is invalid.
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
    """Return the fastest way for a step on a mini-batch; simpler ones win near ties.

    Parameters
    ----------
    ways : Sequence[Way]
        Candidates, the simplest first.
    build : Callable
        Returns the network on an accelerator. The weights are restored, but not gradient and
        statistics.
    x, y : NDArray
        Inputs and labels of the mini-batch.
    """
    if len(ways) == 1:
        return ways[0]
    seconds = dict.fromkeys(ways, math.inf)
    before, started = torch.get_num_threads(), time.perf_counter()
    try:
        # The ways take turns; the first step of each, the slowest, is not timed.
        for number in range(1 + _ROUNDS):
            for way in ways:
                took = _timed_step(way, build(way.accelerator), x, y)
                seconds[way] = min(seconds[way], took) if number else math.inf
            if number and time.perf_counter() - started > _LONGEST_SECONDS:
                break
    finally:
        torch.set_num_threads(before)
    chosen = ways[0]
    for way in ways[1:]:
        if seconds[way] < _WORTHWHILE * seconds[chosen]:
            chosen = way
    told = ", ".join(f"{1000 * seconds[way]:.1f} ms on {way}" for way in ways)
    log.info("a mini-batch of %d takes %s: training on %s", len(y), told, chosen)
    return chosen


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
    """Return why an accelerator is unusable, or None.

    A torch build for other GPUs finds this one but fails at the first computation.
    """
    try:
        found, expected = trial(name), trial(CPU)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    if np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return "its weights of a small trained network differ from the CPU's"


def trial(name: str) -> NDArray[np.float32]:
    """Train a fixed small convolutional network for some steps on an accelerator.

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
