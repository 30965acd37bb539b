"""A comparison as tables: for the terminal, as Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

import raceme
from raceme.core.config import TRUST
from raceme.core.events import WITHIN, Measure, grouped
from raceme.experiments.results import Comparison, Result, Run, Spread
from raceme.experiments.suites import (
    NEVER,
    Score,
    Scored,
    Timing,
    described,
    written_published,
    written_values,
)
from raceme.reporting.console import PlainTable

# -----------------------------------------------------------------------------
# The lines below a comparison's table.
# -----------------------------------------------------------------------------


UNKNOWN = "-"
TO_TARGET, TO_CONVERGENCE = "time to target", "time to convergence"
_BACKDOOR = "backdoor_success"
MARK = "†"
"""Marks a published number with a remark."""
WARNED = "*"
"""Marks a method whose runs warned of something."""

_SCORE_LINES = {
    Score.BEST_WEIGHTED: "the best evaluation of a run, the client mean weighted by test examples.",
    Score.STEP_STARTS: "the mean over the steps from the second of the first evaluation of each "
    "step.",
    Score.STEP_ENDS: "the mean over the steps of the last evaluation of each step.",
}
_SAID_OF = {
    Scored.BEFORE: (
        "Before: a client's upload on test data of its training mixture; the mean over the "
        "clients' last uploads."
    ),
    Scored.AFTER: (
        "After: the model returned for it on the same data, for the last upload but one."
    ),
    Scored.CLUSTER: (
        "Cluster: cluster models on the server's test set of each distribution; the mean at the "
        "last evaluation."
    ),
}


def lines_below(comparison: Comparison) -> tuple[str, ...]:
    """Return the lines below the main table."""
    suite, measure = comparison.suite, comparison.measure
    lines = []
    if suite.scale != 1.0:
        lines.append(
            f"SHORTENED: --scale {suite.scale:g}, so each run has {suite.scale:.3g} of the "
            "suite's updates; accuracies and times differ from the full suite's."
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
    if _has_backdoors(comparison):
        lines.append(
            "Backdoor: share of the honest clients' triggered test samples of other classes that "
            "are classified as the attackers' target, at the last evaluation."
        )
    if suite.shows_unrest:
        lines.append(
            f"Unrest: {measure.unit or 'points'} by which the {measure.word} is "
            f"{'above' if measure.is_error else 'below'} its best so far, on the mean over the "
            "evaluations of a run."
        )
    if suite.shows_traffic:
        lines.append(
            f"Bytes: sent up and down, as multiples of {suite.reference}'s, without evaluations."
        )
    lines += [_SAID_OF[measure] for measure in suite.scores]
    if suite.shows_mixtures:
        lines.append(
            "KL: divergence of the true from the estimated mixture of a client's data in nats; "
            "the mean over the last third of the uploads."
        )
    if suite.shows_work:
        lines.append(
            f"Bytes down, client work: per update, as multiples of {suite.reference}'s. Work "
            "counts a sample's forward pass as 1 and backward pass as 2, without tests."
        )
    if comparison.sweeps:
        swept = ", ".join(comparison.sweeps)
        lines.append(f"Swept on the first seed and shown at the most accurate point: {swept}.")
    has_times = comparison.has_published or _any_target_reached(comparison)
    missed_by_some = any(result.time_above is not None for result in comparison.results)
    if has_times and missed_by_some and not suite.scores:
        missed = "converge" if suite.timing is Timing.CONVERGENCE else "reach the target"
        lines.append(f"'>': runs that did not {missed} count with their length.")
    lines += [
        f"{result.label}, seed {seed} FAILED: {error}"
        for result in comparison.results
        for seed, error in result.errors.items()
    ]
    return (*lines, *_warnings(comparison), *_remarks(comparison), *suite.notes)


def _any_target_reached(comparison: Comparison) -> bool:
    """Return whether some run reached the target, or converged."""
    return any(result.time.count for result in comparison.results)


def _has_backdoors(comparison: Comparison) -> bool:
    """Return whether runs had a backdoor attack."""
    return any(result.spread(_BACKDOOR).mean is not None for result in comparison.results)


def compares_times(comparison: Comparison) -> bool:
    """Return whether times are relative to the reference, which may be for bytes only."""
    suite = comparison.suite
    return suite.reference is not None and not suite.shows_traffic


def _warnings(comparison: Comparison) -> list[str]:
    """Return the distinct warnings of the runs."""
    of = grouped((text, result.label) for result in comparison.results for text in result.warnings)
    return [f"{WARNED} {', '.join(labels)}: {text}" for text, labels in of.items()]


def _remarks(comparison: Comparison) -> list[str]:
    """Return the distinct remarks on published numbers."""
    labels: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.published is not None and result.published.remark:
            labels.setdefault(result.published.remark, []).append(result.label)
    return [f"{MARK} {', '.join(of)}: {remark}" for remark, of in labels.items()]


# -----------------------------------------------------------------------------
# A comparison as tables: for the terminal, as Markdown, LaTeX, CSV and JSON.
# -----------------------------------------------------------------------------


_KINDS = ("", "best_", "weighted_", "best_weighted_", "worst_tenth_")
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
    _BACKDOOR,
)

_SCORED = {
    Score.BEST_WEIGHTED: ", best {} by test examples",
    Score.STEP_STARTS: ", {} at the steps' starts",
    Score.STEP_ENDS: ", {} at the steps' ends",
    Score.HONEST: ", {} of clients that do not attack",
}


def main_table(comparison: Comparison) -> PlainTable:
    """Return the table of the methods, with published numbers if any."""
    suite, target = comparison.suite, comparison.target
    columns = [("method", _marked), *_measured(comparison), *_further(comparison)]
    rows = [tuple(cell(result) for _, cell in columns) for result in comparison.results]
    of = ""
    if target is not None:
        what = (
            "target"
            if comparison.has_published or _any_target_reached(comparison)
            else "none reached"
        )
        of = f", {what} {comparison.measure.goal(target)}"
    if suite.scores:
        of = ", accuracies in %"
    if suite.timing is Timing.CONVERGENCE:
        of = ", time to convergence"
    of += _SCORED.get(suite.score, "").format(comparison.measure.word)
    seeds = f"{len(suite.seeds)} seeds" if len(suite.seeds) > 1 else f"seed {suite.seeds[0]}"
    heads = tuple(head for head, _ in columns)
    return PlainTable(f"{suite.title} ({seeds}{of})", heads, tuple(rows), lines_below(comparison))


_Cell = Callable[[Result], str]
_Column = tuple[str, _Cell]
"""A heading and the function that makes a method's cell."""


def _measured(comparison: Comparison) -> list[_Column]:
    """Return the columns of accuracies or other scores, and of times."""
    suite, accuracy = comparison.suite, _head(comparison.measure)
    columns: list[_Column] = []
    for scored in suite.scores:
        if comparison.has_published:
            columns.append((f"{scored}\npaper", _reported(scored, 1)))
        # One decimal, as in the papers, to fit a terminal.
        columns.append((f"{scored}\nours", _summarised(scored.key, 100, 1)))
    if suite.scores:
        return columns

    def ours(result: Result) -> str:
        return _percent(result.accuracy, comparison.measure)

    if not comparison.has_published:
        time = TO_CONVERGENCE if suite.timing is Timing.CONVERGENCE else TO_TARGET
        columns = [(accuracy, ours)]
        if suite.score is Score.FINAL:
            columns.append(("worst\ntenth", _worst_tenth))
        if _any_target_reached(comparison):
            columns.append((time.replace("to ", "to\n"), _time))
            columns.append(("ratio\nto best", lambda result: _number(comparison.ratio(result))))
        else:
            columns.append(("virtual\ntime (s)", _summarised("virtual_time", 1, 1)))
        if any(result.spread("purity").count for result in comparison.results):
            columns.append(("purity", _summarised("purity", 1, 2)))
        clusters = ("clusters", lambda result: _mean(result.spread("clusters"), 1))
        return [*columns, clusters, ("updates", _updates)]
    # The paper may report no times.
    times, compared = comparison.has_published_times, compares_times(comparison)
    factor = f"× {suite.reference or 'reference'}"
    columns = [(f"{accuracy}\npaper", _reported("accuracy", 2)), (f"{accuracy}\nours", ours)]
    if times:
        columns.append(("time\npaper", _published_time))
    columns.append(("time\nours", _time))
    if times and compared:
        speed_up = comparison.published_speed_up
        columns.append((f"{factor}\npaper", lambda result: _factor(speed_up(result))))
    if compared:
        columns.append((f"{factor}\nours", lambda result: _own_factor(comparison, result)))
    return [*columns, ("purity", lambda result: _number(result.spread("purity").mean))]


def _further(comparison: Comparison) -> list[_Column]:
    """Return the suite's further columns."""
    suite, columns = comparison.suite, list[_Column]()
    points = 1 if comparison.measure.is_error else 100
    if _has_backdoors(comparison):
        columns.append(("backdoor %", _summarised(_BACKDOOR, 100, 1)))
    if suite.shows_unrest:
        columns.append(("unrest", _summarised("unrest", points, 2)))
    if suite.shows_traffic:
        traffic = comparison.relative_traffic
        columns.append(("bytes\npaper", lambda result: _factor(result.reported("traffic"))))
        columns.append(("bytes\nours", lambda result: _factor(traffic(result))))
    if suite.shows_clusters:
        columns.append(("clusters\npaper", _reported("clusters", 0)))
        columns.append(("clusters\nours", _summarised("clusters", 1, 1)))
    if suite.shows_mixtures:
        columns.append(("KL", _summarised("mixture_divergence", 1, 2)))
    if suite.shows_work:
        work = comparison.relative
        columns.append(("bytes\ndown", lambda result: _factor(work(result, "bytes_down"))))
        columns.append(("client\nwork", lambda result: _factor(work(result, "sample_passes"))))
    return columns


def _summarised(key: str, factor: float, digits: int) -> _Cell:
    """Return the function that formats a number of the runs' summaries."""
    return lambda result: _spread(result.spread(key), factor, digits)


def _reported(quantity: str, digits: int) -> _Cell:
    """Return the function that formats a published number, with a mark for a remark."""

    def cell(result: Result) -> str:
        value, row = result.reported(quantity), result.published
        if row is None or value is None:
            return UNKNOWN
        return f"{value:.{digits}f}{MARK if row.remark else ''}"

    return cell


def _published_time(result: Result) -> str:
    time = result.reported("time")
    return UNKNOWN if time is None else NEVER if math.isinf(time) else f"{time:g}"


def costs_table(comparison: Comparison) -> PlainTable:
    """Return a table of each method's costs: time, work of the devices and bytes."""
    columns: list[_Column] = [
        ("method", _name),
        (_head(comparison.measure), lambda result: _percent(result.accuracy, comparison.measure)),
        ("virtual\ntime (s)", _summarised("virtual_time", 1, 1)),
        ("device\ntime (s)", _summarised("device_time", 1, 0)),
        ("up\n(MB)", _summarised("bytes_up", 1e-6, 1)),
        ("down\n(MB)", _summarised("bytes_down", 1e-6, 1)),
        ("updates", _updates),
    ]
    rows = [tuple(cell(result) for _, cell in columns) for result in comparison.results]
    line = "Device time: from sending tasks to their replies, summed over all devices."
    title = f"{comparison.suite.title}: costs"
    return PlainTable(title, tuple(head for head, _ in columns), tuple(rows), (line,))


def purity_table(comparison: Comparison) -> PlainTable:
    """Return the final purity of each method's clusters, per seed and mean."""
    mean = _summarised("purity", 1, 2)
    return _seed_table(comparison, "purity", lambda run: run.summary.get("purity"), 2, mean)


def times_table(comparison: Comparison) -> PlainTable:
    """Return each method's time to the target in seconds, per seed and mean."""
    converging = comparison.suite.timing is Timing.CONVERGENCE
    head = TO_CONVERGENCE if converging else TO_TARGET
    return _seed_table(comparison, head, lambda run: run.time, 1, _time)


def _seed_table(
    comparison: Comparison,
    head: str,
    value: Callable[[Run], float | None],
    digits: int,
    mean: _Cell,
) -> PlainTable:
    """Return a table of one measure, with a column per seed and one for all."""

    def cell(result: Result, seed: int) -> str:
        values = {run.seed: value(run) for run in result.runs}
        found = values.get(seed)
        return UNKNOWN if found is None else f"{found:.{digits}f}"

    seeds = comparison.suite.seeds
    return PlainTable(
        f"{comparison.suite.title}: {head}",
        ("method", *(f"seed {seed}" for seed in seeds), head),
        tuple(
            (_name(result), *(cell(result, seed) for seed in seeds), mean(result))
            for result in comparison.results
        ),
        (),
    )


def sweep_table(comparison: Comparison) -> PlainTable | None:
    """Return the trials of swept methods; None without sweeps.

    Accuracies are on the held-out training samples that choose the points.
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
    held_out = f", tested on {suite.validation_fraction:.0%} of the training samples"
    title = f"Swept hyper-parameters (seed {suite.seeds[0]}{length}{held_out})"
    return PlainTable(title, ("method", _head(comparison.measure), "time", ""), rows)


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": "$<$",
        ">": "$>$",
        "|": r"\textbar{}",
        '"': "''",
        **{sign: "\\" + sign for sign in "&%$#_{}"},
        "±": r"$\pm$",
        "×": r"$\times$",
        "−": "$-$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "→": r"$\to$",
        "†": r"$\dagger$",
        "₀": "$_0$",
        **{
            letter: f"$\\{name}$"
            for letter, name in {
                "α": "alpha",
                "β": "beta",
                "γ": "gamma",
                "δ": "delta",
                "ε": "varepsilon",
                "λ": "lambda",
                "μ": "mu",
                "σ": "sigma",
                "τ": "tau",
            }.items()
        },
    }
)
_SEEDS, _LEVEL = 5, 0.05
"""Least number of seeds of a paired test, and its level."""
_ONE_WAY = {
    "purity": ("purity", False),
    "unrest": ("unrest", True),
    "KL": ("mixture_divergence", True),
    "backdoor %": (_BACKDOOR, True),
    **{str(scored): (scored.key, False) for scored in Scored},
}
"""Columns with a best value: the key of a run's summary, and whether the lowest is best."""


def to_latex(comparison: Comparison, table: PlainTable | None = None) -> str:
    """Return a table, by default the main one, as a bare tabular of LaTeX with booktabs.

    It is never wider than a column. The best value of a column is bold if a paired t-test over at
    least five seeds finds it better than that of every other method (p < 0.05 after Bonferroni's
    correction). Columns without values are left out. Special characters in names are escaped.
    """
    found = table or main_table(comparison)
    rows = [[cell.translate(_LATEX) for cell in row] for row in found.rows]
    if table is None:
        for index, head in enumerate(found.columns):
            if (place := best_row(comparison, head)) is not None:
                rows[place][index] = rf"\textbf{{{rows[place][index]}}}"
    kept = [
        index
        for index in range(len(found.columns))
        if any(row[index] not in (UNKNOWN, "") for row in found.rows)
    ]
    heads = [_latex_head(found.columns[index]) for index in kept]
    lines = [
        "% Needs \\usepackage{booktabs,graphicx}; compare-table.tex has a caption and a label.",
        # A paragraph's indentation would shift the table out of the column.
        r"\noindent",
        r"\resizebox{\ifdim\width>\columnwidth\columnwidth\else\width\fi}{!}{%",
        r"\footnotesize\setlength{\tabcolsep}{3pt}%",
        rf"\begin{{tabular}}{{@{{}}l{'r' * (len(heads) - 1)}@{{}}}}",
        r"\toprule",
        f"{' & '.join(heads)} \\\\",
        r"\midrule",
        # A row that starts with "[" or "*" would be parsed as an argument of the line break.
        *(f"{{}}{' & '.join(row[index] for index in kept)} \\\\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}}",
    ]
    return "\n".join(lines) + "\n"


def latex_table(comparison: Comparison, caption: str = "", label: str = "") -> str:
    """Return the main table as a float of LaTeX with its notes.

    Parameters
    ----------
    caption, label : str
        LaTeX of the caption, and the label; by default the title and ``tab:compare``.
    """
    found = main_table(comparison)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption or found.title.translate(_LATEX)}}}",
        rf"\label{{{label or 'tab:compare'}}}",
        to_latex(comparison).rstrip("\n"),
        *(rf"\par\smallskip\footnotesize {line.translate(_LATEX)}" for line in found.lines),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_head(head: str) -> str:
    """Return a heading in lines of their own, with its unit."""
    unit = " (s)" if _is_time(head) else ""
    parts = f"{head}{unit}".replace("acc %", "accuracy\n(%)").replace("time to ", "time to\n")
    lines = [part.translate(_LATEX) for part in parts.split("\n")]
    joined = r" \\ ".join(lines)
    return joined if len(lines) == 1 else rf"\shortstack[r]{{{joined}}}"


def _is_time(head: str) -> bool:
    first, whole = head.partition("\n")[0], head.replace("\n", " ")
    return first == "time" or whole in (TO_TARGET, TO_CONVERGENCE)


def best_row(comparison: Comparison, head: str) -> int | None:
    """Return the row of a column's best value, if a paired test over the seeds confirms it."""
    name, measure = head.removesuffix("\nours"), comparison.measure
    value: Callable[[Run], float | None]
    if name == _head(measure):
        value, is_lowest = attrgetter("accuracy"), measure.is_error
    elif _is_time(name):
        value, is_lowest = attrgetter("time"), True
    elif name in _ONE_WAY:
        key, is_lowest = _ONE_WAY[name]
        value = lambda run: run.summary.get(key)  # noqa: E731
    else:
        return None
    runs = [of.runs for of in comparison.results]
    numbers = others = [{run.seed: value(run) for run in own} for own in runs]
    if _is_time(name):
        # A run that missed the target takes longer than its length.
        others = [
            {run.seed: run.summary["virtual_time"] if run.time is None else run.time for run in own}
            for own in runs
        ]
    for place, own in enumerate(numbers):
        rest = [other for index, other in enumerate(others) if index != place]
        if rest and all(_is_better(own, other, is_lowest, len(rest)) for other in rest):
            return place
    return None


def _is_better(
    own: Mapping[int, float | None],
    other: Mapping[int, float | None],
    is_lowest: bool,
    tests: int,
) -> bool:
    """Return whether values of one method are better by a paired t-test over all seeds."""
    pairs = [(own[seed], other.get(seed)) for seed in own]
    known = [(one, two) for one, two in pairs if one is not None and two is not None]
    if len(known) < max(_SEEDS, len(pairs)):
        return False
    gains = np.array([two - one if is_lowest else one - two for one, two in known])
    if not gains.std():
        return bool(gains[0] > 0)
    return bool(ttest_1samp(gains, 0.0, alternative="greater").pvalue < _LEVEL / tests)


def to_csv(comparison: Comparison) -> str:
    """Return one line per run, trials included."""
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
    # Measures of single methods; values per client or cluster have no single number.
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
    """Return all results, runs included; infinite times are written as "/"."""
    suite = comparison.suite
    content = {
        "title": suite.title,
        "dataset": suite.dataset,
        "settings": {name: value for name, value in suite.settings.items() if name != TRUST},
        "scale": suite.scale,
        **written_values(suite),
        "measure": comparison.measure.name,
        "unit": comparison.measure.unit,
        "target": comparison.target,
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
        "versions": {"raceme": raceme.__version__},
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_WORK = ("bytes_down", "sample_passes")
_SPREADS = ("unrest", "forgetting", "mixture_divergence", "purity", "clusters")


def _entry(comparison: Comparison, result: Result) -> dict[str, Any]:
    method, published = result.method, result.published
    return {
        "label": result.label,
        "variant": method.label,
        "strategy": method.strategy,
        "asynchronous": method.asynchronous,
        "options": dict(method.options),
        comparison.measure.name: asdict(result.accuracy),
        f"time_to_{comparison.suite.timing}": asdict(result.time),
        "traffic": asdict(result.traffic),
        **{key: asdict(result.spread(key)) for key in _SPREADS},
        "scores": {str(scored): asdict(result.spread(scored.key)) for scored in Scored},
        "relative": {key: comparison.relative(result, key) for key in _WORK},
        "ratio_to_best": comparison.ratio(result),
        "time_above": result.time_above,
        "speed_up_of_reference": comparison.speed_up(result),
        "speed_up_of_reference_above": comparison.speed_up_above(result),
        "published_speed_up_of_reference": comparison.published_speed_up(result),
        "published": None if published is None else written_published(published),
        "runs": [{"seed": run.seed, "folder": run.folder, **run.summary} for run in result.runs],
        "errors": {str(seed): error for seed, error in result.errors.items()},
    }


def _name(result: Result) -> str:
    """Return the label with the hyper-parameters chosen by a sweep."""
    return result.label if result.method.label == result.label else result.method.label


def _marked(result: Result) -> str:
    """Return the label, with a mark if the method's runs warned of something."""
    return f"{_name(result)}{WARNED if result.warnings else ''}"


def _percent(spread: Spread, measure: Measure) -> str:
    """Return accuracies in percent or errors in their unit, and the number of runs if not all."""
    text = _spread(spread, 1 if measure.is_error else 100, 2)
    return f"{text} ({spread.count} of {spread.of})" if 0 < spread.count < spread.of else text


def _head(measure: Measure) -> str:
    return measure.label if measure.is_error else "acc %"


def _time(result: Result) -> str:
    spread = result.time
    if spread.of == 0:
        return UNKNOWN
    if result.time_above is None:
        return _spread(spread, 1, 1)
    text = f"> {result.time_above:.1f}"
    return f"{text} ({spread.count} of {spread.of})" if spread.count else text


def _worst_tenth(result: Result) -> str:
    measures = {run.measure for run in result.runs}
    if len(measures) != 1:
        return UNKNOWN
    (measure,) = measures
    factor = 1 if measure.is_error else 100
    return _mean(result.spread(f"worst_tenth_{measure.name}"), 2, factor)


def _mean(spread: Spread, digits: int, factor: float = 1) -> str:
    return UNKNOWN if spread.mean is None else f"{factor * spread.mean:.{digits}f}"


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


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _factor(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"
