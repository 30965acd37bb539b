"""The task pages of docs/guide work as written: each block is run in the order of the page."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, free_port, wait_until

from raceme.cli import COMMANDS

GUIDE = ROOT / "docs" / "guide"
MOST_WORDS = 750
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.MULTILINE | re.DOTALL)
NOT_TYPED = ("latex", "sh")
"""Languages of blocks for other programs, and of commands for other machines or a GPU."""


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return the language, the file to save it in, and the text of each block of a page."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, title, textwrap.dedent(text)) for _, language, title, text in found]


def typed(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page, in order."""
    return [(language, text) for language, _, text in blocks(page)]


def like(line: str) -> str:
    """Return a line of output without its numbers, which differ between machines."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())


def assert_shown(output: str, shown: str) -> None:
    """Check that each line which a page shows is printed, apart from numbers."""
    # Without line breaks, since a title wraps at the width of its table.
    printed = like(output)
    missing = [line for line in shown.splitlines() if like(line) not in printed]
    assert not missing, f"{missing} is not in\n{output}"


def follow(page: str, folder: Path) -> None:
    """Run a page in an empty folder; a `text` block must match the output of the last command."""
    command = folder / "bin" / "raceme"
    command.parent.mkdir()
    for name, words in (("raceme", "-m raceme "), ("python", ""), ("python3", "")):
        command.with_name(name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        command.with_name(name).chmod(0o755)
    paths = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths, "COLUMNS": "150"}
    script = output = ""
    for language, saved, block in blocks(GUIDE / f"{page}.md"):
        if language == "text":
            assert_shown(output, block)
            continue
        if saved:
            (folder / saved).write_text(block)
            continue
        if language in NOT_TYPED:
            continue
        if language == "python":
            # Python blocks up to the next command form one session.
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
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{block}\n{output}"


def summary(folder: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return loaded


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.stem)
def test_a_task_is_at_most_a_page(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.slow
def test_my_data(tmp_path: Path) -> None:
    follow("my-data", tmp_path)
    figures = summary(tmp_path / "people-run")
    assert figures["clients"] == 8
    assert figures["clusters"] == 2


def test_my_data_of_hugging_face(tmp_path: Path) -> None:
    # The test folder `datasets` has the same name as the library.
    pytest.importorskip("datasets.arrow_dataset")
    files = {saved: text for _, saved, text in blocks(GUIDE / "my-data.md")}
    (tmp_path / "partitions.py").write_text(files["partitions.py"])
    run = [sys.executable, "partitions.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert b"4 clients" in done.stdout


@pytest.mark.slow
def test_my_method(tmp_path: Path) -> None:
    follow("my-method", tmp_path)
    figures = summary(tmp_path / "even-run")
    assert figures["strategy"] == "even:Even"
    assert figures["updates"] == 300  # after the resume
    rows = (tmp_path / "even-comparison" / "compare.csv").read_text().splitlines()
    assert len(rows) == 7  # two methods, three seeds
    assert len((tmp_path / "even.py").read_text().splitlines()) <= 40


@pytest.mark.slow
def test_flower_app(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    follow("flower-app", tmp_path)
    waits, tried, kept = (summary(tmp_path / name) for name in ("waits", "tried", "kept"))
    assert tried["virtual_time"] == kept["virtual_time"]
    assert float(str(kept["virtual_time"])) < 0.5 * float(str(waits["virtual_time"]))


@pytest.mark.slow
def test_gpu_and_ray(tmp_path: Path) -> None:
    follow("gpu-and-ray", tmp_path)
    cores, ray = tmp_path / "cores" / "clusters", tmp_path / "ray" / "clusters"
    assert (names := sorted(path.name for path in cores.iterdir()))
    assert [(ray / name).read_bytes() == (cores / name).read_bytes() for name in names] == [
        True for _ in names
    ]


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    follow("../checkpoints", tmp_path)
    assert summary(tmp_path / "long-run")["updates"] == 200


@pytest.mark.slow
def test_private(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    follow("../research/private", tmp_path)
    sums, noise, budget, groups = (
        summary(tmp_path / name) for name in ("sums", "noise", "budget", "groups")
    )
    assert float(str(noise["accuracy"])) < float(str(sums["accuracy"]))
    assert budget["updates"] == 100
    assert groups["purity"] == 1


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
    """Return the words of each command in the README's blocks, in order, except the installation.

    `tests/slow/test_start.py` runs the installation.
    """
    blocks = [text for language, text in typed(ROOT / "README.md") if language == "bash"]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [words for words in commands if words[0] == "raceme"]


def start_raceme(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command as written; its output goes to the file `log` of the folder."""
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
    """Each command in a block is run; for a new command, add its expected outcome here."""
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


def listed(command: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return the list that a `raceme fleet` command prints; empty if no server answers."""
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 else []
    return rows


@pytest.mark.slow
def test_three_devices(tmp_path: Path) -> None:
    port = free_port()
    commands = [text for kind, text in typed(GUIDE / "three-devices.md") if kind == "bash"]
    certs, serve, kitchen, asked, versions, rollback = (
        shlex.split(command.replace("\\\n", " ").replace(":9092", f":{port}"))
        for command in commands
    )
    serve += ["--address", f"127.0.0.1:{port}", "--metrics", "off"]
    names = ("kitchen", "garden", "cellar")
    devices = [
        [word.replace("kitchen", name).replace("id=0", f"id={number}") for word in kitchen]
        for number, name in enumerate(names)
    ]

    assert start_raceme(certs, tmp_path).wait(60) == 0
    server = start_raceme(serve, tmp_path)
    others = [start_raceme(words, tmp_path) for words in devices]

    def in_use() -> list[str]:
        rows = listed(versions, tmp_path)
        return [str(row["version"]) for row in rows if row["stage"] == "in-use"]

    try:
        wait_until(lambda: len(listed(asked, tmp_path)) == 3, 120)
        wait_until(lambda: any((tmp_path / "first" / "checkpoint").glob("*.safetensors")), 120)
        server.kill()
        server.wait(60)
        server = start_raceme(serve, tmp_path)

        def since_then() -> str:
            return (tmp_path / "log").read_text().partition("INFO: Resuming from")[2]

        wait_until(lambda: all(f" {name}  cluster" in since_then() for name in names), 120)
        (rollback[-1],) = wait_until(in_use, 120)
        assert start_raceme(rollback, tmp_path).wait(60) == 0, (tmp_path / "log").read_text()
        pinned = {row["version"] for row in listed(versions, tmp_path) if row["pinned"]}
        assert pinned == {int(rollback[-1])}
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 130, (tmp_path / "log").read_text()
    finally:
        for process in (server, *others):
            process.terminate()
            process.wait(60)
    log = (tmp_path / "log").read_text()
    assert "INFO: Resuming from" in log
    assert "cannot be reached, trying again" in log
    assert log.count("online at localhost") >= 3
    assert all((tmp_path / f"{name}.pt").is_file() for name in names)
    assert summary(tmp_path / "first")["clients"] == 3
