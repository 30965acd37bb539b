"""The event queue: what comes when, and that what is cancelled never does."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.simulation.virtual_grid import EventQueue


def drain(queue: EventQueue) -> list[tuple[float, str | int]]:
    """Pop all events; return their keys with the time on the clock."""
    seen = []
    while queue:
        _, key = queue.pop()
        seen.append((queue.now, key))
    return seen


def test_events_come_by_time_then_priority_then_order_of_scheduling() -> None:
    queue = EventQueue()
    for time, priority, key in [(2, 1, "d"), (2, 0, "c"), (1, 1, "a"), (2, 1, "e"), (1, 1, "b")]:
        queue.schedule(time, priority, key)
    assert drain(queue) == [(1, "a"), (1, "b"), (2, "c"), (2, "d"), (2, "e")]


def test_a_cancelled_event_does_not_happen_and_does_not_move_the_clock() -> None:
    queue = EventQueue()
    first, last = queue.schedule(1.0, 0, "a"), queue.schedule(9.0, 0, "c")
    queue.schedule(2.0, 0, "b")
    queue.cancel(first)
    queue.cancel(last)
    assert len(queue) == 1
    assert queue.next_time() == 2.0
    assert drain(queue) == [(2.0, "b")]
    assert queue.now == 2.0


def test_the_clock_never_runs_backwards() -> None:
    queue = EventQueue()
    queue.schedule(1.0, 0, "late")
    queue.advance(5.0)
    queue.advance(3.0)
    assert queue.now == 5.0
    assert drain(queue) == [(5.0, "late")]


def test_an_empty_queue_has_no_next_event() -> None:
    queue = EventQueue()
    queue.cancel(queue.schedule(1.0, 0, "a"))
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()


@given(
    events=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5, 7.0]), st.integers(0, 1))),
    cancelled=st.sets(st.integers(0, 20)),
    popped=st.integers(0, 5),
)
def test_a_saved_queue_continues_as_if_it_had_not_been_saved(
    events: list[tuple[float, int]], cancelled: set[int], popped: int
) -> None:
    queue, restored = EventQueue(), EventQueue()
    numbers = [queue.schedule(time, priority, i) for i, (time, priority) in enumerate(events)]
    for number in cancelled & set(numbers):
        queue.cancel(number)
    for _ in range(min(popped, len(queue))):
        queue.pop()
    restored.load_state_dict(copy.deepcopy(queue.state_dict()))
    for one in (queue, restored):
        one.schedule(2.5, 0, "new")
    assert restored.now == queue.now
    assert drain(restored) == drain(queue)
