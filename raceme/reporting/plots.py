"""Figures of single runs and comparisons."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Patch, Rectangle, Wedge
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from raceme.core.clusters import Weights
from raceme.core.errors import printable
from raceme.core.events import (
    ACCURACY,
    ClusterChange,
    ClustersChanged,
    Measure,
    Measured,
    MeasureSchema,
    Membership,
    Placement,
    grouped,
    home,
)
from raceme.records.record import ClientEvaluations, Integers, RunRecord
from raceme.records.summary import LONG, Floats, TaskAccuracies, Upload, Uploads, shares
from raceme.reporting.style import (
    CLOCK,
    FAINT,
    INK,
    MOST_BARS,
    MUTED,
    REJECTED,
    cluster_colour,
    draw_dots,
    draw_spans,
    drift_line,
    fastest_first,
    first_part,
    group_colour,
    heat_map,
    legend_beside,
    log_time_axis,
    mark_changes,
    mark_drifts,
    method_looks,
    new_figure,
    one_axes,
    say_empty,
    series_colour,
    style,
    time_axis,
)

_MOST_CLUSTERS = 8
"""Maximum number of individually drawn clusters."""
_MOST_LABELS = 4
"""Maximum number of labelled splits and merges."""
_DRIFT_ROW = 0.06
"""Share of the axes for drift labels above an accuracy of 1."""
_MOST_BANDS = 5
"""Maximum number of runs with bands and an inner legend."""
_LOG_POINTS = 200
"""Points of a curve on a logarithmic axis of time."""
_EARLY = 0.1
"""Share of the longest run within which reaching the target makes the time axis logarithmic."""


@style()
def accuracy_figure(
    record: RunRecord, *, target: float | None = None, title: str = "", clock: str = CLOCK
) -> Figure:
    """Draw the clients' mean accuracy and the range of most clients.

    Splits, merges and drifts are marked.

    Parameters
    ----------
    target : float, optional
        Target accuracy, drawn as a line.
    title : str
        Title of the figure, e.g. the run's name; empty for none.
    clock : str
        Label of the time axis.
    """
    figure, axes = one_axes(7.2, 4.2)
    seconds = time_axis(axes, record.end, clock)
    _score_axis(axes, [record])
    axes.set_title(title or f"{record.measure.title} on the clients' own test data")
    if len(record.evaluations.time):
        _draw_accuracy(axes, record, seconds)
        _mark_changes(axes, record.changes, seconds)
        if target is not None:
            _target_line(axes, target)
            _mark_reached(axes, record, target, seconds, INK)
        _legend(figure, axes, _mark_data(axes, record, seconds), record.measure)
    else:
        say_empty(axes, "no evaluations")
    return figure


@style()
def comparison_figure(
    methods: Mapping[str, Sequence[RunRecord]],
    *,
    target: float | None = None,
    title: str = "",
) -> Figure:
    """Draw the accuracy of several methods over time: mean and deviation over seeds.

    Parameters
    ----------
    methods : Mapping[str, Sequence[RunRecord]]
        Runs of each method by label, one per seed, in the order of the legend. Bands are left out
        for more than a few methods. Time is logarithmic if a run reaches the target very early.
    target, title
        As in :func:`accuracy_figure`.
    """
    runs = [record for records in methods.values() for record in records]
    figure, axes = one_axes(7.2, 4.2)
    end = max((record.end for record in runs), default=0.0)
    seconds = time_axis(axes, end, CLOCK)
    is_log = target is not None and _is_early(runs, target, end)
    if is_log:
        starts = [time for record in runs for time in record.evaluations.time if time]
        log_time_axis(axes, min(starts) / seconds, end / seconds)
    measure = _score_axis(axes, runs)
    axes.set_title(title or f"{measure.title} on the clients' own test data")
    banded = len(methods) <= _MOST_BANDS and len(runs) > len(methods)
    looks = method_looks(methods)
    for label, records in methods.items():
        colour, line = looks[label]
        times, values = over_seeds(records)
        if is_log and len(times):
            # A line from time 0 would be level on a logarithmic axis.
            often = np.linspace(0.0, 1.0, _LOG_POINTS)[1:] ** 3 * times[-1]
            often = np.union1d(times, often[often > times[0]])
            values = np.stack([np.interp(often, times, row) for row in values])
            times = often
        mean = values.mean(axis=0)
        if banded and len(values) > 1:
            # Sample standard deviation, as in the tables.
            deviation = values.std(axis=0, ddof=1)
            low, high = mean - deviation, mean + deviation
            axes.fill_between(times / seconds, low, high, color=colour, alpha=0.18, lw=0)
        axes.plot(times / seconds, mean, color=colour, ls=line, label=label, zorder=3)
        if target is not None:
            for record in records:
                _mark_reached(axes, record, target, seconds, colour)
    if target is not None:
        _target_line(axes, target)
    seeds = max((len(records) for records in methods.values()), default=0)
    of = "one seed" if seeds == 1 else f"mean{' ± SD' if banded else ''} of {seeds} seeds"
    if not runs:
        say_empty(axes, "no runs")
    elif len(methods) <= _MOST_BANDS:
        axes.legend(loc=_legend_place(measure), title=of)
    else:
        # Beside the plot, for lack of room.
        legend_beside(axes, title=of)
    return figure


def over_seeds(records: Sequence[RunRecord]) -> tuple[Floats, Floats]:
    """Interpolate the accuracies of runs with different seeds at common times.

    Returns
    -------
    tuple[NDArray, NDArray]
        All evaluation times of any run that lie within every run, shape (T,), and the linearly
        interpolated accuracies, shape (runs, T).
    """
    curves = [record.evaluations for record in records if len(record.evaluations.time)]
    if not curves:
        return np.empty(0), np.empty((max(1, len(records)), 0))
    times = np.unique(np.concatenate([curve.time for curve in curves]))
    first = max(curve.time[0] for curve in curves)
    last = min(curve.time[-1] for curve in curves)
    times = times[(first <= times) & (times <= last)]
    return times, np.stack([np.interp(times, curve.time, curve.accuracy) for curve in curves])


def client_band(evaluations: ClientEvaluations, count: int) -> tuple[Floats, Floats]:
    """Return the 10th and 90th percentile of the clients' accuracies at each evaluation.

    NaN for evaluations without clients.
    """
    band = np.full((2, count), np.nan)
    bounds = np.searchsorted(evaluations.evaluation, np.arange(count + 1))
    for index in range(count):
        values = evaluations.accuracy[bounds[index] : bounds[index + 1]]
        if len(values):
            band[:, index] = np.percentile(values, (10.0, 90.0))
    return band[0], band[1]


def _row_label(client: str) -> str:
    """Return a client's name in at most 20 characters; names may differ at the end only."""
    name = printable(client, 128)
    return name if len(name) <= 20 else f"{name[:9]}…{name[-10:]}"


def _score_axis(axes: Axes, records: Sequence[RunRecord]) -> Measure:
    """Prepare the axis of accuracies or errors, and return the measure."""
    measure = records[0].measure if records else ACCURACY
    axes.set_ylabel(measure.label)
    axes.grid(axis="y")
    if not measure.is_error:
        axes.set_ylim(0.0, 1.0)
        axes.set_yticks(np.linspace(0.0, 1.0, 6))
        return measure
    # Up to the worst mean, as a single diverged client would hide the rest.
    shown = [record.evaluations.accuracy for record in records]
    values = np.concatenate(shown)
    top = float(np.max(values[np.isfinite(values)], initial=0.0))
    axes.set_ylim(0.0, 1.15 * top if top > 0 else 1.0)
    return measure


def _legend_place(measure: Measure) -> Literal["upper right", "lower right"]:
    """Return the corner free of curves: errors fall, accuracies rise."""
    return "upper right" if measure.is_error else "lower right"


def _draw_accuracy(axes: Axes, record: RunRecord, seconds: float) -> None:
    """Draw mean and band of one run, and the mean of each cluster."""
    colour = INK
    times = record.evaluations.time / seconds
    low, high = client_band(record.client_evaluations, len(times))
    if len(record.clients) > 1:
        band = "10-90 % of clients"
        axes.fill_between(times, low, high, color=colour, alpha=0.15, lw=0, label=band)
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
    """Return the mean accuracy of each cluster at every evaluation.

    Empty without clusters, or with too many to tell apart.
    """
    made = sorted({cluster for change in record.changes for cluster in change.made})
    if not 0 < len(made) <= _MOST_CLUSTERS:
        return {}
    evaluations, count = record.client_evaluations, len(record.evaluations.time)
    return {cluster: evaluations.means(evaluations.cluster == cluster, count) for cluster in made}


def _mark_changes(axes: Axes, changes: Sequence[ClustersChanged], seconds: float) -> None:
    """Draw a line at each split and merge, labelled if there is room."""
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
    """Mark drifts above the curves; return whether there are lines."""
    if not record.data_changes:
        return False
    axes.set_ylim(0.0, axes.get_ylim()[1] / (1.0 - _DRIFT_ROW))
    return mark_drifts(axes, record.data_changes, seconds, 1.0 - _DRIFT_ROW / 2)


def _legend(figure: Figure, axes: Axes, drifts: bool, measure: Measure) -> None:
    """Draw the legend in the corner, or below if drifts may move curves into it."""
    if not drifts:
        axes.legend(loc=_legend_place(measure))
        return
    handles = [*axes.get_legend_handles_labels()[0], drift_line()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))


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
    """Return whether a run reaches the target so early that time is drawn logarithmically."""
    arrivals = [arrival[0] for record in runs if (arrival := _arrival(record, target))]
    return 0.0 < min(arrivals, default=end) < _EARLY * end


def _arrival(record: RunRecord, target: float) -> tuple[float, float] | None:
    """Return the time and accuracy at which a run first reached the target, or None.

    Evaluations answered by few clients do not count.
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
        axes.plot(time / seconds, accuracy, "o", ms=6, color=colour, mec="white", zorder=4)


# -----------------------------------------------------------------------------
# Staleness of the applied updates of one or several runs.
# -----------------------------------------------------------------------------


@style()
def staleness_figure(records: Mapping[str, RunRecord], *, height: float = 0.55) -> Figure:
    """Draw the staleness of each method's applied updates, one row per method.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label of each method to its run.
    height : float
        Height of a row in inches.
    """
    staleness = {
        label: record.updates.staleness
        for label, record in records.items()
        if record.updates.seq.size
    }
    stale = {label: values for label, values in staleness.items() if values.max() > 0}
    if not stale:
        figure = new_figure(7.2, 2.4)
        say_empty(figure.add_subplot(), "no method used a stale update")
        return figure
    figure = new_figure(7.2, 1.0 + height * len(stale))
    largest = max(int(values.max()) for values in stale.values())
    # Bins that double: 0, 1, 2-3, 4-7, …
    edges = [0, *(2**power for power in range(largest.bit_length() + 1))]
    looks = method_looks(records)
    rows = figure.subplots(len(stale), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(rows, stale.items(), strict=True):
        _draw_staleness(axes, label, values, edges, looks[label][0])
    rows[0].set_title("Staleness of the updates")
    last = rows[-1]
    ticks = np.arange(len(edges) - 1)
    spans = [str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    # Many stand side by side in a paper's column only if they lean.
    last.set_xticks(ticks, spans)
    if len(spans) > 6:
        for text in last.get_xticklabels():
            text.set(rotation=45, ha="right", rotation_mode="anchor")
    last.set_xlabel("model versions since the dispatch")
    return figure


def _draw_staleness(
    axes: Axes, label: str, values: Integers, edges: Sequence[int], colour: str
) -> None:
    counts, _ = np.histogram(values, bins=edges)
    shares = counts / counts.sum()
    axes.bar(np.arange(len(shares)), shares, width=0.9, color=colour)
    # Above the bars there is room for the remark.
    axes.set_ylim(0.0, 1.5 * max(shares.max(), 0.01))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.text(
        0.995,
        1.0,
        f"median {np.median(values):.0f}, largest {values.max()}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8,
        color=MUTED,
    )


# -----------------------------------------------------------------------------
# The fleet: similarity of clients, and devices' work over time.
# -----------------------------------------------------------------------------


_LABELLED = 12
"""Maximum number of labelled clusters."""
_NAMED_ROWS = 24
"""Maximum number of devices whose rows have their names."""


@style()
def similarity_figure(
    clients: Sequence[str],
    matrix: NDArray[np.floating],
    clusters: dict[str, int],
    of: int = 0,
) -> Figure:
    """Draw the method's similarity of clients, ordered by cluster.

    Parameters
    ----------
    clients : Sequence[str]
        Their ids, in the order of the matrix.
    matrix : ndarray
        Similarities, NaN where not known. Shape (n, n).
    clusters : dict[str, int]
        Cluster of each client at the end, by client id.
    of : int
        Number of all clients, if these are a sample.
    """
    figure, axes = one_axes(5.6, 4.8, "Similarity of clients as measured by the method")
    order = sorted(range(len(clients)), key=lambda i: (clusters.get(clients[i], -1), i))
    values = np.asarray(matrix, np.float64)[np.ix_(order, order)]
    off_diagonal = values[~np.eye(len(values), dtype=bool)]
    known = off_diagonal[np.isfinite(off_diagonal)]
    axes.grid(False)
    if not len(known):
        say_empty(axes, "no pair was compared")
        axes.set_xticks([])
        axes.set_yticks([])
        return figure
    # Cosines of whole models are close to 1, so the colours span the values, not [0, 1].
    low, high = np.percentile(known, [1, 99])
    axes.set_facecolor("#d9dde2")
    image = heat_map(axes, values, low, max(high, low + 1e-9))
    bar = figure.colorbar(image, ax=axes, shrink=0.85, extend="both")
    bar.outline.set_visible(False)
    start = 0
    ticks, labels = [], []
    for cluster, members in groupby(clusters.get(clients[i], -1) for i in order):
        size = len(list(members))
        axes.add_patch(
            Rectangle(
                (start - 0.5, start - 0.5),
                size,
                size,
                fill=False,
                edgecolor=cluster_colour(max(cluster, 0)),
                linewidth=2.2,
                clip_on=False,
            )
        )
        ticks.append(start + size / 2 - 0.5)
        labels.append(f"cluster {cluster}")
        start += size
    shown = f"{len(clients):,} of {of:,} clients" if of > len(clients) else "clients"
    axes.set_xlabel(f"{shown}, by cluster")
    axes.set_xticks([])
    if len(ticks) <= _LABELLED:
        axes.set_yticks(ticks, labels, rotation=90, va="center")
    else:
        axes.set_yticks([])
    return figure


@style()
def devices_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw devices' work: a row per device, the fastest on top, a bar per task."""
    figure, axes = one_axes(7.2, 5.0)
    updates, rejections = record.updates, record.rejections
    shown = len(updates.time) <= MOST_BARS
    end = record.end if shown else float(updates.time[MOST_BARS - 1])
    seconds = time_axis(axes, end, clock)
    part = first_part(end, record.end, seconds, " of the run")
    axes.set_title(f"Devices at work{part}")
    durations = updates.time - updates.dispatched_at
    typical = {client.client: math.inf for client in record.clients}
    for name in np.unique(updates.client):
        typical[str(name)] = float(np.median(durations[updates.client == name]))
    rows = {client: row for row, client in enumerate(fastest_first(typical))}
    if not rows:
        say_empty(axes, "no devices")
        return figure
    for of, colours, edge, hatch in (
        (updates, [cluster_colour(int(k)) for k in updates.cluster], FAINT, None),
        (rejections, "none", REJECTED, "////"),
    ):
        spans = zip(of.client.tolist(), of.dispatched_at.tolist(), of.time.tolist(), strict=True)
        draw_spans(axes, rows, spans, end, seconds, colours, edge, hatch)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    if len(rows) <= _NAMED_ROWS:
        # A name may look like a formula.
        names = [_row_label(client) for client in rows]
        axes.set_yticks(range(len(rows)), names, fontsize="small", parse_math=False)
        axes.set_title(f"Devices at work, the fastest on top{part}")
    else:
        axes.set_yticks([0, len(rows) - 1], ["fastest", "slowest"])
    axes.set_ylabel(f"{len(rows)} of {len(record.clients)} devices")
    axes.grid(False, axis="y")
    clusters = sorted({int(cluster) for cluster in updates.cluster})
    handles = [Patch(color=cluster_colour(k), label=f"cluster {k}") for k in clusters]
    if len(rejections.time):
        handles.append(Patch(facecolor="none", edgecolor=REJECTED, hatch="////", label="rejected"))
    if 1 < len(handles) <= _LABELLED:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    return figure


# -----------------------------------------------------------------------------
# Figures of methods' own measures, as declared by their schemas.
# -----------------------------------------------------------------------------


_MOST_KEYS = 12
"""Maximum number of clients or clusters with own colours and names."""
_MOST_INSIDE = 8
"""Maximum number of curves in an inner legend."""


def measure_figure(record: RunRecord, schema: MeasureSchema, *, clock: str = CLOCK) -> Figure:
    """Draw a measure of a run as declared by its schema.

    Parameters
    ----------
    schema : MeasureSchema
        Declares the measure; see :attr:`raceme.records.record.RunRecord.drawn_measures`.
    clock : str
        Label of the time axis.
    """
    if schema.figure == "shares":
        return shares_figure({"": record}, schema)
    if schema.figure == "graph":
        return graph_figure(record, schema, clock=clock)
    return curves_figure(record, schema, clock=clock)


@style()
def curves_figure(record: RunRecord, schema: MeasureSchema, *, clock: str = CLOCK) -> Figure:
    """Draw a measure over time: one curve, or one per client or cluster."""
    curves: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in record.measured.get(schema.name, ()):
        for key, value in event.numbers().items():
            curves[str(key)].append((event.time, value))
    figure, axes = one_axes(7.2, 3.2, schema.heading, x=f"{clock} (s)", y=schema.unit, grid="y")
    few = len(curves) <= _MOST_KEYS
    for index, (key, points) in enumerate(curves.items()):
        times, values = zip(*points, strict=True)
        axes.plot(
            times,
            values,
            ls="none" if schema.figure == "points" else "-",
            marker="." if schema.figure == "points" or len(points) == 1 else "",
            drawstyle="steps-post" if schema.figure == "steps" else "default",
            color=series_colour(index) if few else MUTED,
            label=f"{schema.per} {key}" if few and key else None,
        )
    if schema.per and few:
        axes.legend(loc="best")
    return figure


def compared_measures(records: Iterable[RunRecord]) -> list[MeasureSchema]:
    """Return the measures that are compared across runs, by name."""
    found = {schema.name: schema for record in records for schema in record.drawn_measures}
    return [schema for _, schema in sorted(found.items()) if schema.figure == "shares"]


@style()
def shares_figure(records: Mapping[str, RunRecord], schema: MeasureSchema) -> Figure:
    """Draw the complementary distribution of a share (CSAFL's figure 5).

    One curve per run; runs without the measure are left out but keep their colour.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Runs by label. A single run needs no label.
    schema : MeasureSchema
        Declares the measure, whose value is a share.
    """
    figure, axes = one_axes(
        7.2, 3.6, schema.heading, x=f"share of the {schema.of}", y="how often it is more", grid="y"
    )
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks(np.linspace(0.0, 1.0, 11))
    drawn = 0
    looks = method_looks(records)
    for label, record in records.items():
        measured = record.measured.get(schema.name, ())
        if not measured:
            continue
        drawn += 1
        shares = np.array([x for event in measured for x in event.numbers().values()], np.float64)
        mean = f"mean {shares.mean():.0%}" if shares.any() else "never"
        # Finer steps are invisible and would make large pages.
        values, often = longer_than(shares.round(3))
        axes.step(
            values,
            often,
            where="post",
            color=looks[label][0],
            ls=looks[label][1],
            label=f"{label}: {mean}" if label else mean,
            # Keep a share that is always 0 visible above the axis.
            clip_on=False,
            zorder=3,
        )
    if not drawn:
        say_empty(axes, "not measured")
        return figure
    for percent in LONG:
        axes.axvline(percent / 100, color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1)
    if drawn <= _MOST_INSIDE:
        axes.legend(loc="upper right")
    else:
        legend_beside(axes)
    return figure


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


# -----------------------------------------------------------------------------
# True mixtures of clients' data and their estimates.
# -----------------------------------------------------------------------------


_MOST_CLIENTS = 4
_MOST_MIXTURE_BARS = 40
"""Maximum number of uploads per client, the last ones."""
_FAR = 98.0
"""Percentile of divergences at the end of the axis."""
_GAP = 0.18
"""Gap between true and estimated mixtures, in heights of a bar."""


def why_no_mixtures(record: RunRecord) -> str:
    """Return why a run's mixtures and estimates are not comparable, or an empty text."""
    missing = record.uploads.unmatched()
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    return f"no cluster corresponds to distribution {names}: there are fewer clusters"


@style()
def mixtures_figure(record: RunRecord) -> Figure:
    """Draw the divergence of estimated from true mixtures, and both for some clients.

    Above, a dot is an upload and the line the mean by session. Below, a client of each of the first
    few distributions, with its mixture at each of its uploads: true above, estimated below (figure
    5 of "Towards Client Driven Federated Learning").
    """
    found = record.uploads.divergences()
    if not found:
        figure, axes = one_axes(7.2, 3.0, "Mixtures of data, true and estimated")
        say_empty(axes, why_no_mixtures(record) or "no mixtures, or no estimates of them")
        return figure
    of = record.uploads.matched()
    chosen = _examples([row for row, _ in found])
    figure = new_figure(7.2, 2.6 + 1.15 * len(chosen))
    heights = [2.2, *[1.0] * len(chosen)]
    top, *below = np.atleast_1d(figure.subplots(1 + len(chosen), height_ratios=heights))
    _draw_divergences(top, record, found)
    for axes, (client, rows) in zip(below, chosen.items(), strict=True):
        _draw_client(axes, client, rows, of)
    if below:
        below[-1].set_xlabel("upload of the client")
    _mixture_legend(figure, of, len(found[0][0].mixture))
    return figure


def _draw_divergences(axes: Axes, record: RunRecord, found: Sequence[tuple[Upload, float]]) -> None:
    axes.set_title("Mixtures of data, true and estimated")
    axes.set_xlabel("updates")
    axes.set_ylabel("KL(true ‖ estimated)")
    axes.grid(axis="y")
    values = [value for _, value in found]
    seqs = [row.seq for row, _ in found]
    draw_dots(axes, seqs, values, series_colour(0), ms=3.5, alpha=0.35, label="an upload")
    if means := record.uploads.curve("divergence"):
        axes.plot(*zip(*means, strict=True), color=INK, marker="o", ms=3.5, label="mean by session")
    highest = max([float(np.percentile(values, _FAR)), *(mean for _, mean in means)])
    axes.set_ylim(0.0, 1.1 * highest or 1.0)
    axes.set_xlim(left=0)
    # Opaque, as it may cover dots.
    legend = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "markerscale": 2.0}
    axes.legend(loc="upper right", **legend)


def _examples(rows: Sequence[Upload]) -> dict[str, list[Upload]]:
    """Return the uploads of some clients: per distribution the one with most uploads."""
    of = grouped((row.client, row) for row in rows)
    mains: dict[int, list[str]] = defaultdict(list)
    for client, own in of.items():
        often = Counter(int(np.argmax(row.mixture)) for row in own)
        mains[min(often, key=lambda main: (-often[main], main))].append(client)
    busiest = [min(mains[main], key=lambda name: -len(of[name])) for main in sorted(mains)]
    return {client: of[client] for client in busiest[:_MOST_CLIENTS]}


def _draw_client(axes: Axes, client: str, rows: Sequence[Upload], of: Mapping[int, int]) -> None:
    """Draw a client's mixtures as bars: true above, estimated below."""
    first = max(1, len(rows) - _MOST_MIXTURE_BARS + 1)
    rows = rows[-_MOST_MIXTURE_BARS:]
    numbers = np.arange(first, first + len(rows))
    for values, bottom in (
        (np.array([row.mixture for row in rows]), 1 + _GAP),
        (np.array([shares(row.estimate, of, row) for row in rows]), 0.0),
    ):
        start = np.full(len(numbers), bottom)
        for distribution, height in enumerate(values.T):
            colour = cluster_colour(_cluster_of(distribution, of))
            axes.bar(numbers, height, width=0.86, bottom=start, color=colour, lw=0)
            start = start + height
    axes.set_ylim(0.0, 2 + _GAP)
    axes.set_xlim(first - 0.6, first + len(rows) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_yticks([1.5 + _GAP, 0.5], ["true", "estimated"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(client, rotation=0, ha="right", va="center")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="x", length=2, pad=1)


def _cluster_of(distribution: int, of: Mapping[int, int]) -> int:
    """Return the cluster that stands for a distribution; its own number if none does."""
    return next((cluster for cluster, known in of.items() if known == distribution), distribution)


def _mixture_legend(figure: Figure, of: Mapping[int, int], distributions: int) -> None:
    handles = []
    for distribution in range(distributions):
        cluster = _cluster_of(distribution, of)
        name = f"distribution {distribution}"
        name += f" (cluster {cluster})" if cluster != distribution else ""
        handles.append(Patch(color=cluster_colour(cluster), label=name))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(distributions, 4))


# -----------------------------------------------------------------------------
# A measure of each cluster that names other clusters, as a graph.
# -----------------------------------------------------------------------------


_MOST_NODES = 24
"""More clusters than this cannot be told apart: those with the most clients are drawn."""
_MOST_ARROWS_IN_FULL = 30
"""More arrows than this are drawn thin."""
_MOST_GROUPS = 7
"""More true groups than there are shades have no legend."""
_LARGEST = 0.3
"""Radius of the largest node, where the circle of nodes has radius 1."""
_SMALLEST = 0.45
"""Radius of the smallest node, as a share of the largest: its number has to fit in."""
_FLAT = 0.2
"""Nodes whose direction is so near an axis have their words in this axis."""
_RING = 0.26
"""Width of the ring of true groups, as a share of the radius."""


@style()
def graph_figure(record: RunRecord, schema: MeasureSchema, *, clock: str = CLOCK) -> Figure:
    """Draw a measure of clusters as a graph at the end, and its size over time.

    A node is a cluster in its colour, as large as its number of clients; the ring around it shows
    their true groups, where these are known. An arrow leads to a cluster from each of those that
    its value names.

    Parameters
    ----------
    schema : MeasureSchema
        The measure: per cluster the others that it names.
    clock : str
        Label of the time axis.
    """
    if schema.name not in record.measured:
        figure, axes = one_axes(7.2, 4.0, schema.heading)
        say_empty(axes, "not measured")
        return figure
    figure = new_figure(7.2, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=[1.55, 1.0])
    handles = _draw_graph(left, record, schema)
    _draw_counts(right, record, schema, clock)
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 4))
    return figure


def counts_over_time(
    record: RunRecord, schema: MeasureSchema
) -> tuple[list[float], list[int], list[int]]:
    """Return times, and the number of clusters and of arrows from each of them on.

    Clusters are those that an event has named; see :func:`graph_figure` for the arrows.
    """
    membership = Membership()
    changes: list[ClustersChanged | Measured] = [*record.changes, *record.measured[schema.name]]
    counts: dict[float, tuple[int, int]] = {}
    arrows = 0
    for event in sorted(changes, key=lambda event: event.time):
        if isinstance(event, Measured):
            arrows = sum(map(len, event.value.values()))
        else:
            membership.observe(event)
        counts[float(event.time)] = len(membership.existing), arrows
    clusters, many = ([pair[place] for pair in counts.values()] for place in (0, 1))
    return list(counts), clusters, many


def _draw_graph(axes: Axes, record: RunRecord, schema: MeasureSchema) -> list[Artist]:
    """Draw clusters on a circle, and arrows; return the legend's entries."""
    sources = record.measured[schema.name][-1].value
    members: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
    for client, cluster in record.assignment().items():
        members[cluster][record.groups.get(client)] += 1
    named = {k for cluster, of in sources.items() for k in (cluster, *of)}
    clusters = sorted(members.keys() | named)
    nodes = sorted(clusters, key=lambda k: -members[k].total())[:_MOST_NODES]
    # Clusters of one true group stand side by side.
    nodes.sort(key=lambda k: (_main_group(members[k]), k))
    of = f" ({len(nodes)} of {len(clusters)} clusters)" if len(nodes) < len(clusters) else ""
    axes.set_title(f"{schema.heading} at the end{of}")
    axes.set_aspect("equal", adjustable="datalim")
    axes.axis("off")
    places = _places(len(nodes))
    room = 2 * math.sin(math.pi / len(nodes)) if len(nodes) > 1 else 2.0
    largest = min(_LARGEST, 0.36 * room)
    most = max((members[k].total() for k in nodes), default=0) or 1
    discs = {}
    for cluster, (x, y) in zip(nodes, places, strict=True):
        share = math.sqrt(members[cluster].total() / most)
        radius = largest * max(share, _SMALLEST)
        discs[cluster] = _draw_node(axes, cluster, (x, y), radius, members[cluster])
    pairs = [(k, s) for k, of_k in sources.items() for s in of_k if k in discs and s in discs]
    width = 1.5 if len(pairs) <= _MOST_ARROWS_IN_FULL else 0.7
    for target, source in pairs:
        axes.add_patch(
            FancyArrowPatch(
                discs[source].center,
                discs[target].center,
                connectionstyle="arc3,rad=0.16",
                arrowstyle="-|>",
                mutation_scale=11 if width > 1 else 7,
                patchA=discs[source],
                patchB=discs[target],
                shrinkA=2.0,
                shrinkB=2.5,
                color=cluster_colour(source),
                lw=width,
                zorder=1,
            )
        )
    if not pairs:
        axes.set_title(f"{schema.heading} at the end: none")
    edge = 1.0 + largest + 0.12
    # Not fixed limits: which of them has room to spare depends on the words beside the nodes.
    axes.margins(0)
    axes.update_datalim([(-edge - 0.3, -edge), (edge + 0.3, edge)])
    axes.autoscale_view()
    groups = sorted({g for own in members.values() for g in own if g is not None})
    look = {"color": INK, "lw": 1.2, "marker": ">", "ms": 4}
    entries: list[Artist] = [Line2D([], [], label=f"from the {schema.value} of a cluster", **look)]  # type: ignore[arg-type]
    if len(groups) <= _MOST_GROUPS:
        entries += [Patch(color=group_colour(g), label=f"true group {g}") for g in groups]
    return entries


def _main_group(own: Counter[int | None]) -> int:
    """Return the most common true group, the least of equal ones; the last of all if unknown."""
    known = {group: count for group, count in own.items() if group is not None}
    return min(known, key=lambda group: (-known[group], group), default=1 << 30)


def _places(count: int) -> Sequence[tuple[float, float]]:
    """Return places on the circle, clockwise from the top; two stand side by side."""
    if count == 1:
        return [(0.0, 0.0)]
    start = math.pi if count == 2 else math.pi / 2
    angles = start - 2 * math.pi * np.arange(count) / count
    return [(float(math.cos(angle)), float(math.sin(angle))) for angle in angles]


def _draw_node(
    axes: Axes,
    cluster: int,
    centre: tuple[float, float],
    radius: float,
    own: Counter[int | None],
) -> Circle:
    """Draw a cluster; return the outline at which arrows end."""
    outline = Circle(centre, radius, fill=False, lw=0)
    axes.add_patch(outline)
    known = sorted((group, count) for group, count in own.items() if group is not None)
    inner = radius * (1 - _RING) if known else radius
    angle = 90.0
    for group, count in known:
        extent = 360.0 * count / sum(number for _, number in known)
        colour = group_colour(group)
        axes.add_patch(
            Wedge(
                centre, radius, angle - extent, angle, width=radius * _RING, color=colour, zorder=2
            )
        )
        angle -= extent
    colour = cluster_colour(cluster)
    # A cluster without clients keeps its model; it is an outline.
    face = colour if own else "white"
    edge = "white" if own else colour
    axes.add_patch(Circle(centre, inner, facecolor=face, edgecolor=edge, lw=1.2, zorder=3))
    x, y = centre
    axes.text(
        x,
        y,
        str(cluster),
        ha="center",
        va="center",
        color="white" if own else colour,
        fontweight="bold",
        fontsize=10.0 if radius > 0.15 else 7.0,
        zorder=4,
    )
    _draw_size(axes, centre, radius, own.total())
    return outline


def _draw_size(axes: Axes, centre: tuple[float, float], radius: float, size: int) -> None:
    """Say how many clients a cluster has, outside the circle of nodes, where no arrow goes."""
    x, y = centre
    far = math.hypot(x, y)
    dx, dy = (x / far, y / far) if far and abs(y) > _FLAT else (0.0, 1.0 if y > 0 else -1.0)
    if abs(y) <= _FLAT and abs(x) > _FLAT:
        dx, dy = math.copysign(1.0, x), 0.0
    out = radius + 0.06
    words = f"{size} client{'' if size == 1 else 's'}"
    across = "center" if abs(dx) < _FLAT else "left" if dx > 0 else "right"
    up = "center" if abs(dy) < _FLAT else "bottom" if dy > 0 else "top"
    axes.text(x + out * dx, y + out * dy, words, ha=across, va=up, fontsize=7.5, color=MUTED)


def _draw_counts(axes: Axes, record: RunRecord, schema: MeasureSchema, clock: str) -> None:
    """Draw the numbers of clusters and arrows over time."""
    times, clusters, arrows = counts_over_time(record, schema)
    seconds = time_axis(axes, record.end, clock)
    at = [time / seconds for time in [*times, max(record.end, times[-1])]]
    for values, colour, dashes, label in (
        (clusters, INK, "-", "clusters"),
        (arrows, series_colour(5), (0, (4.5, 1.6)), schema.value),
    ):
        axes.step(at, [*values, values[-1]], where="post", color=colour, ls=dashes, label=label)
    axes.set_title("Counts over time")
    axes.set_ylim(0, max(*clusters, *arrows, 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")
    axes.legend(loc="upper right")


# -----------------------------------------------------------------------------
# Learning and forgetting: accuracy on each task after each step of the data.
# -----------------------------------------------------------------------------


_MOST_WORDS = 12
"""Maximum number of tasks with numbers in cells."""
_DARK = 0.6
"""Share of the colour scale from which text is dark."""


@style()
def tasks_figure(record: RunRecord) -> Figure:
    """Draw the accuracy on each task after each step, with means and clusters.

    A column of the map is the end of a step. The framed cell is the task trained in the step;
    former tasks are below it, the next, untrained one above it.
    """
    tasks = TaskAccuracies(record.task_tests)
    if not tasks.count:
        figure, axes = one_axes(7.2, 4.0, "Tasks, one after another")
        say_empty(axes, "no tests on former tasks")
        return figure
    figure = new_figure(7.2, 4.0)
    parts = figure.subplot_mosaic(
        [["map", "means"], ["map", "clusters"]],
        width_ratios=[1.35, 1.0],
        height_ratios=[2.6, 1.0],
    )
    _draw_map(parts["map"], tasks.matrix(), tasks.measure)
    _draw_means(parts["means"], tasks)
    _draw_clusters(parts["clusters"], tasks)
    return figure


def means_over_time(tasks: TaskAccuracies) -> dict[str, Floats]:
    """Return accuracies after each step, by label: on that task, on all so far, on the next."""
    matrix = tasks.matrix()
    so_far = [row[: step + 1] for step, row in enumerate(matrix)]
    found = {
        "task of the step": np.diagonal(matrix).copy(),
        "mean of all so far": np.array([_known_mean(row) for row in so_far]),
        "next task": np.array([*np.diagonal(matrix, 1), np.nan]),
    }
    return {label: values for label, values in found.items() if np.isfinite(values).any()}


def _known_mean(values: Floats) -> float:
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def _draw_map(axes: Axes, matrix: Floats, measure: Measure) -> None:
    """Draw a cell per task (upwards) and step (to the right)."""
    count = len(matrix)
    axes.set_title(f"{measure.title} on each task")
    axes.set_xlabel("after step")
    axes.set_ylabel("tested on the data of step")
    known = matrix[np.isfinite(matrix)]
    low, high = (0.0, max(float(known.max(initial=0)), 1e-9)) if measure.is_error else (0.0, 1.0)
    colours = "viridis_r" if measure.is_error else "viridis"
    image = heat_map(axes, matrix.T, low, high, origin="lower", aspect="auto", cmap=colours)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_steps_locator(count))
    axes.set_xlim(-0.55, count - 0.45)
    axes.set_ylim(-0.55, count - 0.45)
    for step in np.flatnonzero(np.isfinite(np.diagonal(matrix))):
        frame = Rectangle((step - 0.5, step - 0.5), 1, 1, fill=False, edgecolor=INK, lw=1.4)
        axes.add_patch(frame)
    label = measure.label
    if count <= _MOST_WORDS:
        _write_numbers(axes, matrix, measure, (low, high))
        label += "" if measure.is_error else "; in the cells percent"
    axes.figure.colorbar(image, ax=axes, label=label).outline.set_visible(False)


def _steps_locator(count: int) -> Locator:
    """Return ticks at the steps, at all of them if few."""
    if count <= _MOST_WORDS:
        return FixedLocator(list(range(count)))
    return MaxNLocator(10, integer=True)


def _write_numbers(
    axes: Axes, matrix: Floats, measure: Measure, bounds: tuple[float, float]
) -> None:
    """Write the value into each cell, accuracies in percent."""
    size = min(8.5, 60.0 / len(matrix))
    for after, on in np.argwhere(np.isfinite(matrix)):
        value = float(matrix[after, on])
        share = (value - bounds[0]) / (bounds[1] - bounds[0])
        is_light = (1 - share if measure.is_error else share) > _DARK
        text = f"{value:.3g}" if measure.is_error else f"{100 * value:.0f}"
        colour = INK if is_light else "white"
        axes.text(after, on, text, ha="center", va="center", fontsize=size, color=colour)


def _draw_means(axes: Axes, tasks: TaskAccuracies) -> None:
    """Draw the means after each step, and the untrained model on each task."""
    look: dict[str, dict[str, Any]] = {
        "task of the step": {"color": series_colour(0)},
        "mean of all so far": {"color": INK},
        "next task": {"color": series_colour(1), "ls": (0, (4.5, 1.6))},
    }
    steps = np.arange(tasks.count)
    for label, values in means_over_time(tasks).items():
        known = np.isfinite(values)
        how = {"marker": "o", "ms": 3.5, "label": label, **look[label]}
        axes.plot(steps[known], values[known], **how)
    untrained = tasks.untrained()[1:]
    known = np.isfinite(untrained)
    if known.any():
        # It was tested one step earlier, as the next task.
        dots: dict[str, Any] = {"color": MUTED, "ls": (0, (1.1, 1.3)), "lw": 1.2}
        axes.plot(steps[:-1][known], untrained[known], label="next task, untrained", **dots)
    axes.set_title("After each step")
    axes.xaxis.set_major_locator(_steps_locator(tasks.count))
    axes.set_xlim(-0.3, tasks.count - 0.7)
    axes.set_ylabel(tasks.measure.label)
    axes.grid(axis="y")
    if not tasks.measure.is_error:
        axes.set_ylim(0.0, 1.02)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=2, columnspacing=1.0)


def _draw_clusters(axes: Axes, tasks: TaskAccuracies) -> None:
    """Draw the number of cluster models after each step."""
    known = [(step, number) for step, number in enumerate(tasks.clusters) if number is not None]
    axes.step(*zip(*known, strict=True), where="mid", color=INK, label="clusters")
    axes.set_ylim(0, 1.25 * max(number for _, number in known))
    axes.set_ylabel("clusters")
    axes.set_xlabel("step")
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(_steps_locator(tasks.count))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.set_xlim(-0.3, tasks.count - 0.7)


# -----------------------------------------------------------------------------
# Scores of uploads, of the models returned for them, and of cluster models.
# -----------------------------------------------------------------------------


_TITLE = "Uploads and the models returned for them"
_CLUSTERS_TITLE = "Cluster models on the server's test sets"
_MARGIN = 0.03
"""Margin above and below the curves, for errors relative to the largest."""
_QUANTITIES = {
    "before": ("uploaded", series_colour(0)),
    "after": ("returned", series_colour(5)),
}


def has_scores(record: RunRecord) -> bool:
    """Return whether a run has scores of uploads or clusters."""
    return bool(record.cluster_scores) or _has_uploads(record)


def _has_uploads(record: RunRecord) -> bool:
    """Return whether a run has scores of uploads (`score-uploads`)."""
    return any(row.before is not None for row in record.uploads.rows)


@style()
def uploads_figure(record: RunRecord) -> Figure:
    """Draw the accuracy of uploads, of returned models and of clusters.

    Uploads and returned models are tested on the mixture of the upload's training data. A dot is an
    upload, a line the mean over clients per session; the server tests clusters on its own test sets
    (figures 3 and 9–19 of "Towards Client Driven Federated Learning").
    """
    only_clusters = bool(record.cluster_scores) and not _has_uploads(record)
    title = _CLUSTERS_TITLE if only_clusters else _TITLE
    figure, axes = one_axes(7.2, 4.0, title, x="updates", y=record.measure.label, grid="y")
    if not has_scores(record):
        say_empty(axes, "no scores of uploads")
        return figure
    shown = _draw_cluster_scores(axes, record)
    for quantity, (label, colour) in _QUANTITIES.items():
        shown += _draw_quantity(axes, record.uploads, quantity, label, colour)
    # Limits follow the curves, as single uploads may be outliers.
    margin = _MARGIN * (max(shown) if record.measure.is_error else 1.0)
    highest = np.inf if record.measure.is_error else 1.0
    axes.set_ylim(max(0.0, min(shown) - margin), min(highest, max(shown) + margin))
    axes.set_xlim(left=0)
    handles = axes.get_legend_handles_labels()[0]
    legend_beside(axes, handles=handles[::-1])
    return figure


def _draw_quantity(
    axes: Axes, uploads: Uploads, quantity: str, label: str, colour: str
) -> list[float]:
    """Draw each upload and the mean per session; return the values that must be visible."""
    known = [row for row in uploads.rows if getattr(row, quantity) is not None]
    if not known:
        return []
    values = [getattr(row, quantity) for row in known]
    draw_dots(axes, [row.seq for row in known], values, colour)
    means = uploads.curve(quantity)
    if not means:
        return [float(np.mean(values))]
    axes.plot(*zip(*means, strict=True), color=colour, marker="o", ms=3.5, label=label, zorder=4)
    return [mean for _, mean in means]


def _draw_cluster_scores(axes: Axes, record: RunRecord) -> list[float]:
    """Draw the clusters' accuracies and their mean; return all drawn values."""
    scores = record.cluster_scores
    updates, means = [event.updates for event in scores], [event.mean for event in scores]
    drawn = list(means)
    clusters = sorted({cluster for event in scores for cluster in event.accuracies})
    if 1 < len(clusters) <= _MOST_CLUSTERS:
        for cluster in clusters:
            values: Sequence[float] = [e.accuracies.get(cluster, np.nan) for e in scores]
            drawn += [value for value in values if np.isfinite(value)]
            axes.plot(
                updates,
                values,
                color=cluster_colour(cluster),
                lw=0.9,
                alpha=0.8,
                label=f"cluster {cluster}",
                zorder=2,
            )
    if scores:
        name = "mean of the clusters" if len(clusters) > 1 else "cluster's model"
        axes.plot(updates, means, color=INK, ls=(0, (4.5, 1.6)), label=name, zorder=3)
    return drawn


# -----------------------------------------------------------------------------
# Clients as streams between clusters: positions of bands, and flows.
#
# A client has a band in each of its clusters, whose height is its weight there and sums to 1. When
# weights change, the unchanged part flows straight on, and the rest from losing to gaining
# clusters.
# -----------------------------------------------------------------------------


Bands = dict[int, tuple[float, float]]
"""Start and height of a client's band, by cluster."""
Drawn = tuple[float, dict[str, Bands]]
"""A time and each client's bands from then on."""
_Part = tuple["Flow", float, float, float]
"""A flow with its start, length of bend, and length."""

_LEAST = 1e-9
"""Tolerance of equal weights."""
_LATER = 0.4
"""Maximum lag of a bend's trailing edge, as a share of the bend."""
_SQUARE = 2.3
"""Aspect ratio of a drawing at which steep bands keep their width."""
_DENSE = 0.6
"""Minimum density of flows between two clusters to be drawn as one body."""


@dataclass(frozen=True)
class Shapes:
    """Parts of a drawing.

    Attributes
    ----------
    clusters : list[int]
        Cluster of each shape, for its colour.
    corners : ndarray
        Time in seconds and height. Shape (shapes, corners, 2).
    """

    clusters: list[int]
    corners: Floats


class Flow(NamedTuple):
    """A flow from band to band.

    Attributes
    ----------
    source, cluster : int
        Source and target cluster; equal for a staying part.
    begins, ends : float
        Positions before and after.
    height_before, height : float
        Heights before and after, which differ for flows that appear or vanish.
    """

    source: int
    cluster: int
    begins: float
    height_before: float
    ends: float
    height: float

    @property
    def stays(self) -> bool:
        """Whether it stays in its cluster."""
        return self.source == self.cluster


class AlluvialDiagram:
    """The bands of all clients of a run.

    Parameters
    ----------
    placements : Sequence[Placement]
        Every change of a client's clusters, in order.
    groups : Mapping[str, int or None]
        True group by client id, which orders clients with the same history.
    end : float
        Time at which the run ended, in seconds.

    Attributes
    ----------
    order : list[str]
        Clients from top to bottom at the start.
    gap : float
        Gap between two clusters, in heights of a client.
    """

    def __init__(
        self, placements: Sequence[Placement], groups: Mapping[str, int | None], end: float
    ) -> None:
        paths = grouped((placed.client, (placed.time, placed.weights)) for placed in placements)
        self._paths = paths
        self._end = end
        # Clients with the same path are adjacent, so that splits separate neighbours only.
        self.order = sorted(
            paths, key=lambda client: (_homes(paths[client]), _known(groups, client))
        )
        self.gap = max(1.0, 0.03 * len(self.order))
        self._place = self._places()

    @property
    def changes(self) -> list[float]:
        """The times at which a client's clusters changed, ascending."""
        return sorted({time for path in self._paths.values() for time, _ in path})

    @property
    def thickness(self) -> int:
        """Maximum number of bands of all clients."""
        return sum(max(len(weights) for _, weights in path) for path in self._paths.values())

    def bands(self, moments: Iterable[tuple[float, float]]) -> list[Drawn]:
        """Return the bands of all clients at some times.

        Parameters
        ----------
        moments : Iterable of (float, float)
            Ascending pairs: start of the drawing, and the time of the shown clusters.
        """
        order, drawn = self.order, list[Drawn]()
        for start, time in moments:
            bands = self._bands(order, time)
            drawn.append((start, bands))
            # Clients keep their vertical order, which minimises crossings.
            heights = {client: _middle(own) for client, own in bands.items()}
            order = sorted(self.order, key=lambda client: heights.get(client, math.inf))
        return drawn

    def bodies(self, drawn: Sequence[Drawn], width: float, end: float) -> Shapes:
        """Return the outlines of whole clusters, drawn behind all bands.

        They fill temporary gaps of moving clients. Parameters as in :meth:`pieces`.
        """
        parts: list[_Part] = []
        stops = [*(start for start, _ in drawn[1:]), end]
        before: dict[str, Bands] = {}
        for index, ((start, bands), stop) in enumerate(zip(drawn, stops, strict=True)):
            turn = max(0.0, min(width, stop - start)) if index else 0.0
            together = [
                flow
                for client, own in bands.items()
                if client in before
                for flow in flows(before[client], own, self._place)
            ]
            level = [Flow(k, k, y, h, y, h) for own in bands.values() for k, (y, h) in own.items()]
            parts += ((hull, start, turn, turn) for hull in _hulls(together))
            rest = max(0.0, stop - start - turn)
            parts += ((hull, start + turn, 0.0, rest) for hull in _hulls(level))
            before = bands
        return _outlines(parts)

    def pieces(self, drawn: Sequence[Drawn], width: float, end: float) -> tuple[Shapes, Shapes]:
        """Return the outlines of all clients' bands: staying and moving parts.

        Parameters
        ----------
        drawn : Sequence
            The bands as :meth:`bands` returns them.
        width : float
            Length of a bend in seconds.
        end : float
            End of the last bands.

        Returns
        -------
        tuple[Shapes, Shapes]
            Staying and moving parts; the latter are drawn in front.
        """
        parts = [part for client in self.order for part in self._parts(client, drawn, width, end)]
        low, high = extent(drawn)
        return (
            _outlines([part for part in parts if part[0].stays]),
            _outlines([part for part in parts if not part[0].stays], end / (high - low) / _SQUARE),
        )

    def _parts(
        self, client: str, drawn: Sequence[Drawn], width: float, end: float
    ) -> Iterator[_Part]:
        """Yield a client's flows, each until its next change."""
        states = [(time, bands.get(client, {})) for time, bands in drawn]
        kept = [states[0], *(new for old, new in pairwise(states) if new[1] != old[1])]
        stops = [*(time for time, _ in kept[1:]), end]
        before = kept[0][1]
        for index, ((start, bands), stop) in enumerate(zip(kept, stops, strict=True)):
            turn = max(0.0, min(width, stop - start)) if index else 0.0
            for flow in flows(before, bands, self._place):
                # Flows that leave all clusters have no level part.
                yield flow, start, turn, max(stop - start, turn) if flow.height else turn
            before = bands

    def _bands(self, order: Sequence[str], time: float) -> dict[str, Bands]:
        """Return the bands of each client with a cluster at a time.

        Bands are centred vertically.
        """
        members: dict[int, list[tuple[str, float]]] = {}
        present = 0
        for client in order:
            path = self._paths[client]
            index = bisect_right(path, time, key=itemgetter(0))
            weights = path[index - 1][1] if index else {}
            present += bool(weights)
            for cluster, weight in weights.items():
                members.setdefault(cluster, []).append((client, weight))
        found: dict[str, Bands] = {}
        y = (len(order) - present - self.gap * max(0, len(members) - 1)) / 2
        for cluster in sorted(members, key=self._place.__getitem__):
            for client, weight in members[cluster]:
                found.setdefault(client, {})[cluster] = (y, weight)
                y += weight
            y += self.gap
        return found

    def _places(self) -> dict[int, int]:
        """Return the vertical order of clusters by their members' mean position.

        The order is constant, so that clusters do not swap when clients move.
        """
        total: dict[int, float] = {}
        ranks: dict[int, float] = {}
        for rank, client in enumerate(self.order):
            path = self._paths[client]
            stops = [*(time for time, _ in path[1:]), self._end]
            for (start, weights), stop in zip(path, stops, strict=True):
                # Weighted by duration; short stays count if there is no other.
                stay = max(stop - start, 1e-6 * self._end, _LEAST)
                for cluster, weight in weights.items():
                    total[cluster] = total.get(cluster, 0.0) + stay * weight
                    ranks[cluster] = ranks.get(cluster, 0.0) + stay * weight * rank
        means = {cluster: ranks[cluster] / total[cluster] for cluster in total}
        return {cluster: i for i, cluster in enumerate(sorted(means, key=lambda k: (means[k], k)))}


def flows(before: Bands, after: Bands, place: Mapping[int, int]) -> list[Flow]:
    """Return the flows between a client's former and current bands.

    Parameters
    ----------
    before, after : Bands
        Without former bands, each one appears; without current ones, each one ends.
    place : Mapping[int, int]
        Order of the clusters, so that upward flows stay above downward ones.
    """
    if len(before) == len(after) == 1:
        ((source, (begin, h)),) = before.items()
        ((target, (stop, _)),) = after.items()
        return [Flow(source, target, begin, h, stop, h)]
    if not before:
        return [Flow(k, k, y + h / 2, 0.0, y, h) for k, (y, h) in after.items()]
    if not after:
        return [Flow(k, k, y, h, y + h / 2, 0.0) for k, (y, h) in before.items()]
    amounts = _amounts(before, after, place)
    leaving = {k: y for k, (y, _) in before.items()}
    arriving = {k: y for k, (y, _) in after.items()}
    begins, ends = {}, {}
    for source, target in sorted(amounts, key=lambda pair: place[pair[1]]):
        begins[source, target] = leaving[source]
        leaving[source] += amounts[source, target]
    for source, target in sorted(amounts, key=lambda pair: place[pair[0]]):
        ends[source, target] = arriving[target]
        arriving[target] += amounts[source, target]
    return [Flow(*pair, begins[pair], h, ends[pair], h) for pair, h in amounts.items()]


def _amounts(before: Bands, after: Bands, place: Mapping[int, int]) -> dict[tuple[int, int], float]:
    """Return the amounts of flow between clusters, minimising movement."""
    stays = {k: min(before[k][1], after[k][1]) for k in before if k in after}
    found = {(k, k): amount for k, amount in stays.items()}
    surplus = {k: h - stays.get(k, 0.0) for k, (_, h) in before.items()}
    deficit = {k: h - stays.get(k, 0.0) for k, (_, h) in after.items()}
    for source in sorted(surplus, key=place.__getitem__):
        for target in sorted(deficit, key=place.__getitem__):
            amount = min(surplus[source], deficit[target])
            if amount > _LEAST:
                found[source, target] = amount
                surplus[source] -= amount
                deficit[target] -= amount
    return found


def _hulls(found: Iterable[Flow]) -> Iterator[Flow]:
    """Yield the hull of all flows between two clusters, if dense."""
    together = grouped(((flow.source, flow.cluster), flow) for flow in found)
    for (source, cluster), own in together.items():
        begins, ends = min(flow.begins for flow in own), min(flow.ends for flow in own)
        before = max(flow.begins + flow.height_before for flow in own) - begins
        after = max(flow.ends + flow.height for flow in own) - ends
        held = sum(flow.height for flow in own)
        if source == cluster or held >= _DENSE * max(before, after):
            yield Flow(source, cluster, begins, before, ends, after)


def _outlines(parts: Sequence[_Part], slope: float = 0.0) -> Shapes:
    """Return the corners of flows: one edge from left to right, the other back.

    Parameters
    ----------
    parts : Sequence
        Flows with start, length of bend, and length.
    slope : float
        Seconds per height of a client's band. It delays the trailing edge of steep flows, which
        would otherwise be too thin.
    """
    bounds = np.array([part[0][2:] for part in parts], np.float64).reshape(-1, 4)
    times = np.array([part[1:] for part in parts], np.float64).reshape(-1, 3)
    begins, height_before, ends, height = (bounds[:, [i]] for i in range(4))
    start, turn, length = (times[:, [i]] for i in range(3))
    way = ends - begins
    share = np.abs(way) / np.maximum(np.abs(way) + height, _LEAST)
    lag = share * np.minimum(_LATER * turn, slope * height)
    ease = np.linspace(0.0, 1.0, 24 if slope else 12)
    bend = ease * ease * (3 - 2 * ease)
    ahead = np.hstack([start, start + (turn - lag) * ease, start + length])
    behind = np.hstack([start, start + lag + (turn - lag) * ease, start + length])
    # The first edge is the trailing one of flows to larger heights.
    first, second = np.where(way > 0, behind, ahead), np.where(way > 0, ahead, behind)
    bend = np.concatenate([[0.0], bend, [1.0]])
    low = begins + way * bend
    high = begins + height_before + (way + height - height_before) * bend
    edges = np.stack([first, low], axis=2), np.stack([second, high], axis=2)[:, ::-1]
    return Shapes([part[0].cluster for part in parts], np.concatenate(edges, axis=1))


def extent(drawn: Sequence[Drawn]) -> tuple[float, float]:
    """Return the vertical extent of all bands."""
    bands = [band for _, found in drawn for own in found.values() for band in own.values()]
    low = min((y for y, _ in bands), default=0.0)
    return low, max((y + height for y, height in bands), default=low + 1.0)


def _middle(bands: Bands) -> float:
    """Return a client's mean position."""
    return sum(height * (y + height / 2) for y, height in bands.values())


def _homes(path: Sequence[tuple[float, Weights]]) -> list[int]:
    """Return a client's sequence of clusters, the heaviest at each time."""
    homes = (home(weights) for _, weights in path)
    return [cluster for cluster, _ in groupby(-1 if k is None else k for k in homes)]


def _known(groups: Mapping[str, int | None], client: str) -> int:
    group = groups.get(client)
    return -1 if group is None else group


# -----------------------------------------------------------------------------
# Figure of the clusters over time with moves, splits and merges.
# -----------------------------------------------------------------------------


_MOST_PIECES = 40_000
"""Approximate maximum number of pieces of the bands."""
_BEND = 0.03
"""Length of a bend as a share of the run; closer changes are merged."""
_MOST_ROOM = 0.05
"""Distance of changes, as a share of the run, that are always drawn separately."""
_LABELLED_BANDS = 12
"""Maximum number of labelled clusters."""
_ROW = 0.055
"""Height of a row of marks as a share of the axes."""


@style()
def clusters_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw every client as a band through its clusters, in their colours.

    Bands are ordered so that splits branch and merges join. A client of several clusters has a band
    in each, with its weight as height. Signs above mark splits, merges, new and retired clusters,
    lines mark drifts. The strip at the right shows the true groups, if known.
    """
    figure, axes = one_axes(7.2, 4.4, "Clusters over time")
    seconds = time_axis(axes, record.end, clock)
    if not record.placements:
        say_empty(axes, "no clients")
        return figure
    streams = AlluvialDiagram(record.placements, record.groups, record.end)
    span = max(record.end, 1e-9)
    changes = [time for time in streams.changes if 0 < time <= span]
    room = max(_BEND, min(streams.thickness / _MOST_PIECES, _MOST_ROOM)) * span
    drawn = streams.bands([(0.0, 0.0), *_together(changes, room)])
    _fill(axes, streams.bodies(drawn, _BEND * span, span), seconds, edge=0.0)
    for shapes in streams.pieces(drawn, _BEND * span, span):
        _fill(axes, shapes, seconds, edge=0.35)
    axes.set_yticks([])
    axes.set_ylabel("1 client" if len(streams.order) == 1 else f"{len(streams.order)} clients")
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    low, high = extent(drawn)
    _mark(figure, axes, record, seconds, (low - streams.gap / 2, high + streams.gap / 2))
    final = drawn[-1][1]
    _label_clusters(axes, final)
    _draw_groups(axes, record.groups, final)
    return figure


def _fill(axes: Axes, shapes: Shapes, seconds: float, edge: float) -> None:
    """Draw shapes as one collection, which is a thousand times faster than one by one."""
    colours = [cluster_colour(cluster) for cluster in shapes.clusters]
    axes.add_collection(
        PolyCollection(
            list(shapes.corners / (seconds, 1.0)),
            facecolors=colours,
            edgecolors=colours,
            linewidths=edge,
        ),
        autolim=False,
    )


def _mark(
    figure: Figure, axes: Axes, record: RunRecord, seconds: float, heights: tuple[float, float]
) -> None:
    """Mark changes of clusters and data in rows above the bands, with a legend."""
    low, high = heights
    entries = mark_changes(axes, record.changes, seconds, 1 - _ROW / 2)
    rows = 1 if entries else 0
    if record.data_changes:
        rows += 1
        if mark_drifts(axes, record.data_changes, seconds, 1 - _ROW * (rows - 0.5)):
            entries.append(drift_line())
    # Bands fill the room below the marks.
    axes.set_ylim(high, high - (high - low) / (1 - _ROW * rows))
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=len(entries))


def _together(times: Sequence[float], room: float) -> list[tuple[float, float]]:
    """Return first and last of each run of close times."""
    found: list[tuple[float, float]] = []
    for time in times:
        if found and time < found[-1][0] + room:
            found[-1] = (found[-1][0], time)
        else:
            found.append((time, time))
    return found


def _label_clusters(axes: Axes, final: Mapping[str, Bands]) -> None:
    """Name the final clusters on their bands."""
    members = grouped(band for bands in final.values() for band in bands.items())
    if len(members) > _LABELLED_BANDS:
        return
    for cluster, own in members.items():
        middle = (min(y for y, _ in own) + max(y + height for y, height in own)) / 2
        text = f"cluster {cluster} · {len(own)} client{'' if len(own) == 1 else 's'}"
        weight = sum(height for _, height in own)
        if abs(weight - len(own)) > 1e-6:
            text += f", weight {weight:.1f}"
        axes.text(
            0.975,
            middle,
            text,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            color="white",
            fontweight="bold",
            fontsize=8.5,
            # A band may be smaller than its label, after a late change or with few clients.
            bbox={"facecolor": cluster_colour(cluster), "lw": 0, "boxstyle": "round,pad=0.1"},
        )


def _draw_groups(axes: Axes, groups: Mapping[str, int | None], final: Mapping[str, Bands]) -> None:
    """Show the true groups as a strip beside the final clusters."""
    known = {client: group for client, group in groups.items() if group is not None}
    shown = [client for client in final if client in known]
    if not shown:
        return
    for client in shown:
        for y, height in final[client].values():
            axes.add_patch(
                Rectangle(
                    (1.012, y),
                    0.022,
                    height,
                    transform=axes.get_yaxis_transform(),
                    color=group_colour(known[client]),
                    lw=0,
                    clip_on=False,
                )
            )
    axes.text(
        1.042,
        0.5,
        "true groups",
        transform=axes.transAxes,
        rotation=90,
        va="center",
        fontsize=8.5,
        color=MUTED,
    )
