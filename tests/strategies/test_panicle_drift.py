"""Panicle's drift detector: sudden updates of one client, and of many."""

import pytest
from probing import fleet, probe

from raceme.strategies import Panicle


def test_an_update_is_sudden_beyond_twice_its_clients_usual_ones() -> None:
    strategy = fleet(1)
    assert not strategy._is_sudden("c0", 1.0), "a first update never is"
    assert not strategy._is_sudden("c0", 2.0)
    # 0.7 · 1 + 0.3 · 2
    assert strategy.state.watches["c0"].length == pytest.approx(1.3)
    assert strategy._is_sudden("c0", 2.61)
    assert not fleet(1, drift=False)._is_sudden("c0", 2.61)


@pytest.mark.parametrize(("north", "probes"), [(1.73, 3), (3**0.5, 3), (1.74, 1)])
def test_data_have_changed_below_a_likeness_of_a_half(north: float, probes: int) -> None:
    strategy = fleet(1)
    for _ in range(2):
        probe(strategy, "c0", 4.0, 0.0)
    strategy._watch("c0").is_called = True
    # The cosine of (1, √3) with (1, 0) is 1 / 2; below it the former probes are discarded.
    probe(strategy, "c0", 1.0, north)
    assert strategy.state.probes.count("c0") == probes


def startled(clients: int, *when: int) -> Panicle:
    """A fleet that was probed at update 10, and in which some clients then have sudden updates."""
    strategy = fleet(clients)
    for i in range(clients):
        strategy.state.probes.add(f"c{i}", strategy.state.initial)
        strategy._watch(f"c{i}").probed = 10
    for i, update in enumerate(when):
        strategy.progress.updates = update
        strategy._request_new_probes(f"c{i}")
    return strategy


def called(strategy: Panicle) -> int:
    return sum(watch.is_called for watch in strategy.state.watches.values())


def test_an_eighth_of_the_clients_speaks_for_all_others() -> None:
    assert called(startled(20, 100, 101)) == 2
    assert called(startled(20, 100, 101, 102)) == 20


def test_of_few_clients_two_speak_for_all() -> None:
    assert called(startled(4, 100)) == 1
    assert called(startled(4, 100, 101)) == 4


def test_clients_probed_since_are_not_called_again() -> None:
    strategy = startled(4, 100)
    strategy._watch("c3").probed = 100
    strategy.progress.updates = 101
    strategy._request_new_probes("c1")
    assert called(strategy) == 3


def test_all_are_called_once_for_each_event() -> None:
    strategy = startled(4, 100, 101)
    for watch in strategy.state.watches.values():
        watch.is_called = False
    for client in ("c0", "c2"):  # a repeated one, and a third client
        strategy._request_new_probes(client)
    assert called(strategy) == 2


def test_sudden_updates_that_are_long_past_do_not_count() -> None:
    assert called(startled(4, 100, 109)) == 2
    assert called(startled(4, 101, 109)) == 4


def test_where_many_updates_are_sudden_clusters_are_young_again() -> None:
    strategy = startled(4, 100)
    strategy._learned(0).updates = 100
    strategy._request_new_probes("c1")
    assert strategy._learned(0).updates == 0
