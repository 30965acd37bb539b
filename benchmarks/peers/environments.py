"""Make an environment for each framework under a cache folder, from its pinned requirements.

    python3 benchmarks/peers/environments.py --cache ~/.cache/raceme-peers

`compare.py` calls this for what it needs. A requirements file pins all packages of the environment
in which a framework was measured. torch's CPU build comes from its own index, if one is set:

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python3 benchmarks/peers/...
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """Code that is in no registry: a repository at a commit."""

    url: str
    commit: str


SOURCES = {
    "afl_lib": Source(
        "https://github.com/boyi-liu/AFL-Lib", "b6dab187df2c7cdd9fe9eff998790af9f96b9558"
    ),
}

NAMES = tuple(sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))


class CannotInstallError(Exception):
    """An environment could not be made; its message is one line."""


def python_of(name: str, cache: Path) -> Path:
    """Return the interpreter of an environment, which is created if it is missing.

    Raises
    ------
    CannotInstallError
        pip or git has failed.
    """
    folder, requirements = cache / name, HERE / "requirements" / f"{name}.txt"
    python, made_from = folder / "bin" / "python", folder / "requirements.txt"
    if name in SOURCES:
        source_of(name, cache)
    if made_from.exists() and made_from.read_text() == requirements.read_text():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    # All requirements are pinned: --no-deps keeps a
    # framework's own torch requirement from mattering.
    install = [str(python), "-m", "pip", "install", "--no-deps", "--quiet"]
    _run([*install, "--disable-pip-version-check", "-r", str(requirements)])
    made_from.write_text(requirements.read_text())
    return python


def source_of(name: str, cache: Path) -> Path:
    """Return the folder with a framework's code, which is cloned if it is missing.

    Raises
    ------
    CannotInstallError
        git has failed.
    """
    source, folder = SOURCES[name], cache / "sources" / name
    if not folder.exists():
        _run(["git", "clone", "--quiet", source.url, str(folder)])
    _run(["git", "-C", str(folder), "checkout", "--quiet", source.commit])
    return folder


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("ERROR")), "".join(lines[-1:]))
        raise CannotInstallError(said.strip()[:200] or f"{command[0]} failed")


def main() -> None:
    """Make the environments, and say which could not be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NAMES))
    options = parser.parse_args()
    failed = False
    for name in options.only.split(","):
        try:
            print(name, python_of(name, options.cache.resolve()))
        except CannotInstallError as error:
            failed = True
            print(name, error)
    sys.exit(failed)


if __name__ == "__main__":
    main()
