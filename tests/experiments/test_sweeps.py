"""Sweeps: points are tried on the first seed, and the best one runs on all."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from raceme.core.config import read_toml
from raceme.experiments.compare import compare, prepare
from raceme.experiments.results import Comparison, best_of
from raceme.experiments.suites import ComparedMethod, Published, Suite, grid
from raceme.experiments.tables import main_table

SETTINGS = {"dataset": "digits", "clients": 8, "max-updates": 24, "lr": 0.1}


def run(suite: Suite, out: Path) -> tuple[Comparison, str]:
    said = io.StringIO()
    comparison = compare(prepare(suite, out), 2, Console(file=said, width=200))
    return comparison, said.getvalue()


@pytest.mark.parametrize("sweep_scale", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_sweep_is_tried_on_the_first_seed_and_its_best_runs_on_all(
    tmp_path: Path, sweep_scale: float
) -> None:
    row = Published(accuracy=97.46, time=109.53)
    points = grid({"alpha": (0.001, 0.5)})
    swept = ComparedMethod("fedasync", "fedasync", sweep=points, published=(row,))
    suite = Suite("Sweep", (swept,), SETTINGS, (0, 1), sweep_scale=sweep_scale)
    comparison, _ = run(suite, tmp_path)
    (result,) = comparison.results
    tried = comparison.sweeps["fedasync"]
    assert [point.method.options["alpha"] for point in tried] == [0.001, 0.5]
    assert [len(point.runs) for point in tried] == [1, 1]
    assert result.method == best_of(tried).method
    main = main_table(comparison)
    assert (main.rows[0][1], main.rows[0][3]) == ("97.46", "109.53")
    assert any(line.endswith("point: fedasync.") for line in main.lines)
    assert [run.seed for run in result.runs] == [0, 1]
    length = result.runs[0].summary["updates"]
    assert {run.summary["updates"] for run in result.runs} == {length}
    assert {point.runs[0].summary["updates"] for point in tried} == {length * sweep_scale}
    trials = sorted(tmp_path.glob("*/validation-*/config.toml"))
    whole = sorted(tmp_path.glob("*/seed-*/config.toml"))
    assert (len(trials), len(whole)) == (2, 2)
    # No point is chosen on the test samples of a seed that is reported.
    assert {read_toml(path)["validation-fraction"] for path in trials} == {0.2}
    assert {read_toml(path)["validation-fraction"] for path in whole} == {0.0}
    _, said = run(suite, tmp_path)
    assert said.count("already finished, kept") == 4


@pytest.mark.slow
@pytest.mark.parametrize("sweep_scale", [1.0, 0.5])
def test_a_sweep_of_one_point_is_that_point_on_all_seeds(
    tmp_path: Path, sweep_scale: float
) -> None:
    single = ComparedMethod("fedasync", "fedasync", sweep=grid({"alpha": (0.5,)}))
    suite = Suite("One", (single,), SETTINGS, (0, 1), sweep_scale=sweep_scale)
    comparison, _ = run(suite, tmp_path)
    (result,) = comparison.results
    assert [run.seed for run in result.runs] == [0, 1]
    assert result.method.options == {"alpha": 0.5}
    assert {run.summary["updates"] for run in result.runs} == {24}
    assert comparison.sweeps == {}
    assert not list(tmp_path.glob("*/validation-*"))
