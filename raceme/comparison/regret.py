"""Regret: how far each method is from the best one of each case, over several cases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raceme.comparison.results import Comparison
from raceme.comparison.text_table import Text

_NONE = "-"


def regrets(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, float]]:
    """Return by method and case how many points it is below the case's best method.

    Parameters
    ----------
    comparisons : Mapping[str, Comparison]
        Of the same methods, by case. What has no accuracy, or an error instead, is left out.
    """
    found: dict[str, dict[str, float]] = {}
    for case, comparison in comparisons.items():
        if comparison.measure.is_error:
            continue
        means = {result.label: result.accuracy.mean for result in comparison.results}
        known = {label: mean for label, mean in means.items() if mean is not None}
        for label, mean in known.items():
            found.setdefault(label, {})[case] = 100.0 * (max(known.values()) - mean)
    return found


def slowness(comparisons: Mapping[str, Comparison]) -> dict[str, dict[str, float]]:
    """Return by method and case its time to the target over that of the case's fastest method.

    A method that does not reach the target in every run, where another does, takes infinitely long.
    """
    found: dict[str, dict[str, float]] = {}
    for case, comparison in comparisons.items():
        times = {}
        for result in comparison.results:
            time = result.time
            is_whole = time.mean is not None and time.count == time.of
            times[result.label] = time.mean if is_whole and time.mean else np.inf
        if np.isfinite(fastest := min(times.values(), default=np.inf)):
            for label, own in times.items():
                found.setdefault(label, {})[case] = own / fastest
    return found


def regret_table(comparisons: Mapping[str, Comparison]) -> Text:
    """Return the regret of every method on every case, the worst of each in bold."""
    points, ratios = regrets(comparisons), slowness(comparisons)
    cases = [case for case in comparisons if any(case in own for own in points.values())]
    rows = []
    for label, own in points.items():
        worst = max(own.values())
        shown = [_cell(own.get(case), worst) for case in cases]
        fast = [ratio <= 1.0 for ratio in ratios.get(label, {}).values()]
        share = f"{np.mean(fast):.0%}" if fast else _NONE
        mean = f"{np.mean(list(own.values())):.2f}"
        rows.append((label, mean, f"{worst:.2f}", share, *shown))
    return Text(
        "Regret: points below the best method of each case",
        ("method", "mean", "worst", "fastest", *cases),
        tuple(sorted(rows, key=lambda row: float(row[1]))),
        ("fastest: share of the cases in which no method reaches the target sooner.",),
    )


def _cell(value: float | None, worst: float) -> str:
    if value is None:
        return _NONE
    return f"**{value:.2f}**" if value == worst else f"{value:.2f}"
