"""Which clusters support which: the members of a supporter train the supported model too."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Patch, Wedge
from matplotlib.ticker import MaxNLocator

from raceme.protocol.events import ClustersChanged, SupportChanged
from raceme.records.membership import Membership
from raceme.records.record import RunRecord
from raceme.reporting.style import (
    CLOCK,
    INK,
    MUTED,
    cluster_colour,
    group_colour,
    new_figure,
    say_empty,
    series_colour,
    style,
    time_axis,
)

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


def has_support(record: RunRecord) -> bool:
    """Return whether a run tells which clusters support which."""
    return bool(record.support_changes)


def support_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw who supports whom at the end, and how many clusters and supports there were.

    A node is a cluster in its colour, as large as its number of clients; the ring around it shows
    their true groups, where these are known. An arrow leads from a supporter to the cluster whose
    model its members train too.

    Parameters
    ----------
    record : RunRecord
        The run.
    clock : str
        What the axis of time is called.
    """
    with style():
        figure = new_figure(7.2, 4.0)
        if not has_support(record):
            axes = figure.add_subplot()
            axes.set_title("Who supports whom")
            say_empty(axes, "no cluster has supported another")
            return figure
        left, right = figure.subplots(1, 2, width_ratios=[1.55, 1.0])
        handles = _draw_graph(left, record)
        _draw_counts(right, record, clock)
        figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 4))
        return figure


def counts_over_time(record: RunRecord) -> tuple[list[float], list[int], list[int]]:
    """Return times, and the number of clusters and of supports from each of them on.

    Clusters are those that an event has named; a support is one cluster that supports another.
    """
    membership = Membership()
    changes: list[ClustersChanged | SupportChanged] = [*record.changes, *record.support_changes]
    happened = sorted(changes, key=lambda event: event.time)
    times: list[float] = []
    clusters: list[int] = []
    supports: list[int] = []
    support = 0
    for event in happened:
        if isinstance(event, SupportChanged):
            support = sum(map(len, event.supporters.values()))
        else:
            membership.observe(event)
        if not times or times[-1] != event.time:
            times.append(float(event.time))
            clusters.append(0)
            supports.append(0)
        clusters[-1], supports[-1] = len(membership.existing), support
    return times, clusters, supports


def _draw_graph(axes: Axes, record: RunRecord) -> list[Artist]:
    """Draw clusters on a circle, and arrows; return the legend's entries."""
    supporters = record.support_changes[-1].supporters
    members = _groups_of_members(record)
    named = {k for cluster, of in supporters.items() for k in (cluster, *of)}
    everyone = sorted(members.keys() | named)
    nodes = sorted(everyone, key=lambda k: -_size(members, k))[:_MOST_NODES]
    # Clusters of one true group stand side by side.
    nodes.sort(key=lambda k: (_main_group(members.get(k, Counter())), k))
    of = f" ({len(nodes)} of {len(everyone)} clusters)" if len(nodes) < len(everyone) else ""
    axes.set_title(f"Who supports whom at the end{of}")
    axes.set_aspect("equal", adjustable="datalim")
    axes.axis("off")
    places = _places(len(nodes))
    room = 2 * math.sin(math.pi / len(nodes)) if len(nodes) > 1 else 2.0
    largest = min(_LARGEST, 0.36 * room)
    most = max((_size(members, k) for k in nodes), default=0) or 1
    discs = {}
    for cluster, (x, y) in zip(nodes, places, strict=True):
        share = math.sqrt(_size(members, cluster) / most)
        radius = largest * max(share, _SMALLEST)
        discs[cluster] = _draw_node(axes, cluster, (x, y), radius, members.get(cluster, Counter()))
    pairs = [(k, s) for k, of_k in supporters.items() for s in of_k if k in discs and s in discs]
    width = 1.5 if len(pairs) <= _MOST_ARROWS_IN_FULL else 0.7
    for supported, supporter in pairs:
        axes.add_patch(
            FancyArrowPatch(
                discs[supporter].center,
                discs[supported].center,
                connectionstyle="arc3,rad=0.16",
                arrowstyle="-|>",
                mutation_scale=11 if width > 1 else 7,
                patchA=discs[supporter],
                patchB=discs[supported],
                shrinkA=2.0,
                shrinkB=2.5,
                color=cluster_colour(supporter),
                lw=width,
                zorder=1,
            )
        )
    if not pairs:
        axes.set_title("Nobody supports anybody at the end")
    edge = 1.0 + largest + 0.12
    # Not fixed limits: which of them has room to spare depends on the words beside the nodes.
    axes.margins(0)
    axes.update_datalim([(-edge - 0.3, -edge), (edge + 0.3, edge)])
    axes.autoscale_view()
    groups = sorted({g for own in members.values() for g in own if g is not None})
    look = {"color": INK, "lw": 1.2, "marker": ">", "ms": 4}
    entries: list[Artist] = [Line2D([], [], label="from supporter to supported", **look)]  # type: ignore[arg-type]
    if len(groups) <= _MOST_GROUPS:
        entries += [Patch(color=group_colour(g), label=f"true group {g}") for g in groups]
    return entries


def _groups_of_members(record: RunRecord) -> dict[int, Counter[int | None]]:
    """Return how many clients of each true group every cluster has at the end."""
    groups = record.groups
    members: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
    for client, cluster in record.assignment().items():
        members[cluster][groups.get(client)] += 1
    return dict(members)


def _size(members: Mapping[int, Counter[int | None]], cluster: int) -> int:
    return members[cluster].total() if cluster in members else 0


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
        ring = Wedge(centre, radius, angle - extent, angle, width=radius * _RING, color=colour)
        ring.set_zorder(2)
        axes.add_patch(ring)
        angle -= extent
    colour = cluster_colour(cluster)
    # A cluster without clients keeps its model; it is an outline.
    face = colour if own else "white"
    disc = Circle(centre, inner, facecolor=face, edgecolor="white" if own else colour, lw=1.2)
    disc.set_zorder(3)
    axes.add_patch(disc)
    x, y = centre
    axes.text(
        *(x, y, str(cluster)),
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


def _draw_counts(axes: Axes, record: RunRecord, clock: str) -> None:
    """Draw the numbers of clusters and of supports over time."""
    times, clusters, supports = counts_over_time(record)
    seconds = time_axis(axes, 0.0, record.end, clock)
    at = [time / seconds for time in [*times, max(record.end, times[-1])]]
    for values, colour, dashes, label in (
        (clusters, INK, "-", "clusters"),
        (supports, series_colour(5), (0, (4.5, 1.6)), "supports"),
    ):
        axes.step(at, [*values, values[-1]], where="post", color=colour, ls=dashes, label=label)
    axes.set_title("How many over time")
    axes.set_ylim(0, max(*clusters, *supports, 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")
    axes.legend(loc="upper right")
