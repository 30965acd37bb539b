"""Figures of single runs and comparisons."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from raceme.core.errors import plural, printable
from raceme.core.events import (
    ACCURACY,
    ClusterChange,
    ClustersChanged,
    Measure,
    MeasureSchema,
    grouped,
)
from raceme.records.record import ClientEvaluations, History, Integers, RunRecord
from raceme.records.summary import LONG, Floats, TaskAccuracies, Upload, Uploads, shares
from raceme.reporting.streams import Bands, Epoch, extent, layout
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
    series_colour,
    style,
    time_axis,
    write_placeholder,
)

_MOST_CLUSTERS = 8
"""Maximum number of individually drawn clusters."""
_MOST_LABELS = 4
"""Maximum number of labelled splits and merges."""
_DRIFT_ROW = 0.06
"""Share of the axes for drift labels above an accuracy of 1."""
_MOST_NAMED = 5
"""Maximum number of methods with an inner legend."""
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
        write_placeholder(axes, "no evaluations")
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
        Runs of each method by label, one per seed, in the order of the legend. Time is logarithmic
        if a run reaches the target very early.
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
    banded = len(runs) > len(methods)
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
        if any(_arrival(record, target) for record in runs):
            axes.plot([], [], "o", ms=6, color=MUTED, mec="white", label="target reached")
    seeds = max((len(records) for records in methods.values()), default=0)
    of = "one seed" if seeds == 1 else f"mean{' ± SD' if banded else ''} of {seeds} seeds"
    if not runs:
        write_placeholder(axes, "no runs")
    elif len(methods) <= _MOST_NAMED:
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
        # Above the points of runs that reach it.
        zorder=5,
        bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 0.5},
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
def staleness_figure(records: Mapping[str, RunRecord]) -> Figure:
    """Draw the staleness of each method's applied updates, one row per method.

    Parameters
    ----------
    records : Mapping[str, RunRecord]
        Label of each method to its run.
    """
    staleness = {
        label: record.updates.staleness
        for label, record in records.items()
        if record.updates.seq.size
    }
    stale = {label: values for label, values in staleness.items() if values.max() > 0}
    if not stale:
        figure = new_figure(7.2, 2.4)
        write_placeholder(figure.add_subplot(), "no method used a stale update")
        return figure
    figure = new_figure(7.2, 1.0 + 0.55 * len(stale))
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
        write_placeholder(axes, "no pair was compared")
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
        write_placeholder(axes, "no devices")
        return figure
    history = History(record.placements)
    tasks = zip(updates.client.tolist(), updates.dispatched_at, updates.cluster, strict=True)
    trained = [int(history.trained(*task)) for task in tasks]
    for of, colours, edge, hatch in (
        (updates, [cluster_colour(k) for k in trained], FAINT, None),
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
    handles = [Patch(color=cluster_colour(k), label=f"cluster {k}") for k in sorted(set(trained))]
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
        write_placeholder(axes, "not measured")
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
    missing = record.summary.uploads.unmatched()
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
    found = record.summary.uploads.divergences()
    if not found:
        figure, axes = one_axes(7.2, 3.0, "Mixtures of data, true and estimated")
        write_placeholder(axes, why_no_mixtures(record) or "no mixtures, or no estimates of them")
        return figure
    of = record.summary.uploads.matched()
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
    if means := record.summary.uploads.curve("divergence"):
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
    tasks = record.summary.tasks
    if not tasks.count:
        figure, axes = one_axes(7.2, 4.0, "Tasks, one after another")
        write_placeholder(axes, "no tests on former tasks")
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
    "after": ("returned", cluster_colour(6)),
}


def has_scores(record: RunRecord) -> bool:
    """Return whether a run has scores of uploads or clusters."""
    return bool(record.cluster_scores) or _has_uploads(record)


def _has_uploads(record: RunRecord) -> bool:
    """Return whether a run has scores of uploads (`score-uploads`)."""
    return any(row.before is not None for row in record.summary.uploads.rows)


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
        write_placeholder(axes, "no scores of uploads")
        return figure
    shown = _draw_cluster_scores(axes, record)
    for quantity, (label, colour) in _QUANTITIES.items():
        shown += _draw_quantity(axes, record.summary.uploads, quantity, label, colour)
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
# Figure of the clusters over time with moves, splits and merges.
# -----------------------------------------------------------------------------


_BEND = 0.03
"""Length of a bend as a share of the run; closer changes are merged."""
_LABELLED_BANDS = 12
"""Maximum number of labelled clusters."""
_ROW = 0.055
"""Height of a row of marks as a share of the axes."""
_EASE = np.linspace(0.0, 1.0, 16)
_SMOOTH = _EASE * _EASE * (3 - 2 * _EASE)


@style()
def clusters_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw every cluster as a stream, as high as the sum of its clients' weights.

    Streams are ordered so that splits branch and merges join. Signs above mark splits, merges, new
    and retired clusters, lines mark drifts. The strip at the right shows the true groups, if known.
    """
    figure, axes = one_axes(7.2, 4.4, "Clusters over time")
    seconds = time_axis(axes, record.end, clock)
    if not record.placements:
        write_placeholder(axes, "no clients")
        return figure
    span = max(record.end, 1e-9)
    epochs = layout(record.placements, _BEND * span)
    stops = [*(epoch.time for epoch in epochs[1:]), max(span, epochs[-1].time)]
    for index, (epoch, stop) in enumerate(zip(epochs, stops, strict=True)):
        turn = min(_BEND * span, stop - epoch.time) if index else 0.0
        _draw_epoch(axes, epoch, turn / seconds, stop / seconds, seconds)
    clients = len({placed.client for placed in record.placements})
    axes.set_yticks([])
    axes.set_ylabel(plural(clients, "client"))
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    low, high = extent(epochs)
    room = 0.02 * (high - low)
    _mark(figure, axes, record, seconds, (low - room, high + room))
    _label_clusters(axes, record, epochs[-1].bands)
    _draw_groups(axes, record, epochs[-1].bands)
    return figure


def _draw_epoch(axes: Axes, epoch: Epoch, turn: float, stop: float, seconds: float) -> None:
    """Draw flows that bend into their places, and level streams behind them."""
    start = epoch.time / seconds
    corners, colours = [], []
    for flow in epoch.flows:
        times = start + turn * _EASE
        top = flow.begins + (flow.ends - flow.begins) * _SMOOTH
        edges = np.stack([times, top], axis=1), np.stack([times, top + flow.size], axis=1)
        corners.append(np.concatenate([edges[0], edges[1][::-1]]))
        colours.append(cluster_colour(flow.source if flow.target is None else flow.target))
    for cluster, (upper, height) in epoch.bands.items():
        left, lower = start + turn, upper + height
        corners.append(np.array([(left, upper), (stop, upper), (stop, lower), (left, lower)]))
        colours.append(cluster_colour(cluster))
    shapes = PolyCollection(corners, facecolors=colours, edgecolors=colours, linewidths=0.35)
    axes.add_collection(shapes, autolim=False)


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


def _label_clusters(axes: Axes, record: RunRecord, final: Bands) -> None:
    """Name the final clusters on their streams."""
    if len(final) > _LABELLED_BANDS:
        return
    members = Counter(k for weights in record.memberships().values() for k in weights)
    for cluster, (top, weight) in final.items():
        count = members[cluster]
        text = f"cluster {cluster} · {count} client{'' if count == 1 else 's'}"
        if abs(weight - count) > 1e-6:
            text += f", weight {weight:.1f}"
        axes.text(
            0.975,
            top + weight / 2,
            text,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            color="white",
            fontweight="bold",
            fontsize=8.5,
            # A stream may be smaller than its label, after a late change or with few clients.
            bbox={"facecolor": cluster_colour(cluster), "lw": 0, "boxstyle": "round,pad=0.1"},
        )


def _draw_groups(axes: Axes, record: RunRecord, final: Bands) -> None:
    """Show the true groups as a strip beside the final clusters."""
    groups = record.summary.membership.groups
    known = {client: group for client, group in groups.items() if group is not None}
    memberships = record.memberships()
    place = {cluster: top for cluster, (top, _) in final.items()}
    shown = sorted(memberships.keys() & known.keys(), key=lambda client: (known[client], client))
    for client in shown:
        for cluster, weight in memberships[client].items():
            axes.add_patch(
                Rectangle(
                    (1.012, place[cluster]),
                    0.022,
                    weight,
                    transform=axes.get_yaxis_transform(),
                    color=group_colour(known[client]),
                    lw=0,
                    clip_on=False,
                )
            )
            place[cluster] += weight
    if shown:
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
