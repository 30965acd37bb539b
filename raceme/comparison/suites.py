"""What a comparison runs: methods, seeds, and the settings that all of them share.

A suite is a TOML file, or made from names that a person typed. Every method gets the same settings
and the same seeds, from which partition, devices and initial model follow; a method adds only
hyper-parameters of its own strategy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import product

from raceme.config import RunConfig, Value, check_key
from raceme.config.errors import UserError, unknown_name
from raceme.config.options import written
from raceme.config.registry import STRATEGIES
from raceme.protocol.measure import Measure

NEVER = "/"
"""How a suite writes that a method did not reach the target."""

VALIDATION = 0.2
"""Share of the training samples that the trials of a sweep are tested on, unless a suite says."""

_OWN_KEYS = {
    "strategy": "name strategies under [methods]",
    "seed": "give seeds = [0, 1, 2]",
    "out": "give --out",
    "max-rounds": "a suite has rounds beside them, for the methods that work in rounds",
    "validation-fraction": "a suite has it beside them, for the trials of its sweeps",
}


_SCORE_KEYS = {
    "final": "{}",
    "best-weighted": "best_weighted_{}",
    "step-starts": "{}_at_step_starts",
    "step-ends": "{}_at_step_ends",
    "current": "current_{}",
    "honest": "honest_{}",
}


class Timing(StrEnum):
    """Which time of a run is compared."""

    TARGET = "target"
    """The first evaluation at or above the target accuracy."""
    CONVERGENCE = "convergence"
    """When the accuracy last comes within a point of its final value."""


class Score(StrEnum):
    """Which accuracy of a run is compared."""

    FINAL = "final"
    """The mean over the clients at the end."""
    BEST_WEIGHTED = "best-weighted"
    """The best evaluation of the run, clients weighted by their numbers of test examples."""
    STEP_STARTS = "step-starts"
    """Where data change, the mean over the steps of the first evaluation on the data of each."""
    STEP_ENDS = "step-ends"
    """The same of the last evaluation."""
    CURRENT = "current"
    """Of tests on all tasks the mean over the tasks right after each was trained on."""
    HONEST = "honest"
    """The mean at the end over the clients that do not attack."""

    def key(self, measure: Measure) -> str:
        """Return the key of a summary that has it."""
        return _SCORE_KEYS[self.value].format(measure.name)


class Scored(StrEnum):
    """What else is scored of a run than the clients' tests of the models that serve them."""

    BEFORE = "before"
    """What clients upload, on the data that it was trained on."""
    AFTER = "after"
    """What clients get in return, on the same data."""
    CLUSTER = "cluster"
    """The clusters' models, on the server's test set of each distribution."""

    @property
    def key(self) -> str:
        """The key of a summary that has it."""
        return "cluster_accuracy" if self is Scored.CLUSTER else f"accuracy_{self}"


@dataclass(frozen=True)
class Published:
    """What a paper reports of a method: one row of its table.

    Attributes
    ----------
    accuracy : float or None
        In percent; None where it is not reported.
    time : float or None
        In the paper's own unit; infinite for never.
    options : Mapping[str, Value]
        The hyper-parameters that tell this row from the method's others, e.g. IFCA's ``k``. Empty:
        the only row, which stands beside whatever is run of the method.
    traffic : float or None
        Bytes that were sent, as a multiple of those of the suite's reference.
    before, after, cluster : float or None
        In percent: see :class:`Scored`.
    clusters : float or None
        Number of clusters at the end.
    remark : str
        What a reader has to know of these numbers, if anything: that they cannot be right, or are
        of other data. They are marked in tables, and it stands below.
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
        """Return whether a run with these hyper-parameters is to be compared with this row."""
        return all(options.get(name) == value for name, value in self.options.items())


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
    sweep : tuple[Mapping[str, Value], ...]
        Points, each with further hyper-parameters: every one is tried on the first seed, and the
        most accurate one is run on all seeds. A single point needs no trial.
    published : tuple[Published, ...]
        What the paper reports, a row for each point that it has.
    settings : Mapping[str, Value]
        Further keys of ``raceme run`` that only its runs have, e.g. an attack.
    """

    label: str
    strategy: str
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    sweep: tuple[Mapping[str, Value], ...] = field(default=(), hash=False)
    published: tuple[Published, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        points = [{**self.options, **point} for point in self.sweep or ({},)]
        for row in self.published:
            # A run is never shown beside the numbers of another point, nor beside two.
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

    def variants(self) -> tuple[Method, ...]:
        """Return one method for each point of the sweep; without a sweep the method itself."""
        if not self.sweep:
            return (self,)
        return tuple(self._at(point) for point in self.sweep)

    def _at(self, point: Mapping[str, Value]) -> Method:
        options = {**self.options, **point}
        rows = tuple(row for row in self.published if row.is_of(options))
        label = f"{self.label} {described(point)}"
        return replace(self, label=label, options=options, sweep=(), published=rows)

    @property
    def is_swept(self) -> bool:
        """Whether there is anything to choose: more than one point."""
        return len(self.sweep) > 1

    @property
    def row(self) -> Published | None:
        """The published row to compare it with; None where the paper has none, and of sweeps."""
        return None if self.is_swept or not self.published else self.published[0]

    @cached_property
    def asynchronous(self) -> bool:
        """Whether it acts on every update at once, not on rounds of them."""
        return not getattr(STRATEGIES[self.strategy].parameters_type, "in_rounds", False)

    @cached_property
    def has_rounds(self) -> bool:
        """Whether it works in rounds or windows that can be counted."""
        return STRATEGIES[self.strategy]().dispatch.rounds is not None


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
    rounds : int or None
        Rounds or windows of the methods that have them, whatever number of updates these bring;
        the other methods have their updates.
    sweep_scale : float
        By how much the runs are shortened that try the points of a sweep.
    validation_fraction : float or None
        Share of each client's training samples on which these runs are tested, so that no point is
        chosen on the test samples that are reported. None: it is not known, in results of earlier
        versions, whose points were chosen on test samples.
    timing : Timing
        Which time of the runs is compared.
    score : Score
        Which accuracy of the runs is shown, ranked, and compared with the published one.
    shows_unrest : bool
        Whether the table tells how far the accuracy falls back on its way.
    shows_forgetting : bool
        Whether the table tells how much of former tasks was forgotten.
    shows_traffic : bool
        Whether the table tells the bytes up and down, as multiples of the reference's.
    scores : tuple[Scored, ...]
        What the table has a column of, with the published number beside it, in place of the one
        accuracy and the times.
    shows_clusters : bool
        Whether the table tells the number of clusters at the end.
    shows_mixtures : bool
        Whether the table tells how far estimated mixtures are from the true ones.
    shows_work : bool
        Whether the table tells bytes down and client work for each update, as multiples of the
        reference's.
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
    rounds: int | None = None
    sweep_scale: float = 1.0
    validation_fraction: float | None = VALIDATION
    timing: Timing = Timing.TARGET
    score: Score = Score.FINAL
    shows_unrest: bool = False
    shows_forgetting: bool = False
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
            raise UserError("There is nothing to compare: name methods, or give --all.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UserError(f"seeds must be different numbers from 0, got {list(self.seeds)}.")
        if not 0 < self.sweep_scale <= 1:
            raise UserError(f"sweep-scale must be above 0 and at most 1, got {self.sweep_scale:g}.")
        share = self.validation_fraction
        if share is not None and not 0 < share < 1:
            raise UserError(f"validation-fraction must be above 0 and below 1, got {share:g}.")
        if self.rounds is not None and self.sync_updates is not None:
            raise UserError("rounds and sync-updates exclude each other: give one of them.")
        labels = [method.label for method in self.methods]
        every = [variant.label for method in self.methods for variant in method.variants()]
        for names in (labels, [slug(label) for label in every]):
            double = {name for name in names if names.count(name) > 1}
            if double:
                raise UserError(f"'{min(double)}' is in the comparison more than once.")
        if self.reference is not None and self.reference not in labels:
            raise unknown_name("reference", self.reference, labels)
        if self.shows_traffic and self.reference is None:
            raise UserError("shows-traffic compares bytes with those of a reference: name one.")
        if self.shows_work and self.reference is None:
            raise UserError("shows-work compares methods with a reference: name one.")
        if len(set(self.scores)) < len(self.scores):
            raise UserError(f"scores must be different ones, got {list(map(str, self.scores))}.")

    def config(self, method: Method, seed: int, trial: bool = False) -> RunConfig:
        """Return the configuration of one run.

        The target is recorded and does not end the run; the run trains in its own process, as
        there are as many runs at a time as there are cores. A trial is shorter, and tested on
        held-out training samples.

        Raises
        ------
        UserError
            An unknown key, or a value out of its range.
        """
        keys = {**self._settings_for(method), **method.settings}
        for name, hint in _OWN_KEYS.items():
            if name in keys:
                raise UserError(f"The key '{name}' does not belong in settings: {hint}.")
        if keys.get("stop-at-target", "auto") not in ("auto", "false", False):
            raise UserError("In a comparison the target is recorded: leave stop-at-target out.")
        keys |= {f"{method.strategy}.{name}": value for name, value in method.options.items()}
        updates = self.async_updates if method.asynchronous else self.sync_updates
        if self.rounds is not None and method.has_rounds:
            keys |= {"max-rounds": self.rounds, "max-updates": "auto"}
        elif updates is not None:
            keys["max-updates"] = updates
        keys |= {"strategy": method.strategy, "seed": seed, "stop-at-target": False}
        if "workers" in _config_keys():
            keys["workers"] = 0
        if self.shows_work or {Scored.BEFORE, Scored.AFTER} & set(self.scores):
            keys.setdefault("score-uploads", True)
        if self.score is Score.CURRENT or (self.shows_forgetting and not trial):
            keys.setdefault("eval-tasks", True)
        if trial and self.validation_fraction is not None:
            keys["validation-fraction"] = self.validation_fraction
        scale = self.scale * (self.sweep_scale if trial else 1.0)
        return _shortened(RunConfig.from_mapping(keys), scale)

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
        """Return the suite with some settings replaced.

        ``max-updates`` is then for all methods, ``max-rounds`` for all that have rounds.

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
        shared = {name: value for name, value in settings.items() if name != "max-rounds"}
        suite = replace(self, settings={**self.settings, **shared})
        if "max-updates" in settings:
            suite = replace(suite, async_updates=None, sync_updates=None, rounds=None)
        if "max-rounds" in settings:
            suite = suite._with_rounds(settings["max-rounds"])
        return suite

    def _with_rounds(self, value: Value) -> Suite:
        """Return the suite with so many rounds for the methods that have rounds."""
        rounds = check_key("max-rounds", value)[1]
        if not rounds:
            return replace(self, rounds=None)
        if not any(method.has_rounds for method in self.methods):
            raise UserError(
                "max-rounds counts rounds or windows, and no method of this comparison works in "
                "them: give max-updates or max-time."
            )
        return replace(self, rounds=rounds, sync_updates=None)

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


def of_names(strategies: Sequence[str], settings: Mapping[str, Value] | None = None) -> Suite:
    """Make a suite of strategies with their default hyper-parameters.

    Raises
    ------
    UserError
        There is no such strategy.
    """
    for name in strategies:
        if name not in STRATEGIES:
            raise unknown_name("strategy", name, STRATEGIES)
    suite = Suite("Comparison", tuple(Method(name, name) for name in strategies))
    suite = suite.with_settings(settings or {})
    return replace(suite, title=f"Comparison on {suite.dataset}")


def grid(values: Mapping[str, Sequence[Value]]) -> tuple[Mapping[str, Value], ...]:
    """Return every combination of some hyper-parameters' values as points of a sweep."""
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


def described(options: Mapping[str, Value]) -> str:
    """Return hyper-parameters as a person reads them."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def slug(label: str) -> str:
    """Return a label as the name of a folder."""
    return re.sub(r"[^a-z0-9.+=_-]+", "-", label.lower()).strip("-.") or "method"


def _config_keys() -> set[str]:
    return {item.name.replace("_", "-") for item in fields(RunConfig)}


def _shortened(config: RunConfig, scale: float) -> RunConfig:
    if scale == 1.0:
        return config
    # At least one round of every client, or there would be nothing to evaluate.
    from raceme.experiment import resolve

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
