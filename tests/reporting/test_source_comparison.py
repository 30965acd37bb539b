"""The dashboard's data of comparisons: one case, or a suite of several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Evaluated, Measure, RunEnded, UpdateApplied
from raceme.records.folder import begin, only_writer, remove_run, write_note
from raceme.records.store import RunStore
from raceme.reporting.dashboard.source import (
    ComparisonSource,
    Watched,
    check_watchable,
    is_comparison,
)


def begun(folder: Path, accuracy: float, ends: bool = False) -> None:
    with RunStore(folder) as store:
        store.observe(Evaluated(3.0, 8, accuracy, 0.5, 1, {"a": (0, accuracy, 0.5)}, 1))
        if ends:
            store.observe(RunEnded(4.0, 9, "9 updates were applied"))


def news_of(source: ComparisonSource) -> dict[str, dict]:
    while source.poll():
        pass
    found: dict[str, dict] = {}
    for piece in source.pieces:
        for name, news in json.loads(piece)["comparison"].items():
            if news is None:
                del found[name]
            else:
                found.setdefault(name, {}).update(news)
    return found


def test_a_comparison_has_no_cases(tmp_path: Path) -> None:
    begun(tmp_path / "casa" / "seed-0", 0.5, ends=True)
    (run,) = news_of(ComparisonSource(tmp_path)).values()
    assert (run["case"], run["method"], run["label"]) == ("", "casa", "casa, seed 0")
    assert run["state"] == "ended"
    assert run["points"]["accuracy"] == [0.5]
    assert run["measure"] == {"label": "accuracy", "title": "Accuracy", "isError": False}


def test_a_regression_names_its_error(tmp_path: Path) -> None:
    with RunStore(tmp_path / "casa" / "seed-0") as store:
        store.observe(Evaluated(3.0, 8, 2.5, 0.5, 1, {}, 1, measure=Measure("°C")))
    (run,) = news_of(ComparisonSource(tmp_path)).values()
    assert run["measure"] == {"label": "MAE (°C)", "title": "Mean absolute error", "isError": True}


def test_each_run_of_a_suite_names_its_case(tmp_path: Path) -> None:
    source = ComparisonSource(tmp_path)
    begun(tmp_path / "digits" / "casa" / "seed-0", 0.25)
    assert news_of(source)["digits/casa/seed-0"]["case"] == "digits"
    begun(tmp_path / "har" / "casa" / "seed-0", 0.75)
    runs = news_of(source)
    assert {name: run["case"] for name, run in runs.items()} == {
        "digits/casa/seed-0": "digits",
        "har/casa/seed-0": "har",
    }
    # Each run has its own page, and only runs inside the folder have one.
    watched = Watched(tmp_path, comparison=True)
    run = watched.source("har/casa/seed-0")
    assert run is not None
    assert run.folder == tmp_path / "har" / "casa" / "seed-0"
    for name in ("har/casa", "../other/seed-0", "har/casa/seed-1"):
        assert watched.source(name) is None


def test_a_folder_without_a_comparison_is_refused(tmp_path: Path) -> None:
    (tmp_path / "har" / "casa" / "seed-0").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no run"):
        check_watchable(tmp_path)
    begun(tmp_path / "har" / "casa" / "seed-0", 0.5)
    check_watchable(tmp_path)
    assert is_comparison(tmp_path)
    assert is_comparison(tmp_path / "har")
    assert not is_comparison(tmp_path / "har" / "casa" / "seed-0")


def test_a_folder_of_runs_and_comparisons_is_an_index(tmp_path: Path) -> None:
    begun(tmp_path / "one", 0.5)
    (tmp_path / "one" / "config.toml").write_text('strategy = "casa"\ndataset = "digits"\n')
    begun(tmp_path / "cmp" / "fedavg" / "seed-3", 0.75)
    (tmp_path / "notes").mkdir()
    check_watchable(tmp_path)
    assert is_comparison(tmp_path)
    assert not is_comparison(tmp_path / "one"), "a run is no index of what is in it"
    runs = news_of(ComparisonSource(tmp_path))
    found = {name: (run["case"], run["method"], run["label"]) for name, run in runs.items()}
    assert found == {
        "one": ("", "casa", "one"),
        "cmp/fedavg/seed-3": ("cmp", "fedavg", "fedavg, seed 3"),
    }
    assert runs["one"]["started"] > 0
    run = Watched(tmp_path, comparison=True).source("one")
    assert run is not None
    assert run.folder == tmp_path / "one"


def test_a_run_without_a_process_has_stopped(tmp_path: Path) -> None:
    begun(tmp_path / "a", 0.5)
    (tmp_path / "b").mkdir()
    begin(tmp_path / "b", RunConfig.from_mapping({"max-updates": 9}))
    begun(tmp_path / "b", 0.5)
    # A run without a configuration file has not started.
    assert {name: run["state"] for name, run in news_of(ComparisonSource(tmp_path)).items()} == {
        "a": "running",
        "b": "stopped",
    }
    with only_writer(tmp_path / "b"):
        assert news_of(ComparisonSource(tmp_path))["b"]["state"] == "running"


def configured(folder: Path, **keys: object) -> None:
    begun(folder, 0.5)
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in keys.items())
    (folder / "config.toml").write_text("".join(lines))


def test_an_index_tells_the_settings_in_which_runs_on_one_dataset_differ(tmp_path: Path) -> None:
    configured(tmp_path / "a", strategy="casa", dataset="digits", seed=0, lr=0.1, clients=8)
    source = ComparisonSource(tmp_path)
    assert news_of(source)["a"]["settings"] == {}
    configured(tmp_path / "b", strategy="fedasync", dataset="digits", seed=1, lr=0.2, clients=8)
    # The number of clients is the dataset's default, so it is no setting.
    configured(tmp_path / "c", strategy="casa", dataset="mnist", seed=0, lr=0.2, clients=100)
    settings = {name: run["settings"] for name, run in news_of(source).items()}
    assert settings == {"a": {"lr": 0.1}, "b": {"lr": 0.2}, "c": {"lr": 0.2}}
    # A method's own key is compared among the runs that have it. JSON has no infinity.
    configured(tmp_path / "d", strategy="casa", dataset="har", **{"casa.gamma": 0.5})
    configured(tmp_path / "e", strategy="casa", dataset="har", **{"casa.gamma": 1})
    text = (tmp_path / "e" / "config.toml").read_text()
    (tmp_path / "e" / "config.toml").write_text(text.replace("gamma = 1", "gamma = inf"))
    found = news_of(source)
    assert found["d"]["settings"] == {"casa.gamma": 0.5}
    assert found["e"]["settings"] == {"casa.gamma": "inf"}
    assert "casa.gamma" not in found["a"]["settings"]


def test_a_run_that_is_deleted_is_forgotten(tmp_path: Path) -> None:
    for name in "ab":
        begun(tmp_path / name, 0.5)
    source = ComparisonSource(tmp_path)
    assert set(news_of(source)) == {"a", "b"}
    remove_run(tmp_path / "a")
    assert set(news_of(source)) == {"b"}


def test_a_note_is_told_when_it_changes(tmp_path: Path) -> None:
    begun(tmp_path / "a", 0.5)
    source = ComparisonSource(tmp_path)
    assert news_of(source)["a"]["note"] == ""
    write_note(tmp_path / "a", "the one\nfor the talk")
    assert news_of(source)["a"]["note"] == "the one for the talk"
    write_note(tmp_path / "a", " ")
    assert news_of(source)["a"]["note"] == ""
    assert not (tmp_path / "a" / "note.txt").exists()


def test_a_comparison_tells_the_bytes_of_its_updates(tmp_path: Path) -> None:
    with RunStore(tmp_path / "casa" / "seed-0") as store:
        store.observe(UpdateApplied(1, 1.0, "a", 0, 0, 0, 0.5, 0.5, 1.0, 100, 25))
        store.observe(Evaluated(3.0, 1, 0.5, 0.5, 1, {"a": (0, 0.5, 0.5)}, 1))
    (run,) = news_of(ComparisonSource(tmp_path)).values()
    assert run["bytes"] == 125
