"""A suite from start to end: checks, runs, tables and plots."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from raceme.comparison import figures, table
from raceme.comparison.jobs import Job, check, make_jobs, survey
from raceme.comparison.progress import SuiteProgress
from raceme.comparison.read import read_first_runs
from raceme.comparison.results import Comparison, best_of, gather
from raceme.comparison.runner import run_jobs
from raceme.comparison.score_figures import score_plots
from raceme.comparison.suites import Suite
from raceme.config.errors import UserError
from raceme.records.files import atomic_write
from raceme.reporting.idle_plot import idle_figure
from raceme.reporting.plots import comparison_figure
from raceme.reporting.staleness import staleness_figure
from raceme.reporting.style import save_figure

log = logging.getLogger("raceme")


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
    out = out.expanduser().resolve()
    plain = [method.variants()[0] for method in suite.methods if not method.is_swept]
    points = [point for method in suite.methods if method.is_swept for point in method.variants()]
    every = make_jobs(suite, plain, suite.seeds, out)
    trials = make_jobs(suite, points, suite.seeds[:1], out, trial=True)
    further = make_jobs(suite, points, suite.seeds, out)
    plan = Plan(suite, out, tuple(every), tuple(trials), tuple(further))
    check(plan.every)
    survey(plan.every)
    return plan


def compare(plan: Plan, processes: int, console: Console) -> Comparison:
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

    Raises
    ------
    UserError
        The folder cannot be written.
    """
    finished, half = survey(plan.every)
    done, compared = set(finished), (plan.suite.timing, plan.suite.score)
    _make_folder(plan.out)
    certain = [*plan.plain, *plan.trials]
    with SuiteProgress(len(certain), len(done & set(certain)), console) as progress:
        lost = _say_resumed(progress, finished, half)
        for job in lost:
            shutil.rmtree(job.folder)

        def run(jobs: Sequence[Job]) -> Mapping[Job, str]:
            return run_jobs([job for job in jobs if job not in done], processes, progress.report)

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
    write(comparison, plan.out)
    return comparison


def write(comparison: Comparison, out: Path) -> None:
    """Write the tables and plots of a comparison; a plot that fails holds nothing else up."""
    texts = [table.main_table(comparison), table.sweep_table(comparison)]
    files = {
        "compare.json": table.to_json(comparison),
        "compare.csv": table.to_csv(comparison),
        "compare.md": "\n".join(text.markdown() for text in texts if text is not None),
    }
    for name, content in files.items():
        with atomic_write(out / name) as file:
            file.write_text(content, encoding="utf-8")
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
        except Exception:
            log.exception("%s could not be drawn", name)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}.") from None


def _say_resumed(
    progress: SuiteProgress, finished: Sequence[Job], half: Sequence[Job]
) -> list[Job]:
    """Say what becomes of earlier runs; return those that have to start anew."""
    lost = []
    for job in finished:
        progress.say(f"{job.name}: finished before, kept")
    for job in half:
        if job.can_resume:
            progress.say(f"{job.name}: half-done, resumed from its last checkpoint")
        else:
            lost.append(job)
            progress.say(f"{job.name}: half-written, removed and done again")
    return lost
