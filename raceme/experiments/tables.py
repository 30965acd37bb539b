"""A comparison as tables: for the terminal, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import raceme
from raceme.core.events import WITHIN, Measure
from raceme.experiments.results import Comparison, Result, Spread
from raceme.experiments.suites import NEVER, Score, Scored, Timing, described
from raceme.reporting.console import PlainTable

# -----------------------------------------------------------------------------
# What a reader of a comparison's table has to know: the lines below it.
# -----------------------------------------------------------------------------


UNKNOWN = "-"
TO_TARGET, TO_CONVERGENCE = "time to target", "time to convergence"
MARK = "†"
"""Stands behind a published number that has a remark."""

_SCORE_LINES = {
    Score.BEST_WEIGHTED: "the best evaluation of a run, the mean over the clients "
    "weighted by their numbers of test examples.",
    Score.STEP_STARTS: "the mean over the steps of the data, from the second on, of the "
    "first evaluation on the data of each.",
    Score.STEP_ENDS: "the mean over the steps of the data of the last evaluation on the "
    "data of each.",
    Score.CURRENT: "on each task right after it was trained on, before anybody trained on the next "
    "one; the mean over the tasks.",
}
_SAID_OF = {
    Scored.BEFORE: (
        "Before: what a client uploads, on test data of the mixture that it was trained on; the "
        "mean over the clients of their last upload."
    ),
    Scored.AFTER: (
        "After: what a client gets in return, on the same data; known of its last upload but one."
    ),
    Scored.CLUSTER: (
        "Cluster: the clusters' models, on the server's test set of each distribution; their "
        "mean at the last evaluation."
    ),
}


def lines_below(comparison: Comparison) -> tuple[str, ...]:
    """Return what a reader of the main table has to know."""
    suite, measure = comparison.suite, comparison.measure
    lines = []
    if suite.scale != 1.0:
        lines.append(
            f"SHORTENED: --scale {suite.scale:g}, so each run has {suite.scale:.3g} of the suite's "
            "updates; accuracies and times are not those of the full suite."
        )
    if comparison.has_published:
        times = comparison.has_published_times and not suite.scores
        taus = [(name, comparison.tau(name)) for name in comparison.ranked]
        shown = ", ".join(
            f"{name} {UNKNOWN if tau is None else f'{tau:.2f}'}" for name, tau in taus
        )
        lines.append(f"Kendall's τ between the paper's order of the methods and ours: {shown}.")
        if times:
            lines.append("The paper's times are in a unit of its own: compare their ratios.")
        if compares_times(comparison) and not suite.scores:
            what = TO_CONVERGENCE if suite.timing is Timing.CONVERGENCE else TO_TARGET
            lines.append(f"× {suite.reference}: {what} over its time.")
    if suite.score in _SCORE_LINES:
        lines.append(f"{measure.title}: {_SCORE_LINES[suite.score]}")
    if suite.timing is Timing.CONVERGENCE:
        lines.append(
            f"Time to convergence: when the {measure.word} last comes within "
            f"{100 * WITHIN:g} {'%' if measure.is_error else 'point'} of its final value (our "
            "rule)."
        )
    if suite.shows_unrest:
        lines.append(
            f"Unrest: by how many {measure.unit or 'points'} the {measure.word} is "
            f"{'above' if measure.is_error else 'below'} its best so far, on the mean over the "
            "evaluations of a run."
        )
    if suite.shows_forgetting:
        lines.append(
            f"Forgotten: by how many {measure.unit or 'points'} the {measure.word} on former tasks "
            "is worse at the end than at the end of the best earlier step; the mean over them."
        )
    if suite.shows_traffic:
        lines.append(
            f"Bytes: those sent up and down, as multiples of {suite.reference}'s; evaluations are "
            "left out."
        )
    lines += [_SAID_OF[measure] for measure in suite.scores]
    if suite.shows_mixtures:
        lines.append(
            "KL: divergence of the true mixture of a client's data from the estimated one, in "
            "nats, the mean over the last third of the uploads."
        )
    if suite.shows_work:
        lines.append(
            "Bytes down, client work: for each update, as multiples of "
            f"{suite.reference}'s. Work counts a sample's pass forward as 1, backward as 2; tests "
            "are left out."
        )
    if comparison.sweeps:
        swept = ", ".join(comparison.sweeps)
        lines.append(f"Swept on the first seed and shown at the most accurate point: {swept}.")
    if any(result.time_above is not None for result in comparison.results) and not suite.scores:
        missed = "converge" if suite.timing is Timing.CONVERGENCE else "reach the target"
        lines.append(f"'>': a run that did not {missed} counts with its length.")
    lines += [
        f"{result.label}, seed {seed} FAILED: {error}"
        for result in comparison.results
        for seed, error in result.errors.items()
    ]
    return (*lines, *_remarks(comparison), *suite.notes)


def compares_times(comparison: Comparison) -> bool:
    """Return whether times are shown as multiples of the reference's, which may be for bytes."""
    suite = comparison.suite
    return suite.reference is not None and not suite.shows_traffic


def _remarks(comparison: Comparison) -> list[str]:
    """Return what is remarked of published numbers, each remark once."""
    labels: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.published is not None and result.published.remark:
            labels.setdefault(result.published.remark, []).append(result.label)
    return [f"{MARK} {', '.join(of)}: {remark}" for remark, of in labels.items()]


# -----------------------------------------------------------------------------
# A comparison as tables: for the terminal, as Markdown, as CSV and as JSON.
# -----------------------------------------------------------------------------


_KINDS = ("", "best_", "weighted_", "best_weighted_")
_CSV = (
    "purity",
    "clusters",
    "updates",
    "virtual_time",
    "wall_time",
    "bytes_up",
    "bytes_down",
    "rejected_updates",
    *(scored.key for scored in Scored),
    "mixture_divergence",
    "sample_passes",
    "forgetting",
)

_SCORED = {
    Score.BEST_WEIGHTED: ", best {} by test examples",
    Score.STEP_STARTS: ", {} at the steps' starts",
    Score.STEP_ENDS: ", {} at the steps' ends",
    Score.CURRENT: ", {} on each task when it was learnt",
    Score.HONEST: ", {} of clients that do not attack",
}


def main_table(comparison: Comparison) -> PlainTable:
    """Return the table of the methods; published numbers stand beside ours where there are any."""
    if comparison.suite.scores:
        columns, rows = _scores(comparison)
    else:
        columns, rows = _accuracies(comparison)
    columns, rows = _with_further(comparison, columns, rows)
    suite, target = comparison.suite, comparison.target
    of = f", target {comparison.measure.goal(target)}" if target is not None else ""
    if suite.scores:
        of = ", accuracies in %"
    if suite.timing is Timing.CONVERGENCE:
        of = ", time to convergence"
    of += _SCORED.get(suite.score, "").format(comparison.measure.word)
    seeds = f"{len(suite.seeds)} seeds" if len(suite.seeds) > 1 else f"seed {suite.seeds[0]}"
    return PlainTable(f"{suite.title} ({seeds}{of})", columns, tuple(rows), lines_below(comparison))


_Cells = tuple[str, ...]


def _accuracies(comparison: Comparison) -> tuple[_Cells, list[_Cells]]:
    """Return the columns and rows of methods that have one accuracy, and times."""
    make = _reproduction_row if comparison.has_published else _row
    measure = comparison.measure
    columns: tuple[str, ...] = _COLUMNS
    if comparison.has_published:
        factor = f"× {comparison.suite.reference or 'reference'}"
        columns = (*_REPRODUCTION, f"{factor}\npaper", f"{factor}\nours", "purity")
    elif comparison.suite.timing is Timing.CONVERGENCE:
        columns = tuple(TO_CONVERGENCE if name == TO_TARGET else name for name in columns)
    rows = [make(comparison, result) for result in comparison.results]
    if comparison.has_published:
        shown = _shown_columns(comparison)
        columns, *rows = (tuple(cells[i] for i in shown) for cells in (columns, *rows))
    columns = tuple(name.replace(_ACCURACY, _head(measure)) for name in columns)
    return columns, rows


def _scores(comparison: Comparison) -> tuple[_Cells, list[_Cells]]:
    """Return the columns and rows of methods that have several scores."""
    columns, rows = ["method"], [[_name(result)] for result in comparison.results]
    for scored in comparison.suite.scores:
        columns += [f"{scored}\npaper"] * comparison.has_published + [f"{scored}\nours"]
        for cells, result in zip(rows, comparison.results, strict=True):
            if comparison.has_published:
                cells.append(_paper(result, scored, 1))
            # Like the papers': with two digits so many columns have no room in a terminal.
            cells.append(_spread(result.score(scored), 100, 1))
    return tuple(columns), [tuple(cells) for cells in rows]


def _with_further(
    comparison: Comparison, columns: _Cells, rows: list[_Cells]
) -> tuple[_Cells, list[_Cells]]:
    """Return columns and rows with what else the suite shows."""
    measure = comparison.measure
    if comparison.suite.shows_unrest:
        columns = (*columns, "unrest")
        unrests = (_percent(result.unrest, measure) for result in comparison.results)
        rows = [(*row, cell) for row, cell in zip(rows, unrests, strict=True)]
    if comparison.suite.shows_forgetting:
        columns = (*columns, "forgotten")
        lost = (_percent(result.forgetting, measure) for result in comparison.results)
        rows = [(*row, cell) for row, cell in zip(rows, lost, strict=True)]
    if comparison.suite.shows_traffic:
        columns = (*columns, "bytes\npaper", "bytes\nours")
        traffics = (_traffic(comparison, result) for result in comparison.results)
        rows = [(*row, *cells) for row, cells in zip(rows, traffics, strict=True)]
    if comparison.suite.shows_clusters:
        columns = (*columns, "clusters\npaper", "clusters\nours")
        cells = (
            (_paper(result, "clusters", 0), _spread(result.clusters, 1, 1))
            for result in comparison.results
        )
        rows = [(*row, *pair) for row, pair in zip(rows, cells, strict=True)]
    if comparison.suite.shows_mixtures:
        columns = (*columns, "KL")
        spreads = (_spread(result.mixture_divergence, 1, 2) for result in comparison.results)
        rows = [(*row, cell) for row, cell in zip(rows, spreads, strict=True)]
    if comparison.suite.shows_work:
        columns = (*columns, *_WORK.values())
        rows = [
            (*row, *(_factor(comparison.relative(result, key)) for key in _WORK))
            for row, result in zip(rows, comparison.results, strict=True)
        ]
    return columns, rows


def sweep_table(comparison: Comparison) -> PlainTable | None:
    """Return what was tried of the swept methods; None if nothing was swept.

    Its accuracies are those of the held-out training samples by which the points are chosen.
    """
    chosen = {result.method.label for result in comparison.results}
    rows = tuple(
        (
            result.method.label,
            _percent(result.accuracy, comparison.measure),
            _time(result),
            "chosen" if result.method.label in chosen else "",
        )
        for tried in comparison.sweeps.values()
        for result in tried
    )
    if not rows:
        return None
    suite = comparison.suite
    length = "" if suite.sweep_scale == 1.0 else f", {suite.sweep_scale:g} of the runs' length"
    share = suite.validation_fraction
    held_out = "" if share is None else f", tested on {share:.0%} of the training samples"
    title = f"Swept hyper-parameters (seed {suite.seeds[0]}{length}{held_out})"
    return PlainTable(title, ("method", _head(comparison.measure), "time", ""), rows)


def to_csv(comparison: Comparison) -> str:
    """Return one line for each run, those that were only tried included."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    time = f"time_to_{comparison.suite.timing}"
    measure = comparison.measure.name
    measured = [f"{kind}{measure}" for kind in _KINDS]
    measured += [f"{measure}_at_step_starts", f"{measure}_at_step_ends"]
    names = (*measured, *_CSV)
    honest = [f"honest_{measure}"] if comparison.suite.score is Score.HONEST else []
    first = ["method", "strategy", "options", "seed", "target", time]
    done: set[str] = set()
    tried = [result for results in comparison.sweeps.values() for result in results]
    # What only some methods measure; of values per client or cluster there is no one number.
    own = sorted(
        {
            name
            for result in (*comparison.results, *tried)
            for run in result.runs
            for name, of in run.summary.get("measures", {}).items()
            if not isinstance(of["value"], Mapping)
        }
    )
    writer.writerow([*first, *honest, *names, *(f"measure_{name}" for name in own)])
    for result in (*comparison.results, *tried):
        for run in result.runs:
            if run.folder not in done:
                done.add(run.folder)
                method = result.method
                head = [method.label, method.strategy, described(method.options), run.seed]
                numbers = [run.accuracy] if honest else []
                numbers += [run.summary.get(name) for name in names]
                of = run.summary.get("measures", {})
                numbers += [of[name]["value"] if name in of else None for name in own]
                writer.writerow([*head, run.summary.get("target"), run.time, *numbers])
    return buffer.getvalue()


def to_json(comparison: Comparison) -> str:
    """Return everything, runs included; infinite times are written as "/"."""
    suite = comparison.suite
    content = {
        "title": suite.title,
        "dataset": suite.dataset,
        "settings": dict(suite.settings),
        "seeds": list(suite.seeds),
        "scale": suite.scale,
        "sweep-scale": suite.sweep_scale,
        "validation-fraction": suite.validation_fraction,
        "timing": suite.timing.value,
        "score": suite.score.value,
        "measure": comparison.measure.name,
        "unit": comparison.measure.unit,
        "shows-unrest": suite.shows_unrest,
        "shows-forgetting": suite.shows_forgetting,
        "shows-traffic": suite.shows_traffic,
        "shows-clusters": suite.shows_clusters,
        "scores": [str(measure) for measure in suite.scores],
        "shows-mixtures": suite.shows_mixtures,
        "shows-work": suite.shows_work,
        "target": comparison.target,
        "reference": suite.reference,
        "methods": [_entry(comparison, result) for result in comparison.results],
        "sweeps": {
            label: [_entry(comparison, result) for result in tried]
            for label, tried in comparison.sweeps.items()
        },
        "kendall_tau": {
            name: comparison.tau(name)
            for name in (comparison.ranked if suite.scores else ("accuracy", "time"))
        }
        if comparison.has_published
        else None,
        "notes": list(suite.notes),
        "versions": {"raceme": raceme.__version__},
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_WORK = {"bytes_down": "bytes\ndown", "sample_passes": "client\nwork"}
_ACCURACY = "acc %"
_COLUMNS = ("method", _ACCURACY, TO_TARGET, "ratio to best", "purity", "updates")
_REPRODUCTION = (
    "method",
    "acc %\npaper",
    "acc %\nours",
    "time\npaper",
    "time\nours",
)


def _row(comparison: Comparison, result: Result) -> tuple[str, ...]:
    ratio = comparison.ratio(result)
    return (
        _name(result),
        _percent(result.accuracy, comparison.measure),
        _time(result),
        UNKNOWN if ratio is None else f"{ratio:.2f}",
        _spread(result.purity, 1, 2),
        _updates(result),
    )


def _reproduction_row(comparison: Comparison, result: Result) -> tuple[str, ...]:
    published = result.published
    time = None if published is None else published.time
    return (
        _name(result),
        _paper(result, "accuracy", 2),
        _percent(result.accuracy, comparison.measure),
        UNKNOWN if time is None else NEVER if math.isinf(time) else f"{time:g}",
        _time(result),
        _factor(comparison.published_speed_up(result)),
        _own_factor(comparison, result),
        UNKNOWN if result.purity.mean is None else f"{result.purity.mean:.2f}",
    )


def _paper(result: Result, quantity: str, digits: int) -> str:
    """Return what the paper reports of a method, with a mark if there is a remark on it."""
    published = result.published
    value = None if published is None else getattr(published, quantity)
    if published is None or value is None:
        return UNKNOWN
    return f"{value:.{digits}f}{MARK if published.remark else ''}"


def _shown_columns(comparison: Comparison) -> list[int]:
    """Return which columns of a reproduction have anything: the paper may tell no times."""
    times = comparison.has_published_times
    factors = compares_times(comparison)
    shown = [True, True, True, times, True, times and factors, factors, True]
    return [index for index, is_shown in enumerate(shown) if is_shown]


def _entry(comparison: Comparison, result: Result) -> dict[str, Any]:
    method, published = result.method, result.published
    return {
        "label": result.label,
        "variant": method.label,
        "strategy": method.strategy,
        "asynchronous": method.asynchronous,
        "options": dict(method.options),
        comparison.measure.name: _plain(result.accuracy),
        f"time_to_{comparison.suite.timing}": _plain(result.time),
        "unrest": _plain(result.unrest),
        "forgetting": _plain(result.forgetting),
        "traffic": _plain(result.traffic),
        "scores": {str(scored): _plain(result.score(scored)) for scored in Scored},
        "mixture_divergence": _plain(result.mixture_divergence),
        "relative": {key: comparison.relative(result, key) for key in _WORK},
        "purity": _plain(result.purity),
        "clusters": _plain(result.clusters),
        "ratio_to_best": comparison.ratio(result),
        "time_above": result.time_above,
        "speed_up_of_reference": comparison.speed_up(result),
        "speed_up_of_reference_above": comparison.speed_up_above(result),
        "published_speed_up_of_reference": comparison.published_speed_up(result),
        "published": None
        if published is None
        else {
            "accuracy": published.accuracy,
            "time": NEVER if published.time == math.inf else published.time,
            "traffic": published.traffic,
            "clusters": published.clusters,
            "remark": published.remark,
            **{str(scored): getattr(published, scored) for scored in Scored},
        },
        "runs": [{"seed": run.seed, "folder": run.folder, **run.summary} for run in result.runs],
        "errors": {str(seed): error for seed, error in result.errors.items()},
    }


def _plain(spread: Spread) -> dict[str, float | int | None]:
    return {"mean": spread.mean, "std": spread.std, "count": spread.count, "of": spread.of}


def _name(result: Result) -> str:
    """Return the label, with the hyper-parameters that a sweep has chosen."""
    return result.label if result.method.label == result.label else result.method.label


def _percent(spread: Spread, measure: Measure) -> str:
    """Return accuracies in points of a hundred, errors in their unit."""
    return _spread(spread, 1 if measure.is_error else 100, 2)


def _head(measure: Measure) -> str:
    return measure.label if measure.is_error else _ACCURACY


def _time(result: Result) -> str:
    spread = result.time
    if spread.of == 0:
        return UNKNOWN
    if result.time_above is None:
        return _spread(spread, 1, 1)
    text = f"> {result.time_above:.1f}"
    return f"{text} ({spread.count} of {spread.of})" if spread.count else text


def _updates(result: Result) -> str:
    counts: Sequence[int] = [int(run.summary["updates"]) for run in result.runs]
    return f"{round(sum(counts) / len(counts)):,}" if counts else UNKNOWN


def _spread(spread: Spread, factor: float, digits: int) -> str:
    if spread.mean is None or spread.std is None:
        return UNKNOWN
    mean = f"{factor * spread.mean:.{digits}f}"
    return mean if spread.count < 2 else f"{mean} ± {factor * spread.std:.{digits}f}"


def _own_factor(comparison: Comparison, result: Result) -> str:
    above = comparison.speed_up_above(result)
    return _factor(comparison.speed_up(result)) if above is None else f"> {above:.2f}×"


def _traffic(comparison: Comparison, result: Result) -> tuple[str, str]:
    published = None if result.published is None else result.published.traffic
    return _factor(published), _factor(comparison.relative_traffic(result))


def _factor(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"
