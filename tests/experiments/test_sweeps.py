"""Sweeps: points are tried on the first seed, and the best one runs on all."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from runs_here import run_all

from raceme.core.config import read_toml
from raceme.core.errors import UserError
from raceme.experiments.compare import compare, prepare
from raceme.experiments.results import Comparison, best_of
from raceme.experiments.suites import ComparedMethod, Published, Suite, grid, of_names, read_sweep
from raceme.experiments.tables import main_table
from raceme.records.record import read_run

SETTINGS = {"dataset": "digits", "clients": 8, "max-updates": 24, "lr": 0.1}


def run(suite: Suite, out: Path) -> tuple[Comparison, str]:
    said = io.StringIO()
    comparison = compare(prepare(suite, out), 2, Console(file=said, width=200))
    return comparison, said.getvalue()


def run_here(suite: Suite, out: Path) -> Comparison:
    """Run a suite in this process."""
    return compare(prepare(suite, out), 1, Console(quiet=True), run_all)


@pytest.mark.parametrize("sweep_scale", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_sweep_is_tried_on_the_first_seed_and_its_best_runs_on_all(
    tmp_path: Path, sweep_scale: float
) -> None:
    row = Published(accuracy=97.46, time=109.53)
    points = grid({"alpha": (0.001, 0.5)})
    swept = ComparedMethod("fedasync", "fedasync", sweep=points, published=(row,))
    suite = Suite("Sweep", (swept,), SETTINGS, (0, 1), sweep_scale=sweep_scale)
    comparison = run_here(suite, tmp_path)
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
    # Points are chosen on validation samples, never on test samples of a reported seed.
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


def test_keys_are_swept_for_the_methods_that_have_them(tmp_path: Path) -> None:
    suite = of_names(["fedasync", "fedavg"], {**SETTINGS, "max-updates": 8, "clients": 4})
    suite = suite.with_sweep(read_sweep(["lr=0.1,1e-6", "alpha=0.5"]))
    assert [method.sweep for method in suite.methods] == [
        ({"lr": 0.1, "alpha": 0.5}, {"lr": 1e-6, "alpha": 0.5}),
        ({"lr": 0.1}, {"lr": 1e-6}),
    ]
    dotted = of_names(["fedasync"], SETTINGS).with_sweep({"fedasync.alpha": [0.1, 0.2]})
    (method,) = dotted.methods
    assert [point.options for point in method.variants()] == [{"alpha": 0.1}, {"alpha": 0.2}]
    comparison = run_here(suite, tmp_path)
    assert [row[0] for row in main_table(comparison).rows] == [
        "fedasync lr=0.1, alpha=0.5",
        "fedavg lr=0.1",
    ]
    trial, best = (
        read_toml(tmp_path / "fedavg-lr=0.1" / name / "config.toml")
        for name in ("validation-0", "seed-0")
    )
    assert (trial["lr"], trial["validation-fraction"]) == (0.1, 0.2)
    assert (best["lr"], best["validation-fraction"]) == (0.1, 0.0)
    with pytest.raises(UserError, match="Unknown key 'gama'"):
        prepare(suite.with_sweep({"gama": [1, 2]}), tmp_path / "other")


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=0.1,,0.2", "=1"])
def test_a_sweep_needs_a_key_and_values(text: str) -> None:
    with pytest.raises(UserError, match=f"--sweep takes KEY=VALUE,VALUE.* got '{text}'"):
        read_sweep([text])


@pytest.mark.parametrize(
    ("budget", "measure", "least"),
    [("time=40s", "virtual_time", 40.0), ("updates=16", "updates", 16), ("compute=90s", "", 90.0)],
)
def test_a_budget_is_the_same_for_all_methods(
    budget: str, measure: str, least: float, tmp_path: Path
) -> None:
    suite = of_names(["fedasync", "fedavg"], SETTINGS).with_budget(budget)
    comparison = run_here(suite, tmp_path)
    for result in comparison.results:
        (done,) = result.runs
        updates = read_run(tmp_path / done.folder).updates
        spent = (updates.time - updates.dispatched_at).sum()
        reached = done.summary[measure] if measure else spent
        # A round may exceed the limit by the updates that are aggregated together.
        assert least <= reached < 1.6 * least
    assert read_toml(tmp_path / "fedavg" / "seed-0" / "config.toml")["max-rounds"] == 0


@pytest.mark.parametrize(
    "budget", ["time", "time=", "updates=0", "updates=1.5", "time=soon", "x=1"]
)
def test_a_budget_is_one_positive_number(budget: str) -> None:
    with pytest.raises(UserError, match=r"budget|max-|number"):
        of_names(["fedasync"], SETTINGS).with_budget(budget)
