"""Keys as a person writes them: TOML files, and ``key=value`` after ``--set``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from raceme.config.errors import UserError
from raceme.config.options import Value
from raceme.config.reading import ReadingError, parse_toml, read_text

SET = "set"
"""The key that stands for any others, as the option ``--set`` does."""


def read_toml(path: Path, pipe: bool = False) -> dict[str, Value]:
    """Read a configuration file into dotted keys.

    Parameters
    ----------
    path : Path
        The file.
    pipe : bool
        A pipe will do, too: ``--config <(command)``.

    Raises
    ------
    UserError
        The file is missing or is not TOML.
    """
    try:
        text = read_text(path, pipe=pipe)
    except ReadingError as error:
        raise UserError(f"Cannot read the configuration file {path}: {error}.") from None
    try:
        tree = parse_toml(text)
    except ReadingError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    flat: dict[str, Value] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": given for inner, given in value.items()})
        else:
            flat[name] = value
    return flat


def write_toml(keys: Mapping[str, Value], path: Path) -> None:
    """Write dotted keys so that :func:`read_toml` gives them again."""
    tree: dict[str, Any] = {}
    for name, value in keys.items():
        if "." in name:
            table, inner = name.split(".", 1)
            tree.setdefault(table, {})[inner] = value
        else:
            tree[name] = value
    path.write_text(tomli_w.dumps(tree), encoding="utf-8")


def parse_assignment(text: str) -> tuple[str, Value]:
    """Split ``key=value`` as typed after ``--set``; the value is TOML, or else plain text.

    Raises
    ------
    UserError
        There is no ``=``.
    """
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set takes key=value, got '{text}'.")
    try:
        value = parse_toml(f"value = {raw.strip()}")["value"]
    except ReadingError:
        value = raw.strip()
    return name.strip(), value


def expanded(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with those that the key ``set`` holds as text in its place; they win.

    Raises
    ------
    UserError
        The text cannot be read.
    """
    given = dict(keys)
    given.update(assignments(str(given.pop(SET, ""))))
    return given


def assignments(text: str) -> list[tuple[str, Value]]:
    """Split the text of the key ``set``."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{SET} takes 'key=value key=value', got '{text}': {error}.") from None
    return [parse_assignment(part) for part in parts]
