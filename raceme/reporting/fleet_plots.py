"""The fleet: how alike the clients are, and who worked when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from raceme.records.record import RunRecord, Updates
from raceme.reporting.style import (
    CLOCK,
    FAINT,
    REJECTED,
    cluster_colour,
    new_figure,
    say_empty,
    style,
    time_axis,
    time_unit,
)

_MOST_BARS = 3000
"""A timeline with more bars than this shows only its first part: bars are to be told apart."""
_MOST_ROWS = 120
"""A timeline shows at most so many devices, spread from the fastest to the slowest."""
_LABELLED = 12
"""More clusters than this are drawn without words."""


def similarity_figure(
    clients: Sequence[str],
    matrix: NDArray[np.floating],
    clusters: dict[str, int],
    of: int = 0,
) -> Figure:
    """Draw how alike clients are to their method, those of one cluster side by side.

    Parameters
    ----------
    clients : Sequence[str]
        Their ids, in the order of the matrix.
    matrix : ndarray
        Similarities, NaN where not known. Shape (n, n).
    clusters : dict[str, int]
        Client id to cluster.
    of : int
        Number of all clients, if these are a part of them.
    """
    with style():
        figure = new_figure(5.6, 4.8)
        axes = figure.add_subplot()
        axes.set_title("Similarity of clients, as the method compares them")
        order = sorted(range(len(clients)), key=lambda i: (clusters.get(clients[i], -1), i))
        values = np.asarray(matrix, np.float64)[np.ix_(order, order)]
        off_diagonal = values[~np.eye(len(values), dtype=bool)]
        known = off_diagonal[np.isfinite(off_diagonal)]
        axes.grid(False)
        if not len(known):
            say_empty(axes, "no pair has been compared")
            axes.set_xticks([])
            axes.set_yticks([])
            return figure
        # Cosines of whole models are close to 1: the colours span what is there, not [0, 1].
        low, high = np.percentile(known, [1, 99])
        axes.set_facecolor("#d9dde2")
        image = axes.imshow(
            values, cmap="viridis", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest"
        )
        bar = figure.colorbar(image, ax=axes, shrink=0.85, extend="both")
        bar.outline.set_visible(False)
        sorted_clusters = [clusters.get(clients[i], -1) for i in order]
        start = 0
        ticks, labels = [], []
        for position in range(1, len(order) + 1):
            ended = position == len(order) or sorted_clusters[position] != sorted_clusters[start]
            if not ended:
                continue
            size, cluster = position - start, sorted_clusters[start]
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
            start = position
        shown = f"{len(clients):,} of {of:,} clients" if of > len(clients) else "clients"
        axes.set_xlabel(f"{shown}, by cluster")
        axes.set_xticks([])
        if len(ticks) <= _LABELLED:
            axes.set_yticks(ticks, labels, rotation=90, va="center")
        else:
            axes.set_yticks([])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return figure


def devices_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw who worked when: a row per device, the fastest on top, a bar per task."""
    with style():
        figure = new_figure(7.2, 5.0)
        axes = figure.add_subplot()
        updates, rejections = record.updates, record.rejections
        rows = _rows(updates, [client.client for client in record.clients])
        end = _window(updates, record.end)
        seconds = time_axis(axes, 0.0, end, clock)
        length = f"{float(f'{end / seconds:.3g}'):,g} {time_unit(end)[1]}"
        shown = "" if end >= record.end else f" (the first {length} of the run)"
        axes.set_title(f"Devices at work{shown}")
        if not rows:
            say_empty(axes, "no devices")
            return figure
        bars = [
            (str(client), float(start), float(stop), cluster_colour(int(cluster)))
            for client, start, stop, cluster in zip(
                updates.client, updates.dispatched_at, updates.time, updates.cluster, strict=True
            )
        ]
        refused = [
            (str(client), float(start), float(stop), REJECTED)
            for client, start, stop in zip(
                rejections.client, rejections.dispatched_at, rejections.time, strict=True
            )
        ]
        _draw_bars(axes, rows, bars, end, seconds, hatch=None)
        _draw_bars(axes, rows, refused, end, seconds, hatch="////")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks([0, len(rows) - 1], ["fastest", "slowest"] if len(rows) > 1 else ["", ""])
        axes.set_ylabel(f"{len(rows)} of {len(record.clients)} devices")
        axes.grid(False, axis="y")
        clusters = sorted({int(cluster) for cluster in updates.cluster})
        handles = [Patch(color=cluster_colour(k), label=f"cluster {k}") for k in clusters]
        if refused:
            handles.append(
                Patch(facecolor="none", edgecolor=REJECTED, hatch="////", label="rejected")
            )
        if 1 < len(handles) <= _LABELLED:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        return figure


def _rows(updates: Updates, clients: list[str]) -> dict[str, int]:
    """Return the row of each device that is shown, from the fastest to the slowest."""
    typical = dict.fromkeys(clients, np.inf)
    durations = updates.time - updates.dispatched_at
    for client in np.unique(updates.client):
        typical[str(client)] = float(np.median(durations[updates.client == client]))
    order = sorted(typical, key=lambda client: typical[client])
    if len(order) > _MOST_ROWS:
        picked = np.linspace(0, len(order) - 1, _MOST_ROWS).round().astype(int)
        order = [order[index] for index in picked]
    return {client: row for row, client in enumerate(order)}


def _window(updates: Updates, end: float) -> float:
    """Return until when bars are drawn."""
    if len(updates.time) <= _MOST_BARS:
        return end
    return float(updates.time[_MOST_BARS - 1])


def _draw_bars(
    axes: Axes,
    rows: dict[str, int],
    bars: list[tuple[str, float, float, str]],
    end: float,
    seconds: float,
    hatch: str | None,
) -> None:
    """Draw tasks as boxes, all at once."""
    corners, colours = [], []
    for client, start, stop, colour in bars:
        if client in rows and start < end:
            left, right, row = start / seconds, min(stop, end) / seconds, rows[client]
            corners.append(
                [(left, row - 0.4), (right, row - 0.4), (right, row + 0.4), (left, row + 0.4)]
            )
            colours.append(colour)
    face = colours if hatch is None else "none"
    edge = FAINT if hatch is None else REJECTED
    axes.add_collection(
        PolyCollection(corners, facecolors=face, edgecolors=edge, linewidths=0.4, hatch=hatch)
    )
