"""Simulation on virtual time: a Flower Grid driven by discrete events."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.simulation.devices import Device, fleet
from raceme.simulation.executor import Executor, InProcess, Pool, load, prepare_processes
from raceme.simulation.virtual_grid import Node, VirtualGrid, nodes_of

# -----------------------------------------------------------------------------
# Choice of the executor: one process, several, a Ray cluster, or all clients stacked.
# -----------------------------------------------------------------------------


AUTO = "auto"

_RAY = "ray"
_RAY_ADDRESS = "ray://"
_MOST_WORKERS = 1024
_WORTHWHILE_SECONDS = 6.0
"""Least local training for which ``auto`` starts worker processes.

They take 1.5 s to start, measured on 2 cores; two workers break even at 4 s of training.
"""
_TIMED_STEPS = 3


def executor_for(
    target: str,
    workers: str | int = AUTO,
    device: str = "cpu",
    vectorised: bool = False,
    seconds: Callable[[], float] | None = None,
    seed: int | None = None,
    config: RunConfig | None = None,
    precision: str = "float32",
) -> Executor:
    """Make the executor of a run.

    Parameters
    ----------
    target : str
        Import path of the ClientApp, as ``module:attribute``.
    workers : str or int
        Number of worker processes; 0 does all work in this process. ``"auto"`` starts one per core
        on several cores, if the run has enough work to profit and is not itself one of several
        parallel runs. ``"ray"`` or ``"ray://HEAD:PORT"`` uses a Ray cluster; see
        :class:`~raceme.simulation.ray_cluster.Cluster`.
    device : str
        ``"cpu"`` or ``"cuda"``. On the latter all clients train together: in this process, or
        divided among the GPUs of the Ray cluster.
    vectorised : bool
        Train all clients together on a CPU too.
    seconds : Callable, optional
        Estimates the seconds of all local training in one process; called for ``"auto"`` only. None
        means enough work.
    seed : int, optional
        Seed of apps that draw from the process's own random numbers; see
        :func:`~raceme.simulation.executor.answer`.
    config : RunConfig, optional
        Configuration of a run whose data all machines need.
    precision : str
        How a GPU rounds the inputs of products: ``"float32"`` (not), ``"tf32"`` or ``"bf16"``.

    Raises
    ------
    UserError
        There is no such device or cluster, `workers` is invalid, or a precision is given without a
        GPU.
    """
    if precision != "float32" and device != "cuda":
        raise UserError(f"--precision {precision} is for --device cuda.")
    if isinstance(workers, str) and is_ray(workers):
        from raceme.simulation.ray_cluster import RayStacks, RayTasks

        if vectorised or device == "cuda":
            return RayStacks(workers, cores(), device, precision, config)
        return RayTasks(target, workers, cores(), seed, config)
    count = _count(workers, seconds)
    if vectorised or device == "cuda":
        from raceme.simulation.stacked import Stacked

        return Stacked(device, precision=precision)
    return Pool(target, count, seed=seed) if count else InProcess(load(target), seed)


def prepare(workers: str | int) -> None:
    """Start the fork server if a run is certain to need worker processes."""
    if workers != AUTO and not is_ray(str(workers)) and _count(workers, None):
        prepare_processes()


def is_ray(workers: str) -> bool:
    """Return whether a Ray cluster does the work."""
    return workers == _RAY or workers.startswith(_RAY_ADDRESS)


def training_seconds(config: RunConfig, examples: Sequence[int]) -> float:
    """Estimate how long one process takes for all local training of a run, by timing a few steps.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run, with every key resolved.
    examples : Sequence[int]
        Training examples of each client.

    Raises
    ------
    UserError
        There is no such model, or it does not fit the data.
    """
    import torch

    from raceme import datasets
    from raceme.training import models
    from raceme.training.local import step
    from raceme.training.models import Network, objective_of

    shape = datasets.data_shape(config)
    module = models.build(str(config.model), shape.input_shape, shape.outputs, tokens=shape.tokens)
    network = Network(module, objective_of(shape))
    x = torch.rand(max(2, min(config.batch_size, max(examples))), *shape.input_shape)
    y = torch.zeros(len(x), dtype=torch.int64 if shape.target is None else torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    # The first step, which is slower than all others, is not timed.
    for _ in range(1 + _TIMED_STEPS):
        start = time.perf_counter()
        step(network, x, y, lr=0.0)
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    steps = sum(math.ceil(count / config.batch_size) for count in examples) / len(examples)
    steps_per_update = config.local_steps or steps * config.local_epochs
    return min(times) * steps_per_update * config.planned_updates


def _count(workers: str | int, seconds: Callable[[], float] | None) -> int:
    """Return how many worker processes to start."""
    if workers == AUTO:
        count = cores()
        if count == 1 or multiprocessing.parent_process() is not None:
            return 0
        return count if seconds is None or seconds() >= _WORTHWHILE_SECONDS else 0
    try:
        count = int(workers)
    except (TypeError, ValueError):
        count = -1
    if not 0 <= count <= _MOST_WORKERS:
        shown = workers[:40] if isinstance(workers, str) else workers
        raise UserError(
            "workers must be auto, 0 for none, a number of worker processes up to "
            f"{_MOST_WORKERS}, ray or ray://HEAD:PORT, got '{shown}'."
        )
    return count


def cores() -> int:
    """Return the number of available cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


__all__ = [
    "Device",
    "Executor",
    "InProcess",
    "Node",
    "Pool",
    "VirtualGrid",
    "cores",
    "executor_for",
    "fleet",
    "is_ray",
    "nodes_of",
    "prepare",
    "training_seconds",
]
