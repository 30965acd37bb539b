"""Flower apps for tests: those in `quickstarts`, and small ones that tests write."""

from __future__ import annotations

from pathlib import Path

QUICKSTARTS = Path(__file__).resolve().parent / "quickstarts"

_PROJECT = """
[project]
name = "{name}"
version = "1.0.0"
description = "an app"
license = "Apache-2.0"
dependencies = ["flwr>=1.39"]

[tool.flwr.app]
publisher = "raceme"

[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"

[tool.flwr.app.config]
rounds = 2
text = "a"
"""

SERVER = """
import time
from time import sleep

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def messages(grid, kind="train"):
    records = {"arrays": ArrayRecord([np.zeros(4)]), "config": ConfigRecord({"lr": 0.1})}
    return [Message(RecordDict(records), node, kind) for node in grid.get_node_ids()]


@app.main()
def main(grid: Grid, context: Context) -> None:
"""
"""Start of a ServerApp, which the body of `main` follows."""

CLIENT = """
import random

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def answer(msg, **metrics):
    records = {"arrays": msg.content["arrays"], "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=msg)


@app.train()
def train(msg: Message, context: Context):
    return answer(msg, **{"num-examples": 10 * (1 + context.node_config["partition-id"])})


@app.evaluate()
def evaluate(msg: Message, context: Context):
    return answer(msg, **{"num-examples": 10})
"""


def write_app(folder: Path, name: str, server: str, client: str = CLIENT) -> Path:
    """Write an app with the given body of `main`; the name is that of its package.

    Tests in one process share imported modules, so each app needs its own name.
    """
    package = folder / name / name
    package.mkdir(parents=True)
    (folder / name / "pyproject.toml").write_text(_PROJECT.format(name=name))
    (package / "__init__.py").write_text("")
    body = "".join(f"    {line}\n" for line in server.strip().splitlines())
    (package / "server_app.py").write_text(SERVER + body)
    (package / "client_app.py").write_text(client)
    return folder / name
