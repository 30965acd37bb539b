"""MLflow: a run of the experiment ``raceme``, where ``MLFLOW_TRACKING_URI`` says."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time as clock
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus

from raceme.config import Value
from raceme.tracking.measurements import final

RUN_FILE = "mlflow-run.txt"
"""In the run's folder: which run of MLflow it is, for the time after a resumption."""

_EXPERIMENT = "raceme"
_LONGEST = 6000
"""MLflow refuses longer values of parameters."""
_AT_ONCE = 100
"""Parameters that MLflow takes in one call."""


class Mlflow:
    """A run in MLflow; the step of each metric is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        kept = out / RUN_FILE
        self._notes: list[str] = []
        with _alone():
            self._client = MlflowClient()
            if resumed is not None and kept.is_file():
                self._run = kept.read_text(encoding="utf-8").strip()
                self._client.update_run(self._run, status=RunStatus.to_string(RunStatus.RUNNING))
                return
            number = _experiment(self._client)
        tags = {"raceme.folder": str(out)}
        self._run = self._client.create_run(number, run_name=name, tags=tags).info.run_id
        kept.write_text(f"{self._run}\n", encoding="utf-8")
        listed = [Param(key, str(value)[:_LONGEST]) for key, value in parameters.items()]
        for start in range(0, len(listed), _AT_ONCE):
            self._client.log_batch(self._run, params=listed[start : start + _AT_ONCE])

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Take what was measured."""
        now = int(clock.time() * 1000)
        metrics = [Metric(name, value, now, updates) for name, value in measured.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def note(self, text: str, updates: int) -> None:
        """Take a line of text; they are one file at the end."""
        self._notes.append(text)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Take the final numbers and the files."""
        numbers = {f"final_{name}": value for name, value in final(summary).items()}
        self.log(numbers, int(summary["updates"]), float(summary["virtual_time"]))
        if self._notes:
            self._client.log_text(self._run, "\n".join(self._notes) + "\n", "clusters.txt")
        for path in files:
            folder = "clusters" if path.parent.name == "clusters" else None
            self._client.log_artifact(self._run, str(path), folder)

    def close(self, failed: bool) -> None:
        """Say how the run has ended."""
        status = RunStatus.FAILED if failed else RunStatus.FINISHED
        self._client.set_terminated(self._run, RunStatus.to_string(status))


@contextmanager
def _alone() -> Iterator[None]:
    """Keep the user's other processes on this machine out.

    MLflow makes the tables of a new database when it is first asked for something, and two that do
    so at once fail: a comparison starts several runs.
    """
    path = Path(tempfile.gettempdir()) / f"raceme-mlflow-{os.getuid()}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _experiment(client: MlflowClient) -> str:
    """Return the number of the experiment, which is made if there is none."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    found = client.get_experiment_by_name(name)
    number: str = client.create_experiment(name) if found is None else found.experiment_id
    return number


def open_tracker(
    out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
) -> Mlflow:
    """Return the tracker of a run."""
    return Mlflow(out, name, parameters, resumed)
