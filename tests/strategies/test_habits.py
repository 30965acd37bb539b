"""What is a suddenly long update, and when the changes of some speak for all."""

import pytest
from probing import fleet

from raceme.strategies import Panicle


def test_an_update_is_sudden_beyond_twice_its_clients_usual_ones() -> None:
    strategy = fleet(1)
    assert not strategy._is_sudden("c0", 100.0), "a first update never is"
    strategy.state.watches["c0"].length = 1.0
    assert not strategy._is_sudden("c0", 2.0)
    # 0.7 · 1 + 0.3 · 2
    assert strategy.state.watches["c0"].length == pytest.approx(1.3)
    assert strategy._is_sudden("c0", 2.61)
    assert not fleet(1, drift=False)._is_sudden("c0", 2.61)


def changed(clients: int, now: int, *when: int, **options: object) -> Panicle:
    """A fleet all of whom were probed at update 10, and then those that have changed."""
    strategy = fleet(clients, **options)
    for i in range(clients):
        client = f"c{i}"
        strategy.state.probes.add(client, strategy.state.initial)
        watch = strategy._watch(client)
        watch.probed = watch.changed = when[i] if i < len(when) else -1
        watch.probed = max(watch.probed, 10)
    strategy.progress.updates = now
    strategy._call_others()
    return strategy


def called(strategy: Panicle) -> int:
    return sum(watch.is_called for watch in strategy.state.watches.values())


def test_an_eighth_of_the_clients_speaks_for_all_others() -> None:
    assert called(changed(20, 101, 100, 101)) == 0
    # Those that changed were probed since.
    assert called(changed(20, 102, 100, 101, 102)) == 17


def test_of_few_clients_two_speak_for_all() -> None:
    assert called(changed(4, 100, 100)) == 0
    assert called(changed(4, 101, 100, 101)) == 2
    assert called(changed(4, 101, 100, 101, drift=False)) == 0


def test_all_are_called_once_for_each_event() -> None:
    assert called(changed(4, 102, 100, 101, 102)) == 0


def test_changes_that_are_long_past_do_not_count() -> None:
    assert called(changed(4, 109, 100, 109)) == 0
    assert called(changed(4, 109, 101, 109)) == 2


def test_where_many_change_clusters_are_young_again() -> None:
    strategy = fleet(4)
    strategy._learned(0).updates = 100
    for i in range(2):
        strategy.state.probes.add(f"c{i}", strategy.state.initial)
        strategy._watch(f"c{i}").changed = 100 + i
    strategy.progress.updates = 101
    strategy._call_others()
    assert strategy._learned(0).updates == 0
