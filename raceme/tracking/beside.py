"""What a run tells others beside its store: trackers, and the file with a line per event."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from raceme.config import RunConfig
from raceme.protocol.events import Event
from raceme.records import trace
from raceme.records.trace import Communication, TraceFile
from raceme.tracking import Tracking


class Beside:
    """The trackers and the trace of a run, if it has any; a context manager around the run.

    Parameters
    ----------
    config : RunConfig
        A resolved configuration.
    out : Path
        The run's folder.
    communication : Communication, optional
        How long transfers take, where that is known beforehand.
    """

    def __init__(
        self, config: RunConfig, out: Path, communication: Communication | None = None
    ) -> None:
        self._config, self._out, self._communication = config, out, communication
        self._open = ExitStack()
        self._trace: TraceFile | None = None
        self._tracking: Tracking | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    @property
    def failures(self) -> dict[str, str]:
        """Who was left behind, and why."""
        failed = dict(self._tracking.failures) if self._tracking else {}
        if self._trace is not None and self._trace.failure:
            failed[trace.FILE] = self._trace.failure
        return failed

    def begin(self, events: int = 0, updates: int | None = None) -> None:
        """Open what the configuration asks for.

        Parameters
        ----------
        events, updates : int, int or None
            Of a resumed run: how many events it goes on from, and how many updates.

        Raises
        ------
        UserError
            The trace cannot be written.
        """
        if self._config.trace:
            file = TraceFile(self._out, self._communication, events)
            self._trace = self._open.enter_context(file)
        if self._config.track:
            self._tracking = self._open.enter_context(Tracking(self._config, self._out, updates))

    def recall(self, event: Event) -> None:
        """Take note of an event from before a run was resumed."""
        if self._tracking is not None:
            self._tracking.recall(event)

    def observe(self, event: Event) -> None:
        """Tell of an event."""
        if self._trace is not None:
            self._trace.observe(event)
        if self._tracking is not None:
            self._tracking.observe(event)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Hand over what a run that has ended has left."""
        if self._tracking is not None:
            self._tracking.end(summary, self._out)
