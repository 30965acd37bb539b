"""Small Flower apps for tests and benchmarks, and the bundles that a SuperLink hands out."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from raceme.flower.messages import Run

PROJECT = """
[project]
name = "{name}"
version = "{version}"
description = "An app for tests"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "small_app.server:app"
clientapp = "small_app.client:app"

[tool.flwr.app.config]
{config}
"""

IDLE_CLIENT = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""

ONE_TASK_SERVER = """
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    nodes = []
    while not nodes:
        time.sleep(0.1)
        nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in nodes])
    for reply in replies:
        print("REPLY", reply.error.reason if reply.has_error() else "fine", flush=True)
"""


def project(
    name: str = "small", publisher: str = "tests", version: str = "1.0.0", config: str = "speed = 1"
) -> str:
    return PROJECT.format(name=name, publisher=publisher, version=version, config=config)


def write_app(
    folder: Path,
    client: str = IDLE_CLIENT,
    server: str = ONE_TASK_SERVER,
    config: str = "speed = 1",
) -> Path:
    """Write an app that `flwr run` takes; `config` is the default of its run config, as TOML."""
    package = folder / "small_app"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project(config=config))
    for name, text in {"__init__": "", "client": client, "server": server}.items():
        (package / f"{name}.py").write_text(text)
    return folder


def bundle(client: str = IDLE_CLIENT, pyproject: str | None = None) -> bytes:
    """Return an app bundle: a zip with a list of its files' hashes."""
    files = {
        "pyproject.toml": project() if pyproject is None else pyproject,
        "small_app/__init__.py": "",
        "small_app/client.py": client,
    }
    listed = [
        f"{name},{hashlib.sha256(text.encode()).hexdigest()},{len(text) * 8}"
        for name, text in files.items()
    ]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in {**files, ".info/CONTENT": "\n".join(listed)}.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def announced(data: bytes, name: str = "tests/small", version: str = "1.0.0") -> Run:
    """Return a run that announces a bundle."""
    run = Run.create_empty(7)
    run.fab_id, run.fab_version = name, version
    run.fab_hash = hashlib.sha256(data).hexdigest()
    return run
