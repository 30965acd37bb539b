"""A method in its user's own files, with its own client half and measure."""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from processes import ROOT
from typer.testing import CliRunner

from raceme.cli import app, main
from raceme.core.config import read_toml
from raceme.core.errors import UserError

FILES = ("my_method.py", "my_client.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files."""
    for name in FILES:
        shutil.copy(ROOT / "tests" / "own" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_it_is_no_longer_than_a_page_or_two() -> None:
    lines = [len((ROOT / "tests" / "own" / name).read_text().splitlines()) for name in FILES]
    assert sum(lines) <= 120


@pytest.mark.pictures
def test_its_kind_of_work_and_its_measure_are_everywhere(folder: Path) -> None:
    run = ["run", "--strategy", "my_method:ByMeans", "--max-updates", "400", "--workers", "0"]
    ended = CliRunner().invoke(app, [*run, "--out", "out"], catch_exceptions=False)
    assert "distance to the nearest cluster" in ended.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["accuracy"] > 0.95
    assert summary["purity"] == 1.0
    assert summary["bytes_by_phase"]["my_client:mean_inputs"]["up"] > 0
    assert (folder / "out" / "measure-far.png").is_file()
    with closing(sqlite3.connect(folder / "out" / "run.sqlite")) as store:
        rows = store.execute("SELECT client, far FROM measure_far").fetchall()
    assert len({client for client, _ in rows}) == 40
    assert summary["measures"]["far"]["value"] == pytest.approx(max(far for _, far in rows))


def test_it_stands_beside_others_in_a_comparison(folder: Path) -> None:
    chosen = ["compare", "my_method:ByMeans", "fedasync", "--seeds", "0", "--workers", "1"]
    limits = ["--max-updates", "80", "--clients", "8", "--out", "cmp"]
    CliRunner().invoke(app, [*chosen, *limits], catch_exceptions=False)
    with (folder / "cmp" / "compare.csv").open(newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    own, other = rows["my_method:ByMeans"], rows["fedasync"]
    assert float(own["measure_far"]) > 0
    assert other["measure_far"] == ""


def test_a_run_of_other_code_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = (
        "from raceme.strategies import FedAsync\nfrom rates import RATE\nclass Own(FedAsync):\n"
    )
    (folder / "edited.py").write_text(method + '    "A method of two files."\n')
    (folder / "rates.py").write_text("RATE = 0.5\n")
    (folder / "unrelated.py").write_text("")
    chosen = ["compare", "edited:Own", "--seeds", "0", "--clients", "2", "--workers", "1"]
    compared = [*chosen, "--max-updates", "4", "--out", "cmp"]
    assert "kept" not in CliRunner().invoke(app, compared, catch_exceptions=False).output
    (folder / "unrelated.py").write_text("OTHER = 1\n")
    assert "kept" in CliRunner().invoke(app, compared, catch_exceptions=False).output
    (folder / "rates.py").write_text("RATE = 0.6\n")
    with pytest.raises(UserError, match=r"seed-0 holds a finished run, .* has changed since"):
        CliRunner().invoke(app, compared, catch_exceptions=False)


def test_a_method_may_be_named_like_a_key(folder: Path) -> None:
    # The configuration has the key `devices`, and the class Devices the key devices.alpha.
    (folder / "unlucky.py").write_text("from raceme.strategies import FedAsync as Devices\n")
    run = ["run", "--strategy", "unlucky:Devices", "--clients", "2", "--workers", "0"]
    rest = ["--max-updates", "4", "--set", "devices.alpha=0.3", "--out", "out"]
    CliRunner().invoke(app, [*run, *rest], catch_exceptions=False)
    kept = read_toml(folder / "out" / "config.toml")
    assert (kept["devices"], kept["devices.alpha"]) == ("slow30x5", 0.3)
    resumed = ["run", "--resume", "out", "--trust", "out", "--max-updates", "6"]
    CliRunner().invoke(app, resumed, catch_exceptions=False)
    assert read_toml(folder / "out" / "config.toml") == kept | {"max-updates": 6}


def test_a_run_that_goes_on_with_other_code_reports_it(folder: Path) -> None:
    (folder / "goingon.py").write_text("from raceme.strategies import FedAsync as Own\n")
    run = ["run", "--strategy", "goingon:Own", "--clients", "2", "--workers", "0", "--out", "out"]
    limits = ["--max-updates", "4", "--set", "checkpoint-every=2"]
    CliRunner().invoke(app, [*run, *limits], catch_exceptions=False)
    resume = ["run", "--resume", "out", "--trust", "out", "--max-updates"]
    same = CliRunner().invoke(app, [*resume, "6"], catch_exceptions=False)
    assert "has changed since" not in same.stderr
    (folder / "goingon.py").write_text("from raceme.strategies import FedAsync as Own # other\n")
    other = CliRunner().invoke(app, [*resume, "8"], catch_exceptions=False)
    assert "The run goes on, but the source of a module" in other.stderr
    assert json.loads((folder / "out" / "summary.json").read_text())["updates"] == 8


BROKEN = """
from dataclasses import dataclass; import numpy as np
from raceme.core.requests import Outcome, Request
from raceme.core.strategy import Method

@dataclass(frozen=True)
class Plain:
    share: float = 0.5

class Raises(Method):
    "Raises an exception; its parameter is a plain field."
    parameters_type = Plain
    def on_update(self, update):
        raise LookupError(f"no {self.parameters.share}")

class Forgets(Method):
    "Returns nothing."
    def on_update(self, update):
        pass

class Backdates(Method):
    "Returns an impossible staleness."
    def on_update(self, update):
        return Outcome(0, -1, 0.5)

class Rests(Method):
    "Requests nothing."
    def request_for(self, client):
        pass

def listed(labels, config, rng):
    return []

def lost(config):
    return {}["x"]

class Names(Method):
    "Requests a model of no cluster."
    def request_for(self, client):
        return Request(client, models=(9,))

class Computes(Method):
    "Has a setting of numpy's, and returns no cluster."
    def request_for(self, client):
        return Request(client, settings={"lr-scale": np.float32(0.5)})
    def on_update(self, update):
        return Outcome(7, 0, 0.5)
"""


FAILING = """
from raceme.core.requests import Request
from raceme.strategies import FedAsync

def train_nothing(work):
    return {}["rate"]

class Fails(FedAsync):
    "Requests a kind of work that raises an exception."
    def request_for(self, client):
        return Request(client, kind="failing:train_nothing", models=(0,))
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_exception_in_client_work_names_the_line(folder: Path, workers: str) -> None:
    (folder / "failing.py").write_text(FAILING)
    run = ["run", "--strategy", "failing:Fails", "--clients", "2", "--workers", workers]
    CliRunner().invoke(app, [*run, "--out", "out"], catch_exceptions=False)
    reason = json.loads((folder / "out" / "summary.json").read_text())["reason"]
    assert reason.endswith("KeyError: 'rate' (failing.py, line 6)")


MISCOUNTING = """
from dataclasses import dataclass, field
from raceme.strategies import FedAsync

@dataclass
class Counted:
    seen: dict[str, int] = field(default_factory=dict)

class Fraction(FedAsync):
    "Puts a value of another type than annotated into its state."
    state_type, value = Counted, 1.5
    def on_update(self, update):
        self.state.seen["a"] = self.value
        return super().on_update(update)

class Nothing(Fraction):
    "The same with None."
    value = None

class Thing(Fraction):
    "The same with an object."
    value = object()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Fraction", "Counted.seen: 1.5 is no int"),
        ("Nothing", "Counted.seen: None is no int"),
        ("Thing", "cannot keep a object in a state"),
    ],
)
def test_a_state_of_other_types_is_told_at_its_checkpoint(
    folder: Path, name: str, said: str
) -> None:
    (folder / "miscounting.py").write_text(MISCOUNTING)
    run = ["run", "--strategy", f"miscounting:{name}", "--clients", "2", "--workers", "0"]
    limits = ["--max-updates", "4", "--set", "checkpoint-every=2", "--out", "out"]
    ended = CliRunner().invoke(app, [*run, *limits])
    assert ended.exit_code == 1
    told = f"checkpoint could not be written (the state of {name} is invalid: {said})"
    assert told in ended.stderr
    assert (folder / "out" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("--strategy broken:Raises --raises.share 0.7", "LookupError: no 0.7 (broken.py, line 14)"),
        ("--strategy broken:Forgets", "Forgets must return an Outcome for each update, got None"),
        ("--strategy broken:Backdates", "Backdates returned Outcome(cluster=0, staleness=-1, wei"),
        ("--strategy broken:Rests", "Rests.request_for() must return a Request, got None"),
        (
            "--strategy broken:Names",
            "A request of Names names model 9: there is no such clust",
        ),
        ("--strategy broken:Computes", "Computes returned Outcome(cluster=7, staleness=0"),
        ("--partition broken:listed", "'broken:listed' must return a raceme.datasets.partition."),
        ("--partition broken:Plain", "'broken:Plain' is no partition: expected def Plain(lab"),
        ("--dataset broken:Plain", "'broken:Plain' is no dataset: expected a subclass of rac"),
        (
            "--dataset raceme.features.protection.guards:Guard",
            "Guard' is no dataset: expected a subclass",
        ),
        (
            "--attack raceme.features.protection.guards:Guard",
            "Guard' is no attack: expected a subclass of",
        ),
        ("--dataset broken:lost", "KeyError: 'x' (broken.py, line 35)"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_one_line(
    chosen: str,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (folder / "broken.py").write_text(BROKEN)
    typed = f"raceme run {chosen} --clients 2 --max-updates 2 --workers 0 --out out"
    monkeypatch.setattr("sys.argv", typed.split())
    with pytest.raises(SystemExit) as ended:
        main()
    last = capfd.readouterr().err.splitlines()[-1]
    assert (last.startswith("raceme: "), said in last, ended.value.code) == (True, True, 2)
    raises = "Raises" in chosen
    assert ("LookupError" in (folder / "out" / "error.txt").read_text()) if raises else True


LATE = """
from raceme.strategies import FedAsync

class Late(FedAsync):
    "Raises an exception after some updates."
    after = 99
    def on_update(self, update):
        if self.progress.updates == self.after:
            raise RuntimeError("boom")
        return super().on_update(update)
"""


def test_a_mistake_after_a_resumption_is_not_blamed_on_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "late.py").write_text(LATE)
    run = "run --strategy late:Late --clients 2 --workers 0 --checkpoint-every 2 --out out"
    CliRunner().invoke(app, [*run.split(), "--max-updates", "4"], catch_exceptions=False)
    # The value that the checkpoint was written with.
    monkeypatch.setattr("late.Late.after", 2)
    resume = "raceme run --resume out --strategy late:Late --max-updates 8"
    monkeypatch.setattr("sys.argv", resume.split())
    with pytest.raises(SystemExit):
        main()
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("raceme: RuntimeError: boom (late.py, line 9). Correct it there; if")
    assert (folder / "out" / "error.txt").read_text().endswith("RuntimeError: boom\n")
