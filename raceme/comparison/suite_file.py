"""Suites as TOML files: those of the papers that come with the package, and a person's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from raceme.comparison.suites import (
    NEVER,
    VALIDATION,
    Method,
    Published,
    Score,
    Scored,
    Suite,
    Timing,
    grid,
)
from raceme.config import Value
from raceme.config.errors import UserError, unknown_name
from raceme.config.reading import ReadingError, parse_toml, read_text

SHIPPED = Path(__file__).parent / "suites"
"""The folder of the suites that come with the package."""

_SUITE_KEYS = (
    "title",
    "extends",
    "seeds",
    "async-updates",
    "sync-updates",
    "rounds",
    "sweep-scale",
    "validation-fraction",
    "timing",
    "score",
    "shows-unrest",
    "shows-forgetting",
    "shows-traffic",
    "shows-clusters",
    "scores",
    "shows-mixtures",
    "shows-work",
    "reference",
    "notes",
    "settings",
    "methods",
)
_METHOD_KEYS = ("strategy", "options", "sweep", "published", "settings")
_NUMBERS = ("accuracy", "time", "traffic", "clusters", *Scored)
_REMARK = "remark"

_Choice = TypeVar("_Choice", bound=StrEnum)


def load_suite(path: Path) -> Suite:
    """Read a suite from a TOML file, or one that comes with the package by its name.

    Raises
    ------
    UserError
        The file is missing or is not TOML, or has a key that does not exist.
    """
    if not path.is_file() and (SHIPPED / f"{path}.toml").is_file():
        path = SHIPPED / f"{path}.toml"
    tree = _tree(path, ())
    methods = _table(path, "methods", tree.get("methods", {}))
    return Suite(
        title=str(tree.get("title", path.stem)),
        methods=tuple(_method(path, label, entry) for label, entry in methods.items()),
        settings=_settings(path, tree.get("settings", {})),
        seeds=_seeds(path, tree.get("seeds", [0])),
        async_updates=_count(path, "async-updates", tree.get("async-updates")),
        sync_updates=_count(path, "sync-updates", tree.get("sync-updates")),
        rounds=_count(path, "rounds", tree.get("rounds")),
        sweep_scale=_share(path, "sweep-scale", tree.get("sweep-scale", 1.0)),
        validation_fraction=_share(
            path, "validation-fraction", tree.get("validation-fraction", VALIDATION)
        ),
        timing=_choice(path, "timing", Timing, tree.get("timing", Timing.TARGET)),
        score=_choice(path, "score", Score, tree.get("score", Score.FINAL)),
        shows_unrest=_flag(path, "shows-unrest", tree.get("shows-unrest", False)),
        shows_forgetting=_flag(path, "shows-forgetting", tree.get("shows-forgetting", False)),
        shows_traffic=_flag(path, "shows-traffic", tree.get("shows-traffic", False)),
        shows_clusters=_flag(path, "shows-clusters", tree.get("shows-clusters", False)),
        scores=_scores(path, tree.get("scores", [])),
        shows_mixtures=_flag(path, "shows-mixtures", tree.get("shows-mixtures", False)),
        shows_work=_flag(path, "shows-work", tree.get("shows-work", False)),
        reference=tree.get("reference"),
        notes=tuple(str(note) for note in tree.get("notes", [])),
    )


def all_shipped() -> dict[str, dict[str, Path]]:
    """Return the reproductions that come with the package: the file of each variant, by name."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(SHIPPED.glob("*.toml")):
        name, _, variant = path.stem.partition(".")
        # A file without a variant is one that others extend.
        if variant:
            found.setdefault(name, {})[variant] = path
    return found


def shipped(name: str) -> dict[str, Path]:
    """Return the suites of a reproduction, by variant.

    Raises
    ------
    UserError
        There is no such reproduction.
    """
    found = all_shipped()
    if name not in found:
        raise unknown_name("reproduction", name, found)
    return found[name]


def _tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file, and what it extends: its own keys win, tables are merged."""
    try:
        text = read_text(path, pipe=True)
    except ReadingError as error:
        raise UserError(f"Cannot read the suite {path}: {error}.") from None
    try:
        tree = parse_toml(text)
    except ReadingError as error:
        raise UserError(f"The suite {path} is not valid TOML: {error}.") from None
    for name in tree:
        if name not in _SUITE_KEYS:
            raise unknown_name(f"key of the suite {path}", name, _SUITE_KEYS)
    if "extends" not in tree:
        return tree
    base = path.parent / str(tree.pop("extends"))
    if base in seen:
        raise UserError(f"The suite {path} extends itself.")
    return _merged(_tree(base, (*seen, path)), tree)


def _merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in other.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _merged(inner, value) if both and inner is not None else value
    return merged


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} in the suite {path} must be a table, got {value!r}.")
    return value


def _settings(path: Path, table: Any) -> dict[str, Value]:
    """Flatten the settings: a table holds the hyper-parameters of a strategy."""
    flat: dict[str, Value] = {}
    for name, value in _table(path, "settings", table).items():
        inner = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    return flat


def _method(path: Path, label: str, table: Any) -> Method:
    where = f"methods.{label}"
    entry = _table(path, where, table)
    _check_keys(path, where, entry, _METHOD_KEYS)
    strategy = str(entry.get("strategy", label))
    from raceme.config.registry import STRATEGIES

    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    return Method(
        label=label,
        strategy=strategy,
        options=_table(path, f"{where}.options", entry.get("options", {})),
        sweep=_sweep(path, f"{where}.sweep", entry.get("sweep", {})),
        published=_published(path, f"{where}.published", entry.get("published", [])),
        settings=_settings(path, entry.get("settings", {})),
    )


def _sweep(path: Path, where: str, value: Any) -> tuple[Mapping[str, Value], ...]:
    """Return the points of a sweep: those listed, or all combinations of a table's values."""
    if isinstance(value, list):
        points = tuple(_table(path, where, point) for point in value)
        if any(set(point) != set(points[0]) for point in points):
            raise UserError(f"The points of {where} in {path} must have the same keys.")
        return points
    table = _table(path, where, value)
    for name, values in table.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}.{name} in {path} must list values, got {values!r}.")
    return grid(table) if table else ()


def _published(path: Path, where: str, value: Any) -> tuple[Published, ...]:
    """Read the one row of a method, or a list of them with what tells one from another."""
    tables = value if isinstance(value, list) else [value]
    return tuple(_row(path, where, _table(path, where, table)) for table in tables)


def _row(path: Path, where: str, table: Mapping[str, Any]) -> Published:
    numbers: dict[str, float] = {}
    for name in map(str, _NUMBERS):
        value = table.get(name)
        if name == "time" and value == NEVER:
            numbers[name] = math.inf
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
        elif value is not None:
            raise UserError(f"{where}.{name} in {path} must be a number, got {value!r}.")
    remark = table.get(_REMARK, "")
    if not isinstance(remark, str):
        raise UserError(f"{where}.{_REMARK} in {path} must be text, got {remark!r}.")
    options = {name: v for name, v in table.items() if name not in (*_NUMBERS, _REMARK)}
    return Published(**numbers, options=options, remark=remark)


def _check_keys(path: Path, where: str, entry: Mapping[str, Any], valid: Sequence[str]) -> None:
    for name in entry:
        if name not in valid:
            raise unknown_name(f"key of {where} in the suite {path}", name, valid)


def _seeds(path: Path, value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(seed) is int for seed in value)
    if not whole:
        raise UserError(f"seeds in the suite {path} must be whole numbers, got {value!r}.")
    return tuple(value)


def _count(path: Path, name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"{name} in the suite {path} must be a whole number from 1: {value!r}.")
    return value


def _share(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} in the suite {path} must be a number, got {value!r}.")
    return float(value)


def _scores(path: Path, value: Any) -> tuple[Scored, ...]:
    if not isinstance(value, list):
        raise UserError(f"scores in the suite {path} must be a list, got {value!r}.")
    return tuple(_choice(path, "scores", Scored, entry) for entry in value)


def _flag(path: Path, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} in the suite {path} must be true or false, got {value!r}.")
    return value


def _choice(path: Path, name: str, kind: type[_Choice], value: Any) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise unknown_name(f"{name} of the suite {path}", str(value), list(kind)) from None
