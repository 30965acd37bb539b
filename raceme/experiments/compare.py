"""A suite from start to end: checks, runs, tables and plots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from raceme.core.errors import unknown_name
from raceme.core.events import Measure
from raceme.core.files import absolute, atomic_write
from raceme.experiments import tables as table
from raceme.experiments.jobs import (
    ORPHAN_SECONDS,
    Finished,
    Job,
    Progress,
    Report,
    check,
    check_own,
    make_jobs,
    remove_run,
    run_jobs,
    survey,
)
from raceme.experiments.page import plots
from raceme.experiments.results import Comparison, best_of, gather, read_runs
from raceme.experiments.suites import Suite, slug
from raceme.records.folder import make_folder, only_writer
from raceme.reporting.console import QUIET_SECONDS, LiveBars, shown_seconds, shown_updates
from raceme.reporting.style import save_figure

# -----------------------------------------------------------------------------
# The progress of a comparison, on a terminal or in a log.
# -----------------------------------------------------------------------------


_ENOUGH = 0.05
"""Share of a run that must be done before anything is said of how long the rest takes."""


class SuiteProgress:
    """Shows the progress of a suite; a context manager.

    On a terminal and in a notebook it is one line for the suite and one for each run under way.
    Every run that ends leaves a plain line; elsewhere another one says how far they are whenever
    there was nothing to print for ten seconds.

    Parameters
    ----------
    total : int
        Number of runs of the suite.
    done : int
        Number of runs that are finished already.
    console : Console
        The terminal or file to print to.
    clock : Callable
        Returns the seconds of real time.
    """

    def __init__(
        self,
        total: int,
        done: int,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console, self._clock = console, clock
        self._printed_at = clock()
        self._under_way: dict[Job, Progress | None] = {}
        # What was kept of an earlier comparison says nothing of how long a run takes.
        self._kept, self._started = done, clock()
        self._total, self._done = total, done
        # Nor does what half-done runs had done: it is known at the first news of each.
        self._resumed: set[Job] = set()
        self._before = 0.0
        self._lines: dict[Job, TaskID] = {}
        self._bars = LiveBars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._suite = self._bars.add_task("runs", total=total, completed=done, state="")

    def __enter__(self) -> SuiteProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def add(self, total: int, done: int) -> None:
        """Add runs that were not known at the start, e.g. the further seeds of a sweep's best."""
        self._total += total
        self._done += done
        self._kept += done
        self._bars.update(self._suite, total=self._total, completed=self._done)

    def resume(self, job: Job) -> None:
        """Note that a run goes on from a checkpoint."""
        self._resumed.add(job)
        self.say(f"{job.name}: half-done, resumed from its last checkpoint")

    def report(self, job: Job, news: Progress | Finished | None) -> None:
        """Show that a run started, how far it is, or how it ended."""
        if news is None:
            self._under_way[job] = None
            self._lines[job] = self._bars.add_task(
                job.name, total=job.config.planned_updates, state="starting"
            )
        elif isinstance(news, Progress):
            score = f", {news.score}" if news.score else ""
            state = f"t = {news.time:.0f} s{score}"
            self._under_way[job] = news
            if job in self._resumed:
                self._resumed.remove(job)
                self._before += _share(job, news)
            # Rounds may bring more updates than expected.
            total = max(news.updates, job.config.planned_updates)
            self._bars.update(self._lines[job], completed=news.updates, total=total, state=state)
            self._bars.update(self._suite, state=self._left())
        else:
            del self._under_way[job]
            self._bars.remove_task(self._lines.pop(job))
            self._done += 1
            self._bars.update(self._suite, completed=self._done, state=self._left())
            self.say(f"[{self._done}/{self._total}] {job.name}: {_ending(job, news)}")
        self._bars.refresh()
        if not self._bars.shown and self._clock() - self._printed_at >= QUIET_SECONDS:
            self.say(self._how_far())

    def say(self, line: str) -> None:
        """Print a line above what is live."""
        self._printed_at = self._clock()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _how_far(self) -> str:
        """Describe the runs under way in one line."""
        each = [
            f"{job.name}: {shown_updates(news.updates, job.config.planned_updates)}"
            if news
            else f"{job.name}: starting"
            for job, news in self._under_way.items()
        ]
        left = self._left()
        return "; ".join([f"{self._done} of {self._total} runs done", *each, *filter(None, [left])])

    def _left(self) -> str:
        """Say how long the rest will take, runs under way counted by their updates.

        Nothing is said while one has more of them than were expected: how many come is unknown.
        """
        parts = [_share(job, news) for job, news in self._under_way.items()]
        if max(parts, default=0.0) > 1.0:
            return ""
        done = self._done - self._kept + sum(parts)
        here, seconds = done - self._before, self._clock() - self._started
        if here < _ENOUGH or self._done >= self._total:
            return ""
        left = (self._total - self._kept - done) * seconds / here
        return f"about {shown_seconds(left)} left"


def _share(job: Job, news: Progress | None) -> float:
    """Return how much of a run is done; more than 1 of one with more updates than expected."""
    return news.updates / job.config.planned_updates if news else 0.0


def _ending(job: Job, news: Finished) -> str:
    summary = job.summary()
    if news.error is not None or summary is None:
        return f"FAILED: {news.error or 'it left no summary'}"
    measure, reached = Measure.of(summary), summary["time_to_target"]
    score = summary[measure.name]
    text = "no evaluation" if score is None else f"{measure.word} {measure.shown(score)}"
    if reached is not None:
        text += f", target after {reached['virtual_time']:.1f} s"
    elif summary["target"] is not None:
        text += ", target not reached"
    return f"{text} ({summary['updates']} updates, {summary['wall_time']:.0f} s)"


# -----------------------------------------------------------------------------
# A suite from start to end: checks, runs, tables and plots.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

RunAll = Callable[[Sequence[Job], int, Report], Mapping[Job, str]]
"""Runs jobs, so many at a time, and returns why they failed, for those that did."""


@dataclass(frozen=True)
class Plan:
    """A suite that was found to be possible.

    Attributes
    ----------
    suite : Suite
        The methods, settings and seeds.
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


def compare(
    plan: Plan,
    processes: int,
    console: Console,
    run_all: RunAll = run_jobs,
    formats: Sequence[str] = (),
) -> Comparison:
    """Run a suite, or the rest of it, and leave its tables and plots.

    Points of a sweep are tried on the first seed and judged by samples that are held out of its
    training samples; the most accurate one is then run on all seeds, as the other methods are.
    Finished runs are kept, and a killed one is resumed from its last checkpoint; it starts anew if
    it has none that can be used.

    Parameters
    ----------
    plan : Plan
        The runs and their folders.
    processes : int
        Number of runs at a time.
    console : Console
        The terminal or file that progress is printed to.
    run_all : Callable
        Runs them, by default in processes of this machine.
    formats : Sequence[str]
        Some of `FORMATS`, in which tables and plots are written, too.

    Raises
    ------
    UserError
        The folder cannot be written, or another comparison is at work in it.
    """
    make_folder(plan.out)
    with only_writer(plan.out):
        comparison = _compare(plan, processes, console, run_all)
        return replace(comparison, unwritten=write(comparison, plan.out, formats))


def _compare(plan: Plan, processes: int, console: Console, run_all: RunAll) -> Comparison:
    """Run a suite in a folder that no other comparison works in."""
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
    return Comparison(plan.suite, tuple(results), sweeps)


FORMATS = ("pdf", "svg", "tex")
"""What tables and plots are written as beside Markdown and PNG, if asked for."""


def checked_formats(names: Iterable[str]) -> list[str]:
    """Return names that a person gives, if all of them are in `FORMATS`.

    Raises
    ------
    UserError
        One is not.
    """
    written_as = [name.strip() for name in names if name.strip()]
    for name in written_as:
        if name not in FORMATS:
            raise unknown_name("format", name, FORMATS)
    return written_as


def write(comparison: Comparison, out: Path, formats: Sequence[str] = ()) -> dict[str, str]:
    """Write the tables and plots of a comparison; what fails holds nothing else up.

    Parameters
    ----------
    comparison : Comparison
        The results.
    out : Path
        The folder for the files.
    formats : Sequence[str]
        Some of `FORMATS`, in addition.

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
    if "tex" in formats:
        files |= {
            "compare.tex": table.to_latex(comparison),
            "purity.tex": table.to_latex(comparison, table.purity_table(comparison)),
            "time-to-target.tex": table.to_latex(comparison, table.times_table(comparison)),
        }
    for name, content in files.items():
        try:
            with atomic_write(out / name) as file:
                file.write_text(content, encoding="utf-8")
        except OSError as error:
            unwritten[name] = error.strerror or str(error)
    runs, missing = read_runs(out, comparison)
    for label in missing:
        log.warning("%s is not in the plots over time: its events cannot be read", label)
    drawn = {
        f"{plot}.{suffix}": draw
        for plot, draw in plots(comparison, runs).items()
        for suffix in ("png", *formats)
        if suffix != "tex"
    }
    for name, draw in drawn.items():
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
        # A process of a comparison that was killed may still write its checkpoint.
        with only_writer(job.folder, ORPHAN_SECONDS):
            pass
    for job in finished:
        progress.say(f"{job.name}: finished before, kept")
    for job in half:
        if job.can_resume:
            progress.resume(job)
        else:
            lost.append(job)
            progress.say(f"{job.name}: half-written, removed and done again")
    return lost
