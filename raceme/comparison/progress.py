"""What a person sees while a comparison runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from raceme.comparison.jobs import Job
from raceme.comparison.worker import Finished, Progress
from raceme.protocol.measure import Measure
from raceme.reporting.console import QUIET_SECONDS, shown_seconds, shown_updates

_ENOUGH = 0.05
"""Share of a run that must be done before anything is said of how long the rest takes."""


class SuiteProgress:
    """Shows the progress of a suite; a context manager.

    On a terminal it is one line for the suite and one for each run under way. Every run that
    ends leaves a plain line, on a terminal and elsewhere; elsewhere a line says how far they are
    whenever there was nothing to print for ten seconds.

    Parameters
    ----------
    total : int
        Runs of the suite.
    done : int
        Of them, those that are finished already.
    console : Console
        Where to print.
    clock : Callable
        Seconds of real time.
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
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._suite = self._bars.add_task("runs", total=total, completed=done, state="")

    def __enter__(self) -> SuiteProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            self._bars.update(self._suite, completed=self._done)
            self.say(f"[{self._done}/{self._total}] {job.name}: {_ending(job, news)}")
        if self._bars.disable and self._clock() - self._printed_at >= QUIET_SECONDS:
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

        Nothing is said while one has more of them than were expected: who knows how many come.
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
