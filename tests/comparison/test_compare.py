"""Comparisons: the same conditions for all, nothing finished lost or redone, the numbers right."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from raceme.cli import app
from raceme.comparison.compare import compare, prepare
from raceme.comparison.figures import times_figure
from raceme.comparison.jobs import make_jobs
from raceme.comparison.read import read_comparison
from raceme.comparison.results import Comparison, Result, Run, Spread, best_of
from raceme.comparison.suite_file import load_suite
from raceme.comparison.suites import Method, Published, Score, Suite, Timing, grid, of_names
from raceme.comparison.table import main_table, to_json
from raceme.config import read_toml
from raceme.config.errors import UserError
from raceme.experiment import simulate
from raceme.protocol.events import Ending, Event, RunEnded, UpdateApplied
from raceme.records.summary import summarise, write_summary

SETTINGS = {"dataset": "digits", "clients": 8, "max-updates": 24, "lr": 0.1}
METHODS = ("casa", "fedasync", "fedavg")


def small_suite(*methods: str, seeds: tuple[int, ...] = (0, 1)) -> Suite:
    suite = of_names(methods or METHODS, SETTINGS)
    return Suite(suite.title, suite.methods, suite.settings, seeds)


def run(suite: Suite, out: Path) -> tuple[Comparison, str]:
    said = io.StringIO()
    comparison = compare(prepare(suite, out), 2, Console(file=said, width=200))
    return comparison, said.getvalue()


def dump(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "run.sqlite") as connection:
        return list(connection.iterdump())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison")
    run(small_suite(), out)
    return out


def test_a_comparison_leaves_tables_plots_and_all_runs(finished: Path) -> None:
    for name in ("accuracy.png", "time-to-target.png", "staleness.png", "purity.png"):
        assert (finished / name).stat().st_size > 1000
    content = json.loads((finished / "compare.json").read_text())
    assert [entry["label"] for entry in content["methods"]] == list(METHODS)
    for entry in content["methods"]:
        assert [run["seed"] for run in entry["runs"]] == [0, 1]
        accuracies = [run["accuracy"] for run in entry["runs"]]
        assert entry["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
        assert all((finished / run["folder"] / "run.sqlite").is_file() for run in entry["runs"])
    rows = list(csv.DictReader((finished / "compare.csv").open()))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (method, seed) for method in METHODS for seed in ("0", "1")
    ]


def test_methods_of_a_seed_differ_in_nothing_but_the_method(finished: Path) -> None:
    for seed in (0, 1):
        shared = []
        for method in METHODS:
            keys = read_toml(finished / method / f"seed-{seed}" / "config.toml")
            assert keys.pop("strategy") == method
            assert keys["stop-at-target"] is False
            shared.append({name: value for name, value in keys.items() if "." not in name})
        assert shared[0] == shared[1] == shared[2]
        assert shared[0]["seed"] == seed


def test_a_run_is_the_same_alone_and_in_a_comparison(finished: Path, tmp_path: Path) -> None:
    (job,) = make_jobs(small_suite("casa"), small_suite("casa").methods, (1,), tmp_path)
    simulate(job.config)
    assert dump(job.folder) == dump(finished / "casa" / "seed-1")


def test_only_what_is_unfinished_is_done_again(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "fedasync" / "seed-1" / "summary.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/summary.json")}
    _, said = run(small_suite(), out)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "fedasync, seed 1: half-written, removed and done again" in said
    assert "casa, seed 0: finished before, kept" in said
    assert "[6/6] fedasync, seed 1: accuracy" in said
    assert dump(out / "fedasync" / "seed-1") == dump(finished / "fedasync" / "seed-1")


@pytest.mark.parametrize("method", ["casa", "fedavg"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    finished: Path, tmp_path: Path, method: str
) -> None:
    suite = small_suite(method, seeds=(1,))
    (job,) = make_jobs(suite, suite.methods, (1,), tmp_path)
    updates = 0

    def count(event: Event) -> None:
        nonlocal updates
        updates += isinstance(event, UpdateApplied)

    # What a kill leaves: a checkpoint, results of later on, and no summary.
    kept = job.config.with_values(checkpoint_every=8)
    simulate(kept, count, stop=lambda: "killed" if updates >= 20 else "")
    newest = max((job.folder / "checkpoint").iterdir())
    newest.unlink()
    (job.folder / "summary.json").unlink()
    log = job.folder / "run.log"
    log.unlink()

    _, said = run(suite, tmp_path)

    assert f"{method}, seed 1: half-done, resumed from its last checkpoint" in said
    assert "Resuming from" in log.read_text()
    assert dump(job.folder) == dump(finished / method / "seed-1")
    assert not (job.folder / "checkpoint").exists()
    assert not (finished / method / "seed-1" / "checkpoint").exists()


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    suite = small_suite("fedasync", seeds=(0,))
    (job,) = make_jobs(suite, suite.methods, (0,), tmp_path)
    simulate(job.config.with_values(lr=0.2, checkpoint_every=8))
    (job.folder / "summary.json").unlink()
    _, said = run(suite, tmp_path)
    assert "fedasync, seed 0: half-written, removed and done again" in said
    assert read_toml(job.folder / "config.toml")["lr"] == 0.1


def test_checkpoints_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    run(small_suite("fedasync", seeds=(0,)).with_settings({"checkpoint-every": 8}), tmp_path)
    assert len(list((tmp_path / "fedasync" / "seed-0" / "checkpoint").iterdir())) == 2


def test_a_finished_run_of_another_configuration_is_not_touched(finished: Path) -> None:
    other = small_suite().with_settings({"batch-size": 5})
    with pytest.raises(UserError, match=r"finished run with batch-size = 10, wanted is 5"):
        prepare(other, finished)
    assert (finished / "casa" / "seed-0" / "summary.json").is_file()


def test_results_that_moved_without_their_events_are_still_results(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "copy"
    for path in finished.glob("*/*/*"):
        if path.name in ("config.toml", "summary.json"):
            (out / path.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, out / path.relative_to(finished))
    elsewhere = small_suite().with_settings({"data-root": str(tmp_path)})
    comparison, said = run(elsewhere, out)
    assert said.count("finished before, kept") == 6
    assert "casa is not in the plots over time: its events cannot be read" in caplog.text
    assert not (out / "accuracy.png").exists()
    assert (out / "time-to-target.png").is_file()
    again, _ = run(small_suite(), finished)
    assert main_table(comparison) == main_table(again)


def test_a_folder_that_is_no_run_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "casa" / "seed-0" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("words")
    with pytest.raises(UserError, match="is no run"):
        prepare(small_suite("casa"), tmp_path)
    assert precious.is_file()


def test_a_run_that_fails_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    # Nothing can be written into the folder of fedavg: it is a file.
    (tmp_path / "fedavg").write_text("")
    comparison, said = run(small_suite("fedavg", "fedasync", seeds=(0,)), tmp_path)
    failed, fine = comparison.results
    assert failed.errors[0].startswith("Cannot write to")
    assert "fedavg, seed 0: FAILED: Cannot write to" in said
    assert fine.accuracy.count == 1
    assert any("FAILED" in line for line in main_table(comparison).lines)


@pytest.mark.parametrize("sweep_scale", [1.0, 0.5])
def test_a_sweep_is_tried_on_the_first_seed_and_its_best_runs_on_all(
    tmp_path: Path, sweep_scale: float
) -> None:
    row = Published(accuracy=97.46, time=109.53)
    points = grid({"alpha": (0.001, 0.5)})
    swept = Method("fedasync", "fedasync", sweep=points, published=(row,))
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
    assert said.count("finished before, kept") == 4


@pytest.mark.parametrize("sweep_scale", [1.0, 0.5])
def test_a_sweep_of_one_point_is_that_point_on_all_seeds(
    tmp_path: Path, sweep_scale: float
) -> None:
    single = Method("fedasync", "fedasync", sweep=grid({"alpha": (0.5,)}))
    suite = Suite("One", (single,), SETTINGS, (0, 1), sweep_scale=sweep_scale)
    comparison, _ = run(suite, tmp_path)
    (result,) = comparison.results
    assert [run.seed for run in result.runs] == [0, 1]
    assert result.method.options == {"alpha": 0.5}
    assert {run.summary["updates"] for run in result.runs} == {24}
    assert comparison.sweeps == {}
    assert not list(tmp_path.glob("*/validation-*"))


def test_a_run_without_clients_is_not_a_finished_one(tmp_path: Path) -> None:
    profile = tmp_path / "gone.toml"
    profile.write_text("[device]\nseconds-per-round = 1.0\nonline = [[0.0, 2.5]]\n")
    suite = small_suite("fedasync", seeds=(0,)).with_settings({"devices": str(profile)})
    _, said = run(suite, tmp_path / "out")
    assert "fedasync, seed 0: FAILED: it ended early: all clients are gone" in said


@pytest.mark.parametrize(
    ("ending", "finished"),
    [
        (Ending.LIMIT, True),
        (Ending.TARGET, True),
        (Ending.INTERRUPTED, False),
        (Ending.NO_CLIENTS, False),
        (Ending.USELESS_REPLIES, False),
    ],
)
def test_a_run_is_finished_if_it_did_what_it_was_to_do(
    tmp_path: Path, ending: Ending, finished: bool
) -> None:
    suite = small_suite("casa")
    (job,) = make_jobs(suite, suite.methods, (0,), tmp_path)
    job.folder.mkdir(parents=True)
    ended = summarise(
        [RunEnded(24.0, 24, "whatever", ending)],
        **{"strategy": "casa", "dataset": "digits", "seed": 0, "wall_time": 1.0},
    )
    write_summary(job.folder / "summary.json", ended)
    assert (job.summary() is not None) is finished


@pytest.mark.parametrize(("updates", "finished"), [(24, True), (23, False)])
def test_results_of_earlier_versions_are_finished_if_they_are_long_enough(
    tmp_path: Path, updates: int, finished: bool
) -> None:
    suite = small_suite("casa")
    (job,) = make_jobs(suite, suite.methods, (0,), tmp_path)
    job.folder.mkdir(parents=True)
    text = json.dumps({"reason": "in words", "updates": updates, "virtual_time": 9.0})
    (job.folder / "summary.json").write_text(text)
    assert (job.summary() is not None) is finished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sedes = [1]\n[methods.casa]",
            "Unknown key of the suite .* 'sedes'. Did you mean 'seeds'",
        ),
        ("[methods.casa]\noption = {}", "'option'. Did you mean 'options'"),
        ("[methods.cassa]", "Unknown strategy 'cassa'. Did you mean 'casa'"),
        ("[settings]\ndatset = 'digits'\n[methods.casa]", "Did you mean 'dataset'"),
        ("[methods.casa.options]\ngama = 1", "Unknown key 'casa.gama'. Did you mean 'casa.gamma'"),
        ("[methods.casa]\n[settings]\nseed = 1", r"'seed' does not belong in settings"),
        ("[methods.casa]\n[settings]\nstop-at-target = true", "the target is recorded"),
        ("[methods.casa]\npublished = {accuracy = 'high'}", "must be a number"),
        (
            "[methods.ifca]\nsweep = {k = [3, 4]}\npublished = [{k = 5, accuracy = 99.48}]",
            "Numbers of ifca are published for k=5, which is not run: add it to the sweep",
        ),
        (
            "[methods.ifca]\nsweep = {k = [3, 4]}\n"
            "published = [{accuracy = 1}, {k = 3, accuracy = 2}]",
            "ifca has two published rows for k=3",
        ),
        (
            "[methods.ifca]\nsweep = [{k = 3}, {k = 4, choosing-cost = 0.1}]",
            "points of methods.ifca.sweep .* the same keys",
        ),
        ("timing = 'targets'\n[methods.casa]", "Did you mean 'target'"),
        ("score = 'best'\n[methods.casa]", "Unknown score .* 'best'. Valid: best-weighted, final"),
        ("shows-unrest = 1\n[methods.casa]", "must be true or false"),
        ("validation-fraction = 0\n[methods.casa]", "must be above 0 and below 1, got 0"),
        (
            "[methods.casa]\n[settings]\nvalidation-fraction = 0.1",
            "'validation-fraction' does not belong in settings",
        ),
        ("[methods.casa.sweep]\ngamma = 0.1", "must list values"),
        ("seeds = 3\n[methods.casa]", "must be whole numbers"),
        ("sweep-scale = 0\n[methods.casa]", "sweep-scale must be above 0 and at most 1, got 0"),
        ("sweep-scale = 'short'\n[methods.casa]", "must be a number"),
        ("rounds = 0\n[methods.fedavg]", "rounds in the suite .* must be a whole number from 1"),
        ("rounds = 3\nsync-updates = 5\n[methods.fedavg]", "exclude each other"),
        ("[methods.fedavg]\n[settings]\nmax-rounds = 3", "a suite has rounds beside them"),
        ("title = 'x'", "nothing to compare"),
        ("not toml", "not valid TOML"),
        ("[methods.casa]\n[settings]\ndataset = 'synthetic'\nmodel = 'cnn'", "casa cannot run"),
    ],
)
def test_what_is_wrong_with_a_suite_is_said_before_anything_starts(
    tmp_path: Path, text: str, message: str
) -> None:
    path, out = tmp_path / "suite.toml", tmp_path / "out"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        prepare(load_suite(path), out)
    assert not out.exists()


def test_a_key_of_one_method_is_for_that_method_only() -> None:
    suite = small_suite().with_settings({"casa.gamma": 0.3, "groups": "0.5,0.5"})
    casa, fedasync, _ = (suite.config(method, 0) for method in suite.methods)
    assert casa.options == {"casa.gamma": 0.3, "groups": "0.5,0.5"}
    assert fedasync.options == {"groups": "0.5,0.5"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fedbuff.k": 3},
            "fedbuff.k is read by strategy fedbuff; this comparison has casa, fedasync, fedavg.",
        ),
        ({"fedbuff.q": 3}, "Unknown key 'fedbuff.q'"),
        ({"noise-std": 0.5}, "noise-std is read by partition noise-groups; this run has"),
    ],
)
def test_a_key_that_no_method_reads_is_an_error(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(small_suite().with_settings(settings), Path("unused"))


def test_the_tables_of_a_suite_that_others_extend_are_for_its_methods(tmp_path: Path) -> None:
    """A file that many extend holds hyper-parameters of methods that not all of them have."""
    path = tmp_path / "suite.toml"
    path.write_text("[methods.fedasync]\n[settings.casa]\ngamma = 0.3\n")
    suite = load_suite(path)
    assert suite.config(suite.methods[0], 0).options == {}
    path.write_text("[methods.fedasync]\n[settings.casa]\ngama = 0.3\n")
    suite = load_suite(path)
    with pytest.raises(UserError, match=r"Did you mean 'casa\.gamma'"):
        suite.config(suite.methods[0], 0)


def test_compare_as_a_person_types_it(tmp_path: Path) -> None:
    arguments = ["compare", "fedasync", "--out", str(tmp_path / "out"), "--processes", "1"]
    arguments += ["--clients", "8", "--max-updates", "8", "--set", "fedasync.alpha=0.4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "[1/1] fedasync, seed 0: accuracy" in result.output
    keys = read_toml(tmp_path / "out" / "fedasync" / "seed-0" / "config.toml")
    assert (keys["clients"], keys["max-updates"], keys["fedasync.alpha"]) == (8, 8, 0.4)
    for wrong, words in (
        (["compare"], "nothing to compare"),
        (["compare", "casa", "--seeds", "0,x"], "--seeds takes numbers"),
        (["compare", "--all", "--suite", "x.toml"], "not both"),
        (["compare", "casa", "casa"], "more than once"),
    ):
        failed = CliRunner().invoke(app, wrong)
        assert isinstance(failed.exception, UserError)
        assert words in str(failed.exception)


def result_of(label: str, times: list[float | None], published: Published | None = None) -> Result:
    runs = [
        Run(seed, f"{label}/seed-{seed}", summary(0.9 + 0.01 * seed, time))
        for seed, time in enumerate(times)
    ]
    rows = () if published is None else (published,)
    return Result(Method(label, "casa", published=rows), label, tuple(runs))


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


def test_spread_by_hand() -> None:
    # Mean 4, sample variance (4 + 0 + 4) / 2 = 4.
    assert Spread.over([2.0, 4.0, 6.0]) == Spread(4.0, 2.0, 3, 3)
    assert Spread.over([2.0, None]) == Spread(2.0, 0.0, 1, 2)
    assert Spread.over([None]) == Spread(None, None, 0, 1)


def test_ratios_and_ranks_by_hand() -> None:
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
    ifca = Method("ifca", "ifca", sweep=grid({"k": (3, 4, 5), "by-examples": (False, True)}))
    ifca = Method("ifca", "ifca", sweep=ifca.sweep, published=rows)
    chosen = {variant.label: variant.row for variant in ifca.variants()}
    assert chosen["ifca k=3, by-examples=True"] is None
    assert chosen["ifca k=4, by-examples=False"] == rows[0]
    assert chosen["ifca k=5, by-examples=True"] == rows[1]
    quick = result_of("quick", [1.0], Published(99.0, 6.0))
    for k, tau in ((4, 1.0), (5, -1.0)):
        # Ours: quick is first. The paper's order is the same with k = 4 only.
        (method,) = (v for v in ifca.variants() if v.label == f"ifca k={k}, by-examples=True")
        slow = Result(method, "ifca", result_of("slow", [9.0]).runs)
        comparison = Comparison(Suite("t", (quick.method, method)), (quick, slow))
        assert comparison.tau("time") == pytest.approx(tau)


def test_times_to_convergence_may_be_what_is_compared() -> None:
    converged = {**summary(0.9, 5.0), "time_to_convergence": {"virtual_time": 30.0}}
    suite = Suite("t", (Method("casa", "casa"),), timing=Timing.CONVERGENCE)
    run_ = Run(0, "casa/seed-0", converged, Timing.CONVERGENCE)
    comparison = Comparison(suite, (Result(suite.methods[0], "casa", (run_,)),))
    table = main_table(comparison)
    assert (table.title, table.columns[2]) == (
        "t (seed 0, time to convergence)",
        "time to convergence",
    )
    assert table.rows[0][2] == "30.0"
    assert any("last comes within 1 point of its final value" in line for line in table.lines)
    axes = times_figure(comparison).axes[0]
    assert axes.get_title(loc="left") == "Virtual time to convergence"
    assert json.loads(to_json(comparison))["methods"][0]["time_to_convergence"]["mean"] == 30.0


def test_the_best_accuracy_by_test_examples_may_be_what_is_compared(tmp_path: Path) -> None:
    def scored(label: str, final: float, best: float, paper: float) -> Result:
        row, numbers = Published(paper), {"best_weighted_accuracy": best, "seed": 0}
        run_ = Run(0, label, {**summary(final, 5.0), **numbers}, score=Score.BEST_WEIGHTED)
        return Result(Method(label, "casa", published=(row,)), label, (run_,))

    # By the accuracy at the end the order would be the other way round.
    low, high = scored("low", 0.9, 0.7, 71.0), scored("high", 0.6, 0.8, 79.0)
    suite = Suite("t", (low.method, high.method), score=Score.BEST_WEIGHTED)
    comparison = Comparison(suite, (low, high))
    assert comparison.tau("accuracy") == pytest.approx(1.0)
    assert best_of(comparison.results) is high
    table = main_table(comparison)
    assert table.title == "t (seed 0, target 90.0%, best accuracy by test examples)"
    assert [row[1:3] for row in table.rows] == [("71.00", "70.00"), ("79.00", "80.00")]
    assert any("weighted by their numbers of test examples" in line for line in table.lines)
    # The paper tells no times, and there is no reference for factors.
    heads = ("method", "acc %\npaper", "acc %\nours", "time\nours", "purity")
    assert table.columns == heads
    assert "accuracy 1.00." in table.lines[0]
    assert not any("unit of its own" in line for line in table.lines)
    # The page of the same comparison shows the same.
    (tmp_path / "compare.json").write_text(to_json(comparison))
    again = read_comparison(tmp_path)
    assert again.suite.score is Score.BEST_WEIGHTED
    assert main_table(again).rows == table.rows


def test_the_table_shows_unrest_if_that_is_what_a_suite_is_about() -> None:
    runs = tuple(Run(s, "", {**summary(0.9, 5.0), "unrest": 0.01 * (s + 1)}) for s in (0, 1))
    suite = Suite("t", (Method("casa", "casa"),), seeds=(0, 1), shows_unrest=True)
    table = main_table(Comparison(suite, (Result(suite.methods[0], "casa", runs),)))
    # Points: mean and sample deviation of 1 and 2.
    assert (table.columns[-1], table.rows[0][-1]) == ("unrest", "1.50 ± 0.71")


def test_the_table_shows_bytes_as_multiples_of_the_reference_s(tmp_path: Path) -> None:
    def runs(up: int, down: int) -> tuple[Run, ...]:
        sent = {"bytes_up": up, "bytes_down": down}
        return tuple(
            Run(seed, "", {**summary(0.9, 5.0), **sent, "bytes_up": up + seed}) for seed in (0, 2)
        )

    plain = Method("fedavg", "fedavg", published=(Published(90.0, traffic=1.0),))
    grouped = Method("ifca", "ifca", published=(Published(91.0, traffic=5.48),))
    suite = Suite("t", (plain, grouped), {}, (0, 2), reference="fedavg", shows_traffic=True)
    # Means of 20 + 29 and 22 + 29, and of 50 + 74 and 52 + 74.
    results = (Result(plain, "fedavg", runs(20, 29)), Result(grouped, "ifca", runs(50, 74)))
    comparison = Comparison(suite, results)
    table = main_table(comparison)
    assert table.columns[-2:] == ("bytes\npaper", "bytes\nours")
    assert [row[-2:] for row in table.rows] == [("1.00×", "1.00×"), ("5.48×", "2.50×")]
    # The reference is one of bytes: no times are compared with its.
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
    assert "'>': a run that did not reach the target counts with its length." in table.lines
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


def test_rounds_without_a_method_that_has_any_are_an_error() -> None:
    with pytest.raises(UserError, match="no method of this comparison works in them"):
        of_names(["casa", "fedasync"], {"max-rounds": 3})


def test_rounds_are_for_the_methods_that_have_them(tmp_path: Path) -> None:
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


def test_a_shortened_suite_says_so() -> None:
    suite = Suite("t", (Method("casa", "casa"),), {"clients": 100}, async_updates=50000).scaled(0.1)
    assert suite.config(suite.methods[0], 0).max_updates == 5000
    # Never less than one round of every client.
    assert suite.scaled(0.001).config(suite.methods[0], 0).max_updates == 100
    table = main_table(Comparison(suite, (result_of("casa", [1.0]),)))
    assert table.lines[0].startswith("SHORTENED: --scale 0.1")
    with pytest.raises(UserError, match="--scale must be above 0 and at most 1"):
        suite.scaled(2)
