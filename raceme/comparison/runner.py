"""Runs side by side, one process each, as many as there are cores.

A process that fails, or dies, loses its own run and no other.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from raceme.comparison.jobs import Job
from raceme.comparison.worker import Finished, Progress, serve

Report = Callable[[Job, Progress | Finished | None], None]
"""Is told that a job started (None), how far it is, and how it ended."""


@dataclass
class _Worker:
    process: Any
    connection: Connection[Any, Any]
    job: Job


def run_jobs(jobs: Sequence[Job], processes: int, report: Report) -> dict[Job, str]:
    """Run jobs side by side.

    Parameters
    ----------
    jobs : Sequence[Job]
        They are started in this order.
    processes : int
        How many run at a time.
    report : Report
        Is told what happens, in this process.

    Returns
    -------
    dict[Job, str]
        Why they failed, for those that did.
    """
    waiting, failed = deque(jobs), {}
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                job = waiting.popleft()
                workers.append(_start(job))
                report(job, None)
            for worker in _ready(workers):
                message = _receive(worker)
                report(worker.job, message)
                if isinstance(message, Progress):
                    continue
                if message.error is not None:
                    failed[worker.job] = message.error
                if waiting and worker.process.is_alive():
                    # A process that continues keeps what it has imported and loaded.
                    worker.job = waiting.popleft()
                    report(worker.job, None)
                    # If it has just died, the next receive says so.
                    with suppress(OSError):
                        worker.connection.send(worker.job.config.to_mapping())
                else:
                    _stop(worker)
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            _stop(worker)
    return failed


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(job: Job) -> _Worker:
    # Not forked: torch's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    here.send(job.config.to_mapping())
    return _Worker(process, here, job)


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    ready = wait([worker.connection for worker in workers])
    return [worker for worker in workers if worker.connection in ready]


def _receive(worker: _Worker) -> Progress | Finished:
    try:
        message: Progress | Finished = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        return Finished(f"its process ended with code {code}; out of memory is a usual reason")
    return message


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.join()
