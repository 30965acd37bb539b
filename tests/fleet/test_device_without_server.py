"""A device works without the packages of the extra ``server``."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from fleet_api import fleet_api
from processes import ROOT

from raceme.core.installation import install_line
from raceme.core.registry import SERVER

WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(SERVER)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""Hides the packages of the extra from a Python process."""

DEVICE = """
import raceme.cli, raceme.fleet.device
from flwr.app import ArrayRecord, Context, Message, RecordDict
from raceme.training import models
from raceme.client_app import app
from raceme.flower.messages import identify_process

identify_process()
run = {"dataset": "npz", "model": "mlp", "strategy": "casa"}

def answer(kind, **node):
    model = ArrayRecord(models.build("mlp", (4,), 3).state_dict())
    node = {"device-id": "kitchen", "data-file": FILE, **node}
    message = Message(RecordDict({"arrays": model}), 7, kind)
    return app(message, Context(1, 7, node, RecordDict(), run))

for kind in ("query", "train", "evaluate"):
    assert not answer(kind).has_error()
private = {"local-dp-epsilon": 50.0, "local-dp-clip": 1.0}
assert not answer("train", **private).has_error()
"""
"""Answers messages like `raceme device`."""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=280,
    )


def test_a_device_with_its_own_file_trains_without_the_packages_of_a_host(tmp_path: Path) -> None:
    x, y = np.eye(30, 4, dtype=np.float32), np.arange(30) % 3
    np.savez(tmp_path / "kitchen.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    done = python(f"{WITHOUT}\nFILE = {str(tmp_path / 'kitchen.npz')!r}\n{DEVICE}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["run", "serve --out run", "list --keys"])
def test_a_host_without_the_extra_is_told_in_one_line_what_to_type(command: str) -> None:
    done = python(f"{WITHOUT}\nfrom raceme.cli import main\nmain()", *command.split())
    (line,) = done.stderr.splitlines()
    assert line.startswith("raceme: ")
    assert line.endswith(install_line("server"))
    assert done.returncode == 2


def test_names_are_listed_without_the_packages_of_a_host() -> None:
    done = python(f"{WITHOUT}\nfrom raceme.cli import main\nmain()", "list")
    assert done.returncode == 0, done.stderr
    assert "fedasync" in done.stdout


ONLINE = """
import logging, os, signal, sys
from raceme.cli.fleet import DeviceArguments, device

class Look(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("online at"):
            print([name in sys.modules for name in ("torch", "raceme.client_app")], flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

logging.getLogger("raceme.device").addHandler(Look())
device(DeviceArguments(superlink=ADDRESS, insecure=True))
"""
"""Reports the modules that a device has loaded once it is online, and stops it."""


def test_a_device_is_online_when_it_can_begin_to_work() -> None:
    with fleet_api(registered_only=False) as api:
        done = python(f"ADDRESS = {api.endpoint.address!r}\n{ONLINE}")
    assert done.stdout == "[True, True]\n", done.stderr
    assert done.returncode == 0


def test_a_device_is_told_which_package_a_dataset_would_need() -> None:
    done = python(
        f"{WITHOUT}\nfrom raceme import load\n"
        "try:\n    load('digits')\nexcept Exception as error:\n    print(error)"
    )
    assert done.stdout.startswith("scikit-learn is not installed")


def test_the_extra_is_what_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {line.partition(">")[0] for line in project["optional-dependencies"]["server"]}
    assert extra == set(SERVER.values())
    assert not extra & {line.partition(">")[0] for line in project["dependencies"]}
