"""Summaries of runs from their events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raceme.core.events import Event
from raceme.records.summary import RunSummary


def summarise(events: Iterable[Event], **named: Any) -> dict[str, Any]:
    """Return the summary of a run; see `RunSummary.result` for the other arguments."""
    run = RunSummary()
    for event in events:
        run.observe(event)
    return run.result(**named)
