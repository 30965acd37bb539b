"""The fleet over time: which clients belong together, how alike they are, who worked when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from raceme.reporting.record import Floats, RunRecord, Updates
from raceme.reporting.style import (
    CLOCK,
    FAINT,
    MUTED,
    REJECTED,
    cluster_colour,
    group_colour,
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
_MOST_PIECES = 40_000
"""Clusters are followed at so many points of time that their lines have about so many pieces."""
_LABELLED = 12
"""More clusters than this are drawn without words."""


def clusters_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw every client as a line that follows its cluster: a tree that grows to the right.

    Lines are ordered by final cluster, so that a split looks like a branching. The strip at the
    right shows the true groups where they are known.
    """
    with style():
        figure = new_figure(7.2, 4.4)
        axes = figure.add_subplot()
        seconds = time_axis(axes, 0.0, record.end, clock)
        axes.set_title("Clusters over time")
        paths = _paths(record)
        if not paths:
            say_empty(axes, "no clients")
            return figure
        changes = sorted({time for path in paths.values() for time, _ in path if time > 0})
        final = {client: path[-1][1] for client, path in paths.items()}
        groups = record.groups
        order = sorted(
            paths,
            key=lambda c: ([k for _, k in paths[c]], -1 if groups.get(c) is None else groups[c]),
        )
        rank = {client: index for index, client in enumerate(order)}
        span = max(record.end, 1e-9)
        width, gap = 0.025 * span, max(1.0, 0.03 * len(order))
        times = [0.0, *_thinned(changes, span, max(20, _MOST_PIECES // len(order)))]
        lanes = [(time, _lanes(paths, rank, time, gap)) for time in times]
        pieces = [
            piece
            for client in order
            for piece in _pieces(paths[client], client, lanes, width, span, seconds)
        ]
        # All at once: matplotlib takes a thousand times as long for one after another.
        axes.add_collection(
            PolyCollection(
                [corners for corners, _ in pieces],
                facecolors=[colour for _, colour in pieces],
                edgecolors=[colour for _, colour in pieces],
                linewidths=0.35,
            ),
            autolim=False,
        )
        low = min(min(heights.values()) for _, heights in lanes)
        high = max(max(heights.values()) for _, heights in lanes) + 1
        axes.set_ylim(high + gap / 2, low - gap / 2)
        axes.set_yticks([])
        axes.set_ylabel(f"{len(order)} clients")
        axes.spines["left"].set_visible(False)
        axes.grid(False)
        _label_clusters(axes, order, final, lanes[-1][1])
        _draw_groups(axes, record, lanes[-1][1])
        return figure


def similarity_figure(
    clients: Sequence[str],
    matrix: NDArray[np.floating],
    clusters: dict[str, int],
    of: int = 0,
) -> Figure:
    """Draw how alike the clients' models are, clients of one cluster side by side.

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
        axes.set_title("Cosine similarity of the clients' models")
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


def _paths(record: RunRecord) -> dict[str, list[tuple[float, int]]]:
    """Return for each client when it came into which cluster; it starts there at time 0."""
    paths: dict[str, list[tuple[float, int]]] = {}
    for move in record.moves:
        path = paths.setdefault(move.client, [])
        first = move.source is None
        path.append((0.0 if first and not path else move.time, move.cluster))
    return paths


def _cluster_at(path: list[tuple[float, int]], time: float) -> int:
    return path[bisect_right(path, time, key=itemgetter(0)) - 1][1]


def _thinned(times: Sequence[float], span: float, most: int) -> list[float]:
    """Return the last time of each of `most` equal parts of a span; all if they are no more."""
    if len(times) <= most:
        return list(times)
    return list({int(most * time / span): time for time in times}.values())


def _lanes(
    paths: dict[str, list[tuple[float, int]]], rank: dict[str, int], time: float, gap: float
) -> dict[str, float]:
    """Return the height of each client's line at a time: by cluster, with gaps between them."""
    cluster = {client: _cluster_at(path, time) for client, path in paths.items()}
    first: dict[int, int] = {}
    for client, k in cluster.items():
        first[k] = min(first.get(k, len(rank)), rank[client])
    lane = {k: index for index, k in enumerate(sorted(first, key=lambda k: first[k]))}
    order = sorted(paths, key=lambda client: (lane[cluster[client]], rank[client]))
    # Centred, so that a tree grows to both sides.
    shift = -gap * (len(lane) - 1) / 2
    return {
        client: shift + index + gap * lane[cluster[client]] for index, client in enumerate(order)
    }


def _pieces(
    path: list[tuple[float, int]],
    client: str,
    lanes: list[tuple[float, dict[str, float]]],
    width: float,
    end: float,
    seconds: float,
) -> Iterator[tuple[Floats, str]]:
    """Yield one client's line in pieces, their corners and colours: level, or a bend and level.

    A piece goes on for as long as nothing changes for this client.
    """
    ease = np.linspace(0.0, 1.0, 12)
    bend = ease * ease * (3 - 2 * ease)
    states = [(start, heights[client], _cluster_at(path, start)) for start, heights in lanes]
    changes = [states[0], *(new for old, new in pairwise(states) if new[1:] != old[1:])]
    stops = [*(start for start, _, _ in changes[1:]), end]
    before = changes[0][1]
    for (start, height, cluster), stop in zip(changes, stops, strict=True):
        turn = min(width, stop - start) if start else 0.0
        x = np.concatenate([start + turn * ease, [max(stop, start + turn)]]) / seconds
        y = np.concatenate([before + (height - before) * bend, [height]])
        sides = np.column_stack([x, y]), np.column_stack([x, y + 1.0])[::-1]
        yield np.concatenate(sides), cluster_colour(cluster)
        before = height


def _label_clusters(
    axes: Axes, order: list[str], final: dict[str, int], heights: dict[str, float]
) -> None:
    """Name the final clusters on their bands."""
    clusters = sorted(set(final.values()))
    if len(clusters) > _LABELLED:
        return
    for cluster in clusters:
        members = [heights[client] for client in order if final[client] == cluster]
        middle = (min(members) + max(members) + 1) / 2
        noun = "client" if len(members) == 1 else "clients"
        axes.text(
            0.975,
            middle,
            f"cluster {cluster} · {len(members)} {noun}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            color="white",
            fontweight="bold",
            fontsize=8.5,
        )


def _draw_groups(axes: Axes, record: RunRecord, heights: dict[str, float]) -> None:
    """Show the true groups as a strip beside the final clusters."""
    groups = {c: g for c, g in record.groups.items() if g is not None and c in heights}
    if not groups:
        return
    transform = axes.get_yaxis_transform()
    for client, group in groups.items():
        axes.add_patch(
            Rectangle(
                (1.012, heights[client]),
                0.022,
                1.0,
                transform=transform,
                color=group_colour(group),
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
