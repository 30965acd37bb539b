"""The map during a run: sketches of clients' changes, and snapshots at evaluations."""

from __future__ import annotations

from pathlib import Path

from raceme.core.events import Evaluated, Event, Observer, RunEnded
from raceme.core.feature import Feature, FeatureContext
from raceme.core.messages import TRAINING
from raceme.core.requests import InFlight, Update
from raceme.features.client_map import Options
from raceme.features.client_map.positions import PositionsFile, positions_of_rows
from raceme.features.client_map.sketches import ClientEmbedding, Sketch


class ClientMap(Feature):
    """Writes the positions of clients, by similarity of their models, at most evaluations.

    The map works with every method, also one that does not compare clients, and does not affect the
    run.
    """

    options_type = Options
    switch = "client_map"
    _file: PositionsFile | None = None
    _drawn: tuple[ClientEmbedding, FeatureContext] | None = None
    _is_missing = False

    def observer(self, folder: Path, resumed_at: float | None) -> Observer:
        """Write into the folder of a run."""
        self._file = PositionsFile(folder, resumed_at)
        return self._observe

    def on_sent(self, task: InFlight, context: FeatureContext) -> None:
        """Keep a sketch of the model that a client starts from."""
        if self._file is None or task.kind not in TRAINING:
            return
        if self._drawn is None:
            sketch = Sketch(sum(context.spec.sizes), context.spec.trainable)
            self._drawn = ClientEmbedding(sketch), context
        embedding, clusters = self._drawn[0], context.clusters
        if embedding.wants(task.client):
            sent = dict.fromkeys(task.candidates, 1.0) or clusters.of(task.client)
            embedding.send(task.number, clusters.models, sent, bool(task.candidates))

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Sketch the change of a client's model."""
        if self._drawn is not None:
            task = update.task
            self._drawn[0].take(task.number, task.client, task.cluster, update.vector)
        return update

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Drop the sketch of a task."""
        if self._drawn is not None:
            self._drawn[0].close(task.number)

    def _observe(self, event: Event) -> None:
        """Write a snapshot at an evaluation, unless the last one is recent, and at the end."""
        assert self._file is not None, "it is made with the observer"
        if isinstance(event, Evaluated):
            self._is_missing = not self._file.wants(event.updates)
            if not self._is_missing:
                self._write(event, self._file)
        elif isinstance(event, RunEnded):
            if self._is_missing:
                self._write(event, self._file)
            self._file.restore_dropped(event.updates)

    def _write(self, event: Evaluated | RunEnded, file: PositionsFile) -> None:
        if self._drawn is None:
            return
        embedding, context = self._drawn
        clusters, is_last = context.clusters, isinstance(event, RunEnded)
        clients, rows = embedding.relative_to_mean(clusters.models, clusters.of)
        if len(clients) > 2:
            file.write(event.time, clients, positions_of_rows(rows), event.updates, is_last)
