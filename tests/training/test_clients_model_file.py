"""The model file for a device's application: it is complete whenever it is read."""

from __future__ import annotations

import json
import resource
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from nodes import CONFIG, INITIAL, SPEC, context, message

from raceme import datasets
from raceme.client_app import app
from raceme.core.errors import UserError
from raceme.fleet.device import checked_model_file
from raceme.flower.messages import identify_process
from raceme.training.clients import network_of


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    identify_process()
    with warnings.catch_warnings():
        # torch warns that TorchScript is deprecated.
        warnings.simplefilter("ignore")
        yield


def use(path: Path | None, version: int | None = 1, own: int = 0) -> RecordDict:
    """Give a device a version, whose weights are the initial ones times its number."""
    told = {"kind": "use", "used-run": "run", "used-cluster": 3, "used-version": version or 0}
    told |= {"own-model": 0.2, "completed-by": "own-mixture"} if own else {}
    asked: Message = message("query", told)
    if version is None:
        del asked.content["arrays"]
    else:
        asked.content["arrays"] = SPEC.pack(SPEC.unpack(INITIAL) * np.float32(version))
    device = context(0, CONFIG)
    if own:
        device.state["own-line"] = SPEC.pack(SPEC.unpack(INITIAL) * np.float32(own))
    if path is not None:
        device.node_config["model-file"] = str(path)
    return app(asked, device).content


def read(path: Path) -> tuple[torch.jit.ScriptModule, dict[str, Any]]:
    extra = {"model.json": ""}
    module = torch.jit.load(path, _extra_files=extra)
    return module, json.loads(extra["model.json"])


def test_the_file_holds_the_model_and_says_which(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    content = use(path, None)
    assert dict(content.metric_records["metrics"]) == {"uses": 1}
    assert "used-version" not in content.config_records["config"]
    content = use(path, 2)
    stated = dict(content.config_records["config"])
    assert stated == {"kind": "use", "used-run": "run", "used-cluster": 3, "used-version": 2}
    # A device that is queried later reports the stored version.
    assert dict(use(path, None).config_records["config"]) == stated
    module, about = read(path)
    assert (about["run_id"], about["cluster"], about["version"]) == ("run", 3, 2)
    assert about["labels"] == [str(digit) for digit in range(10)]
    data = datasets.described(CONFIG)
    network = network_of(datasets.with_defaults(CONFIG))
    network.read(SPEC.pack(SPEC.unpack(INITIAL) * np.float32(2)))
    with torch.no_grad():
        wanted = network.module.eval()(torch.from_numpy(data.inputs(np.arange(50))))
        found = module(torch.from_numpy(data.x[:50]))
    torch.testing.assert_close(found, wanted)


def test_the_file_holds_a_mixture_with_the_devices_own_model(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def weights(version: int, own: int = 0) -> np.ndarray:
        use(path, version, own)
        return np.concatenate(
            [values.detach().numpy().ravel() for values in read(path)[0].parameters()]
        )

    received, mixed = weights(1), weights(1, own=3)
    share = (mixed - received) @ received / (received @ received) / 2.0
    assert 0.01 < share < 0.99
    np.testing.assert_allclose(mixed, received * (1.0 + 2.0 * share), rtol=1e-4, atol=1e-6)


def test_a_device_without_a_file_reports_it() -> None:
    assert dict(use(None).metric_records["metrics"]) == {"uses": 0}


def test_a_reader_always_finds_a_whole_model(tmp_path: Path) -> None:
    path, stop = tmp_path / "model.pt", threading.Event()
    use(path, 1)
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            module, about = read(path)
            module(torch.zeros(1, 1, 8, 8))
            seen.append(about["version"])

    reader = threading.Thread(target=look)
    reader.start()
    for version in range(2, 12):
        use(path, version)
    stop.set()
    reader.join()
    assert len(set(seen)) > 3
    assert seen == sorted(seen)
    assert read(path)[1]["version"] == 11
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    use(path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises((OSError, RuntimeError)):
            use(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(path)[1]["version"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_an_invalid_model_file_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"something else")
    assert "used-version" not in use(path, None).config_records["config"]
    use(path, 4)
    assert read(path)[1]["version"] == 4


def test_an_impossible_path_is_refused_at_the_start(tmp_path: Path) -> None:
    assert checked_model_file(tmp_path / "model.pt") == str(tmp_path / "model.pt")
    with pytest.raises(UserError, match="is not a regular file"):
        checked_model_file(tmp_path)
    with pytest.raises(UserError, match="its folder is missing or belongs to another"):
        checked_model_file(tmp_path / "none" / "model.pt")
