"""The dashboard: assets, live pages and frozen pages."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath

from markupsafe import Markup

from raceme.reporting.dashboard.source import ComparisonSource, FolderSource, RunSource

_TYPES = {".js": "text/javascript", ".css": "text/css"}
_ROOT = files("raceme.reporting.dashboard") / "assets"
_MAIN = "main.js"
_PLOTTER = "vendor/uPlot.iife.min.js"
_LICENCE = "vendor/uPlot.LICENSE"
_STYLES = ("vendor/uPlot.min.css", "page.css")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:function|class|const) (\w+))", re.MULTILINE)


def _found(folder: str = "") -> dict[str, str]:
    """Return the files below a folder that a browser may request, with types."""
    names: dict[str, str] = {}
    for entry in (_ROOT / folder if folder else _ROOT).iterdir():
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir():
            names |= _found(name)
        elif PurePosixPath(name).suffix in _TYPES:
            names[name] = _TYPES[PurePosixPath(name).suffix]
    return names


ASSETS = _found()
"""Name of each file to its type."""


def read_asset(name: str) -> str:
    """Return the text of one of the page's files."""
    return (_ROOT / name).read_text(encoding="utf-8")


@cache
def live_page() -> str:
    """Return the page that follows a run."""
    return read_asset("index.html")


@cache
def stylesheet() -> str:
    """Return the style sheets of the page, for one that is a single file."""
    return "\n".join(read_asset(name) for name in _STYLES)


@cache
def script() -> str:
    """Return plotter and modules as one script, for a page that is one file.

    Modules import by name, without renaming or circles, and export their declarations, so each
    becomes a function with the others' exports in scope.
    """
    linked = "".join(_linked(name) for name in _in_order(_MAIN, set()))
    plotter = f"/*\nuPlot: {read_asset(_LICENCE)}*/\n{read_asset(_PLOTTER)}"
    return f'{plotter}\n"use strict";\nconst modules = {{}};\n{linked}'


def _linked(name: str) -> str:
    text = read_asset(name)
    exported = ", ".join(declared for _, declared in _EXPORT.findall(text))
    text = _IMPORT.sub(
        lambda found: f'const {found[1]} = modules["{_resolved(name, found[2])}"];\n', text
    )
    text = _EXPORT.sub(r"\1", text)
    return f'modules["{name}"] = (() => {{\n{text}return {{ {exported} }};\n}})();\n'


def _in_order(name: str, seen: set[str]) -> list[str]:
    """Return a module after all its imports."""
    if name in seen:
        return []
    seen.add(name)
    found = []
    for _, imported in _IMPORT.findall(read_asset(name)):
        found += _in_order(_resolved(name, imported), seen)
    return [*found, name]


def _resolved(importer: str, imported: str) -> str:
    parts = list(PurePosixPath(importer).parent.parts)
    for part in PurePosixPath(imported).parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


# -----------------------------------------------------------------------------
# The page frozen into a file: panels, script and data, without a server.
# -----------------------------------------------------------------------------


_MOST_SCORES = 250_000
"""Maximum number of client accuracies: 1.3 MB of text."""
_MOST_POSITIONS = 100_000
"""Maximum number of positions on the map: 1 MB."""
_MOST_BYTES = 30_000_000
"""Maximum size of a page; `raceme watch` shows larger runs."""


@dataclass(frozen=True)
class FrozenData:
    """The frozen panels for a template.

    Attributes
    ----------
    script : Markup
        Content of ``<script>``.
    data : Markup
        JSON for a ``<script>`` of that type.
    policy : str
        The page's content security policy: this script and no other, and no network.
    """

    script: Markup
    data: Markup
    policy: str


def frozen_run(folder: Path) -> FrozenData | None:
    """Freeze the page of a run; None if it is too large for a file.

    Raises
    ------
    UserError
        The folder cannot be read.
    """
    return _frozen(RunSource(folder, most_scores=_MOST_SCORES, most_positions=_MOST_POSITIONS))


def frozen_comparison(folder: Path) -> FrozenData | None:
    """Freeze the page of a comparison, as :func:`frozen_run` does that of a run."""
    return _frozen(ComparisonSource(folder))


def _frozen(source: FolderSource) -> FrozenData | None:
    source.read_all()
    pieces = source.pieces
    if sum(map(len, pieces)) > _MOST_BYTES:
        return None
    # Escaped, so that no text ends the element.
    data = "[" + ",".join(pieces).replace("<", "\\u003c") + "]"
    program = script()
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    # Figures use style attributes.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return FrozenData(Markup(program), Markup(data), policy)
