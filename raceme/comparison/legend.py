"""What a reader of a comparison's table has to know: the lines below it."""

from __future__ import annotations

from raceme.comparison.results import Comparison
from raceme.comparison.suites import Score, Scored, Timing
from raceme.records.convergence import WITHIN

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
