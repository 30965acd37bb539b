"""A suite from start to end: checks, runs, tables and plots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from raceme.comparison import figures, table
from raceme.comparison.folder import check_own, only_comparison, remove_run, wait_for_end
from raceme.comparison.jobs import Job, check, make_jobs, survey
from raceme.comparison.progress import SuiteProgress
from raceme.comparison.read import read_first_runs
from raceme.comparison.results import Comparison, best_of, gather
from raceme.comparison.runner import Report, run_jobs
from raceme.comparison.score_figures import score_plots
from raceme.comparison.suites import Suite, slug
from raceme.config.reading import absolute
from raceme.records.files import atomic_write
from raceme.reporting.idle_plot import idle_figure
from raceme.reporting.plots import comparison_figure
from raceme.reporting.staleness import staleness_figure
from raceme.reporting.style import save_figure

log = logging.getLogger("raceme")

RunAll = Callable[[Sequence[Job], int, Report], Mapping[Job, str]]
"""Runs jobs, so many at a time, and returns why they failed, for those that did."""


@dataclass(frozen=True)
class Plan:
    """A suite that was found to be possible.

    Attributes
    ----------
    suite : Suite
        What to run.
    out : Path
        The folder; a run lies in ``<method>/seed-<seed>`` below it.
    plain : tuple[Job, ...]
        Runs that are certain: every method without a choice of points, with every seed.
    trials : tuple[Job, ...]
        Every point of every sweep, with the first seed, tested on held-out training samples.
    further : tuple[Job, ...]
        Runs of these points with every seed; only the best point of each method will be done.
    """

    suite: Suite
    out: Path
    plain: tuple[Job, ...]
    trials: tuple[Job, ...]
    further: tuple[Job, ...]

    @property
    def every(self) -> tuple[Job, ...]:
        """All runs that there may be."""
        return (*self.plain, *self.trials, *self.further)


def prepare(suite: Suite, out: Path) -> Plan:
    """Find out whether a suite can run in a folder. Nothing is written or removed.

    Raises
    ------
    UserError
        Something cannot run, or the folder holds other results.
    """
    out = absolute(out)
    plain = [method.variants()[0] for method in suite.methods if not method.is_swept]
    points = [point for method in suite.methods if method.is_swept for point in method.variants()]
    every = make_jobs(suite, plain, suite.seeds, out)
    trials = make_jobs(suite, points, suite.seeds[:1], out, trial=True)
    further = make_jobs(suite, points, suite.seeds, out)
    plan = Plan(suite, out, tuple(every), tuple(trials), tuple(further))
    check_own(out, {slug(method.label) for method in suite.methods})
    check(plan.every)
    survey(plan.every)
    return plan


def compare(plan: Plan, processes: int, console: Console, run_all: RunAll = run_jobs) -> Comparison:
    """Run a suite, or the rest of it, and leave its tables and plots.

    Points of a sweep are tried on the first seed and judged by samples that are held out of its
    training samples; the most accurate one is then run on all seeds, as the other methods are.
    Finished runs are kept, and a killed one is resumed from its last checkpoint; it starts anew if
    it has none that can be used.

    Parameters
    ----------
    plan : Plan
        What to run, and where.
    processes : int
        Runs at a time.
    console : Console
        Where progress is shown.
    run_all : Callable
        Runs them, by default in processes of this machine.

    Raises
    ------
    UserError
        The folder cannot be written, or another comparison is at work in it.
    """
    with only_comparison(plan.out):
        return _compare(plan, processes, console, run_all)


def _compare(plan: Plan, processes: int, console: Console, run_all: RunAll) -> Comparison:
    """Run a suite in a folder that nobody else works in."""
    # Since it was prepared, another comparison may have done some of it.
    finished, half = survey(plan.every)
    done, compared = set(finished), (plan.suite.timing, plan.suite.score)
    certain = [*plan.plain, *plan.trials]
    with SuiteProgress(len(certain), len(done & set(certain)), console) as progress:
        lost = _say_resumed(progress, finished, half)
        for job in lost:
            remove_run(job.folder)

        def run(jobs: Sequence[Job]) -> Mapping[Job, str]:
            return run_all([job for job in jobs if job not in done], processes, progress.report)

        errors = dict(run(certain))
        done |= set(certain)
        tried = {
            method.label: [
                gather(point, method.label, plan.trials, errors, *compared)
                for point in method.variants()
            ]
            for method in plan.suite.methods
            if method.is_swept
        }
        chosen = {label: best_of(results).method for label, results in tried.items()}
        further = [job for job in plan.further if job.method in chosen.values()]
        progress.add(len(further), len(done & set(further)))
        errors |= run(further)
    jobs = [*plan.plain, *further]
    results = [
        gather(
            chosen.get(method.label, method.variants()[0]), method.label, jobs, errors, *compared
        )
        for method in plan.suite.methods
    ]
    sweeps = {label: tuple(points) for label, points in tried.items()}
    comparison = Comparison(plan.suite, tuple(results), sweeps)
    return replace(comparison, unwritten=write(comparison, plan.out))


def write(comparison: Comparison, out: Path) -> dict[str, str]:
    """Write the tables and plots of a comparison; what fails holds nothing else up.

    Returns
    -------
    dict[str, str]
        Names of what could not be written, and why.
    """
    unwritten: dict[str, str] = {}
    texts = [table.main_table(comparison), table.sweep_table(comparison)]
    files = {
        "compare.json": table.to_json(comparison),
        "compare.csv": table.to_csv(comparison),
        "compare.md": "\n".join(text.markdown() for text in texts if text is not None),
    }
    for name, content in files.items():
        try:
            with atomic_write(out / name) as file:
                file.write_text(content, encoding="utf-8")
        except OSError as error:
            unwritten[name] = error.strerror or str(error)
    records, missing = read_first_runs(out, comparison)
    for label in missing:
        log.warning("%s is not in the plots over time: its events cannot be read", label)
    title = f"{comparison.suite.title}, seed {comparison.suite.seeds[0]}"
    plots: dict[str, Callable[[], Figure]] = {
        "time-to-target.png": lambda: figures.times_figure(comparison),
        "purity.png": lambda: figures.purity_figure(comparison),
    }
    if records:
        plots["accuracy.png"] = lambda: comparison_figure(
            records, target=comparison.target, title=title
        )
        plots["staleness.png"] = lambda: staleness_figure(records)
    if any(len(record.idle_times.share) for record in records.values()):
        plots["idle.png"] = lambda: idle_figure(records)
    suite = comparison.suite
    for name, draw in score_plots(records, suite.scores, suite.shows_mixtures).items():
        plots[f"{name}.png"] = draw
    for name, draw in plots.items():
        try:
            save_figure(draw(), out / name)
        except OSError as error:
            unwritten[name] = error.strerror or str(error)
        except Exception as error:
            log.exception("%s could not be drawn", name)
            unwritten[name] = " ".join(str(error).split()) or type(error).__name__
    return unwritten


def _say_resumed(
    progress: SuiteProgress, finished: Sequence[Job], half: Sequence[Job]
) -> list[Job]:
    """Say what becomes of earlier runs; return those that have to start anew."""
    lost = []
    for job in half:
        wait_for_end(job.folder)
    for job in finished:
        progress.say(f"{job.name}: finished before, kept")
    for job in half:
        if job.can_resume:
            progress.resume(job)
        else:
            lost.append(job)
            progress.say(f"{job.name}: half-written, removed and done again")
    return lost
