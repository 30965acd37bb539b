"""Results of a comparison: over seeds, relative to the best, and beside published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from raceme.core.errors import UserError
from raceme.core.events import ACCURACY, Measure
from raceme.core.files import ReadingError, parse_json, read_text
from raceme.experiments.jobs import Job
from raceme.experiments.suites import (
    ComparedMethod,
    Published,
    Score,
    Scored,
    Suite,
    Timing,
    read_published,
    read_values,
)
from raceme.records.folder import COMPARISON
from raceme.records.record import RunRecord, read_run
from raceme.records.summary import unlearned
from raceme.reporting.console import PlainTable


@dataclass(frozen=True)
class Spread:
    """A number over the seeds.

    Attributes
    ----------
    mean, std : float or None
        Mean and sample standard deviation (0 for a single run) of the runs that have it, else None.
    count : int
        Number of runs that have it.
    of : int
        Number of runs that are finished.
    """

    mean: float | None
    std: float | None
    count: int
    of: int

    @classmethod
    def over(cls, values: Sequence[float | None]) -> Spread:
        """Summarise the values of the runs; None stands for a missing value."""
        present = [value for value in values if value is not None]
        if not present:
            return cls(None, None, 0, len(values))
        deviation = float(np.std(present, ddof=1)) if len(present) > 1 else 0.0
        return cls(float(np.mean(present)), deviation, len(present), len(values))


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    seed : int
        The seed of the run.
    folder : str
        The run's folder, below that of the comparison.
    summary : Mapping[str, Any]
        The content of its ``summary.json``.
    timing : Timing
        Its compared time.
    score : Score
        Its compared accuracy.
    """

    seed: int
    folder: str
    summary: Mapping[str, Any]
    timing: Timing = Timing.TARGET
    score: Score = Score.FINAL

    @property
    def accuracy(self) -> float | None:
        """The compared accuracy, or the error of a regression; None if missing."""
        found = self.summary.get(self.score.key(self.measure))
        if found is None and self.score is Score.HONEST:
            # Without attackers all clients are honest.
            found = self.summary.get(Score.FINAL.key(self.measure))
        return None if found is None else float(found)

    @property
    def measure(self) -> Measure:
        """The measure of :attr:`accuracy`."""
        return Measure.of(self.summary)

    @property
    def time(self) -> float | None:
        """Virtual time to the target or to convergence; None if not reached."""
        key = f"time_to_{self.timing}"
        if self.score is Score.HONEST:
            # Without attackers all clients are honest.
            key = f"honest_{key}" if f"honest_{key}" in self.summary else key
        reached = self.summary.get(key)
        return None if reached is None else float(reached["virtual_time"])

    @property
    def traffic(self) -> float | None:
        """Bytes sent and received by clients, without evaluations."""
        up, down = self.summary.get("bytes_up"), self.summary.get("bytes_down")
        return None if up is None or down is None else float(up) + float(down)

    def per_update(self, key: str) -> float | None:
        """Return a total of the run per update, e.g. of ``"bytes_down"``."""
        total, updates = self.summary.get(key), self.summary["updates"]
        return total / updates if total is not None and updates else None


@dataclass(frozen=True)
class Result:
    """A method's runs.

    Attributes
    ----------
    method : ComparedMethod
        The method with its hyper-parameters, for a swept method the chosen ones.
    label : str
        The method's label in the suite.
    runs : tuple[Run, ...]
        Finished runs, by seed.
    errors : Mapping[int, str]
        Reasons of failed runs, by seed.
    """

    method: ComparedMethod
    label: str
    runs: tuple[Run, ...]
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def accuracy(self) -> Spread:
        """The compared accuracy of the runs: by default the clients' final mean."""
        return Spread.over([run.accuracy for run in self.runs])

    @property
    def is_complete(self) -> bool:
        """Whether every seed's run is finished with an accuracy, so that means are comparable."""
        return not self.errors and self.accuracy.count == self.accuracy.of > 0

    @property
    def warnings(self) -> list[str]:
        """Warnings of the runs."""
        texts = [text for run in self.runs for text in run.summary.get("warnings", ())]
        if guesses := [text for run in self.runs if (text := unlearned(run.summary))]:
            many = f" in {len(guesses)} of {len(self.runs)} runs" if len(self.runs) > 1 else ""
            texts.append(guesses[0] + many)
        return list(dict.fromkeys(texts))

    @property
    def published(self) -> Published | None:
        """The paper's row of the point that was run, if any."""
        return self.method.row

    def spread(self, key: str) -> Spread:
        """Return a number of the runs' summaries."""
        return Spread.over([run.summary.get(key) for run in self.runs])

    def reported(self, quantity: str) -> float | None:
        """Return a published number of the point that was run, if any."""
        return None if self.published is None else getattr(self.published, quantity)

    @property
    def traffic(self) -> Spread:
        """Bytes sent and received by clients, without evaluations."""
        return Spread.over([run.traffic for run in self.runs])

    def per_update(self, key: str) -> Spread:
        """Return a total of the runs per update, e.g. of ``"bytes_down"``."""
        return Spread.over([run.per_update(key) for run in self.runs])

    @property
    def time(self) -> Spread:
        """Virtual time to the timed event, of the runs that reached it."""
        return Spread.over([run.time for run in self.runs])

    @property
    def time_above(self) -> float | None:
        """Lower bound of the mean time if a run missed the timed event, else None.

        Runs that missed it count with their virtual length.
        """
        if self.time.count == self.time.of:
            return None
        times = [run.summary["virtual_time"] if run.time is None else run.time for run in self.runs]
        return float(np.mean(times))

    @property
    def rank_time(self) -> float | None:
        """Mean time; infinite if a seed missed the timed event, None without runs."""
        if not self.runs:
            return None
        spread = self.time
        return spread.mean if spread.count == spread.of else math.inf


_Quantity = Callable[[Result], float | None]


@dataclass(frozen=True)
class Comparison:
    """The outcome of a suite.

    Attributes
    ----------
    suite : Suite
        The methods, settings and seeds.
    results : tuple[Result, ...]
        One result per method, in the suite's order.
    sweeps : Mapping[str, tuple[Result, ...]]
        Trials of each swept method, on the first seed.
    unwritten : Mapping[str, str]
        Tables and plots that could not be written, with reasons.
    """

    suite: Suite
    results: tuple[Result, ...]
    sweeps: Mapping[str, tuple[Result, ...]] = field(default_factory=dict)
    unwritten: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def target(self) -> float | None:
        """The target accuracy of the runs."""
        targets = [run.summary.get("target") for result in self.results for run in result.runs]
        return targets[0] if targets else None

    @property
    def measure(self) -> Measure:
        """The measure of the models: accuracy, or mean absolute error."""
        runs = [run for result in self.results for run in result.runs]
        return runs[0].measure if runs else ACCURACY

    def ratio(self, result: Result) -> float | None:
        """Return a method's time relative to the best; None if it never reaches the target."""
        times = [time for of in self.results if (time := of.rank_time) is not None]
        return _quotient(result.rank_time, min(times, default=math.inf))

    def speed_up(self, result: Result) -> float | None:
        """Return the reference's speed-up over a method."""
        return self._multiple(result, lambda of: of.rank_time)

    def speed_up_above(self, result: Result) -> float | None:
        """Return the lower bound of :meth:`speed_up` if a run of the method missed the target."""
        return self._multiple(result, lambda of: of.time_above, lambda of: of.rank_time)

    def published_speed_up(self, result: Result) -> float | None:
        """Return the reference's published speed-up over a method."""
        return self._multiple(result, lambda of: of.reported("time"))

    def relative_traffic(self, result: Result) -> float | None:
        """Return a method's mean traffic as a multiple of the reference's."""
        return self._multiple(result, lambda of: of.traffic.mean)

    def relative(self, result: Result, key: str) -> float | None:
        """Return a method's mean total per update as a multiple of the reference's."""
        return self._multiple(result, lambda of: of.per_update(key).mean)

    def _multiple(
        self, result: Result, of: _Quantity, base: _Quantity | None = None
    ) -> float | None:
        """Return a quantity as a multiple of the reference's; None if either is unknown."""
        reference = next((r for r in self.results if r.label == self.suite.reference), None)
        return None if reference is None else _quotient(of(result), (base or of)(reference))

    def tau(self, quantity: str) -> float | None:
        """Return Kendall's τ between our order of the methods and the published one.

        Parameters
        ----------
        quantity : str
            ``"accuracy"``, ``"time"`` or one of :class:`Scored`. Times that are never reached tie
            behind all others.

        Returns
        -------
        float or None
            τ-b; None for fewer than two methods with both numbers, or if all are tied.
        """
        pairs = [
            (result.reported(quantity), _measured(result, quantity)) for result in self.results
        ]
        known = [
            (theirs, ours) for theirs, ours in pairs if theirs is not None and ours is not None
        ]
        if len(known) < 2:
            return None
        theirs, ours = (np.minimum(values, 1e300) for values in zip(*known, strict=True))
        if len(set(theirs)) < 2 or len(set(ours)) < 2:
            return None
        return float(kendalltau(theirs, ours).statistic)

    @property
    def has_published(self) -> bool:
        """Whether there are published numbers."""
        return any(result.published is not None for result in self.results)

    @property
    def ranked(self) -> tuple[str, ...]:
        """The quantities whose published order is compared with ours."""
        if self.suite.scores:
            return tuple(map(str, self.suite.scores))
        return ("accuracy", "time") if self.has_published_times else ("accuracy",)

    @property
    def has_published_times(self) -> bool:
        """Whether the paper has times besides accuracies."""
        return any(result.reported("time") is not None for result in self.results)


def gather(
    method: ComparedMethod,
    label: str,
    jobs: Sequence[Job],
    errors: Mapping[Job, str],
    timing: Timing = Timing.TARGET,
    score: Score = Score.FINAL,
) -> Result:
    """Return the results of one method's runs.

    Parameters
    ----------
    method : ComparedMethod
        The method, or the point of its sweep.
    label : str
        Its label in the suite.
    jobs : Sequence[Job]
        Runs of this and other methods.
    errors : Mapping[Job, str]
        The errors of the runs that failed.
    timing : Timing
        Their compared time.
    score : Score
        Their compared accuracy.
    """
    runs, failed = [], {}
    for job in jobs:
        if job.method != method:
            continue
        summary = job.summary()
        if summary is None:
            failed[job.seed] = errors.get(job, "not run")
        else:
            folder = "/".join(job.folder.parts[-2:])
            runs.append(Run(job.seed, folder, summary, timing, score))
    return Result(method, label, tuple(runs), failed)


def best_of(tried: Sequence[Result]) -> Result:
    """Return the most accurate point of a sweep, the first at ties."""
    return max(tried, key=quality)


def quality(result: Result) -> float:
    """Return a method's quality: its accuracy, or its negated error.

    Infinitely low if a run has none, for example because it failed or diverged.
    """
    mean = result.accuracy.mean
    if mean is None or not result.is_complete:
        return -math.inf
    return -mean if result.runs[0].measure.is_error else mean


def _measured(result: Result, quantity: str) -> float | None:
    if quantity in tuple(Scored):
        return result.spread(Scored(quantity).key).mean
    return result.accuracy.mean if quantity == "accuracy" else result.rank_time


def _quotient(value: float | None, base: float | None) -> float | None:
    """Return a quotient, 0 / 0 being 1; None if a number is unknown, or anything is infinite."""
    if value is None or base is None or math.isinf(value) or math.isinf(base):
        return None
    if not base:
        return None if value else 1.0
    return value / base


# -----------------------------------------------------------------------------
# Reading a comparison from its ``compare.json``.
# -----------------------------------------------------------------------------


def read_comparison(folder: Path) -> Comparison:
    """Read the results of `raceme compare` in a folder.

    The suite has the content of its tables, without lengths of runs.

    Raises
    ------
    UserError
        The file is missing or damaged.
    """
    path = folder / COMPARISON
    try:
        tree = parse_json(read_text(path))
        values = read_values(path, tree)
        timing, score = values.get("timing", Timing.TARGET), values.get("score", Score.FINAL)
        results = tuple(_result(path, entry, timing, score) for entry in tree["methods"])
        suite = Suite(
            title=str(tree["title"]),
            methods=tuple(
                ComparedMethod(
                    result.label, result.method.strategy, published=result.method.published
                )
                for result in results
            ),
            settings=dict(tree["settings"]),
            scale=float(tree["scale"]),
            **values,
        )
        sweeps = {
            str(label): tuple(_result(path, entry, timing, score) for entry in entries)
            for label, entries in tree.get("sweeps", {}).items()
        }
    except ReadingError as error:
        raise UserError(f"Cannot read {path}: {error}.") from None
    except (OverflowError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not what `raceme compare` writes: {type(error).__name__} {error}."
        ) from None
    return Comparison(suite, results, sweeps)


def read_runs(folder: Path, comparison: Comparison) -> tuple[dict[str, list[RunRecord]], list[str]]:
    """Read the runs of each method, in the order of their seeds.

    Returns
    -------
    tuple[dict[str, list[RunRecord]], list[str]]
        The runs by method label, and the labels of runs without readable events.
    """
    records: dict[str, list[RunRecord]] = {}
    missing = []
    for result in comparison.results:
        found = []
        for run in result.runs:
            with suppress(UserError):
                found.append(read_run(folder / run.folder))
        if found:
            records[result.label] = found
        elif result.runs:
            missing.append(result.label)
    return records, missing


def _result(path: Path, entry: Mapping[str, Any], timing: Timing, score: Score) -> Result:
    row = entry["published"]
    method = ComparedMethod(
        label=str(entry.get("variant", entry["label"])),
        strategy=str(entry["strategy"]),
        options=dict(entry["options"]),
        published=() if row is None else (read_published(path, "published", row),),
    )
    # Looking it up would import the strategy.
    method.__dict__["asynchronous"] = bool(entry["asynchronous"])
    runs = []
    for summary in entry["runs"]:
        # Numbers used in tables.
        measure = Measure.of(summary)
        names = [measure.name, "purity", "updates", "virtual_time", score.key(measure)]
        if score is Score.HONEST and names[-1] not in summary:
            # Without attackers.
            names.pop()
        for name in names:
            if not isinstance(summary[name], int | float | None):
                raise ValueError(f"{name} is {summary[name]!r}")
        runs.append(Run(int(summary["seed"]), str(summary["folder"]), summary, timing, score))
    errors = {int(seed): str(error) for seed, error in entry["errors"].items()}
    return Result(method, str(entry["label"]), tuple(runs), errors)


# -----------------------------------------------------------------------------
# Regret: distance of each method from the best of each case, over several cases.
# -----------------------------------------------------------------------------


_NONE = "-"


def regrets(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, float]]:
    """Return each method's distance in points from the best, by method and case.

    Regressions are left out. A method is left out of a case if one of its runs failed or diverged,
    since the mean over the other seeds would not be comparable.
    """
    found: dict[str, dict[str, float]] = {}
    for case, comparison in comparisons.items():
        if comparison.measure.is_error:
            continue
        complete = [result for result in comparison.results if result.is_complete]
        means = {result.label: result.accuracy.mean for result in complete}
        known = {label: mean for label, mean in means.items() if mean is not None}
        for label, mean in known.items():
            found.setdefault(label, {})[case] = 100.0 * (max(known.values()) - mean)
    return found


def slowness(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, float]]:
    """Return each method's time to the target relative to the fastest, by method and case.

    The time of a method that misses the target in some run is infinite, if another method reaches
    it.
    """
    found: dict[str, dict[str, float]] = {}
    for case, comparison in comparisons.items():
        times = {}
        for result in comparison.results:
            time = result.rank_time
            times[result.label] = np.inf if time is None or result.errors else time
        if np.isfinite(fastest := min(times.values(), default=np.inf)):
            for label, own in times.items():
                behind = own / fastest if fastest else np.inf
                found.setdefault(label, {})[case] = 1.0 if own == fastest else behind
    return found


def regret_table(comparisons: Mapping[str, Comparison]) -> PlainTable | None:
    """Return the regret of every method by case, with each method's worst in bold.

    Methods without a result in some case come last, with the number of cases of their mean. The
    result is None without any accuracy.
    """
    points, ratios = regrets(comparisons), slowness(comparisons)
    if not points:
        return None
    cases = [case for case in comparisons if any(case in own for own in points.values())]
    known = {label: len(own) for label, own in points.items()}
    labels = sorted(points, key=lambda k: (-known[k], float(np.mean([*points[k].values()]))))
    worst = {label: max(points[label].values()) for label in labels}
    missed = {
        label: ""
        if len(points[label]) == len(cases)
        else f" ({len(points[label])} of {len(cases)})"
        for label in labels
    }
    rows = [
        (case, *(_cell(points[label].get(case), worst[label]) for label in labels))
        for case in cases
    ]
    means = (f"{np.mean([*points[label].values()]):.2f}{missed[label]}" for label in labels)
    fastest = ([ratio <= 1.0 for ratio in ratios.get(label, {}).values()] for label in labels)
    rows += [
        ("mean", *means),
        ("worst", *(f"{worst[label]:.2f}" for label in labels)),
        ("fastest", *(f"{np.mean(fast):.0%}" if fast else _NONE for fast in fastest)),
    ]
    lines = ["fastest: share of the cases in which no method reaches the target sooner."]
    if any(missed.values()):
        lines.append(f"{_NONE}: not run, or a run failed or diverged.")
    return PlainTable(
        "Regret: points below the best method of each case",
        ("case", *labels),
        tuple(rows),
        tuple(lines),
    )


def regret_overview(comparisons: Mapping[str, Comparison]) -> PlainTable:
    """Return the rows `mean`, `worst` and `fastest` of `regret_table`, a row per method.

    Beside the worst regret is its case.
    """
    table, points = regret_table(comparisons), regrets(comparisons)
    if table is None:
        raise ValueError("there is no accuracy")
    labels, (means, worst, fastest) = table.columns[1:], (row[1:] for row in table.rows[-3:])
    cases = [max(points[label], key=points[label].__getitem__) for label in labels]
    columns = ("method", "mean", "worst", "of case", "fastest")
    rows = zip(labels, means, worst, cases, fastest, strict=True)
    return PlainTable(table.title, columns, tuple(rows), table.lines)


def _cell(value: float | None, worst: float) -> str:
    if value is None:
        return _NONE
    return f"**{value:.2f}**" if value == worst else f"{value:.2f}"
