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
    """Return the regret on every case of every method, the worst of each in bold."""
    points, ratios = regrets(comparisons), slowness(comparisons)
    labels = sorted(points, key=lambda label: float(np.mean(list(points[label].values()))))
    worst = {label: max(points[label].values()) for label in labels}
    rows = [
        (case, *(_cell(points[label].get(case), worst[label]) for label in labels))
        for case in comparisons
        if any(case in own for own in points.values())
    ]
    means = (f"{np.mean(list(points[label].values())):.2f}" for label in labels)
    fastest = ([ratio <= 1.0 for ratio in ratios.get(label, {}).values()] for label in labels)
    rows += [
        ("mean", *means),
        ("worst", *(f"{worst[label]:.2f}" for label in labels)),
        ("fastest", *(f"{np.mean(fast):.0%}" if fast else _NONE for fast in fastest)),
    ]
    return Text(
        "Regret: points below the best method of each case",
        ("case", *labels),
        tuple(rows),
        ("fastest: share of the cases in which no method reaches the target sooner.",),
    )


def _cell(value: float | None, worst: float) -> str:
    if value is None:
        return _NONE
    return f"**{value:.2f}**" if value == worst else f"{value:.2f}"
