"""Figures as SVG that stands inside an HTML page, beside others."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from raceme.reporting.style import FAINT, INK, MUTED, group_colour, style

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
    collections = [found for found in figure.findobj(Collection) if isinstance(found, Collection)]
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
