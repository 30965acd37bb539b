"""Fast clients wait until others catch up: runs traced by hand, and a bound for any run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from hypothesis import given
from hypothesis import strategies as st
from runs import devices, half, of

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.clusters import Clusters, Model
from raceme.core.config import RunConfig
from raceme.core.progress import Plan
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.features.fair import Options
from raceme.features.fair.server import INFLUENCE, Account, Fair, upper_median
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import Method


def fair(method: Method, **keys: Any) -> Method:
    method.features = Chain.of(RunConfig.from_mapping({"fair": "clients", **keys}))
    return method


def ran(method: Method, fleet: list[Device], updates: int, **plan: Any) -> list[events.Event]:
    seen: list[events.Event] = []
    given = Plan(eval_every=1000, **plan)
    grid = grid_of(pulled_app(), fleet)
    method.run(grid, MODEL, updates, timeout=60.0, plan=given, observe=seen.append)
    return seen


def arrivals(seen: list[events.Event]) -> list[tuple[float, str]]:
    return [(one.time, one.client) for one in of(events.UpdateApplied, seen)]


# Worked out by hand.


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([(3.0, 1.0)], 3.0),
        # One of two clients is no minority, and may raise the median; one of three is.
        ([(1.0, 1.0), (9.0, 1.0)], 9.0),
        ([(9.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 2.0),
        ([(9.0, 1.0), (1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], 3.0),
        # By weight, 2 of 5 are at level 1, and 3 of 5, more than half, at level 2 or below.
        ([(9.0, 2.0), (1.0, 2.0), (2.0, 1.0)], 2.0),
    ],
)
def test_the_upper_median(levels: list[tuple[float, float]], expected: float) -> None:
    assert upper_median(Account(level, share=share) for level, share in levels) == expected


def test_a_fast_client_is_two_updates_ahead_and_waits() -> None:
    seen = ran(fair(half()), devices(1.0, 3.0, 3.0), 10)
    # All weights are 1/2, so that levels count updates. V is the upper median of three levels.
    # t    c0  c1  c2  V   c0 may work if its level is V + 1 at most
    # 1    1   0   0   0   yes
    # 2    2   0   0   0   no
    # 3    2   1   1   1   yes
    # 4    3   1   1   1   no
    # 6    3   2   2   2   yes, and so on
    assert arrivals(seen) == [
        *[(1.0, "c0"), (2.0, "c0"), (3.0, "c1"), (3.0, "c2")],
        *[(4.0, "c0"), (6.0, "c1"), (6.0, "c2")],
        *[(7.0, "c0"), (9.0, "c1"), (9.0, "c2")],
    ]
    shares = [one.values["share"] for one in of(events.Measured, seen)]
    assert [one.schema for one in of(events.Measured, seen)] == 3 * [INFLUENCE]
    # After each three updates: 2 of 3, 3 of 6, and 4 of 9.
    assert shares == pytest.approx([2 / 3, 3 / 6, 4 / 9])


def test_shares_by_examples() -> None:
    # Clients report 10, 11, … examples: here 10, 20 and 20.
    fleet = Fleet({"a": 10, "b": 20, "c": 20}, "examples")
    for client in "abc":
        fleet.asks(client)
    fleet.answers("a", 0.5)
    # In units of the median weight 1/2 and the median of 20 examples, a's update counts twice.
    assert fleet.level("a") == 2.0
    assert fleet.feature.holds("a", fleet.seen)
    fleet.answers("b", 0.5)
    assert fleet.level("b") == 1.0
    # By examples 20 of 50 are at 0, and 40, more than half, at 1 at most.
    assert fleet.median() == 1.0
    assert not fleet.feature.holds("a", fleet.seen)


def test_a_fresh_update_costs_what_the_method_gives_for_it() -> None:
    fleet = Fleet(dict.fromkeys("abcde", 1))
    for client in "abcde":
        fleet.asks(client)
        fleet.feature.state.accounts[client].weight = 0.1
    fleet.answers("a", 0.4)
    # Level in units of the median weight: 0.4 with the weights 0.4, 0.1, 0.1, 0.1 and 0.1.
    assert fleet.level("a") == pytest.approx(4.0)
    fleet.asks("b")
    fleet.answers("b", 0.0)
    assert fleet.level("b") == 0.0


def test_a_slow_client_saves_up_one_update() -> None:
    fleet = Fleet(dict.fromkeys("abc", 1))
    fleet.feature.state.accounts = {
        "a": Account(10.0, 1.0, works=True),
        "b": Account(10.0, 1.0, works=True),
        "c": Account(2.0, 1.0, works=True),
    }
    fleet.answers("c", 1.0)
    assert fleet.level("c") == 10.0


def test_a_new_identity_is_no_better_off_than_the_one_furthest_ahead() -> None:
    fleet = Fleet(dict.fromkeys("abcde", 1))
    for client in "abce":
        fleet.asks(client)
    for client in "aa":
        fleet.answers(client, 0.5)
    assert fleet.feature.holds("a", fleet.seen)
    fleet.asks("d")
    assert fleet.level("d") == fleet.level("a") == 2.0
    fleet.answers("d", 0.5)
    assert fleet.feature.holds("d", fleet.seen)


def test_clients_with_a_cluster_to_themselves_are_bounded_by_the_run() -> None:
    fleet = Fleet(dict.fromkeys("abcde", 1))
    fleet.seen.clusters.models[1] = Model(MODEL_OF_ONE.copy())
    for client in "ab":
        fleet.seen.clusters.assign(client, 1)
    for client in "abcde":
        fleet.asks(client)
    for client in "abab":
        fleet.answers(client, 0.5)
    # 2, 2, 0, 0 and 0: the median of the cluster is 2, and that of all clients 0.
    assert fleet.feature.holds("a", fleet.seen)
    for client in "cde":
        fleet.answers(client, 0.5)
    assert not fleet.feature.holds("a", fleet.seen)


def test_a_fast_client_is_bounded_by_a_slow_cluster() -> None:
    fleet = Fleet(dict.fromkeys("abcdefg", 1))
    fleet.seen.clusters.models[1] = Model(MODEL_OF_ONE.copy())
    for client in "abc":
        fleet.seen.clusters.assign(client, 1)
    for client in "abcdefg":
        fleet.asks(client)
    for client in "defgdefgaa":
        fleet.answers(client, 0.5)
    # 2, 0 and 0 in the cluster of a; of all clients 0, 0 and five times 2.
    assert fleet.feature.holds("a", fleet.seen)
    assert not fleet.feature.holds("d", fleet.seen)


# Clients are not held without need, and never forever.


@pytest.mark.parametrize("seconds", [[1.0], [1.0] * 6, [1.0, 3.0]], ids=str)
def test_one_client_and_equal_ones_work_as_without(seconds: list[float]) -> None:
    seen, without = (ran(one, devices(*seconds), 60) for one in (fair(half()), half()))
    assert arrivals(seen) == arrivals(without)
    assert of(events.UpdateApplied, seen) == of(events.UpdateApplied, without)


@pytest.mark.parametrize(
    ("keys", "holds"),
    [
        ({}, False),
        ({"fair": "none", "protection": "trust"}, False),
        ({"protection": "trust"}, True),
        ({"fair": "examples"}, True),
        # In rounds all clients make one update anyway.
        ({"fair": "clients", "strategy": "fedavg"}, False),
    ],
)
def test_it_is_on_with_trust_or_on_request(keys: dict[str, Any], holds: bool) -> None:
    assert (Chain.of(RunConfig.from_mapping(keys)).holds is not None) == holds


def test_clients_that_never_answer_are_not_waited_for_again() -> None:
    fleet = [Device(1.0), Device(2.0), *(Device(drop=1.0) for _ in range(3))]
    seen = ran(fair(half()), fleet, 40)
    times = [time for time, client in arrivals(seen) if client == "c0"]
    # The slowest answer took 2 s: others are waited for until 40 s, 20 times as long. The fleet is
    # checked every 5 s.
    assert times[:3] == [1.0, 2.0, 46.0]
    assert len(arrivals(seen)) == 40


def test_held_clients_work_if_no_other_does() -> None:
    # The slow clients leave at 5 s, before their first update.
    leaving = [Device(10.0, online=((0.0, 5.0),)) for _ in range(3)]
    seen = ran(fair(half()), [Device(1.0), *leaving], 12)
    # The fast client is held from 2 s on, until the check of the fleet at 5 s.
    assert [time for time, _ in arrivals(seen)] == [1.0, 2.0, *map(float, range(6, 16))]


# Invariants of any run.


MODEL_OF_ONE = np.zeros(1, np.float32)


@dataclass
class Seen:
    """A run of clients in one cluster, with the interface that the feature uses."""

    examples_of: dict[str, int]
    clusters: Clusters = field(
        default_factory=lambda: Clusters({0: Model(np.zeros(1, np.float32))})
    )
    updates: int = 0
    measured: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for client in self.examples_of:
            self.clusters.join(client)

    @property
    def online(self) -> int:
        return len(self.examples_of)

    def now(self) -> float:
        return 0.0

    def examples(self, client: str) -> int:
        return self.examples_of[client]

    def measure(self, schema: events.MeasureSchema, **values: Any) -> None:
        self.measured.append(values)


class Fleet:
    """Clients that a test lets request work and answer."""

    def __init__(self, examples: dict[str, int], by: str = "clients") -> None:
        self.feature = Fair(Options(by), RunConfig())
        self.seen: Any = Seen(examples)
        self.number = 0

    def asks(self, client: str) -> None:
        self.feature.on_request(Request(client), self.seen)

    def answers(self, client: str, weight: float) -> None:
        self.number += 1
        task = InFlight(self.number, client, 0, 0, 0, 0.0, 0)
        update = Update(task, np.zeros(1, np.float32), self.seen.examples(client), 0.0)
        self.feature.on_update(update, self.seen)
        self.seen.updates += 1
        self.feature.on_closed(task, self.seen)
        self.feature.on_applied([update], [Outcome(0, 0, weight)], self.seen)

    def level(self, client: str) -> float:
        return self.feature.state.accounts[client].level

    def median(self) -> float:
        return upper_median(self.feature.state.accounts.values())


@given(st.integers(1, 9), st.lists(st.integers(0, 99), min_size=1, max_size=80))
def test_no_window_has_more_of_a_client_than_its_share(clients: int, order: Sequence[int]) -> None:
    names = [f"c{number}" for number in range(clients)]
    fleet = Fleet(dict.fromkeys(names, 1))
    for name in names:
        fleet.asks(name)
    history = [(fleet.median(), dict.fromkeys(names, 0))]
    for drawn in order:
        working = [name for name in names if fleet.feature.state.accounts[name].works]
        client = working[drawn % len(working)]
        fleet.answers(client, 0.3)
        counts = {**history[-1][1]}
        counts[client] += 1
        history.append((fleet.median(), counts))
        for name in names:
            account = fleet.feature.state.accounts[name]
            if not account.works and not fleet.feature.holds(name, fleet.seen):
                fleet.asks(name)
    for start, (before, first) in enumerate(history):
        for after, last in history[start:]:
            most = max(last[name] - first[name] for name in names)
            # The updates of the median client, one ahead, one saved up, and one in flight.
            assert most <= after - before + 3
    # At least half of all clients are at V or above,
    # so that no client has more than twice its share.
    middle, counts = history[-1]
    assert 2 * sum(fleet.level(name) >= middle for name in names) >= clients
    assert max(counts.values()) <= middle + 2


def test_a_resumed_run_is_the_one_that_was_never_interrupted() -> None:
    def fleet() -> VirtualGrid:
        rng = np.random.default_rng(3)
        targets = [rng.normal(size=8) for _ in range(6)]
        many = [Device(seconds, jitter=0.3, drop=0.05) for seconds in (0.2, 0.3, 1, 2, 3, 4)]
        return grid_of(pulled_app(targets), many)

    def start(method: Method, grid: VirtualGrid, updates: int) -> dict[str, Any]:
        method.run(grid, MODEL, updates, timeout=60.0, plan=Plan(eval_every=1000))
        return copy.deepcopy({"method": method.state_dict(), "grid": grid.state_dict()})

    whole = start(fair(half()), fleet(), 60)
    kept = start(fair(half()), fleet(), 27)
    method, grid = fair(half()), fleet()
    method.load_state_dict(kept["method"])
    grid.load_state_dict(kept["grid"])
    resumed = start(method, grid, 60)
    assert resumed["method"]["features"] == whole["method"]["features"]
    models = [one["method"]["clusters"]["models"]["0"]["vector"] for one in (resumed, whole)]
    np.testing.assert_array_equal(*models)
    waiting = [one["waits"] for one in kept["method"]["features"]["fair"]["accounts"].values()]
    assert any(waiting)
