"""Runs and comparisons in a notebook."""

from __future__ import annotations

import builtins
import io
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from flower_apps import QUICKSTARTS
from matplotlib.figure import Figure
from rich.console import Console
from soft_clusters import SoftClusters

import raceme
from raceme.core import registry
from raceme.core.errors import UserError
from raceme.core.registry import STRATEGIES
from raceme.core.requests import Outcome, Update
from raceme.experiments.compare import compare, prepare
from raceme.experiments.page import comparison_page
from raceme.experiments.suites import of_names, reproductions
from raceme.notebook import OpenComparison, OpenRun, compared
from raceme.runs.experiment import simulate
from raceme.strategies import CASAC, FedAsync, FedBuff
from raceme.training.models import build

APP = QUICKSTARTS / "numpy_app"
SMALL: dict[str, Any] = {
    "clients": 4,
    "groups": "0.5,0.5",
    "max-updates": 12,
    "workers": "0",
    "eval-every": 6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison with finished runs."""
    out = tmp_path_factory.mktemp("compared")
    # A comparison keeps finished runs, so that it starts no processes here.
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
    assert list(run.changes)[:3] == ["time", "updates", "change"]


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
    with pytest.raises(UserError, match=r"has no summary\.json: the run was killed"):
        opened.summary["accuracy"]
    assert "12 updates" in opened._repr_html_()
    assert isinstance(opened.plot_accuracy(), Figure)


def test_a_comparison_has_its_table_and_its_runs(folder: Path) -> None:
    opened = raceme.open(str(folder))
    assert isinstance(opened, OpenComparison)
    assert list(opened.table.index) == ["casa*", "fedasync"]
    assert list(opened.rows["method"]) == ["casa", "fedasync"]
    assert "time_to_target" in opened.rows
    assert set(opened.runs) == {("casa", 0), ("fedasync", 0)}
    assert len(opened.runs["fedasync", 0].updates) == 12
    assert "fedasync" in opened._repr_html_()
    for draw in (opened.plot_accuracy, opened.plot_times, opened.plot_purity):
        assert isinstance(draw(), Figure)


def test_a_folder_without_results_is_reported(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"pip install .*\[notebook\]"):
        _ = run.updates
    assert len(run.record.updates.seq) == 12


def test_a_hyper_parameter_needs_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"clients": 4, "groups": "0.5,0.5", "max_updates": 8, "workers": "0"}
    run = raceme.run("casa", **settings, gamma=0.3, out=tmp_path / "here")
    assert run.folder == tmp_path / "here"
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
    # A variant is an object, not a class.
    assert STRATEGIES.name_of(CASAC) == "casa-c"
    assert STRATEGIES.name_of(FedBuff) == "fedbuff"
    assert STRATEGIES.name_of(SoftClusters) == "soft_clusters:SoftClusters"


# -----------------------------------------------------------------------------
# Data, models and methods that are defined in a script, notebook or function.
# -----------------------------------------------------------------------------


TINY: dict[str, Any] = {"max_updates": 4, "workers": "0", "client_map": False}


def readings(clients: int = 2, features: int = 3, shift: float = 0.0) -> list[Any]:
    """Return 10 samples per client, in two classes that one feature separates."""
    y = np.arange(10) % 2
    x = np.linspace(0, 1, 10 * features).reshape(10, features) + shift
    return [(x + y[:, None] * client, y) for client in range(clients)]


def net() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


class Empty:
    """A class that is no network."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_on_data_and_a_model_of_its_own(here: Path) -> None:
    hidden = 5

    def sized(input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(*input_shape, hidden), torch.nn.Linear(hidden, num_classes)
        )

    rooms = dict(zip(("kitchen", "hall"), readings(), strict=True))
    run = raceme.run("fedasync", data=rooms, model=sized, **TINY)
    assert run.model(0)["0.weight"].shape == (5, 3)
    assert run.model(0)["1.weight"].shape == (2, 5)
    assert sorted(run.clients["client"]) == ["hall", "kitchen"]


UNSEEDED = """
import random
import numpy as np
import torch
import raceme

class Unseeded(torch.nn.Linear):
    # Draws from the process's generators, in tests too.
    def forward(self, x):
        noise = torch.rand(1) + np.random.rand() + random.random()
        return super().forward(x) + torch.eye(2)[:1] * noise

def noisy():
    return Unseeded(3, 2)

data = [(np.linspace(0, 1, 30).reshape(10, 3) + k, np.arange(10) % 2) for k in range(2)]
small = {"max_updates": 4, "client_map": False}
losses = [
    raceme.run(
        "fedasync", data=data, model=noisy, workers=workers, out=out, **small
    ).evaluations.loss.tolist()
    for workers, out in ((0, "first"), (0, "again"), (2, "spread"))
]
assert len(losses[0]) == 3 and losses[0] == losses[1] == losses[2], losses
"""


@pytest.mark.parametrize("name", ["", "c" * 129, "a\nb", "Ben\u00a0Meier"])
def test_a_client_that_a_server_would_refuse_is_reported(name: str, here: Path) -> None:
    with pytest.raises(UserError, match="needs another name: 1 to 128 printable"):
        raceme.run("fedasync", data=dict(zip(("hall", name), readings(), strict=True)), **TINY)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("strategy", ["fedper", "fedrep"])
def test_a_head_that_is_the_whole_model_is_reported(strategy: str, here: Path) -> None:
    with pytest.raises(UserError, match="head-layers=1 leaves no layers to share"):
        raceme.run(strategy, data=readings(), model="mclr", **TINY)
    assert not (here / "runs").exists()


def test_flowers_lines_about_rounds_are_kept_off_a_notebook(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raceme.run("fedavg", data=readings(), **TINY)
    assert not [record for record in caplog.records if record.name == "flwr"]
    assert logging.getLogger("flwr").level == logging.INFO


def test_what_a_model_draws_without_a_seed_is_that_of_the_run(here: Path) -> None:
    # In a new process, whose worker processes use this test's cache.
    done = subprocess.run(
        [sys.executable, "-c", UNSEEDED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_that_ends_early_warns(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / (not self.training)

    def net() -> torch.nn.Module:
        return Breaks(3, 2)

    run = raceme.run("fedasync", data=readings(), model=net, **TINY)
    assert run.summary["updates"] == 0
    assert "The run ended early: the last 100 replies were unusable" in caplog.messages[-1]


@pytest.mark.smoke
def test_a_run_is_resumed_with_the_same_data_only(here: Path) -> None:
    settings = {**TINY, "out": "first", "checkpoint_every": 2}
    raceme.run("fedasync", data=readings(), model=net, **settings)
    further = {**TINY, "max_updates": 6, "resume": "first", "checkpoint_every": 2}
    with pytest.raises(UserError, match="data-fingerprint"):
        raceme.run("fedasync", data=readings(shift=1.0), model=net, **further)
    run = raceme.run("fedasync", data=readings(), model=net, **further)
    assert len(run.updates) == 6
    run = raceme.run(resume=run.folder, max_updates=8, trust=run.folder)
    assert (len(run.updates), run.config["strategy"]) == (8, "fedasync")
    with pytest.raises(UserError, match="There is no run in nowhere to resume"):
        raceme.run(resume="nowhere")


def test_runs_of_several_threads_are_those_of_one(here: Path) -> None:
    def losses(out: str) -> list[float]:
        given = {**TINY, "seed": np.int64(1), "lr": np.float32(0.5), "out": out}
        return raceme.run("fedasync", data=readings(), model=net, **given).evaluations.loss.tolist()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(losses, ("first", "second"))
    assert first == second == losses("alone")


_BOTH = threading.Barrier(2)
_MET = []


class Meets(FedAsync):
    """Waits until two instances are being created, and never completes."""

    def __init__(self, *given: Any, **named: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            _BOTH.wait(0.5)
            _MET.append(self)
        raise UserError("enough")


def test_comparisons_of_several_threads_take_turns(here: Path) -> None:
    def compare_one(_: int) -> None:
        with pytest.raises(UserError, match="enough"):
            raceme.compare(Meets, **SMALL)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(compare_one, range(2)))
    assert not _MET


@pytest.mark.parametrize(
    ("call", "said"),
    [
        # A variant of a method is an object, not a class.
        (lambda: raceme.compare(CASAC, processes=-1, **SMALL), "processes must be .* got -1"),
        (lambda: raceme.compare(["casa"], processes="2", **SMALL), "processes must be .* got '2'"),
        (lambda: raceme.compare("casa", formats="pdf, png"), "Unknown format 'png'"),
        (lambda: raceme.compare("casa", out=3), "A folder is a text or a path, .* got 3"),
        (lambda: raceme.compare(None), "strategy must be a name .* type NoneType"),
        (lambda: raceme.compare("casa", seed=3), "'seed' .* or --seeds 0,1,2"),
        (lambda: raceme.reproduce(None), "Unknown reproduction 'None'"),
        (lambda: raceme.reproduce("casa-table1", only="mnist,x"), "part of casa-table1 'x'"),
        (lambda: raceme.reproduce("casa-table2", scale="0.1"), "scale must be .* got '0.1'"),
        (lambda: raceme.simulate(3), "A folder is a text or a path"),
        (lambda: raceme.simulate(clients=2.5), "clients must be a whole number, got 2.5"),
        (lambda: raceme.simulate(clients=0), "clients must be at least 1"),
        (lambda: raceme.simulate(seed="a"), "seed must be a whole number"),
        (lambda: raceme.simulate(max_time=-1), "max-time must be greater than 0"),
        (lambda: raceme.simulate(examples=0.5), "examples must be a whole number"),
        (lambda: raceme.simulate(APP, client=np.int64(2)), "client is read by a strategy"),
        (lambda: raceme.simulate(APP, workers=None), "workers must be auto"),
        (lambda: raceme.simulate(run_config=["a=1"]), r"run_config .* are mappings .* \['a=1'\]"),
        (lambda: raceme.open(None), "A folder is a text or a path"),
        (lambda: raceme.load(np.ones(2)), "dataset must be a name .* type ndarray"),
        (lambda: raceme.run("casa", lr=np.ones(2)), "lr must be a number"),
    ],
)
def test_a_value_of_another_type_is_reported(call: Any, said: str, here: Path) -> None:
    with pytest.raises(UserError, match=said):
        call()
    assert not list(here.iterdir())


def test_an_invalid_method_is_reported() -> None:
    with pytest.raises(UserError, match=r"strategy must be a name .*got an object of type int"):
        raceme.run(3, **TINY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: torch.nn.Linear(3, 2), "A lambda has no name to record the model by"),
        (torch.nn.Linear(3, 2), "must be a name .* or a function; got an object of type Linear"),
        (Empty, "must return a torch.nn.Module, got Empty"),
        (3, "model"),
    ],
)
def test_an_invalid_model_is_reported(model: Any, said: str, here: Path) -> None:
    with pytest.raises(UserError, match=said):
        raceme.run("fedasync", data=readings(), model=model, **TINY)
    assert not (here / "runs").exists()


def test_outputs_that_do_not_fit_the_labels_are_reported(here: Path) -> None:
    def wide() -> torch.nn.Module:
        return torch.nn.Linear(3, 7)

    with pytest.raises(UserError, match=r"its output for 2 samples is \(2, 7\), not \(2, 2\)"):
        raceme.compare(["fedasync"], data=readings(), model=wide, **TINY)
    assert not (here / "runs").exists()
    for seeds in (3, [], ["one"], [0.5]):
        with pytest.raises(UserError, match="seeds takes whole numbers"):
            raceme.compare("fedasync", seeds=seeds, **TINY)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="data replaces a dataset"):
        raceme.run("fedasync", data=readings(), dataset="digits", **TINY)


def test_definitions_in_a_function_are_known_to_worker_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = 2

    def mine() -> torch.nn.Module:
        return torch.nn.Linear(3, outputs)

    name = registry.MODELS.name_of(mine)
    assert registry.MODELS[name] is mine
    pickled = registry.definitions()
    # As in a new process.
    monkeypatch.setattr(registry, "_local", {})
    monkeypatch.setattr(registry, "_pickled", {})
    with pytest.raises(UserError, match="mine is defined in a script or a notebook"):
        build(name, (3,), 2)
    registry.define(pickled)
    assert build(name, (3,), 2).weight.shape == (2, 3)
    assert registry.MODELS[name] is registry.MODELS[name] is not mine


SOURCE = """
from raceme.strategies import FedAsync
SIZE = {size}

def helper():
    return SIZE

class Mine(FedAsync):
    def factor(self):
        return helper() if self.factor is None else helper()
"""


def test_a_name_changes_with_the_code_and_with_nothing_else() -> None:
    def named(source: str) -> str:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(source, space)
        return STRATEGIES.name_of(space["Mine"])

    first = named(SOURCE.format(size=1))
    assert named("# A line more.\n" + SOURCE.format(size=1)) == first
    # An attribute of that name does not refer to the global variable.
    assert named("factor = object()\n" + SOURCE.format(size=1)) == first
    assert named(SOURCE.format(size=2)) != first
    assert named(SOURCE.format(size=1).replace("None else", "None else 1 +")) != first


def test_definitions_that_cannot_be_pickled_are_reported() -> None:
    lock = threading.Lock()

    def locked() -> object:
        return lock

    with pytest.raises(UserError, match="The model locked cannot be sent to worker processes"):
        registry.MODELS.name_of(locked)


SCRIPT = """
import numpy as np
import torch
import raceme
from raceme.strategies import FedAsync

rng = np.random.default_rng(0)
my_clients = {f"person {k}": (rng.normal(size=(20, 3)), rng.integers(0, 2, 20)) for k in range(4)}

def make_net():
    return torch.nn.Linear(3, 2)

class MyStrategy(FedAsync):
    pass

cmp = raceme.compare(
    ["panicle", MyStrategy], data=my_clients, model=make_net, seeds=range(2), max_updates=8
)
assert len(cmp.rows) == 4, cmp.rows
cmp.table.to_latex("table.tex")
run = raceme.run(MyStrategy, data=my_clients, model=make_net, max_updates=8, workers="2")
print(run.config["strategy"], run.config["model"])
"""


@pytest.mark.slow
def test_a_script_without_a_guard_has_worker_processes(here: Path) -> None:
    (here / "mine.py").write_text(SCRIPT)
    named = set()
    for arguments in (["mine.py"], ["-c", SCRIPT], ["-c", "exec(open('mine.py').read(), {})"]):
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        named.add(done.stdout)
    assert (here / "table.tex").is_file()
    # Names of definitions do not depend on their location.
    assert len(named) == 1


def test_results_are_shown_without_the_script_that_defines_a_method(
    folder: Path, tmp_path: Path
) -> None:
    """The report does not import the strategy, which may be unavailable."""
    table = json.loads((folder / "compare.json").read_text())
    for method in table["methods"]:
        method["strategy"] = "main-0123456789ab:Mine"
    (tmp_path / "compare.json").write_text(json.dumps(table))
    assert "per update" in comparison_page(tmp_path, "")
    opened = raceme.open(tmp_path)
    assert list(opened.rows["strategy"]) == ["main-0123456789ab:Mine"] * 2


# -----------------------------------------------------------------------------
# Interruptions: partial results are kept.
# -----------------------------------------------------------------------------


def test_an_interrupted_run_is_returned(here: Path) -> None:
    class Interrupted(FedAsync):
        def on_update(self, update: Update) -> Outcome:
            if update.task.number == 1:
                signal.raise_signal(signal.SIGINT)
            return super().on_update(update)

    run = raceme.run(Interrupted, **{**SMALL, "max-updates": 40})
    assert run.summary["ending"] == "interrupted"
    assert 0 < len(run.updates) < 40
    assert len(run.accuracy) >= 1


class _Impatient(io.StringIO):
    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_an_interrupted_comparison_has_the_tables_of_what_is_finished(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "casa", tmp_path / "casa")
    plan = prepare(of_names(["casa", "fedasync"], SMALL), tmp_path)
    compared(plan, 1, Console(file=_Impatient()), ["tex"])
    opened = raceme.open(tmp_path)
    assert isinstance(opened, OpenComparison)
    assert list(opened.rows["method"]) == ["casa"]
    assert "fedasync" in (tmp_path / "compare.tex").read_text()
    assert list(opened.purity.index) == ["casa", "fedasync"]
    assert "1 of 2 runs are finished" in caplog.text


def execute(cells: list[str], folder: Path) -> list[list[Any]]:
    """Run cells in a real kernel; return the outputs of each."""
    nbformat = pytest.importorskip("nbformat.v4")
    nbclient, _ = pytest.importorskip("nbclient"), pytest.importorskip("ipykernel")
    notebook = nbformat.new_notebook(cells=[nbformat.new_code_cell(cell) for cell in cells])
    settings = {"resources": {"metadata": {"path": str(folder)}}, "timeout": 120}
    nbclient.NotebookClient(notebook, allow_errors=True, **settings).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_a_figure_is_a_picture_and_a_typo_is_one_line(folder: Path, tmp_path: Path) -> None:
    shown = f"import raceme; raceme.open({str(folder / 'casa' / 'seed-0')!r}).plot_accuracy()"
    (picture,), (typo,) = execute([shown, "raceme.run('casa', gama=0.2)"], tmp_path)
    assert picture.data["image/png"].startswith("iVBOR")
    assert typo.output_type == "error"
    assert len(typo.traceback) == 1
    assert typo.traceback[0].startswith("raceme: Unknown key 'gama'")


CELLS = """
import raceme
keys = {"clients": 4, "groups": "0.5,0.5", "max_updates": 12, "workers": 0, "eval_every": 6}
run = raceme.run("fedasync", **keys); run
comparison = raceme.compare(["casa", "fedasync"], out="compared", **keys); comparison
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_progress_in_jupyter_is_one_output_that_changes(folder: Path, tmp_path: Path) -> None:
    """The cells run in a real kernel."""
    nbformat = pytest.importorskip("nbformat.v4")
    nbclient, _ = pytest.importorskip("nbclient"), pytest.importorskip("ipykernel")
    shutil.copytree(folder, tmp_path / "compared")
    cells = [nbformat.new_code_cell(source) for source in CELLS.strip().splitlines()]
    notebook = nbformat.new_notebook(cells=cells)
    changes: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: Any, *position: Any) -> Any:
            if message["msg_type"] == "update_display_data":
                changes.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, *position)

    Client(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=300).execute()
    ran, compared_ = (
        ["".join(output["data"]["text/plain"]) for output in cell.outputs if "data" in output]
        for cell in cells[2:]
    )
    # Warnings before the first run are in a separate output.
    (said,) = (output for output in cells[3].outputs if "data" not in output)
    assert "4 clients are too few for CASA" in said["text"]
    assert len(ran) == 2, ran
    assert "12/12 t = " in ran[0]
    assert ran[1].startswith("<fedasync on digits: 12 updates")
    assert any("12/12 t = " in change for change in changes)
    assert "2/2" in compared_[0]
    # A line for each of the two runs between them.
    assert len(compared_) == 4, compared_
    assert compared_[3].startswith("<Comparison on digits: 2 methods")
    assert "evaluated at" not in "".join(ran + compared_)


# -----------------------------------------------------------------------------
# Tables of a comparison.
# -----------------------------------------------------------------------------


def test_tables_for_a_paper(folder: Path, tmp_path: Path) -> None:
    opened = raceme.open(folder)
    assert isinstance(opened, OpenComparison)
    path = tmp_path / "table.tex"
    assert opened.table.to_latex(str(path)) is None
    assert r"\toprule" in path.read_text()
    assert path.read_text() == opened.table.to_latex()
    # Results computed from the table are ordinary data frames.
    assert "purity" in opened.table.to_latex(columns=["purity"])
    assert type(opened.table.head()) is pandas.DataFrame
    purity = opened.purity
    assert purity.loc["casa", 0] == opened.rows["purity"][0]
    printed = str(opened.table)
    assert "..." not in printed
    # The footnote of a marked method is also shown in a notebook.
    assert "\n* casa: " in printed
    assert "<p>* casa: " in opened.table._repr_html_()
    assert "<p>* casa: " in opened._repr_html_()
    assert f"{100 * opened.rows['accuracy'][0]:.2f}" in printed
    assert f"casa & {purity.loc['casa', 0]:.2f}" in purity.to_latex()
    assert opened.times.isna().all(axis=None)
    assert "$>$" in opened.times.to_latex()


# -----------------------------------------------------------------------------
# Papers' experiments, and Flower apps on virtual time.
# -----------------------------------------------------------------------------


def test_a_reproduction_has_the_finished_runs_of_a_folder(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 20)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            sizes = np.array(shape, ">u4").tobytes()
            values = np.arange(np.prod(shape), dtype=np.uint8) % 10
            head = bytes([0, 0, 8, len(shape)])
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + sizes + values.tobytes())
    settings = {**SMALL, "data-root": str(tmp_path / "data"), "model": "mclr", "max-updates": 4}
    part, method, out = "casa-table1.mnist", "fedasync", tmp_path / "out"
    (suite,) = reproductions("casa-table1", "mnist", (), [method], settings).values()
    for job in prepare(replace(suite, seeds=(3,)), out).every:
        simulate(job.config)
    found = raceme.reproduce(
        "casa-table1",
        dataset="mnist",
        methods=[method],
        seeds=[3],
        out=out,
        formats=["tex"],
        **settings,
    )
    assert list(found) == [part]
    assert set(found[part].runs) == {(method, 3)}
    assert "paper" in (out / "compare.tex").read_text()
    with pytest.raises(UserError, match="'nothing'"):
        raceme.reproduce("nothing")


def test_a_flower_app_on_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = raceme.simulate(
        APP,
        clients=3,
        workers=0,
        run_config={"num-server-rounds": 1},
        out=tmp_path / "out",
    )
    assert found.summary["ending"] == "returned"
    assert found.summary["settings"]["run_config"]["num-server-rounds"] == 1
    assert len(found.clients) == 3
    assert "returned after" in repr(found)
    with pytest.raises(UserError, match="fraction-trian"):
        raceme.simulate(APP, run_config={"fraction-trian": 1})
