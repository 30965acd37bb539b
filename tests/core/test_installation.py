"""Unsupported versions are refused in one line, before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
"""


def installed(folder: Path, name: str, version: str, *lines: str) -> None:
    """Put the metadata of a package into a folder, where they precede the environment's."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    text = METADATA.format(name=name, version=version) + "".join(f"{line}\n" for line in lines)
    (place / "METADATA").write_text(text)


def raceme(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "raceme", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "version", "bound"),
    [
        ("flwr", "1.38.0", ">="),
        ("flwr", "1.99.0", "<"),
        ("torch", "2.5.1", ">="),
        ("numpy", "1.20.0", ">="),
    ],
)
def test_an_unsupported_package_is_named_with_what_is_supported(
    name: str, version: str, bound: str, tmp_path: Path
) -> None:
    installed(tmp_path, name, version)
    done = raceme(tmp_path, "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"needs {name} " in line
    assert bound in line
    assert f"{version} is installed: python3 -m pip install '{name}" in line
    assert not list(tmp_path.glob("runs"))


def test_the_check_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "raceme", "9.0", "Requires-Python: >=3.99,<4")
    monkeypatch.setenv("RACEME_ANY_VERSION", "1")
    assert raceme(tmp_path, "list").returncode == 0


def test_an_unsupported_python_is_named(tmp_path: Path) -> None:
    installed(tmp_path, "raceme", "9.0", "Requires-Python: >=3.99,<4")
    done = raceme(tmp_path, "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "supports Python >=3.99 and <4; this is 3." in line


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    installed(tmp_path, "raceme", "9.0", "Requires-Dist: no-such-package>=1")
    done = raceme(tmp_path, "run")
    assert "needs no-such-package >=1; it is not installed" in done.stderr


def test_the_python_interface_reports_it_too(tmp_path: Path) -> None:
    installed(tmp_path, "flwr", "1.38.0")
    done = subprocess.run(
        [sys.executable, "-c", "import raceme; raceme.run()"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "needs flwr >=1.39" in done.stderr.splitlines()[-1]


SHOWN = "from raceme.core.installation import install_line; print(install_line('server'))"


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        ('{"url": "file:///srv/my%20clone", "dir_info": {"editable": true}}', "-e '/srv/my clone["),
        ('{"url": "file:///srv/clone", "dir_info": {}}', "'/srv/clone["),
        ('{"url": "file:///srv/a.whl", "archive_info": {}}', "'raceme["),
        ("", "'raceme["),
    ],
)
def test_an_extra_is_installed_from_where_the_installation_comes_from(
    origin: str, place: str, tmp_path: Path
) -> None:
    installed(tmp_path, "raceme", "9.0")
    if origin:
        (tmp_path / "raceme-9.0.dist-info" / "direct_url.json").write_text(origin)
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"python3 -m pip install {place}server]'\n"


@pytest.mark.smoke
def test_other_extras_are_not_required(tmp_path: Path) -> None:
    installed(tmp_path, "raceme", "9.0", "Requires-Dist: no-such-package>=1; extra == 'server'")
    assert raceme(tmp_path, "list").returncode == 0
