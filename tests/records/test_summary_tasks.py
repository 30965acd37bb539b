"""The matrix of tasks and what follows from it, worked out by hand for three tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from summaries import summarise

from raceme.core.events import ACCURACY, Measure, TaskScore, TasksTested
from raceme.records.summary import TaskAccuracies
from raceme.reporting.console import summary_rows

Scores = dict[int, float]


def reported(
    step: int,
    updates: int,
    clusters: int = 1,
    measure: Measure = ACCURACY,
    untrained: float | None = None,
    **scores: Scores,
) -> TasksTested:
    """Tests after a step; the following step is also tested with the untrained model."""
    per_client = {
        client: {
            on: TaskScore(0, value, untrained if on == step + 1 else None)
            for on, value in of.items()
        }
        for client, of in scores.items()
    }
    return TasksTested(float(updates), updates, step, clusters, per_client, len(scores), measure)


# Means over a and b: after step 0 .8 on 0, .3 on 1; after step 1 .5, .9 and .4; after step 2 .6, .7
# and .95.
RUN = [
    reported(0, 10, 1, untrained=0.1, a={0: 0.9, 1: 0.2}, b={0: 0.7, 1: 0.4}),
    reported(1, 20, 3, untrained=0.2, a={0: 0.5, 1: 0.8, 2: 0.4}, b={0: 0.5, 1: 1.0, 2: 0.4}),
    reported(2, 30, 2, a={0: 0.6, 1: 0.6, 2: 1.0}, b={0: 0.6, 1: 0.8, 2: 0.9}),
]


def test_three_tasks_by_hand() -> None:
    tasks = TaskAccuracies(RUN)
    nan = math.nan
    expected = [[0.8, 0.3, nan], [0.5, 0.9, 0.4], [0.6, 0.7, 0.95]]
    assert np.allclose(tasks.matrix(), expected, equal_nan=True)
    assert np.allclose(tasks.untrained(), [nan, 0.1, 0.2], equal_nan=True)
    result = tasks.result()
    assert result["task_accuracy"][0] == [pytest.approx(0.8), pytest.approx(0.3), None]
    assert result["average_accuracy"] == pytest.approx((0.6 + 0.7 + 0.95) / 3)
    assert result["current_accuracy"] == pytest.approx((0.8 + 0.9 + 0.95) / 3)
    # Task 0 falls from its best accuracy .8 to .6, task 1 from .9 to .7.
    assert result["forgetting"] == pytest.approx((0.2 + 0.2) / 2)
    assert result["backward_transfer"] == pytest.approx((-0.2 - 0.2) / 2)
    # Before training, task 1 has .3 and the untrained model .1; task 2 has .4 and .2.
    assert result["forward_transfer"] == pytest.approx((0.2 + 0.2) / 2)
    assert result["clusters_after_steps"] == [1, 3, 2]


def test_forgetting_counts_from_the_best_and_backward_transfer_from_the_first() -> None:
    run = [
        reported(0, 1, a={0: 0.5}),
        reported(1, 2, a={0: 0.75, 1: 0.5}),
        reported(2, 3, a={0: 0.625, 1: 0.5, 2: 0.5}),
    ]
    result = TaskAccuracies(run).result()
    assert result["forgetting"] == pytest.approx((0.125 + 0.0) / 2)
    assert result["backward_transfer"] == pytest.approx((0.125 + 0.0) / 2)
    assert result["forward_transfer"] is None


def test_clients_that_did_not_test_are_left_out_of_the_means() -> None:
    # b has no data of step 0 any more, and no client was tested after step 1.
    run = [
        reported(0, 1, a={0: 0.5}, b={0: 1.0}),
        reported(2, 3, a={0: 0.25, 1: 0.75, 2: 1.0}, b={1: 0.25, 2: 0.5}),
    ]
    tasks = TaskAccuracies(run)
    result = tasks.result()
    assert result["task_accuracy"] == [[0.75, None, None], [None] * 3, [0.25, 0.5, 0.75]]
    assert result["forgetting"] == result["backward_transfer"] * -1 == 0.5
    assert result["current_accuracy"] == 0.75
    assert result["clusters_after_steps"] == [1, None, 1]


def test_a_repeated_result_replaces_the_earlier_one() -> None:
    # A run that ended in step 1 was extended; c was missing the first time.
    run = [*RUN[:2], reported(1, 25, 2, a={0: 0.1, 1: 0.2}, c={0: 0.3, 1: 0.4})]
    tasks = TaskAccuracies(run)
    assert tasks.matrix()[1] == pytest.approx([0.3, (0.2 + 1.0 + 0.4) / 3])
    assert tasks.clusters == [1, 2]


def test_smaller_errors_are_better_in_the_tasks_summary() -> None:
    run = [
        reported(0, 1, measure=Measure("m"), untrained=8.0, a={0: 2.0, 1: 6.0}),
        reported(1, 2, measure=Measure("m"), a={0: 3.0, 1: 1.0}),
    ]
    result = TaskAccuracies(run).result("mae")
    assert result["task_mae"] == [[2.0, 6.0], [3.0, 1.0]]
    assert (result["average_mae"], result["current_mae"]) == (2.0, 1.5)
    assert (result["forgetting"], result["backward_transfer"]) == (1.0, -1.0)
    assert result["forward_transfer"] == 2.0


def test_a_single_task_has_nothing_to_forget() -> None:
    result = TaskAccuracies([reported(0, 1, a={0: 0.5})]).result()
    assert (result["task_accuracy"], result["average_accuracy"]) == ([[0.5]], 0.5)
    assert {result[k] for k in ("forgetting", "backward_transfer", "forward_transfer")} == {None}


def summary_of(run: list[TasksTested]) -> dict[str, Any]:
    return summarise(run, strategy="casa", dataset="digits", seed=0, wall_time=1.0)


def test_the_summary_has_the_numbers_and_none_of_a_run_without() -> None:
    summary, without = summary_of(RUN), summary_of([])
    numbers = TaskAccuracies(RUN).result()
    assert {key: summary[key] for key in numbers} == numbers
    assert {without[key] for key in numbers} == {None}
    rows = dict(summary_rows(summary))
    assert rows["tasks"] == "0.750, mean over all 3 at the end; forgotten 0.200"
    assert "tasks" not in dict(summary_rows(without))
