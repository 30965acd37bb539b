"""Experiment trackers that people use, as observers of a run: ``track=tensorboard,mlflow``.

A tracker is told the run's parameters, what each evaluation found, what became of the clusters,
and at the end the summary and the files. It never decides whether a run goes on: one that fails is
left behind, with a line in the log, and named at the end.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from raceme.config import RunConfig, Value
from raceme.config.errors import UserError, unknown_name
from raceme.protocol.events import ClustersChanged, Evaluated, Event
from raceme.records.words import change_line, is_news
from raceme.tracking.measurements import Measurements

log = logging.getLogger("raceme")

TRACKERS = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
"""Name of each tracker, as in the key ``track`` and the extra of the same name, to its module."""


class Tracker(Protocol):
    """One tracker of one run."""

    def log(self, measured: Mapping[str, float], updates: int, time: float) -> None:
        """Take what was measured after so many updates, at a time of the run in seconds."""

    def note(self, text: str, updates: int) -> None:
        """Take a line on what became of the clusters."""

    def end(self, summary: Mapping[str, Any], files: list[Path]) -> None:
        """Take the summary and the files of a run that has ended."""

    def close(self, failed: bool) -> None:
        """Let go of the tracker; `failed` if the run has ended by an error."""


def chosen(track: str) -> list[str]:
    """Return the trackers that the key ``track`` names.

    Raises
    ------
    UserError
        There is no such tracker, or it is not installed.
    """
    names = [name.strip() for name in track.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS)
        try:
            importlib.import_module(TRACKERS[name])
        except ImportError as error:
            raise UserError(
                f"track={name} needs a package that is not here ({error}): "
                f"pip install 'raceme[{name}]'"
            ) from None
    return list(dict.fromkeys(names))


def run_name(out: Path) -> str:
    """Return what a run is called: its folder; in a comparison the method's and the seed's."""
    return "/".join(out.parts[-2:]) if out.name.startswith("seed-") else out.name


class Tracking:
    """The trackers of a run: an observer of it, and a context manager around it.

    Parameters
    ----------
    config : RunConfig
        A resolved configuration.
    out : Path
        The run's folder.
    resumed : int or None
        Updates that a resumed run goes on from; None for a new run.
    """

    def __init__(self, config: RunConfig, out: Path, resumed: int | None) -> None:
        self.failures: dict[str, str] = {}
        self._trackers: dict[str, Tracker] = {}
        self._measurements = Measurements()
        self._ended = False
        parameters = {name: value for name, value in config.to_mapping().items() if value != ""}
        for name in chosen(config.track):
            self._try(name, lambda name=name: self._open(name, out, parameters, resumed))  # type: ignore[misc]

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._each(lambda tracker: tracker.close(failed=not self._ended))

    def recall(self, event: Event) -> None:
        """Take note of an event from before the run was resumed: trackers know it already."""
        self._measurements.observe(event)

    def observe(self, event: Event) -> None:
        """Tell the trackers what is worth telling."""
        if not self._trackers:
            return
        self._measurements.observe(event)
        if isinstance(event, Evaluated):
            measured = self._measurements.of(event)
            self._each(lambda tracker: tracker.log(measured, event.updates, event.time))
        elif isinstance(event, ClustersChanged) and is_news(event):
            line = change_line(event)
            self._each(lambda tracker: tracker.note(line, event.updates))

    def end(self, summary: Mapping[str, Any], out: Path) -> None:
        """Hand over what a run has left."""
        files = [
            path
            for pattern in ("summary.json", "config.toml", "*.png", "clusters/*.safetensors")
            for path in sorted(out.glob(pattern))
        ]
        self._each(lambda tracker: tracker.end(summary, files))
        self._ended = True

    def _open(
        self, name: str, out: Path, parameters: Mapping[str, Value], resumed: int | None
    ) -> None:
        module = importlib.import_module(f"raceme.tracking.{name}")
        self._trackers[name] = module.open_tracker(out, run_name(out), parameters, resumed)

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: tell(tracker))  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None]) -> None:
        """Do something with a tracker; leave it behind if it fails."""
        try:
            act()
        # Another project's code, a disk or a network: what it raises is not known beforehand.
        except Exception as error:
            self._trackers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            self.failures[f"track={name}"] = reason
            log.warning("The tracker %s is left behind: %s", name, reason)
