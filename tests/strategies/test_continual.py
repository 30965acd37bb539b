"""Continual methods in rounds: requests to clients, and runs of two tasks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clustered import update, with_clients
from flwr.app import ConfigRecord

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.messages import from_array
from raceme.core.requests import Update
from raceme.core.state import from_tree, to_tree
from raceme.datasets.drift import Schedule
from raceme.runs.experiment import build_grid, resolve, training_settings
from raceme.strategies import (
    APD,
    EWC,
    STRATEGIES,
    APDParameters,
    EWCParameters,
    FedWeIT,
    FedWeITParameters,
    Plan,
    StableSGD,
    StableSGDParameters,
)
from raceme.strategies.continual.strategy import Adaptive, FedWeITState, adaptive_of
from raceme.training.models import initial_arrays


def at_tasks(strategy: Any, trained: dict[str, int], **now: int) -> Any:
    """A strategy with clients at the given tasks (`now`), which have trained on `trained`."""
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
    work = [made.request_for(client) for client in ("c0", "c1", "c2")]
    assert {one.kind for one in work} == {"train-elastic"}
    told = {"proximal-mu": 0.3, "elastic-strength": 7.0, "elastic-memory": 0.5}
    # One epoch more than the usual two.
    assert [dict(one.settings) for one in work] == [told, told | {"compute-scale": 1.5}, told]


def test_stable_sgds_learning_rate_falls_with_each_task() -> None:
    parameters = StableSGDParameters(mu=0.0, dropout=0.25, decay=0.8)
    made = at_tasks(StableSGD(parameters), {}, c0=0, c1=1, c2=3)
    made.progress.fleet.clients["c3"] = made_client("c3")
    scales = [made.request_for(f"c{number}").settings["lr-scale"] for number in range(4)]
    # The time of c3's next change is unknown.
    assert scales == pytest.approx([1.0, 0.8, 0.512, 1.0])
    assert dict(made.request_for("c0").settings) == {
        "proximal-mu": 0.0,
        "dropout": 0.25,
        "lr-scale": 1.0,
    }
    small = at_tasks(StableSGD(StableSGDParameters(batch_size=4)), {}, c0=0)
    assert small.request_for("c0").settings["batch-size"] == 4


@pytest.mark.parametrize("method", [EWC, StableSGD, APD, FedWeIT])
def test_a_round_is_the_mean_by_samples(method: Any) -> None:
    made = with_clients(method(), 2)
    updates = [update(made, "c0", 1, 0, examples=10), update(made, "c1", 5, 2, examples=30)]
    applied = made.applied(updates)
    assert made.models[0].vector.tolist() == [4.0, 1.5]
    assert [one.weight for one in applied] == [0.25, 0.75]


def test_apd_says_how_strongly_parts_are_held_and_has_them_tested_with() -> None:
    made = at_tasks(APD(APDParameters(mu=0.3, sparsity=0.2, drift=7.0)), {}, c0=0)
    work = made.request_for("c0")
    assert work.kind == "train-decomposed"
    assert work.settings == {"proximal-mu": 0.3, "sparsity": 0.2, "drift-strength": 7.0}
    assert dict(made.needs.test_settings) == {"completed-by": "task-parts"}


METHODS = pytest.mark.parametrize("name", ["ewc", "ssgd", "apd", "fedweit"])


# FedWeIT: weights that clients borrow.


def brought(made: Any, client: str, task: int, indices: list[int], *values: float) -> Update:
    """An update with task-adaptive weights for one of the client's tasks."""
    one = update(made, client, 1.0, 1.0)
    numbers = {
        "adaptive-indices": np.array(indices, np.int32),
        "adaptive-values": np.array(values, np.float32),
    }
    return replace(one, task=replace(one.task, step=task), numbers=numbers)


def borrowed(made: Any, client: str) -> list[list[float]]:
    """Return the values that a client borrows from others."""
    record = made.request_for(client).arrays.get("others", {})
    values = [name for name in record if name.startswith("adaptive-values")]
    assert len(record) == 2 * len(values)
    return [from_array(record[name]).tolist() for name in values]


def test_a_client_that_begins_a_task_borrows_others_latest_tasks_before_it() -> None:
    made = at_tasks(FedWeIT(), {"c0": 1, "c1": 2, "c2": 1}, c0=2, c1=2, c2=2)
    for task in (0, 1):
        made.applied([brought(made, "c0", task, [0], 1.0 + task)])
    made.applied([brought(made, "c1", 0, [1], 7.0), brought(made, "c2", 1, [0, 1], 8.0, 9.0)])
    made.applied([brought(made, "c1", 2, [1], 6.0)])
    # Neither its own weights nor c1's weights for the task that starts now.
    assert borrowed(made, "c0") == [[7.0], [8.0, 9.0]]
    assert borrowed(made, "c2") == [[2.0], [7.0]]
    # c1 has already started the task.
    assert borrowed(made, "c1") == []
    state = from_tree(FedWeITState, to_tree(made.state))
    assert to_tree(state)["adaptive"].keys() == {"c0", "c1", "c2"}
    assert isinstance(state.adaptive["c0"][1], Adaptive)


def test_of_each_client_two_tasks_are_kept_and_so_many_clients_are_borrowed_from() -> None:
    made = at_tasks(FedWeIT(FedWeITParameters(others=2)), {}, c0=9, c1=9, c2=9, c3=9)
    for number, client in enumerate(("c1", "c2", "c3")):
        for task in range(4):
            made.applied([brought(made, client, task, [0], 1.0 + 10.0 * number + task)])
    assert {client: list(tasks) for client, tasks in made.state.adaptive.items()} == {
        client: [2, 3] for client in ("c1", "c2", "c3")
    }
    drawn = {tuple(value for (value,) in borrowed(made, "c0")) for _ in range(50)}
    assert drawn == {(4.0, 14.0), (4.0, 24.0), (14.0, 24.0)}


@pytest.mark.parametrize(
    ("indices", "values"),
    [([0, 0], [1.0, 1.0]), ([2], [1.0]), ([-1], [1.0]), ([0, 1], [1.0]), ([0], [3e38]), ([], [])],
)
def test_unusable_adaptive_weights_are_left_aside(indices: list[int], values: list[float]) -> None:
    made = at_tasks(FedWeIT(), {}, c0=0)
    one = brought(made, "c0", 0, indices, *values)
    assert adaptive_of(one, made.spec) is None
    made.applied([one])
    assert made.state.adaptive == {}
    assert made.models[0].vector.tolist() == [1.0, 1.0]


# Complete runs with tasks.

IID = {"clients": 4, "partition": "iid", "workers": "0"}
TASKS = {"drift": "tasks", "tasks-count": 2, "tasks-order": "same"}
CONFIG = resolve(RunConfig.from_mapping({**IID, **TASKS}))
PLAN = Plan(eval_every=20, drift=Schedule("updates", (40,)))


def play(
    name: str,
    saved: dict[str, Any] | None = None,
    save_at: int = -1,
    config: RunConfig = CONFIG,
    plan: Plan = PLAN,
) -> tuple[list[events.Event], bytes, dict[str, Any]]:
    """Run a method with Raceme's own clients, from a state or from the start; save it once."""
    strategy, grid = STRATEGIES[name](seed=3), build_grid(config)
    if saved:
        strategy.load_state_dict(saved["strategy"])
        grid.load_state_dict(saved["grid"])
    seen: list[events.Event] = []
    state: dict[str, Any] = {}

    def stop_check() -> str:
        if strategy.progress.updates == save_at and not state:
            own = {"strategy": strategy.state_dict(), "grid": grid.state_dict()}
            state.update(copy.deepcopy(own), seen=len(seen))
        return ""

    strategy.run(
        grid,
        initial_arrays(config),
        80,
        train_config=training_settings(config),
        plan=plan,
        observe=seen.append,
        stop_check=stop_check,
    )
    grid.close()
    return seen, strategy.models[0].vector.tobytes(), state


def accuracies(seen: list[events.Event]) -> list[float]:
    return [event.accuracy for event in seen if isinstance(event, events.Evaluated)]


@METHODS
def test_a_run_of_two_tasks_that_goes_on_is_the_one_that_was_never_interrupted(name: str) -> None:
    # During the second task, so that the clients' state of the first must be restored.
    seen, model, state = play(name, save_at=52)
    rest, again, _ = play(name, saved=state)
    assert list(map(repr, rest)) == list(map(repr, seen[state["seen"] :]))
    assert again == model
    # Tested after 0, 20, 40, 60 and 80 updates. Guessing would be right in a fifth of cases.
    assert accuracies(seen)[-1] > 0.7


@METHODS
def test_it_simply_works_where_data_never_change(name: str) -> None:
    config = resolve(RunConfig.from_mapping(IID))
    assert accuracies(play(name, config=config, plan=Plan(eval_every=80))[0])[-1] > 0.6
