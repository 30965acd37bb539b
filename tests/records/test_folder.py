"""Ownership of a folder: no foreign file is overwritten, and one process at a time writes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.fleet.testbed import prepare
from raceme.records.folder import begin, foreign, new_folder, only_writer
from raceme.runs.experiment import simulate

KEYS = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "max-updates": 3}
ROOT = Path(__file__).resolve().parents[2]

HOLD = """
import sys, time
from pathlib import Path
from raceme.records.folder import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def config(out: Path | str, **keys: int) -> RunConfig:
    return RunConfig.from_mapping({**KEYS, **keys, "out": str(out)})


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "thesis.tex", ".git"])
def test_a_folder_with_anything_in_it_is_not_written_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        with pytest.raises(UserError, match=rf"not empty and holds no run \({name} is in it\)"):
            simulate(config(out))
        with pytest.raises(UserError, match="choose a new folder with --out"):
            prepare({**KEYS, "out": out})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    simulate(config(tmp_path))
    assert (tmp_path / "run.sqlite").is_file()
    with pytest.raises(UserError, match="holds a run already"):
        simulate(config(tmp_path))
    assert not foreign(tmp_path)


def test_a_second_process_writes_nothing(tmp_path: Path) -> None:
    """Both processes found the folder empty, and one of them holds its lock."""
    with only_writer(tmp_path), pytest.raises(UserError, match="Another process is still writing"):
        simulate(config(tmp_path, seed=5))
    assert not list(tmp_path.iterdir())
    begin(tmp_path, config(tmp_path, seed=1))
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(UserError, match="is not empty"):
        begin(tmp_path, config(tmp_path, seed=2))
    assert (tmp_path / "config.toml").read_text() == before


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {new_folder("", config("").short_name) for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="Another process"):
            only_writer(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
    with only_writer(tmp_path):
        pass


@pytest.mark.parametrize("name", ["notes.txt", "cat.png", "checkpoint/notes.txt"])
def test_folders_that_no_run_has_written_are_recognised(name: str, tmp_path: Path) -> None:
    left = ["run.sqlite", "run.sqlite-journal", "accuracy.png", ".summary.json.partial"]
    for own in (*left, "checkpoint/00000001.safetensors", "clusters/.0.safetensors.partial"):
        (tmp_path / own).parent.mkdir(exist_ok=True)
        (tmp_path / own).touch()
    assert foreign(tmp_path) == ""
    (tmp_path / name).write_text("mine")
    assert foreign(tmp_path) == name.partition("/")[0]
