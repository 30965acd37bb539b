"""Runs of a comparison in the test's process, which saves the imports of new processes."""

from __future__ import annotations

from collections.abc import Sequence

from raceme.experiments.jobs import Job, Report
from raceme.runs.experiment import simulate


def run_all(jobs: Sequence[Job], processes: int, report: Report) -> dict[Job, str]:
    """Run jobs one after another, as `run_jobs` does in processes."""
    for job in jobs:
        simulate(job.config)
    return {}
