"""The examples of docs/extending.md do what the page says, in a user's own files and installed.

Commands run in processes that do not search the current folder, like the console script.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from forking import Commands
from processes import ROOT, loopback

from raceme.core.config import read_toml
from raceme.experiments.suites import load_suite, variants

PAGE = ROOT / "docs" / "extending.md"
MOST_LINES = 70
SMALL = ["--clients", "6", "--max-updates", "12", "--workers", "2"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


METHOD, DATA, *_ = blocks("python")


Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def typed(command: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Run a command in a folder."""
    monkeypatch.setenv("COLUMNS", "150")
    return partial(command.typed, tmp_path)


@pytest.fixture
def raceme(typed: Typed) -> Callable[..., str]:
    """Run a command that must succeed; return its output."""

    def run(*arguments: str, site: Path | None = None) -> str:
        done = typed(*arguments, site=site)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def summary(out: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((out / "summary.json").read_text())
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the page's two files."""
    (tmp_path / "my_method.py").write_text(METHOD)
    (tmp_path / "my_data.py").write_text(DATA)
    return tmp_path


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's distribution, as pip installs it."""
    site = tmp_path_factory.mktemp("site")
    (site / "my_method.py").write_text(METHOD)
    (site / "my_data.py").write_text(DATA)
    project = tomllib.loads(blocks("toml")[0])["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


def test_the_method_of_the_page_in_a_file_of_ones_own(
    folder: Path, raceme: Callable[..., str]
) -> None:
    assert len(METHOD.splitlines()) <= MOST_LINES
    limits = ["--max-updates", "500", "--workers", "0", "--eval-every", "250"]
    raceme("run", "--strategy", "my_method:Mine", *limits, "--out", "run")
    found = summary(folder / "run")
    assert found["accuracy"] >= 0.98
    assert found["purity"] == 1.0
    keys = read_toml(folder / "run" / "config.toml")
    assert (keys["strategy"], keys["mine.every"]) == ("my_method:Mine", 200)
    raceme("report", "run")
    assert "updates between two groupings" in (folder / "run" / "report.html").read_text()


@pytest.mark.slow
def test_keys_of_ones_own_and_the_configuration_that_repeats_them(
    folder: Path, raceme: Callable[..., str], typed: Typed
) -> None:
    own = ["--strategy", "my_method:Mine", "--mine.alpha", "0.3", "--set", "mine.every=6"]
    raceme("run", *own, *SMALL, "--out", "one")
    assert read_toml(folder / "one" / "config.toml")["mine.alpha"] == 0.3
    raceme("run", "--config", "one/config.toml", "--trust", "one", "--out", "two")
    one, two = (summary(folder / name) for name in ("one", "two"))
    assert one["accuracy"] == two["accuracy"]
    wrong = typed("run", "--strategy", "my_method:Mine", "--mine.alfa", "0.3")
    assert "Did you mean 'mine.alpha'?" in wrong.stderr


@pytest.mark.slow
def test_data_of_ones_own_reach_worker_processes(folder: Path, raceme: Callable[..., str]) -> None:
    dealt = ["--partition", "my_data:halves", "--first-half", "0.34"]
    changing = ["--drift", "my_data:Mirror", "--drift-at", "6 updates"]
    chosen = ["--strategy", "fedasync", *SMALL, *dealt, *changing]
    raceme("run", *chosen, "--dataset", "my_data:Iris", "--measurements", "2", "--out", "a")
    keys = read_toml(folder / "a" / "config.toml")
    assert (keys["measurements"], keys["model"], keys["first-half"]) == (2, "mclr", 0.34)
    assert summary(folder / "a")["updates"] == 12
    raceme("run", *chosen, "--dataset", "my_data:blobs", "--out", "b")
    assert summary(folder / "b")["dataset"] == "my_data:blobs"


@pytest.mark.slow
def test_the_attack_and_the_protection_of_the_page(
    folder: Path, raceme: Callable[..., str]
) -> None:
    (defence,) = (block for block in blocks("python") if "class Steady(Guard)" in block)
    (folder / "my_defence.py").write_text(defence)
    (line,) = re.findall(r"^raceme (run --attack my_defence.*)$", PAGE.read_text(), re.M)
    raceme(*line.split(), "--max-updates", "200", "--workers", "0", "--out", "run")
    found = summary(folder / "run")
    rulings, attackers = found["verdicts"], found["attackers"]
    assert isinstance(rulings, dict)
    assert isinstance(attackers, list)
    refused = {client for client, counts in rulings.items() if counts["refused"]}
    assert len(refused & set(attackers)) >= len(attackers) / 2
    assert not refused - set(attackers)


def test_a_fleet_and_a_model_of_ones_own(folder: Path, raceme: Callable[..., str]) -> None:
    (folder / "my_fleet.py").write_text(
        "from raceme.simulation import Device\n\n"
        "def devices(clients, seed):\n"
        "    return [Device(seconds_per_round=2.0) for _ in range(clients)]\n"
    )
    (folder / "my_models.py").write_text(
        "from math import prod\n\nfrom torch import nn\n\n"
        "def build(input_shape, num_classes):\n"
        "    linear = nn.Linear(prod(input_shape), num_classes)\n"
        "    return nn.Sequential(nn.Flatten(), linear)\n"
    )
    chosen = ["--devices", "my_fleet:devices", "--model", "my_models:build", *SMALL]
    raceme("run", "--strategy", "fedasync", *chosen, "--out", "run")
    assert summary(folder / "run")["virtual_time"] == 4.0


@pytest.mark.slow
def test_what_is_installed_has_names_everywhere(
    tmp_path: Path, site: Path, raceme: Callable[..., str], typed: Typed
) -> None:
    listed = raceme("list", site=site)
    for name in ("kmeans-async", "iris", "blobs", "halves", "mirror"):
        assert re.search(rf"^ *{name}  +\S", listed, re.M), name
    assert "updates between two groupings" in raceme(
        "list", "kmeans-async.every", "--keys", site=site
    )
    # Runs in processes that a comparison starts.
    chosen = ["--dataset", "iris", "--set", "kmeans-async.every=6", "--partition", "halves"]
    limits = ["--clients", "4", "--max-updates", "8", "--processes", "2"]
    compared = raceme(
        "compare", "kmeans-async", "fedasync", *chosen, *limits, "--out", "out", site=site
    )
    assert "kmeans-async" in compared
    keys = read_toml(tmp_path / "out" / "kmeans-async" / "seed-0" / "config.toml")
    assert (keys["kmeans-async.every"], keys["dataset"]) == (6, "iris")
    assert "kmeans-async.every" not in read_toml(
        tmp_path / "out" / "fedasync" / "seed-0" / "config.toml"
    )
    wrong = typed("run", "--strategy", "kmean-async", site=site)
    assert "Did you mean 'kmeans-async'?" in wrong.stderr


@pytest.mark.slow
def test_what_is_installed_runs_on_flowers_engine(tmp_path: Path, site: Path) -> None:
    named = "strategy=kmeans-async kmeans-async.every=6 dataset=iris partition=halves"
    keys = f'max-updates=12 clients=2 out="{tmp_path / "out"}" set="{named}"'
    fleet = "num-supernodes=2 client-resources-num-cpus=1"
    with loopback(tmp_path) as place:
        place.paths = (str(site),)
        place.superlink("--insecure", "--simulation")
        typed = ["run", str(ROOT), "--stream", "--federation-config", fleet, "--run-config", keys]
        run = place.flwr(*typed)
        run.wait(240)
        assert (tmp_path / "out").is_dir(), run.text()
    found = summary(tmp_path / "out")
    assert (found["strategy"], found["updates"]) == ("kmeans-async", 12)


def test_the_suite_of_the_page(tmp_path: Path) -> None:
    text = blocks("toml")[1]
    (tmp_path / "suite.toml").write_text(text)
    suite = load_suite(tmp_path / "suite.toml")
    patient, grouped, hasty = suite.methods
    assert suite.config(patient, 0).max_updates == 2000
    assert [variant.row.accuracy for variant in grouped.variants() if variant.row] == [94.1, 95.2]
    assert [suite.config(point, 0, trial=True).max_updates for point in hasty.variants()] == [
        400,
        400,
    ]
    assert [point.options["server-lr"] for point in hasty.variants()] == [0.3, 1.0]


def test_the_suite_with_variants_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(blocks("toml")[2])
    found = variants(path)
    assert set(found) == {"digits-even", "digits-slow", "synthetic-even"}
    slow, synthetic = load_suite(found["digits-slow"]), load_suite(found["synthetic-even"])
    assert (slow.title, slow.async_updates) == ("Waiting, digits, slow devices", 2000)
    assert [note.split()[0] for note in slow.notes] == ["Slow:", "Accuracies"]
    assert [method.row and method.row.time for method in synthetic.methods] == [math.inf, 20]
    assert [method.row for method in slow.methods] == [None, None]
