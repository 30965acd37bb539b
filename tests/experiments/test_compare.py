"""Comparisons: equal conditions, no finished run lost or repeated, correct numbers."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console
from summaries import summarise
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.config import read_toml
from raceme.core.errors import UserError
from raceme.core.events import Ending, Event, RunEnded, UpdateApplied
from raceme.experiments.compare import compare, prepare
from raceme.experiments.jobs import make_jobs, survey
from raceme.experiments.results import Comparison, read_comparison
from raceme.experiments.suites import Suite, load_suite, of_names
from raceme.experiments.tables import main_table
from raceme.records.summary import write_summary
from raceme.runs.checkpoints import can_resume
from raceme.runs.experiment import simulate

pytestmark = pytest.mark.pictures

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


@pytest.mark.smoke
def test_a_comparison_leaves_tables_plots_and_all_runs(finished: Path) -> None:
    for name in ("accuracy.png", "staleness.png", "purity.png"):
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


def test_a_comparison_is_named_after_the_dataset_that_it_is_on() -> None:
    assert of_names(["casa"], {"dataset": "usps"}).title == "Comparison on usps"
    assert of_names(["casa"]).title == "Comparison on digits"


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


def test_only_unfinished_runs_are_repeated(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "fedasync" / "seed-1" / "summary.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/summary.json")}
    _, said = run(small_suite(), out)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "fedasync, seed 1: half-written, removed and repeated" in said
    assert "casa, seed 0: already finished, kept" in said
    assert "[6/6] fedasync, seed 1: accuracy" in said
    assert dump(out / "fedasync" / "seed-1") == dump(finished / "fedasync" / "seed-1")


@pytest.mark.parametrize("method", ["casa", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    finished: Path, tmp_path: Path, method: str
) -> None:
    suite = small_suite(method, seeds=(1,))
    (job,) = make_jobs(suite, suite.methods, (1,), tmp_path)
    updates = 0

    def count(event: Event) -> None:
        nonlocal updates
        updates += isinstance(event, UpdateApplied)

    # The state after a kill: a checkpoint, later results, and no summary.
    kept = job.config.with_values(checkpoint_every=8)
    simulate(kept, count, stop=lambda: "killed" if updates >= 20 else "")
    newest = max((job.folder / "checkpoint").iterdir())
    newest.unlink()
    (job.folder / "summary.json").unlink()
    log = job.folder / "run.log"
    log.unlink()

    _, said = run(suite, tmp_path)

    assert f"{method}, seed 1: unfinished, resumed from its last checkpoint" in said
    assert "Resuming from" in log.read_text()
    assert dump(job.folder) == dump(finished / method / "seed-1")
    assert not (job.folder / "checkpoint").exists()
    assert not (finished / method / "seed-1" / "checkpoint").exists()


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    suite = small_suite("fedasync", seeds=(0,))
    (job,) = make_jobs(suite, suite.methods, (0,), tmp_path)
    simulate(job.config.with_values(lr=0.2, checkpoint_every=8))
    (job.folder / "summary.json").unlink()
    assert can_resume(job.folder, job.config.with_values(lr=0.2))
    assert survey([job]) == ([], [job])
    assert not job.can_resume


@pytest.mark.slow
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
    assert said.count("already finished, kept") == 6
    assert "casa is not in the plots over time: its events cannot be read" in caplog.text
    assert not (out / "accuracy.png").exists()
    assert (out / "purity.png").is_file()
    assert main_table(comparison) == main_table(read_comparison(finished))


def test_a_folder_that_is_no_run_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "casa" / "seed-0" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("words")
    with pytest.raises(UserError, match="is no run"):
        prepare(small_suite("casa"), tmp_path)
    assert precious.is_file()


@pytest.mark.slow
def test_a_run_that_fails_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    # The run of fedavg fails, because its folder is a file.
    (tmp_path / "fedavg").write_text("")
    comparison, said = run(small_suite("fedavg", "fedasync", seeds=(0,)), tmp_path)
    failed, fine = comparison.results
    assert failed.errors[0].startswith("Cannot write to")
    assert "fedavg, seed 0: FAILED: Cannot write to" in said
    assert fine.accuracy.count == 1
    assert any("FAILED" in line for line in main_table(comparison).lines)


@pytest.mark.slow
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
        (Ending.AT_REST, True),
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
        ("[methods.casa]\n[settings]\nstop-at-target = true", "records the target"),
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
        (
            "score = 'best'\n[methods.casa]",
            "Unknown score .* 'best'.* Valid: best-weighted, final, honest, step-ends",
        ),
        ("shows-unrest = 1\n[methods.casa]", "must be true or false"),
        ("validation-fraction = 0\n[methods.casa]", "must be above 0 and below 1, got 0"),
        (
            "[methods.casa]\n[settings]\nvalidation-fraction = 0.1",
            "'validation-fraction' does not belong in settings",
        ),
        ("[methods.casa.sweep]\ngamma = 0.1", "must list values"),
        ("seeds = 3\n[methods.casa]", "must be a list"),
        ("sweep-scale = 0\n[methods.casa]", "sweep-scale must be above 0 and at most 1, got 0"),
        ("sweep-scale = 'short'\n[methods.casa]", "must be a number"),
        ("rounds = 0\n[methods.fedavg]", "rounds in the suite .* must be at least 1, got 0"),
        ("rounds = 3\nsync-updates = 5\n[methods.fedavg]", "exclude each other"),
        ("[methods.fedavg]\n[settings]\nmax-rounds = 3", "a suite has rounds beside them"),
        ("title = 'x'", "No method to compare"),
        ("not toml", "not valid TOML"),
        ("[methods.casa]\n[settings]\ndataset = 'synthetic'\nmodel = 'cnn'", "casa cannot run"),
        ("[methods.casa]\n[methods.cdfl]", "cdfl cannot run: .* give --proxy"),
        ("[methods.cdfl.options]\nk = 4\n[settings]\nproxy = '20'\nclients = 3", "cdfl.k is 4"),
        ("[methods.cdfl]\n[settings]\nproxy = '20'\npretrain = 5000", "cdfl cannot run: pretrain"),
        (
            "[methods.casa]\n[methods.faacl]\n[settings]\nvalidation-share = 0.02",
            "faacl cannot run: A client keeps . of its samples .* raise validation-share",
        ),
        ("[methods.krum.options]\nnum-malicious-nodes = 4\n[settings]\nclients = 8", "krum cannot"),
    ],
)
def test_mistakes_in_a_suite_are_reported_before_anything_starts(
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
    """A suite that others extend may set hyper-parameters of methods that it does not run."""
    path = tmp_path / "suite.toml"
    path.write_text("[methods.fedasync]\n[settings.casa]\ngamma = 0.3\n")
    suite = load_suite(path)
    assert suite.config(suite.methods[0], 0).options == {}
    path.write_text("[methods.fedasync]\n[settings.casa]\ngama = 0.3\n")
    suite = load_suite(path)
    with pytest.raises(UserError, match=r"Did you mean 'casa\.gamma'"):
        suite.config(suite.methods[0], 0)


def test_the_command_compare_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "panicle").mkdir()
    arguments = ["compare", "fedasync", "--out", str(tmp_path / "out"), "--processes", "1"]
    arguments += ["--clients", "8", "--max-updates", "8", "--set", "fedasync.alpha=0.4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "[1/1] fedasync, seed 0: accuracy" in result.output
    keys = read_toml(tmp_path / "out" / "fedasync" / "seed-0" / "config.toml")
    assert (keys["clients"], keys["max-updates"], keys["fedasync.alpha"]) == (8, 8, 0.4)
    for wrong, words in (
        (["compare"], "No method to compare"),
        (["compare", "casa", "--seeds", "0,x"], "--seeds takes numbers"),
        (["compare", "--all", "--suite", "x.toml"], "not both"),
        (["compare", "casa", "casa"], "more than once"),
        (["compare", "casa", "--only", "digits-4"], "give --suite panicle"),
        # A folder of that name does not count as a suite.
        (["compare", "--suite", "panicle", "--only", "digit-4"], "Did you mean 'digits-4'"),
    ):
        failed = CliRunner().invoke(app, wrong)
        assert isinstance(failed.exception, UserError)
        assert words in str(failed.exception)
