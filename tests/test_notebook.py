"""What a notebook shows of a run and of a comparison."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from soft_clusters import SoftClusters

import raceme
from raceme.core.errors import UserError
from raceme.core.registry import STRATEGIES
from raceme.experiments.compare import compare, prepare
from raceme.experiments.suites import of_names
from raceme.notebook import OpenComparison, OpenRun
from raceme.runs.experiment import simulate
from raceme.strategies import CASAC, FedAsync, FedBuff

SMALL: dict[str, Any] = {
    "clients": 4,
    "groups": "0.5,0.5",
    "max-updates": 12,
    "workers": "0",
    "eval-every": 6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a comparison's folder, whose runs are runs."""
    out = tmp_path_factory.mktemp("compared")
    # A comparison keeps runs that are finished: no process is started for them.
    for job in prepare(of_names(["casa", "fedasync"], SMALL), out).every:
        simulate(job.config)
    compare(prepare(of_names(["casa", "fedasync"], SMALL), out), 1, Console(quiet=True))
    return out


@pytest.fixture
def run(folder: Path) -> OpenRun:
    opened = raceme.open(folder / "casa" / "seed-0")
    assert isinstance(opened, OpenRun)
    return opened


def test_tables_have_a_row_for_each_event(run: OpenRun) -> None:
    assert run.summary is not None
    assert len(run.updates) == run.summary["updates"] == 12
    assert list(run.updates["seq"]) == list(range(1, 13))
    assert list(run.evaluations["updates"]) == [0, 6, 12]
    assert run.evaluations["accuracy"].iloc[-1] == pytest.approx(run.summary["accuracy"])
    clients = run.client_evaluations
    last = clients[clients["updates"] == 12]
    assert last["accuracy"].mean() == pytest.approx(run.summary["accuracy"])
    assert set(last["time"]) == {run.evaluations["time"].iloc[-1]}
    assert list(run.clients["client"]) == [f"client-{number}" for number in range(4)]
    assert set(run.clients["cluster"]) == set(run.record.assignment().values())
    assert len(run.placements) >= 4
    assert run.rejections.empty
    assert run.changes.empty


def test_models_and_figures_are_those_of_the_run(run: OpenRun) -> None:
    arrays = run.model(0)
    assert all(np.isfinite(array).all() for array in arrays.values())
    with pytest.raises(UserError, match=r"no model of cluster 7; there are \[0\]"):
        run.model(7)
    for draw in (run.plot_accuracy, run.plot_clusters, run.plot_devices, run.plot_similarity):
        assert isinstance(draw(), Figure)


def test_a_run_shows_its_numbers_with_names_escaped(folder: Path, run: OpenRun) -> None:
    assert "casa on digits" in repr(run)
    run.config = {"strategy": "<script>", "dataset": "digits"}
    shown = run._repr_html_()
    assert "&lt;script&gt; on digits" in shown
    assert "<script>" not in shown
    assert "virtual time" in shown


def test_a_run_that_is_not_over_can_be_looked_at(run: OpenRun, tmp_path: Path) -> None:
    for name in ("run.sqlite", "config.toml"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    opened = raceme.open(tmp_path)
    assert isinstance(opened, OpenRun)
    assert opened.summary is None
    assert "12 updates" in opened._repr_html_()


def test_a_comparison_has_its_table_and_its_runs(folder: Path) -> None:
    opened = raceme.open(str(folder))
    assert isinstance(opened, OpenComparison)
    assert list(opened.table["method"]) == ["casa", "fedasync"]
    assert set(opened.runs) == {("casa", 0), ("fedasync", 0)}
    assert len(opened.runs["fedasync", 0].updates) == 12
    assert "fedasync" in opened._repr_html_()
    for draw in (opened.plot_accuracy, opened.plot_times, opened.plot_purity):
        assert isinstance(draw(), Figure)


def test_a_folder_without_results_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no results"):
        raceme.open(tmp_path)


def test_without_pandas_the_error_names_the_extra(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"raceme\[notebook\]"):
        _ = run.updates
    assert len(run.record.updates.seq) == 12


def test_a_hyper_parameter_needs_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = raceme.run("casa", clients=4, groups="0.5,0.5", max_updates=8, workers="0", gamma=0.3)
    assert run.config["casa.gamma"] == 0.3
    assert run.config["groups"] == "0.5,0.5"
    assert run.accuracy.iloc[-1] == run.evaluations["accuracy"].iloc[-1]
    members = [client for own in run.clusters.values() for client in own]
    assert sorted(members) == [f"client-{number}" for number in range(4)]
    assert run.models.keys() == run.clusters.keys()
    with pytest.raises(UserError, match=r"gama.*casa\.gamma"):
        raceme.run("casa", gama=0.3)
    with pytest.raises(UserError, match="'cassa'"):
        raceme.run("cassa", gamma=0.3)


def test_a_method_is_given_as_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {**SMALL, "max-updates": 4}
    assert raceme.run(FedAsync, **small).config["strategy"] == "fedasync"
    # A variant is an object, and no class.
    assert STRATEGIES.name_of(CASAC) == "casa-c"
    assert STRATEGIES.name_of(FedBuff) == "fedbuff"
    assert STRATEGIES.name_of(SoftClusters) == "soft_clusters:SoftClusters"

    class Mine(FedAsync):
        pass

    with pytest.raises(UserError, match="no other process can import it"):
        raceme.compare([Mine], **small)
