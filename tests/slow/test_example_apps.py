"""Unchanged Flower apps of others: every app in a folder, such as Flower's own examples.

The environment variable RACEME_APPS names the folder; dependencies and data of the apps must be
installed. Each app runs with `raceme simulate`, unchanged and with CASA instead of its strategy,
which may be refused in one line with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, raceme

VARIABLE = "RACEME_APPS"
SECONDS = 1200
CLIENTS = "5"
"""The number of clients that the most demanding of Flower's examples waits for."""


def is_app(folder: Path) -> bool:
    """Return whether a folder's pyproject.toml describes a Flower app."""
    try:
        with (folder / "pyproject.toml").open("rb") as file:
            return "app" in tomllib.load(file)["tool"]["flwr"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return False


def found_apps() -> list[Path]:
    """Return the folders with a Flower app, at any depth below the named folder."""
    root = os.environ.get(VARIABLE)
    if not root:
        return []
    files = Path(root).expanduser().resolve().rglob("pyproject.toml")
    return sorted(file.parent for file in files if is_app(file.parent))


APPS = found_apps()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * SECONDS + 60),
    pytest.mark.skipif(not APPS, reason=f"{VARIABLE} names no folder with Flower apps"),
]


def run(app: Path, out: Path, *options: str) -> tuple[int, str]:
    """Simulate an app; return the exit code and the output."""
    command = raceme("simulate", str(app), "--clients", CLIENTS, "--out", str(out))
    done = subprocess.run(
        [*command, *options],
        cwd=out.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def is_importable(app: Path) -> bool:
    """Return whether an app's modules can be imported with the installed release of Flower."""
    with (app / "pyproject.toml").open("rb") as file:
        components = tomllib.load(file)["tool"]["flwr"]["app"]["components"]
    names = [reference.partition(":")[0] for reference in components.values()]
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    return subprocess.run(command, cwd=app, capture_output=True, check=False).returncode == 0


def refusal(text: str) -> str:
    """Return the error line of a refused command."""
    lines = [line for line in text.splitlines() if line.startswith("raceme: ")]
    assert len(lines) == 1, text
    return lines[0].removeprefix("raceme: ")


@pytest.mark.parametrize("app", APPS or [Path()], ids=lambda app: app.name or "none")
def test_an_app_runs_as_it_is_and_with_casa(
    app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(app, tmp_path / "own")
    if code == 2 and ("which is not installed" in text or not is_importable(app)):
        pytest.skip(refusal(text))
    with capsys.disabled():
        print(f"\n{app.name}: as it is: {'works' if code == 0 else 'FAILS'}", flush=True)
    assert code == 0, text[-4000:]
    assert "Traceback" not in text
    assert "leaked" not in text
    code, text = run(app, tmp_path / "casa", "--strategy", "casa")
    said = "works" if code == 0 else f"refused: {refusal(text)}" if code == 2 else "FAILS"
    with capsys.disabled():
        print(f"{app.name}: with casa: {said}", flush=True)
    assert code in (0, 2), text[-4000:]
    assert "Traceback" not in text
