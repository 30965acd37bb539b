"""What trackers are told at an evaluation: one number for each name."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from raceme.protocol.events import Evaluated, Event, UpdateApplied, UpdateRejected

_MOST_CLUSTERS = 50
"""A curve for each cluster is of use for as many as can be told apart."""


class Measurements:
    """Gathers from the events of a run what is told of it at each evaluation."""

    def __init__(self) -> None:
        self._staleness: list[int] = []
        self._losses: list[float] = []
        self._rejected = self._bytes_up = self._bytes_down = 0

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, UpdateApplied):
            self._staleness.append(event.staleness)
            self._losses.append(event.train_loss)
            self._bytes_up += event.bytes_up
            self._bytes_down += event.bytes_down
        elif isinstance(event, UpdateRejected):
            self._rejected += 1

    def of(self, event: Evaluated) -> dict[str, float]:
        """Return what is known at an evaluation; means of updates are over those since the last.

        Parameters
        ----------
        event : Evaluated
            The evaluation.

        Returns
        -------
        dict[str, float]
            Finite numbers by name: the accuracy or the error, its mean over each cluster's clients
            and over the worst tenth of all clients, the loss, and accounts of the updates. Bytes
            and rejections are counted from the start of the run.
        """
        name = event.measure.name
        found = {
            name: event.accuracy,
            f"weighted_{name}": event.weighted_accuracy,
            "loss": event.loss,
            "clusters": float(event.clusters),
            "clients_answered": float(event.answered),
            "rejected_updates": float(self._rejected),
            "bytes_up": float(self._bytes_up),
            "bytes_down": float(self._bytes_down),
            "virtual_time": event.time,
        }
        if event.per_client:
            scores = np.sort([accuracy for _, accuracy, _ in event.per_client.values()])
            tenth = max(1, len(scores) // 10)
            worst = scores[-tenth:] if event.measure.is_error else scores[:tenth]
            found[f"worst_tenth_{name}"] = float(np.mean(worst))
        if self._staleness:
            found["staleness"] = float(np.mean(self._staleness))
            found["train_loss"] = float(np.mean(self._losses))
            self._staleness, self._losses = [], []
        clusters = defaultdict[int, list[float]](list)
        for cluster, accuracy, _ in event.per_client.values():
            clusters[cluster].append(accuracy)
        if 1 < len(clusters) <= _MOST_CLUSTERS:
            for cluster, values in sorted(clusters.items()):
                found[f"cluster_{cluster}_{name}"] = float(np.mean(values))
        return {key: value for key, value in found.items() if math.isfinite(value)}


def final(summary: object) -> dict[str, float]:
    """Return the finite numbers of a run's summary by name; of nested ones those in the first."""
    if not isinstance(summary, dict):
        return {}
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
