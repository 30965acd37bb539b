"""What the pages of `raceme report` are made of: tables, figures, templates, a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

import raceme
from raceme.config.errors import UserError
from raceme.dashboard.frozen import Frozen
from raceme.records.files import atomic_write
from raceme.reporting.svg import inline_svg

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
        What it shows.
    heads : tuple of str
        The columns' heads; none for a table of names and values.
    rows : tuple of tuples of str
        The cells.
    words : Collection[int]
        The columns with words, which stand at the left; others have numbers.
    kind : str
        How it is set: a class of ``page.css``.
    marked : Collection[int]
        Rows that stand out.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: Collection[int] = (0,)
    kind: str = ""
    marked: Collection[int] = field(default=())


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
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def versions_table(versions: Mapping[str, Sequence[str]]) -> PageTable:
    """Return the versions of what made a result, by package; runs may differ in them."""
    rows = tuple((name, ", ".join(found) or "–") for name, found in versions.items())
    return PageTable("Versions", (), rows, words=(0, 1), kind="pairs")


def render(template: str, *, frozen: Frozen | None = None, **content: Any) -> str:
    """Fill in a template; every text in it is escaped.

    Parameters
    ----------
    template : str
        Its name.
    frozen : Frozen, optional
        The panels of the dashboard, which stand above all else.
    content : Any
        What the template names.
    """
    return (
        _environment()
        .get_template(template)
        .render(version=raceme.__version__, frozen=frozen, **content)
    )


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
                raise UserError(f"{path} is no regular file; --output takes the name of one.")
            with path.open("rb") as file:
                head = file.read(_HEAD)
            if head and _GENERATOR.encode() not in head:
                raise UserError(
                    f"{path} is no report of Raceme and is not replaced; choose another --output."
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
    """Cut a text that somebody else made as long as he liked."""
    return text if len(text) <= most else f"{text[:most]}…"
