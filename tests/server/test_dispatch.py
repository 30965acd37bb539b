"""Dispatch policies, traced by hand: who works, what is given up, what is acted on together."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app

from raceme.protocol import events
from raceme.server.dispatch import (
    Dispatch,
    EveryIdle,
    InRounds,
    Moment,
    OnRequest,
)
from raceme.server.fleet import Client, Fleet
from raceme.server.idle import Idle
from raceme.server.method import Applied, Method
from raceme.server.replies import InvalidReplyError, Update
from raceme.server.windows import InWindows
from raceme.server.work import Task
from raceme.simulation import Device
from raceme.strategies import FedAsync, Plan


class Bench:
    """Clients c0, c1, … that are all idle, and a policy that is told what happens to them."""

    def __init__(self, policy: Dispatch, clients: int) -> None:
        self.policy = policy
        self.fleet = Fleet({f"c{i}": Client(f"c{i}", 10, node_id=i) for i in range(clients)})
        self.idle = Idle({}, self.fleet.clients)
        self.tasks: dict[str, Task] = {}
        self.number = 0
        for client in self.fleet.clients:
            self.idle.add(client)

    def work(self, now: float, greeting: bool = False) -> list[str]:
        """Give the chosen clients their work; return who they are."""
        rng = np.random.default_rng(0)
        chosen = self.policy.choose(Moment(now, self.fleet, self.idle, rng, greeting))
        for client in chosen:
            name = client.client_id
            self.tasks[name] = Task(self.number, name, 0, 0, 0, sent_at=now, bytes_down=0)
            self.number += 1
            self.policy.sent(self.tasks[name], now)
            self.idle.remove(name)
        return [client.client_id for client in chosen]

    def answer(self, client: str, now: float, task: Task | None = None) -> list[str]:
        """Let a client answer; return whose updates are released."""
        update = Update(task or self.tasks[client], np.zeros(1, np.float32), 10, 0.0)
        released = self.policy.accept(update, now)
        self.idle.add(client)
        return [one.task.client for one in released]

    def wake(self, now: float) -> tuple[list[str], list[str]]:
        """Wake the policy; return whose tasks are given up, and whose updates are released."""
        numbers, released = self.policy.wake(now)
        updates = list(released)
        late = [name for name, task in self.tasks.items() if task.number in numbers]
        for client in late:
            self.idle.add(client)
            updates += self.policy.lost(self.tasks[client], now)
        return late, [one.task.client for one in updates]

    def leave(self, client: str, now: float) -> list[str]:
        """Take a client offline; return whose updates are released."""
        self.fleet.clients[client].node_id = None
        self.idle.remove(client)
        return [one.task.client for one in self.policy.left(client, now)]

    def come_back(self, client: str, now: float) -> None:
        """Bring it back; what it was working on is lost."""
        self.fleet.clients[client].node_id = 99
        self.policy.joined(client)
        assert not self.policy.lost(self.tasks[client], now)
        self.idle.add(client)


# Rounds.


def test_a_round_is_over_when_all_are_back() -> None:
    bench = Bench(InRounds(), 3)
    assert bench.work(0.0) == ["c0", "c1", "c2"]
    assert bench.answer("c1", 1.0) == []
    assert bench.work(1.0) == []
    assert bench.answer("c0", 2.0) == []
    assert bench.answer("c2", 3.0) == ["c1", "c0", "c2"]
    assert bench.work(3.0) == ["c0", "c1", "c2"]


def test_rounds_and_windows_are_counted_when_they_are_over() -> None:
    bench = Bench(InRounds(), 2)
    assert bench.policy.rounds == 0
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.policy.rounds == 0
    bench.answer("c1", 1.0)
    assert bench.policy.rounds == 1
    bench = Bench(InWindows(10.0, two_first), 2)
    assert bench.policy.rounds == 0
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.policy.rounds == 0
    bench.wake(10.0)
    assert bench.policy.rounds == 1
    assert EveryIdle().rounds is OnRequest(every(1.0)).rounds is None


def test_a_round_waits_for_greetings_and_for_someone_to_be_there() -> None:
    bench = Bench(InRounds(), 1)
    assert bench.work(0.0, greeting=True) == []
    bench.leave("c0", 0.0)
    assert bench.work(0.0) == []
    assert bench.policy.state.number == 0  # type: ignore[attr-defined]


def test_who_has_never_answered_has_twenty_times_the_slowest_answer_of_anyone() -> None:
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    assert bench.policy.wake_at() == math.inf
    bench.answer("c0", 1.0)
    assert bench.policy.wake_at() == 20.0
    bench.answer("c1", 3.0)
    assert bench.policy.wake_at() == 60.0
    assert bench.wake(60.0) == (["c2"], ["c0", "c1"])
    assert bench.policy.wake_at() == math.inf


def second_round() -> Bench:
    """c0, c1 and c2 have needed 1, 3 and 5 s; the second round begins at 10 s."""
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    for client, seconds in (("c0", 1.0), ("c1", 3.0), ("c2", 5.0)):
        bench.answer(client, seconds)
    bench.work(10.0)
    return bench


def test_who_has_answered_has_twice_what_it_or_half_of_all_have_needed() -> None:
    bench = second_round()
    # c0: 2 · max(1, median 3) = 6, c1: 2 · 3 = 6, c2: 2 · 5 = 10 s. The last of them counts.
    assert bench.answer("c1", 12.0) == []
    assert bench.policy.wake_at() == 20.0
    assert bench.answer("c2", 15.0) == []
    assert bench.policy.wake_at() == 16.0
    assert bench.wake(16.0) == (["c0"], ["c1", "c2"])
    assert bench.work(16.0) == ["c0", "c1", "c2"]


def test_after_it_was_given_up_a_client_has_twice_the_time_and_then_sits_out() -> None:
    bench, now, waited, took_part = second_round(), 10.0, [], []
    for _ in range(24):
        for client in ("c0", "c1"):
            bench.answer(client, now + 3.0)
        if "c2" in took_part[-1:] or not took_part:
            waited.append(bench.policy.wake_at() - now)
            bench.wake(bench.policy.wake_at())
        now += 100.0
        took_part.append("c2" if "c2" in bench.work(now) else "")
    # Its 5 s twice, doubled after each time at most three times; 0, 1, 3 and 7 rounds without it.
    assert waited == [10.0, 20.0, 40.0, 80.0, 80.0]
    sat_out = "".join("x" if took else "." for took in took_part)
    assert sat_out == "x" + ".x" + "...x" + ".......x" + "." * 9


def test_an_update_makes_up_for_all_that_was_given_up() -> None:
    bench = second_round()
    for now in (10.0, 40.0):
        bench.answer("c0", now + 1.0)
        bench.answer("c1", now + 1.0)
        bench.wake(bench.policy.wake_at())
        bench.work(now + 30.0)
    # It is the fourth round, and c2 sits it out.
    assert [bench.answer(client, 71.0) for client in ("c0", "c1")] == [[], ["c0", "c1"]]
    assert bench.work(80.0) == ["c0", "c1", "c2"]
    bench.answer("c0", 81.0)
    bench.answer("c1", 81.0)
    assert bench.answer("c2", 84.0) == ["c0", "c1", "c2"]
    assert bench.work(90.0) == ["c0", "c1", "c2"]
    bench.answer("c0", 91.0)
    bench.answer("c1", 91.0)
    assert bench.policy.wake_at() == 100.0


def test_who_sits_out_takes_part_when_nobody_else_is_there() -> None:
    bench = second_round()
    bench.policy.state.sits_out["c1"] = 99  # type: ignore[attr-defined]
    bench.answer("c1", 11.0)
    bench.leave("c0", 12.0)
    assert bench.leave("c2", 12.0) == ["c1"]
    bench.policy.state.sits_out["c1"] = 99  # type: ignore[attr-defined]
    assert bench.work(12.0) == ["c1"]
    assert bench.answer("c1", 13.0) == ["c1"]
    # Having answered, it takes part with others again.
    bench.come_back("c0", 14.0)
    assert sorted(bench.work(14.0)) == ["c0", "c1"]


def test_what_comes_after_its_round_is_refused() -> None:
    bench = second_round()
    late = bench.tasks["c0"]
    bench.answer("c1", 11.0)
    bench.answer("c2", 11.0)
    bench.wake(16.0)
    bench.work(16.0)
    with pytest.raises(InvalidReplyError, match="after its round was over"):
        bench.answer("c0", 17.0, late)
    # Its new task counts.
    bench.answer("c1", 18.0)
    bench.answer("c2", 18.0)
    assert bench.answer("c0", 18.0) == ["c1", "c2", "c0"]


def test_a_round_does_not_wait_for_who_has_left() -> None:
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.leave("c2", 2.0) == []
    assert bench.answer("c1", 3.0) == ["c0", "c1"]
    assert bench.work(3.0) == ["c0", "c1"]
    assert bench.policy.wake_at() == 3.0 + 2 * 3.0


def test_the_last_one_to_leave_ends_the_round() -> None:
    bench = Bench(InRounds(), 2)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.leave("c1", 2.0) == ["c0"]


def test_who_comes_back_while_its_round_runs_takes_part_in_it_again() -> None:
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    bench.leave("c2", 2.0)
    bench.come_back("c2", 2.5)
    assert bench.work(2.5) == ["c2"]
    assert bench.answer("c1", 3.0) == []
    assert bench.answer("c2", 4.0) == ["c0", "c1", "c2"]


def test_who_was_taken_for_gone_but_answers_counts() -> None:
    bench = Bench(InRounds(), 2)
    bench.work(0.0)
    bench.leave("c0", 1.0)
    assert bench.answer("c0", 2.0) == []
    # It has had its turn: when it is back it is not asked again.
    bench.come_back("c0", 2.5)
    assert bench.work(2.5) == []
    assert bench.answer("c1", 3.0) == ["c0", "c1"]


def test_a_round_waits_for_participants_that_are_still_busy_with_something_else() -> None:
    bench = Bench(InRounds(), 2)
    bench.idle.remove("c1")
    assert bench.work(0.0) == ["c0"]
    assert bench.answer("c0", 1.0) == []
    bench.idle.add("c1")
    assert bench.work(2.0) == ["c1"]
    assert bench.answer("c1", 3.0) == ["c0", "c1"]


def test_a_round_does_not_wait_for_who_left_before_it_could_be_sent_work() -> None:
    bench = Bench(InRounds(), 2)
    bench.idle.remove("c1")
    bench.work(0.0)
    assert bench.answer("c0", 1.0) == []
    assert bench.leave("c1", 2.0) == ["c0"]


def test_a_share_of_the_clients_takes_part() -> None:
    bench = Bench(InRounds(fraction=0.5), 7)
    first = bench.work(0.0)
    assert len(first) == 3
    assert first == sorted(first)


# Windows of time.


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
    # Nobody is back at 11 s: both are given up, and a new window begins.
    assert bench.wake(11.0) == (["c0", "c1"], [])
    assert bench.policy.wake_at() == math.inf
    bench.fleet.clients["c0"].node_id = None
    bench.idle.remove("c0")
    assert bench.work(12.0) == ["c2", "c1"]
    assert bench.policy.wake_at() == 22.0
    with pytest.raises(InvalidReplyError, match="after its window was over"):
        bench.answer("c1", 13.0, late)


def test_a_window_begins_when_greetings_are_over_and_somebody_is_there() -> None:
    bench = Bench(InWindows(10.0, two_first), 1)
    assert bench.work(0.0, greeting=True) == []
    bench.leave("c0", 0.0)
    assert bench.work(0.0) == []
    assert bench.policy.wake_at() == math.inf
    bench.fleet.clients["c0"].node_id = 5
    bench.idle.add("c0")
    assert bench.work(3.0) == ["c0"]
    assert bench.policy.wake_at() == 13.0


# On request.


def every(seconds: float) -> Callable[[Client, float, np.random.Generator], float]:
    return lambda client, now, rng: now + seconds * (1 + int(client.client_id[1:]))


def test_a_client_is_given_work_when_it_asks() -> None:
    bench = Bench(OnRequest(every(2.0)), 2)
    assert bench.policy.wake_at() == math.inf
    assert bench.work(0.0) == []
    assert bench.policy.wake_at() == 2.0
    assert bench.work(2.0) == ["c0"]
    assert bench.policy.wake_at() == 4.0
    assert bench.answer("c0", 3.0) == ["c0"]
    assert bench.work(3.0) == []
    # c1 asks at 4 s, c0 at 3 + 2 s.
    assert bench.work(4.0) == ["c1"]
    assert bench.policy.wake_at() == 5.0
    bench.leave("c0", 4.5)
    assert bench.policy.wake_at() == math.inf


# On a grid.


class Asking(FedAsync):
    """FedAsync with clients that ask for work."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        super().__init__()

    def policy(self) -> Dispatch:
        return OnRequest(every(self._seconds))


class Idling(FedAsync):
    """FedAsync that says of every update how long its client has waited."""

    def on_update(self, update: Update) -> Applied:
        self.report(events.ClientIdled(self.now(), update.task.client, 1, 2.0, 8.0))
        return super().on_update(update)


class Windowed(FedAsync):
    """FedAsync in windows of 10 s, with the first two clients."""

    def policy(self) -> Dispatch:
        return InWindows(10.0, two_first)


def run(strategy: Method, devices: list[Device], updates: int, **plan: float) -> list[events.Event]:
    seen: list[events.Event] = []
    limits = Plan(eval_every=1000, **plan)  # type: ignore[arg-type]
    strategy.start(grid_of(pulled_app(), devices), MODEL, updates, plan=limits, observe=seen.append)
    return seen


def updates_of(seen: list[events.Event]) -> list[tuple[float, str, float]]:
    return [
        (e.dispatched_at, e.client, e.time) for e in seen if isinstance(e, events.UpdateApplied)
    ]


def test_what_a_method_reports_comes_after_the_update_that_gave_rise_to_it() -> None:
    seen = run(Idling(), [Device(4.0)], updates=2)
    kinds = (events.UpdateApplied, events.ClientIdled)
    assert [(type(e), e.time) for e in seen if isinstance(e, kinds)] == [
        (kinds[0], 4.0),
        (kinds[1], 4.0),
        (kinds[0], 8.0),
        (kinds[1], 8.0),
    ]


def test_requests_on_virtual_time() -> None:
    # c0 asks 2 s, c1 4 s after it has got free, and works for 1 s.
    seen = run(Asking(2.0), [Device()] * 2, updates=4)
    assert updates_of(seen) == [
        (2.0, "c0", 3.0),
        (4.0, "c1", 5.0),
        (5.0, "c0", 6.0),
        (8.0, "c0", 9.0),
    ]


def test_a_request_that_must_wait_its_turn_does_not_stop_the_clock() -> None:
    # Both ask at 2 s and 4 s, work takes 5 s, and only one may work at a time.
    seen = run(Asking(2.0), [Device(seconds_per_round=5.0)] * 2, updates=2, concurrency=1)
    assert updates_of(seen) == [(2.0, "c0", 7.0), (7.0, "c1", 12.0)]


def test_windows_on_virtual_time() -> None:
    # c0 needs 4, c1 12 s: in a window of 10 s c0 is back twice, c1 never. A device that was given
    # up is busy with its old work until 12 s, of which the server hears nothing.
    grid, seen = grid_of(pulled_app(), [Device(4.0), Device(12.0), Device()]), []
    Windowed().start(grid, MODEL, 4, plan=Plan(eval_every=1000), observe=seen.append)
    assert updates_of(seen) == [
        (0.0, "c0", 4.0),
        (4.0, "c0", 8.0),
        (10.0, "c0", 16.0),
        (16.0, "c0", 20.0),
    ]
    rejected = [(e.time, e.client) for e in seen if isinstance(e, events.UpdateRejected)]
    assert sorted(rejected) == [(10.0, "c0"), (10.0, "c1")]
    # What was given up is not kept for anybody.
    assert grid.state_dict()["arrived"] == []


def test_a_number_of_windows_ends_a_run() -> None:
    seen = run(Windowed(), [Device(4.0), Device(12.0), Device()], updates=0, max_rounds=2)
    # As above: c0 is back twice in each.
    assert seen[-1] == events.RunEnded(20.0, 4, "2 rounds are over")
