"""Accuracy over time, of one run and of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.protocol.events import ClusterChange, ClustersChanged
from raceme.protocol.measure import ACCURACY, Measure
from raceme.records.record import ClientEvaluations, Floats, RunRecord, read_run
from raceme.reporting.marks import drift_line, mark_drifts
from raceme.reporting.style import (
    CLOCK,
    INK,
    MUTED,
    cluster_colour,
    log_time_axis,
    new_figure,
    save_figure,
    say_empty,
    series_colour,
    series_line,
    style,
    time_axis,
    updates_axis,
)

_MOST_CLUSTERS = 8
"""More clusters than this are not drawn one by one."""
_MOST_LABELS = 4
"""More splits and merges than this are marked without words."""
_DRIFT_ROW = 0.06
"""Room for the labels of drifts above an accuracy of 1, as a share of the axes."""
_MOST_BANDS = 5
"""More runs than this are drawn without bands, and named beside the plot."""
_EARLY = 0.1
"""If a run is at the target within this share of the longest one, time is drawn logarithmically."""


def accuracy_figure(
    record: RunRecord, *, target: float | None = None, title: str = "", clock: str = CLOCK
) -> Figure:
    """Draw the mean accuracy over the clients, and the range in which most of them are.

    Splits, merges, and the moments at which clients' data changed are marked.

    Parameters
    ----------
    record : RunRecord
        The run.
    target : float, optional
        Target accuracy, drawn as a line.
    title : str
        Names the run.
    clock : str
        What the axis of time is called.
    """
    with style():
        figure = new_figure(7.2, 4.2)
        axes = figure.add_subplot()
        seconds = time_axis(axes, 0.0, record.end, clock)
        _score_axis(axes, [record])
        axes.set_title(title or f"{record.measure.title} on the clients' own test data")
        if len(record.evaluations.time):
            _draw_accuracy(axes, record, seconds)
            _mark_changes(axes, record.changes, seconds)
            if target is not None:
                _mark_target(axes, record, target, seconds)
            _legend(figure, axes, _mark_data(axes, record, seconds), record.measure)
        else:
            say_empty(axes, "no evaluations")
        updates_axis(axes, record.updates.time, seconds)
        return figure


def comparison_figure(
    runs: Mapping[str, RunRecord],
    *,
    target: float | None = None,
    title: str = "",
    clock: str = CLOCK,
) -> Figure:
    """Draw the accuracy of several runs over one axis of time.

    Parameters
    ----------
    runs : Mapping[str, RunRecord]
        Label to run; their order is that of the legend and the colours. The bands of more than a
        few runs would hide each other, and are left out. Time is logarithmic if a run is at the
        target so early that on a linear axis nothing could be seen of its way there.
    target, title, clock
        As in :func:`accuracy_figure`.
    """
    banded = len(runs) <= _MOST_BANDS
    with style():
        figure = new_figure(7.2, 4.2)
        axes = figure.add_subplot()
        end = max((record.end for record in runs.values()), default=0.0)
        seconds = time_axis(axes, 0.0, end, clock)
        if target is not None and _is_early(runs.values(), target, end):
            starts = [time for record in runs.values() for time in record.evaluations.time if time]
            log_time_axis(axes, min(starts) / seconds, end / seconds)
        measure = _score_axis(axes, list(runs.values()))
        axes.set_title(title or f"{measure.title} on the clients' own test data")
        for index, (label, record) in enumerate(runs.items()):
            colour = series_colour(index)
            times = record.evaluations.time / seconds
            if banded:
                low, high = client_band(record.client_evaluations, len(times))
                axes.fill_between(times, low, high, color=colour, alpha=0.12, lw=0)
            axes.plot(
                times,
                record.evaluations.accuracy,
                color=colour,
                ls=series_line(index),
                label=label,
                zorder=3,
            )
            if target is not None:
                _mark_reached(axes, record, target, seconds, colour)
        if target is not None:
            _target_line(axes, target)
        if not runs:
            say_empty(axes, "no runs")
        elif banded:
            place = _legend_place(measure)
            axes.legend(loc=place, title="mean over clients; shaded: 10-90 % of clients")
        else:
            # Beside the plot: among so many lines there is no room for it.
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title="mean over clients")
        return figure


def compare_curves(
    runs: Mapping[str, RunRecord | Path],
    path: Path,
    target: float | None = None,
    *,
    title: str = "",
    clock: str = CLOCK,
) -> None:
    """Write a PNG with the accuracy of several runs over time.

    Parameters
    ----------
    runs : Mapping[str, RunRecord or Path]
        Label to run, or to the folder of one.
    path : Path
        The PNG to write.
    target, title, clock
        As in :func:`accuracy_figure`.
    """
    records = {
        label: read_run(run) if isinstance(run, Path) else run for label, run in runs.items()
    }
    save_figure(comparison_figure(records, target=target, title=title, clock=clock), path)


def client_band(
    evaluations: ClientEvaluations, count: int, low: float = 10.0, high: float = 90.0
) -> tuple[Floats, Floats]:
    """Return two percentiles of the clients' accuracies at each of `count` evaluations.

    They are NaN for an evaluation that lists no clients.
    """
    band = np.full((2, count), np.nan)
    bounds = np.searchsorted(evaluations.evaluation, np.arange(count + 1))
    for index in range(count):
        values = evaluations.accuracy[bounds[index] : bounds[index + 1]]
        if len(values):
            band[:, index] = np.percentile(values, (low, high))
    return band[0], band[1]


def _score_axis(axes: Axes, records: Sequence[RunRecord]) -> Measure:
    """Prepare the axis of accuracies, or of errors, of runs on the same data; return which."""
    measure = records[0].measure if records else ACCURACY
    axes.set_ylabel(measure.label)
    axes.grid(axis="y")
    if not measure.is_error:
        axes.set_ylim(0.0, 1.0)
        axes.set_yticks(np.linspace(0.0, 1.0, 6))
        return measure
    # Up to the worst mean, not the worst client: a single one that diverged would hide the rest.
    shown = [record.evaluations.accuracy for record in records]
    values = np.concatenate(shown)
    top = float(np.max(values[np.isfinite(values)], initial=0.0))
    axes.set_ylim(0.0, 1.15 * top if top > 0 else 1.0)
    return measure


def _legend_place(measure: Measure) -> Literal["upper right", "lower right"]:
    """Return the corner that the curves leave free: errors fall, accuracies rise."""
    return "upper right" if measure.is_error else "lower right"


def _draw_accuracy(axes: Axes, record: RunRecord, seconds: float) -> None:
    """Draw mean and band of one run, and the mean of each cluster."""
    colour = INK
    times = record.evaluations.time / seconds
    low, high = client_band(record.client_evaluations, len(times))
    axes.fill_between(times, low, high, color=colour, alpha=0.15, lw=0, label="10-90 % of clients")
    axes.plot(
        times,
        record.evaluations.accuracy,
        color=colour,
        marker="o" if len(times) == 1 else "",
        label="mean over clients",
        zorder=3,
    )
    few = ~record.evaluations.counts
    if few.any():
        axes.plot(
            times[few],
            record.evaluations.accuracy[few],
            ls="",
            marker="o",
            ms=3.5,
            mfc="none",
            mec=colour,
            label="fewer than 9 of 10 answered",
            zorder=3,
        )
    for cluster, means in _cluster_means(record).items():
        axes.plot(
            times,
            means,
            color=cluster_colour(cluster),
            lw=1.0,
            zorder=2,
            label=f"mean of cluster {cluster}",
        )


def _cluster_means(record: RunRecord) -> dict[int, Floats]:
    """Return the mean accuracy of each cluster that was made, at every evaluation.

    Nothing if there were none, or so many that their lines would hide each other.
    """
    made = sorted({cluster for change in record.changes for cluster in change.made})
    if not 0 < len(made) <= _MOST_CLUSTERS:
        return {}
    evaluations = record.client_evaluations
    count = len(record.evaluations.time)
    means = {}
    for cluster in made:
        chosen = evaluations.cluster == cluster
        index = evaluations.evaluation[chosen]
        members = np.bincount(index, minlength=count)
        total = np.bincount(index, weights=evaluations.accuracy[chosen], minlength=count)
        means[cluster] = np.where(members > 0, total / np.maximum(members, 1), np.nan)
    return means


def _mark_changes(axes: Axes, changes: Sequence[ClustersChanged], seconds: float) -> None:
    """Draw a line at each split and merge, with what it did as long as there is room for words."""
    shown = [c for c in changes if c.change in (ClusterChange.SPLIT, ClusterChange.MERGE)]
    for index, change in enumerate(shown):
        axes.axvline(change.time / seconds, color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
        if len(shown) <= _MOST_LABELS:
            gone, made = (", ".join(map(str, ids)) for ids in (change.gone, change.made))
            axes.annotate(
                f"{gone} \u2192 {made}",
                (change.time / seconds, 0.02 + 0.06 * index),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                color=MUTED,
                fontsize=8,
            )


def _mark_data(axes: Axes, record: RunRecord, seconds: float) -> bool:
    """Mark when clients' data changed, above the curves; return whether there are lines."""
    if not record.data_changes:
        return False
    axes.set_ylim(0.0, axes.get_ylim()[1] / (1.0 - _DRIFT_ROW))
    return mark_drifts(axes, record.data_changes, seconds, 1.0 - _DRIFT_ROW / 2)


def _legend(figure: Figure, axes: Axes, drifts: bool, measure: Measure) -> None:
    """Say what is what: in the corner, or below where a drift may take the curves to the corner."""
    if not drifts:
        axes.legend(loc=_legend_place(measure))
        return
    handles = [*axes.get_legend_handles_labels()[0], drift_line()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))


def _mark_target(axes: Axes, record: RunRecord, target: float, seconds: float) -> None:
    _target_line(axes, target)
    _mark_reached(axes, record, target, seconds, INK)


def _target_line(axes: Axes, target: float) -> None:
    axes.axhline(target, color=INK, lw=0.9, ls=(0, (1, 2)), zorder=2)
    axes.annotate(
        f"target {target:g}",
        (0.0, target),
        xycoords=("axes fraction", "data"),
        xytext=(5, 3),
        textcoords="offset points",
        fontsize=8,
    )


def _is_early(runs: Iterable[RunRecord], target: float, end: float) -> bool:
    """Return whether a run is at the target so early that time is to be drawn logarithmically."""
    arrivals = [arrival[0] for record in runs if (arrival := _arrival(record, target))]
    return 0.0 < min(arrivals, default=end) < _EARLY * end


def _arrival(record: RunRecord, target: float) -> tuple[float, float] | None:
    """Return when a run first reached the target, and its accuracy then; None if it never did.

    An evaluation that few of the clients answered does not count.
    """
    evaluations = record.evaluations
    values = evaluations.accuracy
    good = values <= target if record.measure.is_error else values >= target
    reached = np.flatnonzero(evaluations.counts & good)
    if not len(reached):
        return None
    return float(evaluations.time[reached[0]]), float(evaluations.accuracy[reached[0]])


def _mark_reached(
    axes: Axes, record: RunRecord, target: float, seconds: float, colour: str
) -> None:
    """Draw a point where a run first reached the target."""
    arrival = _arrival(record, target)
    if arrival is not None:
        time, accuracy = arrival
        axes.plot(
            time / seconds,
            accuracy,
            marker="o",
            ms=6,
            color=colour,
            markeredgecolor="white",
            zorder=4,
        )
