"""How good uploads are, what clients get in return, and how good the clusters' models are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raceme.records.record import RunRecord
from raceme.records.uploads import Uploads
from raceme.reporting.style import (
    INK,
    cluster_colour,
    draw_dots,
    new_figure,
    say_empty,
    series_colour,
    style,
)

_TITLE = "What clients upload and what they get in return"
_CLUSTERS_TITLE = "Clusters' models on the server's test sets"

_MOST_CLUSTERS = 8
"""More clusters than this are not drawn one by one."""
_MARGIN = 0.03
"""Room above and below the curves; of errors in parts of the largest."""
_QUANTITIES = {
    "before": ("uploaded", series_colour(0)),
    "after": ("got in return", series_colour(5)),
}


def has_scores(record: RunRecord) -> bool:
    """Return whether a run tells how good uploads or clusters are."""
    return _has_uploads(record) or bool(record.cluster_scores)


def _has_uploads(record: RunRecord) -> bool:
    """Return whether a run tells how good uploads are: `score-uploads`."""
    return any(row.before is not None for row in record.uploads.rows)


def uploads_figure(record: RunRecord) -> Figure:
    """Draw the accuracy of uploads and of what clients got in return, and that of the clusters.

    Both are on test data of the mixture that the upload was trained on. A dot is an upload, a line
    the mean over the clients by session, and clusters are tested by the server on sets of their own
    (figures 3 and 9–19 of "Client-Driven Federated Learning").

    Parameters
    ----------
    record : RunRecord
        The run.
    """
    with style():
        figure = new_figure(7.2, 4.0)
        axes = figure.add_subplot()
        only_clusters = bool(record.cluster_scores) and not _has_uploads(record)
        axes.set_title(_CLUSTERS_TITLE if only_clusters else _TITLE)
        axes.set_xlabel("updates")
        axes.set_ylabel(record.measure.label)
        axes.grid(axis="y")
        if not has_scores(record):
            say_empty(axes, "no scores of uploads")
            return figure
        shown = _draw_clusters(axes, record)
        for quantity, (label, colour) in _QUANTITIES.items():
            shown += _draw_quantity(axes, record.uploads, quantity, label, colour)
        # Single uploads may lie far off; the curves are what is to be read.
        margin = _MARGIN * (max(shown) if record.measure.is_error else 1.0)
        highest = np.inf if record.measure.is_error else 1.0
        axes.set_ylim(max(0.0, min(shown) - margin), min(highest, max(shown) + margin))
        axes.set_xlim(left=0)
        handles = axes.get_legend_handles_labels()[0]
        axes.legend(handles=handles[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5))
        return figure


def _draw_quantity(
    axes: Axes, uploads: Uploads, quantity: str, label: str, colour: str
) -> list[float]:
    """Draw each upload and the mean by session; return what is to be seen in any case."""
    known = [row for row in uploads.rows if getattr(row, quantity) is not None]
    if not known:
        return []
    values = [getattr(row, quantity) for row in known]
    draw_dots(axes, [row.seq for row in known], values, colour)
    means = [
        (end, mean)
        for end, mean in zip(uploads.session_ends, uploads.by_session(quantity), strict=True)
        if mean is not None
    ]
    if not means:
        return [float(np.mean(values))]
    axes.plot(*zip(*means, strict=True), color=colour, marker="o", ms=3.5, label=label, zorder=4)
    return [mean for _, mean in means]


def _draw_clusters(axes: Axes, record: RunRecord) -> list[float]:
    """Draw the clusters' accuracies and their mean; return all that is drawn."""
    scores = record.cluster_scores
    updates, means = [event.updates for event in scores], [event.mean for event in scores]
    drawn = list(means)
    clusters = sorted({cluster for event in scores for cluster in event.accuracies})
    if 1 < len(clusters) <= _MOST_CLUSTERS:
        for cluster in clusters:
            values: Sequence[float] = [e.accuracies.get(cluster, np.nan) for e in scores]
            drawn += [value for value in values if np.isfinite(value)]
            axes.plot(
                *(updates, values),
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
