"""Experiment trackers as observers of a run: ``track=tensorboard,mlflow``.

A tracker receives the run's parameters, evaluations and cluster changes, and at the end the summary
and files. A failure does not affect the run: the tracker is dropped with a log line and named at
the end.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import math
import os
import tempfile
import time as clock
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raceme.core.config import CONFIG, RunConfig
from raceme.core.errors import UserError, check_known, one_line
from raceme.core.events import (
    ClustersChanged,
    Evaluated,
    Event,
    EventHandler,
    UpdateApplied,
    change_line,
    is_news,
)
from raceme.core.installation import install_line
from raceme.core.options import Value
from raceme.records.folder import MLFLOW, SUMMARY, TENSORBOARD, WANDB_RUN
from raceme.records.summary import RunSummary

# -----------------------------------------------------------------------------
# Measurements for trackers at an evaluation: named numbers.
# -----------------------------------------------------------------------------


_MOST_CLUSTERS = 50
"""Maximum number of clusters with curves of their own."""


class Measurements(EventHandler):
    """Collects the numbers reported at each evaluation from a run's events.

    Parameters
    ----------
    summary : RunSummary
        The run's numbers so far, which must process events first.
    """

    def __init__(self, summary: RunSummary) -> None:
        self._summary = summary
        self._staleness: list[int] = []
        self._losses: list[float] = []

    def on_update_applied(self, event: UpdateApplied) -> None:
        """Record its staleness and loss."""
        self._staleness.append(event.staleness)
        self._losses.append(event.train_loss)

    def of(self, event: Evaluated) -> dict[str, float]:
        """Return the measurements at an evaluation; update means cover the time since the last.

        Parameters
        ----------
        event : Evaluated
            The evaluation to report.

        Returns
        -------
        dict[str, float]
            Finite numbers by name: the accuracy or the error, its mean over each cluster's clients
            and over the worst tenth of all clients, the loss, and update statistics. Bytes and
            rejections count from the start of the run.
        """
        name = event.measure.name
        found = {
            name: event.accuracy,
            f"weighted_{name}": event.weighted_accuracy,
            "loss": event.loss,
            "clusters": float(event.clusters),
            "clients_answered": float(event.answered),
            "rejected_updates": float(self._summary.rejected),
            "bytes_up": float(self._summary.traffic.total("up")),
            "bytes_down": float(self._summary.traffic.total("down")),
            "virtual_time": event.time,
        }
        if event.per_client:
            found[f"worst_tenth_{name}"] = event.worst_tenth
        if self._staleness:
            found["staleness"] = float(np.mean(self._staleness))
            found["train_loss"] = float(np.mean(self._losses))
            self._staleness, self._losses = [], []
        clusters = event.by_cluster
        if 1 < len(clusters) <= _MOST_CLUSTERS:
            for cluster, values in sorted(clusters.items()):
                found[f"cluster_{cluster}_{name}"] = float(np.mean(values))
        return {key: value for key, value in found.items() if math.isfinite(value)}


def final(summary: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of a run's summary by name."""
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


# -----------------------------------------------------------------------------
# The trackers.
# -----------------------------------------------------------------------------


class Tracker(ABC):
    """One tracker of one run; the step of each curve is the number of updates.

    Parameters
    ----------
    out : Path
        Folder of the run, with its artefacts.
    name : str
        Name of the run in the tracker.
    parameters : Mapping[str, Value]
        The keys of the run.
    resumed : int or None
        Updates before a resumption; None for a new run.
    """

    @abstractmethod
    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None: ...

    @abstractmethod
    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Record numbers at an update count and a time of the run in seconds."""

    @abstractmethod
    def note(self, text: str, updates: int) -> None:
        """Record a line on a change of the clusters."""

    @abstractmethod
    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Record the summary and files of a finished run."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Close the tracker; `failed` if the run ended by an error."""


# -----------------------------------------------------------------------------
# TensorBoard: scalars, texts and plots in the run's folder; ``tensorboard --logdir OUT``.
# -----------------------------------------------------------------------------


class TensorBoard(Tracker):
    """A run in TensorBoard; the step of each curve is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # After a resumption, repeated steps replace those of the lost process.
        purge = None if resumed is None else resumed + 1
        self._writer = SummaryWriter(str(out / TENSORBOARD), purge_step=purge)
        self._parameters = parameters
        if resumed is None:
            lines = "\n".join(f"    {key} = {value!r}" for key, value in parameters.items())
            self._writer.add_text("parameters", f"{name}\n\n{lines}", 0)

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Record measurements."""
        for name, value in measured.items():
            self._writer.add_scalar(_grouped(name), value, updates)

    def note(self, text: str, updates: int) -> None:
        """Record a line of text."""
        self._writer.add_text("clusters", text, updates)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Record the final numbers with the parameters, and the plots as images."""
        from PIL import Image

        updates = int(summary["updates"])
        for path in files:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(path.stem, pixels, updates, dataformats="HWC")
        numbers = {f"final/{name}": value for name, value in final(summary).items()}
        self._writer.add_hparams(dict(self._parameters), numbers, run_name="parameters")

    def close(self, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


def _grouped(name: str) -> str:
    """Return the name with its section: one for cluster curves, one for statistics."""
    if name.startswith("cluster_"):
        return f"clusters/{name}"
    kept = ("accuracy", "error", "loss")
    return f"result/{name}" if name.endswith(kept) else f"run/{name}"


# -----------------------------------------------------------------------------
# MLflow: a run of the experiment ``raceme`` at ``MLFLOW_TRACKING_URI``.
# -----------------------------------------------------------------------------


_EXPERIMENT = "raceme"
_LONGEST = 6000
"""MLflow refuses longer values of parameters."""
_AT_ONCE = 100
"""Maximum parameters per call of MLflow."""


class Mlflow(Tracker):
    """A run in MLflow; the step of each metric is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        # Trackers are extras, imported on demand.
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        kept = out / MLFLOW
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
        """Record measurements."""
        from mlflow.entities import Metric

        now = int(clock.time() * 1000)
        metrics = [Metric(name, value, now, updates) for name, value in measured.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def note(self, text: str, updates: int) -> None:
        """Record a line of text; the lines become one file."""
        self._notes.append(text)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Record the final numbers and the files."""
        numbers = {f"final_{name}": value for name, value in final(summary).items()}
        self.log(numbers, int(summary["updates"]), float(summary["virtual_time"]))
        if self._notes:
            self._client.log_text(self._run, "\n".join(self._notes) + "\n", "clusters.txt")
        for path in files:
            folder = "clusters" if path.parent.name == "clusters" else None
            self._client.log_artifact(self._run, str(path), folder)

    def close(self, failed: bool) -> None:
        """Record how the run ended."""
        from mlflow.entities import RunStatus

        status = RunStatus.FAILED if failed else RunStatus.FINISHED
        self._client.set_terminated(self._run, RunStatus.to_string(status))


@contextmanager
def _alone() -> Iterator[None]:
    """Lock out the user's other processes on this machine.

    MLflow creates a database's tables on first use, which fails when parallel runs of a comparison
    do so simultaneously.
    """
    path = Path(tempfile.gettempdir()) / f"raceme-mlflow-{os.getuid()}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _experiment(client: Any) -> str:
    """Return the experiment's id; create it if necessary."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    found = client.get_experiment_by_name(name)
    number: str = client.create_experiment(name) if found is None else found.experiment_id
    return number


# -----------------------------------------------------------------------------
# Weights & Biases: on disk unless ``WANDB_MODE`` is set; ``wandb sync`` uploads it.
# -----------------------------------------------------------------------------


class Wandb(Tracker):
    """A run in Weights & Biases; the step of each chart is the number of updates."""

    def __init__(
        self, out: Path, name: str, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        import wandb

        kept = out / WANDB_RUN
        known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raceme"),
            # Offline by default: nothing leaves the machine unasked.
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            dir=str(out),
            name=name,
            id=known if resumed is not None else None,
            resume="allow",
            config=dict(parameters),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
            reinit="create_new",
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._notes: list[str] = []

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Record measurements."""
        self._run.log(dict(measured), step=updates)

    def note(self, text: str, updates: int) -> None:
        """Record a line of text; the lines become one table."""
        self._notes.append(text)

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Record the final numbers, plots and files."""
        import wandb

        # accuracy.png must not overwrite the accuracy.
        plots = {
            f"plots/{path.stem}": wandb.Image(str(path)) for path in files if path.suffix == ".png"
        }
        table = wandb.Table(columns=["change"], data=[[note] for note in self._notes])
        self._run.log({**plots, "changes": table}, step=int(summary["updates"]))
        self._run.summary.update({f"final_{k}": value for k, value in final(summary).items()})
        artefact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in files:
            below = "clusters/" if path.parent.name == "clusters" else ""
            artefact.add_file(str(path), below + path.name)
        self._run.log_artifact(artefact)

    def close(self, failed: bool) -> None:
        """Record how the run ended, and flush."""
        self._run.finish(exit_code=int(failed))


# -----------------------------------------------------------------------------
# Experiment trackers as observers of a run: ``track=tensorboard,mlflow``.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.trackers")

TRACKERS: Mapping[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "mlflow": ("mlflow", Mlflow),
    "wandb": ("wandb", Wandb),
}
"""Trackers by name, as in the key ``track`` and the extra of that name: required module and
class."""


def chosen(track: str) -> list[str]:
    """Return the trackers that the key ``track`` names.

    Raises
    ------
    UserError
        There is no such tracker, or it is not installed.
    """
    names = [name.strip() for name in track.split(",") if name.strip()]
    for name in names:
        check_known("tracker", name, TRACKERS)
        try:
            importlib.import_module(TRACKERS[name][0])
        except ImportError as error:
            raise UserError(
                f"track={name} needs a package that is not installed ({error}): "
                f"{install_line(name)}"
            ) from None
    return list(dict.fromkeys(names))


def run_name(out: Path) -> str:
    """Return a run's name: its folder, or in a comparison method and seed."""
    return "/".join(out.parts[-2:]) if out.name.startswith("seed-") else out.name


class TrackerObserver(EventHandler):
    """A run's trackers, as observer and context manager.

    Parameters
    ----------
    config : RunConfig
        Configuration of the run; its keys choose the trackers.
    out : Path
        Folder of the run, with its artefacts.
    resumed : int or None
        Updates before a resumption; None for a new run.
    summary : RunSummary
        The run's numbers so far, which must process events first.
    """

    def __init__(
        self, config: RunConfig, out: Path, resumed: int | None, summary: RunSummary
    ) -> None:
        self.failures: dict[str, str] = {}
        self._trackers: dict[str, Tracker] = {}
        self._measurements = Measurements(summary)
        self._ended = False
        parameters = {name: value for name, value in config.to_mapping().items() if value != ""}
        for name in chosen(config.track):
            self._try(name, partial(self._open, name, out, parameters, resumed))

    def __enter__(self) -> TrackerObserver:
        return self

    def __exit__(self, *error: object) -> None:
        self._each(lambda tracker: tracker.close(failed=not self._ended))

    def replay(self, event: Event) -> None:
        """Process an event from before the resumption, which trackers have already."""
        self._measurements(event)

    def __call__(self, event: Event) -> None:
        """Report an evaluation, or a change of the clusters, to the trackers."""
        if self._trackers:
            self._measurements(event)
            super().__call__(event)

    def on_evaluated(self, event: Evaluated) -> None:
        """Report its numbers and those of the updates since the last."""
        measured = self._measurements.of(event)
        self._each(lambda tracker: tracker.log(measured, event.updates, event.time))

    def on_clusters_changed(self, event: ClustersChanged) -> None:
        """Report a split, a merge or the like in a line of text."""
        if is_news(event):
            line = change_line(event)
            self._each(lambda tracker: tracker.note(line, event.updates))

    def end(self, summary: Mapping[str, Any], out: Path) -> None:
        """Report the summary and artefacts of a run."""
        files = [
            path
            for pattern in (SUMMARY, CONFIG, "*.png", "clusters/*.safetensors")
            for path in sorted(out.glob(pattern))
        ]
        self._each(lambda tracker: tracker.end(summary, files))
        self._ended = True

    def _open(
        self, name: str, out: Path, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        kind = TRACKERS[name][1]
        self._trackers[name] = kind(out, run_name(out), parameters, resumed)

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(tell, tracker))

    def _try(self, name: str, act: Callable[[], None]) -> None:
        """Call a tracker; drop it on failure."""
        try:
            act()
        # External code, disks and networks can raise anything.
        except Exception as error:
            self._trackers.pop(name, None)
            reason = one_line(error) or type(error).__name__
            self.failures[f"track={name}"] = reason
            log.warning("The tracker %s failed and was dropped: %s", name, reason)
