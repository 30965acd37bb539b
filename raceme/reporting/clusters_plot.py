"""The clusters over time: which clients belong together, who moves, what is split and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from raceme.records.record import RunRecord
from raceme.reporting.marks import drift_line, mark_changes, mark_drifts
from raceme.reporting.streams import Bands, Shapes, Streams, extent
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
_BEND = 0.03
"""Length of a bend, as a share of the run; changes that come sooner one after another are one."""
_MOST_ROOM = 0.05
"""Changes that are this share of the run apart are drawn one by one, however many clients."""
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
        room = max(_BEND, min(streams.thickness / _MOST_PIECES, _MOST_ROOM)) * span
        drawn = streams.bands([(0.0, 0.0), *_together(changes, room)])
        _fill(axes, streams.bodies(drawn, _BEND * span, span), seconds, edge=0.0)
        for shapes in streams.pieces(drawn, _BEND * span, span):
            _fill(axes, shapes, seconds, edge=0.35)
        axes.set_yticks([])
        axes.set_ylabel(f"{len(streams.order)} clients")
        axes.spines["left"].set_visible(False)
        axes.grid(False)
        low, high = extent(drawn)
        _mark(figure, axes, record, seconds, (low - streams.gap / 2, high + streams.gap / 2))
        final = drawn[-1][1]
        _label_clusters(axes, final)
        _draw_groups(axes, record.groups, final)
        return figure


def _fill(axes: Axes, shapes: Shapes, seconds: float, edge: float) -> None:
    """Draw shapes, all at once: one after another takes matplotlib a thousand times as long."""
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
    """Mark changes of clusters and of data in rows above the bands, and say what is what."""
    low, high = heights
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


def _together(times: Sequence[float], room: float) -> list[tuple[float, float]]:
    """Return for times that come one after another, with less room between, first and last."""
    found: list[tuple[float, float]] = []
    for time in times:
        if found and time < found[-1][0] + room:
            found[-1] = (found[-1][0], time)
        else:
            found.append((time, time))
    return found


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
