"""Suites: methods, seeds and shared settings of a comparison; suite files.

A suite is a TOML file or made from names on the command line. All methods share settings and seeds,
and thus partition, devices and initial model; a method adds only its own hyper-parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any

from raceme.core.config import (
    TRUST,
    RunConfig,
    check_key,
    check_keys_trusted,
    general_keys,
    parse_assignment,
    read_tree,
)
from raceme.core.errors import UserError, check_known, unknown_name
from raceme.core.events import Measure
from raceme.core.options import Value, convert, declared, key_of, written
from raceme.core.registry import STRATEGIES

NEVER = "/"
"""Notation of a missed target in a suite."""

VALIDATION = 0.2
"""Default share of training samples for testing the trials of a sweep."""

_OWN_KEYS = {
    "strategy": "name strategies under [methods], or as in `raceme compare casa fedbuff`",
    "seed": "give seeds = [0, 1, 2], or --seeds 0,1,2",
    "out": "give --out",
    "max-rounds": "a suite has rounds beside them, for the methods that work in rounds",
    "validation-fraction": "a suite has it beside them, for the trials of its sweeps",
}


_SCORE_KEYS = {
    "final": "{}",
    "best-weighted": "best_weighted_{}",
    "step-starts": "{}_at_step_starts",
    "step-ends": "{}_at_step_ends",
    "honest": "honest_{}",
}


class Timing(StrEnum):
    """The compared time of a run."""

    TARGET = "target"
    """The first evaluation at or above the target accuracy."""
    CONVERGENCE = "convergence"
    """The time from which the accuracy stays within a point of its final value."""


class Score(StrEnum):
    """The compared accuracy of a run."""

    FINAL = "final"
    """The mean over the clients at the end."""
    BEST_WEIGHTED = "best-weighted"
    """The best evaluation after all clients have clusters, weighted by test examples."""
    STEP_STARTS = "step-starts"
    """Under drift, the mean over the steps of the first evaluation of each."""
    STEP_ENDS = "step-ends"
    """Under drift, the mean over the steps of the last evaluation of each."""
    HONEST = "honest"
    """The final mean over the honest clients."""

    def key(self, measure: Measure) -> str:
        """Return its key in a summary."""
        return _SCORE_KEYS[self.value].format(measure.name)


class Scored(StrEnum):
    """Further scores of a run besides clients' tests of their models."""

    BEFORE = "before"
    """Uploads, on the data of their training."""
    AFTER = "after"
    """Models returned to clients, on the same data."""
    CLUSTER = "cluster"
    """Cluster models, on the server's test set of each distribution."""

    @property
    def key(self) -> str:
        """Its key in a summary."""
        return "cluster_accuracy" if self is Scored.CLUSTER else f"accuracy_{self}"


@dataclass(frozen=True)
class Published:
    """A paper's result of a method: one row of its table.

    Attributes
    ----------
    accuracy : float or None
        In percent; None if not reported.
    time : float or None
        In the paper's own unit; infinite for never.
    options : Mapping[str, Value]
        Hyper-parameters that distinguish this row from the method's others, e.g. IFCA's ``k``.
        Empty for a method's only row.
    traffic : float or None
        Bytes sent, as a multiple of the suite's reference.
    before, after, cluster : float or None
        Accuracies in percent as defined by :class:`Scored`; None if not reported.
    clusters : float or None
        Final number of clusters.
    remark : str
        Remark on these numbers, e.g. that they are of other data; they are marked in tables, with
        the remark below.
    """

    accuracy: float | None = None
    time: float | None = None
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    traffic: float | None = None
    before: float | None = None
    after: float | None = None
    cluster: float | None = None
    clusters: float | None = None
    remark: str = ""

    def is_of(self, options: Mapping[str, Value]) -> bool:
        """Return whether this row is comparable with a run of these hyper-parameters."""
        return all(options.get(name) == value for name, value in self.options.items())


@dataclass(frozen=True)
class ComparedMethod:
    """A method in a comparison.

    Attributes
    ----------
    label : str
        Its name in tables and plots.
    strategy : str
        Registered name of the strategy.
    options : Mapping[str, Value]
        Hyper-parameters that differ from the suite's settings, by name.
    sweep : tuple[Mapping[str, Value], ...]
        Points with further hyper-parameters: all run on the first seed, the most accurate one on
        all seeds. A single point needs no trial.
    published : tuple[Published, ...]
        The paper's results, one row per point.
    settings : Mapping[str, Value]
        Keys of ``raceme run`` for its runs only, e.g. an attack.
    run_keys : frozenset[str]
        Names in the sweep that are such keys, and not hyper-parameters.
    """

    label: str
    strategy: str
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    sweep: tuple[Mapping[str, Value], ...] = field(default=(), hash=False)
    published: tuple[Published, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict, hash=False)
    run_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        points = [{**self.options, **point} for point in self.sweep or ({},)]
        for row in self.published:
            # A run is shown beside exactly one point's numbers.
            if not any(row.is_of(point) for point in points):
                raise UserError(
                    f"Numbers of {self.label} are published for {described(row.options)}, which is "
                    "not run: add it to the sweep."
                )
        for point in points:
            if sum(row.is_of(point) for row in self.published) > 1:
                raise UserError(
                    f"{self.label} has two published rows for {described(point) or 'all points'}."
                )

    def variants(self) -> tuple[ComparedMethod, ...]:
        """Return one method per point of the sweep; without a sweep the method itself."""
        if not self.sweep:
            return (self,)
        return tuple(self._at(point) for point in self.sweep)

    def _at(self, point: Mapping[str, Value]) -> ComparedMethod:
        others = {name: value for name, value in point.items() if name in self.run_keys}
        own = {name: value for name, value in point.items() if name not in others}
        options, settings = {**self.options, **own}, {**self.settings, **others}
        rows = tuple(row for row in self.published if row.is_of(options))
        label = f"{self.label} {described(point)}"
        return replace(
            self, label=label, options=options, settings=settings, sweep=(), published=rows
        )

    def with_fixed(self, settings: Mapping[str, Value]) -> ComparedMethod:
        """Return the method without trials of the keys that have a value in the settings."""
        prefix = STRATEGIES.prefix(self.strategy)
        fixed = {
            key: check_key(name, settings[name], [(STRATEGIES, self.strategy)])[1]
            for point in self.sweep
            for key in point
            if (name := key if key in self.run_keys else f"{prefix}{key}") in settings
        }
        if not fixed:
            return self
        points = [{**point, **fixed} for point in self.sweep]
        left = tuple(point for i, point in enumerate(points) if point not in points[:i])
        return self.with_points(left, self.run_keys)

    def with_points(
        self, points: tuple[Mapping[str, Value], ...], run_keys: frozenset[str]
    ) -> ComparedMethod:
        """Return the method with another sweep, and the published rows that its points have."""
        whole = [{**self.options, **point} for point in points]
        rows = tuple(row for row in self.published if any(map(row.is_of, whole)))
        return replace(self, sweep=points, published=rows, run_keys=run_keys)

    @property
    def is_swept(self) -> bool:
        """Whether there is more than one point."""
        return len(self.sweep) > 1

    @property
    def row(self) -> Published | None:
        """The published row to compare with; None without one, and for sweeps."""
        return None if self.is_swept or not self.published else self.published[0]

    @cached_property
    def asynchronous(self) -> bool:
        """Whether it processes every update at once, without rounds."""
        return not getattr(STRATEGIES.options_type(self.strategy), "in_rounds", False)

    @cached_property
    def has_rounds(self) -> bool:
        """Whether it has countable rounds or windows."""
        return STRATEGIES.make(self.strategy).scheduling.rounds is not None


@dataclass(frozen=True)
class Suite:
    """A comparison.

    Attributes
    ----------
    title : str
        The title of tables and plots.
    methods : tuple[ComparedMethod, ...]
        Methods in the order of the tables.
    settings : Mapping[str, Value]
        Keys of ``raceme run`` for all methods, including hyper-parameters by strategy.
    seeds : tuple[int, ...]
        Every method runs once per seed.
    async_updates, sync_updates : int or None
        Client updates of an asynchronous and of a round-based method; None: ``max-updates``.
    rounds : int or None
        Rounds or windows of methods that have them, whatever their number of updates; other methods
        are limited by updates.
    sweep_scale : float
        Scale of the length of a sweep's trials.
    validation_fraction : float
        Share of each client's training samples for testing the trials, so that no point is chosen
        on reported test samples.
    timing : Timing
        The compared time.
    score : Score
        The accuracy that is shown, ranked, and compared with the published one.
    shows_unrest : bool
        Whether the table has the largest drop of the accuracy.
    shows_traffic : bool
        Whether the table has the bytes up and down, relative to the reference.
    scores : tuple[Scored, ...]
        Scores with a column each, beside published numbers, instead of accuracy and times.
    shows_clusters : bool
        Whether the table has the final number of clusters.
    shows_mixtures : bool
        Whether the table has the divergence of estimated from true mixtures.
    shows_work : bool
        Whether the table has bytes down and client work per update, relative to the reference.
    reference : str or None
        Label of the method whose speed-up is shown.
    notes : tuple[str, ...]
        Remarks on the published numbers.
    scale : float
        Scale by which the suite was shortened.
    """

    title: str
    methods: tuple[ComparedMethod, ...]
    settings: Mapping[str, Value] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    async_updates: int | None = field(default=None, metadata={"low": 1})
    sync_updates: int | None = field(default=None, metadata={"low": 1})
    rounds: int | None = field(default=None, metadata={"low": 1})
    sweep_scale: float = 1.0
    validation_fraction: float = VALIDATION
    timing: Timing = Timing.TARGET
    score: Score = Score.FINAL
    shows_unrest: bool = False
    shows_traffic: bool = False
    shows_clusters: bool = False
    scores: tuple[Scored, ...] = ()
    shows_mixtures: bool = False
    shows_work: bool = False
    reference: str | None = None
    notes: tuple[str, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.methods:
            raise UserError("No method to compare: name methods, or use --all.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds must be different numbers from 0, got {list(self.seeds)}.")
        if not 0 < self.sweep_scale <= 1:
            raise UserError(f"sweep-scale must be above 0 and at most 1, got {self.sweep_scale:g}.")
        share = self.validation_fraction
        if not 0 < share < 1:
            raise UserError(f"validation-fraction must be above 0 and below 1, got {share:g}.")
        if self.rounds is not None and self.sync_updates is not None:
            raise UserError("rounds and sync-updates exclude each other: give one of them.")
        labels = [method.label for method in self.methods]
        every = [variant.label for method in self.methods for variant in method.variants()]
        for names in (labels, [slug(label) for label in every]):
            double = {name for name in names if names.count(name) > 1}
            if double:
                raise UserError(f"'{min(double)}' is in the comparison more than once.")
        if self.reference is not None:
            check_known("reference", self.reference, labels)
        if (self.shows_traffic or self.shows_work) and self.reference is None:
            raise UserError("shows-traffic and shows-work compare with a reference: name one.")
        if len(set(self.scores)) < len(self.scores):
            raise UserError(f"scores must be different ones, got {list(map(str, self.scores))}.")

    def config(self, method: ComparedMethod, seed: int, trial: bool = False) -> RunConfig:
        """Return the configuration of one run.

        The target is recorded without ending the run. The run trains in its own process, since
        parallel runs use all cores. A trial is shorter and tested on held-out training samples.

        Raises
        ------
        UserError
            A key is unknown, or a value out of range.
        """
        keys = {**self._settings_for(method), **method.settings}
        for name, hint in _OWN_KEYS.items():
            if name in keys:
                raise UserError(f"The key '{name}' does not belong in settings: {hint}.")
        if keys.get("stop-at-target", "auto") not in ("auto", "false", False):
            raise UserError("A comparison records the target itself: leave stop-at-target out.")
        prefix = STRATEGIES.prefix(method.strategy)
        keys |= {f"{prefix}{name}": value for name, value in method.options.items()}
        updates = self.async_updates if method.asynchronous else self.sync_updates
        if self.rounds is not None and method.has_rounds:
            keys |= {"max-rounds": self.rounds, "max-updates": "auto"}
        elif updates is not None:
            keys["max-updates"] = updates
        keys |= {"strategy": method.strategy, "seed": seed, "stop-at-target": False, "workers": 0}
        if self.shows_work or {Scored.BEFORE, Scored.AFTER} & set(self.scores):
            keys.setdefault("score-uploads", True)
        if trial:
            keys["validation-fraction"] = self.validation_fraction
        scale = self.scale * (self.sweep_scale if trial else 1.0)
        return _shortened(RunConfig.from_mapping(keys), scale)

    def _settings_for(self, method: ComparedMethod) -> dict[str, Value]:
        """Return the checked settings without hyper-parameters of other methods."""
        own: dict[str, Value] = {}
        read = [(STRATEGIES, other.strategy) for other in self.methods]
        for name, value in self.settings.items():
            if "." in name and not name.startswith(STRATEGIES.prefix(method.strategy)):
                check_key(name, value, read)
            else:
                own[name] = value
        return own

    def scaled(self, scale: float) -> Suite:
        """Return the suite with its updates and times shortened in proportion.

        Raises
        ------
        UserError
            The scale is out of range.
        """
        if not isinstance(scale, Real) or not 0 < scale <= 1:
            raise UserError(f"--scale must be above 0 and at most 1, got {scale!r}.")
        return replace(self, scale=self.scale * scale)

    def with_settings(self, settings: Mapping[str, Value]) -> Suite:
        """Return the suite with some settings replaced.

        ``max-updates`` then applies to all methods, ``max-rounds`` to all with rounds. A key that
        methods would be tried with several values of has the given one.

        Raises
        ------
        UserError
            A hyper-parameter belongs to a strategy that is not compared.
        """
        compared = {STRATEGIES.short(method.strategy) for method in self.methods}
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
        shared = {name: value for name, value in settings.items() if name != "max-rounds"}
        methods = tuple(method.with_fixed(settings) for method in self.methods)
        suite = replace(self, settings={**self.settings, **shared}, methods=methods)
        if "max-updates" in settings:
            suite = replace(suite, async_updates=None, sync_updates=None, rounds=None)
        if "max-rounds" in settings:
            suite = suite._with_rounds(settings["max-rounds"])
        own, chosen = self.settings.get("dataset"), suite.settings.get("dataset")
        if chosen != own and any(method.published for method in self.methods):
            note = f"The published numbers are of {own}, and these runs of {chosen}."
            suite = replace(suite, notes=(*suite.notes, note))
        return suite

    def _with_rounds(self, value: Value) -> Suite:
        """Return the suite with a number of rounds for methods with rounds."""
        rounds = check_key("max-rounds", value)[1]
        if not rounds:
            return replace(self, rounds=None)
        if not any(method.has_rounds for method in self.methods):
            raise UserError(
                "max-rounds counts rounds or windows, and no method of this comparison has any: "
                "give max-updates or max-time."
            )
        return replace(self, rounds=rounds, sync_updates=None)

    def with_sweep(self, values: Mapping[str, Sequence[Value]]) -> Suite:
        """Return the suite with all combinations of some keys' values tried for each method.

        A hyper-parameter is tried for the methods that have it.
        """
        hyper = {method.strategy: _hyper_parameters(method.strategy) for method in self.methods}
        of_others = set().union(*hyper.values())
        methods = []
        for method in self.methods:
            prefix, own = STRATEGIES.prefix(method.strategy), hyper[method.strategy]
            tried = {
                name.removeprefix(prefix): listed
                for name, listed in values.items()
                if prefix + name in own or name in own or not _is_in(name, of_others)
            }
            run_keys = frozenset(name for name in tried if prefix + name not in own)
            methods.append(method.with_points(grid(tried), run_keys) if tried else method)
        return replace(self, methods=tuple(methods))

    def with_budget(self, text: str) -> Suite:
        """Return the suite with one limit, the same for all methods: ``time=20s``.

        Raises
        ------
        UserError
            There is no such limit, or it is no number above 0.
        """
        kind, _, amount = text.partition("=")
        check_known("budget", kind.strip(), _BUDGETS)
        key = _BUDGETS[kind.strip()]
        limit = None
        with suppress(UserError):
            limit = check_key(key, amount.strip().removesuffix("" if kind == "updates" else "s"))[1]
        if not limit:
            raise UserError(
                f"A budget is a number above 0, e.g. time=20s or updates=500; got '{text}'."
            )
        none: dict[str, Value] = {"max-updates": 0, "max-time": 0.0, "max-rounds": 0}
        return self.with_settings({**none, key: limit})

    def only(self, labels: Sequence[str]) -> Suite:
        """Return the suite with some of its methods.

        Raises
        ------
        UserError
            The suite has no such method.
        """
        known = {method.label: method for method in self.methods}
        for label in labels:
            check_known("method of the suite", label, known)
        reference = self.reference if self.reference in labels else None
        return replace(
            self,
            methods=tuple(known[label] for label in labels),
            reference=reference,
            shows_traffic=self.shows_traffic and reference is not None,
            shows_work=self.shows_work and reference is not None,
        )

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return str(self.settings.get("dataset", RunConfig.dataset))


_BUDGETS = {"time": "max-time", "updates": "max-updates", "compute": "max-compute"}
"""Keys of limits by the name of the budget."""


def _hyper_parameters(strategy: str) -> set[str]:
    """Return the keys of a method's hyper-parameters: ``casa.gamma``."""
    options_type = STRATEGIES.options_type(strategy)
    return set() if options_type is None else {*declared(options_type, STRATEGIES.prefix(strategy))}


def _is_in(name: str, keys: Iterable[str]) -> bool:
    """Return whether a name, with or without a method's, is one of some keys."""
    return any(key == name or key.partition(".")[2] == name for key in keys)


def read_sweep(texts: Iterable[str]) -> dict[str, list[Value]]:
    """Return the values of keys from texts: ``lr=0.01,0.03``.

    Raises
    ------
    UserError
        A text has no key or no value.
    """
    found: dict[str, list[Value]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        if not (equals and name.strip() and all(map(str.strip, listed.split(",")))):
            raise UserError(f"--sweep takes KEY=VALUE,VALUE, e.g. lr=0.01,0.1; got '{text}'.")
        values = [parse_assignment(f"{name}={value}")[1] for value in listed.split(",")]
        found[name.strip().replace("_", "-")] = values
    return found


def of_names(strategies: Sequence[str], settings: Mapping[str, Value] | None = None) -> Suite:
    """Make a suite of strategies with their default hyper-parameters.

    Raises
    ------
    UserError
        There is no such strategy.
    """
    for name in strategies:
        STRATEGIES.check(name)
    short = [STRATEGIES.short(name) for name in strategies]
    # Modules distinguish classes of the same name.
    labels = short if len(set(short)) == len(set(strategies)) else strategies
    methods = zip(labels, strategies, strict=True)
    suite = Suite("Comparison", tuple(ComparedMethod(label, name) for label, name in methods))
    suite = suite.with_settings(settings or {})
    return replace(suite, title=f"Comparison on {suite.dataset}")


def grid(values: Mapping[str, Sequence[Value]]) -> tuple[Mapping[str, Value], ...]:
    """Return every combination of some hyper-parameters' values as points of a sweep."""
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


def described(options: Mapping[str, Value]) -> str:
    """Return a readable description of hyper-parameters."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def slug(label: str) -> str:
    """Return a label as the name of a folder."""
    return re.sub(r"[^a-z0-9.+=_-]+", "-", label.lower()).strip("-.") or "method"


def _shortened(config: RunConfig, scale: float) -> RunConfig:
    if scale == 1.0:
        return config
    # At least one round of every client, for an evaluation.
    from raceme.runs.experiment import resolve

    resolved = resolve(config)
    updates = resolved.max_updates
    if updates is not None:
        updates = max(min(resolved.num_clients, updates), round(updates * scale))
    rounds = resolved.max_rounds
    return config.with_values(
        max_updates=updates,
        max_rounds=max(1, round(rounds * scale)) if rounds else 0,
        max_time=config.max_time * scale,
    )


# Suites as TOML files

SHIPPED = Path(__file__).parent / "suites"
"""Folder of the package's suites."""

_MATRIX_KEYS = ("axes", "variants", "published", "unpublished")
_PUBLISHED_KEYS = ("numbers", "columns", "rows", "remark")
_UNREPORTED = "-"
_METHOD_KEYS = ("strategy", "options", "sweep", "published", "settings")
_NUMBERS = ("accuracy", "time", "traffic", "clusters", *Scored)
_REMARK = "remark"


def load_suite(
    name: Path | str, typed: Mapping[str, Value] | None = None, labels: Sequence[str] = ()
) -> Suite:
    """Read a suite: a TOML file, a suite of the package, or a variant of either.

    Parameters
    ----------
    name : Path or str
        A file or the name of a suite of the package, optionally with a variant after a dot:
        ``"casa-table1.mnist"``.
    typed : Mapping[str, Value], optional
        Keys of the user that will replace those of the suite; `trust` among them may name it.
    labels : Sequence[str]
        Methods that the user names; one that is called as its code, ``module:Class``, is trusted.

    Raises
    ------
    UserError
        The file is missing, is not TOML or has an unknown key; it has several variants and none is
        named; its published tables lack a row or column; or it names code that is not trusted.
    """
    path, variant = _located(str(name), Path())
    tree = _tree(path, variant, ())
    if "variants" in tree:
        listed = ", ".join(tree["variants"])
        raise UserError(f"The suite {name} has variants: name one of them, as {name}.x ({listed}).")
    methods = _table(path, "methods", tree.get("methods", {}))
    suite = Suite(
        title=str(tree.get("title", path.stem)),
        methods=tuple(_method(path, label, entry) for label, entry in methods.items()),
        settings=_settings(path, tree.get("settings", {})),
        **read_values(path, tree),
    )
    given = typed or {}
    check_keys_trusted(path, suite.settings, given)
    for method in suite.methods:
        # A method's own settings precede those of the user, who can name the method alone.
        named = {} if method.strategy in labels else {"strategy": method.strategy}
        trust = {TRUST: given.get(TRUST, "")}
        check_keys_trusted(path, {**method.settings, **named}, trust, again=False)
    return suite


def read_values(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a suite's own values in a tree, by attribute; see `written_values`."""
    found = {name: tree[name] for name in _FIELDS if tree.get(name) is not None}
    return {_FIELDS[name].name: _value(path, _FIELDS[name], value) for name, value in found.items()}


def written_values(suite: Suite) -> dict[str, Any]:
    """Return a suite's values by key, except title, methods and settings."""
    return {name: getattr(suite, item.name) for name, item in _FIELDS.items()}


def variants(name: Path | str) -> dict[str, str]:
    """Return the names of a suite's variants for :func:`load_suite`; a plain suite has none."""
    path, variant = _located(str(name), Path())
    found = {} if variant else _tree(path, "", ()).get("variants", {})
    return {variant: f"{name}.{variant}" for variant in sorted(found)}


def all_shipped() -> dict[str, dict[str, str]]:
    """Return the package's reproductions: their variants, by name."""
    found = {path.stem: variants(path.stem) for path in sorted(SHIPPED.glob("*.toml"))}
    # Files without variants are bases of others, or plain suites.
    return {name: cells for name, cells in found.items() if cells}


def words(given: str | Iterable[str] | None) -> list[str]:
    """Return the words of a list, or of a text with commas, without empty ones."""
    listed = given.split(",") if isinstance(given, str) else given or ()
    return [word for item in listed if (word := str(item).strip())]


def parts(name: str, variants: Mapping[str, str], only: str | Iterable[str]) -> dict[str, str]:
    """Return parts of a suite by name, without empty ones; by default all.

    Raises
    ------
    UserError
        There is no such part.
    """
    named = words(only)
    for part in named:
        check_known(f"part of {name}", part, variants)
    return {part: variants[part] for part in named or variants}


def reproductions(
    name: str,
    dataset: str | None = None,
    only: str | Iterable[str] = (),
    methods: str | Iterable[str] = (),
    settings: Mapping[str, Value] | None = None,
    scale: float = 1.0,
) -> dict[str, Suite]:
    """Return the suites of a paper's experiment, by the names that :func:`load_suite` takes.

    Parameters
    ----------
    name : str
        Name of the experiment: ``"casa-table1"``.
    dataset : str, optional
        The dataset or part; required for experiments with several.
    only, methods : str or Iterable[str]
        Its parts and methods to run; by default all.
    settings : Mapping[str, Value], optional
        Keys of a run that replace the paper's.
    scale : float
        Share of each run's updates.

    Raises
    ------
    UserError
        There is no such experiment, part, dataset, method or key.
    """
    only = words(only)
    found = parts(name, shipped(name), only)
    datasets = {part: load_suite(variant).dataset for part, variant in found.items()}
    if dataset is not None:
        of_dataset = [part for part, used in datasets.items() if used == dataset]
        chosen = [dataset] if dataset in found else of_dataset
        if not chosen:
            raise unknown_name(f"dataset of {name}", dataset, {*found, *datasets.values()})
        found = {part: found[part] for part in chosen}
    elif len(set(datasets.values())) > 1 and not only:
        raise UserError(
            f"{name} has several datasets: choose one with --dataset, or parts with --only "
            f"({', '.join(found)})."
        )
    suites = {variant: load_suite(variant) for variant in found.values()}
    labels = words(methods)
    return {
        variant: (suite.only(labels) if labels else suite)
        .with_settings(settings or {})
        .scaled(scale)
        for variant, suite in suites.items()
    }


def out_of(variant: str, out: Path | None, scale: float, count: int) -> Path:
    """Return the folder of one of several suites of a reproduction."""
    if out is not None:
        return out / variant if count > 1 else out
    return Path("runs") / (variant if scale == 1.0 else f"{variant}-scale-{scale:g}")


def shipped(name: str) -> dict[str, str]:
    """Return the variants of a reproduction.

    Raises
    ------
    UserError
        There is no such reproduction.
    """
    found = all_shipped()
    check_known("reproduction", name, found, "raceme reproduce")
    return found[name]


def _located(name: str, folder: Path) -> tuple[Path, str]:
    """Return the file and the variant of a name."""
    whole, dot, variant = name.rpartition(".")
    for path, part in ((folder / name, ""), (SHIPPED / f"{name}.toml", "")):
        if path.exists() and not path.is_dir():
            return path, part
    for path in (folder / whole, folder / f"{whole}.toml", SHIPPED / f"{whole}.toml"):
        if dot and whole and path.is_file():
            return path, variant
    return folder / name, ""


def _tree(path: Path, variant: str, seen: tuple[tuple[Path, str], ...]) -> dict[str, Any]:
    """Read a file and its bases, or one of its variants."""
    if (path, variant) in seen:
        raise UserError(f"The suite {path} extends itself.")
    seen = (*seen, (path, variant))
    tree = read_tree(path, "suite", pipe=True)
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
    """Merge a table with its bases: its own keys take precedence, tables are merged."""
    if "extends" not in tree:
        return tree
    base, variant = _located(str(tree["extends"]), path.parent)
    own = {name: value for name, value in tree.items() if name != "extends"}
    return _merged(_tree(base, variant, seen), own)


def _variant(
    path: Path, tree: Mapping[str, Any], variant: str, seen: tuple[tuple[Path, str], ...]
) -> dict[str, Any]:
    """Return one variant of a matrix as a plain suite.

    The suite's keys come first, then those of its axis values in order, then the variant's. Titles
    are joined; an axis' notes replace its name in the suite's notes, or follow at the end.
    """
    cells = _table(path, "variants", tree["variants"])
    axes = _table(path, "axes", tree.get("axes", {}))
    check_known(f"variant of the suite {path}", variant, cells)
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
    """Return each method's numbers in a variant's column of the published tables."""
    tables, cells = tree.get("published", []), tree["variants"]
    methods = _table(path, "methods", suite.get("methods", {}))
    if not isinstance(tables, list):
        raise UserError(f"published in the suite {path} must be a list of tables: [[published]].")
    found: dict[str, Any] = {}
    covered = set(_texts(path, "unpublished", tree.get("unpublished", [])))
    for name in covered:
        check_known(f"unpublished variant of the suite {path}", name, cells)
    for table in tables:
        _check_keys(path, "published", _table(path, "published", table), _PUBLISHED_KEYS)
        columns = _texts(path, "columns", table.get("columns", []))
        rows = _table(path, "published.rows", table.get("rows", {}))
        for name in _texts(path, "numbers", table.get("numbers", [])):
            check_known(f"published number of the suite {path}", name, _NUMBERS)
        covered |= set(columns)
        for label, row in rows.items():
            if not isinstance(row, list) or len(row) != len(columns):
                raise UserError(f"The row {label} in {path} needs a cell for each of {columns}.")
        for name in columns:
            check_known(f"published column of the suite {path}", name, cells)
        if variant not in columns:
            continue
        for label in (*rows, *methods):
            where = f"row '{label}', column '{variant}' of the published table in {path}"
            check_known(f"method: {where}", label, methods)
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
    """Return a cell as a method's published numbers; empty if the paper has none."""
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


def _method(path: Path, label: str, table: Any) -> ComparedMethod:
    where = f"methods.{label}"
    entry = _table(path, where, table)
    _check_keys(path, where, entry, _METHOD_KEYS)
    strategy = str(entry.get("strategy", label))
    STRATEGIES.check(strategy)
    sweep = _sweep(path, f"{where}.sweep", entry.get("sweep", {}))
    prefix, own = STRATEGIES.prefix(strategy), _hyper_parameters(strategy) if sweep else set()
    general = {name for name in (sweep or ({},))[0] if prefix + name not in own} & {*general_keys()}
    return ComparedMethod(
        label=label,
        strategy=strategy,
        options=_table(path, f"{where}.options", entry.get("options", {})),
        sweep=sweep,
        published=_published(path, f"{where}.published", entry.get("published", [])),
        settings=_settings(path, entry.get("settings", {})),
        run_keys=frozenset(general),
    )


def _sweep(path: Path, where: str, value: Any) -> tuple[Mapping[str, Value], ...]:
    """Return the points of a sweep: a list, or all combinations of a table's values."""
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
    """Read a method's published row, or a list of rows with their options."""
    tables = value if isinstance(value, list) else [value]
    return tuple(read_published(path, where, _table(path, where, table)) for table in tables)


def read_published(path: Path, where: str, table: Mapping[str, Any]) -> Published:
    """Read a published row from its table; see `written_published`."""
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


def written_published(row: Published) -> dict[str, Any]:
    """Return a published row as a table."""
    numbers = {str(name): getattr(row, name) for name in _NUMBERS}
    return {**numbers, "time": NEVER if row.time == math.inf else row.time, _REMARK: row.remark}


def _check_keys(path: Path, where: str, entry: Mapping[str, Any], valid: Sequence[str]) -> None:
    kind = f"key of {where} in the suite {path}" if where else f"key of the suite {path}"
    for name in entry:
        check_known(kind, name, valid)


_CHOICES: Mapping[str, type[StrEnum]] = {"Timing": Timing, "Score": Score, "Scored": Scored}


def _value(path: Path, item: Field[Any], value: Any) -> Any:
    """Convert a value of a suite to the type of its field."""
    where, kind = f"{key_of(item.name)} in the suite {path}", str(item.type)
    if not kind.startswith("tuple["):
        return _converted(where, kind, value, item.metadata)
    if not isinstance(value, list):
        raise UserError(f"{where} must be a list, got {value!r}.")
    # The type of its entries: tuple[int, ...].
    return tuple(_converted(where, kind[6:-6], entry, item.metadata) for entry in value)


def _converted(where: str, kind: str, value: Any, rules: Mapping[str, Any]) -> Any:
    if (choices := _CHOICES.get(kind)) is not None:
        if value not in [*choices]:
            raise unknown_name(where, str(value), [*choices])
        return choices(value)
    declared = field(metadata=rules)
    declared.type = kind
    return convert(where, value, declared)


_FIELDS = {
    key_of(item.name): item
    for item in fields(Suite)
    if item.name not in ("title", "methods", "settings", "scale")
}
"""A suite's values in a file, by key: the attributes of `Suite`."""

_SUITE_KEYS = ("title", "extends", *_FIELDS, "settings", "methods")
