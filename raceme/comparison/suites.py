"""What a comparison runs: methods, seeds, and the settings that all of them share.

A suite is a TOML file, or made from names that a person typed. Every method gets the same settings
and the same seeds, from which partition, devices and initial model follow; a method adds only
hyper-parameters of its own strategy.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from raceme.config import RunConfig, Value, check_key
from raceme.errors import UserError, unknown_name
from raceme.options import written

SHIPPED = Path(__file__).parent / "suites"
"""The folder of the suites that come with the package."""

NEVER = "/"
"""How a suite writes that a method did not reach the target."""

_SUITE_KEYS = (
    "title",
    "extends",
    "seeds",
    "async-updates",
    "sync-updates",
    "sweep-scale",
    "reference",
    "notes",
    "settings",
    "methods",
)
_METHOD_KEYS = ("strategy", "options", "sweep", "published")
_PUBLISHED_KEYS = ("accuracy", "time")
_OWN_KEYS = {
    "strategy": "name strategies under [methods]",
    "seed": "give seeds = [0, 1, 2]",
    "out": "give --out",
}


@dataclass(frozen=True)
class Published:
    """What a paper reports of a method.

    Attributes
    ----------
    accuracy : float or None
        In percent; None where it is not reported.
    time : float or None
        Time to the target in the paper's own unit; infinite for never.
    """

    accuracy: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Method:
    """A strategy in a comparison.

    Attributes
    ----------
    label : str
        Its name in tables and plots.
    strategy : str
        Its registered name.
    options : Mapping[str, Value]
        Hyper-parameters that differ from the suite's settings, by name.
    sweep : Mapping[str, tuple[Value, ...]]
        Hyper-parameters of which every combination is tried on the first seed, in runs of the
        suite's ``sweep-scale``; the most accurate one is run on all seeds.
    published : Published or None
        What the paper reports; of a swept method, at the paper's best point.
    """

    label: str
    strategy: str
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    sweep: Mapping[str, tuple[Value, ...]] = field(default_factory=dict, hash=False)
    published: Published | None = None

    def variants(self) -> list[Method]:
        """Return the method itself, or one for each point of its sweep."""
        if not self.sweep:
            return [self]
        points = [
            dict(zip(self.sweep, values, strict=True)) for values in product(*self.sweep.values())
        ]
        return [
            replace(
                self,
                label=f"{self.label} {described(point)}",
                options={**self.options, **point},
                sweep={},
            )
            for point in points
        ]

    @cached_property
    def asynchronous(self) -> bool:
        """Whether it acts on every update at once, not on rounds of them."""
        from raceme.strategies import STRATEGIES, AsyncStrategy

        return issubclass(STRATEGIES[self.strategy], AsyncStrategy)


@dataclass(frozen=True)
class Suite:
    """A comparison.

    Attributes
    ----------
    title : str
        What it is about.
    methods : tuple[Method, ...]
        In the order of the tables.
    settings : Mapping[str, Value]
        Keys of ``raceme run`` that all methods share, hyper-parameters by strategy among them.
    seeds : tuple[int, ...]
        Every method runs once with each.
    async_updates, sync_updates : int or None
        Client updates of an asynchronous and of a round-based method; None: ``max-updates``.
    sweep_scale : float
        By how much the runs are shortened that try the points of a sweep.
    reference : str or None
        Label of the method whose speed-up over the others is shown.
    notes : tuple[str, ...]
        What a reader has to know of the published numbers.
    scale : float
        By how much the suite was shortened.
    """

    title: str
    methods: tuple[Method, ...]
    settings: Mapping[str, Value] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    async_updates: int | None = None
    sync_updates: int | None = None
    sweep_scale: float = 1.0
    reference: str | None = None
    notes: tuple[str, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.methods:
            raise UserError("There is nothing to compare: name methods, or give --all.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds must be different numbers from 0, got {list(self.seeds)}.")
        if not 0 < self.sweep_scale <= 1:
            raise UserError(f"sweep-scale must be above 0 and at most 1, got {self.sweep_scale:g}.")
        labels = [method.label for method in self.methods]
        every = [variant.label for method in self.methods for variant in method.variants()]
        for names in (labels, [slug(label) for label in every]):
            double = {name for name in names if names.count(name) > 1}
            if double:
                raise UserError(f"'{min(double)}' is in the comparison more than once.")
        if self.reference is not None and self.reference not in labels:
            raise unknown_name("reference", self.reference, labels)

    def config(self, method: Method, seed: int) -> RunConfig:
        """Return the configuration of one run.

        The target is recorded and does not end the run; the run trains in its own process, as
        there are as many runs at a time as there are cores.

        Raises
        ------
        UserError
            An unknown key, or a value out of its range.
        """
        keys = self._settings_for(method)
        for name, hint in _OWN_KEYS.items():
            if name in keys:
                raise UserError(f"The key '{name}' does not belong in settings: {hint}.")
        if keys.get("stop-at-target", "auto") not in ("auto", "false", False):
            raise UserError("In a comparison the target is recorded: leave stop-at-target out.")
        keys |= {f"{method.strategy}.{name}": value for name, value in method.options.items()}
        updates = self.async_updates if method.asynchronous else self.sync_updates
        if updates is not None:
            keys["max-updates"] = updates
        keys |= {"strategy": method.strategy, "seed": seed, "stop-at-target": False}
        if "workers" in _config_keys():
            keys["workers"] = 0
        return self._shortened(RunConfig.from_mapping(keys))

    def _settings_for(self, method: Method) -> dict[str, Value]:
        """Return the settings without the hyper-parameters of other methods, after a check."""
        own: dict[str, Value] = {}
        for name, value in self.settings.items():
            strategy, dot, _ = name.partition(".")
            if dot and strategy != method.strategy:
                check_key(name, value)
            else:
                own[name] = value
        return own

    def _shortened(self, config: RunConfig) -> RunConfig:
        if self.scale == 1.0:
            return config
        # At least one round of every client, or there would be nothing to evaluate.
        least = min(config.clients, config.max_updates)
        return config.with_values(
            max_updates=max(least, round(config.max_updates * self.scale)),
            max_time=config.max_time * self.scale,
        )

    def scaled(self, scale: float) -> Suite:
        """Return the suite with its updates and times shortened in proportion.

        Raises
        ------
        UserError
            The scale is not above 0 and at most 1.
        """
        if not 0 < scale <= 1:
            raise UserError(f"--scale must be above 0 and at most 1, got {scale:g}.")
        return replace(self, scale=self.scale * scale)

    def with_settings(self, settings: Mapping[str, Value]) -> Suite:
        """Return the suite with some settings replaced; ``max-updates`` is then for all methods.

        Raises
        ------
        UserError
            A hyper-parameter of a strategy that is not compared.
        """
        compared = {method.strategy for method in self.methods}
        for name, value in settings.items():
            strategy, dot, _ = name.partition(".")
            if not dot or strategy in compared:
                continue
            key, converted = check_key(name, value)
            if written(converted) != key.default:
                raise UserError(
                    f"{name} is read by strategy {strategy}; this comparison has "
                    f"{', '.join(sorted(compared))}."
                )
        suite = replace(self, settings={**self.settings, **settings})
        if "max-updates" in settings:
            suite = replace(suite, async_updates=None, sync_updates=None)
        return suite

    def only(self, labels: Sequence[str]) -> Suite:
        """Return the suite with some of its methods.

        Raises
        ------
        UserError
            The suite has no such method.
        """
        known = {method.label: method for method in self.methods}
        for label in labels:
            if label not in known:
                raise unknown_name("method", label, known)
        reference = self.reference if self.reference in labels else None
        return replace(self, methods=tuple(known[label] for label in labels), reference=reference)

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return str(self.settings.get("dataset", RunConfig.dataset))


def of_names(strategies: Sequence[str], settings: Mapping[str, Value] | None = None) -> Suite:
    """Make a suite of strategies with their default hyper-parameters.

    Raises
    ------
    UserError
        There is no such strategy.
    """
    from raceme.strategies import STRATEGIES

    for name in strategies:
        if name not in STRATEGIES:
            raise unknown_name("strategy", name, STRATEGIES)
    suite = Suite("Comparison", tuple(Method(name, name) for name in strategies))
    return replace(suite, title=f"Comparison on {suite.dataset}").with_settings(settings or {})


def load_suite(path: Path) -> Suite:
    """Read a suite from a TOML file.

    Raises
    ------
    UserError
        The file is missing or is not TOML, or has a key that does not exist.
    """
    tree = _tree(path, ())
    methods = _table(path, "methods", tree.get("methods", {}))
    return Suite(
        title=str(tree.get("title", path.stem)),
        methods=tuple(_method(path, label, entry) for label, entry in methods.items()),
        settings=_settings(path, tree.get("settings", {})),
        seeds=_seeds(path, tree.get("seeds", [0])),
        async_updates=_count(path, "async-updates", tree.get("async-updates")),
        sync_updates=_count(path, "sync-updates", tree.get("sync-updates")),
        sweep_scale=_share(path, "sweep-scale", tree.get("sweep-scale", 1.0)),
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


def described(options: Mapping[str, Value]) -> str:
    """Return hyper-parameters as a person reads them."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def slug(label: str) -> str:
    """Return a label as the name of a folder."""
    return re.sub(r"[^a-z0-9.+=_-]+", "-", label.lower()).strip("-.") or "method"


def _config_keys() -> set[str]:
    return {item.name.replace("_", "-") for item in fields(RunConfig)}


def _tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file, and what it extends: its own keys win, tables are merged."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the suite {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    sweep = _table(path, f"{where}.sweep", entry.get("sweep", {}))
    for name, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}.sweep.{name} in {path} must list values, got {values!r}.")
    strategy = str(entry.get("strategy", label))
    from raceme.strategies import STRATEGIES

    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    return Method(
        label=label,
        strategy=strategy,
        options=_table(path, f"{where}.options", entry.get("options", {})),
        sweep={name: tuple(values) for name, values in sweep.items()},
        published=_published(path, where, entry.get("published")),
    )


def _published(path: Path, where: str, table: Any) -> Published | None:
    if table is None:
        return None
    where = f"{where}.published"
    entry = _table(path, where, table)
    _check_keys(path, where, entry, _PUBLISHED_KEYS)
    numbers: dict[str, float] = {}
    for name, value in entry.items():
        if name == "time" and value == NEVER:
            numbers[name] = math.inf
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
        else:
            raise UserError(f"{where}.{name} in {path} must be a number, got {value!r}.")
    return Published(**numbers)


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
