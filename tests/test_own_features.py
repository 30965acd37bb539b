"""Features in their users' own files: those of docs/extending.md, and a longer one."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from processes import ROOT, free_port, loopback, raceme
from typer.testing import CliRunner

from raceme import run as run_in_python
from raceme.cli import app
from raceme.client_app import client_halves
from raceme.core.config import read_toml
from raceme.core.errors import UserError
from raceme.core.feature import Feature
from raceme.records.folder import CHECKPOINTS
from raceme.runs.checkpoints import read_tree

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CLIP, REPORT = "my_features:Clip", "my_features:Battery"
BATTERY = "my_battery:Battery"
"""A longer example: state on both sides, options, and shorter training."""
RUN = ["run", "--strategy", "fedasync", "--clients", "6", "--devices", "uniform"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the page's files."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (block,) = (block for block in blocks if "class Clip(" in block)
    (tmp_path / "my_features.py").write_text(block)
    shutil.copy(ROOT / "tests" / "own" / "my_battery.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def type_in(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False).output


def rows(out: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(out / "run.sqlite")) as store:
        return store.execute(query).fetchall()


def models(out: Path) -> bytes:
    return (out / "clusters" / "0.safetensors").read_bytes()


@pytest.mark.pictures
def test_updates_are_clipped_to_the_median_length(folder: Path) -> None:
    limits = ["--max-updates", "30", "--workers", "0", "--eval-every", "30"]
    said = type_in(*RUN, *limits, "--features", CLIP, "--clip.window", "4", "--out", "out")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    clipped = rows(folder / "out", "SELECT client, length FROM measure_clipped")
    assert 0 < len(clipped) < 30
    assert summary["measures"]["clipped"]["value"] == max(length for _, length in clipped)
    assert "length of clipped updates" in said
    assert (folder / "out" / "measure-clipped.png").is_file()
    keys = read_toml(folder / "out" / "config.toml")
    assert (keys["features"], keys["clip.window"]) == (CLIP, 4)
    type_in(*RUN, *limits, "--out", "plain")
    assert models(folder / "plain") != models(folder / "out")


def test_clients_report_their_battery_from_any_process(folder: Path) -> None:
    chosen = [*RUN, "--max-updates", "24", "--features", f"{CLIP}, {BATTERY}"]
    chosen += ["--local-epochs", "2", "--set", "battery.use=30", "--set", "battery.low=50"]
    for workers in ("0", "2"):
        type_in(*chosen, "--workers", workers, "--out", workers)
    query = "SELECT client, battery FROM measure_battery"
    reports = rows(folder / "0", query)
    assert len(reports) == 24
    # Each of six equal devices trains four times.
    assert sorted(level for client, level in reports if client == reports[0][0]) == [
        *(-20.0, 10.0, 40.0, 70.0)
    ]
    assert rows(folder / "2", query) == reports
    assert models(folder / "2") == models(folder / "0")


def test_the_battery_of_the_page_is_measured(folder: Path) -> None:
    said = type_in(*RUN, "--max-updates", "6", "--workers", "0", "--features", REPORT, "--out", "o")
    assert rows(folder / "o", "SELECT battery FROM measure_battery") == [(100.0,)] * 6
    assert "battery of clients" in said


def test_a_low_battery_shortens_the_training(folder: Path) -> None:
    """Devices report no number of epochs: the model shows that one epoch was trained, not two."""
    chosen = [*RUN, "--max-updates", "12", "--workers", "0", "--features", BATTERY]
    for name, low, epochs in (("short", "100", "2"), ("one", "0", "1"), ("two", "0", "2")):
        keys = ["--local-epochs", epochs, "--set", f"battery.low={low}"]
        type_in(*chosen, *keys, "--out", name)
    # The first request precedes any report, so that the runs differ.
    assert len({models(folder / name) for name in ("short", "one", "two")}) == 3


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path) -> None:
    chosen = [*RUN, "--workers", "0", "--features", f"{CLIP},{BATTERY}"]
    chosen += ["--set", "checkpoint-every=9"]
    type_in(*chosen, "--max-updates", "30", "--out", "whole")
    type_in(*chosen, "--max-updates", "18", "--out", "parts")
    tree, _ = read_tree(max((folder / "parts" / CHECKPOINTS).iterdir()))
    states = tree["strategy"]["features"]
    assert list(states) == [CLIP, BATTERY]
    assert len(states[CLIP]["lengths"]) == 9
    assert len(states[BATTERY]["levels"]) == 6
    type_in("run", "--resume", "parts", "--trust", "parts", "--max-updates", "30")
    for measure in ("clipped", "battery"):
        query = f"SELECT * FROM measure_{measure}"
        assert len(rows(folder / "parts", query)) == len(rows(folder / "whole", query))
    assert models(folder / "parts") == models(folder / "whole")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--features", "my_features:Clop"], "has no Class 'Clop' for feature 'my_features:Clop'"),
        (["--features", "my_features:ClipState"], "is no feature: expected a subclass of"),
        (["--features", "clip"], "Unknown feature 'clip'"),
        (["--features", "protection"], "Every run has the feature 'protection'"),
        (["--set", "clip.window=3"], "Unknown key 'clip.window'"),
        (["--features", CLIP, "--set", "clip.window=0"], "clip.window must be at least 1"),
        (["--features", CLIP, "--set", "clip.windows=3"], "Did you mean 'clip.window'?"),
    ],
)
def test_mistakes_are_told_before_a_run(arguments: list[str], said: str, folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        type_in(*RUN, "--max-updates", "2", "--workers", "0", *arguments)


def test_an_update_that_a_feature_refuses_is_rejected_with_its_reason(folder: Path) -> None:
    (folder / "refusing.py").write_text(
        "from raceme.core.feature import Feature, Refusal\n"
        "class Refusing(Feature):\n"
        "    def on_update(self, update, context):\n"
        "        return update if context.updates % 2 else Refusal('it is even')\n"
        "    def on_applied(self, updates, outcomes, context):\n"
        "        assert len(updates) == len(outcomes) == 1\n"
        "class First(Refusing):\n"
        "    def on_update(self, update, context):\n"
        "        return update\n"
    )
    limits = ["--max-updates", "2", "--workers", "0", "--max-time", "400"]
    type_in(*RUN, *limits, "--features", "refusing:First", "--out", "first")
    assert not rows(folder / "first", "SELECT * FROM rejections")
    type_in(*RUN, *limits, "--features", "refusing:Refusing", "--out", "none")
    reasons = {row[0] for row in rows(folder / "none", "SELECT reason FROM rejections")}
    assert "it is even" in reasons


def test_a_private_device_leaves_out_what_would_have_no_noise(folder: Path) -> None:
    def halves(**node: float) -> int:
        of = {key.replace("_", "-"): value for key, value in node.items()}
        return len(client_halves(Context(1, 1, of, RecordDict(), {"features": BATTERY})))

    assert halves() == 1
    assert halves(local_dp_epsilon=5.0) == 0


def test_a_class_of_a_script_is_a_feature(tmp_path: Path) -> None:

    class Halving(Feature):
        """Halves the model."""

        def on_update(self, update, context):  # type: ignore[no-untyped-def]
            return update.__class__(
                update.task, np.float32(0.5) * update.vector, update.num_examples, update.train_loss
            )

    keys = {"strategy": "fedasync", "clients": 4, "max_updates": 8}
    plain = run_in_python(**keys, out=tmp_path / "plain")
    halved = run_in_python(**keys, features=[Halving], out=tmp_path / "halved")
    one, other = (
        sum(np.abs(array).sum() for array in run.models[0].values()) for run in (plain, halved)
    )
    assert other < one


@pytest.mark.slow
def test_the_battery_of_real_devices(folder: Path) -> None:
    """Devices import the module from their working folder."""
    with loopback(folder) as bed:
        bed.fleet_port, bed.http_port = free_port(), free_port()
        places = ("--address", bed.fleet_address, "--http", bed.http_address, "--out", "out")
        keys = ("--strategy", "fedasync", "--clients", "2", "--groups", "0.5,0.5")
        limits = ("--max-updates", "6", "--clients-min", "2", "--eval-every", "1000")
        own = ("--features", f"{CLIP},{REPORT}")
        server = bed.start("serve", raceme("serve", *places, *keys, *limits, *own))
        trusted = ("--trusted-app", "raceme/raceme", "--trusted-model", CLIP)
        for number in range(2):
            node = f"partition-id={number} num-partitions=2 battery={50.5 + number}"
            own = ("--trusted-model", REPORT, "--node-config", node)
            bed.device("--insecure", *trusted, *own)
        assert server.wait(240) == 0
    levels = rows(folder / "out", "SELECT battery FROM measure_battery")
    assert len(levels) == 6
    assert set(levels) == {(50.5,), (51.5,)}
