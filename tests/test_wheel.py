"""The distributions that are released: whole, and of use far from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
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


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with what the wheel installs."""
    folder = wheel.parent / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    return folder


def start(site: Path, place: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `raceme` from the wheel, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "raceme", *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Return what a process prints, once it has ended well."""
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
    assert not [name for name in names if name.startswith("docs/results/")]


def test_the_commands_work_far_from_a_checkout(site: Path, tmp_path: Path) -> None:
    where = [sys.executable, "-c", "import raceme; print(raceme.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(site))
    assert "casa" in output(start(site, tmp_path, "list", "strategies"))
    run = ["--strategy", "fedasync", "--max-updates", "8", "--clients", "4", "--workers", "0"]
    assert "8 updates were applied" in output(start(site, tmp_path, "run", *run, "--out", "out"))
    assert (tmp_path / "out" / "run.sqlite").is_file()
    output(start(site, tmp_path, "report", "out"))
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.slow
def test_a_server_and_a_device_from_the_wheel(site: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    run = ["--strategy", "fedasync", "--max-updates", "4", "--clients", "2", "--groups", "0.5,0.5"]
    places = ["--address", address, "--metrics", "off", "--out", "out"]
    server = start(site, tmp_path, "serve", *run, *places)
    device = start(
        site,
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
