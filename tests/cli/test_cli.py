"""The command line as a user types it, in separate processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forking import Commands
from processes import as_in_a_terminal
from typer.testing import CliRunner

from raceme.cli import app
from raceme.core.config import RunConfig, general_keys
from raceme.core.registry import STRATEGIES
from raceme.runs.experiment import simulate

Typed = Callable[..., subprocess.CompletedProcess[str]]
RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]
SMALL = ["--clients", "8", "--max-updates", "24", "--workers", "0"]
FEW = ["--clients", "3", "--partition", "iid"]
FILES = {
    "accuracy.png",
    "clusters",
    "clusters.png",
    "config.toml",
    "devices.png",
    "positions.jsonl",
    "run.log",
    "run.sqlite",
    "similarity.npz",
    "similarity.png",
    "summary.json",
}


@pytest.fixture
def raceme(command: Commands) -> Typed:
    """Run a command in a folder."""
    return command.typed


def contents(out: Path) -> list[str]:
    """Return all contents of a run's database."""
    with sqlite3.connect(out / "run.sqlite") as connection:
        return list(connection.iterdump())


def models(out: Path) -> dict[str, bytes]:
    """Return a run's models, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted((out / "clusters").iterdir())}


@pytest.mark.pictures
@pytest.mark.smoke
def test_a_run_leaves_everything_and_its_configuration_repeats_it(
    raceme: Typed, tmp_path: Path
) -> None:
    first = raceme(tmp_path, "run", *SMALL, "--out", "one")
    assert first.returncode == 0, first.stderr
    assert {path.name for path in (tmp_path / "one").iterdir()} == FILES
    assert "accuracy" in first.stdout
    assert "\x1b" not in first.stdout, "piped output has no control characters"
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["updates"] == 24
    assert summary["strategy"] == "casa"
    assert summary["diverged"] is False
    assert "lower lr" not in " ".join(first.stdout.split())
    again = raceme(tmp_path, "run", "--config", "one/config.toml", "--out", "two")
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert models(tmp_path / "one") == models(tmp_path / "two")
    refused = raceme(tmp_path, "run", *SMALL, "--out", "one")
    assert refused.returncode == 2
    assert "holds a run already" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategy", "cas"], "Did you mean 'casa'"),
        (["--dataset", "mnits"], "Did you mean 'mnist'"),
        (["--model", "cnnn"], "Did you mean 'cnn'"),
        (["--devices", "slow30x"], "Did you mean 'slow30x"),
        (["--partition", "label-group"], "Did you mean 'label-groups'"),
        (["--set", "casa.gama=1"], "Did you mean 'casa.gamma'"),
        (["--set", "sed=1"], "Did you mean 'seed'"),
        (["--max-update", "5"], "Did you mean 'max-updates'"),
        (["--dirichlet-alpha", "0.5", "--partition", "iid"], "this run has partition iid."),
        (["--strategy", "fedavg", "--set", "casa.gamma=0.2"], "this run has strategy fedavg."),
        (["--set", "seed"], "--set takes key=value"),
        (["--clients", "0"], "clients must be at least 1"),
        (["--clients", "5000"], "Too many clients"),
        (["--set", "lr=0"], "lr must be greater than 0"),
        (["--set", "lr=fast"], "lr must be a number"),
        (["--max-time", "-1"], "max-time must be at least 0"),
        (["--target-accuracy", "1.5"], "target-accuracy must be at most 1"),
        (["--strategy", "g-fedavg", *FEW], "g-fedavg cannot run: 4 groups cannot be made of 3"),
        (["--model", "missing_module:build"], "Cannot import 'missing_module'"),
        (["--model", "fits_nothing:build"], "fits_nothing"),
        (["--dataset", "mnist"], "--data-root DIR"),
        (["--dataset", "mnist", "--data-root", "nowhere"], "train-images-idx3-ubyte"),
        (["--config", "missing.toml"], "Cannot read the configuration file"),
        (["--config", "broken.toml"], "is not valid TOML"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    command: Commands, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "broken.toml").write_text("clients = ")
    (tmp_path / "fits_nothing.py").write_text(
        "from torch import nn\n\ndef build(input_shape, num_classes):\n    return nn.Linear(3, 4)\n"
    )
    output = tmp_path / "output.txt"
    assert command.run("run", *arguments, "--out", "out", output=output) == 2
    (line,) = output.read_text().splitlines()
    assert line.startswith("raceme: ")
    assert expected in line
    assert not (tmp_path / "out").exists()


def interrupted(folder: Path, lines: int, *arguments: str) -> str:
    """Press Ctrl-C after a number of output lines, and return the output after it."""
    with subprocess.Popen(
        as_in_a_terminal([*RACEME, *arguments]),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 130, "".join(seen) + rest
    return rest


def test_interrupted_runs_keep_what_was_done(raceme: Typed, tmp_path: Path) -> None:
    endless = ["--max-updates", "1000000", "--workers", "0", "--out", "out"]
    rest, out = interrupted(tmp_path, 3, "run", *endless), tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= FILES
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reason"] == "interrupted by the user"
    assert summary["updates"] > 0
    with sqlite3.connect(out / "run.sqlite") as connection:
        assert (
            connection.execute("select count(*) from updates").fetchone()[0] == summary["updates"]
        )
    (line,) = (line for line in rest.splitlines() if line.startswith("To resume: "))
    command = line.removeprefix("To resume: raceme ").split()
    assert command[:2] == ["run", "--resume"]
    resumed = raceme(tmp_path, *command, "--max-updates", "2")
    assert "updates already" in resumed.stderr


_INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from raceme.__main__ import main
main()
"""


def test_an_interrupt_while_the_command_is_imported_has_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        as_in_a_terminal([sys.executable, "-c", _INTERRUPTED_IMPORT]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
def test_an_interrupted_suite_of_several_cases_says_how_it_goes_on(tmp_path: Path) -> None:
    chosen = ["--suite", "panicle", "--only", "digits-4,digits-6", "--seeds", "0"]
    limits = ["--max-updates", "1000000", "--processes", "1", "--out", "out"]
    rest = interrupted(tmp_path, 1, "compare", "fedasync", *chosen, *limits)
    # The suite's folder is named: with that of the case as --out, all cases would go below it.
    assert rest.splitlines()[-1].endswith("the same command with --out out")


def test_help_shows_types_and_units(
    raceme: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(raceme(tmp_path, "run", "--help").stdout.split())
    for text in (
        "--max-time SECONDS stop at this time",
        "--eval-every INTEGER|auto",
        "--data-root PATH",
        "--device cpu|cuda",
        "--set KEY=VALUE",
        "--batch-size INTEGER mini-batch size of local training (default: 10)",
    ):
        assert text in shown
    groups = re.split(r"─ (Options|Data|Fleet|Method|Limits|Output) ─", shown)
    assert groups[1::2] == ["Options", "Data", "Fleet", "Method", "Limits", "Output"]
    found = [re.findall(r"│ (--[\w-]+)", group) for group in groups[2::2]]
    assert len(found[0]) == 17, "sixteen and --help"
    keys = [f"--{name}" for name in general_keys()]
    assert sorted(name for group in found for name in group) == sorted(
        [*keys, "--config", "--set", "--help", "--watch", "--watch-address"]
    )
    served = " ".join(raceme(tmp_path, "serve", "--help").stdout.split())
    assert "--out PATH folder for results and checkpoints, required" in served
    assert "method; see `raceme list` (default: panicle)" in served
    assert "--clients INTEGER" in " ".join(raceme(tmp_path, "up", "--help").stdout.split())


@pytest.mark.pictures
def test_a_run_ends_when_its_fleet_has_gone_offline(raceme: Typed, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[device]\njitter = 0.1\nonline = [[0, 4]]\n")
    keys = ["--clients", "8", "--devices", "fleet.toml", "--workers", "0"]
    finished = raceme(tmp_path, "run", *keys, "--out", "out")
    assert finished.returncode == 1
    assert "all clients are gone" in finished.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["updates"] > 0
    assert summary["virtual_time"] <= 4.0
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES | {"measure-gap.png"}


def test_a_mistyped_command_gets_one_suggestion(raceme: Typed, tmp_path: Path) -> None:
    mistyped = raceme(tmp_path, "rnu")
    assert mistyped.returncode == 2
    assert mistyped.stderr.count("Did you mean 'run'?") == 1


def test_lists_and_the_version_are_printed(
    raceme: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def typed(*arguments: str) -> Any:
        """Run a command in this process, so that the imports of `--keys` happen only once."""
        return CliRunner().invoke(app, arguments)

    listed = typed("list", "--keys").stdout
    for name in ("casa", "fedasync", "digits", "label-groups", "cnn", "slow30x5", "casa.gamma"):
        assert name in listed
    lines = [line.strip() for line in listed.splitlines()]
    (at,) = (place for place, line in enumerate(lines) if line.startswith("max-time "))
    assert lines[at + 1] == "NUMBER s, default 0.0"
    (line,) = (line for line in lines if line.startswith("noise-std "))
    assert "noise-groups: standard deviation of the noise" in line
    heads = ["strategies", "strategies: published baselines", "strategies: ablations and variants"]
    bounds = [lines.index(head) for head in (*heads, "datasets")]
    parts = [
        [line.split()[0] for line in lines[start + 1 : end] if line]
        for start, end in pairwise(bounds)
    ]
    assert parts == [sorted(part) for part in parts]
    assert {"casa", "panicle"} <= set(parts[0])
    assert {"fedavg", "ifca"} <= set(parts[1])
    assert {"casa-c", "ifca-async"} <= set(parts[2])
    assert {name for part in parts for name in part} == set(STRATEGIES)
    # The words are searched in names only, among everything that can be listed.
    listed = typed("list", "fedbuff", "--keys").stdout
    lines = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert lines[:2] == ["fedbuff", "fedbuff.k"]
    assert "datasets" not in listed
    # The page of a method includes its keys.
    page = raceme(tmp_path, "list", "fedasync").stdout
    assert "fedasync.alpha" in page
    assert "fedbuff.k" not in page
    nothing = raceme(tmp_path, "list", "nothing-like-it")
    assert nothing.returncode == 2
    assert nothing.stderr == (
        "raceme: No match for 'nothing-like-it'. `raceme list` lists all names.\n"
    )
    assert "`raceme list gamma --keys` lists" in str(typed("list", "gamma").exception)
    # A list is found by its own name, and by the key that accepts its entries.
    for part in ("device profiles", "devices"):
        profiles = typed("list", part).stdout
        assert "slow30x5" in profiles
        assert "strategies" not in profiles
    assert raceme(tmp_path, "--version").stdout.startswith("raceme ")


def test_a_mistyped_argument_is_one_line_with_a_remedy(raceme: Typed, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('lr = 0.1\n[casa]\ngamma = "x"\n')
    (tmp_path / "key.toml").write_text("[casa]\ngama = 0.1\n")
    for arguments, expected in (
        (["run", "casa"], "extra argument (casa). Did you mean `raceme run --strategy casa`?"),
        (["run", "mine.toml"], "(mine.toml). Did you mean `raceme run --config mine.toml`?"),
        (
            ["run", "--config", "key.toml"],
            "line 2: Unknown key 'casa.gama'. Did you mean 'casa.gamma'? `",
        ),
        (
            ["compare", "--methods", "casa,fedbuff"],
            "--methods is no option: type `raceme compare casa fedbuff`.\n",
        ),
        (["reproduce", "--name=casa-table1"], "type `raceme reproduce casa-table1`.\n"),
        (["reproduce", "casa-table9"], "'casa-table2'? `raceme reproduce` lists them all.\n"),
        (["run", "--strategy", "cassa"], "'cassa'. Did you mean 'casa'? `raceme list` lists them"),
        (["compare", "casa", "--budget", "time=soon"], "updates=500; got 'time=soon'.\n"),
        (["compare", "casa", "--seeds", "5..2"], "smaller number first, e.g. 0..4; got '5..2'.\n"),
        (["runs"], "No such command 'runs'"),
        (["run", "--resume", "nowhere"], "There is no run in nowhere to resume: expected the"),
        (["serve"], "give --out, e.g. --out runs/lab"),
        (["serve", "--where", ""], "give --out, e.g. --out runs/lab"),
        (["up", "--where", "--out", "a"], "--where needs a value: `raceme list where --keys`"),
        (["run", "--config", "mine.toml"], "mine.toml, line 3: casa.gamma must be a number"),
    ):
        done = raceme(tmp_path, *arguments)
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("raceme: "), arguments
        assert len(done.stderr.splitlines()) == 1, arguments
        assert expected in done.stderr, arguments
    assert {path.name for path in tmp_path.iterdir()} == {"mine.toml", "key.toml"}


def test_training_that_diverges_is_reported(raceme: Typed, tmp_path: Path) -> None:
    done = raceme(tmp_path, "run", *SMALL, "--lr", "1e9", "--out", "out")
    assert done.returncode == 0
    assert "lower lr" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["diverged"] is True


@pytest.mark.slow
def test_a_drift_after_the_end_of_the_run_is_reported(raceme: Typed, tmp_path: Path) -> None:
    run = ["run", *SMALL, "--drift", "swap-part"]
    for late, limits in ((True, []), (True, ["--max-time", "3"]), (False, [])):
        at = "drift-at=900s" if late else "drift-at=2s"
        done = raceme(tmp_path, *run, "--set", at, *limits)
        assert done.returncode == 0
        assert ("swap-part never happened" in " ".join(done.stdout.split())) is late
        assert ("never happens: the run ends after 3 seconds" in done.stderr) is bool(limits)


@pytest.mark.slow
def test_a_drift_that_the_devices_do_not_reach_is_reported_at_the_start(
    raceme: Typed, tmp_path: Path
) -> None:
    """Eight devices with 1 s per update: 24 updates take 3 s."""
    (tmp_path / "fleet.toml").write_text("[device]\nseconds-per-round = 1.0\n")
    run = ["run", *SMALL, "--devices", "fleet.toml", "--drift", "swap-part"]
    said = "24 updates take about 3 s, and drift-at is 4 s"
    for keys, expected in (
        (["--drift-at", "4s"], True),
        (["--drift-at", "2s"], False),
        # A round waits for its slowest client, so that its duration is unknown in advance.
        (["--drift-at", "4s", "--strategy", "fedavg"], False),
    ):
        done = raceme(tmp_path, *run, *keys)
        assert done.returncode == 0
        assert (said in done.stderr) is expected


FEW = (
    "clients are too few for CASA, which with gamma=0.15 tells clusters apart among at least 10: "
    "they may share one model."
)
NEVER = "The attack label-flip never happens: the run ends after"
FLIP = {"clients": 10, "attack": "label-flip"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        # CASA can split ten clients of digits, but not
        # eight (eq 14 asks for a gap of 0.016 or 0.024).
        ({"clients": 8}, f"8 {FEW}"),
        ({"clients": 10}, ""),
        ({"clients": 8, "strategy": "panicle"}, "changed no model"),
        ({"clients": 8, "strategy": "panicle", "max-updates": 30, "target-accuracy": 0.2}, ""),
        ({"clients": 8, "casa.gamma": 0.05}, ""),
        ({"clients": 8, "strategy": "casa-c"}, ""),
        ({"clients": 1, "strategy": "fedasync"}, "One client trains alone"),
        ({**FLIP, "clients": 2, "strategy": "fedasync"}, "The attack label-flip never happens"),
        ({**FLIP, "attackers": 1.0}, "All clients attack"),
        ({**FLIP, "attackers-join": 900.0, "max-time": 30.0}, f"{NEVER} 30 seconds"),
        ({**FLIP, "attackers-join": 0.01}, ""),
        ({**FLIP, "attack-start": 900}, f"{NEVER} 2 updates"),
        # The last of ten clients' and two updates' requests is the eleventh, number 10.
        ({**FLIP, "attack-start": 10}, ""),
        ({**FLIP, "attack-start": 11}, f"{NEVER} 2 updates"),
        ({**FLIP, "strategy": "fedavg", "attack-start": 900}, f"{NEVER} 2 updates"),
        ({**FLIP, "strategy": "fedavg", "attack-start": 1}, ""),
    ],
    ids=str,
)
def test_impossible_settings_of_a_fleet_are_warned_of(
    keys: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"max-updates": 2, "workers": "0", "out": str(tmp_path / "out")}
    summary = simulate(RunConfig.from_mapping({**short, **keys})).summary
    warned = [record.getMessage() for record in caplog.records if record.name == "raceme.run"]
    assert [said in line for line in warned] == ([True] if said else [])
    assert ("missed_attack" in summary) is (NEVER in said)


def test_an_impossible_run_is_refused_before_any_work(command: Commands, tmp_path: Path) -> None:
    flip = ("--attack", "label-flip", "--attack-start", "900")
    output, run = tmp_path / "said.txt", ("run", "--max-updates", "2", "--workers", "0", "--out")
    assert command.run(*run, str(tmp_path / "out"), "--clients", "8", *flip, output=output) == 0
    text = output.read_text()
    assert text.index(FEW) < text.index("evaluated at")
    assert text.index(NEVER) < text.index("evaluated at")
    assert "label-flip never happened" in " ".join(text.split())


def test_resuming_with_a_limit_below_the_updates_is_refused_and_loses_nothing(
    raceme: Typed, tmp_path: Path
) -> None:
    assert (
        raceme(tmp_path, "run", *SMALL, "--checkpoint-every", "8", "--out", "out").returncode == 0
    )
    before = contents(tmp_path / "out")
    refused = raceme(tmp_path, "run", "--resume", "out", "--max-updates", "10")
    assert refused.returncode == 2
    assert "has 24 updates already" in refused.stderr
    assert refused.stderr.endswith("e.g. --max-updates 48.\n")
    assert contents(tmp_path / "out") == before
    assert raceme(tmp_path, "run", "--resume", "out", "--max-updates", "26").returncode == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint")
    before = contents(tmp_path / "out")
    lost = raceme(tmp_path, "run", "--resume", "out", "--max-updates", "10")
    assert "has 26 updates already" in lost.stderr
    assert contents(tmp_path / "out") == before
