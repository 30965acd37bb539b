"""The map of the clients while a run goes on: snapshots with its evaluations."""

from __future__ import annotations

from pathlib import Path

from raceme.clustering.pulls import Pulls, Sketch
from raceme.protocol.events import Evaluated, Event, RunEnded
from raceme.protocol.messages import ModelSpec
from raceme.records.likeness import positions_of_rows
from raceme.records.positions import PositionsFile
from raceme.server.interface import Questions


class ClientMap:
    """An observer of a run that writes where the clients lie, by how alike their models are.

    Every method has one, also those that compare no clients. It changes nothing of the run.

    Parameters
    ----------
    method : Questions
        Whose clients.
    spec : ModelSpec
        Of its models.
    folder : Path
        The folder of the run.
    after : float, optional
        The run resumes at this time.
    """

    def __init__(
        self, method: Questions, spec: ModelSpec, folder: Path, after: float | None = None
    ) -> None:
        self._method, self._file = method, PositionsFile(folder, after)
        self._is_missing = False
        self._pulls = method.pulls = Pulls(Sketch(sum(spec.sizes), spec.trainable))

    def observe(self, event: Event) -> None:
        """Write a snapshot with most evaluations, and at the end; other events are none of its."""
        if isinstance(event, Evaluated):
            self._is_missing = not self._file.wants(event.updates)
            if not self._is_missing:
                self._write(event)
        elif isinstance(event, RunEnded) and self._is_missing:
            self._write(event)

    def _write(self, event: Evaluated | RunEnded) -> None:
        method, is_last = self._method, isinstance(event, RunEnded)
        clients, rows = self._pulls.seen_from_the_mean(method.models, method.placement)
        if len(clients) > 2:
            points = positions_of_rows(rows)
            self._file.write(event.time, clients, points, event.updates, is_last)
