"""The numbers of a comparison: spreads, ratios, ranks, bounds and scores, by hand."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from raceme.core.errors import UserError
from raceme.experiments.compare import compare, prepare
from raceme.experiments.jobs import make_jobs
from raceme.experiments.page import times_figure
from raceme.experiments.results import Comparison, Result, Run, Spread, best_of, read_comparison
from raceme.experiments.suites import (
    ComparedMethod,
    Published,
    Score,
    Suite,
    Timing,
    grid,
    load_suite,
    of_names,
)
from raceme.experiments.tables import costs_table, main_table, to_csv, to_json, to_latex
from raceme.reporting.style import method_looks

SETTINGS = {"dataset": "digits", "clients": 8, "max-updates": 24, "lr": 0.1}


def run(suite: Suite, out: Path) -> tuple[Comparison, str]:
    said = io.StringIO()
    comparison = compare(prepare(suite, out), 2, Console(file=said, width=200))
    return comparison, said.getvalue()


def result_of(label: str, times: list[float | None], published: Published | None = None) -> Result:
    runs = [
        Run(seed, f"{label}/seed-{seed}", summary(0.9 + 0.01 * seed, time))
        for seed, time in enumerate(times)
    ]
    rows = () if published is None else (published,)
    return Result(ComparedMethod(label, "casa", published=rows), label, tuple(runs))


def summary(accuracy: float, time: float | None) -> dict[str, object]:
    reached = None if time is None else {"virtual_time": time}
    numbers = {
        **{"accuracy": accuracy, "purity": None, "target": 0.9},
        **{"updates": 100, "virtual_time": 40.0 + 100 * accuracy},
    }
    return {**numbers, "time_to_target": reached}


def test_methods_keep_their_names_in_a_terminal_of_80_columns() -> None:
    published = Published(accuracy=99.5, time=109.53)
    slow = result_of("icfl-async", [196.6, 184.2, 201.9], published)
    fast = result_of("casa", [8.8, 8.6, None], published)
    suite = Suite("Three seeds", (slow.method, fast.method), SETTINGS, (0, 1, 2), reference="casa")
    out = io.StringIO()
    Console(file=out, width=80).print(main_table(Comparison(suite, (slow, fast))).rich())
    lines = out.getvalue().splitlines()
    assert all(head in lines[1] for head in ("× casa", "acc %", "time"))
    assert lines[-2].startswith("icfl-async ")
    assert "194.2 ± 9.1" in lines[-2]
    assert "> 49.8 (2 of 3)" in lines[-1]  # (8.8 + 8.6 + 132) / 3


def test_the_spread_matches_numbers_computed_by_hand() -> None:
    # Mean 4, sample variance (4 + 0 + 4) / 2 = 4.
    assert Spread.over([2.0, 4.0, 6.0]) == Spread(4.0, 2.0, 3, 3)
    assert Spread.over([2.0, None]) == Spread(2.0, 0.0, 1, 2)
    assert Spread.over([None]) == Spread(None, None, 0, 1)


def test_ratios_and_ranks_match_numbers_computed_by_hand() -> None:
    quick = result_of("quick", [2.0, 4.0], Published(99.0, 2.0))
    slow = result_of("slow", [9.0, 9.0], Published(98.0, 20.0))
    partly = result_of("partly", [1.0, None], Published(97.0, math.inf))
    methods = tuple(result.method for result in (quick, slow, partly))
    comparison = Comparison(Suite("t", methods, reference="quick"), (quick, slow, partly))
    assert comparison.ratio(slow) == 3.0  # 9 / mean(2, 4)
    assert comparison.ratio(partly) is None  # one seed missed the target
    assert comparison.speed_up(slow) == 3.0
    assert comparison.published_speed_up(slow) == 10.0
    assert comparison.published_speed_up(partly) is None
    # Both orders are quick, slow, never.
    assert comparison.tau("time") == pytest.approx(1.0)
    # All our accuracies are 0.905: there is no order.
    assert comparison.tau("accuracy") is None
    row = main_table(comparison).rows[2]
    # The second run ended after 131 s: (1 + 131) / 2 = 66, and 66 / mean(2, 4) = 22.
    assert row[3:7] == ("/", "> 66.0 (1 of 2)", "-", "> 22.00×")


def test_a_run_is_compared_with_the_published_row_of_its_own_point() -> None:
    rows = (
        Published(99.50, 12.8, {"k": 4}),
        Published(99.48, 5.61, {"k": 5}),
    )
    ifca = ComparedMethod(
        "ifca", "ifca", sweep=grid({"k": (3, 4, 5), "by-examples": (False, True)})
    )
    ifca = ComparedMethod("ifca", "ifca", sweep=ifca.sweep, published=rows)
    chosen = {variant.label: variant.row for variant in ifca.variants()}
    assert chosen["ifca k=3, by-examples=True"] is None
    assert chosen["ifca k=4, by-examples=False"] == rows[0]
    assert chosen["ifca k=5, by-examples=True"] == rows[1]
    quick = result_of("quick", [1.0], Published(99.0, 6.0))
    for k, tau in ((4, 1.0), (5, -1.0)):
        # Our order has "quick" first; the paper's order is the same with k = 4 only.
        (method,) = (v for v in ifca.variants() if v.label == f"ifca k={k}, by-examples=True")
        slow = Result(method, "ifca", result_of("slow", [9.0]).runs)
        comparison = Comparison(Suite("t", (quick.method, method)), (quick, slow))
        assert comparison.tau("time") == pytest.approx(tau)


def test_times_to_convergence_may_be_what_is_compared() -> None:
    converged = {**summary(0.9, 5.0), "time_to_convergence": {"virtual_time": 30.0}}
    suite = Suite("t", (ComparedMethod("casa", "casa"),), timing=Timing.CONVERGENCE)
    run_ = Run(0, "casa/seed-0", converged, Timing.CONVERGENCE)
    comparison = Comparison(suite, (Result(suite.methods[0], "casa", (run_,)),))
    table = main_table(comparison)
    assert table.title == "t (seed 0, time to convergence)"
    assert table.rows[0][table.columns.index("time to\nconvergence")] == "30.0"
    assert any("last comes within 1 point of its final value" in line for line in table.lines)
    axes = times_figure(comparison).axes[0]
    assert axes.get_title(loc="left") == "Virtual time to convergence"
    assert json.loads(to_json(comparison))["methods"][0]["time_to_convergence"]["mean"] == 30.0


def test_a_comparison_of_honest_clients_is_read_back_with_its_runs_without_attackers(
    tmp_path: Path,
) -> None:
    def scored(label: str, **numbers: object) -> Result:
        run_ = Run(0, label, {**summary(0.5, 9.0), "seed": 0, **numbers}, score=Score.HONEST)
        return Result(ComparedMethod(label, "casa"), label, (run_,))

    reached = {"target": 0.9, "virtual_time": 4.0, "updates": 40}
    attacked = {"honest_accuracy": 0.95, "honest_time_to_target": reached}
    results = (scored("clean"), scored("attacked", **attacked))
    suite = Suite("t", tuple(result.method for result in results), score=Score.HONEST)
    comparison = Comparison(suite, results)
    rows = main_table(comparison).rows
    assert [row[:3] for row in rows] == [("clean", "50.00", "9.0"), ("attacked", "95.00", "4.0")]
    (tmp_path / "compare.json").write_text(to_json(comparison))
    assert main_table(read_comparison(tmp_path)).rows == rows
    lines = [line.split(",") for line in to_csv(comparison).splitlines()]
    assert lines[0][5:7] == ["time_to_target", "honest_accuracy"]
    assert [line[5:7] for line in lines[1:]] == [["9.0", "0.5"], ["4.0", "0.95"]]


def test_a_run_without_an_accuracy_is_counted_and_no_best() -> None:
    def erring(label: str, *errors: float | None) -> Result:
        runs = [
            Run(seed, label, {**summary(0.0, None), "measure": "mae", "mae": error, "unit": "kW"})
            for seed, error in enumerate(errors)
        ]
        return Result(ComparedMethod(label, "fedavg"), label, tuple(runs))

    sound, diverged = erring("sound", 2.0, 2.0, 2.2), erring("diverged", 1.9, None, None)
    comparison = Comparison(Suite("t", (sound.method, diverged.method)), (sound, diverged))
    assert [row[1] for row in main_table(comparison).rows] == ["2.07 ± 0.12", "1.90 (1 of 3)"]
    assert best_of(comparison.results) is sound
    assert r"\textbf" not in to_latex(comparison)


def test_methods_that_warned_are_marked_and_costs_have_a_table_of_their_own() -> None:
    told = {"device_time": 30.0, "bytes_up": 2_500_000, "bytes_down": 5_000_000}
    small, plain = result_of("casa", [1.0, 2.0]), result_of("panicle", [1.0, 2.0])
    runs = tuple(
        replace(run, summary={**run.summary, **told, "warnings": ["too few"]}) for run in small.runs
    )
    suite = Suite("t", (small.method, plain.method), seeds=(0, 1))
    comparison = Comparison(suite, (replace(small, runs=runs), plain))
    table = main_table(comparison)
    assert [row[0] for row in table.rows] == ["casa*", "panicle"]
    assert "* casa: too few" in table.lines
    costs = costs_table(comparison)
    # Runs of 130 and 131 s. Without figures on the work
    # of devices, as of earlier versions, "-" is shown.
    assert costs.rows == (
        ("casa", "90.50 ± 0.71", "130.5 ± 0.7", "30 ± 0", "2.5 ± 0.0", "5.0 ± 0.0", "100"),
        ("panicle", "90.50 ± 0.71", "130.5 ± 0.7", "-", "-", "-", "100"),
    )


def test_the_best_accuracy_by_test_examples_may_be_what_is_compared(tmp_path: Path) -> None:
    def scored(label: str, final: float, best: float, paper: float) -> Result:
        row, numbers = Published(paper), {"best_weighted_accuracy": best, "seed": 0}
        run_ = Run(0, label, {**summary(final, 5.0), **numbers}, score=Score.BEST_WEIGHTED)
        return Result(ComparedMethod(label, "casa", published=(row,)), label, (run_,))

    # By the accuracy at the end the order would be the other way round.
    low, high = scored("low", 0.9, 0.7, 71.0), scored("high", 0.6, 0.8, 79.0)
    suite = Suite("t", (low.method, high.method), score=Score.BEST_WEIGHTED)
    comparison = Comparison(suite, (low, high))
    assert comparison.tau("accuracy") == pytest.approx(1.0)
    assert best_of(comparison.results) is high
    table = main_table(comparison)
    assert table.title == "t (seed 0, target 90.0%, best accuracy by test examples)"
    assert [row[1:3] for row in table.rows] == [("71.00", "70.00"), ("79.00", "80.00")]
    assert any("the client mean weighted by test examples" in line for line in table.lines)
    # The paper reports no times, and the suite has no reference for factors.
    heads = ("method", "acc %\npaper", "acc %\nours", "time\nours", "purity")
    assert table.columns == heads
    assert "accuracy 1.00." in table.lines[0]
    assert not any("unit of its own" in line for line in table.lines)
    # The table read back from the file is the same.
    (tmp_path / "compare.json").write_text(to_json(comparison))
    again = read_comparison(tmp_path)
    assert again.suite.score is Score.BEST_WEIGHTED
    assert main_table(again).rows == table.rows


def test_the_table_shows_unrest_if_that_is_what_a_suite_is_about() -> None:
    runs = tuple(Run(s, "", {**summary(0.9, 5.0), "unrest": 0.01 * (s + 1)}) for s in (0, 1))
    suite = Suite("t", (ComparedMethod("casa", "casa"),), seeds=(0, 1), shows_unrest=True)
    table = main_table(Comparison(suite, (Result(suite.methods[0], "casa", runs),)))
    # Points: mean and sample deviation of 1 and 2.
    assert (table.columns[-1], table.rows[0][-1]) == ("unrest", "1.50 ± 0.71")


def test_the_table_shows_bytes_as_multiples_of_the_reference_s(tmp_path: Path) -> None:
    def runs(up: int, down: int) -> tuple[Run, ...]:
        sent = {"bytes_up": up, "bytes_down": down}
        return tuple(
            Run(seed, "", {**summary(0.9, 5.0), **sent, "bytes_up": up + seed}) for seed in (0, 2)
        )

    plain = ComparedMethod("fedavg", "fedavg", published=(Published(90.0, traffic=1.0),))
    grouped = ComparedMethod("ifca", "ifca", published=(Published(91.0, traffic=5.48),))
    suite = Suite("t", (plain, grouped), {}, (0, 2), reference="fedavg", shows_traffic=True)
    # Means of 20 + 29 and 22 + 29, and of 50 + 74 and 52 + 74.
    results = (Result(plain, "fedavg", runs(20, 29)), Result(grouped, "ifca", runs(50, 74)))
    comparison = Comparison(suite, results)
    table = main_table(comparison)
    assert table.columns[-2:] == ("bytes\npaper", "bytes\nours")
    assert [row[-2:] for row in table.rows] == [("1.00×", "1.00×"), ("5.48×", "2.50×")]
    # The reference is for bytes only, not for times.
    assert not any("× fedavg" in text for text in (*table.columns, *table.lines))
    (tmp_path / "compare.json").write_text(to_json(comparison))
    assert main_table(read_comparison(tmp_path)) == table
    assert not suite.only(["ifca"]).shows_traffic
    with pytest.raises(UserError, match="name one"):
        Suite("t", (plain,), shows_traffic=True)


def test_a_target_that_was_missed_is_bounded_by_the_runs_length() -> None:
    quick = result_of("quick", [2.0, 4.0], Published(99.0, 2.0))
    never = result_of("never", [None, None], Published(97.0, math.inf))
    methods = (quick.method, never.method)
    comparison = Comparison(Suite("t", methods, reference="quick"), (quick, never))
    # The runs ended after 130 and 131 s; 130.5 / mean(2, 4) = 43.5.
    assert (quick.time_above, never.time_above) == (None, 130.5)
    assert comparison.speed_up(never) is None
    assert comparison.speed_up_above(never) == 43.5
    assert comparison.speed_up_above(quick) is None
    table = main_table(comparison)
    assert table.rows[1][3:7] == ("/", "> 130.5", "-", "> 43.50×")
    assert "'>': runs that did not reach the target count with their length." in table.lines
    bars = times_figure(comparison)
    assert [text.get_text() for text in bars.axes[0].texts] == ["not within 130 s"]


def test_a_method_that_missed_the_target_with_one_seed_gets_no_bar() -> None:
    partly = result_of("partly", [1.0, None])
    quick = result_of("quick", [2.0, 4.0])
    suite = Suite("t", (quick.method, partly.method))
    axes = times_figure(Comparison(suite, (quick, partly))).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [3.0]
    assert [text.get_text() for text in axes.texts] == ["not within 131 s with 1 of 2 seeds"]
    assert [list(dots.get_xdata()) for dots in axes.lines] == [[2.0, 4.0], [1.0]]


def test_bars_have_the_colours_of_curves_if_a_method_has_failed() -> None:
    failed, quick = Result(ComparedMethod("a", "casa"), "a", ()), result_of("quick", [2.0, 4.0])
    suite = Suite("t", (failed.method, quick.method))
    axes = times_figure(Comparison(suite, (failed, quick))).axes[0]
    expected = to_rgb(method_looks(["quick"])["quick"][0])
    assert [bar.get_facecolor()[:3] for bar in axes.patches] == [expected]


def test_rounds_without_a_method_that_has_any_are_an_error() -> None:
    with pytest.raises(UserError, match="no method of this comparison has any"):
        of_names(["casa", "fedasync"], {"max-rounds": 3})


def test_a_key_for_rounds_applies_to_methods_with_rounds(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text("rounds = 300\nasync-updates = 900\n[methods.fedavg]\n[methods.fedasync]\n")
    suite = load_suite(path)

    def limits(suite: Suite) -> list[tuple[int, int | None]]:
        configs = (suite.config(method, 0) for method in suite.methods)
        return [(config.max_rounds, config.max_updates) for config in configs]

    assert limits(suite) == [(300, None), (0, 900)]
    assert limits(suite.scaled(0.1)) == [(30, None), (0, 90)]
    assert limits(suite.scaled(0.001)) == [(1, None), (0, 40)]
    assert limits(suite.with_settings({"max-rounds": "5"})) == [(5, None), (0, 900)]
    assert limits(suite.with_settings({"max-updates": 70})) == [(0, 70), (0, 70)]
    assert limits(suite.with_settings({"max-rounds": 0})) == [(0, None), (0, 900)]
    (job, _) = make_jobs(suite, suite.methods, (0,), tmp_path)
    # 40 clients, all of them in each round.
    assert (job.config.max_updates, job.config.planned_updates) == (None, 12000)


def test_a_shortened_suite_reports_it() -> None:
    suite = Suite(
        "t", (ComparedMethod("casa", "casa"),), {"clients": 100}, async_updates=50000
    ).scaled(0.1)
    assert suite.config(suite.methods[0], 0).max_updates == 5000
    # At least one update per client.
    assert suite.scaled(0.001).config(suite.methods[0], 0).max_updates == 100
    table = main_table(Comparison(suite, (result_of("casa", [1.0]),)))
    assert table.lines[0].startswith("SHORTENED: --scale 0.1")
    with pytest.raises(UserError, match="--scale must be above 0 and at most 1"):
        suite.scaled(2)
