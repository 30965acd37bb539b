"""What evaluations tell of models: how often they are right, or by how much they are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WITHIN = 0.01
"""How near the final value counts as converged: one point of accuracy, or 1 % of an error."""

_LOSS = "loss"
"""What stands in the place of a unit where the loss stands in for an accuracy."""


@dataclass(frozen=True)
class Measure:
    """Accuracy, or where the task is a regression the mean absolute error (MAE).

    In a user's own Flower app whose clients measure neither, it is their loss.

    Everything that asks which of two evaluations is the better one, or whether a target is
    reached, asks here: of accuracies the larger one is better, of errors the smaller one.

    Attributes
    ----------
    unit : str or None
        Unit of the error; None for an accuracy.
    """

    unit: str | None = None

    @property
    def is_error(self) -> bool:
        """Whether smaller is better."""
        return self.unit is not None

    @property
    def name(self) -> str:
        """Its key in replies and summaries: ``"accuracy"``, ``"mae"`` or ``"loss"``."""
        if self.is_loss:
            return "loss"
        return "mae" if self.is_error else "accuracy"

    @property
    def is_loss(self) -> bool:
        """Whether clients measure neither, and their loss stands in."""
        return self.unit == _LOSS

    @property
    def label(self) -> str:
        """What it is called in tables and at axes, with its unit: ``"MAE (µg/m³)"``."""
        if self.unit is None or self.is_loss:
            return self.name
        return f"MAE ({self.unit})" if self.unit else "MAE"

    @property
    def word(self) -> str:
        """What it is called in a sentence and in the head of a narrow column."""
        return "MAE" if self.is_error and not self.is_loss else self.name

    @property
    def title(self) -> str:
        """What it is called at the beginning of a title."""
        return "Mean absolute error" if self.word == "MAE" else self.word.capitalize()

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Measure:
        """Return the measure of a ``summary.json``; those of earlier versions have accuracies."""
        if summary.get("measure", "accuracy") == "accuracy":
            return cls()
        if summary["measure"] == "loss":
            return LOSS_MEASURE
        return cls(str(summary.get("unit") or ""))

    def shown(self, value: float | None) -> str:
        """Return a value for people, an error with its unit."""
        if value is None:
            return "-"
        if self.is_error and not self.is_loss:
            return f"{value:.2f} {self.unit}".rstrip()
        return f"{value:.3f}"

    def goal(self, target: float) -> str:
        """Return a target for people: ``"95.0%"`` or ``"20 µg/m³"``."""
        if self.is_loss:
            return f"{target:g}"
        return f"{target:g} {self.unit}".rstrip() if self.is_error else f"{target:.1%}"

    def bound(self, target: float) -> str:
        """Return a target for people in the form of the values beside it: ``"0.95"``."""
        return self.goal(target) if self.is_error else f"{target:g}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target; NaN never is."""
        return value <= target if self.is_error else value >= target

    def better(self, value: float, other: float) -> float:
        """Return the better one of two values."""
        return min(value, other) if self.is_error else max(value, other)

    def shortfall(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far each of a sequence of values is behind the best one so far."""
        if self.is_error:
            return values - np.minimum.accumulate(values)
        return np.maximum.accumulate(values) - values

    def tolerance(self, final: float) -> float:
        """Return how far from its final value a curve counts as converged."""
        return WITHIN * abs(final) if self.is_error else WITHIN


ACCURACY = Measure()
"""Of a classification."""
LOSS_MEASURE = Measure(_LOSS)
"""Of clients that measure nothing else."""
