"""Run all tests on every supported Python, with the lowest and the highest dependencies.

``python -m tests.matrix`` makes an environment for each combination with uv, in ``--environments
FOLDER`` (kept if it is named), runs the tests in it, and prints a table, the one in
``docs/dependencies.md``. The lowest versions are those that ``pyproject.toml`` admits and that are
published as wheels for the Python. Interpreters are found on the PATH. Further options go to `uv
pip`, such as an index with the CPU build of torch; ``--tests`` selects tests::

    python -m tests.matrix --pythons 3.13 --resolutions lowest-direct --tests "tests/core -x"
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
LOWEST, HIGHEST = "lowest-direct", "highest"
SHOWN = ("numpy", "scipy", "scikit-learn", "pandas", "torch", "flwr", "typer", "starlette")
"""Packages whose versions are in the table."""


def main() -> None:
    """Run the matrix; exit with 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="e.g. 3.11 3.13")
    parser.add_argument("--resolutions", nargs="+", default=(LOWEST, HIGHEST))
    parser.add_argument("--environments", type=Path, help="folder to keep the environments in")
    parser.add_argument("--tests", default="", help="arguments of pytest; by default all tests")
    arguments, more = parser.parse_known_args()
    cells = [(python, how) for how in arguments.resolutions for python in arguments.pythons]
    rows, are_passed = [], True
    with ExitStack() as stack:
        folder = arguments.environments or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for python, how in cells:
            interpreter = environment(folder / f"{python}-{how}", python, how, more)
            outcome, is_passed = tested(interpreter, shlex.split(arguments.tests))
            are_passed = are_passed and is_passed
            rows.append(row(python, how, versions(interpreter), outcome))
            print(rows[-1], flush=True)
    heads = ("Python", "dependencies", *SHOWN, "tests")
    print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, sep="\n")
    sys.exit(not are_passed)


def environment(folder: Path, python: str, how: str, more: Sequence[str]) -> Path:
    """Return the interpreter of an environment; create it if it is missing."""
    interpreter = folder / "bin" / "python"
    if interpreter.exists():
        return interpreter
    uv("venv", "--quiet", "--seed", "--python", python, str(folder))
    locked = folder / "requirements.txt"
    wheels = ("--only-binary", ":all:") if how == LOWEST else ()
    project = (str(ROOT / "pyproject.toml"), "--extra", "dev", "--python", str(interpreter))
    uv("pip", "compile", "--quiet", "--resolution", how, *wheels, *more, *project, "-o", locked)
    install = ("pip", "install", "--quiet", "--python", str(interpreter))
    uv(*install, *more, "-r", locked)
    uv(*install, "--no-deps", "-e", str(ROOT))
    return interpreter


def uv(*words: str | Path) -> None:
    """Run uv, which comes with the extra ``dev``."""
    subprocess.run([sys.executable, "-m", "uv", *words], check=True, stdin=subprocess.DEVNULL)


def tested(interpreter: Path, selection: Sequence[str]) -> tuple[str, bool]:
    """Run the tests; return pytest's count of outcomes, and whether all have passed."""
    path = os.pathsep.join((str(interpreter.parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        [interpreter, "-m", "pytest", *selection],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(*(line for line in done.stdout.splitlines() if line.startswith(_FAILED)), sep="\n")
    *_, last = ("", *done.stdout.splitlines())
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)
    return ", ".join(counts) or "no outcome", done.returncode == 0


_FAILED = ("FAILED", "ERROR")


def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of the packages of an environment."""
    code = "from importlib.metadata import distributions\n"
    code += "for one in distributions(): print(one.name, one.version)"
    told = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
    return {name.lower(): found for name, found in map(str.split, told.stdout.splitlines())}


def row(python: str, how: str, found: dict[str, str], outcome: str) -> str:
    """Return a row of the table."""
    name = "lowest" if how == LOWEST else how
    return f"| {' | '.join((python, name, *(found.get(p, '–') for p in SHOWN), outcome))} |"


if __name__ == "__main__":
    main()
