"""Parts of the pages of `raceme report`: tables, figures, templates, files."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.collections import Collection as Artists
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import raceme
from raceme.core.errors import UserError, os_errors_as_user_errors, shortened
from raceme.core.files import atomic_write
from raceme.reporting.dashboard import Frozen
from raceme.reporting.style import FAINT, INK, MUTED, PAPER, group_colour, style

# -----------------------------------------------------------------------------
# Figures as inline SVG of an HTML page.
# -----------------------------------------------------------------------------


_MOST_PATHS = 1500
"""Number of shapes above which a figure is rasterised, for the browser's speed."""

_SHADES = 7
_TOO_DARK = ("64748b", "5e3c99", "c2185b", "3949ab", "7f1d1d", "1b5e20", "b026d3")
"""Colours of clusters and methods that stand out too little from a dark page."""

_COLOURS = {
    INK: "--figure-ink",
    MUTED: "--figure-muted",
    FAINT: "--figure-faint",
    PAPER: "--card",
    **{group_colour(group): f"--group-{group}" for group in range(_SHADES)},
    **{f"#{colour}": f"--lighter-{colour}" for colour in _TOO_DARK},
}
"""Colours that the dark theme changes, and their CSS variables."""

_COLOUR = re.compile("|".join(_COLOURS))
_FONT = re.compile(r"(?:'DejaVu Sans'|DejaVu Sans)(?:, *(?:'[^']*'|[\w-]+))*")
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_SETTINGS: Any = {"svg.hashsalt": "raceme", "svg.fonttype": "none"}


def inline_svg(figure: Figure, name: str) -> str:
    """Return a figure as a reproducible ``<svg>`` element.

    Parameters
    ----------
    figure : Figure
        The figure, which is modified.
    name : str
        Prefix of all ids, unique on the page: letters, digits and hyphens.
    """
    _make_transparent(figure)
    _rasterise_crowds(figure)
    written = io.StringIO()
    with style(), matplotlib.rc_context(_SETTINGS):
        figure.savefig(written, format="svg", metadata={"Date": None}, dpi=200)
    # Parses matplotlib's own output, with escaped text only.
    root = ElementTree.fromstring(written.getvalue())
    return ElementTree.tostring(_adapted(root, name), encoding="unicode")


def _make_transparent(figure: Figure) -> None:
    """Make white backgrounds transparent."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        if to_hex(patch.get_facecolor()) == "#ffffff":
            patch.set_facecolor("none")


def _rasterise_crowds(figure: Figure) -> None:
    """Rasterise collections if the figure has very many shapes."""
    collections = [found for found in figure.findobj(Artists) if isinstance(found, Artists)]
    if sum(len(collection.get_paths()) for collection in collections) > _MOST_PATHS:
        for collection in collections:
            collection.set_rasterized(True)


def _adapted(root: ElementTree.Element, name: str) -> ElementTree.Element:
    """Adapt ids, colours, font and size to the page."""
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("aria-hidden", "true")
    for element in root.iter():
        element.tag, element.tail = _local(element.tag), None
        if not (element.text or "").strip():
            element.text = None
        for child in list(element):
            # The style would affect the whole page; the metadata contain links.
            if _local(child.tag) in ("metadata", "style"):
                element.remove(child)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            element.set(key, _attribute(key, value, name))
    return root


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key == "style":
        value = _COLOUR.sub(lambda found: f"var({_COLOURS[found[0]]}, {found[0]})", value)
        value = _FONT.sub("var(--font)", value)
    return _REFERENCE.sub(rf"url(#{name}-\1)", value)


def _local(tag: str) -> str:
    """Return a name without its namespace, which HTML implies."""
    return tag.rpartition("}")[2]


# -----------------------------------------------------------------------------
# Parts of the pages of `raceme report`: tables, figures, templates, files.
# -----------------------------------------------------------------------------


_GENERATOR = '<meta name="generator" content="Raceme'
"""Marker in the head of every page; files without it are foreign."""
_HEAD = 1000
"""Number of bytes searched for the marker."""


@dataclass(frozen=True)
class Tile:
    """A headline number: name, value and remark."""

    name: str
    value: str
    below: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes
    ----------
    title : str
        Heading above the table.
    heads : tuple of str
        Column headings; empty for a table of names and values.
    rows : tuple of tuples of str
        The cells; numbers are formatted by :func:`number`.
    words : Collection[int]
        Columns with left-aligned words; others have numbers.
    kind : str
        CSS class of ``page.css``.
    marked : Collection[int]
        Indices of highlighted rows.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    words: Collection[int] = (0,)
    kind: str = ""
    marked: Collection[int] = ()

    def __post_init__(self) -> None:
        cells = tuple(
            tuple(cell if isinstance(cell, str) else number(cell) for cell in row)
            for row in self.rows
        )
        object.__setattr__(self, "rows", cells)


@dataclass(frozen=True)
class Plot:
    """A figure as markup, with caption."""

    caption: str
    svg: Markup


def plot(figure: Figure, name: str) -> Plot:
    """Make a plot of a figure; its title becomes the caption.

    Parameters
    ----------
    figure : Figure
        Figure with an optional title at the left of its first axes.
    name : str
        Unique name on the page: letters, digits and hyphens.
    """
    caption = ""
    for axes in figure.axes[:1]:
        caption = axes.get_title(loc="left")
        axes.set_title("", loc="left")
    # Not escaped again: ElementTree has done so.
    return Plot(caption, Markup(inline_svg(figure, name)))


def number(value: Any, digits: int = 3) -> str:
    """Format a number; a dash for None and non-finite values."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: ``"1 client"``, ``"2 clients"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_of(shown: int, total: int, noun: str = "") -> str:
    """Return the part of a title for a truncated table; empty if complete."""
    return f", the first {shown} of {total}{noun}" if shown < total else ""


def versions_table(versions: Mapping[str, Sequence[str]]) -> PageTable:
    """Return a table of package versions, which may differ between runs."""
    rows = tuple((name, ", ".join(found) or "–") for name, found in versions.items())
    return PageTable("Versions", (), rows, words=(0, 1), kind="pairs")


def render(template: str, *, frozen: Frozen | None = None, **content: Any) -> str:
    """Fill in a template; every text in it is escaped.

    Parameters
    ----------
    template : str
        File name of the template, without a folder.
    frozen : Frozen, optional
        The panels of the dashboard, at the top.
    content : Any
        Values of the template's variables.
    """
    found = _environment().get_template(template)
    return found.render(version=raceme.__version__, frozen=frozen, **content)


def write_page(path: Path, text: str) -> None:
    """Write a page atomically, replacing an earlier one.

    Raises
    ------
    UserError
        It cannot be written, or the path is no page.
    """
    check_writable(path)
    with os_errors_as_user_errors(f"Cannot write {path}"), atomic_write(path) as file:
        file.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise UserError if a path must not be replaced by a page."""
    with os_errors_as_user_errors(f"Cannot write {path}"):
        if path.is_dir():
            raise UserError(f"{path} is a folder; --output takes the name of a file.")
        if path.exists():
            # Renaming would replace a device file.
            if not path.is_file():
                raise UserError(f"{path} is not a regular file; choose another --output.")
            with path.open("rb") as file:
                head = file.read(_HEAD)
            if head and _GENERATOR.encode() not in head:
                raise UserError(
                    f"{path} is not a report of Raceme, and is kept; choose another --output."
                )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("raceme.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shortened"] = shortened
    return environment
