"""What drift did to a run, as tables of its page: accuracy before and after it."""

from __future__ import annotations

import math

import numpy as np

from raceme.records.record import Flags, Floats, Integers, RunRecord
from raceme.reporting.marks import Drift, drifts
from raceme.reporting.page import PageTable, number

_MOST_DRIFTS = 50
_MOST_STEPS = 50


def drifts_table(record: RunRecord) -> PageTable | None:
    """Return for each moment of drift the accuracy before and after, and when it was back.

    The accuracy is that of the clients whose data changed. None if no data changed, or at more
    moments than a table can show; then see :func:`steps_table`.
    """
    found = drifts(record.data_changes)
    if not 0 < len(found) <= _MOST_DRIFTS:
        return None
    untils = [*(drift.time for drift in found[1:]), math.inf]
    rows = tuple(_row(record, drift, until) for drift, until in zip(found, untils, strict=True))
    heads = (
        "time (s)",
        "updates",
        "whose data",
        "step",
        f"{record.measure.word} before",
        "after",
        "back after (s)",
    )
    title = f"{len(found)} change{'' if len(found) == 1 else 's'} of the clients' data"
    return PageTable(title, heads, rows, words=(2,))


def steps_table(record: RunRecord) -> PageTable | None:
    """Return what was trained and found on each step of the data; None if no data changed."""
    if not record.data_changes:
        return None
    trained, found = record.updates.step, record.client_evaluations
    steps = np.unique(np.concatenate([trained, found.step]))
    rows = []
    for step in steps[:_MOST_STEPS]:
        tested = found.accuracy[found.step == step]
        rows.append(
            (
                number(int(step)),
                number(int(np.count_nonzero(trained == step))),
                number(len(tested)),
                number(float(tested.mean()) if len(tested) else None),
            )
        )
    more = f", the first {_MOST_STEPS} of {len(steps)}" if len(rows) < len(steps) else ""
    heads = ("step", "updates trained on it", "tests on it", f"mean {record.measure.word} of these")
    return PageTable(f"Steps of the data{more}", heads, tuple(rows), words=())


def _row(record: RunRecord, drift: Drift, until: float) -> tuple[str, ...]:
    """Return a drift's row; the next one is at the time `until`."""
    found = record.client_evaluations
    affected = np.ones(len(found.client), np.bool_)
    if drift.clients is not None:
        affected = np.isin(found.client, sorted(drift.clients))
    # By the step and not by the time: on real devices an evaluation takes a while.
    reached = found.step >= drift.steps[0]
    count = len(record.evaluations.time)
    old = _means(found.evaluation, found.accuracy, affected & ~reached, count)
    new = _means(found.evaluation, found.accuracy, affected & reached, count)
    before = float(old[np.isfinite(old)][-1]) if np.isfinite(old).any() else None
    after = float(new[np.isfinite(new)][0]) if np.isfinite(new).any() else None
    back = "–"
    if before is not None and after is not None:
        times = record.evaluations.time
        recovered = new <= before if record.measure.is_error else new >= before
        there = np.flatnonzero(recovered & (times < until))
        back = number(max(0.0, float(times[there[0]] - drift.time)), 1) if len(there) else "not"
    return (
        number(float(drift.time), 2),
        number(drift.updates),
        drift.who,
        drift.step,
        number(before),
        number(after),
        back,
    )


def _means(evaluation: Integers, accuracy: Floats, chosen: Flags, count: int) -> Floats:
    """Return the mean accuracy of the chosen rows at each evaluation; NaN where there are none."""
    tests = np.bincount(evaluation[chosen], minlength=count)
    total = np.bincount(evaluation[chosen], weights=accuracy[chosen], minlength=count)
    return np.where(tests > 0, total / np.maximum(tests, 1), np.nan)
