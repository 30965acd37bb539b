"""Nodes as Flower describes them, and messages to Raceme's ClientApp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from raceme.core.config import RunConfig
from raceme.core.messages import ModelSpec
from raceme.training import models

Settings = dict[str, int | float | bool | str]

CONFIG = RunConfig(clients=20, partition="iid")
INITIAL = models.initial_arrays(CONFIG)
SPEC = ModelSpec.of(INITIAL)


def context(client: int = 0, config: RunConfig = CONFIG, **node: object) -> Context:
    """A node as Flower's simulation describes it."""
    return node_context(
        {"partition-id": client, "num-partitions": config.clients or 40, **node}, config
    )


def node_context(node: dict[str, object], config: RunConfig = CONFIG) -> Context:
    return Context(1, 7, node, RecordDict(), config.to_mapping())  # type: ignore[arg-type]


def message(
    kind: str, settings: Settings | None = None, arrays: ArrayRecord | None = None
) -> Message:
    content = RecordDict({"arrays": INITIAL if arrays is None else arrays})
    if settings is not None:
        content["config"] = ConfigRecord(dict(settings))
    return Message(content=content, dst_node_id=7, message_type=kind)


def several(*arrays: ArrayRecord) -> dict[str, ArrayRecord]:
    return {f"arrays-{index}": record for index, record in enumerate(arrays)}


def write_device(path: Path, classes: int = 3) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        path,
        x_train=rng.normal(size=(12, 4)),
        y_train=np.arange(12) % classes,
        x_test=rng.normal(size=(4, 4)),
        y_test=np.arange(4) % classes,
    )
