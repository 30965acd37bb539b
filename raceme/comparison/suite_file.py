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
_MATRIX_KEYS = ("axes", "variants", "published", "unpublished")
_PUBLISHED_KEYS = ("numbers", "columns", "rows", "remark")
_UNREPORTED = "-"
_METHOD_KEYS = ("strategy", "options", "sweep", "published", "settings")
_NUMBERS = ("accuracy", "time", "traffic", "clusters", *Scored)
_REMARK = "remark"

_Choice = TypeVar("_Choice", bound=StrEnum)


def load_suite(name: Path | str) -> Suite:
    """Read a suite: a TOML file, one that comes with the package, or a variant of either.

    Parameters
    ----------
    name : Path or str
        A file, the name of a suite of the package, or one of these with a variant behind a dot:
        ``"casa-table1.mnist"``.

    Raises
    ------
    UserError
        The file is missing or is not TOML, or has a key that does not exist; or it has several
        variants and none is named, or its published tables lack a row or a column.
    """
    path, variant = _located(str(name), Path())
    tree = _tree(path, variant, ())
    if "variants" in tree:
        listed = ", ".join(tree["variants"])
        raise UserError(f"The suite {name} has variants: name one of them, as {name}.x ({listed}).")
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


def variants(name: Path | str) -> dict[str, str]:
    """Return what :func:`load_suite` takes for each variant of a suite; a plain suite has none."""
    path, variant = _located(str(name), Path())
    found = {} if variant else _tree(path, "", ()).get("variants", {})
    return {variant: f"{name}.{variant}" for variant in sorted(found)}


def all_shipped() -> dict[str, dict[str, str]]:
    """Return the reproductions that come with the package: their variants, by name."""
    found = {path.stem: variants(path.stem) for path in sorted(SHIPPED.glob("*.toml"))}
    # A file without variants is one that others extend, or a suite of its own.
    return {name: cells for name, cells in found.items() if cells}


def shipped(name: str) -> dict[str, str]:
    """Return the variants of a reproduction.

    Raises
    ------
    UserError
        There is no such reproduction.
    """
    found = all_shipped()
    if name not in found:
        raise unknown_name("reproduction", name, found)
    return found[name]


def _located(name: str, folder: Path) -> tuple[Path, str]:
    """Return the file that a name stands for, and the variant behind it."""
    whole, dot, variant = name.rpartition(".")
    for path, part in ((folder / name, ""), (SHIPPED / f"{name}.toml", "")):
        if path.exists() and not path.is_dir():
            return path, part
    for path in (folder / whole, folder / f"{whole}.toml", SHIPPED / f"{whole}.toml"):
        if dot and whole and path.is_file():
            return path, variant
    return folder / name, ""


def _tree(path: Path, variant: str, seen: tuple[tuple[Path, str], ...]) -> dict[str, Any]:
    """Read a file and what it extends, or one of its variants."""
    if (path, variant) in seen:
        raise UserError(f"The suite {path} extends itself.")
    seen = (*seen, (path, variant))
    try:
        text = read_text(path, pipe=True)
    except ReadingError as error:
        raise UserError(f"Cannot read the suite {path}: {error}.") from None
    try:
        tree = parse_toml(text)
    except ReadingError as error:
        raise UserError(f"The suite {path} is not valid TOML: {error}.") from None
    _check_keys(path, "", tree, (*_SUITE_KEYS, *_MATRIX_KEYS))
    tree = _extended(path, tree, seen)
    if "variants" in tree:
        return _variant(path, tree, variant, seen) if variant else tree
    if variant:
        raise unknown_name(f"variant of the suite {path}", variant, ())
    if "published" in tree:
        raise UserError(f"The suite {path} has a published table and no variants: its columns.")
    return tree


def _extended(
    path: Path, tree: dict[str, Any], seen: tuple[tuple[Path, str], ...]
) -> dict[str, Any]:
    """Merge a table with what it extends: its own keys win, tables are merged."""
    if "extends" not in tree:
        return tree
    base, variant = _located(str(tree["extends"]), path.parent)
    own = {name: value for name, value in tree.items() if name != "extends"}
    return _merged(_tree(base, variant, seen), own)


def _variant(
    path: Path, tree: Mapping[str, Any], variant: str, seen: tuple[tuple[Path, str], ...]
) -> dict[str, Any]:
    """Return one variant of a matrix as a plain suite.

    The suite's own keys come first, then those of its values on the axes, in the axes' order, then
    its own. Titles are joined; an axis' notes stand where the suite's name it, or at the end.
    """
    cells = _table(path, "variants", tree["variants"])
    axes = _table(path, "axes", tree.get("axes", {}))
    if variant not in cells:
        raise unknown_name(f"variant of the suite {path}", variant, cells)
    own = dict(_table(path, f"variants.{variant}", cells[variant]))
    suite = {name: value for name, value in tree.items() if name not in _MATRIX_KEYS}
    titles, notes = [suite.get("title", "")], _texts(path, "notes", suite.get("notes", []))
    for axis, values in axes.items():
        _table(path, f"axes.{axis}", values)
        value = own.pop(axis, None)
        if value is not None and (not isinstance(value, str) or value not in values):
            raise unknown_name(f"{axis} of {variant} in the suite {path}", str(value), values)
        part = {} if value is None else _table(path, f"axes.{axis}.{value}", values[value])
        _check_keys(path, f"axes.{axis}.{value}", part, _SUITE_KEYS)
        suite = _merged(suite, part)
        titles.append(part.get("title", ""))
        mark, said = f"{{{axis}}}", _texts(path, "notes", part.get("notes", []))
        at = notes.index(mark) if mark in notes else len(notes)
        notes[at : at + 1] = said
    _check_keys(path, f"variants.{variant}", own, (*_SUITE_KEYS, *axes))
    titles.append(own.get("title", ""))
    suite = _merged(suite, {"methods": _published_in(path, tree, suite, variant)})
    suite = _merged(suite | ({"notes": notes} if notes else {}), own)
    if any(titles):
        suite["title"] = ", ".join(filter(None, titles))
    return _extended(path, suite, seen)


def _published_in(
    path: Path, tree: Mapping[str, Any], suite: Mapping[str, Any], variant: str
) -> dict[str, Any]:
    """Return what the published tables have of each method in the column of a variant."""
    tables, cells = tree.get("published", []), tree["variants"]
    methods = _table(path, "methods", suite.get("methods", {}))
    if not isinstance(tables, list):
        raise UserError(f"published in the suite {path} must be a list of tables: [[published]].")
    found: dict[str, Any] = {}
    covered = set(_texts(path, "unpublished", tree.get("unpublished", [])))
    for name in covered - set(cells):
        raise unknown_name(f"unpublished variant of the suite {path}", name, cells)
    for table in tables:
        _check_keys(path, "published", _table(path, "published", table), _PUBLISHED_KEYS)
        columns = _texts(path, "columns", table.get("columns", []))
        rows = _table(path, "published.rows", table.get("rows", {}))
        for name in _texts(path, "numbers", table.get("numbers", [])):
            if name not in _NUMBERS:
                raise unknown_name(f"published number of the suite {path}", name, _NUMBERS)
        covered |= set(columns)
        for label, row in rows.items():
            if not isinstance(row, list) or len(row) != len(columns):
                raise UserError(f"The row {label} in {path} needs a cell for each of {columns}.")
        for name in columns:
            if name not in cells:
                raise unknown_name(f"published column of the suite {path}", name, cells)
        if variant not in columns:
            continue
        for label in (*rows, *methods):
            where = f"row '{label}', column '{variant}' of the published table in {path}"
            if label not in methods:
                raise unknown_name(f"method: {where}", label, methods)
            if label not in rows:
                raise UserError(f"There is no {where}.")
            cell = _cell(where, table, rows[label][columns.index(variant)])
            if cell:
                found[label] = {"published": cell}
    if tables and variant not in covered:
        raise UserError(
            f"There is no column '{variant}' of the published tables in {path}: add one, or name "
            "it in unpublished."
        )
    return found


def _texts(path: Path, where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UserError(f"{where} in the suite {path} must be a list of texts, got {value!r}.")
    return list(value)


def _cell(where: str, table: Mapping[str, Any], cell: Any) -> Any:
    """Return a cell as a method's own published numbers; nothing where the paper has none."""
    if isinstance(cell, list) and cell and all(isinstance(row, dict) for row in cell):
        return cell
    if not isinstance(cell, dict):
        numbers = cell if isinstance(cell, list) else [cell]
        names = table.get("numbers", [])
        if len(numbers) != len(names):
            raise UserError(f"The {where} must be the numbers {names}, got {cell!r}.")
        pairs = zip(names, numbers, strict=True)
        cell = {name: number for name, number in pairs if number != _UNREPORTED}
    return {_REMARK: table[_REMARK], **cell} if cell and _REMARK in table else cell


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
            kind = f"key of {where} in the suite {path}" if where else f"key of the suite {path}"
            raise unknown_name(kind, name, valid)


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
