"""The continual methods in rounds: what clients are asked, and runs of two tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from clustered import update, with_clients
from flwr.app import ConfigRecord

from raceme.server.fleet import Client
from raceme.strategies import EWC, EWCParameters, StableSGD, StableSGDParameters


def at_tasks(strategy: Any, trained: dict[str, int], **now: int) -> Any:
    """A strategy whose clients are at these tasks, and have trained on those."""
    made = with_clients(strategy, len(now))
    made.train_config = ConfigRecord({"lr": 0.1, "local-epochs": 2})
    made.step_of = now.get
    for client in now:
        made.progress.fleet.clients[client] = made_client(client)
    made.progress.trained_steps = trained
    return made


def made_client(name: str) -> Client:
    return Client(name, 10)


def test_ewc_says_how_strongly_and_what_measuring_takes() -> None:
    parameters = EWCParameters(mu=0.3, strength=7.0, memory=0.5)
    made = at_tasks(EWC(parameters), {"c0": 0, "c1": 0}, c0=0, c1=1, c2=0)
    work = [made.work_for(client) for client in ("c0", "c1", "c2")]
    assert {one.kind for one in work} == {"train-elastic"}
    told = {"proximal-mu": 0.3, "elastic-strength": 7.0, "elastic-memory": 0.5}
    # One epoch more, where two are trained.
    assert [dict(one.settings) for one in work] == [told, told | {"compute-scale": 1.5}, told]


def test_stable_sgds_learning_rate_falls_with_each_task() -> None:
    parameters = StableSGDParameters(mu=0.0, dropout=0.25, decay=0.8)
    made = at_tasks(StableSGD(parameters), {}, c0=0, c1=1, c2=3)
    made.progress.fleet.clients["c3"] = made_client("c3")
    scales = [made.work_for(f"c{number}").settings["lr-scale"] for number in range(4)]
    # Of c3 nobody says when its data change.
    assert scales == pytest.approx([1.0, 0.8, 0.512, 1.0])
    assert dict(made.work_for("c0").settings) == {
        "proximal-mu": 0.0,
        "dropout": 0.25,
        "lr-scale": 1.0,
    }
    small = at_tasks(StableSGD(StableSGDParameters(batch_size=4)), {}, c0=0)
    assert small.work_for("c0").settings["batch-size"] == 4


@pytest.mark.parametrize("method", [EWC, StableSGD])
def test_a_round_is_the_mean_by_samples(method: Any) -> None:
    made = with_clients(method(), 2)
    updates = [update(made, "c0", 1, 0, examples=10), update(made, "c1", 5, 2, examples=30)]
    applied = made.aggregate(updates)
    assert made.models[0].vector.tolist() == [4.0, 1.5]
    assert [one.weight for one in applied] == [0.25, 0.75]
    assert np.isfinite(made.models[0].vector).all()
