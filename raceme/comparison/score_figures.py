"""Scores of uploads and clusters, and of estimated mixtures, of several methods over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.comparison.suites import Scored
from raceme.records.record import RunRecord
from raceme.reporting.style import new_figure, say_empty, series_colour, series_line, style

_NAMES = {
    Scored.BEFORE: "uploaded",
    Scored.AFTER: "got in return",
    Scored.CLUSTER: "clusters' models",
}

Curve = list[tuple[int, float]]
"""Updates applied, and a number."""


def score_plots(
    records: Mapping[str, RunRecord], measures: Sequence[Scored], mixtures: bool
) -> dict[str, Callable[[], Figure]]:
    """Return what draws the plots of a comparison's scores, by the name of the plot.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label to a run of each method.
    measures : Sequence[Scored]
        What is scored.
    mixtures : bool
        Whether estimated mixtures are compared with the true ones.
    """
    plots: dict[str, Callable[[], Figure]] = {}
    if records and measures:
        plots["scores"] = lambda: scores_figure(records, measures)
    if records and mixtures:
        plots["mixtures"] = lambda: divergences_figure(records)
    return plots


def scores_figure(records: Mapping[str, RunRecord], measures: Sequence[Scored]) -> Figure:
    """Draw each score of several runs, side by side on one axis of accuracy.

    Those of uploads are means over the clients by session, a stretch in which every client has
    uploaded at least once; those of clusters are by evaluation.
    """
    with style():
        figure = new_figure(7.2, 3.4)
        panels = np.atleast_1d(figure.subplots(1, len(measures), sharey=True))
        for axes, measure in zip(panels, measures, strict=True):
            curves = {label: score_curve(record, measure) for label, record in records.items()}
            # No title: of those an axes has one height for all.
            axes.text(0.5, 1.02, _NAMES[measure], transform=axes.transAxes, ha="center")
            _draw(axes, curves)
        panels[0].set_title("Uploads, what clients get in return, and clusters", pad=24)
        panels[0].set_ylabel("accuracy")
        _legend(figure, panels, records)
        return figure


def divergences_figure(records: Mapping[str, RunRecord]) -> Figure:
    """Draw how far estimated mixtures are from the true ones, by session, of several runs."""
    with style():
        figure = new_figure(7.2, 3.2)
        axes = figure.add_subplot()
        axes.set_title("Estimated mixtures against the true ones")
        axes.set_ylabel("KL(true ‖ estimated)")
        _draw(axes, {label: divergence_curve(record) for label, record in records.items()})
        axes.set_ylim(bottom=0)
        _legend(figure, [axes], records)
        return figure


def score_curve(record: RunRecord, measure: Scored) -> Curve:
    """Return a score over a run."""
    if measure is Scored.CLUSTER:
        return [(event.updates, event.mean) for event in record.cluster_scores]
    uploads = record.uploads
    found = zip(uploads.session_ends, uploads.by_session(str(measure)), strict=True)
    return [(end, mean) for end, mean in found if mean is not None]


def divergence_curve(record: RunRecord) -> Curve:
    """Return the mean divergence of the uploads of each session."""
    by_session: dict[int, list[float]] = defaultdict(list)
    for row, value in record.uploads.divergences():
        by_session[row.session].append(value)
    ends = record.uploads.session_ends
    return [
        (end, float(np.mean(by_session[number])))
        for number, end in enumerate(ends, start=1)
        if number in by_session
    ]


def _draw(axes: Axes, curves: Mapping[str, Curve]) -> None:
    axes.set_xlabel("updates")
    axes.grid(axis="y")
    for index, (label, curve) in enumerate(curves.items()):
        if curve:
            axes.plot(
                *zip(*curve, strict=True),
                color=series_colour(index),
                ls=series_line(index),
                marker="o",
                ms=3,
                label=label,
            )
    if any(curves.values()):
        axes.set_xlim(left=0)
    else:
        axes.set_xticks([])
        say_empty(axes, "nothing known")


def _legend(
    figure: Figure, panels: Sequence[Axes] | np.ndarray, records: Mapping[str, RunRecord]
) -> None:
    """Name each run once, in the runs' order."""
    named: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    shown = [label for label in records if label in named]
    if shown:
        handles = [named[label] for label in shown]
        figure.legend(handles, shown, loc="outside lower center", ncols=min(len(shown), 5))
