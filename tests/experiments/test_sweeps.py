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
from raceme.strategies import FedAsync

SETTINGS = {"dataset": "digits", "clients": 8, "max-updates": 24, "lr": 0.1}


class Slowly(FedAsync):
    """A method of a user's own."""


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


def test_a_given_key_is_not_tried() -> None:
    rows = (Published(80.0, options={"k": 3}), Published(90.0, options={"k": 4}))
    points = grid({"k": (3, 4), "lr": (0.1, 0.2)})
    keys = frozenset({"lr"})
    ifca = ComparedMethod("ifca", "ifca", sweep=points, published=rows, run_keys=keys)
    fedavg = ComparedMethod("fedavg", "fedavg", published=(Published(70.0),))
    suite = Suite("Given", (ifca, fedavg), SETTINGS)
    (method, other) = suite.with_settings({"ifca.k": "4", "clients": 4}).methods
    assert method.sweep == ({"k": 4, "lr": 0.1}, {"k": 4, "lr": 0.2})
    assert method.published == (Published(90.0, options={"k": 4}),)
    assert other == fedavg
    given = suite.with_settings({"ifca.k": 4, "lr": 0.05})
    (only,) = given.methods[0].variants()
    assert (only.label, only.options) == ("ifca k=4, lr=0.05", {"k": 4})
    assert only.settings == {"lr": 0.05}
    assert not given.methods[0].is_swept
    # The paper has no row of this k.
    assert suite.with_settings({"ifca.k": 7}).methods[0].published == ()
    assert suite.with_settings({"clients": 4}).methods == suite.methods
    again, tried = suite.with_settings({"lr": 0.05}).with_sweep({"lr": [0.3, 0.4]}).methods
    assert again.sweep == tried.sweep == ({"lr": 0.3}, {"lr": 0.4})
    assert again.published == ()


def test_a_given_key_is_told_from_a_hyper_parameter_of_its_name() -> None:
    swept = ComparedMethod("csafl", "csafl", sweep=grid({"groups": (2, 4)}))
    suite = Suite("Groups", (swept,), SETTINGS)
    assert suite.with_settings({"groups": "0.5,0.5"}).methods == (swept,)
    (given,) = suite.with_settings({"csafl.groups": 3}).methods
    assert given.sweep == ({"groups": 3},)
    own = f"{__name__}:Slowly"
    suite = Suite("Own", (ComparedMethod("own", own, sweep=grid({"alpha": (0.1, 0.3)})),), SETTINGS)
    (given,) = suite.with_settings({"slowly.alpha": 0.2}).methods
    assert given.sweep == ({"alpha": 0.2},)


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
