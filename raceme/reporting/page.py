"""What the pages of `raceme report` are made of: tables, figures, templates, a file."""

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
from raceme.core.errors import UserError
from raceme.core.files import atomic_write
from raceme.reporting.dashboard import Frozen
from raceme.reporting.style import FAINT, INK, MUTED, group_colour, style

# -----------------------------------------------------------------------------
# Figures as SVG that stands inside an HTML page, beside others.
# -----------------------------------------------------------------------------


_MOST_PATHS = 1500
"""A figure with more shapes than this has them as one image: a browser draws each one anew."""

_SHADES = 7
_COLOURS = {
    INK: "--figure-ink",
    MUTED: "--figure-muted",
    FAINT: "--figure-faint",
    **{group_colour(group): f"--group-{group}" for group in range(_SHADES)},
}
"""Colours that a page in the dark has to change, and what it calls them."""

_COLOUR = re.compile("|".join(_COLOURS))
_FONT = re.compile(r"(?:'DejaVu Sans'|DejaVu Sans)(?:, *(?:'[^']*'|[\w-]+))*")
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_SETTINGS: Any = {"svg.hashsalt": "raceme", "svg.fonttype": "none"}


def inline_svg(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element; the same figure gives the same text.

    Parameters
    ----------
    figure : Figure
        The figure, which is not to be used for anything else afterwards.
    name : str
        Stands before all ids, which have to differ between the figures of a page. Letters,
        digits and hyphens.
    """
    _make_transparent(figure)
    _rasterise_crowds(figure)
    written = io.StringIO()
    with style(), matplotlib.rc_context(_SETTINGS):
        figure.savefig(written, format="svg", metadata={"Date": None}, dpi=200)
    # What is parsed was written a line above: nothing from outside but escaped text is in it.
    root = ElementTree.fromstring(written.getvalue())
    return ElementTree.tostring(_adapted(root, name), encoding="unicode")


def _make_transparent(figure: Figure) -> None:
    """Let the page shine through where the figure is white."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        if to_hex(patch.get_facecolor()) == "#ffffff":
            patch.set_facecolor("none")


def _rasterise_crowds(figure: Figure) -> None:
    """Make images of collections if there are very many shapes in the figure."""
    collections = [found for found in figure.findobj(Artists) if isinstance(found, Artists)]
    if sum(len(collection.get_paths()) for collection in collections) > _MOST_PATHS:
        for collection in collections:
            collection.set_rasterized(True)


def _adapted(root: ElementTree.Element, name: str) -> ElementTree.Element:
    """Make ids unique, colours and font the page's, and the size that of the column."""
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("aria-hidden", "true")
    for element in root.iter():
        element.tag, element.tail = _local(element.tag), None
        if not (element.text or "").strip():
            element.text = None
        for child in list(element):
            # The style would be that of the whole page; the metadata are links.
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
    """Return a name without its namespace, which HTML knows by itself."""
    return tag.rpartition("}")[2]


# -----------------------------------------------------------------------------
# What the pages of `raceme report` are made of: tables, figures, templates, a file.
# -----------------------------------------------------------------------------


FILE_NAME = "report.html"

_GENERATOR = '<meta name="generator" content="Raceme'
"""In the head of every page: a file without it is another's."""
_HEAD = 1000
"""So many bytes of a file are looked at."""


@dataclass(frozen=True)
class Tile:
    """A number that is seen first: its name, itself, and what is said below."""

    name: str
    value: str
    below: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes
    ----------
    title : str
        Heading above the table; what it shows.
    heads : tuple of str
        The columns' heads; none for a table of names and values.
    rows : tuple of tuples of str
        The cells; numbers may be given as such, and are written as :func:`number` does.
    words : Collection[int]
        The columns with words, which stand at the left; others have numbers.
    kind : str
        How it is set: a class of ``page.css``.
    marked : Collection[int]
        Numbers of the rows that are highlighted, from 0.
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
    """A figure as markup, and what it shows."""

    caption: str
    svg: Markup


def plot(figure: Figure, name: str) -> Plot:
    """Make a plot of a figure; its title becomes the caption.

    Parameters
    ----------
    figure : Figure
        One with a title at the left of its first axes, or none.
    name : str
        Different for each plot of a page: letters, digits and hyphens.
    """
    caption = ""
    for axes in figure.axes[:1]:
        caption = axes.get_title(loc="left")
        axes.set_title("", loc="left")
    # The one text that is not escaped: ElementTree has done it.
    return Plot(caption, Markup(inline_svg(figure, name)))


def spread_over(count: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `count` things, the first and the last included."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def number(value: Any, digits: int = 3) -> str:
    """Return a number as it is shown; a dash for what is none or not finite."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: ``"1 client"``, ``"2 clients"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_of(shown: int, total: int, noun: str = "") -> str:
    """Return for a title how many of all rows a table has; nothing if it has all."""
    return f", the first {shown} of {total}{noun}" if shown < total else ""


def versions_table(versions: Mapping[str, Sequence[str]]) -> PageTable:
    """Return the versions of what made a result, by package; runs may differ in them."""
    rows = tuple((name, ", ".join(found) or "–") for name, found in versions.items())
    return PageTable("Versions", (), rows, words=(0, 1), kind="pairs")


def render(template: str, *, frozen: Frozen | None = None, **content: Any) -> str:
    """Fill in a template; every text in it is escaped.

    Parameters
    ----------
    template : str
        File name of the template, without a folder.
    frozen : Frozen, optional
        The panels of the dashboard, which stand above all else.
    content : Any
        Values of the variables that the template names.
    """
    found = _environment().get_template(template)
    return found.render(version=raceme.__version__, frozen=frozen, **content)


def write_page(path: Path, text: str) -> None:
    """Write a page atomically, in the place of an earlier one.

    Raises
    ------
    UserError
        It cannot be written, or something else than a page is there.
    """
    check_writable(path)
    try:
        with atomic_write(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def check_writable(path: Path) -> None:
    """Raise UserError if there is something that a page must not replace."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; --output takes the name of a file.")
        if path.exists():
            # The page takes the name of what is there: a device would be gone.
            if not path.is_file():
                raise UserError(f"{path} is not a regular file; choose another --output.")
            with path.open("rb") as file:
                head = file.read(_HEAD)
            if head and _GENERATOR.encode() not in head:
                raise UserError(
                    f"{path} is not a report of Raceme, and is kept; choose another --output."
                )
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("raceme.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shortened"] = _shortened
    return environment


def _shortened(text: str, most: int = 120) -> str:
    """Cut a text from elsewhere that may be of any length."""
    return text if len(text) <= most else f"{text[:most]}…"
