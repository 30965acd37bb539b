"""The plots of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from raceme.comparison.results import Comparison, Result
from raceme.comparison.suites import Timing
from raceme.reporting.style import (
    FAINT,
    INK,
    MUTED,
    new_figure,
    series_colour,
    style,
    time_unit,
)

_BAR = 0.62
_ROW_HEIGHT = 0.27


def times_figure(comparison: Comparison) -> Figure:
    """Draw the mean time of each method as a bar, with a dot for each seed.

    There is no mean, and no bar, where a seed missed the target.
    """
    values = {
        result.label: [run.time for run in result.runs if run.time is not None]
        for result in comparison.results
    }
    longest = max((time for times in values.values() for time in times), default=0.0)
    seconds, unit = time_unit(longest)
    scaled = {label: [time / seconds for time in times] for label, times in values.items()}
    target = comparison.target
    goal = "the target" if target is None else comparison.measure.goal(target)
    if comparison.suite.timing is Timing.CONVERGENCE:
        goal = "convergence"
    instead = {result.label: _missed(result) for result in comparison.results}
    axis = f"virtual time ({unit})"
    return _bars(comparison.results, scaled, f"Virtual time to {goal}", axis, instead)


def _missed(result: Result) -> str:
    """Say how many runs missed the target, and how long they were."""
    if not result.runs:
        return "no runs"
    lengths = [run.summary["virtual_time"] for run in result.runs if run.time is None]
    if not lengths:
        return ""
    seconds, unit = time_unit(mean := float(np.mean(lengths)))
    text = f"not within {float(f'{mean / seconds:.3g}'):,g} {unit}"
    if len(lengths) == len(result.runs):
        return text
    return f"{text} with {len(lengths)} of {len(result.runs)} seeds"


def purity_figure(comparison: Comparison) -> Figure:
    """Draw the purity of each method's clusters at the end, with a dot for each seed."""
    values = {
        result.label: [
            float(run.summary["purity"]) for run in result.runs if run.summary["purity"] is not None
        ]
        for result in comparison.results
    }
    return _bars(
        comparison.results,
        values,
        "Purity of the clusters at the end",
        "share of clients whose cluster's most common group is theirs",
        {label: "" if own else "no groups known" for label, own in values.items()},
        limit=1.0,
    )


def _bars(
    results: Sequence[Result],
    values: Mapping[str, Sequence[float]],
    title: str,
    axis: str,
    instead: Mapping[str, str],
    limit: float | None = None,
) -> Figure:
    """Draw a horizontal bar to the mean of each method's values, and the values as dots.

    `instead` has what stands in place of a method's bar; where it is empty, the bar is drawn.
    """
    labels = [result.label for result in results]
    with style():
        figure = new_figure(7.2, 1.1 + _ROW_HEIGHT * len(labels))
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(axis)
        top = limit or 1.06 * max((v for group in values.values() for v in group), default=1.0)
        axes.set_xlim(0.0, top)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=FAINT)
        for place, label in enumerate(labels):
            own = values[label]
            if instead[label]:
                axes.text(
                    *(0.005 * top, place, instead[label]),
                    va="center",
                    color=MUTED,
                    fontsize=8,
                    # The grid does not cross the words.
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                )
            else:
                axes.barh(place, np.mean(own), height=_BAR, color=series_colour(place), alpha=0.85)
            if len(own) > 1 or instead[label]:
                axes.plot(own, [place] * len(own), "o", ms=3, color=INK, zorder=3, clip_on=False)
        return figure
