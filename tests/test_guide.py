"""The task pages of docs/guide work as typed: each block is run in the order of the page."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ROOT, free_port

from raceme.cli import COMMANDS

GUIDE = ROOT / "docs" / "guide"
MOST_WORDS = 400
FILES = {"toml": "fleet.toml", "my-method": "half.py"}
"""Blocks that a page tells to save: by language, and a page's first block of Python."""
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def typed(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [(language, textwrap.dedent(block)) for _, language, block in BLOCK.findall(text)]


def follow(page: str, folder: Path) -> None:
    """Type a page in an empty folder."""
    command = folder / "bin" / "raceme"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m raceme "$@"\n')
    command.chmod(0o755)
    paths = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths, "COLUMNS": "150"}
    script = ""
    for number, (language, block) in enumerate(typed(GUIDE / f"{page}.md")):
        saved = FILES.get(language) or (FILES.get(page) if not number else None)
        if saved:
            (folder / saved).write_text(block)
            continue
        if language == "python":
            # One session up to the next command: a block goes on from those before it.
            script += block
        else:
            script = ""
        run = ["bash", "-ec", block] if language == "bash" else [sys.executable, "-c", script]
        done = subprocess.run(
            run,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def summary(folder: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return loaded


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.stem)
def test_a_task_is_at_most_a_page(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_my_data(tmp_path: Path) -> None:
    follow("my-data", tmp_path)
    figures = summary(tmp_path / "people-run")
    assert figures["clients"] == 8
    assert figures["clusters"] == 2


@pytest.mark.slow
def test_my_method(tmp_path: Path) -> None:
    follow("my-method", tmp_path)
    assert summary(tmp_path / "half-run")["strategy"] == "half:Half"
    rows = (tmp_path / "half-comparison" / "compare.csv").read_text().splitlines()
    assert len(rows) == 5  # two methods, two seeds


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    follow("resume", tmp_path)
    assert summary(tmp_path / "long-run")["updates"] == 200


@pytest.mark.slow
def test_churn(tmp_path: Path) -> None:
    follow("churn", tmp_path)
    assert summary(tmp_path / "churn-run")["updates"] == 300


@pytest.mark.slow
def test_models(tmp_path: Path) -> None:
    follow("models", tmp_path)
    assert len(list((tmp_path / "models-run" / "clients").glob("*.safetensors"))) == 12
    assert (tmp_path / "client-3" / "model.safetensors").is_file()


@pytest.mark.slow
def test_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [text for language, text in typed(ROOT / "README.md") if language == "python"]
    space: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    assert len(blocks[0].splitlines()) <= 10
    assert (tmp_path / "accuracy.pdf").is_file()
    assert len(space["comparison"].rows) == 4
    assert "casa" in capsys.readouterr().out


def commands_of_the_readme() -> list[list[str]]:
    """Return the words of each command in the README's blocks, in order, but the installation.

    `tests/slow/test_start.py` types that.
    """
    blocks = [text for language, text in typed(ROOT / "README.md") if language == "bash"]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [words for words in commands if words[0] == "raceme"]


def start_raceme(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Type a command as it stands; its output goes to the file `log` of the folder."""
    assert words[0] == "raceme"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=environment,
            text=True,
            stdout=log,
            stderr=log,
        )


def test_the_readme_installs_what_there_is_and_names_commands_that_there_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (flower,) = (one for one in project["dependencies"] if one.startswith("flwr"))
    first, beyond = (int(minor) for minor in re.findall(r"1\.(\d+)", flower))
    assert f"[Flower 1.{first} to 1.{beyond - 1}]" in text
    named = {name for group in re.findall(r"\.\[([\w,]+)\]", text) for name in group.split(",")}
    assert named
    assert named <= set(extras)
    assert {words[1] for words in commands_of_the_readme()} <= set(COMMANDS)
    inline = re.findall(r"`raceme (\w+)[^`]*`", text)
    assert inline
    assert set(inline) <= set(COMMANDS)


@pytest.mark.slow
def test_commands_of_the_readme_come_to_what_it_says(tmp_path: Path) -> None:
    """Each command in a block is typed; one that is new needs an outcome here."""
    port, lab = free_port(), tmp_path / "lab"
    changes = {"127.0.0.1:9092": f"127.0.0.1:{port}", "/tmp/raceme-lab": str(lab)}
    served: list[subprocess.Popen[str]] = []
    summaries: dict[str, dict[str, Any]] = {}
    for number, words in enumerate(commands_of_the_readme()):
        words = [changes.get(word, word) for word in words]
        if words[1] in ("serve", "device"):
            address = ["--address", f"127.0.0.1:{port}"] if words[1] == "serve" else []
            served.append(start_raceme([*words, *address], tmp_path))
            continue
        out = ["--out", str(tmp_path / str(number))] if words[1] == "run" else []
        assert start_raceme([*words, *out], tmp_path).wait(280) == 0, (tmp_path / "log").read_text()
        if out:
            summaries[" ".join(words)] = summary(Path(out[1]))
        else:
            assert words[:4] == ["raceme", "compare", "casa", "fedasync"], "no outcome is known"
    # "It finds the four groups. FedAsync trains one model for all, and is less accurate."
    casa = summaries.pop("raceme run")
    fedasync = summaries.pop("raceme run --strategy fedasync")
    assert not summaries, "no outcome is known"
    assert casa["clients"] == 40
    assert casa["clusters"] == 4
    assert casa["purity"] == 1
    assert fedasync["clusters"] == 1
    assert fedasync["accuracy"] < casa["accuracy"]
    rows = list(csv.DictReader((tmp_path / "comparison" / "compare.csv").open()))
    accuracies = {
        method: [float(row["accuracy"]) for row in rows if row["method"] == method]
        for method in ("casa", "fedasync")
    }
    assert [len(own) for own in accuracies.values()] == [3, 3]
    assert max(accuracies["fedasync"]) < min(accuracies["casa"])
    # A server and two devices, each in its own terminal.
    server, *devices = served
    try:
        assert len(devices) == 2
        assert server.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        for process in served:
            process.terminate()
            process.wait(60)
    assert summary(lab)["updates"] == 20
    assert (tmp_path / "log").read_text().count(f"online at 127.0.0.1:{port}") == 2


@pytest.mark.slow
def test_compare(tmp_path: Path) -> None:
    follow("compare", tmp_path)
    table = (tmp_path / "comparison" / "compare.tex").read_text()
    assert r"\toprule" in table
    assert re.search(r"^\{\}panicle & ", table, re.MULTILINE)
    assert (tmp_path / "comparison" / "accuracy.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_three_pis(tmp_path: Path) -> None:
    port, rng = free_port(), np.random.default_rng(0)
    for name in ("sample", "kitchen", "garden", "cellar"):
        x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
        parts = {"x_train": x[:45], "y_train": y[:45], "x_test": x[45:], "y_test": y[45:]}
        np.savez(tmp_path / f"{name}.npz", **parts, num_classes=3)
    # On one machine: other addresses, and the paths of the folder with the keys.
    changes = {"server.example.org:9092": f"localhost:{port}", "server.example.org": "localhost"}
    changes |= {"\\\n": " ", "--root-certificates ca.crt": "--root-certificates certs/ca.crt"}
    changes |= {"--key kitchen": "--key certs/devices/kitchen", "/home/pi": str(tmp_path)}
    changes |= {"--out first": f"--out first --address 127.0.0.1:{port} --metrics off"}
    changes |= {"--max-updates 2000": "--max-updates 20"}
    commands = [block for language, block in typed(GUIDE / "three-pis.md") if language == "bash"]
    for old, new in changes.items():
        assert any(old in command for command in commands)
        commands = [command.replace(old, new) for command in commands]
    certs, serve, device = map(shlex.split, commands)
    devices = [
        [word.replace("kitchen", name) for word in device]
        for name in ("kitchen", "garden", "cellar")
    ]

    assert start_raceme(certs, tmp_path).wait(60) == 0
    server, *others = [start_raceme(words, tmp_path) for words in (serve, *devices)]
    try:
        assert server.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        for process in (server, *others):
            process.terminate()
            process.wait(60)
    assert summary(tmp_path / "first")["updates"] == 20
    # So few updates may all be those of the first device that answers its greeting.
    assert (tmp_path / "log").read_text().count("online at localhost") == 3
