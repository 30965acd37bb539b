"""Schedulers, traced by hand: selection, time limits, and updates aggregated together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from policies import Bench, run

from raceme.core import events
from raceme.core.messages import LOSSES
from raceme.core.requests import InFlight, InvalidReplyError, Outcome, Update
from raceme.core.schedulers import OnRequest
from raceme.core.scheduling import EveryIdle, InRounds
from raceme.simulation import Device
from raceme.strategies import FedAsync
from raceme.strategies.csafl import IDLE

# Rounds.


def test_a_round_ends_when_all_participants_have_answered() -> None:
    bench = Bench(InRounds(), 3)
    assert bench.work(0.0) == ["c0", "c1", "c2"]
    assert bench.answer("c1", 1.0) == []
    assert bench.work(1.0) == []
    assert bench.answer("c0", 2.0) == []
    assert bench.answer("c2", 3.0) == ["c1", "c0", "c2"]
    assert bench.work(3.0) == ["c0", "c1", "c2"]


def test_clients_with_several_models_train_them_all_in_the_same_round() -> None:
    models = {"c0": (0, 1, 2), "c1": (0,)}
    bench = Bench(InRounds(models=models.__getitem__), 2)
    assert bench.work(0.0) == ["c0", "c1"]
    assert bench.answer("c1", 1.0) == []
    assert bench.answer("c0", 1.0) == []
    assert bench.work(1.0) == ["c0"]
    assert bench.answer("c0", 2.0) == []
    assert bench.work(2.0) == ["c0"]
    assert bench.tasks["c0"].cluster == 2
    # All updates of c0 are aggregated together with the others'.
    assert bench.answer("c0", 3.0) == ["c1", "c0", "c0", "c0"]
    assert bench.work(3.0) == ["c0", "c1"]


def test_rounds_are_counted_when_they_are_over() -> None:
    bench = Bench(InRounds(), 2)
    assert bench.policy.rounds == 0
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.policy.rounds == 0
    bench.answer("c1", 1.0)
    assert bench.policy.rounds == 1


def test_a_round_waits_for_greetings_and_for_a_client() -> None:
    bench = Bench(InRounds(), 1)
    assert bench.work(0.0, greeting=True) == []
    bench.leave("c0", 0.0)
    assert bench.work(0.0) == []
    assert bench.policy.state.number == 0  # type: ignore[attr-defined]


def test_new_clients_have_twenty_times_the_slowest_answer() -> None:
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


def test_clients_have_twice_their_longest_time_or_the_median() -> None:
    bench = second_round()
    # Limits: c0 2 · max(1, median 3) = 6 s, c1 2 · 3 = 6 s, c2 2 · 5 = 10 s. The largest counts.
    assert bench.answer("c1", 12.0) == []
    assert bench.policy.wake_at() == 20.0
    assert bench.answer("c2", 15.0) == []
    assert bench.policy.wake_at() == 16.0
    assert bench.wake(16.0) == (["c0"], ["c1", "c2"])
    assert bench.work(16.0) == ["c0", "c1", "c2"]


def test_a_client_that_was_given_up_gets_twice_the_time_and_then_sits_out() -> None:
    bench, now, waited, took_part = second_round(), 10.0, [], []
    for _ in range(24):
        for client in ("c0", "c1"):
            bench.answer(client, now + 3.0)
        if "c2" in took_part[-1:] or not took_part:
            waited.append(bench.policy.wake_at() - now)
            bench.wake(bench.policy.wake_at())
        now += 100.0
        took_part.append("c2" if "c2" in bench.work(now) else "")
    # 2 · 5 s, doubled after each timeout at most three times; 0, 1, 3 and 7 rounds without it.
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
    # In the fourth round c2 backs off.
    assert [bench.answer(client, 71.0) for client in ("c0", "c1")] == [[], ["c0", "c1"]]
    assert bench.work(80.0) == ["c0", "c1", "c2"]
    bench.answer("c0", 81.0)
    bench.answer("c1", 81.0)
    assert bench.answer("c2", 84.0) == ["c0", "c1", "c2"]
    assert bench.work(90.0) == ["c0", "c1", "c2"]
    bench.answer("c0", 91.0)
    bench.answer("c1", 91.0)
    assert bench.policy.wake_at() == 100.0


def test_a_back_off_ends_when_no_other_client_is_online() -> None:
    bench = second_round()
    bench.policy.state.backs_off_until["c1"] = 99  # type: ignore[attr-defined]
    bench.answer("c1", 11.0)
    bench.leave("c0", 12.0)
    assert bench.leave("c2", 12.0) == ["c1"]
    bench.policy.state.backs_off_until["c1"] = 99  # type: ignore[attr-defined]
    assert bench.work(12.0) == ["c1"]
    assert bench.answer("c1", 13.0) == ["c1"]
    # After an answer, c1 takes part with others again.
    bench.come_back("c0", 14.0)
    assert sorted(bench.work(14.0)) == ["c0", "c1"]


def test_a_late_reply_is_refused() -> None:
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


def test_a_round_does_not_wait_for_clients_that_left() -> None:
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.leave("c2", 2.0) == []
    assert bench.answer("c1", 3.0) == ["c0", "c1"]
    assert bench.work(3.0) == ["c0", "c1"]
    assert bench.policy.wake_at() == 3.0 + 2 * 3.0


def test_a_round_ends_when_its_last_participant_leaves() -> None:
    bench = Bench(InRounds(), 2)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    assert bench.leave("c1", 2.0) == ["c0"]


def test_clients_that_return_during_their_round_take_part_again() -> None:
    bench = Bench(InRounds(), 3)
    bench.work(0.0)
    bench.answer("c0", 1.0)
    bench.leave("c2", 2.0)
    bench.come_back("c2", 2.5)
    assert bench.work(2.5) == ["c2"]
    assert bench.answer("c1", 3.0) == []
    assert bench.answer("c2", 4.0) == ["c0", "c1", "c2"]


def test_an_answer_of_a_client_presumed_offline_counts() -> None:
    bench = Bench(InRounds(), 2)
    bench.work(0.0)
    bench.leave("c0", 1.0)
    assert bench.answer("c0", 2.0) == []
    # Its turn is over: it is not selected again in this round.
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


def test_a_round_does_not_wait_for_clients_that_left_before_their_work() -> None:
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


def test_schedulers_without_rounds_count_none() -> None:
    assert EveryIdle().rounds is OnRequest().rounds is None


# Runs on a grid.


class Idling(FedAsync):
    """FedAsync that reports an idle time with every update."""

    def on_update(self, update: Update) -> Outcome:
        values = {"client": update.task.client, "window": 1, "seconds": 2.0, "budget": 8.0}
        self.report(events.Measured(self.now(), 0, IDLE, values))
        return super().on_update(update)


def test_reports_of_a_method_follow_their_update() -> None:
    seen = run(Idling(), [Device(4.0)], updates=2)
    kinds = (events.UpdateApplied, events.Measured)
    assert [(type(e), e.time) for e in seen if isinstance(e, kinds)] == [
        (kinds[0], 4.0),
        (kinds[1], 4.0),
        (kinds[0], 8.0),
        (kinds[1], 8.0),
    ]


# Queries before a round.


def question(bench: Bench, client: str, number: int) -> InFlight:
    """Send a client a query, which makes it busy."""
    task = InFlight(number, client, 0, 0, 0, sent_at=0.0, bytes_down=0, kind=LOSSES)
    bench.policy.sent(task, 0.0)
    bench.idle.remove(client)
    return task


def asked(bench: Bench, now: float, **how: int) -> list[str] | None:
    policy = bench.policy
    assert isinstance(policy, InRounds)
    return policy.ask_first(bench.selection_context(now), **how)


def test_a_round_waits_for_the_answers_to_what_was_asked_before_it() -> None:
    bench = Bench(InRounds(), 3)
    assert asked(bench, 0.0) == ["c0", "c1", "c2"]
    first = question(bench, "c0", 0)
    # With a small concurrency limit others are queried later, but the deadline stays the same.
    assert asked(bench, 1.0) == ["c1", "c2"]
    second = question(bench, "c1", 1)
    bench.policy.lost(first, 2.0)
    bench.policy.left("c2", 2.0)
    assert asked(bench, 3.0) == []
    assert bench.policy.wake_at() == 60.0
    # An answer to another query does not count.
    bench.policy.lost(replace(second, number=7), 4.0)
    assert asked(bench, 4.0) == []
    bench.policy.lost(second, 5.0)
    assert asked(bench, 5.0) is None
    assert bench.policy.wake_at() == math.inf


def test_queries_wait_for_clients_under_test() -> None:
    bench = Bench(InRounds(), 3)
    bench.idle.remove("c1")
    assert asked(bench, 5.0) == []
    assert bench.policy.wake_at() == 65.0
    # Clients that are not queried may be busy.
    policy = bench.policy
    assert isinstance(policy, InRounds)
    other = InRounds()
    assert other.ask_first(bench.selection_context(5.0), lambda client: client == "c2") == ["c2"]
    bench.idle.add("c1")
    assert asked(bench, 7.0) == ["c0", "c2", "c1"]
    # The wait for busy clients is limited.
    bench = Bench(InRounds(), 3)
    bench.idle.remove("c1")
    assert asked(bench, 5.0) == []
    assert asked(bench, 64.9) == []
    assert asked(bench, 65.0) == ["c0", "c2"]
    assert bench.policy.wake_at() == 125.0


def test_queries_have_a_time_limit_and_an_interval() -> None:
    bench = Bench(InRounds(), 1)
    assert asked(bench, 0.0, every=2) == ["c0"]
    question(bench, "c0", 0)
    assert bench.policy.wake(60.0) == ((), ())
    assert asked(bench, 60.0, every=2) is None
    bench.idle.add("c0")
    for expected in (None, ["c0"], None, ["c0"]):
        assert bench.work(60.0) == ["c0"]
        assert asked(bench, 60.0, every=2) is None
        bench.answer("c0", 61.0)
        assert asked(bench, 61.0, every=2) == expected
        bench.policy.left("c0", 61.0)
