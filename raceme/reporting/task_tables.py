"""What was forgotten and learnt, as tables of the page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raceme.protocol.measure import Measure
from raceme.reporting.page import PageTable, number

_MOST_STEPS = 30

_MEANINGS = {
    "forgetting": "best before the last step, less what is left: mean over former tasks",
    "backward_transfer": "at the end, less right after it was learnt: mean over former tasks",
    "forward_transfer": "before it is trained on, less the untrained model: mean over later tasks",
}


def learnt_table(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the numbers of tests on all tasks; None of runs that made none."""
    measure = Measure.of(summary)
    if summary.get(f"task_{measure.name}") is None:
        return None
    word = measure.word
    meanings = {
        f"average_{measure.name}": f"{word} at the end: mean over all tasks",
        f"current_{measure.name}": f"{word} on each task right after it was learnt: mean",
        **_MEANINGS,
    }
    rows = tuple(
        (name.replace("_", " "), number(summary[name]), meaning)
        for name, meaning in meanings.items()
    )
    return PageTable("Learnt and forgotten", ("", measure.label, "meaning"), rows, words=(0, 2))


def tasks_table(summary: Mapping[str, Any]) -> PageTable | None:
    """Return the accuracy on each task after each step; None of runs without such tests."""
    measure = Measure.of(summary)
    matrix = summary.get(f"task_{measure.name}")
    if matrix is None:
        return None
    shown = matrix[:_MOST_STEPS]
    clusters = summary["clusters_after_steps"]
    rows = tuple(
        (
            f"after step {step}",
            *(number(value) for value in row[:_MOST_STEPS]),
            number(clusters[step]),
        )
        for step, row in enumerate(shown)
    )
    more = f", the first {_MOST_STEPS} of {len(matrix)} steps" if len(matrix) > len(shown) else ""
    heads = ("", *(f"on {step}" for step in range(len(shown))), "clusters")
    return PageTable(f"The numbers: {measure.label} on each task{more}", heads, rows)
