"""Cached clients: reuse and removal of data, and imports of a device."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import CONFIG, context, node_context, write_device

from raceme.client_app import forget, work_of
from raceme.core.config import RunConfig
from raceme.training.clients import ClientCache, LocalClient
from raceme.training.models import Samples


class Loaded:
    """Placeholder for a client's data."""


def cache() -> tuple[ClientCache, list[tuple[object, int]]]:
    loaded: list[tuple[object, int]] = []

    def load(run: object, node: object, step: int) -> LocalClient:
        loaded.append((dict(node)["partition-id"], step))  # type: ignore[call-overload]
        return Loaded()  # type: ignore[return-value]

    return ClientCache(load), loaded


def test_a_client_is_loaded_once_and_again_for_each_step_of_its_data() -> None:
    clients, loaded = cache()
    first = clients.client(context(0))
    assert clients.client(context(0)) is first
    later = clients.client(context(0), step=1)
    assert later is not first
    assert clients.client(context(0)) is first
    assert clients.client(context(1), step=1) is not later
    assert loaded == [(0, 0), (0, 1), (1, 1)]


def test_samples_kept_for_validation_are_neither_trained_on_nor_others_than_before() -> None:
    def of(share: float) -> LocalClient:
        settings = ConfigRecord({"kind": "losses", "validation-share": share})
        content = RecordDict({"config": settings})
        return work_of(Message(content, dst_node_id=7, message_type="train"), context(2)).client

    whole, divided = of(0.0), of(0.25)
    assert whole.validation is None
    assert divided.validation is not None
    assert len(divided.validation) == round(0.25 * len(whole.train))
    parts = [
        row.numpy().tobytes() for part in (divided.train, divided.validation) for row in part.x
    ]
    assert sorted(parts) == sorted(row.numpy().tobytes() for row in whole.train.x)
    assert len(divided.test) == len(whole.test)
    assert of(0.25) is divided


@pytest.mark.parametrize("share", [-0.5, 1.0])
def test_a_share_for_validation_leaves_samples_to_train_on(share: float) -> None:
    content = RecordDict({"config": ConfigRecord({"kind": "losses", "validation-share": share})})
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        work_of(Message(content, dst_node_id=7, message_type="train"), context(2))


def test_at_most_two_steps_of_a_client_stay_in_memory() -> None:
    clients, _ = cache()
    seen = [weakref.ref(clients.client(context(0), step)) for step in range(100)]
    gc.collect()
    assert [step for step, client in enumerate(seen) if client() is not None] == [98, 99]


def test_no_data_of_a_run_remain_when_another_begins() -> None:
    def loaded(**keys: object) -> weakref.ref[Samples]:
        node = context(0, CONFIG.with_values(**keys))
        work = work_of(Message(RecordDict(), dst_node_id=7, message_type="query"), node)
        return weakref.ref(work.client.train)

    first = loaded()
    assert first() is not None
    second = loaded(seed=1)
    gc.collect()
    assert first() is None
    assert second() is not None
    forget()
    gc.collect()
    assert second() is None


def test_a_device_imports_nothing_that_only_a_server_needs(tmp_path: Path) -> None:
    write_device(tmp_path / "own.npz")
    config = RunConfig(dataset="npz", model="mclr")
    config = config.with_values(data_file=str(tmp_path / "own.npz"))
    script = (
        "import json, sys\n"
        "from flwr.app import Context, Message, RecordDict\n"
        "from raceme.client_app import app\n"
        "from raceme.flower.messages import identify_process\n"
        "identify_process()\n"
        "run = json.loads(sys.argv[1])\n"
        "context = Context(1, 7, {'device-id': 'a'}, RecordDict(), run)\n"
        "print(app(Message(RecordDict(), 7, 'query'), context).content['config']['client-id'])\n"
        "print(*{'matplotlib', 'sklearn', 'torchvision'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(config.to_mapping())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["a", ""]


def test_a_device_sees_that_its_own_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    write_device(path)
    config = RunConfig(dataset="npz", model="mclr").with_values(data_file=str(path))
    node = {"device-id": "a", "data-file": str(path)}

    def labels() -> tuple[int, list[int]]:
        work = work_of(Message(RecordDict(), 7, "query"), node_context(node, config))
        return id(work.client), sorted(set(work.client.train.y.tolist()))

    first = labels()
    assert first == labels()
    assert first[1] == [0, 1, 2]
    other = tmp_path / "other.npz"
    write_device(other, classes=2)
    other.replace(path)
    second = labels()
    assert second[1] == [0, 1]
    assert labels() == second
    # A file may be missing for a moment while it is replaced; the cached data remain.
    path.unlink()
    assert labels()[1] == [0, 1]
    write_device(path, classes=4)
    assert labels()[1] == [0, 1, 2, 3]
    forget()
    write_device(other, classes=3)
    other.replace(path)
    assert labels()[1] == [0, 1, 2]
