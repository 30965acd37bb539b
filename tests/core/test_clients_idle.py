"""Idle clients: back-off, and random draws among those that are ready."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.clients import Client, Idle

NOW = 10.0


def idle_of(ready_at: dict[int, float], clients: int) -> Idle:
    """Idle clients by number, with the time from which they are ready; others have work."""
    every = {f"c{n}": Client(f"c{n}", 1, ready_at=ready_at.get(n, 0.0)) for n in range(clients)}
    return Idle({f"c{number}": True for number in ready_at}, every)


@given(
    st.dictionaries(st.integers(0, 199), st.sampled_from([0.0, 5.0, 15.0]), min_size=1),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_idle_clients_are_drawn_until_all_places_are_taken(
    ready_at: dict[int, float], most: int, seed: int
) -> None:
    idle = idle_of(ready_at, 200)
    drawn = [client.client_id for client in idle.draw(NOW, most, np.random.default_rng(seed))]
    ready = {f"c{number}" for number, time in ready_at.items() if time <= NOW}
    assert len(drawn) == len(set(drawn)) == min(most, len(ready))
    assert set(drawn) <= ready


@pytest.mark.parametrize("busy", [0, 150], ids=["many idle", "few idle"])
def test_all_idle_clients_are_drawn_equally_often(busy: int) -> None:
    idle, rng = idle_of(dict.fromkeys(range(busy, 160), 0.0), 160), np.random.default_rng(0)
    times = 100 * (160 - busy)
    counts = Counter(client.client_id for _ in range(times) for client in idle.draw(NOW, 1, rng))
    # Each is drawn 100 times on average, with a standard deviation of 10.
    assert len(counts) == 160 - busy
    assert min(counts.values()) > 50
    assert max(counts.values()) < 150


def test_drawing_few_clients_of_many_does_not_inspect_all() -> None:
    class Watched(dict[str, bool]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            self.looks += 1
            return super().__iter__()

    every = {f"c{number}": Client(f"c{number}", 1) for number in range(1000)}
    names = Watched(dict.fromkeys(every, True))
    idle, before = Idle(names, every), names.looks
    assert len(idle.draw(NOW, 3, np.random.default_rng(0))) == 3
    assert idle.next_ready(NOW) == math.inf
    assert names.looks == before
    idle.draw(NOW, 600, np.random.default_rng(0))
    assert names.looks > before


def test_newcomers_are_drawn_and_clients_that_left_are_not() -> None:
    every = {f"c{number}": Client(f"c{number}", 1) for number in range(2)}
    idle = Idle(dict.fromkeys(every, True), every)
    every["late"] = Client("late", 1)
    idle.add("late")
    idle.remove("c0")
    rng = np.random.default_rng(0)
    assert {client.client_id for client in idle.draw(NOW, 3, rng)} == {"c1", "late"}


def test_a_client_that_backs_off_is_waited_for() -> None:
    idle = idle_of({0: 0.0, 1: 12.0, 2: 11.0}, 3)
    assert idle.next_ready(NOW) == 11.0
    assert idle.next_ready(11.0) == 12.0
    idle.remove("c1")
    assert idle.next_ready(11.0) == math.inf


def test_a_restored_state_draws_the_same_clients() -> None:
    every = {f"c{number}": Client(f"c{number}", 1) for number in range(30)}
    names = dict.fromkeys(every, True)
    idle = Idle(names, every)
    for number in (7, 3, 20, 3):
        idle.remove(f"c{number}")
        every[f"late{number}"] = Client(f"late{number}", 1)
        idle.add(f"late{number}")
        idle.add(f"c{number}")
    restored = Idle(dict(names), dict(every))
    for seed in range(20):
        assert idle.draw(NOW, 2, np.random.default_rng(seed)) == restored.draw(
            NOW, 2, np.random.default_rng(seed)
        )
