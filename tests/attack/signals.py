"""A run that is told to stop, or is killed, at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]
_ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = ("SIGTERM", "SIGINT", "SIGKILL", "group")


def _run(*arguments: str) -> list[str]:
    return [*_RACEME, "run", *arguments]


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Stop a run at some moment; it says no traceback, and can be resumed to its end.

    A ``group`` is a run and its workers, all told to stop while these start.
    """
    out, is_group = folder / "run", subject == "group"
    keys = [
        "--dataset",
        "digits",
        "--clients",
        "4",
        "--model",
        "mclr",
        "--workers",
        "2" if is_group else "0",
    ]
    keys += ["--max-updates", "1500", "--checkpoint-every", "10", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    said = folder / "said"
    with said.open("wb") as file:
        child = subprocess.Popen(
            _run(*keys), stdout=file, stderr=file, env=environment, start_new_session=is_group
        )
        checkpoints = out / "checkpoint"
        deadline = time.monotonic() + 120
        begun = (out, "run.sqlite") if is_group else (checkpoints, "*.safetensors")
        while not any(begun[0].glob(begun[1])) and child.poll() is None:
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        time.sleep(rng.random() * (3.0 if is_group else 0.5))
        if is_group:
            os.killpg(child.pid, signal.SIGTERM)
        else:
            child.send_signal(getattr(signal, subject))
        code = child.wait(120)
    text = said.read_text(errors="replace")
    assert "Traceback" not in text, text
    if subject != "SIGKILL":
        assert (out / "summary.json").is_file(), text
        assert code in (0, 130, 143, 1), f"exit code {code}: {text}"
        assert any(checkpoints.glob("*.safetensors")), text
    done = subprocess.run(
        _run("--resume", str(out), "--max-updates", "60"),
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert (out / "summary.json").is_file(), done.stderr
