"""The released distributions are complete, and work outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest
from processes import ROOT, free_port, wait_until

import raceme


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    (found,) = folder.glob("*.whl")
    return found


@dataclass
class Installed:
    """The wheel, installed.

    Attributes
    ----------
    python : str
        Interpreter that can import it.
    variables : dict
        Environment variables for that.
    folder : Path
        Its folder.
    """

    python: str
    variables: dict[str, str]
    folder: Path

    def start(self, place: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start `raceme` from the wheel, in a separate folder."""
        return subprocess.Popen(
            [self.python, "-m", "raceme", *arguments],
            cwd=place,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module", params=["beside", pytest.param("empty", marks=pytest.mark.slow)])
def installed(wheel: Path, request: pytest.FixtureRequest) -> Installed:
    """The wheel beside the installed packages, or in an empty environment with its dependencies."""
    folder = wheel.parent / request.param
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if request.param == "beside":
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*install, folder, str(wheel)], check=True, timeout=300)
        return Installed(sys.executable, {**variables, "PYTHONPATH": str(folder)}, folder)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    variables.pop("PYTHONPATH", None)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", f"{wheel}[server]"]
    subprocess.run(install, check=True, env=variables, timeout=1200)
    return Installed(python, variables, folder)


def output(process: subprocess.Popen[str]) -> str:
    """Return the output of a process that must succeed."""
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return text


def test_the_metadata_are_those_of_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == raceme.__version__
    assert f"version: {raceme.__version__}\n" in citation
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        stated = message_from_bytes(archive.read(metadata))
    assert "raceme/py.typed" in names
    assert "raceme/strategies/__init__.pyi" in names
    assert any(name.endswith("uPlot.LICENSE") and "licenses" in name for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    assert stated["Author"] == "Raceme contributors"
    assert stated["License-Expression"] == "Apache-2.0"


def test_the_source_distribution_has_the_tests_and_no_results(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.build")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        name = hatchling.build_sdist(str(tmp_path))
    finally:
        os.chdir(before)
    with tarfile.open(tmp_path / name) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    for needed in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "tests/test_wheel.py"):
        assert needed in names
    # The archive contains all pages and pictures of the documentation site.
    site = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.*")]
    assert {name for name in site if not name.endswith((".json", ".pyc"))} <= names
    assert not [name for name in names if name.startswith("docs/results/")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_work_far_from_a_checkout(installed: Installed, tmp_path: Path) -> None:
    where = [installed.python, "-c", "import raceme; print(raceme.__file__)"]
    found = subprocess.run(
        where, cwd=tmp_path, env=installed.variables, capture_output=True, text=True
    )
    assert found.stdout.startswith(str(installed.folder))

    def raceme(*arguments: str) -> str:
        return output(installed.start(tmp_path, *arguments))

    assert "casa" in raceme("list", "strategies")
    run = ["--strategy", "fedasync", "--max-updates", "8", "--clients", "4", "--workers", "0"]
    assert "8 updates were applied" in raceme("run", *run, "--out", "out")
    assert (tmp_path / "out" / "run.sqlite").is_file()
    raceme("report", "out")
    assert (tmp_path / "out" / "report.html").is_file()
    port = free_port()
    watch = installed.start(tmp_path, "watch", "out", "--port", str(port))
    try:
        wait_until(lambda: fetched(port, "") is not None, 60)
        assert b"<title>Raceme</title>" in (fetched(port, "") or b"")
        assert fetched(port, "assets/main.js")
    finally:
        watch.terminate()
        watch.communicate(timeout=60)


def fetched(port: int, path: str) -> bytes | None:
    """Return the response of the dashboard, or None."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return bytes(answer.read())
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_and_a_device_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    run = ["--strategy", "fedasync", "--max-updates", "4", "--clients", "2", "--groups", "0.5,0.5"]
    places = ["--address", address, "--metrics", "off", "--out", "out"]
    server = installed.start(tmp_path, "serve", *run, *places)
    device = installed.start(
        tmp_path,
        *("device", "--superlink", address, "--insecure"),
        *("--node-config", "partition-id=0 num-partitions=2"),
    )
    try:
        wait_until(lambda: server.poll() is not None, 240)
    finally:
        device.terminate()
        device.communicate(timeout=60)
        server.kill()
    text, _ = server.communicate()
    assert server.returncode == 0, text
    assert "4 updates were applied" in text
