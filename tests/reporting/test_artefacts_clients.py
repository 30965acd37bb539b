"""The models that clients use at the end of a run, each in its own file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raceme
from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.notebook import OpenRun
from raceme.records.folder import model_file
from raceme.runs.experiment import resolve, simulate
from raceme.training.clients import network_of
from raceme.training.local import evaluate
from raceme.training.models import Samples

KEYS: dict[str, object] = {"clients": 6, "max-updates": 48, "eval-every": 12, "workers": "0"}


def finished(out: Path, **keys: object) -> tuple[RunConfig, OpenRun]:
    config = resolve(RunConfig.from_mapping(KEYS | {"out": str(out)} | keys))
    simulate(config)
    opened = raceme.open(out)
    assert isinstance(opened, OpenRun)
    return config, opened


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "panicle", "partition": "iid", "own-model": False},
        {"strategy": "cdfl", "partition": "rotation-groups", "groups": "2", "drift": "mixture"}
        | {"proxy": "40", "pretrain": 50},
        {"strategy": "casa"},
    ],
    ids=["a mean of versions", "a mixture", "its cluster's"],
)
def test_a_clients_model_has_the_accuracy_that_was_reported(
    keys: dict[str, object], tmp_path: Path
) -> None:
    config, run = finished(tmp_path / "run", **keys, **{"client-models": True})
    tests = run.client_evaluations
    last = tests[tests["updates"] == tests["updates"].max()].set_index("client")
    assert len(last) == 6
    network = network_of(config)
    for client, test in last.iterrows():
        arrays = run.model(str(client))
        network.module.load_state_dict({k: torch.from_numpy(v) for k, v in arrays.items()})
        data = datasets.client_data(config, int(str(client).split("-")[1]), int(test["step"]))
        accuracy, loss = evaluate(network, Samples(data.x_test, data.y_test))
        assert accuracy == test["accuracy"]
        assert loss == pytest.approx(test["loss"], rel=1e-5)


def test_only_runs_that_are_asked_to_leave_clients_models(tmp_path: Path) -> None:
    _, run = finished(tmp_path / "run", strategy="casa")
    assert not (tmp_path / "run" / "clients").exists()
    with pytest.raises(UserError, match=r"no model of client 'client-0': .* client-models=true"):
        run.model("client-0")


def test_a_resumed_run_leaves_no_models_of_its_former_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished(out, strategy="casa", **{"client-models": True, "checkpoint-every": 24})
    gone = model_file(out, "client-9")
    gone.write_bytes(b"of another end")
    with_more = {"resume": str(out), "out": "", "max-updates": 60}
    simulate(resolve(RunConfig.from_mapping(KEYS | {"strategy": "casa"} | with_more)))
    assert not (out / "clients").exists() or not list((out / "clients").iterdir())


def test_a_device_may_be_called_what_no_file_can_be(tmp_path: Path) -> None:
    file = model_file(tmp_path, "../kitchen/one")
    assert file.parent == tmp_path / "clients"
    assert file != model_file(tmp_path, "..%2Fkitchen%2Fone")
