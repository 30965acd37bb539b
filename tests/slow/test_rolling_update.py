"""A fleet is updated while it works: first the server, then one device after the other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ROOT, Loopback, Process, free_port, loopback, raceme

from raceme.records.control import command

RUN = ["--strategy", "casa", "--dataset", "digits", "--clients", "2", "--groups", "0.5,0.5"]
RUN += ["--max-updates", "100000", "--eval-every", "10", "--checkpoint-every", "1"]


@dataclass
class Installed(Loopback):
    """Processes of the version of Raceme in a folder."""

    package: Path = ROOT

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self.package)}


def released(folder: Path) -> Path:
    """Unpack the last release: `RACEME_RELEASE`, a tag or a commit, or else the last tag."""
    wanted = os.environ.get("RACEME_RELEASE")
    if wanted is None:
        found = subprocess.run(
            ["git", "describe", "--tags", "--abbrev=0", "HEAD^"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        # Before the first release, use the last commit.
        wanted = found.stdout.strip() if found.returncode == 0 else "HEAD"
    archive = subprocess.run(
        ["git", "archive", wanted, "raceme"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip("no git checkout")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def renumbered(folder: Path, version: str) -> Path:
    """Copy the working tree's package with another version number."""
    subprocess.run(["cp", "-r", str(ROOT / "raceme"), str(folder)], check=True)
    init = folder / "raceme" / "__init__.py"
    text, count = re.subn(r'__version__ = ".*"', f'__version__ = "{version}"', init.read_text())
    assert count == 1
    init.write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_adjacent_versions_work_in_one_fleet(tmp_path: Path) -> None:
    former = released(tmp_path / "former")
    (tmp_path / "next").mkdir()
    following = renumbered(tmp_path / "next", "99.0.0")
    out, certs = tmp_path / "out", tmp_path / "certs"
    with loopback(tmp_path) as base:
        old = Installed(base.home, base.stack, package=former)
        new = Installed(base.home, base.stack, package=following)
        port = free_port()
        named = [word for name in ("kitchen", "garden") for word in ("--device", name)]
        make = raceme("certs", "--host", "127.0.0.1", "--out", str(certs), *named)
        assert old.start("certs", make).wait() == 0

        def serve(installed: Installed, name: str) -> Process:
            place = ("--address", f"127.0.0.1:{port}", "--certificates", str(certs))
            return installed.start(name, raceme("serve", *place, "--out", str(out), *RUN))

        def device(installed: Installed, name: str, number: int) -> Process:
            where = ("--superlink", f"127.0.0.1:{port}", "--root-certificates", f"{certs}/ca.crt")
            who = ("--device-id", name, "--key", f"{certs}/devices/{name}")
            data = ("--node-config", f"partition-id={number} num-partitions=2")
            options = (*where, *who, *data, "--trusted-app", "raceme/raceme")
            return installed.start(name, raceme("device", *options))

        server = serve(old, "server-old")
        server.wait_for("Listening on", 120)
        kitchen, garden = device(old, "kitchen", 0), device(old, "garden", 1)
        for name in ("kitchen", "garden"):
            server.wait_for(rf"update +\d+  {name} ", 240)

        server.handle.send_signal(signal.SIGTERM)
        assert server.wait(240) == 130
        server = serve(new, "server-new")
        for name in ("kitchen", "garden"):
            server.wait_for(rf"update +\d+  {name} ", 240)

        garden.handle.send_signal(signal.SIGTERM)
        assert garden.wait(60) == 0
        garden = device(new, "garden", 1)
        garden.wait_for(r"train task \d+: done", 240)
        kitchen.handle.send_signal(signal.SIGTERM)
        assert kitchen.wait(60) == 0
        # A device that is not updated rejoins as well.
        kitchen = device(old, "kitchen", 0)
        kitchen.wait_for(r"train task \d+: done", 240)
        told = {row["device"]: row for row in command(out, "devices")}
        assert told["garden"]["version"] == "99.0.0"
        assert told["kitchen"]["version"] != "99.0.0"
        server.wait_for(r"has raceme .*, this is 99\.0\.0: both have protocol \d", 20)
        assert "has raceme" not in garden.text()
        assert "Traceback" not in server.text() + kitchen.text() + garden.text()
        # Only the work of stopped devices is lost.
        rejections = re.findall(r"was rejected: (.*)", server.text())
        assert all("went offline" in reason for reason in rejections), rejections
        server.handle.send_signal(signal.SIGTERM)
        assert server.wait(240) == 130
