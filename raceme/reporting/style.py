"""Style of figures: settings, consistent colours, time axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from raceme.core.events import ClusterChange, ClustersChanged, DataChanged
from raceme.core.files import atomic_write
from raceme.records.similarity import evenly_spread
from raceme.records.summary import Floats

INK = "#22272e"
PAPER = "#fefefe"  # Background of texts: unlike white, it becomes dark on a dark page.
MUTED = "#7a828c"
FAINT = "#e6e8eb"
REJECTED = "#c1121f"
NEUTRAL = "#64748b"

# Okabe and Ito's colour-blind-safe palette, with brown and plum instead of black (used for text)
# and yellow (too faint on white).
_PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6d46",
    "#5e3c99",
    # Sixteen clusters have distinct colours.
    "#c2185b",
    "#6b8e23",
    "#00838f",
    "#b026d3",
    "#3949ab",
    "#7f1d1d",
    "#1b5e20",
    "#7a86e0",
)

# Those of methods: blues that are hard to tell apart are left out.
_SERIES = tuple(colour for colour in _PALETTE if colour not in ("#56b4e9", "#3949ab", "#7a86e0"))

# Solid, dashed, dotted, dash-dotted.
_LINES = ("-", (0, (4.5, 1.6)), (0, (1.1, 1.3)), (0, (5, 1.4, 1.1, 1.4)))

# Shades of true groups, distinct from cluster colours and in greyscale.
_GROUP_SHADES = ("#1b1f24", "#8d99a6", "#4e5a66", "#c9d0d6", "#333b44", "#aab4bd", "#6d7985")

_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "text.color": INK,
    # Labels are plain text, no formulas.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.8,
    "figure.facecolor": "white",
    "figure.dpi": 150.0,
    "savefig.dpi": 150.0,
}


CLOCK = "virtual time"
"""Default label of a time axis."""


@contextmanager
def style() -> Iterator[None]:
    """Apply Raceme's settings within the context, instead of the user's.

    Names of devices that matplotlib's own font lacks are drawn with a font of the machine, or
    without a warning as boxes.
    """
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        installed = set(get_font_names())
        fonts = ["sans-serif", *(font for font in _FURTHER_FONTS if font in installed)]
        matplotlib.rcParams["font.family"] = fonts
        yield


_FURTHER_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Arial Unicode MS",
    "Microsoft YaHei",
    "Malgun Gothic",
)
"""Fonts with other scripts, as Linux distributions, macOS and Windows have them."""


_MOST_DOTS = 3000
"""Maximum number of dots."""
MOST_BARS = 3000
"""Maximum number of bars in a timeline, which shows only its first part otherwise."""
MOST_ROWS = 120
"""Maximum number of devices in a timeline, spread from the fastest to the slowest."""


class _ShownFigure(Figure):
    """A figure that a notebook shows as a picture, without pyplot."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, with automatic layout."""
    figure = _ShownFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def one_axes(
    width: float, height: float, title: str = "", *, x: str = "", y: str = "", grid: str = ""
) -> tuple[Figure, Axes]:
    """Return an empty figure with one pair of axes, with title, labels and grid."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if grid:
        axes.grid(axis=grid)  # type: ignore[arg-type]
    return figure, axes


COLUMN_WIDTH = 3.3
"""Width in inches of a paper's column."""
PAPER_POINTS = 8
"""Size of the text in such a figure."""


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically as PNG, or for a paper as PDF or SVG, by suffix.

    For a paper it is as wide as a column, with text of 8 points in embedded TrueType fonts; the
    figure given is changed.
    """
    kind = path.suffix[1:]
    if kind != "png":
        width, height = figure.get_size_inches()
        figure.set_size_inches(COLUMN_WIDTH, min(height, COLUMN_WIDTH * max(0.75, height / width)))
        for text in figure.findobj(Text):
            text.set_fontsize(PAPER_POINTS)
            text.set_text("\n".join(fill(line, 42) for line in text.get_text().split("\n")))
    metadata = {"png": {"Software": "Raceme"}, "pdf": {"CreationDate": None}}
    with atomic_write(path) as file, style():
        matplotlib.rcParams.update({"pdf.fonttype": 42, "svg.hashsalt": "raceme"})
        figure.savefig(file, format=kind, metadata=metadata.get(kind, {"Date": None}))


def cluster_colour(cluster: int) -> str:
    """Return the colour of a cluster, the same in every figure.

    The first cluster is slate; the others cycle through the palette.
    """
    return NEUTRAL if cluster == 0 else _PALETTE[(cluster - 1) % len(_PALETTE)]


def series_colour(index: int) -> str:
    """Return the colour of one of several methods in a figure."""
    return _SERIES[index % len(_SERIES)]


def series_line(index: int) -> Any:
    """Return the line style of one of several methods, which changes when colours repeat."""
    return _LINES[index // len(_SERIES) % len(_LINES)]


def method_looks(labels: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """Return colour and line style of each method of a comparison, by label.

    Assigned in alphabetical order of labels, as on the dashboard, so that a method looks the same
    in every figure.
    """
    places = {label: place for place, label in enumerate(sorted(set(labels)))}
    return {label: (series_colour(place), series_line(place)) for label, place in places.items()}


def group_colour(group: int) -> str:
    """Return the shade of a true group."""
    return _GROUP_SHADES[group % len(_GROUP_SHADES)]


def time_unit(span: float) -> tuple[float, str]:
    """Return the length in seconds and the symbol of a suitable unit of time."""
    if span > 2 * 86400:
        return 86400.0, "d"
    if span > 5 * 3600:
        return 3600.0, "h"
    if span > 3 * 3600 / 2:
        return 60.0, "min"
    return 1.0, "s"


def time_axis(axes: Axes, end: float, label: str) -> float:
    """Label the x-axis as time from 0 to `end` and return the seconds in its unit."""
    seconds, unit = time_unit(end)
    axes.set_xlabel(f"{label} ({unit})")
    # matplotlib warns about an empty range.
    axes.set_xlim(0.0, end / seconds if end > 0 else 1.0)
    return seconds


def log_time_axis(axes: Axes, start: float, end: float) -> None:
    """Make an axis of time logarithmic; `start` and `end` are in its unit and above 0."""
    axes.set_xscale("log")
    axes.set_xlim(start, end)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{axes.get_xlabel()}, logarithmic")


def legend_beside(axes: Axes, **how: Any) -> None:
    """Draw the legend beside the axes."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), **how)


def heat_map(axes: Axes, values: Floats, low: float, high: float, **how: Any) -> Any:
    """Draw a matrix as cells without frame or ticks; return the image for a colour bar."""
    look = {"cmap": "viridis", "interpolation": "nearest", **how}
    image = axes.imshow(values, vmin=low, vmax=high, **look)
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def write_placeholder(axes: Axes, text: str) -> None:
    """Write a text in the middle of an empty figure."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def fastest_first(typical: Mapping[str, float]) -> list[str]:
    """Return the devices of a timeline by typical time, a sample of very many."""
    order = sorted(typical, key=lambda client: typical[client])
    return [order[index] for index in evenly_spread(len(order), MOST_ROWS)]


def first_part(end: float, whole: float, seconds: float, of: str = "") -> str:
    """Return the part of a title for a truncated time; empty if complete."""
    if end >= whole:
        return ""
    return f" (the first {float(f'{end / seconds:.3g}'):,g} {time_unit(end)[1]}{of})"


_LEAST_SPAN = 0.002
"""Least width of a box, as a share of the axis, so that a task of a minute is visible in a day."""


def draw_spans(
    axes: Axes,
    rows: Mapping[str, int],
    spans: Iterable[tuple[str, float, float]],
    end: float,
    seconds: float,
    colours: str | Sequence[str],
    edge: str = FAINT,
    hatch: str | None = None,
) -> None:
    """Draw spans of time as boxes in rows of devices.

    Parameters
    ----------
    axes : Axes
        Axes of time, to which the boxes are added.
    rows : Mapping[str, int]
        Row of each shown client.
    spans : Iterable of (str, float, float)
        Client, start and end in seconds.
    end : float
        End of the drawing in seconds.
    seconds : float
        Seconds per unit of the time axis.
    colours : str or Sequence[str]
        Colour of all boxes or of each span; ``"none"`` for outlines.
    edge, hatch : str, str or None
        Colour of the edges, and the pattern.
    """
    corners, faces, widths = [], [], []
    least = _LEAST_SPAN * end / seconds
    for index, (client, start, stop) in enumerate(spans):
        if client in rows and start < end:
            left, right, row = start / seconds, min(stop, end) / seconds, rows[client]
            low, high = row - 0.4, row + 0.4
            # The edges of a narrow box would cover it.
            widths.append(0.4 if right - left > 2 * least or hatch else 0.0)
            right = max(right, left + least)
            corners.append([(left, low), (right, low), (right, high), (left, high)])
            faces.append(colours if isinstance(colours, str) else colours[index])
    axes.add_collection(
        PolyCollection(corners, facecolors=faces, edgecolors=edge, linewidths=widths, hatch=hatch)
    )


def draw_dots(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, **how: Any) -> None:
    """Draw single values as faint dots, an even sample of very many."""
    chosen = np.unique(np.linspace(0, len(x) - 1, _MOST_DOTS).astype(int))
    how = {"ls": "", "marker": ".", "ms": 3, "mew": 0, "alpha": 0.3, "zorder": 1, **how}
    axes.plot(np.asarray(x)[chosen], np.asarray(y)[chosen], color=colour, **how)


# -----------------------------------------------------------------------------
# Marks of drifts and cluster changes on a time axis.
# -----------------------------------------------------------------------------


_MOST_DRIFTS = 24
"""Maximum number of drift lines; more are only counted."""
_MOST_CHANGES = 80
"""Maximum number of signs per kind of change; more are only counted."""
_LETTER = 0.0088
"""Width of a letter as a share of the axis."""

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
class ChangePoint:
    """A drift at one time.

    Attributes
    ----------
    time, updates : float, int
        Time in seconds, and updates applied by then.
    clients : frozenset of str or None
        Affected clients; None for all.
    steps : tuple of (int, int)
        The lowest and the highest step from then on.
    """

    time: float
    updates: int
    clients: frozenset[str] | None
    steps: tuple[int, int]

    @property
    def affected_clients(self) -> str:
        """The affected clients in words."""
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
        """Label of its mark."""
        low, high = self.steps
        step = f"step{'' if low == high else 's'} {self.step}"
        return step if self.clients is None else f"{self.affected_clients}: {step}"


def change_points(changes: Sequence[DataChanged]) -> list[ChangePoint]:
    """Merge simultaneous changes."""
    found = []
    for time, together in groupby(changes, key=lambda change: change.time):
        group = list(together)
        clients = frozenset(change.client for change in group if change.client is not None)
        is_all = any(change.client is None for change in group)
        steps = [change.step for change in group]
        found.append(
            ChangePoint(
                time, group[0].updates, None if is_all else clients, (min(steps), max(steps))
            )
        )
    return found


def mark_drifts(axes: Axes, changes: Sequence[DataChanged], seconds: float, y: float) -> bool:
    """Draw a line at each drift, or state their number.

    Parameters
    ----------
    axes : Axes
        Axes with final time limits.
    changes : Sequence[DataChanged]
        Reported changes, in order of time.
    seconds : float
        Seconds per unit of the time axis.
    y : float
        Height of the labels, as a share of the axes; lines end below them.

    Returns
    -------
    bool
        Whether there are lines to explain in a legend.
    """
    found = change_points(changes)
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
    """Draw a sign at each split, merge, new or retired cluster; return legend entries.

    Initial clusters are not marked. Parameters as in :func:`mark_drifts`.
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
