"""The runs of a comparison: checks, state on disk, and execution.

A finished run has a ``summary.json``, which is written last and never removed.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import shutil
import signal
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raceme.core.config import CONFIG, RunConfig, code_of, imported_by, read_toml
from raceme.core.errors import UserError, one_line, os_errors_as_user_errors
from raceme.core.events import Ending, Evaluated, EventHandler, UpdateApplied
from raceme.core.files import ReadingError, parse_json, read_text
from raceme.core.options import Value
from raceme.core.registry import define, definitions, users_line
from raceme.core.signals import StopRequest
from raceme.experiments.suites import ComparedMethod, Suite, slug
from raceme.records.folder import (
    CHECKPOINTS,
    COMPARISON,
    ERROR,
    LOG,
    STORE,
    SUMMARY,
    failure_recorded,
)
from raceme.runs.checkpoints import CONDITIONS, can_resume

if TYPE_CHECKING:
    from raceme.simulation.ray_cluster import Cluster


@dataclass(frozen=True)
class Job:
    """One method with one seed.

    Attributes
    ----------
    method : ComparedMethod
        A method without a sweep.
    seed : int
        Seed of the run.
    config : RunConfig
        Resolved configuration, with the output folder.
    trial : bool
        Whether it is a trial of a sweep: shorter, and tested on held-out training samples.
    """

    method: ComparedMethod
    seed: int
    config: RunConfig = field(compare=False)
    trial: bool = False

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        return f"{self.method.label}, {self.folder.name.replace('-', ' ')}"

    @cached_property
    def folder(self) -> Path:
        """Folder of its artefacts."""
        return Path(self.config.out)

    @property
    def can_resume(self) -> bool:
        """Whether the folder has a checkpoint to resume from."""
        return can_resume(self.folder, self.config)

    def summary(self) -> dict[str, Any] | None:
        """Return its summary; None if unfinished.

        An interrupted run, or one whose clients all left, counts as unfinished, as it has fewer
        updates than the others.
        """
        try:
            content = parse_json(read_text(self.folder / SUMMARY))
        except ReadingError:
            return None
        complete = {ending.value for ending in Ending if ending.is_complete}
        return content if isinstance(content, dict) and content.get("ending") in complete else None


def make_jobs(
    suite: Suite,
    methods: Sequence[ComparedMethod],
    seeds: Sequence[int],
    out: Path,
    trial: bool = False,
) -> list[Job]:
    """Return the runs of methods and seeds, ordered by seed.

    Parameters
    ----------
    suite : Suite
        Suite with the settings and lengths of the runs.
    methods, seeds : Sequence
        Each method runs once with each seed.
    out : Path
        The comparison's folder; a run's is ``<method>/seed-<seed>`` below it, or
        ``<method>/validation-<seed>``.
    trial : bool
        Whether they are trials of sweeps.

    Raises
    ------
    UserError
        A key or value does not exist.
    """
    from raceme.runs.experiment import resolve

    jobs = []
    for seed in seeds:
        for method in methods:
            config = resolve(suite.config(method, seed, trial))
            folder = out / slug(method.label) / f"{'validation' if trial else 'seed'}-{seed}"
            jobs.append(Job(method, seed, config.with_values(out=str(folder)), trial))
    return jobs


def check(jobs: Iterable[Job]) -> None:
    """Check all runs before anything starts.

    Raises
    ------
    UserError
        Data, model, devices or hyper-parameters of a run are invalid.
    """
    from raceme.runs.experiment import (
        build_strategy,
        check_fleet,
        check_parts,
        check_validation,
        fitted,
    )

    dealt, warned = set[tuple[int, str]](), set[str]()
    for job in jobs:
        config = job.config
        try:
            strategy = build_strategy(config)
            # Key of a run's parts, except its strategy.
            keys = config.with_values(max_updates=1, max_rounds=0, out="").to_mapping().items()
            shared = str([item for item in keys if item[0] != "strategy" and "." not in item[0]])
            if (job.seed, shared) not in dealt:
                dealt.add((job.seed, shared))
                check_parts(config)
            # Checked once per method, as its warnings do not depend on the seed.
            method = str(config.with_values(seed=0, out="").to_mapping())
            if method not in warned:
                warned.add(method)
                check_fleet(config, strategy)
            check_validation(config, strategy)
            fitted(config, strategy)
        except UserError as error:
            raise UserError(f"{job.method.label} cannot run: {error}") from None


def survey(jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
    """Return the finished and the half-written runs.

    Raises
    ------
    UserError
        A folder holds a finished run of another configuration, or no run.
    """
    finished, half = [], []
    for job in jobs:
        if (summary := job.summary()) is not None:
            _check_same(job)
            _check_same_code(job, summary)
            finished.append(job)
        elif job.folder.exists():
            _check_is_run(job)
            half.append(job)
    return finished, half


def _check_same(job: Job) -> None:
    """Raise UserError if the finished run in a job's folder has another configuration."""
    wanted = job.config.with_values(out="").to_mapping()
    try:
        found = read_toml(job.folder / CONFIG)
        # Compared as text, since only the code of the present run may be imported.
        if imported_by(found).items() <= imported_by(wanted).items():
            found = RunConfig.from_mapping(found).to_mapping()
    except UserError as error:
        raise UserError(f"{job.folder} holds a finished run that cannot be read: {error}") from None
    names = [*wanted, *(name for name in found if name not in wanted)]
    for name in names:
        if found.get(name) != wanted.get(name) and name not in CONDITIONS:
            raise UserError(
                f"{job.folder} holds a finished run with {name} = {found.get(name)!r}, wanted is "
                f"{wanted.get(name)!r}: choose another folder with --out."
            )


def _check_same_code(job: Job, summary: Mapping[str, Any]) -> None:
    """Raise UserError if users' modules have changed since the finished run of a job."""
    code = code_of(job.config.to_mapping())
    if summary.get("code", code) != code:
        raise UserError(
            f"{job.folder} holds a finished run, and the source of a module that it names, or of "
            "one beside it, has changed since: choose another folder with --out."
        )


def _check_is_run(job: Job) -> None:
    """Raise UserError if an existing folder is not that of a killed run."""
    known = (STORE, CONFIG, SUMMARY, LOG, ERROR)
    inside = list(job.folder.iterdir()) if job.folder.is_dir() else [job.folder]
    if inside and not any((job.folder / name).exists() for name in known):
        raise UserError(f"{job.folder} exists and is no run: choose another --out.")


# -----------------------------------------------------------------------------
# The folder of a comparison: only its own files are overwritten, by one process at a time.
# -----------------------------------------------------------------------------


_RUNS = ("seed-", "validation-")
"""Prefixes of the names of runs' folders."""
ORPHAN_SECONDS = 30.0
"""Time within which a run notices the end of its comparison, writes a checkpoint and ends."""


def check_own(out: Path, methods: set[str]) -> None:
    """Check that a folder is new or a comparison's.

    Parameters
    ----------
    out : Path
        Folder of the results.
    methods : set[str]
        Names of the methods' folders, whose content is checked with the runs.

    Raises
    ------
    UserError
        It has a file that no comparison writes.
    """
    with os_errors_as_user_errors(f"{out} cannot be used", "; give another --out."):
        entries = sorted(out.iterdir()) if out.exists() else []
    if any(entry.name == COMPARISON for entry in entries):
        return
    strange = [e.name for e in entries if e.name not in methods and not _is_ours(e)]
    if strange:
        raise UserError(
            f"{out} holds {strange[0]}, which belongs to no comparison: choose a new folder with "
            "--out."
        )


def _is_ours(entry: Path) -> bool:
    """Return whether a file or folder may belong to an unfinished comparison."""
    if not entry.is_dir():
        return entry.name.startswith(".") and entry.name.endswith(".partial")
    return all(run.name.startswith(_RUNS) and run.is_dir() for run in entry.iterdir())


# -----------------------------------------------------------------------------
# The worker process: executes runs of a comparison until told to stop.
# -----------------------------------------------------------------------------


_REPORT_SECONDS = 0.2
_CHECKPOINT_SECONDS = 60.0
"""Default interval of checkpoints."""


@dataclass(frozen=True)
class JobProgress:
    """Progress of a run."""

    updates: int
    time: float
    score: str


@dataclass(frozen=True)
class Finished:
    """End of a run.

    Attributes
    ----------
    error : str or None
        Reason of a failure in one line, else None.
    """

    error: str | None


def serve(connection: Connection[Any, Any], pickled: Mapping[str, bytes]) -> None:
    """Run received configurations, and send :class:`JobProgress` and then :class:`Finished`.

    An existing folder is that of an unfinished run, which is resumed. SIGTERM, or the end of the
    parent process, ends the run with a checkpoint.

    Parameters
    ----------
    connection : Connection
        Connection to the comparison.
    pickled : Mapping[str, bytes]
        See :func:`~raceme.core.registry.define`.
    """
    define(pickled)
    # Signals of a terminal reach all processes; the comparison ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Import first: Flower configures its logger on import.
    import_module("flwr.serverapp")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False
    try:
        while True:
            connection.send(run_one(connection.recv(), connection.send))
    # The second SIGTERM interrupts.
    except (EOFError, OSError, KeyboardInterrupt):
        return


class _Reports(EventHandler):
    """An observer that reports progress a few times a second.

    Attributes
    ----------
    failure : str
        Reason to end the run; empty while reports are received.
    """

    def __init__(self, send: Callable[[JobProgress], None]) -> None:
        self.failure = ""
        self._send, self._last, self._score = send, time.monotonic(), ""

    def on_evaluated(self, event: Evaluated) -> None:
        self._score = f"{event.measure.word} {event.measure.shown(event.accuracy)}"

    def on_update_applied(self, event: UpdateApplied) -> None:
        if time.monotonic() - self._last > _REPORT_SECONDS:
            self._last = time.monotonic()
            try:
                self._send(JobProgress(event.seq, event.time, self._score))
            except OSError:
                self.failure = "its comparison has ended"


def run_one(keys: Mapping[str, Value], send: Callable[[JobProgress], None]) -> Finished:
    """Run a configuration; resume the unfinished run of an existing folder.

    Parameters
    ----------
    keys : Mapping[str, Value]
        The keys of the run's configuration.
    send : Callable
        Receives the progress. An OSError from it ends the run with a checkpoint.
    """
    from raceme.reporting.artefacts import missing_line
    from raceme.runs.experiment import simulate

    config = RunConfig.from_mapping(keys)
    folder = Path(config.out)
    # Default checkpoints, in case this process is killed.
    passing = not config.checkpoint_every and config.checkpoint_seconds is None
    if passing:
        config = config.with_values(checkpoint_seconds=_CHECKPOINT_SECONDS)
    if folder.exists():
        config = config.with_values(resume=config.out)
    reports = _Reports(send)
    try:
        with failure_recorded(folder), StopRequest(signal.SIGTERM) as stop:
            outcome = simulate(config, reports, stop=lambda: stop() or reports.failure)
    except UserError as error:
        # The message suffices. Write nothing, as the folder may belong to another process.
        return Finished(one_line(error))
    except Exception as error:
        where = f" ({line})" if (line := users_line(error)) else ""
        return Finished(f"{type(error).__name__}: {one_line(error) or 'no reason given'}{where}")
    if outcome.unwritten:
        # Unfinished: the next time it resumes from its last checkpoint.
        (folder / SUMMARY).unlink(missing_ok=True)
        return Finished(missing_line(outcome.out, outcome.unwritten))
    if not outcome.complete:
        return Finished(f"it ended early: {outcome.summary['reason']}")
    if passing:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Finished(None)


# -----------------------------------------------------------------------------
# Parallel runs, one process each, by default one per core.
#
# A failing process affects only its own run.
# -----------------------------------------------------------------------------


Report = Callable[[Job, JobProgress | Finished | None], None]
"""Receives the start (None), progress and end of a job."""


@dataclass
class _Worker:
    process: Any
    connection: Connection[Any, Any]
    job: Job


def run_jobs(jobs: Sequence[Job], processes: int, report: Report) -> dict[Job, str]:
    """Run jobs in parallel.

    Parameters
    ----------
    jobs : Sequence[Job]
        Jobs in order of start.
    processes : int
        Number of parallel runs.
    report : Report
        Receives the jobs' events, in this process.

    Returns
    -------
    dict[Job, str]
        Reasons of the failed jobs.
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
                if isinstance(message, JobProgress):
                    continue
                if message.error is not None:
                    failed[worker.job] = message.error
                if waiting and worker.process.is_alive():
                    # Reused processes keep their imports and data.
                    worker.job = waiting.popleft()
                    report(worker.job, None)
                    # If it has just died, the next receive fails.
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


def _start(job: Job) -> _Worker:
    # Not forked, because torch's threads do not survive a fork.
    from raceme.simulation.executor import script_hidden

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, definitions()), daemon=True)
    with script_hidden():
        process.start()
    there.close()
    here.send(job.config.to_mapping())
    return _Worker(process, here, job)


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    ready = wait([worker.connection for worker in workers])
    return [worker for worker in workers if worker.connection in ready]


def _receive(worker: _Worker) -> JobProgress | Finished:
    try:
        message: JobProgress | Finished = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        return Finished(f"its process ended with code {code}; out of memory is a usual reason")
    return message


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.join()


# -----------------------------------------------------------------------------
# Parallel runs on a Ray cluster, one per CPU, whose folders are sent back.
# -----------------------------------------------------------------------------


_LOOK_SECONDS = 0.5
_REPEATS = 2
"""Maximum number of times that a run is repeated when its process or node is lost."""
_END_SECONDS = 30.0
"""Time for ending runs to send their checkpoints."""


class _Result(NamedTuple):
    """Result of a run: outcome, node, and packed folder."""

    finished: Finished
    node_id: str
    files: bytes


class _Board:
    """A Ray actor that collects progress and tells runs whether to end."""

    def __init__(self) -> None:
        self._news: dict[int, JobProgress] = {}
        self._ending = False

    def take(self, number: int, progress: JobProgress) -> bool:
        """Record the progress of a run; return whether it should end."""
        self._news[number] = progress
        return self._ending

    def news(self) -> dict[int, JobProgress]:
        """Return the progress since the last call."""
        news, self._news = self._news, {}
        return news

    def end(self) -> None:
        """Tell all runs to end."""
        self._ending = True


def run_on_ray(
    cluster: Cluster, jobs: Sequence[Job], processes: int, report: Report
) -> dict[Job, str]:
    """Run jobs in parallel on a Ray cluster; see :func:`run_jobs`.

    Each run is a task on one CPU, in a folder of its node that is sent back at the end. Ray repeats
    a lost run from its local state.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from raceme.simulation.ray_cluster import first_line

    # The actor is on this node, whose loss ends the comparison anyway.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
    task = ray.remote(num_cpus=1, max_retries=_REPEATS)(_run_remotely)
    waiting, failed = deque(enumerate(jobs)), {}
    under_way: dict[Any, tuple[int, Job]] = {}

    def end(reference: Any) -> Finished:
        """Unpack the folder of a run that has ended, and return how it ended."""
        _, job = under_way.pop(reference)
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            return Finished(f"it was lost {_REPEATS + 1} times: {first_line(error)}")
        if result.files:
            _replace(job.folder, result.files)
        reason = result.finished.error
        return Finished(reason and f"on node {cluster.name(result.node_id)}: {reason}")

    try:
        while waiting or under_way:
            while waiting and len(under_way) < processes:
                number, job = waiting.popleft()
                report(job, None)
                keys, files = job.config.to_mapping(), _packed(job.folder)
                under_way[task.remote(keys, files, board, number, definitions())] = number, job
            done, _ = ray.wait(list(under_way), timeout=_LOOK_SECONDS)
            for number, progress in ray.get(board.news.remote()).items():
                if any(number == known for known, _ in under_way.values()):
                    report(jobs[number], progress)
            for reference in done:
                job = under_way[reference][1]
                report(job, finished := end(reference))
                if finished.error is not None:
                    failed[job] = finished.error
    finally:
        if under_way:
            # Runs that end early send their checkpoints.
            board.end.remote()
            running = list(under_way)
            done, left = ray.wait(running, num_returns=len(running), timeout=_END_SECONDS)
            for reference in done:
                end(reference)
            for reference in left:
                ray.cancel(reference, force=True)
        ray.kill(board)
    return failed


def _run_remotely(
    keys: Mapping[str, Value],
    files: bytes,
    board: Any,
    number: int,
    pickled: Mapping[str, bytes],
) -> _Result:
    """Execute a run on the calling node."""
    import ray

    define(pickled)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("raceme").propagate = False

    def send(progress: JobProgress) -> None:
        if ray.get(board.take.remote(number, progress)):
            raise OSError("the comparison ends")

    with tempfile.TemporaryDirectory(prefix="raceme-") as place:
        folder = Path(place) / "run"
        if files:
            _unpack(files, folder)
        finished = run_one({**keys, "out": str(folder)}, send)
        return _Result(finished, ray.get_runtime_context().get_node_id(), _packed(folder))


def _packed(folder: Path) -> bytes:
    """Return a folder as bytes; empty if it does not exist."""
    if not folder.exists():
        return b""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(folder, arcname=".")
    return file.getvalue()


def _replace(folder: Path, files: bytes) -> None:
    """Replace a folder by a packed one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _unpack(files, partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _unpack(files: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
