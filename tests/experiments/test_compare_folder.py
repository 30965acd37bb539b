"""A comparison's folder: one comparison at a time, and no removal of other files."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from forking import Commands
from processes import wait_until
from rich.console import Console

from raceme.core.errors import UserError
from raceme.experiments.compare import compare, prepare
from raceme.experiments.suites import Suite, of_names
from raceme.records.folder import only_writer, remove_run

SETTINGS = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "max-updates": 3}


def suite() -> Suite:
    chosen = of_names(["fedasync"], {"dataset": "digits", **SETTINGS})
    return Suite(chosen.title, chosen.methods, chosen.settings, (0,))


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Return a comparison with an unfinished run that cannot be resumed."""
    run = tmp_path / "out" / "fedasync" / "seed-0"
    run.mkdir(parents=True)
    for name in ("config.toml", "run.sqlite", "run.log"):
        (run / name).write_text(name)
    return run


def test_a_second_comparison_neither_runs_nor_removes_anything(half: Path) -> None:
    out = half.parent.parent
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    plan = prepare(suite(), out)
    with only_writer(out), pytest.raises(UserError, match=r"still writing to .*out"):
        compare(plan, 1, Console(file=io.StringIO()))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_that_goes_on_without_its_comparison_is_waited_for(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raceme.experiments.compare.ORPHAN_SECONDS", 0.1)
    with only_writer(half), pytest.raises(UserError, match=r"still writing to .*seed-0"):
        compare(prepare(suite(), half.parent.parent), 1, Console(file=io.StringIO()))
    # Another process may have started the run again after the wait.
    with only_writer(half), pytest.raises(UserError, match=r"still writing to .*seed-0"):
        remove_run(half)
    assert (half / "run.sqlite").is_file()


def test_a_run_with_something_of_somebody_in_it_is_not_removed(half: Path, tmp_path: Path) -> None:
    (half / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt in it belongs to no run"):
        compare(prepare(suite(), half.parent.parent), 1, Console(file=io.StringIO()))
    (half / "notes.txt").unlink()
    link = tmp_path / "link"
    link.symlink_to(half)
    with pytest.raises(UserError, match="is not removed"):
        remove_run(link)
    remove_run(half)
    assert not half.exists()


def test_a_run_with_trackers_is_removed_whole(half: Path) -> None:
    for name in ("tensorboard", "wandb/offline-run-1"):
        (half / name).mkdir(parents=True)
    for name in (
        "mlflow-run.txt",
        "tensorboard/events.out.tfevents.1.here",
        "wandb-run.txt",
        "wandb/offline-run-1/run.wandb",
    ):
        (half / name).write_text(name)
    (half / "wandb" / "latest-run").symlink_to("offline-run-1")
    (half / "tensorboard" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="tensorboard in it belongs to no run"):
        remove_run(half)
    (half / "tensorboard" / "mine.txt").unlink()
    remove_run(half)
    assert not half.exists()


@pytest.mark.parametrize("name", ["thesis.tex", "accuracy.png", "src/main.py"])
def test_a_folder_of_something_else_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("mine")
    with pytest.raises(
        UserError, match=rf"holds {name.partition('/')[0]}, which belongs to no compar"
    ):
        prepare(suite(), Path("."))
    (tmp_path / "fedasync" / "seed-0").mkdir(parents=True)
    shutil.rmtree(name.partition("/")[0]) if "/" in name else Path(name).unlink()
    prepare(suite(), Path("."))


@pytest.mark.slow
def test_a_comparison_that_is_told_to_stop_loses_nothing(command: Commands, tmp_path: Path) -> None:
    """With SIGTERM, SIGHUP and a full disk under its output, its runs still write checkpoints."""
    out = tmp_path / "out"
    run, log = out / "fedasync" / "seed-0", tmp_path / "log"
    log.symlink_to("/dev/full")
    limits = ["--max-updates", "1000000", "--clients", "3", "--groups", "0.5,0.5"]
    child = command.start(
        *("compare", "fedasync", "--out", str(out), "--processes", "1", *limits), output=log
    )
    # The first checkpoint is written at the start.
    first = run / "checkpoint" / "00000001.safetensors"
    wait_until(lambda: first.exists() or not Path(f"/proc/{child}").exists(), 60)
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGHUP)
    assert command.exit_code() == 130
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ending"], summary["reason"]) == ("interrupted", "interrupted by SIGTERM")
    assert (run / "checkpoint" / "00000002.safetensors").is_file()
    with only_writer(run), only_writer(out):
        pass
