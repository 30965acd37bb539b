"""Tests on the data of several steps, under way: whom was asked what, and what was answered."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from raceme.protocol.events import TaskScore, TasksTested
from raceme.protocol.measure import ACCURACY, Measure


@dataclass
class TaskSweep:
    """Tests on the data of several steps, under way.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        The moment of the models, updates applied by then, and how many models there were.
    ahead : bool
        Whether the step after the last one is tested too.
    last : dict[str, int]
        Each client that is asked to the step that its models were trained on last.
    waiting : dict[str, int]
        Those of them that have not been asked yet.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    placed : dict[str, list[int]]
        Main cluster of the model that a client tests on each step, from step 0 on.
    scores : dict[str, list[float]]
        What the clients have answered, in the same order, with the untrained model's score on the
        last step behind it; NaN where a client could not test.
    units : dict[str, str or None]
        Unit of each client's scores; None for accuracies.
    """

    time: float
    updates: int
    clusters: int
    ahead: bool
    last: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    placed: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str | None] = field(default_factory=dict)

    def reports(self) -> Iterator[TasksTested]:
        """Make the reports of those who have answered: one for each step that was the last."""
        if not self.units:
            return
        # Accuracies and errors have no mean: what most of the clients have measured counts.
        unit, _ = Counter(self.units.values()).most_common(1)[0]
        together: defaultdict[int, list[str]] = defaultdict(list)
        for client, step in self.last.items():
            together[step].append(client)
        for step, clients in sorted(together.items()):
            alike = [c for c in clients if c in self.units and self.units[c] == unit]
            found = {client: self._of(client) for client in alike}
            if any(found.values()):
                yield TasksTested(
                    time=self.time,
                    updates=self.updates,
                    step=step,
                    clusters=self.clusters,
                    per_client={client: of for client, of in found.items() if of},
                    asked=len(clients),
                    measure=ACCURACY if unit is None else Measure(unit),
                )

    def _of(self, client: str) -> dict[int, TaskScore]:
        """Return a client's scores by step."""
        placed, (*scores, untrained) = self.placed[client], self.scores[client]
        found = {
            step: TaskScore(cluster, score)
            for step, (cluster, score) in enumerate(zip(placed, scores, strict=True))
            if not math.isnan(score)
        }
        ahead = len(placed) - 1
        if self.ahead and ahead in found and not math.isnan(untrained):
            found[ahead] = TaskScore(found[ahead].cluster, found[ahead].accuracy, untrained)
        return found
