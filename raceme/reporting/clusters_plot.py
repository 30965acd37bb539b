"""The clusters over time: which clients belong together, who moves, what is split and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from raceme.records.record import RunRecord
from raceme.reporting.marks import drift_line, mark_changes, mark_drifts
from raceme.reporting.streams import Bands, Streams
from raceme.reporting.style import (
    CLOCK,
    MUTED,
    cluster_colour,
    group_colour,
    new_figure,
    say_empty,
    style,
    time_axis,
)

_MOST_PIECES = 40_000
"""Clusters are followed at so many points of time that their bands have about so many pieces."""
_LABELLED = 12
"""More clusters than this are drawn without words."""
_ROW = 0.055
"""Height of a row of marks above the bands, as a share of the axes."""


def clusters_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw every client as a band that follows its clusters, in their colours.

    Bands are ordered so that a split looks like a branching and a merge like two rivers that
    meet. A client of several clusters has a band in each, as high as its weight there. Signs
    above say when a cluster was split, merged, founded or given up, lines when clients' data
    changed. The strip at the right shows the true groups where they are known.
    """
    with style():
        figure = new_figure(7.2, 4.4)
        axes = figure.add_subplot()
        seconds = time_axis(axes, 0.0, record.end, clock)
        axes.set_title("Clusters over time")
        if not record.placements:
            say_empty(axes, "no clients")
            return figure
        streams = Streams(record.placements, record.groups, record.end)
        span = max(record.end, 1e-9)
        changes = [time for time in streams.changes if 0 < time <= span]
        times = [0.0, *_thinned(changes, span, max(20, _MOST_PIECES // streams.thickness))]
        drawn = [(time, streams.bands(time)) for time in times]
        pieces = list(streams.pieces(drawn, 0.025 * span, span))
        colours = [cluster_colour(piece.cluster) for piece in pieces]
        # All at once: matplotlib takes a thousand times as long for one after another.
        axes.add_collection(
            PolyCollection(
                [piece.corners / (seconds, 1.0) for piece in pieces],
                facecolors=colours,
                edgecolors=colours,
                linewidths=0.35,
            ),
            autolim=False,
        )
        axes.set_yticks([])
        axes.set_ylabel(f"{len(streams.order)} clients")
        axes.spines["left"].set_visible(False)
        axes.grid(False)
        _mark(figure, axes, record, seconds, _extent(drawn, streams.gap))
        final = drawn[-1][1]
        _label_clusters(axes, final)
        _draw_groups(axes, record.groups, final)
        return figure


def _extent(drawn: Sequence[tuple[float, Mapping[str, Bands]]], gap: float) -> tuple[float, float]:
    """Return the heights between which all bands are, and some room."""
    bands = [band for _, found in drawn for own in found.values() for band in own.values()]
    low = min((y for y, _ in bands), default=0.0)
    high = max((y + height for y, height in bands), default=1.0)
    return low - gap / 2, high + gap / 2


def _mark(
    figure: Figure, axes: Axes, record: RunRecord, seconds: float, extent: tuple[float, float]
) -> None:
    """Mark changes of clusters and of data in rows above the bands, and say what is what."""
    low, high = extent
    entries = mark_changes(axes, record.changes, seconds, 1 - _ROW / 2)
    rows = 1 if entries else 0
    if record.data_changes:
        rows += 1
        if mark_drifts(axes, record.data_changes, seconds, 1 - _ROW * (rows - 0.5)):
            entries.append(drift_line())
    # Bands have what the rows of marks leave.
    axes.set_ylim(high, high - (high - low) / (1 - _ROW * rows))
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=len(entries))


def _thinned(times: Sequence[float], span: float, most: int) -> list[float]:
    """Return the last time of each of `most` equal parts of a span; all if they are no more."""
    if len(times) <= most:
        return list(times)
    return list({int(most * time / span): time for time in times}.values())


def _label_clusters(axes: Axes, final: Mapping[str, Bands]) -> None:
    """Name the final clusters on their bands."""
    members: dict[int, list[tuple[float, float]]] = {}
    for bands in final.values():
        for cluster, band in bands.items():
            members.setdefault(cluster, []).append(band)
    if len(members) > _LABELLED:
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
