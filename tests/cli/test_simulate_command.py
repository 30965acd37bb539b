"""`raceme simulate` as a user types it, and the page of its results."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from flower_apps import QUICKSTARTS, write_app
from forking import Commands

APP = str(QUICKSTARTS / "numpy_app")


def typed(command: Commands, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and its output, without colours."""
    output = folder / f"output-{len(list(folder.iterdir()))}.txt"
    code = command.run(*arguments, output=output)
    return code, re.sub(r"\x1b\[[0-9;]*m", "", output.read_text())


@pytest.mark.pictures
def test_an_app_is_simulated(tmp_path: Path, command: Commands) -> None:
    options = ("--clients", "20", "--workers", "0", "--devices", "slow30x5", "--seed", "3")
    config = ("--run-config", "num-server-rounds=2", "--run-config", "fraction-train=0.5")
    code, text = typed(command, tmp_path, "simulate", APP, *options, *config, "--out", "out")
    assert code == 0, text
    # Flower's own output comes first.
    flower, ours = text.split("numpy-quickstart on 20 devices (slow30x5)")
    assert "configure_train: Sampled 10 nodes (out of 20)" in flower
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert names == {"clients.csv", "messages.csv", "summary.json", "timeline.png", "waiting.png"}
    summary = json.loads((out / "summary.json").read_text())
    assert f"{summary['virtual_time']:,.1f} s" in ours
    assert summary["messages_by_kind"] == {"train": 20, "evaluate": 40}
    assert "60 (20 train, 40 evaluate)" in ours
    shares = [summary[f"{name}_share"] for name in ("busy", "idle", "offline")]
    assert abs(sum(shares) - 1) < 1e-9
    with (out / "messages.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["bytes_down"]) for row in rows) == summary["bytes_down"]
    # The command in the summary reproduces the messages.
    again = shlex.split(summary["command"])[1:]
    code, text = typed(command, tmp_path, *again, "--out", "again")
    assert code == 0, text
    assert (tmp_path / "again" / "messages.csv").read_text() == (out / "messages.csv").read_text()
    code, text = typed(command, tmp_path, "report", "out")
    assert code == 0, text
    page = (out / "report.html").read_text()
    assert "<h1>numpy-quickstart on 20 devices</h1>" in page
    assert page.count("data:image/png") == 2
    assert "raceme simulate" in page
    assert "client-19" in page


def test_exit_codes_tell_why_a_simulation_ended(tmp_path: Path, command: Commands) -> None:
    few = ("--clients", "2", "--workers", "0")
    code, text = typed(command, tmp_path, "simulate", str(tmp_path))
    assert code == 2
    assert text.count("\n") == 1
    assert "no pyproject.toml" in text
    raising = write_app(tmp_path, "raising", "grid.push_messages(messages(grid))\n1 / 0")
    code, text = typed(command, tmp_path, "simulate", str(raising), *few, "--out", "one")
    assert code == 1
    assert "raceme: the ServerApp raised ZeroDivisionError: division by zero." in text
    # Results up to the error are kept.
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["messages"] == 2
    client = "from flwr.clientapp import ClientApp\n\napp = ClientApp()\n"
    useless = write_app(tmp_path, "useless", "grid.send_and_receive(messages(grid))", client)
    code, text = typed(command, tmp_path, "simulate", str(useless), *few, "--out", "two")
    assert code == 1
    assert "all training failed. The first failure: client-0" in text
    assert "No train function registered" in text
    code, text = typed(command, tmp_path, "simulate", APP, *few, "--max-time", "nan")
    assert code == 2
