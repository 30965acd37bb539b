"""What a run has forgotten of former tasks, and what it knew of coming ones.

A task is a step of the data that change. R[t, j] is the accuracy on the test data of step j after
step t, the mean over the clients that tested it. The numbers that follow from it are those of
Lopez-Paz and Ranzato, *Gradient Episodic Memory for Continual Learning*, NeurIPS 2017 (average
accuracy, backward and forward transfer), and of Chaudhry et al., *Riemannian Walk for Incremental
Learning*, ECCV 2018 (forgetting). T is the last step, counted from 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.events import TaskScore, TasksTested
from raceme.protocol.measure import ACCURACY, Measure

Floats = NDArray[np.float64]


class TaskAccuracies:
    """The matrix R of a run and what follows from it, an observer of tests on all steps.

    What a client tells of a step again, e.g. at the end of a run that was made longer, replaces
    what it has told before.

    Attributes
    ----------
    measure : Measure
        What the accuracies are; of errors every sign is turned, so that forgetting is always bad
        and transfer always good if positive.
    """

    def __init__(self, events: Iterable[TasksTested] = ()) -> None:
        self.measure: Measure = ACCURACY
        self._scores: defaultdict[int, dict[str, dict[int, TaskScore]]] = defaultdict(dict)
        self._clusters: dict[int, int] = {}
        for event in events:
            self.observe(event)

    def observe(self, event: TasksTested) -> None:
        """Take note of tests."""
        self.measure = event.measure
        self._clusters[event.step] = event.clusters
        self._scores[event.step].update(
            {client: dict(scores) for client, scores in event.per_client.items()}
        )

    @property
    def count(self) -> int:
        """Number of steps that models were trained on, T + 1; 0 if nothing was tested."""
        return max(self._scores, default=-1) + 1

    @property
    def clusters(self) -> list[int | None]:
        """Number of cluster models after each step; None where it was not tested."""
        return [self._clusters.get(step) for step in range(self.count)]

    def matrix(self) -> Floats:
        """Return R, shape (T + 1, T + 1): NaN where nobody has tested."""
        return self._means("accuracy")

    def untrained(self) -> Floats:
        """Return the accuracy of the model before any training on each step, shape (T + 1,).

        It was tested together with R[j − 1, j], by the same clients; NaN for step 0.
        """
        means = self._means("untrained")
        return np.array([math.nan, *np.diagonal(means, 1)])[: self.count]

    def result(self, measure: str = "accuracy") -> dict[str, Any]:
        """Return the matrix and the numbers that follow from it, ready for JSON.

        Parameters
        ----------
        measure : str
            What was measured, for the keys: ``"accuracy"`` or ``"mae"``.
        """
        names = (f"average_{measure}", f"current_{measure}")
        if not self.count:
            keys = (f"task_{measure}", *names, *_LEARNT, "clusters_after_steps")
            return dict.fromkeys(keys)
        matrix = self.matrix()
        return {
            f"task_{measure}": [[_finite(value) for value in row] for row in matrix],
            names[0]: _mean(matrix[-1]),
            names[1]: _mean(np.diagonal(matrix)),
            **self._learnt(matrix),
            "clusters_after_steps": self.clusters,
        }

    def _learnt(self, matrix: Floats) -> dict[str, float | None]:
        """Return forgetting and transfers of the matrix R."""
        gains = -matrix if self.measure.is_error else matrix
        before = -self.untrained() if self.measure.is_error else self.untrained()
        former, last = gains[:-1, :-1], gains[-1, :-1]
        best = np.fmax.reduce(former, axis=0) if len(former) else np.empty(0)
        learnt = {
            "forgetting": best - last,
            "backward_transfer": last - np.diagonal(former),
            "forward_transfer": np.diagonal(gains, 1) - before[1:],
        }
        return {name: _mean(learnt[name]) for name in _LEARNT}

    def _means(self, quantity: str) -> Floats:
        """Return the mean of a quantity over the clients, after each step and on each one."""
        means = np.full((self.count, self.count), np.nan)
        for after, per_client in self._scores.items():
            found: defaultdict[int, list[float]] = defaultdict(list)
            for scores in per_client.values():
                for step, score in scores.items():
                    value = getattr(score, quantity)
                    if value is not None and step < self.count:
                        found[step].append(value)
            for step, values in found.items():
                means[after, step] = math.fsum(values) / len(values)
        return means


_LEARNT = ("forgetting", "backward_transfer", "forward_transfer")


def _mean(values: Floats) -> float | None:
    """Return the mean of the values that are known and finite; None if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
