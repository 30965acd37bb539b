"""A run that is stopped, killed, or out of disk space, at any moment."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

_RACEME = [sys.executable, "-c", "from raceme.cli import main; main()"]
_ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = ("SIGTERM", "SIGINT", "SIGKILL", "group", "disk")


def _run(*arguments: str) -> list[str]:
    return [*_RACEME, "run", *arguments]


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(rng: random.Random, disk: Path) -> None:
    """Fill the disk during a run; once there is space again, the run continues."""
    out, filler = disk / "run", disk / "filler"
    keys = ["--dataset", "digits", "--clients", "4", "--model", "mclr", "--workers", "0"]
    keys += ["--max-updates", "1500", "--checkpoint-every", "10", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(_run(*keys), env=environment, **pipes)
    deadline = time.monotonic() + 120
    while not any(out.glob("checkpoint/*.safetensors")) and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(rng.random() * 0.5)
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    said = child.communicate(timeout=120)[0]
    assert "Traceback" not in said, said
    assert child.returncode == 1, said
    assert "could not be written" in said or "No space left" in said, said
    _is_whole(out)
    filler.unlink()
    done = subprocess.run(_run("--resume", str(out)), env=environment, timeout=200, **pipes)
    assert done.returncode == 0, done.stdout
    assert _is_whole(out) == 1500


def _is_whole(out: Path) -> int:
    """Assert that the store is complete and has each update once; return their number."""
    with closing(sqlite3.connect(out / "run.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        numbers = [row[0] for row in connection.execute("SELECT seq FROM updates ORDER BY seq")]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Stop a run at some moment; it must print no traceback, and be resumable to its end.

    ``group``: the run and its workers all get the signal while the workers start. ``disk``: a small
    file system fills up, and is freed later; only root can make one.
    """
    out, is_group = folder / "run", subject == "group"
    if subject == "disk":
        if os.geteuid() == 0:
            with _small_disk(folder) as disk:
                _fill(rng, disk)
        return
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
