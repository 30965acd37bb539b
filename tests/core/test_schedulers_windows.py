"""Windows of time, traced by hand: working clients, waiting clients, joint updates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from policies import Bench, run, updates_of

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.requests import InvalidReplyError
from raceme.core.schedulers import InWindows
from raceme.core.scheduling import Scheduler
from raceme.simulation import Device
from raceme.strategies import FedAsync, Plan


def two_first(online: list[Client], rng: np.random.Generator) -> list[Client]:
    return list(online[:2])


def test_members_of_a_window_work_again_and_again_until_it_ends() -> None:
    bench = Bench(InWindows(10.0, two_first), 3)
    assert bench.work(1.0) == ["c0", "c1"]
    assert bench.policy.wake_at() == 11.0
    assert bench.answer("c0", 4.0) == ["c0"]
    assert bench.work(4.0) == ["c0"]
    assert bench.answer("c0", 8.0) == ["c0"]
    assert bench.work(8.0) == ["c0"]
    late = bench.tasks["c1"]
    # No client is back at 11 s: both tasks are cancelled, and a new window begins.
    assert bench.wake(11.0) == (["c0", "c1"], [])
    assert bench.policy.wake_at() == math.inf
    bench.fleet.clients["c0"].node_id = None
    bench.idle.remove("c0")
    assert bench.work(12.0) == ["c2", "c1"]
    assert bench.policy.wake_at() == 22.0
    with pytest.raises(InvalidReplyError, match="after its window was over"):
        bench.answer("c1", 13.0, late)


def test_a_window_begins_after_greetings_with_a_client_online() -> None:
    bench = Bench(InWindows(10.0, two_first), 1)
    assert bench.work(0.0, greeting=True) == []
    bench.leave("c0", 0.0)
    assert bench.work(0.0) == []
    assert bench.policy.wake_at() == math.inf
    bench.fleet.clients["c0"].node_id = 5
    bench.idle.add("c0")
    assert bench.work(3.0) == ["c0"]
    assert bench.policy.wake_at() == 13.0


def test_windows_are_counted_when_they_are_over() -> None:
    bench = Bench(InWindows(10.0, two_first), 2)
    assert bench.policy.rounds == 0
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.policy.rounds == 0
    bench.wake(10.0)
    assert bench.policy.rounds == 1


class Waits:
    """Records each client's waiting time per window."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def __call__(self, client: str, window: int, seconds: float) -> None:
        self.seen.append((client, window, seconds))


def everybody(online: list[Client], rng: np.random.Generator) -> list[Client]:
    return list(online)


def test_updates_that_are_made_together_wait_for_the_last() -> None:
    waits = Waits()
    policy = InWindows(10.0, everybody, lambda client: 0, together=True, idled=waits)
    bench = Bench(policy, 3)
    assert bench.work(0.0) == ["c0", "c1", "c2"]
    assert bench.answer("c0", 2.0) == []
    assert bench.work(2.0) == []
    assert bench.answer("c1", 3.0) == []
    assert bench.answer("c2", 4.0) == ["c0", "c1", "c2"]
    # c0 has waited 2 s, c1 1 s; all start again together.
    assert bench.work(4.0) == ["c0", "c1", "c2"]
    assert bench.answer("c1", 6.0) == []
    late = bench.tasks["c2"]
    # The window ends before c0 and c2 are back: only
    # c1's update counts, after another 4 s of waiting.
    assert bench.wake(10.0) == (["c0", "c2"], ["c1"])
    assert waits.seen == [("c0", 1, 2.0), ("c1", 1, 5.0), ("c2", 1, 0.0)]
    assert sorted(bench.work(10.0)) == ["c0", "c1", "c2"]
    with pytest.raises(InvalidReplyError, match="after its window was over"):
        bench.answer("c2", 11.0, late)


def test_a_group_that_is_to_gather_waits_until_all_are_free_and_then_updates_once_together() -> (
    None
):
    waits = Waits()
    groups = {"c0": 0, "c1": 0, "c2": 0, "c3": 1}
    policy = InWindows(20.0, everybody, groups.get, idled=waits)
    bench = Bench(policy, 4)
    bench.work(0.0)
    assert bench.answer("c0", 1.0) == ["c0"]
    assert bench.work(1.0) == ["c0"]
    assert bench.answer("c0", 2.0) == ["c0"]
    policy.gather(0)
    # c0 waits for c1 and c2; c3 is in another group and continues.
    assert bench.work(2.0) == []
    assert bench.answer("c3", 2.5) == ["c3"]
    assert bench.work(2.5) == ["c3"]
    assert bench.answer("c1", 3.0) == ["c1"]
    assert bench.work(3.0) == []
    assert bench.answer("c2", 5.0) == ["c2"]
    assert bench.work(5.0) == ["c0", "c1", "c2"]
    assert bench.answer("c0", 6.0) == []
    assert bench.work(6.0) == []
    assert bench.answer("c1", 7.0) == []
    together = [bench.tasks[c].number for c in ("c0", "c1", "c2")]
    assert bench.answer("c2", 9.0) == ["c0", "c1", "c2"]
    assert sorted(policy.state.joint) == together
    # Afterwards clients continue independently.
    assert bench.work(9.0) == ["c0", "c1", "c2"]
    assert bench.answer("c1", 10.0) == ["c1"]
    bench.wake(20.0)
    # c0 works 2–5 and 6–9 s, c1 3–5 and 7–9 s; from 10 s on c1 is idle, and does not wait.
    assert waits.seen == [("c0", 1, 6.0), ("c1", 1, 4.0), ("c2", 1, 0.0), ("c3", 1, 0.0)]


def test_a_synchronous_update_does_not_wait_for_lost_clients() -> None:
    policy = InWindows(20.0, everybody, lambda client: 0, together=True)
    bench = Bench(policy, 3)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.leave("c1", 2.0) == []
    assert bench.policy.lost(bench.tasks["c2"], 3.0)[0].task.client == "c0"
    # A client that has left does not delay the others of a gathering group.
    bench.idle.add("c2")
    policy = InWindows(20.0, everybody, lambda client: 0)
    bench = Bench(policy, 2)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    policy.gather(0)
    assert bench.work(1.0) == []
    bench.leave("c1", 2.0)
    assert bench.work(2.0) == ["c0"]


def test_a_window_too_short_for_any_update_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = InWindows(2.0, everybody)
    bench = Bench(policy, 2)
    for window in range(3):
        assert policy.no_progress_reason() == ""
        bench.work(2.0 * window)
        bench.wake(2.0 * window + 2.0)
    assert "no update fits into the budget of 2 s" in policy.no_progress_reason()
    # The first window warns at once, as a run may have no third one.
    assert [record.args for record in caplog.records] == [(1, 2.0)]
    # A single update resets the count of empty windows.
    bench.work(6.0)
    bench.answer("c0", 7.0)
    bench.wake(8.0)
    assert policy.no_progress_reason() == ""


def test_a_window_can_be_saved_and_continued() -> None:
    policy = InWindows(20.0, everybody, lambda client: 0, together=True)
    bench = Bench(policy, 2)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    other = InWindows(20.0, everybody, lambda client: 0, together=True)
    other.load_state_dict(policy.state_dict())
    bench.policy = other
    assert bench.answer("c1", 2.0) == ["c0", "c1"]


class Windowed(FedAsync):
    """FedAsync in windows of 10 s, with the first two clients."""

    def scheduler(self) -> Scheduler:
        return InWindows(10.0, two_first)


def test_windows_on_virtual_time() -> None:
    # c0 needs 4 s, c1 12 s: in a window of 10 s c0 answers twice, c1 never. A device whose task is
    # cancelled stays busy with it until 12 s.
    grid, seen = grid_of(pulled_app(), [Device(4.0), Device(12.0), Device()]), []
    Windowed().run(grid, MODEL, 4, plan=Plan(eval_every=1000), observe=seen.append)
    assert updates_of(seen) == [
        (0.0, "c0", 4.0),
        (4.0, "c0", 8.0),
        (10.0, "c0", 16.0),
        (16.0, "c0", 20.0),
    ]
    rejected = [(e.time, e.client) for e in seen if isinstance(e, events.UpdateRejected)]
    assert sorted(rejected) == [(10.0, "c0"), (10.0, "c1")]
    # Replies to cancelled tasks are not kept.
    assert grid.state_dict()["arrived"] == []


def test_replies_at_the_very_end_of_a_window_count() -> None:
    # Both clients answer at 5 s and at 10 s, the end of the window.
    seen = run(Windowed(), [Device(5.0), Device(5.0)], updates=0, max_rounds=1)
    assert updates_of(seen) == [
        (start, client, start + 5.0) for start in (0.0, 5.0) for client in ("c0", "c1")
    ]
    # No task is sent in a window that is over.
    assert not [event for event in seen if isinstance(event, events.UpdateRejected)]


def test_a_number_of_windows_ends_a_run() -> None:
    seen = run(Windowed(), [Device(4.0), Device(12.0), Device()], updates=0, max_rounds=2)
    # c0 answers twice in each.
    assert seen[-1] == events.RunEnded(20.0, 4, "2 rounds are over")


def test_an_evaluation_at_the_end_of_every_second_window() -> None:
    devices = [Device(4.0), Device(12.0), Device()]
    seen = run(Windowed(), devices, updates=0, max_rounds=5, eval_rounds=2)
    tested = [(e.time, e.updates) for e in seen if isinstance(e, events.Evaluated)]
    # Two updates in each window, and the last evaluation at the end of the run.
    assert tested == [(0.0, 0), (20.0, 4), (40.0, 8), (50.0, 10)]


def test_windows_without_updates_are_not_tested() -> None:
    seen = run(Windowed(), [Device(12.0)], updates=0, max_rounds=2, eval_rounds=1)
    assert [e.time for e in seen if isinstance(e, events.Evaluated)] == [0.0]
