"""Runs side by side on a Ray cluster, one per CPU, whose results come back into their folders."""

from __future__ import annotations

import io
import logging
import shutil
import tarfile
import tempfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raceme.comparison.jobs import Job
from raceme.comparison.runner import Report, cores
from raceme.comparison.worker import Finished, Progress, run_one
from raceme.config import Value
from raceme.simulation.ray_cluster import Cluster, first_line

log = logging.getLogger("raceme.workers")

_LOOK_SECONDS = 0.5
_MOST_LOSSES = 3
"""Nodes or processes that may be lost with the same run."""
_END_SECONDS = 30.0
"""Time for runs that are told to end to send their checkpoints."""


class _Result(NamedTuple):
    """What a run has come to, the node that did it, and its packed folder."""

    finished: Finished
    node_id: str
    files: bytes


class _Board:
    """An actor on which runs say how far they are, and are told whether to end."""

    def __init__(self) -> None:
        self._news: dict[int, Progress] = {}
        self._ending = False

    def take(self, number: int, progress: Progress) -> bool:
        """Note how far a run is; return whether it is to end."""
        self._news[number] = progress
        return self._ending

    def news(self) -> dict[int, Progress]:
        """Return what was noted since this was asked last."""
        news, self._news = self._news, {}
        return news

    def end(self) -> None:
        """Let all runs end."""
        self._ending = True


class RayRuns:
    """A Ray cluster that does the runs of comparisons.

    Each run is one task, on one CPU, in a folder of its node, which is sent back when it ends. A
    run that is lost with its node is done again from what there is of it here.

    Parameters
    ----------
    workers : str
        Which cluster; see :class:`~raceme.simulation.ray_cluster.Cluster`.

    Raises
    ------
    UserError
        There is no such cluster, or its nodes do not fit.
    """

    def __init__(self, workers: str) -> None:
        self._cluster = Cluster(workers, cores())
        self.cpus = self._cluster.cpus

    def run(self, jobs: Sequence[Job], processes: int, report: Report) -> dict[Job, str]:
        """Run jobs side by side; see :func:`~raceme.comparison.runner.run_jobs`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Where this process is: if that node is lost, so is the comparison.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
        task = ray.remote(num_cpus=1, max_retries=0)(_run_there)
        waiting, failed = deque(enumerate(jobs)), {}
        under_way: dict[Any, tuple[int, Job]] = {}
        losses: Counter[Job] = Counter()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < processes:
                    number, job = waiting.popleft()
                    if not losses[job]:
                        report(job, None)
                    keys, files = job.config.to_mapping(), _packed(job.folder)
                    under_way[task.remote(keys, files, board, number)] = number, job
                done, _ = ray.wait(list(under_way), timeout=_LOOK_SECONDS)
                for number, progress in ray.get(board.news.remote()).items():
                    if any(number == known for known, _ in under_way.values()):
                        report(jobs[number], progress)
                for reference in done:
                    number, job = under_way.pop(reference)
                    try:
                        finished = self._kept(job, ray.get(reference))
                    except ray.exceptions.RayError as error:
                        losses[job] += 1
                        how = first_line(error)
                        if losses[job] < _MOST_LOSSES:
                            log.warning("%s was lost and is done again: %s.", job.name, how)
                            waiting.append((number, job))
                            continue
                        finished = Finished(f"it was lost {_MOST_LOSSES} times: {how}")
                    report(job, finished)
                    if finished.error is not None:
                        failed[job] = finished.error
        finally:
            if under_way:
                self._end(board, under_way)
            ray.kill(board)
        return failed

    def close(self) -> None:
        """Leave the cluster."""
        self._cluster.close()

    def _kept(self, job: Job, result: _Result) -> Finished:
        """Put the folder of a run where it belongs, and say how the run ended."""
        error = result.finished.error
        if result.files:
            _replace(job.folder, result.files)
        return Finished(error and f"on node {self._cluster.name(result.node_id)}: {error}")

    def _end(self, board: Any, under_way: Mapping[Any, tuple[int, Job]]) -> None:
        """Let runs end before they are done, and keep their checkpoints."""
        import ray

        board.end.remote()
        ended, left = ray.wait(list(under_way), num_returns=len(under_way), timeout=_END_SECONDS)
        for reference in ended:
            try:
                self._kept(under_way[reference][1], ray.get(reference))
            except ray.exceptions.RayError:
                continue
        for reference in left:
            ray.cancel(reference, force=True)


def _run_there(keys: Mapping[str, Value], files: bytes, board: Any, number: int) -> _Result:
    """Do a run on the node that this is called on."""
    import ray

    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False

    def tell(progress: Progress) -> None:
        if ray.get(board.take.remote(number, progress)):
            raise OSError("the comparison ends")

    with tempfile.TemporaryDirectory(prefix="raceme-") as place:
        folder = Path(place) / "run"
        if files:
            _unpack(files, folder)
        finished = run_one({**keys, "out": str(folder)}, tell)
        return _Result(finished, ray.get_runtime_context().get_node_id(), _packed(folder))


def _packed(folder: Path) -> bytes:
    """Return a folder as bytes; none if it does not exist."""
    if not folder.exists():
        return b""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(folder, arcname=".")
    return file.getvalue()


def _replace(folder: Path, files: bytes) -> None:
    """Put a packed folder in the place of what is there."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _unpack(files, partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _unpack(files: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
