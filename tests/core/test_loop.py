"""The asynchronous event loop: short runs traced by hand, and all kinds of failures."""

from __future__ import annotations

import copy
import math
import time as clock
from collections.abc import Iterable

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app, read, write
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from runs import ONES, devices, half, of, run

from raceme.core import events
from raceme.core.events import Ending
from raceme.core.messages import REFUSED
from raceme.core.requests import InFlight
from raceme.core.strategy import Needs
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import (
    CASA,
    FedAsync,
    FedAsyncParameters,
    FedBuff,
    FedBuffParameters,
    Method,
    Plan,
    Standalone,
)

FOREVER = math.inf
METHODS = [CASA, FedAsync, FedBuff, Standalone]


# Runs traced by hand.


def test_fedasync_with_a_fast_and_a_slow_client() -> None:
    # c0 needs 1 s and moves half way to 8; c1 needs 3 s and moves half way to −8.
    # α = 1/2, polynomial with a = 1: α_τ = 1 / (2 (1 + τ)).
    strategy = FedAsync(FedAsyncParameters(alpha=0.5, decay="polynomial", a=1.0))
    grid = grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.0))
    seen = run(strategy, grid, num_rounds=5)
    updates = of(events.UpdateApplied, seen)
    # t  who  base        sent   returns  τ  α    model after
    # 1  c0   0           0      4        0  1/2  2
    # 2  c0   1           2      5        0  1/2  3.5
    # 3  c1   0           0      −4       2  1/6  3.5 − 7.5/6 = 2.25
    # 3  c0   2           3.5    5.75     1  1/4  2.25 + 3.5/4 = 3.125
    # 4  c0   4           3.125  5.5625   0  1/2  4.34375
    # c1 was sent its task before c0 was sent its third, so at 3 s its reply is the first.
    assert [(u.time, u.client, u.base_version, u.staleness) for u in updates] == [
        (1.0, "c0", 0, 0),
        (2.0, "c0", 1, 0),
        (3.0, "c1", 0, 2),
        (3.0, "c0", 2, 1),
        (4.0, "c0", 4, 0),
    ]
    assert [u.weight for u in updates] == pytest.approx([1 / 2, 1 / 2, 1 / 6, 1 / 4, 1 / 2])
    assert [u.dispatched_at for u in updates] == [0.0, 1.0, 0.0, 2.0, 3.0]
    assert strategy.models[0].vector.tolist() == pytest.approx([4.34375] * 8)
    assert strategy.models[0].version == 5
    assert seen[-1] == events.RunEnded(4.0, 5, "5 updates were applied")
    # The client's two arrays of 4 and 1 bytes of name, 32 bytes of numbers and two .npy headers.
    assert len({(u.bytes_down, u.bytes_up) for u in updates}) == 1
    assert updates[0].bytes_down == updates[0].bytes_up == MODEL.count_bytes()


def test_fedbuff_steps_after_every_k_updates() -> None:
    # K = 2, η_g = 1. c0 needs 1 s and adds 1, c1 needs 3 s and adds 10.
    def adds(reply: Message, index: int) -> Message:
        reply.content["arrays"] = write(read(reply.content["arrays"]) + (1, 10)[index])
        return reply

    strategy = FedBuff(FedBuffParameters(k=2))
    seen = run(strategy, grid_of(pulled_app(change=adds), devices(1.0, 3.0)), num_rounds=6)
    # t  who  base  τ  collected                        model, version
    # 1  c0   0     0  1                                0      0
    # 2  c0   0     0  1 + 1 = 2        step: 2/2       1      1
    # 3  c1   0     1  10/√2                            1      1
    # 3  c0   1     0  10/√2 + 1        step: half      1 + 5/√2 + 1/2 = 1.5 + 5/√2   2
    # 4  c0   2     0  1; 5 c0: 2       step            2.5 + 5/√2                    3
    updates = of(events.UpdateApplied, seen)
    assert [(u.time, u.client, u.base_version, u.staleness) for u in updates] == [
        (1.0, "c0", 0, 0),
        (2.0, "c0", 0, 0),
        (3.0, "c1", 0, 1),
        (3.0, "c0", 1, 0),
        (4.0, "c0", 2, 0),
        (5.0, "c0", 2, 0),
    ]
    assert updates[2].weight == pytest.approx(0.5 / math.sqrt(2))
    assert strategy.models[0].vector.tolist() == pytest.approx([2.5 + 5 / math.sqrt(2)] * 8)
    assert strategy.models[0].version == 3
    # Only versions that a client still trains from are kept: c1 was sent version 1 at 3 s, before
    # c0's reply of the same moment.
    assert set(strategy.bases.vectors) == {"0/1"}


@pytest.mark.filterwarnings("ignore:overflow")
def test_after_a_step_that_is_not_finite_fedbuff_takes_the_next_one() -> None:
    # K = 2, η_g = 10³⁰: the second update alone makes a step of 5 · 10⁴³, beyond float32.
    sent = iter([1e-30, 1e14, 1e-30, 1e-30])

    def adds(reply: Message, index: int) -> Message:
        reply.content["arrays"] = write(read(reply.content["arrays"]) + np.float32(next(sent)))
        return reply

    strategy = FedBuff(FedBuffParameters(k=2, server_lr=1e30))
    seen = run(strategy, grid_of(pulled_app(change=adds), devices(1.0)), num_rounds=3)
    assert [u.reason for u in of(events.UpdateRejected, seen)] == [
        "the model would hold NaN or infinity"
    ]
    # The refused step discards its buffer: the next one is (10⁻³⁰ + 10⁻³⁰) · 10³⁰ / 2.
    assert strategy.models[0].vector.tolist() == pytest.approx([1.0] * 8)
    assert strategy.models[0].version == 1


def test_standalone_clients_never_meet() -> None:
    strategy = Standalone()
    grid = grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.0))
    seen = run(strategy, grid, num_rounds=4)
    # c0 is sent 0, 4, 6 and returns 4, 6, 7; c1 returns −4. At 3 s the older task's reply is first.
    assert [(u.time, u.client, u.cluster) for u in of(events.UpdateApplied, seen)] == [
        (1.0, "c0", 0),
        (2.0, "c0", 0),
        (3.0, "c1", 1),
        (3.0, "c0", 0),
    ]
    assert strategy.models[0].vector.tolist() == [7.0] * 8
    assert strategy.models[1].vector.tolist() == [-4.0] * 8
    # No model is sent over the network.
    assert {(u.bytes_down, u.bytes_up) for u in of(events.UpdateApplied, seen)} == {(0, 0)}


def test_the_result_holds_models_and_evaluations() -> None:
    grid = grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 1.0))
    seen: list[events.Event] = []
    central = []

    def evaluate_fn(updates: int, arrays: ArrayRecord) -> MetricRecord:
        central.append((updates, list(arrays), float(arrays["w"].numpy()[0])))
        return MetricRecord({"x": float(arrays["w"].numpy()[0])})

    result = Standalone().run(
        grid, MODEL, 4, evaluate_fn=evaluate_fn, plan=Plan(eval_every=2), observe=seen.append
    )
    # Each cluster's arrays have the names that the model's `load_state_dict` expects.
    assert {cluster: read(arrays).tolist() for cluster, arrays in result.clusters.items()} == {
        0: [6.0] * 8,
        1: [-6.0] * 8,
    }
    assert list(result.arrays) == ["w", "b"]
    assert read(result.arrays).tolist() == [6.0] * 8
    assert result.client_clusters == {"c0": {0: 1.0}, "c1": {1: 1.0}}
    # Called once per cluster; the mean has equal weights.
    models = [(0, 0.0), (0, 0.0), (2, 4.0), (2, -4.0), (4, 6.0), (4, -6.0)]
    assert central == [(updates, ["w", "b"], value) for updates, value in models]
    assert {n: m["x"] for n, m in result.evaluate_metrics_serverapp.items()} == {0: 0, 2: 0, 4: 0}
    # Each client is tested with its own model: 8 √8, 4 √8, 2 √8 away from its target.
    found = [(e.updates, e.time, e.accuracy) for e in of(events.Evaluated, seen)]
    assert found == [
        (2 * n, float(n), pytest.approx(1 / (1 + 8 * math.sqrt(8) / 2**n))) for n in range(3)
    ]
    assert {n: m["accuracy"] for n, m in result.evaluate_metrics_clientapp.items()} == {
        updates: accuracy for updates, _, accuracy in found
    }


# Clients that get work.


class Counted(FedAsync):
    """FedAsync that counts the tasks in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.most = 0

    def on_sent(self, task: InFlight) -> None:
        self.open += 1
        self.most = max(self.most, self.open)

    def on_closed(self, task: InFlight) -> None:
        self.open -= 1


class Expecting(FedAsync):
    """FedAsync that notes the expected duration of each task."""

    needs = Needs(latencies=True)

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, float] = {}

    def on_sent(self, task: InFlight) -> None:
        self.expected[task.client] = task.expected


def test_methods_that_need_latencies_know_the_expected_duration_of_a_task() -> None:
    strategy = Expecting()
    run(strategy, grid_of(pulled_app(), devices(1.0, 3.0)), num_rounds=2)
    assert strategy.expected == {"c0": 1.0, "c1": 3.0}


@pytest.mark.parametrize(("concurrency", "most"), [(0, 6), (1, 1), (4, 4), (9, 6)])
def test_no_more_clients_train_at_a_time_than_planned(concurrency: int, most: int) -> None:
    strategy = Counted()
    grid = grid_of(pulled_app(), [Device(jitter=0.5)] * 6)
    seen = run(strategy, grid, num_rounds=60, concurrency=concurrency)
    assert strategy.most == most
    assert len({u.client for u in of(events.UpdateApplied, seen)}) == 6


def test_a_task_of_an_offline_client_does_not_hold_up_the_others() -> None:
    leaver, stayer = Device(5.0, online=((0.0, 2.0),)), Device(online=((1.0, FOREVER),))
    seen = run(half(), grid_of(pulled_app(), [leaver, stayer]), num_rounds=2, concurrency=1)
    assert [(u.time, u.client) for u in of(events.UpdateApplied, seen)] == [
        (3.0, "c1"),
        (4.0, "c1"),
    ]


def test_clients_join_leave_and_return() -> None:
    strategy = half()
    fleet = [
        Device(seconds_per_round=4.0),
        Device(seconds_per_round=4.0, online=((1.0, FOREVER),)),
        Device(seconds_per_round=4.0, online=((0.0, 6.0), (9.0, FOREVER))),
    ]
    seen = run(strategy, grid_of(pulled_app(), fleet), num_rounds=8)
    assert of(events.ClientJoined, seen) == [
        events.ClientJoined(0.0, "c0", 100, 10, None),
        events.ClientJoined(0.0, "c2", 102, 12, None),
        events.ClientJoined(1.0, "c1", 101, 11, None),
        events.ClientJoined(9.0, "c2", 102, 12, None, returned=True),
    ]
    assert of(events.ClientLeft, seen) == [events.ClientLeft(6.0, "c2")]
    assert of(events.UpdateRejected, seen) == [
        events.UpdateRejected(9.0, "c2", "the client went offline with it", dispatched_at=4.0)
    ]
    assert [(u.time, u.client) for u in of(events.UpdateApplied, seen)] == [
        (4.0, "c0"),
        (4.0, "c2"),
        (5.0, "c1"),
        (8.0, "c0"),
        (9.0, "c1"),
        (12.0, "c0"),
        (13.0, "c1"),
        (13.0, "c2"),
    ]


def test_of_two_nodes_with_one_id_the_second_waits_for_the_first_to_leave() -> None:
    fleet = [Device(online=((0.0, 2.5),)), Device()]
    seen = run(half(), grid_of(pulled_app(), fleet, partitions=[0, 0]), num_rounds=4)
    assert [(r.time, r.client, r.reason) for r in of(events.UpdateRejected, seen)] == [
        (0.0, "node 101", "'c0' is already online as node 100"),
        (2.5, "c0", "the client went offline with it"),
    ]
    joined = [(e.time, e.node_id, e.returned) for e in of(events.ClientJoined, seen)]
    assert joined == [(0.0, 100, False), (2.5, 101, True)]
    assert [u.time for u in of(events.UpdateApplied, seen)] == [1.0, 2.0, 3.5, 4.5]


def test_an_app_without_queries_takes_part_as_its_node() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        records = {
            "weights": message.content["arrays"],
            "measured": MetricRecord({"num-examples": 3}),
        }
        return Message(RecordDict(records), reply_to=message)

    seen = run(half(), grid_of(app, devices(1.0)), num_rounds=2)
    assert of(events.ClientJoined, seen) == [events.ClientJoined(0.0, "node-100", 100, 1, None)]
    assert len(of(events.UpdateApplied, seen)) == 2


def greeting(**metrics: float) -> ClientApp:
    """An app whose clients greet with these metrics."""
    app = pulled_app()
    greeted = ClientApp()

    @greeted.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    @greeted.train()
    def train(message: Message, context: Context) -> Message:
        return app(message, context)

    return greeted


@pytest.mark.parametrize("examples", [0, -1, 0.5, math.nan, math.inf, 10**400])
def test_a_client_without_a_number_of_examples_is_refused(examples: float) -> None:
    seen = run(half(), grid_of(greeting(**{"num-examples": examples}), devices(1.0)), timeout=20.0)
    (rejected,) = of(events.UpdateRejected, seen)
    assert (rejected.client, rejected.reason) == (
        "node 100",
        "'node-100' has no examples to train on",
    )
    assert seen[-1].reason == "all clients are gone"


class Noting(VirtualGrid):
    """A grid that the loop takes for a real one, and that notes refusals without sending them."""

    is_virtual = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        told = [message for message in messages if message.metadata.message_type == REFUSED]
        self.refusals = [*vars(self).get("refusals", ()), *told]
        return super().push_messages([message for message in messages if message not in told])


@pytest.mark.parametrize(("timeout", "ttl"), [(20.0, 20.0), (200.0, 60.0)])
def test_a_refused_device_gets_the_reason_for_at_most_a_minute(timeout: float, ttl: float) -> None:
    grid = Noting(greeting(**{"num-examples": 0}), grid_of(pulled_app(), devices(1.0)).nodes)
    run(half(), grid, timeout=timeout)
    (told,) = grid.refusals
    assert told.content["config"]["reason"] == "'node-100' has no examples to train on"
    assert told.metadata.ttl == ttl


@pytest.mark.parametrize("client_id", ["", "a\x1b[2Jb", "two\nlines", "x" * 129])
def test_an_id_that_could_steer_a_terminal_is_refused(client_id: str) -> None:
    app = pulled_app()
    greeted = ClientApp()

    @greeted.query()
    def query(message: Message, context: Context) -> Message:
        records = {
            "config": ConfigRecord({"client-id": client_id}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    @greeted.train()
    def train(message: Message, context: Context) -> Message:
        return app(message, context)

    seen = run(half(), grid_of(greeted, devices(1.0)), timeout=20.0)
    (rejected,) = of(events.UpdateRejected, seen)
    assert rejected.reason == "node 100 states an id that is not 1 to 128 printable characters"


@pytest.mark.parametrize("group", [-1, math.nan, math.inf, 10**400])
def test_an_invalid_group_is_ignored(group: float) -> None:
    app = greeting(**{"num-examples": 5, "group": group})
    seen = run(half(), grid_of(app, devices(1.0)), num_rounds=1)
    assert of(events.ClientJoined, seen)[0].group is None


def test_a_time_on_a_device_s_clock_is_reported_as_a_time_of_the_run() -> None:
    def states_start(reply: Message, index: int) -> Message:
        reply.content["metrics"]["started-at"] = clock.time() - 0.5
        return reply

    seen = run(half(), grid_of(pulled_app(change=states_start), devices(1.0)), num_rounds=1)
    (applied,) = of(events.UpdateApplied, seen)
    # The reply arrives at 1 s, half a second after the start and almost at once in real time.
    assert -60.0 < applied.started_at <= 0.5
    assert applied.finished_at is None


# Ends of runs.


def test_all_clients_gone_ends_the_run_at_the_time_when_the_last_one_left() -> None:
    fleet = [Device(online=((0.0, 2.5),)), Device(online=((0.0, 7.25),))]
    seen = run(half(), grid_of(pulled_app(), fleet), num_rounds=99, timeout=100.0)
    assert seen[-1] == events.RunEnded(7.25, 9, "all clients are gone", Ending.NO_CLIENTS)


def test_a_run_without_any_client_waits_until_the_timeout() -> None:
    seen = run(half(), grid_of(pulled_app(), [Device(online=((500.0, 600.0),))]), timeout=100.0)
    assert seen == [events.RunEnded(0.0, 0, "all clients are gone", Ending.NO_CLIENTS)]
    late = grid_of(pulled_app(), [Device(online=((50.0, 600.0),))])
    seen = run(half(), late, num_rounds=1, timeout=100.0)
    assert seen[-1] == events.RunEnded(51.0, 1, "1 update was applied")


def test_the_time_limit_is_kept_exactly() -> None:
    seen = run(half(), grid_of(pulled_app(), devices(2.0)), max_time=7.0)
    assert seen[-1] == events.RunEnded(7.0, 3, "the time limit of 7 s was reached")


@pytest.mark.parametrize("stop", [True, False])
def test_the_target_ends_the_run_only_on_request(stop: bool) -> None:
    # α = 1/2 of half the way: distance √8 (3/4)^n ≤ 1/4, accuracy ≥ 0.8, from n = 9 on.
    grid = grid_of(pulled_app([ONES]), devices(1.0))
    seen = run(half(), grid, num_rounds=20, target_accuracy=0.8, stop_at_target=stop, eval_every=3)
    expected = (9, "the target accuracy of 0.8 was reached") if stop else (20, "20 updates")
    assert seen[-1].updates == expected[0]
    assert seen[-1].reason.startswith(expected[1])
    assert seen[-1].ending is (Ending.TARGET if stop else Ending.LIMIT)
    assert [e.updates for e in of(events.Evaluated, seen)] == [
        0, 3, 6, 9, *([] if stop else [12, 15, 18, 20])
    ]  # fmt: skip


def test_an_invalid_accuracy_is_left_out_of_the_mean() -> None:
    base = pulled_app([ONES, ONES])
    app = ClientApp()

    @app.train()
    @app.query()
    def pass_on(message: Message, context: Context) -> Message:
        return base(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        values = [math.nan, 0.5, 10**400]
        metrics = MetricRecord({"accuracy": values[int(context.node_config["partition-id"])]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    seen = run(half(), grid_of(app, devices(1.0, 1.0, 1.0)), num_rounds=1)
    assert [e.accuracy for e in of(events.Evaluated, seen)] == [0.5, 0.5]
    assert set(of(events.Evaluated, seen)[0].per_client) == {"c1"}


def test_an_interruption_ends_the_run_with_what_was_done() -> None:
    done: list[int] = []

    def interrupt(reply: Message, index: int) -> Message:
        done.append(index)
        if len(done) == 4:
            raise KeyboardInterrupt
        return reply

    seen: list[events.Event] = []
    grid = grid_of(pulled_app([8 * ONES], change=interrupt), devices(1.0))
    result = half().run(grid, MODEL, observe=seen.append)
    assert seen[-1] == events.RunEnded(4.0, 3, "interrupted by the user", Ending.INTERRUPTED)
    # The model goes 0 → 2 → 3.5 → 4.625.
    assert read(result.arrays).tolist() == [4.625] * 8


# State.


def busy_fleet(seed: int = 0) -> VirtualGrid:
    rng = np.random.default_rng(5)
    targets = [3 * np.eye(8)[index % 2] + 0.1 * rng.normal(size=8) for index in range(6)]
    fleet = [
        Device(jitter=0.3, drop=0.1),
        Device(seconds_per_round=3.0, jitter=0.5),
        Device(mean_online=9.0, mean_offline=3.0),
        *[Device(jitter=0.2)] * 3,
    ]
    return grid_of(pulled_app(targets), fleet, seed=seed)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_is_the_same_run_bit_for_bit(method: type[Method]) -> None:
    runs = []
    for _ in range(2):
        strategy = method(seed=3)
        seen = run(strategy, busy_fleet(seed=3), num_rounds=80, timeout=20.0, concurrency=4)
        models = {k: model.vector.tobytes() for k, model in strategy.models.items()}
        runs.append((seen, models))
    assert runs[0] == runs[1]
    other = run(method(seed=4), busy_fleet(seed=4), num_rounds=80, timeout=20.0, concurrency=4)
    assert other != runs[0][0]


@pytest.mark.parametrize("method", METHODS)
def test_time_in_the_reports_never_runs_backwards(method: type[Method]) -> None:
    seen = run(method(seed=1), busy_fleet(seed=1), num_rounds=120, timeout=20.0)
    times = [event.time for event in seen]
    assert times == sorted(times)
    assert [u.seq for u in of(events.UpdateApplied, seen)] == list(range(1, 121))


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_strategy_is_the_one_that_was_saved(method: type[Method]) -> None:
    strategy = method(seed=1)
    run(strategy, busy_fleet(), num_rounds=60, timeout=20.0, concurrency=4)
    saved = copy.deepcopy(strategy.state_dict())
    restored = method(seed=99)
    restored.load_state_dict(saved)
    assert restored.progress == strategy.progress
    assert restored.rng.random() == strategy.rng.random()
    assert list(restored.models) == list(strategy.models)
    for cluster, model in strategy.models.items():
        assert restored.models[cluster].version == model.version
        assert restored.models[cluster].vector.tobytes() == model.vector.tobytes()
        assert restored.models[cluster].vector is not model.vector
    for client in strategy.progress.fleet.clients:
        assert restored.clusters.main(client) == strategy.clusters.main(client)


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_strategy_goes_on_with_a_new_grid(method: type[Method]) -> None:
    strategy = method()
    run(strategy, grid_of(pulled_app(), devices(1.0, 2.0, 3.0)), num_rounds=20)
    restored = method()
    restored.load_state_dict(copy.deepcopy(strategy.state_dict()))
    seen = run(restored, grid_of(pulled_app(), devices(1.0, 2.0, 3.0)), num_rounds=40)
    assert [u.seq for u in of(events.UpdateApplied, seen)] == list(range(21, 41))
    assert {u.client for u in of(events.UpdateApplied, seen)} == {"c0", "c1", "c2"}
    assert all(event.returned for event in of(events.ClientJoined, seen))
    assert not of(events.UpdateRejected, seen)
    assert seen[-1].reason == "40 updates were applied"


def test_the_state_of_another_method_is_refused() -> None:
    strategy = FedBuff()
    run(strategy, grid_of(pulled_app(), devices(1.0)), num_rounds=1)
    with pytest.raises(ValueError, match="the state is of FedBuff, not FedAsync"):
        FedAsync().load_state_dict(strategy.state_dict())
