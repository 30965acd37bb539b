"""Data that change: generators by name, and when they move a client's data to the next step."""

from __future__ import annotations

from typing import Any

from raceme.config import RunConfig
from raceme.datasets.drift.base import Drift
from raceme.datasets.drift.schedule import Schedule, parse_schedule
from raceme.errors import UserError
from raceme.registry import Registry

DRIFTS = Registry(
    "drift",
    {
        "none": "raceme.datasets.drift.base:NoDrift",
        "swap-all": "raceme.datasets.drift.swap:SwapAll",
        "swap-part": "raceme.datasets.drift.swap:SwapPart",
        "incremental": "raceme.datasets.drift.change:Incremental",
        "rotate": "raceme.datasets.drift.change:Rotate",
        "label-shift": "raceme.datasets.drift.change:LabelShift",
        "noise": "raceme.datasets.drift.change:Noise",
        "mixture": "raceme.datasets.drift.mixture:Mixture",
        "tasks": "raceme.datasets.drift.tasks:Tasks",
    },
)
NONE = "none"

__all__ = ["DRIFTS", "NONE", "Drift", "Schedule", "drift_type", "parse_schedule", "schedule_of"]


def drift_type(config: RunConfig) -> type[Drift]:
    """Return the generator that a configuration names.

    Raises
    ------
    UserError
        There is no such drift.
    """
    chosen: type[Drift] = DRIFTS[config.drift]
    return chosen


def schedule_of(config: RunConfig) -> Schedule | None:
    """Return when clients' data move to their next step; None if they never do.

    Parameters
    ----------
    config : RunConfig
        With the number of clients known; ``drift_at`` None stands for the drift's own schedule.

    Raises
    ------
    UserError
        There is no such drift, ``drift-at`` cannot be read, or it is given without a drift.
    """
    chosen = drift_type(config)
    if config.drift == NONE:
        if config.drift_at is not None:
            raise UserError("drift-at says when data change, but there is no drift: add --drift.")
        return None
    at = config.drift_at
    return parse_schedule(
        chosen.default_schedule(config.num_clients, config.max_updates) if at is None else at
    )


def options_of(config: RunConfig) -> Any:
    """Return the typed options of the drift that a configuration names."""
    return drift_type(config).options_type()
