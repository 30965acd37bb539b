"""An emulated board: Debian 13 for arm64, on which `raceme device` trains for this host.

Needs root, the network, and Debian's packages ``debootstrap`` and ``qemu-user-static``; takes
minutes, and 2 GiB. Only one Python process is started in the root file system, under qemu, so that
neither the kernel's binfmt_misc nor a container engine is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, free_port, loopback, raceme

from raceme.records.record import read_run

TOOLS = ("debootstrap", "dpkg-deb", "qemu-aarch64-static")
TORCH = "torch==2.10.*"
"""The latest version whose arm64 wheels are for the CPU, as docs/raspberry-pi.md says."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]


def make_root(root: Path) -> None:
    """Unpack a Debian with Python for arm64, without running any of its programs."""
    base = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase"]
    subprocess.run([*base, "--include=python3", "trixie", str(root)], check=True)
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    shutil.copy(str(shutil.which("qemu-aarch64-static")), root / "usr/bin")
    shutil.copy("/etc/hosts", root / "etc")


def install(root: Path, wheels: Path) -> None:
    """Install the requirements of a device, as in the guide, into the root file system."""
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "build", "-q", "--wheel", "-o", str(wheels), str(ROOT)], check=True)
    (wheel,) = wheels.glob("raceme-*.whl")
    where = ["--target", str(root / "opt/raceme"), "--python-version", "3.13"]
    where += ["--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:"]
    subprocess.run([uv, "pip", "install", "-q", *where, TORCH, str(wheel)], check=True)


def on_board(root: Path, *arguments: str) -> list[str]:
    """Return the command that runs the board's Python."""
    emulated = ["chroot", str(root), "/usr/bin/qemu-aarch64-static", "-E", "HOME=/tmp"]
    return [*emulated, "-E", "PYTHONPATH=/opt/raceme", "/usr/bin/python3", *arguments]


def test_a_board_of_arm64_trains_two_tasks_for_a_host_of_another_kind(tmp_path: Path) -> None:
    root, out = tmp_path / "board", tmp_path / "out"
    make_root(root)
    install(root, tmp_path / "wheels")
    code = "import platform, torch; print(platform.machine(), torch.__version__)"
    told = subprocess.run(
        on_board(root, "-c", code), capture_output=True, text=True, check=True
    ).stdout.split()
    assert told[0] == "aarch64"
    assert told[1].startswith("2.10.")
    x, y = np.eye(40, 4, dtype=np.float32), np.arange(40) % 3
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "num_classes": 3}
    np.savez(tmp_path / "sample.npz", **data)
    np.savez(root / "tmp/kitchen.npz", **data)
    address = f"127.0.0.1:{free_port()}"
    with loopback(tmp_path) as place:
        run = ["--dataset", "npz", "--data-file", str(tmp_path / "sample.npz"), "--model", "mlp"]
        run += ["--max-updates", "2", "--address", address, "--out", str(out)]
        server = place.start("server", raceme("serve", *run))
        device = ["device", "--superlink", address, "--insecure", "--device-id", "kitchen"]
        device += ["--node-config", "data-file='/tmp/kitchen.npz'"]
        board = place.start("board", on_board(root, "-m", "raceme", *device))
        board.wait_for(r"(?s)train task .* done in .*train task .* done in ", 1800)
        assert server.wait(300) == 0
        # An emulated Python takes long to end.
        board.handle.terminate()
        assert board.wait(300) == 0
    record = read_run(out)
    assert record.updates.client.tolist() == ["kitchen", "kitchen"]
    assert (record.updates.cpu_seconds > 0).all()
