"""The README's first commands, in a fresh clone and without the caller's packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

SECONDS = 1500
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
UVX, VENV, TESTS = re.findall(r"^(?:uvx|python3 -m venv) .*$", TEXT, re.MULTILINE)
"""The three commands of the section "Start"."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that git tracks or would add."""
    place = tmp_path_factory.mktemp("fresh") / "raceme"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def typed(line: str, folder: Path, home: Path) -> str:
    """Run a line in a folder, with only the package sources of the caller's environment."""
    # The base interpreter of this environment, which has no packages.
    tools = home / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    for name, target in (("python3", sys.base_prefix), ("uvx", sys.prefix)):
        script = f'#!/bin/sh\nexec {Path(target) / "bin" / name} "$@"\n'
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    network = re.compile(r"(PIP_|UV_|SSL_).*|.*_PROXY", re.IGNORECASE)
    kept = {key: value for key, value in os.environ.items() if network.fullmatch(key)}
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**kept, **cache, "PATH": f"{tools}:/usr/bin:/bin", "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("line", [UVX, VENV])
def test_one_command_sets_up_and_runs_casa(line: str, clone: Path, tmp_path: Path) -> None:
    said = typed(line, clone, tmp_path)
    assert re.search(r"clusters\D+4\b", said), said[-2000:]
    assert re.search(r"purity\D+1\.000\b", said), said[-2000:]


def test_one_command_sets_up_and_tests(clone: Path, tmp_path: Path) -> None:
    """Continuous integration runs the whole line; here a few tests represent all."""
    assert TESTS.endswith("/bin/pytest")
    assert "passed" in typed(f"{TESTS} tests/core/test_installation.py", clone, tmp_path)
