"""How long clients wait for others in windows of time, of a run or of several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from raceme.records.record import Floats, RunRecord
from raceme.reporting.style import (
    MUTED,
    new_figure,
    say_empty,
    series_colour,
    series_line,
    style,
)

_MARKED = (0.3, 0.5)
"""Shares of a window that a summary counts, too."""
_MOST_INSIDE = 8
"""More curves than this are named beside the plot: in it there is no room."""


def idle_figure(records: Mapping[str, RunRecord]) -> Figure:
    """Draw how often a client waits longer than a share of its window (CSAFL's figure 5).

    A curve for each run; those that report no idle times are left out, and keep their colour.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label to a run. A single run needs no label.
    """
    shares = {label: record.idle_times.share for label, record in records.items()}
    with style():
        figure = new_figure(7.2, 3.6)
        axes = figure.add_subplot()
        axes.set_title("How long clients wait for others in a window")
        axes.set_xlabel("share of the window's budget")
        axes.set_ylabel("how often a client waits longer")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, 1.0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xticks(np.linspace(0.0, 1.0, 11))
        axes.grid(axis="y")
        for index, (label, values) in enumerate(shares.items()):
            if len(values):
                # Finer steps than these cannot be seen, and would make large pages.
                waited, often = longer_than(values.round(3))
                axes.step(
                    waited,
                    often,
                    where="post",
                    color=series_colour(index),
                    ls=series_line(index),
                    label=_named(label, values),
                    # One that never waits lies on the axis.
                    clip_on=False,
                    zorder=3,
                )
        drawn = sum(bool(len(values)) for values in shares.values())
        if not drawn:
            say_empty(axes, "no windows in which clients wait")
            return figure
        for share in _MARKED:
            axes.axvline(share, color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1)
        if drawn <= _MOST_INSIDE:
            axes.legend(loc="upper right")
        else:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        return figure


def _named(label: str, shares: Floats) -> str:
    """Name a curve, with the mean share."""
    mean = f"mean {shares.mean():.0%}" if shares.any() else "never"
    return f"{label}: {mean}" if label else mean


def longer_than(shares: Floats) -> tuple[Floats, Floats]:
    """Return the complementary distribution of shares from 0 to 1, as the corners of steps.

    Returns
    -------
    tuple of ndarray
        Shares x, from 0 to 1, ascending, and for each the part of all that are above x.
    """
    values, counts = np.unique(shares, return_counts=True)
    above = 1.0 - np.cumsum(counts) / len(shares)
    first = 1.0 if values[0] > 0 else float(above[0])
    inside = values > 0
    corners = np.concatenate([[0.0], values[inside], [max(1.0, float(values[-1]))]])
    return corners, np.concatenate([[first], above[inside], [0.0]])
