"""Flower's own rounds on the same clock: FedAvg by hand, limits, left-out replies."""

import random
from collections import Counter

import numpy as np
import pytest
from fleets import MODEL, Change, grid_of, pulled_app, read, write
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from runs import ONES, devices, of

from raceme.core import events
from raceme.core.events import Ending
from raceme.simulation import Device
from raceme.simulation.devices import Workload
from raceme.strategies import FedAvg, FedAvgParameters, FedProx, FedProxParameters, Plan


def spoiled(partition: int, spoil: Change) -> Change:
    """Spoil the replies of one client only."""
    return lambda reply, index: spoil(reply, index) if index == partition else reply


def test_a_round_by_hand() -> None:
    # c0 has 10 examples and moves half way to 2, c1 has 11 and moves half way to 8.
    strategy, seen = FedAvg(), []
    result = strategy.run(
        grid_of(pulled_app([2 * ONES, 8 * ONES]), devices(1.0, 3.0)),
        MODEL,
        max_updates=4,
        observe=seen.append,
    )
    # Round 1: 1 and 4, (10 · 1 + 11 · 4) / 21 = 54/21 = 2.571429.
    # Round 2: (2.571429 + 2) / 2 = 2.285714 and (2.571429 + 8) / 2 = 5.285714, together
    # (22.85714 + 58.142857) / 21 = 81/21 = 3.857143.
    assert read(result.arrays).tolist() == pytest.approx([81 / 21] * 8)
    updates = of(events.UpdateApplied, seen)
    assert [(u.seq, u.time, u.client, u.base_version) for u in updates] == [
        (1, 1.0, "c0", 0),
        (2, 3.0, "c1", 0),
        (3, 4.0, "c0", 1),
        (4, 6.0, "c1", 1),
    ]
    assert [u.weight for u in updates] == pytest.approx([10 / 21, 11 / 21] * 2)
    assert [u.dispatched_at for u in updates] == [0.0, 0.0, 3.0, 3.0]
    assert strategy.models[0].version == 2
    assert seen[-1] == events.RunEnded(6.0, 4, "4 updates were applied")
    # Initial distances 2 √8 and 8 √8; accuracy is the mean of 1 / (1 + distance).
    first = of(events.Evaluated, seen)[0]
    assert first.time == 0.0
    assert first.accuracy == pytest.approx((1 / (1 + 2 * 8**0.5) + 1 / (1 + 8 * 8**0.5)) / 2)
    assert set(result.evaluate_metrics_clientapp) == {0, 4}


def test_a_round_waits_a_minute_for_a_node_that_does_not_answer_its_greeting() -> None:
    def cost(message: Message, context: Context, examples: int) -> Workload | None:
        is_late = context.node_config["partition-id"] == 1
        is_greeting = message.metadata.message_type == MessageType.QUERY
        return Workload(scale=99.0) if is_late and is_greeting else None

    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), devices(1.0, 1.0), cost=cost)
    FedAvg().run(grid, MODEL, max_updates=1, observe=seen.append)
    assert of(events.UpdateApplied, seen)[0].dispatched_at == 60.0


def test_the_round_in_which_the_limit_falls_is_completed() -> None:
    strategy = FedAvg()
    strategy.run(grid_of(pulled_app(), devices(1.0, 1.0, 1.0)), MODEL, max_updates=4)
    assert strategy.progress.updates == 6


def test_a_number_of_rounds_ends_a_run_whatever_updates_they_bring() -> None:
    seen: list[events.Event] = []
    strategy = FedAvg()
    plan = Plan(max_rounds=3, planned_updates=7)
    grid = grid_of(pulled_app(), devices(1.0, 2.0))
    strategy.run(grid, MODEL, max_updates=0, plan=plan, observe=seen.append)
    assert seen[-1] == events.RunEnded(6.0, 6, "3 rounds are over")
    # Schedules depend on the planned number of updates, not on the actual one.
    assert strategy.planned_updates == 7
    # If updates are limited too, the limit that is reached first ends the run.
    strategy = FedAvg()
    strategy.run(grid_of(pulled_app(), devices(1.0, 2.0)), MODEL, 4, plan=plan)
    assert (strategy.progress.updates, strategy.planned_updates) == (4, 4)


def test_a_round_that_is_under_way_is_not_over() -> None:
    plan = Plan(max_rounds=1)
    assert plan.limit(5, 0, 1.0, rounds=0) == ""
    assert plan.limit(5, 0, 1.0, rounds=1) == "1 round is over"
    assert plan.limit(5, 0, 1.0, rounds=None) == ""


def test_time_limit_and_target_end_a_run() -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), devices(2.0))
    FedAvg().run(grid, MODEL, plan=Plan(max_time=5.0), observe=seen.append)
    # The third round would end at 6 s, so it does not count.
    assert seen[-1] == events.RunEnded(5.0, 2, "the time limit of 5 s was reached")
    grid = grid_of(pulled_app([ONES]), devices(2.0))
    plan = Plan(target_accuracy=0.9, eval_every=1)
    FedAvg().run(grid, MODEL, plan=plan, observe=seen.append)
    # √8 / 2^n ≤ 1/9 from n = 5 on.
    assert seen[-1] == events.RunEnded(
        10.0, 5, "the target accuracy of 0.9 was reached", Ending.TARGET
    )


def test_evaluation_keeps_to_its_schedule_and_costs_no_time() -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), devices(1.0, 1.0))
    FedAvg().run(grid, MODEL, 8, plan=Plan(eval_every=4), observe=seen.append)
    assert [(e.updates, e.time) for e in of(events.Evaluated, seen)] == [(0, 0), (4, 2), (8, 4)]


def nan(reply: Message, index: int) -> Message:
    reply.content["arrays"] = write(np.full(8, np.nan))
    return reply


def no_metrics(reply: Message, index: int) -> Message:
    del reply.content["metrics"]
    return reply


def fails(reply: Message, index: int) -> Message:
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(nan, "not finite"), (no_metrics, "missing records"), (fails, "the disk is full")],
)
def test_invalid_replies_are_left_out(spoil: Change, reason: str) -> None:
    strategy, seen = FedAvg(), []
    app = pulled_app([2 * ONES, 8 * ONES], change=spoiled(1, spoil))
    result = strategy.run(
        grid_of(app, devices(1.0, 3.0)), MODEL, max_updates=1, observe=seen.append
    )
    assert read(result.arrays).tolist() == [1.0] * 8
    (rejected,) = of(events.UpdateRejected, seen)
    assert (rejected.time, rejected.client) == (3.0, "c1")
    assert reason in rejected.reason
    assert (strategy.progress.updates, strategy.progress.rejected) == (1, 1)


def odd_metrics(reply: Message, index: int) -> Message:
    metrics = {**reply.content["metrics"], "temperature": 40.0, "losses": [1.0, 2.0]}
    reply.content["metrics"] = MetricRecord(metrics)
    return reply


def odd_names(reply: Message, index: int) -> Message:
    content = reply.content
    reply.content = RecordDict({"weights": content["arrays"], "numbers": content["metrics"]})
    return reply


@pytest.mark.parametrize("oddity", [odd_metrics, odd_names])
def test_a_client_that_reports_differently_does_not_end_the_run(oddity: Change) -> None:
    seen: list[events.Event] = []
    app = pulled_app([2 * ONES, 8 * ONES], change=spoiled(1, oddity))
    result = FedAvg().run(
        grid_of(app, devices(1.0, 3.0)), MODEL, max_updates=2, observe=seen.append
    )
    assert read(result.arrays).tolist() == pytest.approx([54 / 21] * 8)
    assert dict(result.train_metrics_clientapp[1]) == {"train-loss": pytest.approx(0.5)}


def test_a_run_without_any_valid_update_ends_and_says_why() -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(change=nan), devices(1.0, 1.0))
    result = FedAvg().run(grid, MODEL, max_updates=4, observe=seen.append)
    # Both fail in each of 50 rounds; from the seventh failure on a client pauses 60 s before each.
    assert (seen[-1].time, seen[-1].updates) == (64.0 + 43 * 61.0, 0)
    assert seen[-1].ending is Ending.USELESS_REPLIES
    assert seen[-1].reason.startswith("the last 100 replies were unusable; the last one: c")
    assert read(result.arrays).tolist() == [0.0] * 8


def ends_of_rounds(devices: list[Device], updates: int, timeout: float = 3600.0) -> list[float]:
    """Run FedAvg, and return the end of each round with updates."""
    grid, ends = grid_of(pulled_app(), devices), []

    def note(event: events.Event) -> None:
        if isinstance(event, events.UpdateApplied) and grid.now() not in ends:
            ends.append(grid.now())

    FedAvg().run(grid, MODEL, updates, timeout=timeout, observe=note)
    return ends


def test_a_client_that_never_answers_costs_ever_fewer_rounds_their_time() -> None:
    # c0 needs 1 s. The limit of c1 is 20 times that, and doubles each time; c1 backs off in round
    # 3, and in rounds 5 to 7.
    ends = ends_of_rounds([Device(), Device(drop=1.0)], updates=8)
    assert ends == [20.0, 60.0, 61.0, 141.0, 142.0, 143.0, 144.0, 304.0]


def test_a_lost_task_is_given_up_at_its_timeout_if_that_is_sooner() -> None:
    assert ends_of_rounds([Device(), Device(drop=1.0)], updates=2, timeout=15.0) == [15.0, 30.0]


def test_lost_tasks_cost_rounds_little() -> None:
    # 10 clients, of which two need 10 s; each loses 5 % of its tasks.
    seconds = [10.0 if index % 5 == 0 else 1.0 for index in range(10)]
    whole = ends_of_rounds(devices(*seconds), updates=1000)
    fleet = [Device(seconds_per_round=value, drop=0.05) for value in seconds]
    lossy = ends_of_rounds(fleet, updates=1000)
    assert whole[-1] == 1000.0
    # A round in which a slow client's task is lost takes 20 instead of 10 s: one round in ten.
    assert lossy[-1] < 1.5 * whole[-1]


def test_a_client_that_comes_back_takes_part_in_the_round_again() -> None:
    # c1 leaves at 1 s, is back at 2 s and needs 4 s from then on; c2 needs 5 s.
    fleet = [Device(), Device(4.0, online=((0.0, 1.0), (2.0, 100.0))), Device(5.0)]
    seen: list[events.Event] = []
    FedAvg().run(grid_of(pulled_app(), fleet), MODEL, max_updates=3, observe=seen.append)
    assert [(u.dispatched_at, u.client, u.time) for u in of(events.UpdateApplied, seen)] == [
        (0.0, "c0", 1.0),
        (0.0, "c2", 5.0),
        (2.0, "c1", 6.0),
    ]
    (rejected,) = of(events.UpdateRejected, seen)
    assert rejected.reason == "the client went offline with it"


def test_a_request_to_stop_ends_a_round_at_once() -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), [Device(), Device(3000.0)])
    FedAvg().run(
        grid,
        MODEL,
        max_updates=2,
        observe=seen.append,
        stop_check=lambda: "asked to stop" if grid.now() >= 1.0 else "",
    )
    assert seen[-1] == events.RunEnded(1.0, 0, "asked to stop", Ending.INTERRUPTED)


def test_newcomers_take_part_from_the_next_round_on() -> None:
    seen: list[events.Event] = []
    late, early = Device(online=((1.5, 100.0),)), Device(online=((0.0, 3.5),))
    grid = grid_of(pulled_app(), [Device(), late, early])
    FedAvg().run(grid, MODEL, max_updates=9, observe=seen.append)
    # A task of 1 s each: rounds of {0, 2}, {0, 2}, {0, 1, 2}; in the fourth c2 leaves at 3.5.
    arrivals = Counter((u.time, u.client) for u in of(events.UpdateApplied, seen))
    assert set(arrivals) == {
        *((time, "c0") for time in (1.0, 2.0, 3.0, 4.0)),
        *((time, "c1") for time in (3.0, 4.0)),
        *((time, "c2") for time in (1.0, 2.0, 3.0)),
    }
    joined = [(e.client, e.time) for e in of(events.ClientJoined, seen)]
    assert joined == [("c0", 0.0), ("c2", 0.0), ("c1", 1.5)]


def test_when_everybody_is_gone_the_run_ends() -> None:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), [Device(online=((0.0, 2.0),))])
    FedAvg().run(grid, MODEL, max_updates=9, timeout=50.0, observe=seen.append)
    assert seen[-1].reason == "all clients are gone"
    # The time limit also ends a run while no client is online.
    grid = grid_of(pulled_app(), [Device(online=((60.0, 70.0),))])
    FedAvg().run(grid, MODEL, plan=Plan(max_time=20.0), observe=seen.append)
    assert seen[-1] == events.RunEnded(20.0, 0, "the time limit of 20 s was reached")


def test_a_second_node_of_the_same_client_gets_no_work() -> None:
    strategy, seen = FedAvg(), []
    grid = grid_of(pulled_app(), devices(1.0, 1.0), partitions=[0, 0])
    strategy.run(grid, MODEL, max_updates=3, observe=seen.append)
    assert [u.client for u in of(events.UpdateApplied, seen)] == ["c0"] * 3
    (rejected,) = of(events.UpdateRejected, seen)
    assert rejected.reason == "'c0' is already online as node 100"


def configs_seen(app: ClientApp, seen: list[dict]) -> ClientApp:
    """Let an app keep the settings that it is sent."""

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content["config"]))
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )

    return app


@pytest.mark.parametrize("mu", [0.0, 0.25])
def test_fedprox_sends_its_proximal_weight_with_the_settings(mu: float) -> None:
    seen: list[dict] = []
    FedProx(FedProxParameters(proximal_mu=mu)).run(
        grid_of(configs_seen(ClientApp(), seen), devices(1.0)),
        MODEL,
        max_updates=2,
        train_config=ConfigRecord({"lr": 0.1}),
    )
    assert seen == [
        {"lr": 0.1, "server-round": server_round, "proximal-mu": mu} for server_round in (1, 2)
    ]


def sampled(seed: int, fraction: float = 0.3) -> list[str]:
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(), devices(*[1.0] * 10))
    FedAvg(FedAvgParameters(fraction=fraction), seed).run(grid, MODEL, 9, observe=seen.append)
    return [u.client for u in of(events.UpdateApplied, seen)]


def test_the_seed_decides_who_is_sampled() -> None:
    first = sampled(1)
    assert len(first) == 9
    assert all(len(set(first[start : start + 3])) == 3 for start in (0, 3, 6))
    assert sampled(1) == first
    assert sampled(2) != first


def test_at_least_one_client_is_sampled() -> None:
    assert len(sampled(0, fraction=0.01)) == 9


def test_pythons_own_generator_is_left_as_it_was() -> None:
    random.seed(123)
    expected = random.random()
    random.seed(123)
    sampled(1)
    assert random.random() == expected

    def interrupt(reply: Message, index: int) -> Message:
        raise KeyboardInterrupt

    random.seed(123)
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(change=interrupt), devices(1.0))
    result = FedAvg().run(grid, MODEL, observe=seen.append)
    assert random.random() == expected
    assert seen[-1] == events.RunEnded(1.0, 0, "interrupted by the user", Ending.INTERRUPTED)
    assert isinstance(result.arrays, ArrayRecord)
