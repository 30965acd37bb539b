"""The progress of a comparison in output that is not a terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from raceme.experiments.compare import SuiteProgress
from raceme.experiments.jobs import Finished, Job, JobProgress, make_jobs
from raceme.experiments.suites import of_names


def test_a_line_is_printed_after_ten_quiet_seconds(tmp_path: Path) -> None:
    suite = of_names(["casa", "fedasync"], {"max-updates": 100})
    casa, fedasync = make_jobs(suite, suite.methods, (0,), tmp_path)
    out, now = StringIO(), 0.0
    with SuiteProgress(3, 1, Console(file=out, width=200), clock=lambda: now) as progress:

        def report(moment: float, job: Job, news: JobProgress | Finished | None) -> None:
            nonlocal now
            now = moment
            progress.report(job, news)

        report(0.0, casa, None)
        report(0.0, fedasync, None)
        # So early no remaining time is estimated.
        report(10.0, casa, JobProgress(4, 1.0, ""))
        report(19.0, casa, JobProgress(20, 2.0, ""))
        # After 25 s 0.2 + 0.3 of the two runs are done, and 1.5 are left.
        report(25.0, fedasync, JobProgress(30, 3.0, ""))
        # A failure is printed, which restarts the interval of ten seconds.
        report(30.0, fedasync, Finished(None))
        report(39.0, casa, JobProgress(50, 4.0, ""))
        report(40.0, casa, JobProgress(60, 4.0, ""))
        report(50.0, casa, JobProgress(104, 5.0, ""))
    assert out.getvalue().splitlines() == [
        "1/3 runs finished; casa, seed 0: 4 of 100 updates; fedasync, seed 0: starting",
        "1/3 runs finished; casa, seed 0: 20 of 100 updates; fedasync, seed 0: 30 of 100 updates; "
        "about 75 s left",
        "[2/3] fedasync, seed 0: FAILED: it left no summary",
        # After 40 s 1 + 0.6 of the two runs are done.
        "2/3 runs finished; casa, seed 0: 60 of 100 updates; about 10 s left",
        # A run in rounds may exceed the expected number of updates; then no estimate is printed.
        "2/3 runs finished; casa, seed 0: 104 updates",
    ]


def test_runs_of_a_budget_of_time_are_measured_by_it(tmp_path: Path) -> None:
    suite = of_names(["casa", "fedasync"], {"max-updates": 0, "max-time": 20.0})
    casa, fedasync = make_jobs(suite, suite.methods, (0,), tmp_path)
    out, now = StringIO(), 0.0
    with SuiteProgress(2, 0, Console(file=out, width=200), clock=lambda: now) as progress:
        progress.report(casa, None)
        progress.report(fedasync, None)
        now = 15.0
        progress.report(casa, JobProgress(590, 5.0, ""))
        now = 30.0
        progress.report(fedasync, JobProgress(1, 5.0, ""))
    assert out.getvalue().splitlines() == [
        "0/2 runs finished; casa, seed 0: 590 updates, 5 of 20 s; fedasync, seed 0: starting; "
        "about 2 min left",
        # After 30 s two quarters of a run are done.
        "0/2 runs finished; casa, seed 0: 590 updates, 5 of 20 s; "
        "fedasync, seed 0: 1 update, 5 of 20 s; about 90 s left",
    ]


def test_the_time_left_of_a_resumed_run_ignores_its_earlier_part(tmp_path: Path) -> None:
    suite = of_names(["casa", "fedasync"], {"max-updates": 100})
    casa, _ = make_jobs(suite, suite.methods, (0,), tmp_path)
    out, now = StringIO(), 0.0
    with SuiteProgress(2, 0, Console(file=out, width=200), clock=lambda: now) as progress:
        progress.resume(casa)
        progress.report(casa, None)
        for moment, updates in ((1.0, 70), (10.0, 72), (20.0, 80)):
            now = moment
            progress.report(casa, JobProgress(updates, 1.0, ""))
    assert out.getvalue().splitlines() == [
        "casa, seed 0: unfinished, resumed from its last checkpoint",
        "0/2 runs finished; casa, seed 0: 72 of 100 updates",
        # In 20 s 0.1 of a run was done, and 1.2 are left.
        "0/2 runs finished; casa, seed 0: 80 of 100 updates; about 4 min left",
    ]
