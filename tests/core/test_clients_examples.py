"""Bounds on the numbers of examples that clients report."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import grid_of, pulled_app
from flwr.app import Message
from runs import ONES, devices, run

from raceme.core.clients import MOST_EXAMPLES, Client, Fleet, largest_plausible_size
from raceme.strategies import FedAvg


def test_the_bound_is_ten_times_the_median_if_all_sizes_are_alike() -> None:
    assert largest_plausible_size([100] * 20) == 1000
    assert largest_plausible_size([100] * 19 + [10**18]) == 1000
    assert largest_plausible_size([100] * 16 + [10**18] * 4) == 1000


def test_the_bound_is_larger_if_sizes_are_spread() -> None:
    # Quartiles 50 and 150, median 100: (100/50)**5 times as much.
    assert largest_plausible_size([40, 50, 100, 150]) == 32_000
    assert largest_plausible_size([90, 100, 100, 200, 200]) == 32_000
    assert largest_plausible_size([90, 100, 100, 10**15]) == 1000


def test_the_bound_never_exceeds_the_largest_possible_count() -> None:
    assert largest_plausible_size([1, 2**30, 2**52, 2**52]) == MOST_EXAMPLES


def test_honest_sizes_as_skewed_as_they_come_are_believed() -> None:
    for seed in range(20):
        sizes = np.random.default_rng(seed).lognormal(4.0, 2.0, 100) + 50
        ordered = sorted(sizes.astype(int).tolist())
        assert ordered[-1] <= largest_plausible_size(ordered)


def test_an_implausible_size_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    for index in range(5):
        fleet.clients[f"c{index}"] = Client(f"c{index}", 10**15 if index == 0 else 10)
        fleet.record_examples(f"c{index}", 10**15 if index == 0 else 10)
    assert [
        fleet.plausible_examples("c0"),
        fleet.plausible_examples("c0"),
        fleet.plausible_examples("c1"),
    ] == [100, 100, 10]
    assert fleet.plausible_examples("c1", 10**9) == 100
    assert [record.args[0] for record in caplog.records] == ["c0", "c1"]


def test_the_last_stated_size_counts() -> None:
    fleet = Fleet()
    for name in "abcde":
        fleet.record_examples(name, 10)
    for name in "abcde":
        fleet.record_examples(name, 10**6)
    assert fleet.largest_plausible() == 10**7
    assert Fleet(sizes=dict(fleet.sizes)).largest_plausible() == 10**7


def test_data_that_grow_count_as_their_last_update_says() -> None:
    fleet = Fleet(clients={name: Client(name, 10) for name in "abc"})
    assert [fleet.plausible_examples(name) for name in "abc"] == [10, 10, 10]
    for examples in (20, 40):
        fleet.record_examples("a", examples)
        fleet.record_examples("b", 10)
    assert [fleet.plausible_examples(name) for name in "abc"] == [40, 10, 10]


def greedy(reply: Message, index: int) -> Message:
    if index == 0:
        reply.content["metrics"]["num-examples"] = 10**15
    return reply


def test_one_client_with_an_implausible_size_does_not_dominate_an_average() -> None:
    targets = [100 * ONES] + [ONES] * 9
    method = FedAvg()
    grid = grid_of(pulled_app(targets, step=1.0, change=greedy), devices(*[1.0] * 10))
    run(method, grid, num_rounds=10)
    # Its weight is limited to ten times the median of the others' 10 … 19 examples.
    (first,) = {float(value) for value in method.spec.unpack(method.result.arrays)}
    limit = largest_plausible_size([*range(11, 20), 10**15])
    share = limit / (limit + sum(range(11, 20)))
    assert first == pytest.approx(100 * share + (1 - share), rel=1e-3)
    assert share < 0.8


def test_honest_clients_count_as_they_say() -> None:
    method = FedAvg()
    grid = grid_of(pulled_app([ONES * k for k in range(4)], step=1.0), devices(*[1.0] * 4))
    run(method, grid, num_rounds=4)
    found = method.spec.unpack(method.result.arrays)
    wanted = sum(k * (10 + k) for k in range(4)) / sum(10 + k for k in range(4))
    assert found == pytest.approx(wanted, rel=1e-6)
