"""The page of `raceme report`: sections of tables, figures and notes below the dashboard."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

import raceme
from raceme.core.errors import UserError, os_errors_as_user_errors, shortened
from raceme.core.files import atomic_write
from raceme.reporting.dashboard import FrozenData, stylesheet
from raceme.reporting.style import style

_GENERATOR = '<meta name="generator" content="Raceme'
"""Marker in the head of every page; files without it are foreign."""
_HEAD = 1000
"""Number of bytes searched for the marker."""
_POINTS = 200
"""Pixels per inch of the figures."""
_MOST_OF_PHONE = 3
"""Columns that fit on a phone; there, each row of a wider table is a card."""


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes
    ----------
    title : str
        Heading above the table, unless it is that of its section.
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
    folded : bool
        Whether a reader opens it.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    words: Collection[int] = (0,)
    kind: str = ""
    marked: Collection[int] = ()
    folded: bool = False

    def __post_init__(self) -> None:
        cells = tuple(
            tuple(cell if isinstance(cell, str) else number(cell) for cell in row)
            for row in self.rows
        )
        object.__setattr__(self, "rows", cells)


@dataclass(frozen=True)
class Plot:
    """A figure as the address of an image.

    Attributes
    ----------
    caption : str
        Text below it.
    kind : str
        CSS class: the colours of ``heat-map`` are the same on a dark page.
    """

    caption: str
    image: Markup
    kind: str = ""


@dataclass(frozen=True)
class Command:
    """A command to copy."""

    command: str


@dataclass(frozen=True)
class Links:
    """A list of files and folders: names and paths."""

    title: str
    targets: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Attributes
    ----------
    name : str
        Its id, for links.
    parts : Sequence
        Notes (texts), tables, figures, commands and links, in order; None is left out.
    drawn : bool
        Whether the dashboard shows the same content; then only browsers without JavaScript show the
        section.
    """

    name: str
    title: str
    parts: Sequence[str | PageTable | Plot | Command | Links | None]
    drawn: bool = False


@style()
def plot(figure: Figure) -> Plot:
    """Make a plot of a figure; its title, at the left of its first axes, becomes the caption."""
    caption = ""
    for axes in figure.axes[:1]:
        caption = axes.get_title(loc="left")
        axes.set_title("", loc="left")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=_POINTS, metadata={"Software": "Raceme"})
    data = base64.b64encode(written.getvalue()).decode()
    kind = "heat-map" if any(axes.images for axes in figure.axes) else ""
    return Plot(caption, Markup(f"data:image/png;base64,{data}"), kind)


def number(value: Any, digits: int = 3) -> str:
    """Format a number; a dash for None and non-finite values."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def first_of(shown: int, total: int, noun: str = "") -> str:
    """Return the part of a title for a truncated table; empty if complete."""
    return f", the first {shown} of {total}{noun}" if shown < total else ""


def versions_table(versions: Mapping[str, Sequence[str]]) -> PageTable:
    """Return a table of package versions, which may differ between runs."""
    rows = tuple((name, ", ".join(found) or "–") for name, found in versions.items())
    return PageTable("Versions", (), rows, words=(0, 1), kind="pairs")


def render(
    kind: str,
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    links: str,
    frozen: FrozenData | None = None,
) -> str:
    """Return a page as HTML; every text in it is escaped.

    Parameters
    ----------
    kind, title, lead : str
        Kind of the page, above its title; the title; and the line below it.
    sections : Sequence[Section]
        The sections; those without parts are left out.
    links : str
        Prefix of links to files.
    frozen : FrozenData, optional
        The panels of the dashboard, at the top.
    """
    shown = []
    for section in sections:
        parts = [part for part in section.parts if part is not None]
        if parts:
            shown.append({**vars(section), "parts": parts})
    return _template().render(
        version=raceme.__version__,
        style=Markup(stylesheet()),
        kind=kind,
        title=title,
        lead=lead,
        sections=shown,
        links=links,
        frozen=frozen,
        most_of_phone=_MOST_OF_PHONE,
    )


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
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("raceme.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shortened"] = shortened
    return environment.get_template("page.html")
