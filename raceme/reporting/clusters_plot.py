"""The clusters over time: which clients belong together, move, are split and merged."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from raceme.core.events import Placement, home
from raceme.records.record import Floats, RunRecord
from raceme.reporting.style import (
    CLOCK,
    MUTED,
    cluster_colour,
    drift_line,
    group_colour,
    mark_changes,
    mark_drifts,
    one_axes,
    say_empty,
    style,
    time_axis,
)

# -----------------------------------------------------------------------------
# Clients as streams between clusters: where their bands lie, and what flows where.
#
# A client has a band in each of its clusters, as high as its weight there: all of its bands
# together are one high. When weights change, what stays in a cluster flows straight on, and the
# rest goes over from the clusters that lose to those that gain.
# -----------------------------------------------------------------------------


Weights = Mapping[int, float]
Bands = dict[int, tuple[float, float]]
"""Cluster to where a client's band in it begins, and how high it is."""
Drawn = tuple[float, dict[str, Bands]]
"""A time, and each client's bands from then on."""
_Part = tuple["Flow", float, float, float]
"""A flow with its start, the length of its bend, and its length."""

_LEAST = 1e-9
"""Weights that differ by less are the same."""
_LATER = 0.4
"""By at most this share of a bend its trailing edge is behind the leading one."""
_SQUARE = 2.3
"""Width of a drawing in its heights: a band that goes down steeply is as wide as it is high."""
_DENSE = 0.6
"""What goes from a cluster to another is close together if it is this share of its extent."""


@dataclass(frozen=True)
class Shapes:
    """Parts of a drawing.

    Attributes
    ----------
    clusters : list[int]
        Whose colour each of them has.
    corners : ndarray
        Time in seconds and height. Shape (shapes, corners, 2).
    """

    clusters: list[int]
    corners: Floats


class Flow(NamedTuple):
    """What goes from a band to a band.

    Attributes
    ----------
    source, cluster : int
        From which cluster to which; the same for what stays.
    begins, ends : float
        Where it is before and after.
    height_before, height : float
        How high it is before and after: they differ for what comes from nowhere or goes there.
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


class Streams:
    """The bands of all clients of a run.

    Parameters
    ----------
    placements : Sequence[Placement]
        Every change of a client's clusters, in order.
    groups : Mapping[str, int or None]
        Client id to true group, by which clients with the same history are ordered.
    end : float
        When the run ended.

    Attributes
    ----------
    order : list[str]
        The clients from top to bottom, as they begin.
    gap : float
        Room between two clusters, in heights of a client.
    """

    def __init__(
        self, placements: Sequence[Placement], groups: Mapping[str, int | None], end: float
    ) -> None:
        paths: dict[str, list[tuple[float, Weights]]] = {}
        for placed in placements:
            paths.setdefault(placed.client, []).append((placed.time, placed.weights))
        self._paths = paths
        self._end = end
        # Clients that go the same way are side by side: a split parts two neighbours only.
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
        """Number of bands that the clients have at most, all together."""
        return sum(max(len(weights) for _, weights in path) for path in self._paths.values())

    def bands(self, moments: Iterable[tuple[float, float]]) -> list[Drawn]:
        """Return the bands of all clients at some times.

        Parameters
        ----------
        moments : Iterable of (float, float)
            Ascending times: from when bands are drawn, and the time whose clusters they show.
        """
        order, drawn = self.order, list[Drawn]()
        for start, time in moments:
            bands = self._bands(order, time)
            drawn.append((start, bands))
            # Clients stay in order of height, so that lines cross only where they have to.
            heights = {client: _middle(own) for client, own in bands.items()}
            order = sorted(self.order, key=lambda client: heights.get(client, math.inf))
        return drawn

    def bodies(self, drawn: Sequence[Drawn], width: float, end: float) -> Shapes:
        """Return the outlines of whole clusters, which are to be drawn behind all bands.

        They fill the holes that clients leave for a moment where others come and go. The
        parameters are those of :meth:`pieces`.
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
        """Return the outlines of all clients' bands: where they stay, and where they go over.

        Parameters
        ----------
        drawn : Sequence
            What :meth:`bands` returns.
        width : float
            How long a bend takes, in seconds.
        end : float
            Where the last bands end.

        Returns
        -------
        tuple[Shapes, Shapes]
            The second ones are to be drawn in front.
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
        """Yield a client's flows, each one until something changes for this client."""
        states = [(time, bands.get(client, {})) for time, bands in drawn]
        kept = [states[0], *(new for old, new in pairwise(states) if new[1] != old[1])]
        stops = [*(time for time, _ in kept[1:]), end]
        before = kept[0][1]
        for index, ((start, bands), stop) in enumerate(zip(kept, stops, strict=True)):
            turn = max(0.0, min(width, stop - start)) if index else 0.0
            for flow in flows(before, bands, self._place):
                # What leaves all clusters has no level part.
                yield flow, start, turn, max(stop - start, turn) if flow.height else turn
            before = bands

    def _bands(self, order: Sequence[str], time: float) -> dict[str, Bands]:
        """Return the bands of each client that has a cluster at a time.

        The whole is centred, so that a tree grows to both sides.
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
        """Return for each cluster where it stands among the others: by its members' mean place.

        It stays there all the time, so that clusters do not change places when clients move.
        """
        total: dict[int, float] = {}
        ranks: dict[int, float] = {}
        for rank, client in enumerate(self.order):
            path = self._paths[client]
            stops = [*(time for time, _ in path[1:]), self._end]
            for (start, weights), stop in zip(path, stops, strict=True):
                # A short stay counts little, but it counts where there is no other.
                stay = max(stop - start, 1e-6 * self._end, _LEAST)
                for cluster, weight in weights.items():
                    total[cluster] = total.get(cluster, 0.0) + stay * weight
                    ranks[cluster] = ranks.get(cluster, 0.0) + stay * weight * rank
        means = {cluster: ranks[cluster] / total[cluster] for cluster in total}
        return {cluster: i for i, cluster in enumerate(sorted(means, key=lambda k: (means[k], k)))}


def flows(before: Bands, after: Bands, place: Mapping[int, int]) -> list[Flow]:
    """Return what flows between the bands of a client, those that it had and those that it has.

    Parameters
    ----------
    before, after : Bands
        Without bands before, each one grows out of nothing; without bands after, each one ends.
    place : Mapping[int, int]
        Order of the clusters, so that what goes up leaves and arrives above what goes down.
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
    """Return how much goes from which cluster to which; what can stay stays."""
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
    """Yield what holds all flows from a cluster to a cluster, if they are close together."""
    together: dict[tuple[int, int], list[Flow]] = {}
    for flow in found:
        together.setdefault((flow.source, flow.cluster), []).append(flow)
    for (source, cluster), own in together.items():
        begins, ends = min(flow.begins for flow in own), min(flow.ends for flow in own)
        before = max(flow.begins + flow.height_before for flow in own) - begins
        after = max(flow.ends + flow.height for flow in own) - ends
        held = sum(flow.height for flow in own)
        if source == cluster or held >= _DENSE * max(before, after):
            yield Flow(source, cluster, begins, before, ends, after)


def _outlines(parts: Sequence[_Part], slope: float = 0.0) -> Shapes:
    """Return the corners around flows: one edge from left to right, and the other back.

    Parameters
    ----------
    parts : Sequence
        Flows with their start, the length of their bend, and their length.
    slope : float
        Seconds that are as wide as a client's band is high. With it, the trailing edge of a flow
        is behind the leading one: where it is steep it would be a thread otherwise.
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
    # The trailing edge is the first one of what goes to larger heights.
    first, second = np.where(way > 0, behind, ahead), np.where(way > 0, ahead, behind)
    bend = np.concatenate([[0.0], bend, [1.0]])
    low = begins + way * bend
    high = begins + height_before + (way + height - height_before) * bend
    edges = np.stack([first, low], axis=2), np.stack([second, high], axis=2)[:, ::-1]
    return Shapes([part[0].cluster for part in parts], np.concatenate(edges, axis=1))


def extent(drawn: Sequence[Drawn]) -> tuple[float, float]:
    """Return the heights between which all bands are."""
    bands = [band for _, found in drawn for own in found.values() for band in own.values()]
    low = min((y for y, _ in bands), default=0.0)
    return low, max((y + height for y, height in bands), default=low + 1.0)


def _middle(bands: Bands) -> float:
    """Return where a client is in the mean."""
    return sum(height * (y + height / 2) for y, height in bands.values())


def _homes(path: Sequence[tuple[float, Weights]]) -> list[int]:
    """Return a client's clusters one after another, of several at a time the weightiest."""
    homes = (home(weights) for _, weights in path)
    return [cluster for cluster, _ in groupby(-1 if k is None else k for k in homes)]


def _known(groups: Mapping[str, int | None], client: str) -> int:
    group = groups.get(client)
    return -1 if group is None else group


# -----------------------------------------------------------------------------
# The clusters over time: which clients belong together, move, are split and merged.
# -----------------------------------------------------------------------------


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


@style()
def clusters_figure(record: RunRecord, *, clock: str = CLOCK) -> Figure:
    """Draw every client as a band that follows its clusters, in their colours.

    Bands are ordered so that a split looks like a branching and a merge like two rivers that
    meet. A client of several clusters has a band in each, as high as its weight there. Signs
    above say when a cluster was split, merged, founded or given up, lines when clients' data
    changed. The strip at the right shows the true groups where they are known.
    """
    figure, axes = one_axes(7.2, 4.4, "Clusters over time")
    seconds = time_axis(axes, 0.0, record.end, clock)
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
