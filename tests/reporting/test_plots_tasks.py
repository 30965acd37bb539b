"""Tests on all tasks, from a run on the digits to its plot and page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from summaries import summarise

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import (
    ClientJoined,
    Evaluated,
    Event,
    Measure,
    RunEnded,
    TaskScore,
    TasksTested,
)
from raceme.records.record import RunRecord, read_run
from raceme.records.store import read_events
from raceme.records.summary import TaskAccuracies
from raceme.reporting.plots import means_over_time, tasks_figure
from raceme.reporting.run_page import learnt_table, run_page, tasks_table
from raceme.runs.experiment import (
    build_grid,
    build_strategy,
    plan,
    resolve,
    simulate,
    training_settings,
)
from raceme.training import models

pytestmark = pytest.mark.pictures


def reported(step: int, *values: float, clusters: int = 1, unit: str | None = None) -> TasksTested:
    scores = {
        on: TaskScore(0, value, value / 2 if on == step + 1 else None)
        for on, value in enumerate(values)
    }
    return TasksTested(float(step), step, step, clusters, {"a": scores}, 1, Measure(unit))


RUN = [
    reported(0, 0.8, 0.3),
    reported(1, 0.5, 0.9, 0.4, clusters=3),
    reported(2, 0.6, 0.7, 0.95, clusters=2),
]


def test_the_map_has_a_column_for_each_step_and_a_row_for_each_task() -> None:
    axes, means, clusters = tasks_figure(RunRecord.of(RUN)).axes[:3]
    drawn = np.ma.filled(axes.images[0].get_array(), np.nan)
    expected = [[0.8, 0.5, 0.6], [0.3, 0.9, 0.7], [np.nan, 0.4, 0.95]]
    assert np.allclose(drawn, expected, equal_nan=True)
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {
        **{(0, 0): "80", (0, 1): "30"},
        **{(1, 0): "50", (1, 1): "90", (1, 2): "40"},
        **{(2, 0): "60", (2, 1): "70", (2, 2): "95"},
    }
    frames = [patch.get_xy() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert frames == [(-0.5, -0.5), (0.5, 0.5), (1.5, 1.5)]
    curves = {str(line.get_label()): line.get_xydata().tolist() for line in means.lines}
    assert curves == {
        "task of the step": [[0, 0.8], [1, 0.9], [2, 0.95]],
        "mean of all so far": [[0, 0.8], [1, 0.7], [2, pytest.approx(0.75)]],
        "next task": [[0, 0.3], [1, 0.4]],
        "next task, untrained": [[0, 0.15], [1, 0.2]],
    }
    assert list(clusters.lines[0].get_ydata()) == [1, 3, 2]


def test_errors_are_drawn_up_to_the_largest() -> None:
    run = [reported(0, 20.0, 60.0, unit="m"), reported(1, 30.0, 10.0, unit="m")]
    axes = tasks_figure(RunRecord.of(run)).axes[0]
    assert axes.images[0].get_clim() == (0.0, 60.0)
    assert axes.get_title(loc="left") == "Mean absolute error on each task"
    assert "60" in {text.get_text() for text in axes.texts}


def test_steps_that_were_not_tested_leave_gaps() -> None:
    run = [reported(0, 0.5, 0.25), reported(3, 0.5, 0.5, 0.5, 1.0)]
    axes, means = tasks_figure(RunRecord.of(run)).axes[:2]
    assert len([patch for patch in axes.patches if isinstance(patch, Rectangle)]) == 2
    found = means_over_time(TaskAccuracies(run))["mean of all so far"]
    assert np.allclose(found, [0.5, np.nan, np.nan, 0.625], equal_nan=True)
    curve = next(line for line in means.lines if line.get_label() == "mean of all so far")
    assert curve.get_xydata().tolist() == [[0, 0.5], [3, 0.625]]


def test_many_tasks_have_no_numbers_in_their_cells() -> None:
    run = [reported(step, *[0.5] * (step + 1)) for step in range(13)]
    assert len(tasks_figure(RunRecord.of(run)).axes[0].texts) == 0


def test_a_run_without_tests_reports_it() -> None:
    (axes,) = tasks_figure(RunRecord.of([RunEnded(1.0, 0, "so")])).axes
    assert axes.texts[-1].get_text() == "no tests on former tasks"


def test_the_tables_have_the_matrix_and_what_follows() -> None:
    summary = summarise(RUN, strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    matrix, learnt = tasks_table(summary), learnt_table(summary)
    assert matrix is not None
    assert matrix.rows == (
        ("after step 0", "0.800", "0.300", "–", "1"),
        ("after step 1", "0.500", "0.900", "0.400", "3"),
        ("after step 2", "0.600", "0.700", "0.950", "2"),
    )
    assert learnt is not None
    assert [row[:2] for row in learnt.rows] == [
        ("average accuracy", "0.750"),
        ("current accuracy", "0.883"),
        ("forgetting", "0.200"),
        ("backward transfer", "-0.200"),
        ("forward transfer", "0.175"),
    ]
    without = summarise([], strategy="casa", dataset="digits", seed=0, wall_time=1.0)
    # Summaries without task results, as of earlier versions.
    for other in (without, {"measure": "accuracy"}):
        assert tasks_table(other) is learnt_table(other) is None


def events_of(config: RunConfig) -> list[Event]:
    """Return the events of a run, without writing files."""
    config, seen = resolve(config), []
    build_strategy(config).run(
        build_grid(config),
        models.initial_arrays(config),
        40,
        train_config=training_settings(config),
        plan=plan(config),
        observe=seen.append,
    )
    return seen


def test_a_run_on_the_digits(tmp_path: Path) -> None:
    given = {"dataset": "digits", "partition": "iid", "drift": "tasks", "strategy": "fedavg"}
    given["model"] = "mclr"
    steps = {"tasks-count": 2, "drift-at": "every 10 updates", "clients": 5, "max-updates": 40}
    config = RunConfig.from_mapping({**given, **steps, "eval-every": 10, "workers": "0"})
    summary = simulate(config.with_values(out=str(tmp_path), eval_tasks=True)).summary
    found = read_events(tmp_path)
    # Testing changes no other event. Node ids and devices' clocks are not stored.
    plain = [
        replace(event, node_id=0) if isinstance(event, ClientJoined) else event
        for event in events_of(config)
    ]
    assert [event for event in found if not isinstance(event, TasksTested)] == plain
    told = [event for event in found if isinstance(event, TasksTested)]
    assert [(event.updates, event.step) for event in told] == [(10 * n + 10, n) for n in range(4)]
    assert {len(event.per_client) for event in told} == {5}
    # The third task is the first one again, so that their test results are equal.
    matrix = np.array(summary["task_accuracy"], float)
    assert matrix.shape == (4, 4)
    assert (matrix[3, 0], matrix[3, 1]) == (matrix[3, 2], matrix[3, 3])
    assert np.isnan(matrix[0]).tolist() == [False, False, True, True]
    assert summary["current_accuracy"] == pytest.approx(np.diagonal(matrix).mean())
    assert summary["average_accuracy"] == pytest.approx(matrix[-1].mean())
    # An evaluation at the same time, of the same models, uses the data of the next step.
    evaluated = [event.accuracy for event in found if isinstance(event, Evaluated)]
    assert evaluated[1:4] == pytest.approx(list(np.diagonal(matrix, 1)))
    tasks = read_run(tmp_path).summary.tasks
    assert np.array_equal(tasks.matrix(), matrix, equal_nan=True)
    assert (tmp_path / "tasks.png").is_file()
    page = run_page(tmp_path, "")
    assert 'id="tasks"' in page
    assert "backward transfer" in page
    assert f"{summary['forgetting']:.3f}" in page


def test_it_needs_data_that_change() -> None:
    with pytest.raises(UserError, match="eval-tasks needs a drift"):
        build_strategy(resolve(RunConfig().with_values(eval_tasks=True)))
