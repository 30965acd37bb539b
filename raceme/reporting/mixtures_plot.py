"""True mixtures of clients' data against the weights that a method gives its clients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from raceme.records.record import Floats, RunRecord
from raceme.records.uploads import Upload, shares
from raceme.reporting.style import (
    INK,
    cluster_colour,
    draw_dots,
    new_figure,
    say_empty,
    series_colour,
    style,
)

_MOST_CLIENTS = 4
_MOST_BARS = 40
"""Of a client with more uploads the last ones are drawn."""
_FAR = 98.0
"""Percentile of the divergences up to which the axis goes: few are far off."""
_GAP = 0.18
"""Between the true mixtures and those below, in heights of a bar."""


def has_mixtures(record: RunRecord) -> bool:
    """Return whether a run tells true mixtures and estimates of them."""
    return bool(record.uploads.divergences())


def why_no_mixtures(record: RunRecord) -> str:
    """Return why mixtures and estimates that a run tells cannot be compared; empty if they can."""
    missing = record.uploads.unmatched()
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    return f"no cluster stands for distribution {names}: there are fewer clusters"


def mixtures_figure(record: RunRecord) -> Figure:
    """Draw how far estimated mixtures are from the true ones, and both of a few clients.

    Above, a dot is an upload and the line the mean by session. Below, a client of each of the first
    few distributions, with its mixture at each of its uploads: true above, estimated below (figure
    5 of "Client-Driven Federated Learning").

    Parameters
    ----------
    record : RunRecord
        The run.
    """
    with style():
        found = record.uploads.divergences()
        if not found:
            figure = new_figure(7.2, 3.0)
            axes = figure.add_subplot()
            axes.set_title("Mixtures of data, true and estimated")
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
        _legend(figure, of, len(found[0][0].mixture))
        return figure


def _draw_divergences(axes: Axes, record: RunRecord, found: Sequence[tuple[Upload, float]]) -> None:
    axes.set_title("Mixtures of data, true and estimated")
    axes.set_xlabel("updates")
    axes.set_ylabel("KL(true ‖ estimated)")
    axes.grid(axis="y")
    values = [value for _, value in found]
    seqs = [row.seq for row, _ in found]
    draw_dots(axes, seqs, values, series_colour(0), ms=3.5, alpha=0.35, label="an upload")
    by_session: dict[int, list[float]] = defaultdict(list)
    for row, value in found:
        by_session[row.session].append(value)
    ends = record.uploads.session_ends
    means = [(end, float(np.mean(by_session[i + 1]))) for i, end in enumerate(ends)]
    if means:
        axes.plot(*zip(*means, strict=True), color=INK, marker="o", ms=3.5, label="mean by session")
    highest = max([float(np.percentile(values, _FAR)), *(mean for _, mean in means)])
    axes.set_ylim(0.0, 1.1 * highest or 1.0)
    axes.set_xlim(left=0)
    # Dots may lie behind it.
    legend = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "markerscale": 2.0}
    axes.legend(loc="upper right", **legend)


def _examples(rows: Sequence[Upload]) -> dict[str, list[Upload]]:
    """Return the uploads of a few clients: of each distribution the one that uploads most."""
    of: dict[str, list[Upload]] = defaultdict(list)
    for row in rows:
        of[row.client].append(row)
    mains: dict[int, list[str]] = defaultdict(list)
    for client, own in of.items():
        often = Counter(int(np.argmax(row.mixture)) for row in own)
        mains[min(often, key=lambda main: (-often[main], main))].append(client)
    busiest = [min(mains[main], key=lambda name: -len(of[name])) for main in sorted(mains)]
    return {client: of[client] for client in busiest[:_MOST_CLIENTS]}


def _draw_client(axes: Axes, client: str, rows: Sequence[Upload], of: Mapping[int, int]) -> None:
    """Draw a client's mixtures as bars: true above, estimated below."""
    first = max(1, len(rows) - _MOST_BARS + 1)
    rows = rows[-_MOST_BARS:]
    numbers = np.arange(first, first + len(rows))
    for values, bottom in (
        (np.array([row.mixture for row in rows]), 1 + _GAP),
        (np.array([shares(row.estimate, of, row) for row in rows]), 0.0),
    ):
        _draw_bars(axes, numbers, values, bottom, of)
    axes.set_ylim(0.0, 2 + _GAP)
    axes.set_xlim(first - 0.6, first + len(rows) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_yticks([1.5 + _GAP, 0.5], ["true", "estimated"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(client, rotation=0, ha="right", va="center")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="x", length=2, pad=1)


def _draw_bars(
    axes: Axes, numbers: np.ndarray, values: Floats, bottom: float, of: Mapping[int, int]
) -> None:
    start = np.full(len(numbers), bottom)
    for distribution in range(values.shape[1]):
        height = values[:, distribution]
        colour = cluster_colour(_cluster_of(distribution, of))
        axes.bar(numbers, height, width=0.86, bottom=start, color=colour, lw=0)
        start = start + height


def _cluster_of(distribution: int, of: Mapping[int, int]) -> int:
    """Return the cluster that stands for a distribution; its own number if none does."""
    return next((cluster for cluster, known in of.items() if known == distribution), distribution)


def _legend(figure: Figure, of: Mapping[int, int], distributions: int) -> None:
    handles = []
    for distribution in range(distributions):
        cluster = _cluster_of(distribution, of)
        name = f"distribution {distribution}"
        name += f" (cluster {cluster})" if cluster != distribution else ""
        handles.append(Patch(color=cluster_colour(cluster), label=name))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(distributions, 4))
