"""Panicle without some answers, clients or samples, and with models that cannot learn."""

import math
from pathlib import Path

import numpy as np
import pytest
from clustered import CENTRES, GROUPS, found, homes, last_accuracy, run_on, step
from fleets import grid_of, pulled_app, write
from flwr.app import Message
from probing import EAST, NORTH, WEST, fleet, partition_of, probe, two_groups

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.requests import InFlight
from raceme.runs.experiment import simulate
from raceme.simulation import Device
from raceme.strategies import Panicle


def test_a_fleet_of_one() -> None:
    strategy = Panicle()
    seen = run_on(strategy, grid_of(pulled_app([CENTRES[0]]), [Device(1.0)]), 20)
    assert len(strategy.models) == 1
    assert last_accuracy(seen) > 0.9


def test_a_model_that_cannot_learn_leaves_one_cluster() -> None:
    strategy = Panicle()
    devices = [Device(1.0) for _ in range(5)]
    run_on(strategy, grid_of(pulled_app(None), devices), 60)
    assert len(strategy.models) == 1
    assert strategy.progress.updates == 60
    # After six probes each without a result, no more are sent.
    assert {strategy.state.probes.count(f"c{i}") for i in range(5)} == {6}


def with_failures(clients: int, failures: float, updates: int) -> tuple[Panicle, list[str]]:
    """Run with a last client whose first answers are invalid; return the phases of its updates."""
    spoilt = []

    def change(reply: Message, index: int) -> Message:
        if index == clients - 1 and len(spoilt) < failures:
            spoilt.append(index)
            reply.content["arrays"] = write(np.full(8, math.nan, np.float32))
        return reply

    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS[:clients]]
    strategy = Panicle()
    devices = [Device(1.0) for _ in range(clients)]
    grid = grid_of(pulled_app(targets, change=change), devices, GROUPS[:clients])
    seen = run_on(strategy, grid, updates)
    assert sum(isinstance(event, events.UpdateRejected) for event in seen) >= min(3, failures)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    return strategy, [event.phase for event in applied if event.client == f"c{clients - 1}"]


@pytest.mark.parametrize("clients", [6, 12])
def test_a_client_whose_first_probes_fail_is_asked_again_once_it_has_trained(clients: int) -> None:
    strategy, phases = with_failures(clients, 3, 150)
    assert phases[:4] == ["train", "probe", "probe", "train"]
    assert found(strategy) == [clients // 3] * 3


@pytest.mark.parametrize(("asked", "left"), [(1, 1), (2, 2), (3, 2)])
def test_a_client_that_answers_again_is_probed_once_more(asked: int, left: int) -> None:
    strategy = fleet(2)
    for client in ("c0", "c1"):
        strategy._watch(client).asked = asked
    probes = strategy.state.probes
    for _ in range(2):
        probes.add("c1", np.array([1, 0], np.float32))
    for client in ("c0", "c1"):
        strategy._probe_again(client)
    # After three probes without an answer a client trains; c1 needs no probe anyway.
    assert [strategy._watch(client).asked for client in ("c0", "c1")] == [left, asked]


def test_a_small_fleet_does_not_wait_for_a_client_that_answers_no_probe() -> None:
    strategy, phases = with_failures(6, math.inf, 24)
    assert phases == []
    assert partition_of(strategy)[:3] == [["c0", "c3"], ["c1", "c4"], ["c2"]]


def test_a_small_fleet_does_not_wait_for_ever_for_a_client_that_is_silent() -> None:
    kinds = dict(zip(("c0", "c1", "c2"), (EAST, NORTH, WEST), strict=True))
    strategy = fleet(4)
    strategy.on_sent(InFlight(0, "c3", 0, 0, 0, 0.0, 0, phase="probe"))
    for _ in range(2):
        for client, direction in kinds.items():
            probe(strategy, client, *direction)
    for number in range(15):
        assert len(strategy.models) == 1
        step(strategy, f"c{number % 3}", *kinds[f"c{number % 3}"])
    # After five updates per client, clusters form without the clients that have not answered.
    assert partition_of(strategy) == [["c0"], ["c1"], ["c2"], ["c3"]]


def test_clusters_form_when_the_last_unsettled_client_has_left() -> None:
    strategy = fleet(4)
    for client, direction in {"c0": EAST, "c1": NORTH, "c2": WEST}.items():
        probe(strategy, client, *direction)
        probe(strategy, client, *direction)
    strategy.on_leave("c3")
    assert len(strategy.models) == 1
    step(strategy, "c0", *EAST)
    assert len(strategy.models) == 3


def test_clients_with_fewer_samples_than_a_mini_batch(tmp_path: Path) -> None:
    config = RunConfig.from_mapping(
        {"strategy": "panicle", "clients": 6, "batch-size": 512, "max-updates": 40, "lr": 0.2}
        | {"workers": "0", "out": str(tmp_path), "eval-every": 40}
    )
    summary = simulate(config).summary
    assert summary["updates"] == 40


def test_unplaced_clients_join_the_only_cluster_left() -> None:
    strategy = fleet(9)
    kinds = {f"c{i}": EAST if i < 4 else NORTH for i in range(8)}
    for _ in range(2):
        for client, direction in kinds.items():
            probe(strategy, client, *direction)
    assert homes(strategy)["c8"] is None
    for client in kinds:
        strategy._watch(client).is_called = True
        probe(strategy, client, *EAST)
    for client in ("c4", "c5", "c6", "c7"):
        probe(strategy, client, *EAST)
    assert len(strategy.models) == 1
    assert step(strategy, "c8", *EAST).weight > 0.0
    assert homes(strategy)["c8"] == homes(strategy)["c0"]


def test_a_newcomer_that_does_not_agree_with_itself_stays_where_its_first_probe_put_it() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    for direction in (EAST, NORTH) * 3:
        assert strategy.request_for("c6").phase == "probe"
        probe(strategy, "c6", *direction)
    assert not strategy.state.probes.is_clear("c6")
    # Six probes are the maximum.
    assert strategy.request_for("c6").phase == ""
    assert homes(strategy)["c6"] == homes(strategy)["c0"]
    assert step(strategy, "c6", *WEST).weight > 0.0
