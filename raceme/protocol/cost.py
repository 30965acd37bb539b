"""What a piece of work cost a device: what it states with its answer, typed and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raceme.protocol.stated import StatementError, number_of

CPU_SECONDS = "cpu-seconds"
"""Seconds that the device's processor computed for the work, those of all its threads together."""
JOULES = "joules"
"""Energy that the board took meanwhile, where it can tell: of all of it, not of the work alone."""

MOST_SECONDS = 1e8
"""Three years: longer than any work takes, on any number of cores."""
MOST_JOULES = 1e11
"""A kilowatt for three years."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work cost; None for what the device does not state.

    Attributes
    ----------
    cpu_seconds : float or None
        Seconds of computing, from 0 to `MOST_SECONDS`.
    joules : float or None
        Energy in J, from 0 to `MOST_JOULES`.
    """

    cpu_seconds: float | None = None
    joules: float | None = None


NOT_STATED = Cost()


def cost_of(metrics: Mapping[str, object]) -> Cost:
    """Return the cost that a device states among its measurements.

    Raises
    ------
    StatementError
        It is no number, NaN, below 0, or more than can be.
    """
    return Cost(
        _bounded(metrics, CPU_SECONDS, MOST_SECONDS), _bounded(metrics, JOULES, MOST_JOULES)
    )


def _bounded(metrics: Mapping[str, object], name: str, most: float) -> float | None:
    if name not in metrics:
        return None
    stated = number_of(name, metrics[name])
    # NaN fails both comparisons.
    if not 0 <= stated <= most:
        raise StatementError(f"it states {stated:g} {name}: expected 0 to {most:g}")
    return stated
