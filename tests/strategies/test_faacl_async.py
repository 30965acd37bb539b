"""FAACL-Async: tests, support and merges with every answer, by hand and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, found, homes, run_on, three_groups
from supported import SPREAD, SupportBench

from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.messages import LOSSES
from raceme.core.requests import InFlight, InvalidReplyError, Update
from raceme.runs.experiment import simulate
from raceme.strategies import FAACLAsync, FAACLAsyncParameters


def bench(clients: int = 3, **options: object) -> SupportBench:
    given: dict[str, Any] = {"share": 0.5, "decay": "constant", "epsilon": 0.5, **options}
    made = SupportBench(FAACLAsync(FAACLAsyncParameters(**given)), clients)
    for index in range(clients):
        train(made, f"c{index}", float(index + 1))
    return made


def begin(made: SupportBench, client: str) -> InFlight:
    return made.open_task(made.method.request_for(client))


def train(made: SupportBench, client: str, value: float, task: InFlight | None = None) -> Any:
    """Let a client train; return the outcome of its update."""
    task = task or begin(made, client)
    assert task.kind == "train"
    update = Update(task, np.full(2, value, np.float32), 10, 0.0)
    applied = made.method.applied([update])[0]
    made.end(task)
    made.method.progress.updates += 1
    return applied


def measure(made: SupportBench, client: str, losses: dict[int, float]) -> list[int]:
    """Let a client measure losses; return the measured models."""
    task = begin(made, client)
    assert task.kind == LOSSES
    rows = [losses[model] + SPREAD for model in task.candidates]
    made.answer(task, {LOSSES: np.array(rows, np.float32)})
    return list(task.candidates)


def value(made: SupportBench, cluster: int) -> float:
    return float(made.method.models[cluster].vector[0])


FAR = {1: 9.0, 2: 9.0, 3: 9.0}


def test_a_client_measures_what_it_does_not_know_before_it_trains() -> None:
    made = bench(compared=1)
    assert homes(made.method) == {"c0": 1, "c1": 2, "c2": 3}
    assert measure(made, "c0", {**FAR, 1: 1.0}) == [1, 2]
    # The next model is tested at once; then the client knows all of them, and trains.
    assert measure(made, "c0", {**FAR, 1: 1.0}) == [1, 3]
    assert made.method.state.supported.tests == 2
    # Old tests are made again, the oldest first; as long as nothing changes, ever more seldom.
    assert [trainings_before_measuring(made, "c0", FAR) for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    assert trainings_before_measuring(made, "c0", {1: 1.0, 2: 1.0, 3: 1.0}) == 8
    assert trainings_before_measuring(made, "c0", FAR) == 1


def trainings_before_measuring(made: SupportBench, client: str, losses: dict[int, float]) -> int:
    trained = 0
    while made.method.request_for(client).kind == "train":
        train(made, client, 1.0)
        trained += 1
    own = made.method.clusters.main(client)
    measure(made, client, {**losses, own: 1.0})
    return trained


def test_support_from_one_side_lets_clients_train_another_model() -> None:
    made = bench()
    measure(made, "c2", {1: 1.25, 2: 9.0, 3: 1.0})
    assert made.method.state.supported.listed() == {3: (1,)}
    measure(made, "c0", {**FAR, 1: 1.0})
    made.method.state.waits["c0"] = 99
    tasks = []
    for _ in range(4):
        task = begin(made, "c0")
        tasks.append(task.cluster)
        train(made, "c0", 7.0, task)
    assert tasks == [1, 3, 1, 3]
    # Model 3 has 10 samples of each of two clients: an update counts at least a half.
    before = value(made, 3)
    train(made, "c0", before + 2.0, _task(made, "c0", 3))
    assert value(made, 3) == pytest.approx(before + 1.0)
    # c1 is no supporter: its update from model 3 has the weight 0.
    assert train(made, "c1", 99.0, _task(made, "c1", 3)).weight == 0.0
    # Support ends when a later test denies it.
    trainings_before_measuring(made, "c2", FAR)
    assert made.method.state.supported.listed() == {}


def _task(made: SupportBench, client: str, cluster: int) -> InFlight:
    from raceme.core.requests import Request

    return made.open_task(Request(client, models=(cluster,)))


def test_clusters_that_support_each_other_merge_at_once_and_one_model_is_kept() -> None:
    made = bench()
    stale = {k: _task(made, f"c{k - 1}", k) for k in (1, 2)}
    measure(made, "c0", {**FAR, 1: 1.0, 2: 1.25})
    assert len(made.method.models) == 3
    measure(made, "c1", {**FAR, 1: 1.25, 2: 1.0})
    assert homes(made.method) == {"c0": 4, "c1": 4, "c2": 3}
    kept = next(k for k in (1, 2) if made.method.clusters.continuations(k) == [4])
    assert value(made, 4) == kept
    # An update from the model that was kept counts; one from the other model does not.
    dropped = 3 - kept
    assert train(made, f"c{dropped - 1}", 50.0, stale[dropped]).weight == 0.0
    assert value(made, 4) == kept
    applied = train(made, f"c{kept - 1}", kept + 2.0, stale[kept])
    assert (applied.cluster, applied.staleness, applied.weight) == (4, 0, 0.5)
    assert value(made, 4) == kept + 1.0


def test_tests_that_both_had_passed_are_of_the_merged_cluster() -> None:
    made = bench()
    measure(made, "c2", {1: 1.0, 2: 1.0, 3: 1.0})
    assert made.method.state.supported.listed() == {3: (1, 2)}
    measure(made, "c0", {**FAR, 1: 1.0, 2: 1.0})
    measure(made, "c1", {**FAR, 1: 1.0, 2: 1.0})
    assert made.method.state.passed["c2"] == {4: True}
    assert made.method.state.supported.listed() == {3: (4,)}
    # c0 and c1 have tested 3 already, against a model of their present cluster.
    assert made.method.state.passed["c0"] == {3: False}


def test_a_test_that_one_of_two_had_passed_is_not_of_the_merged_cluster() -> None:
    made = bench()
    measure(made, "c2", {1: 1.0, 2: 9.0, 3: 1.0})
    measure(made, "c0", {**FAR, 1: 1.0, 2: 1.0})
    measure(made, "c1", {**FAR, 1: 1.0, 2: 1.0})
    assert homes(made.method) == {"c0": 4, "c1": 4, "c2": 3}
    # c2 has accepted model 1 and rejected model 2.
    assert made.method.state.passed["c2"] == {}
    assert made.method.state.supported.listed() == {}


@pytest.mark.parametrize(("examples", "share"), [((10, 30), 0.25), ((0, 0), 0.5)])
def test_an_update_counts_at_least_its_share_of_the_samples(
    examples: tuple[int, int], share: float
) -> None:
    made = bench(2, share=0.1)
    made.method.clusters.assign("c1", 1)
    names = {f"c{i}": Client(f"c{i}", count) for i, count in enumerate(examples)}
    made.method.progress.fleet.clients = names
    # 10 of 40 samples; without any, one of two clients.
    assert train(made, "c0", 3.0, _task(made, "c0", 1)).weight == share


def test_a_client_that_was_merged_while_it_measured_is_asked_again() -> None:
    made = bench()
    task = begin(made, "c0")
    made.method.clusters.assign("c0", 3)
    rows = np.array([np.ones(8)] * len(task.candidates), np.float32)
    made.answer(task, {LOSSES: rows})
    assert made.method.state.passed == {}


def test_too_few_samples_are_refused() -> None:
    made = bench()
    task = begin(made, "c0")
    with pytest.raises(InvalidReplyError, match="4 samples for validation"):
        made.answer(task, {LOSSES: np.ones((3, 4), np.float32)})
    # It trains once before it is queried again.
    made.end(task)
    train(made, "c0", 1.0)
    assert begin(made, "c0").kind == LOSSES


def test_three_groups_are_found() -> None:
    strategy = FAACLAsync()
    run_on(strategy, three_groups(), 600)
    assert found(strategy) == [4, 4, 4]
    assert len(strategy.models) == 3


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FAACLAsync)


def test_it_finds_the_groups_of_digits_sooner_than_in_rounds(tmp_path: Path) -> None:
    keys = {"dataset": "digits", "clients": 8, "groups": 2, "seed": 1, "workers": "0"}
    times = {}
    for strategy, limit in (("faacl", {"max-rounds": 10}), ("faacl-async", {"max-updates": 100})):
        out = str(tmp_path / strategy)
        config = RunConfig.from_mapping({**keys, **limit, "strategy": strategy, "out": out})
        summary = simulate(config).summary
        assert (summary["clusters"], summary["purity"]) == (2, 1.0)
        times[strategy] = summary["virtual_time"]
    assert times["faacl-async"] < times["faacl"]
