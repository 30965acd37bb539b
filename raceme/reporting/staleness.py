"""How stale the updates were that a run used, or each of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.records.record import Integers, RunRecord
from raceme.reporting.style import MUTED, new_figure, say_empty, series_colour, style


def staleness_figure(records: Mapping[str, RunRecord], *, height: float = 0.55) -> Figure:
    """Draw how stale the updates were that each method used, one row per method.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label to a run.
    height : float
        Of a row, in inches.
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
        figure = new_figure(7.2, 1.0 + height * len(stale))
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
    axes: Axes, label: str, values: Integers, edges: Sequence[int], colour: str
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
