"""The page's files: served one by one, or linked into one script for a page that is one file."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

_TYPES = {".js": "text/javascript", ".css": "text/css"}
_ROOT = files("raceme.dashboard") / "assets"
_MAIN = "main.js"
_PLOTTER = "vendor/uPlot.iife.min.js"
_STYLES = ("vendor/uPlot.min.css", "board.css")

_IMPORT = re.compile(r'^import \{[^}]*\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)


def _found(folder: str = "") -> dict[str, str]:
    """Return the files below a folder that a browser may ask for, with their types."""
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
def style() -> str:
    """Return the style sheets of the panels, for a page that is one file."""
    return "\n".join(read_asset(name) for name in _STYLES)


@cache
def script() -> str:
    """Return plotter and modules as one script, for a page that is one file.

    Modules import by name and with no other names, and no two of them have anything of the same
    name at their top: so one after another, without their imports and exports, they are a script.
    """
    texts = [read_asset(name) for name in _in_order(_MAIN, {})]
    linked = "".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)
    return f'{read_asset(_PLOTTER)}\n(() => {{\n"use strict";\n{linked}}})();\n'


def _in_order(name: str, seen: dict[str, bool]) -> list[str]:
    """Return a module behind all that it imports."""
    if name in seen:
        return []
    seen[name] = True
    found = []
    for imported in _IMPORT.findall(read_asset(name)):
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
