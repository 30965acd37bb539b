"""Execution of a suite: checks, runs, tables and plots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from raceme.core.errors import check_known, one_line, plural
from raceme.core.events import Measure
from raceme.core.files import absolute, atomic_write
from raceme.experiments import tables as table
from raceme.experiments.jobs import (
    ORPHAN_SECONDS,
    Finished,
    Job,
    JobProgress,
    Report,
    check,
    check_own,
    make_jobs,
    run_jobs,
    survey,
)
from raceme.experiments.page import plots
from raceme.experiments.results import Comparison, best_of, gather, read_runs
from raceme.experiments.suites import Suite, slug, words
from raceme.records.folder import COMPARISON, make_folder, only_writer, remove_run
from raceme.reporting.console import QUIET_SECONDS, LiveBars, shown_seconds, shown_updates
from raceme.reporting.style import save_figure

# -----------------------------------------------------------------------------
# The progress of a comparison, on a terminal or in a log.
# -----------------------------------------------------------------------------


_ENOUGH = 0.05
"""Minimum share of a run before its remaining time is estimated."""


class SuiteProgress:
    """Shows the progress of a suite; a context manager.

    On a terminal and in a notebook it is one line for the suite and one for each active run. Every
    run that ends leaves a plain line. Elsewhere, after ten seconds without output, a line states
    the progress.

    Parameters
    ----------
    total : int
        Number of runs of the suite.
    done : int
        Number of finished runs.
    console : Console
        The terminal or file to print to.
    clock : Callable
        Returns the wall time in seconds.
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
        self._under_way: dict[Job, JobProgress | None] = {}
        # Runs kept from an earlier comparison do not count for the pace.
        self._kept, self._started = done, clock()
        self._total, self._done = total, done
        # Earlier progress of resumed runs, known at their first report, does not count, either.
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
        # A notebook keeps the line of the suite, which must not look active after an interruption.
        for line in self._lines.values():
            self._bars.remove_task(line)
        self._bars.update(self._suite, state="")
        self._bars.stop()

    def add(self, total: int, done: int) -> None:
        """Add runs unknown at the start, e.g. further seeds of a sweep's best point."""
        self._total += total
        self._done += done
        self._kept += done
        self._bars.update(self._suite, total=self._total, completed=self._done)

    def resume(self, job: Job) -> None:
        """Record that a run resumes from a checkpoint."""
        self._resumed.add(job)
        self.print_line(f"{job.name}: unfinished, resumed from its last checkpoint")

    def report(self, job: Job, news: JobProgress | Finished | None) -> None:
        """Show the start, progress or end of a run."""
        if news is None:
            self._under_way[job] = None
            self._lines[job] = self._bars.add_task(job.name, total=_done(job)[1], state="starting")
        elif isinstance(news, JobProgress):
            score = f", {news.score}" if news.score else ""
            state = f"t = {news.time:.0f} s{score}"
            self._under_way[job] = news
            if job in self._resumed:
                self._resumed.remove(job)
                self._before += _share(job, news)
            done, total = _done(job, news)
            # Rounds may have more updates than expected.
            self._bars.update(self._lines[job], completed=done, total=max(done, total), state=state)
            self._bars.update(self._suite, state=self._left())
        else:
            del self._under_way[job]
            self._bars.remove_task(self._lines.pop(job))
            self._done += 1
            self._bars.update(self._suite, completed=self._done, state=self._left())
            self.print_line(f"[{self._done}/{self._total}] {job.name}: {_ending(job, news)}")
        self._bars.refresh()
        if not self._bars.shown and self._clock() - self._printed_at >= QUIET_SECONDS:
            self.print_line(self._progress_line())

    def print_line(self, line: str) -> None:
        """Print a line above the live lines."""
        self._printed_at = self._clock()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _progress_line(self) -> str:
        """Describe the active runs in one line."""
        each = [
            f"{job.name}: {_progress_of(job, news)}" if news else f"{job.name}: starting"
            for job, news in self._under_way.items()
        ]
        left = self._left()
        return "; ".join(
            [f"{self._done}/{self._total} runs finished", *each, *filter(None, [left])]
        )

    def _left(self) -> str:
        """Return the estimated remaining time; active runs count by their updates.

        Empty while a run has more updates than expected, as the rest is unknown.
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


def _share(job: Job, news: JobProgress | None) -> float:
    """Return the finished share of a run, above 1 with more updates than expected."""
    done, total = _done(job, news)
    return done / total if total else 0.0


def _done(job: Job, news: JobProgress | None = None) -> tuple[float, float]:
    """Return the progress and the total: updates, or seconds if updates are not limited.

    The total is 0 if it is unknown, because computation alone limits the run.
    """
    config = job.config
    if not config.expected_updates and config.max_time:
        return (news.time if news else 0.0), config.max_time
    return (news.updates if news else 0), config.expected_updates


def _progress_of(job: Job, news: JobProgress) -> str:
    """Describe the progress of a run: ``"30 of 100 updates"``, ``"30 updates, 4 of 20 s"``."""
    config = job.config
    text = shown_updates(news.updates, config.expected_updates)
    if not config.expected_updates and config.max_time:
        text += f", {news.time:.0f} of {config.max_time:g} s"
    return text


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
    return f"{text} ({plural(summary['updates'], 'update')}, {summary['wall_time']:.0f} s)"


# -----------------------------------------------------------------------------
# Execution of a suite: checks, runs, tables and plots.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

RunAll = Callable[[Sequence[Job], int, Report], Mapping[Job, str]]
"""Runs jobs with a number of processes, and returns the reasons of failed ones."""


@dataclass(frozen=True)
class SuitePlan:
    """A checked suite.

    Attributes
    ----------
    suite : Suite
        The methods, settings and seeds.
    out : Path
        Output folder; a run is in ``<method>/seed-<seed>`` below it.
    plain : tuple[Job, ...]
        Fixed runs: every method without a sweep, with every seed.
    trials : tuple[Job, ...]
        Every point of every sweep with the first seed, tested on held-out training samples.
    further : tuple[Job, ...]
        Runs of these points with every seed; only each method's best point is run.
    """

    suite: Suite
    out: Path
    plain: tuple[Job, ...]
    trials: tuple[Job, ...]
    further: tuple[Job, ...]

    @property
    def every(self) -> tuple[Job, ...]:
        """All possible runs."""
        return (*self.plain, *self.trials, *self.further)


def prepare(suite: Suite, out: Path) -> SuitePlan:
    """Check that a suite can run in a folder, without writing or removing anything.

    Raises
    ------
    UserError
        A run is impossible, or the folder holds other results.
    """
    out = absolute(out)
    plain = [method.variants()[0] for method in suite.methods if not method.is_swept]
    points = [point for method in suite.methods if method.is_swept for point in method.variants()]
    every = make_jobs(suite, plain, suite.seeds, out)
    trials = make_jobs(suite, points, suite.seeds[:1], out, trial=True)
    further = make_jobs(suite, points, suite.seeds, out)
    plan = SuitePlan(suite, out, tuple(every), tuple(trials), tuple(further))
    check_own(out, {slug(method.label) for method in suite.methods})
    check(plan.every)
    survey(plan.every)
    return plan


def compare(
    plan: SuitePlan,
    processes: int,
    console: Console,
    run_all: RunAll = run_jobs,
    formats: Sequence[str] = (),
) -> Comparison:
    """Run a suite, or the rest of it, and write its tables and plots.

    Points of a sweep run on the first seed and are tested on held-out training samples; the most
    accurate one then runs on all seeds, like other methods. Finished runs are kept; a killed one
    resumes from its last checkpoint, or restarts without a usable one.

    Parameters
    ----------
    plan : SuitePlan
        The runs and their folders.
    processes : int
        Number of runs at a time.
    console : Console
        Terminal or file for progress.
    run_all : Callable
        Executes the runs, by default in processes of this machine.
    formats : Sequence[str]
        Additional formats of tables and plots, of `FORMATS`.

    Raises
    ------
    UserError
        The folder is not writable, or another comparison uses it.
    """
    make_folder(plan.out)
    with only_writer(plan.out):
        comparison = _compare(plan, processes, console, run_all)
        return replace(comparison, unwritten=write(comparison, plan.out, formats))


def _compare(plan: SuitePlan, processes: int, console: Console, run_all: RunAll) -> Comparison:
    """Run a suite in a locked folder."""
    # Another comparison may have finished some runs since the preparation.
    finished, half = survey(plan.every)
    done, compared = set(finished), (plan.suite.timing, plan.suite.score)
    certain = [*plan.plain, *plan.trials]
    with SuiteProgress(len(certain), len(done & set(certain)), console) as progress:
        lost = _report_resumed(progress, finished, half)
        for job in lost:
            remove_run(job.folder, ORPHAN_SECONDS, ", or choose another folder with --out")

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
"""Optional formats of tables and plots besides Markdown and PNG."""


def checked_formats(names: str | Iterable[str]) -> list[str]:
    """Return names of formats after checking that they are in `FORMATS`.

    Raises
    ------
    UserError
        A name is unknown.
    """
    written_as = words(names)
    for name in written_as:
        check_known("format", name, FORMATS)
    return written_as


def write(comparison: Comparison, out: Path, formats: Sequence[str] = ()) -> dict[str, str]:
    """Write the tables and plots of a comparison; a failure does not affect the others.

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
        Files that could not be written, with reasons.
    """
    unwritten: dict[str, str] = {}
    main, costs = table.main_table(comparison), table.costs_table(comparison)
    texts = [main, costs, table.sweep_table(comparison)]
    files = {
        COMPARISON: table.to_json(comparison),
        "compare.csv": table.to_csv(comparison),
        "compare.md": "\n".join(text.markdown() for text in texts if text is not None),
    }
    if "tex" in formats:
        files |= {
            "compare.tex": table.to_latex(comparison),
            "compare-table.tex": table.latex_table(comparison),
            "costs.tex": table.to_latex(comparison, costs),
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
            unwritten[name] = one_line(error) or type(error).__name__
    return unwritten


def _report_resumed(
    progress: SuiteProgress, finished: Sequence[Job], half: Sequence[Job]
) -> list[Job]:
    """Report the state of earlier runs; return those that restart."""
    lost = []
    for job in half:
        # A process of a killed comparison may still write its checkpoint.
        with only_writer(job.folder, ORPHAN_SECONDS):
            pass
    for job in finished:
        progress.print_line(f"{job.name}: already finished, kept")
    for job in half:
        if job.can_resume:
            progress.resume(job)
        else:
            lost.append(job)
            progress.print_line(f"{job.name}: half-written, removed and repeated")
    return lost
