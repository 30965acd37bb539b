"""The plots of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.comparison.results import Comparison, Result
from raceme.reporting.record import RunRecord
from raceme.reporting.style import (
    FAINT,
    INK,
    MUTED,
    new_figure,
    say_empty,
    series_colour,
    style,
    time_unit,
)

_BAR = 0.62
_ROW_HEIGHT = 0.27


def times_figure(comparison: Comparison) -> Figure:
    """Draw the time to the target of each method as a bar, with a dot for each seed."""
    values = {
        result.label: [run.time for run in result.runs if run.time is not None]
        for result in comparison.results
    }
    longest = max((time for times in values.values() for time in times), default=0.0)
    seconds, unit = time_unit(longest)
    scaled = {label: [time / seconds for time in times] for label, times in values.items()}
    target = comparison.target
    goal = "the target" if target is None else f"{target:.1%}"
    return _bars(comparison.results, scaled, f"Virtual time to {goal}", unit, "never")


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
        "no groups known",
        limit=1.0,
    )


def staleness_figure(records: Mapping[str, RunRecord]) -> Figure:
    """Draw how stale the updates were that each method used, one row per method.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label to a run.
    """
    staleness = {
        label: record.updates.staleness
        for label, record in records.items()
        if record.updates.seq.size
    }
    stale = {label: values for label, values in staleness.items() if values.max() > 0}
    with style():
        if not stale:
            figure = new_figure(7.2, 2.4)
            say_empty(figure.add_subplot(), "no method used a stale update")
            return figure
        figure = new_figure(7.2, 1.0 + 0.55 * len(stale))
        edges = _edges(max(int(values.max()) for values in stale.values()))
        places = list(records)
        rows = figure.subplots(len(stale), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, values) in zip(rows, stale.items(), strict=True):
            _draw_staleness(axes, label, values, edges, series_colour(places.index(label)))
        rows[0].set_title("Staleness of the updates")
        last = rows[-1]
        ticks = np.arange(len(edges) - 1)
        last.set_xticks(ticks, [_span(low, high) for low, high in pairwise(edges)])
        last.set_xlabel("newer versions of the model when the update came")
        return figure


def _draw_staleness(
    axes: Axes, label: str, values: np.ndarray, edges: Sequence[int], colour: str
) -> None:
    counts, _ = np.histogram(values, bins=edges)
    shares = counts / counts.sum()
    axes.bar(np.arange(len(shares)), shares, width=0.9, color=colour)
    axes.set_ylim(0.0, 1.15 * max(shares.max(), 0.01))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.text(
        0.995,
        0.82,
        f"median {np.median(values):.0f}, largest {values.max()}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8,
        color=MUTED,
    )


def _edges(largest: int) -> list[int]:
    """Return bounds of bins that double: 0, 1, 2-3, 4-7, …."""
    edges = [0, 1]
    while edges[-1] <= largest:
        edges.append(2 * edges[-1])
    return edges


def _span(low: int, high: int) -> str:
    return str(low) if high - low == 1 else f"{low}-{high - 1}"


def _bars(
    results: Sequence[Result],
    values: Mapping[str, Sequence[float]],
    title: str,
    axis: str,
    none: str,
    limit: float | None = None,
) -> Figure:
    """Draw a horizontal bar to the mean of each method's values, and the values as dots."""
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
            if not own:
                axes.text(0.005 * top, place, none, va="center", color=MUTED, fontsize=8)
                continue
            axes.barh(place, np.mean(own), height=_BAR, color=series_colour(place), alpha=0.85)
            if len(own) > 1:
                axes.plot(own, [place] * len(own), "o", ms=3, color=INK, zorder=3, clip_on=False)
        return figure
