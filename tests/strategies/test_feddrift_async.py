"""FedDrift-Async: clients are judged one by one, and updates are mixed in at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, homes
from test_feddrift import DIGITS, Bench

from raceme.core.config import RunConfig
from raceme.core.messages import SCORES
from raceme.core.requests import InFlight, Update
from raceme.runs.experiment import simulate
from raceme.strategies import FedDriftAsync, FedDriftAsyncParameters


def bench(clients: int = 3, **options: object) -> Bench:
    given = {"delta": 0.25, "alpha": 0.5, "decay": "constant", "compare_on": "new", **options}
    return Bench(FedDriftAsync(FedDriftAsyncParameters(**given)), clients)


def begin(made: Bench, client: str) -> InFlight:
    """Give a client its next task."""
    return made.open_task(made.method.request_for(client))


def train(made: Bench, client: str, value: float = 0.0, task: InFlight | None = None) -> Any:
    """Let a client train; return the outcome of its update."""
    task = task or begin(made, client)
    assert task.kind == "train"
    applied = made.method.applied([Update(task, np.full(2, value, np.float32), 10, 0.0)])[0]
    made.method.close_task(task)
    made.method.progress.updates += 1
    return applied


def measure(made: Bench, client: str, losses: dict[int, float]) -> None:
    """Let a client answer a request for scores."""
    task = begin(made, client)
    assert task.kind == SCORES
    made.score(task, losses)


def test_a_client_with_new_data_measures_before_it_trains_and_is_judged_by_itself() -> None:
    made = bench(ask_every=0)
    for client in ("c0", "c1", "c2"):
        train(made, client)
    made.step = 1
    measure(made, "c0", {0: 0.1})
    train(made, "c0")
    made.step = 2
    measure(made, "c0", {0: 0.5})
    assert homes(made.method) == {"c0": 1, "c1": 0, "c2": 0}
    # It trains its new model on the new data, alternating with the old model on the old data.
    train(made, "c0")
    turns = []
    for _ in range(3):
        work = made.method.request_for("c0")
        turns.append((work.models, work.settings.get("steps")))
        train(made, "c0")
    assert turns == [((1,), None), ((0,), [0, 1]), ((1,), None)]


def test_an_update_is_mixed_into_its_model_at_once() -> None:
    made = bench()
    late = begin(made, "c1")
    applied = train(made, "c0", 4.0)
    assert (applied.cluster, applied.staleness, applied.weight) == (0, 0, 0.5)
    assert made.method.models[0].vector.tolist() == [2.0, 2.0]
    assert train(made, "c1", 4.0, task=late).staleness == 1


def drifted(**options: object) -> Bench:
    """c1 and c2 have drifted one after the other, and founded models 1 and 2."""
    made = bench(**options)
    for client in ("c0", "c1", "c2"):
        train(made, client)
    made.step = 1
    for client in ("c0", "c1", "c2"):
        measure(made, client, {0: 0.1})
        train(made, client)
    made.step = 2
    measure(made, "c0", {0: 0.1})
    measure(made, "c1", {0: 0.5})
    measure(made, "c2", {0: 0.5, 1: 0.1})
    return made


def test_a_new_model_is_isolated_until_its_client_has_measured_again() -> None:
    made = drifted(ask_every=1)
    # Without isolation c2 would have taken c1's model.
    assert homes(made.method) == {"c0": 0, "c1": 1, "c2": 2}
    train(made, "c1")
    train(made, "c2")
    # c1's model is available from now on, c2's is not yet, and no client has measured both.
    measure(made, "c1", {0: 0.5, 1: 0.1, 2: 0.2})
    assert made.method.state.concepts.isolated == {2: 1}
    assert list(made.method.models) == [0, 1, 2]
    # Now they are compared: L(1, 1) = 0.1, L(2, 1) = 0.2, L(1, 2) = 0.2, L(2, 2) = 0.1.
    measure(made, "c2", {0: 0.5, 1: 0.2, 2: 0.1})
    assert homes(made.method) == {"c0": 0, "c1": 3, "c2": 3}


def test_what_was_on_its_way_when_models_merged_goes_to_the_merged_one() -> None:
    made = drifted(ask_every=1)
    train(made, "c1")
    train(made, "c2")
    measure(made, "c1", {0: 0.5, 1: 0.1, 2: 0.2})
    late = begin(made, "c1")
    measure(made, "c2", {0: 0.5, 1: 0.2, 2: 0.1})
    before = made.method.models[3].vector.copy()
    applied = train(made, "c1", 8.0, task=late)
    assert (applied.cluster, applied.weight) == (3, 0.5)
    assert made.method.models[3].vector == pytest.approx((before + 8.0) / 2)


def test_scores_of_models_that_were_merged_meanwhile_are_those_of_the_merged_one() -> None:
    made = drifted(ask_every=1)
    train(made, "c1")
    train(made, "c2")
    train(made, "c0")
    measure(made, "c1", {0: 0.5, 1: 0.1, 2: 0.2})
    train(made, "c1")
    asked = begin(made, "c1")
    measure(made, "c2", {0: 0.5, 1: 0.2, 2: 0.1})
    # It was sent models 0, 1 and 2, of which 1 and 2 are 3 now: its least loss has not grown.
    made.score(asked, {0: 0.5, 1: 0.1, 2: 0.2})
    assert homes(made.method) == {"c0": 0, "c1": 3, "c2": 3}


def test_without_steps_clients_measure_every_few_updates() -> None:
    made = bench(ask_every=2)
    made.method.step_of = lambda client: None
    losses: list[float] = [0.1, 0.2, 0.5]
    for loss in losses:
        train(made, "c0")
        train(made, "c0")
        measure(made, "c0", {0: loss})
    # Each loss is compared with the previous one: 0.2 − 0.1 is no drift, 0.5 − 0.2 is.
    assert homes(made.method)["c0"] == 1
    assert made.concepts.assigned["c0"] == {0: 1}


def test_scores_on_data_that_were_trained_on_are_no_measure_of_new_data() -> None:
    made = bench(ask_every=1)
    train(made, "c0")
    made.step = 1
    measure(made, "c0", {0: 0.3})
    train(made, "c0")
    measure(made, "c0", {0: 0.0})
    train(made, "c0")
    made.step = 2
    measure(made, "c0", {0: 0.4})
    assert homes(made.method)["c0"] == 0


def test_scores_that_are_lost_are_asked_for_again_after_the_next_training() -> None:
    made = bench(ask_every=0)
    train(made, "c0")
    made.step = 1
    task = begin(made, "c0")
    assert task.kind == SCORES
    made.method.close_task(task)
    train(made, "c0")
    assert begin(made, "c0").kind == SCORES


def test_models_follow_concepts_on_digits(tmp_path: Path) -> None:
    keys: dict[str, object] = {"strategy": "feddrift-async"}
    keys |= {"max-updates": 320, "local-steps": 15}
    keys["drift-at"] = "60 updates, 120 updates, 180 updates"
    config = RunConfig.from_mapping({**DIGITS, **keys, "out": str(tmp_path / "out")})
    summary = simulate(config).summary
    assert (summary["clusters"], summary["purity"]) == (2, 1.0)
    assert summary["accuracy"] > 0.9


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FedDriftAsync, FedDriftAsyncParameters(start="per-client"))
