"""Marks over an axis of time: when clients' data changed, and when clusters did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline

from raceme.protocol.events import ClusterChange, ClustersChanged, DataChanged
from raceme.reporting.style import INK, MUTED

_MOST_DRIFTS = 24
"""More moments at which data changed are told in words: lines have to be told apart."""
_MOST_CHANGES = 80
"""More changes of one kind are told in words."""
_LETTER = 0.0088
"""Width of a letter of a label, as a share of the axis."""

# Lines that part, lines that meet, a plus, a cross.
_SHAPES = {
    ClusterChange.SPLIT: Outline([(-1, 0), (0, 0), (1, 0.9), (0, 0), (1, -0.9)], [1, 2, 2, 1, 2]),
    ClusterChange.MERGE: Outline([(1, 0), (0, 0), (-1, 0.9), (0, 0), (-1, -0.9)], [1, 2, 2, 1, 2]),
    ClusterChange.FOUND: Outline([(-0.8, 0), (0.8, 0), (0, -0.8), (0, 0.8)], [1, 2, 1, 2]),
    ClusterChange.RETIRE: Outline(
        [(-0.7, -0.7), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7)], [1, 2, 1, 2]
    ),
}
_WORDS = {
    ClusterChange.SPLIT: "split",
    ClusterChange.MERGE: "merge",
    ClusterChange.FOUND: "new cluster",
    ClusterChange.RETIRE: "cluster given up",
}


@dataclass(frozen=True)
class Drift:
    """Clients' data changed at one moment.

    Attributes
    ----------
    time, updates : float, int
        When.
    clients : frozenset of str or None
        Whose data; None stands for all clients.
    steps : tuple of (int, int)
        The lowest and the highest step from then on.
    """

    time: float
    updates: int
    clients: frozenset[str] | None
    steps: tuple[int, int]

    @property
    def who(self) -> str:
        """Whose data, in words."""
        if self.clients is None:
            return "all clients"
        return f"{len(self.clients)} client{'' if len(self.clients) == 1 else 's'}"

    @property
    def step(self) -> str:
        """The step, or the range of steps."""
        low, high = self.steps
        return str(low) if low == high else f"{low}-{high}"

    @property
    def label(self) -> str:
        """What stands beside its mark."""
        low, high = self.steps
        step = f"step{'' if low == high else 's'} {self.step}"
        return step if self.clients is None else f"{self.who}: {step}"


def drifts(changes: Sequence[DataChanged]) -> list[Drift]:
    """Put together what changed at the same moment."""
    found = []
    for time, together in groupby(changes, key=lambda change: change.time):
        group = list(together)
        clients = frozenset(change.client for change in group if change.client is not None)
        everybody = any(change.client is None for change in group)
        steps = [change.step for change in group]
        found.append(
            Drift(time, group[0].updates, None if everybody else clients, (min(steps), max(steps)))
        )
    return found


def mark_drifts(axes: Axes, changes: Sequence[DataChanged], seconds: float, y: float) -> bool:
    """Draw a line at each moment at which data changed, or say how many there were.

    Parameters
    ----------
    axes : Axes
        With its final limits of time.
    changes : Sequence[DataChanged]
        In order of time.
    seconds : float
        Seconds in a unit of the axis of time.
    y : float
        Height of the labels, as a share of the axes; lines end below them.

    Returns
    -------
    bool
        Whether there are lines, so that a legend can say what they are.
    """
    found = drifts(changes)
    across = axes.get_xaxis_transform()
    if len(found) > _MOST_DRIFTS:
        axes.text(
            0.008,
            y,
            f"the clients' data changed at {len(found):,} moments, which are not marked",
            transform=axes.transAxes,
            va="center",
            fontsize=7.5,
            color=MUTED,
        )
        return False
    free = float("-inf")
    left, right = axes.get_xlim()
    for drift in found:
        x = drift.time / seconds
        axes.plot([x, x], [0.0, y - 0.03], transform=across, color=INK, lw=0.9)
        width = _LETTER * len(drift.label) * (right - left)
        begin = min(max(x - width / 2, left), right - width)
        if begin >= free:
            axes.text(begin, y, drift.label, transform=across, va="center", fontsize=7.5)
            free = begin + width + _LETTER * (right - left)
    return bool(found)


def drift_line() -> Line2D:
    """Return the legend's entry for the lines of :func:`mark_drifts`."""
    return Line2D([], [], color=INK, lw=0.9, label="clients' data change")


def mark_changes(
    axes: Axes, changes: Sequence[ClustersChanged], seconds: float, y: float
) -> list[Line2D]:
    """Draw a sign at each split, merge, founding and retirement, and return the legend's entries.

    What a run begins with is not marked. The parameters are those of :func:`mark_drifts`.
    """
    entries = []
    for kind, shape in _SHAPES.items():
        times = sorted({c.time for c in changes if c.change is kind and c.time > 0})
        if not times:
            continue
        word = _WORDS[kind]
        if len(times) > _MOST_CHANGES:
            entries.append(Line2D([], [], ls="", label=f"{word}: {len(times):,} times"))
            continue
        look = {"marker": shape, "ls": "", "ms": 6, "mfc": "none", "mec": INK, "mew": 1.1}
        axes.plot(
            [time / seconds for time in times],
            [y] * len(times),
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            **look,  # type: ignore[arg-type]
        )
        entries.append(Line2D([], [], label=word, **look))  # type: ignore[arg-type]
    return entries
