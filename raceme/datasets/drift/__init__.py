"""Data that change: generators by name, and when they move a client's data to the next step."""

from __future__ import annotations

from raceme.config import RunConfig
from raceme.config.registry import DRIFTS
from raceme.datasets.dealt import Dealt
from raceme.datasets.drift.base import Drift
from raceme.datasets.drift.schedule import Schedule, parse_schedule

__all__ = ["Drift", "Schedule", "drift_of", "drift_type", "parse_schedule", "schedule_of"]


def drift_type(config: RunConfig) -> type[Drift]:
    """Return the generator that a configuration names.

    Raises
    ------
    UserError
        There is no such drift.
    """
    chosen: type[Drift] = DRIFTS[config.drift]
    return chosen


def drift_of(config: RunConfig, dealt: Dealt) -> Drift:
    """Return what changes the data of a run, with the options of the run.

    Raises
    ------
    UserError
        There is no such drift, or an option is out of its range.
    """
    chosen = drift_type(config)
    declared = chosen.options_type
    return chosen(dealt, None if declared is None else config.read(declared))


def schedule_of(config: RunConfig) -> Schedule | None:
    """Return when clients' data move to their next step; None if they never do.

    Parameters
    ----------
    config : RunConfig
        With the number of clients known; without ``drift-at`` the drift has its own schedule.

    Raises
    ------
    UserError
        There is no such drift, or ``drift-at`` cannot be read, or is none for it.
    """
    chosen = drift_type(config)
    if chosen.options_type is None:
        return None
    at = config.read(chosen.options_type).drift_at
    schedule = parse_schedule(chosen.default_schedule(config) if at is None else at)
    chosen.check_schedule(config, schedule)
    return schedule
