"""The runs of a comparison on disk: which are finished, which are to be done, are they possible.

A finished run has its ``summary.json``, which is written when all else of it is known; nothing but
a person removes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from raceme.checkpoints import can_resume
from raceme.comparison.suites import Method, Suite, slug
from raceme.config import RunConfig, read_toml
from raceme.config.errors import UserError
from raceme.config.reading import ReadingError, parse_json, read_text
from raceme.protocol.events import Ending
from raceme.records.folder import CONFIG, ERROR

SUMMARY = "summary.json"

_CONDITIONS = (
    *("checkpoint-every", "checkpoint-seconds", "workers", "track", "trace", "client-map"),
    *("client-models", "data-file", "data-root", "download"),
)
"""Keys that may differ between a finished run and the wanted one: they change no numbers.

Where data lie is not what they are: results can move to a machine that has them elsewhere.
"""


@dataclass(frozen=True)
class Job:
    """One method with one seed.

    Attributes
    ----------
    method : Method
        A method without a sweep.
    seed : int
        The seed.
    config : RunConfig
        Resolved, with the folder that it is to be written to.
    trial : bool
        It is there to find the best point of a sweep: shorter than the other runs, and tested on
        held-out training samples.
    """

    method: Method
    seed: int
    config: RunConfig = field(compare=False)
    trial: bool = False

    @property
    def name(self) -> str:
        """What the run is called in messages."""
        return f"{self.method.label}, {self.folder.name.replace('-', ' ')}"

    @cached_property
    def folder(self) -> Path:
        """Where its artefacts are."""
        return Path(self.config.out)

    @property
    def can_resume(self) -> bool:
        """True if a killed run left a checkpoint in the folder to resume from."""
        return can_resume(self.folder, self.config)

    def summary(self) -> dict[str, Any] | None:
        """Return the content of its summary; None if it is not finished.

        A run that was interrupted, or whose clients are all gone, is not: its numbers are those of
        fewer updates than the others have.
        """
        try:
            content = parse_json(read_text(self.folder / SUMMARY))
        except ReadingError:
            return None
        return content if isinstance(content, dict) and self._is_complete(content) else None

    def _is_complete(self, summary: dict[str, Any]) -> bool:
        if "ending" in summary:
            return summary["ending"] in {ending.value for ending in Ending if ending.is_complete}
        # The summaries of earlier versions tell only in words how a run ended.
        updates, time = summary.get("updates", 0), summary.get("virtual_time", 0.0)
        return bool(updates >= self.config.planned_updates or 0 < self.config.max_time <= time)


def make_jobs(
    suite: Suite, methods: Sequence[Method], seeds: Sequence[int], out: Path, trial: bool = False
) -> list[Job]:
    """Return the runs of some methods with some seeds, all methods of a seed together.

    Parameters
    ----------
    suite : Suite
        Has the settings and the length of the runs.
    methods, seeds : Sequence
        What to run.
    out : Path
        The comparison's folder; a run's is ``<method>/seed-<seed>`` below it, or
        ``<method>/validation-<seed>``.
    trial : bool
        They try points of sweeps.

    Raises
    ------
    UserError
        A key or a value that does not exist.
    """
    from raceme.experiment import resolve

    jobs = []
    for seed in seeds:
        for method in methods:
            config = resolve(suite.config(method, seed, trial))
            folder = out / slug(method.label) / f"{'validation' if trial else 'seed'}-{seed}"
            jobs.append(Job(method, seed, config.with_values(out=str(folder)), trial))
    return jobs


def check(jobs: Iterable[Job]) -> None:
    """Find out, before anything starts, whether all runs are possible.

    Raises
    ------
    UserError
        One is not: its data, its model, its devices or its hyper-parameters.
    """
    from raceme.experiment import build_strategy, check_parts

    dealt: set[tuple[int, str]] = set()
    for job in jobs:
        config = job.config
        try:
            build_strategy(config)
            # All that a run is made of, but for its strategy.
            keys = config.with_values(max_updates=1, max_rounds=0, out="").to_mapping().items()
            shared = str([item for item in keys if item[0] != "strategy" and "." not in item[0]])
            if (job.seed, shared) not in dealt:
                dealt.add((job.seed, shared))
                check_parts(config)
        except UserError as error:
            raise UserError(f"{job.method.label} cannot run: {error}") from None


def survey(jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
    """Find out which runs are finished, and of which there are half-written results.

    Raises
    ------
    UserError
        A folder holds a finished run of another configuration, or something that is no run.
    """
    finished, half = [], []
    for job in jobs:
        if job.summary() is not None:
            _check_same(job)
            finished.append(job)
        elif job.folder.exists():
            _check_is_run(job)
            half.append(job)
    return finished, half


def _check_same(job: Job) -> None:
    """Raise UserError if the finished run in a job's folder is not the one that is wanted."""
    wanted = job.config.with_values(out="").to_mapping()
    try:
        found = RunConfig.from_mapping(read_toml(job.folder / CONFIG)).to_mapping()
    except UserError as error:
        raise UserError(f"{job.folder} holds a finished run that cannot be read: {error}") from None
    names = [*wanted, *(name for name in found if name not in wanted)]
    for name in names:
        if found.get(name) != wanted.get(name) and name not in _CONDITIONS:
            raise UserError(
                f"{job.folder} holds a finished run with {name} = {found.get(name)!r}, wanted is "
                f"{wanted.get(name)!r}: choose another folder with --out."
            )


def _check_is_run(job: Job) -> None:
    """Raise UserError if a folder that is in the way is not what a killed run left."""
    known = ("run.sqlite", CONFIG, SUMMARY, "run.log", ERROR)
    inside = list(job.folder.iterdir()) if job.folder.is_dir() else [job.folder]
    if inside and not any((job.folder / name).exists() for name in known):
        raise UserError(f"{job.folder} is in the way and is no run: choose another --out.")
