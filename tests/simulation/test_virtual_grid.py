"""The virtual grid: event queue, messages, churn, and cancelled messages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme import datasets
from raceme.core import events
from raceme.core.config import RunConfig
from raceme.core.timeline import Resumable, Timeline, timeline_of
from raceme.flower.messages import (
    CLIENT_APP_RAISED_EXCEPTION,
    NODE_UNAVAILABLE,
    REPLY_MESSAGE_UNAVAILABLE,
)
from raceme.records.store import read_events
from raceme.runs.experiment import simulate
from raceme.simulation import Device, Node, VirtualGrid
from raceme.simulation.virtual_grid import EventQueue

HUNDRED_BYTES = ArrayRecord({"w": Array("uint8", (99,), "raw", bytes(99))})
"""99 bytes of data, and one byte of the name."""


def echo_app() -> ClientApp:
    """An app that reports how often its node has answered."""
    app = ClientApp()

    @app.train()
    @app.evaluate()
    @app.query()
    def answer(message: Message, context: Context) -> Message:
        count = int(context.state.metric_records.get("count", {}).get("n", 0)) + 1
        context.state["count"] = MetricRecord({"n": count})
        return Message(RecordDict({"metrics": MetricRecord({"n": count})}), reply_to=message)

    return app


def grid_of(*devices: Device, app: ClientApp | None = None, seed: int = 0) -> VirtualGrid:
    """Nodes 1, 2, … with ten training examples each."""
    nodes = [Node(index + 1, device, examples=10) for index, device in enumerate(devices)]
    return VirtualGrid(app or echo_app(), nodes, seed=seed)


def train(node: int, ttl: float = 1000.0, arrays: int = 1, **config: float) -> Message:
    content = RecordDict({f"arrays-{index}": HUNDRED_BYTES for index in range(arrays)})
    content["config"] = ConfigRecord({name.replace("_", "-"): v for name, v in config.items()})
    return Message(content, node, "train", ttl=ttl)


def evaluate(node: int, ttl: float = 1000.0) -> Message:
    return Message(RecordDict(), node, "evaluate", ttl=ttl)


def query(node: int, ttl: float = 1000.0) -> Message:
    return Message(RecordDict(), node, "query", ttl=ttl)


def arrival(grid: VirtualGrid, message: Message) -> float:
    """Send a message and return the arrival time of its reply."""
    (message_id,) = grid.push_messages([message])
    (reply,) = grid.pull_messages([message_id])
    assert reply.metadata.reply_to_message_id == message_id
    return grid.now()


# Arrival times.


def test_a_round_is_download_computation_and_upload() -> None:
    # 100 bytes down at 50 B/s, 2 s + 10 examples · 2 epochs · 0.1 s, 100 bytes up at 20 B/s.
    device = Device(
        seconds_per_round=2.0, seconds_per_sample=0.1, bandwidth_down=50.0, bandwidth_up=20.0
    )
    assert arrival(grid_of(device), train(1, local_epochs=2)) == pytest.approx(2 + 4 + 5)


def test_only_one_model_comes_back_of_several_that_went() -> None:
    device = Device(seconds_per_round=0.0, bandwidth_down=50.0, bandwidth_up=50.0)
    assert arrival(grid_of(device), train(1, arrays=3)) == pytest.approx(6 + 2)


def test_compute_scale_shortens_the_computation_and_nothing_else() -> None:
    device = Device(seconds_per_round=8.0, bandwidth_down=100.0)
    assert arrival(grid_of(device), train(1, compute_scale=0.25)) == pytest.approx(1 + 2)


def test_without_bandwidth_transfers_take_no_time() -> None:
    assert arrival(grid_of(Device(seconds_per_round=3.0)), train(1)) == 3.0


def test_jitter_stays_within_its_bounds_and_differs_by_task() -> None:
    grid = grid_of(Device(seconds_per_round=10.0, jitter=0.2))
    ends = [0.0] + [arrival(grid, train(1)) for _ in range(50)]
    durations = np.diff(ends)
    assert durations.min() >= 8.0
    assert durations.max() <= 12.0
    assert len(set(durations)) == 50


def test_a_busy_device_works_on_one_task_after_the_other() -> None:
    grid = grid_of(Device(seconds_per_round=2.0), Device(seconds_per_round=5.0))
    ids = list(grid.push_messages([train(1), train(1), train(2)]))
    seen = []
    while replies := grid.wait(ids):
        seen += [(grid.now(), reply.metadata.reply_to_message_id) for reply in replies]
    assert seen == [(2.0, ids[0]), (4.0, ids[1]), (5.0, ids[2])]


def test_queries_and_evaluations_cost_no_time_and_do_not_wait_for_a_busy_device() -> None:
    grid = grid_of(Device(seconds_per_round=7.0))
    grid.push_messages([train(1)])
    assert arrival(grid, query(1)) == 0.0
    assert arrival(grid, evaluate(1)) == 0.0


def test_a_node_keeps_its_state_between_messages() -> None:
    grid = grid_of(Device(), Device())
    replies = grid.send_and_receive([evaluate(1), evaluate(1), evaluate(2)])
    counts = [reply.content["metrics"]["n"] for reply in replies]
    assert counts == [1, 2, 1]


# Ways to wait.


def test_the_grid_is_its_own_timeline_and_can_be_saved() -> None:
    grid = grid_of(Device())
    assert isinstance(grid, Timeline)
    assert isinstance(grid, Resumable)
    assert timeline_of(grid) is grid
    assert grid.is_virtual


def test_wait_stops_at_its_deadline_and_goes_on_from_there() -> None:
    grid = grid_of(Device(seconds_per_round=5.0))
    ids = list(grid.push_messages([train(1)]))
    assert grid.wait(ids, until=2.0) == []
    assert grid.now() == 2.0
    assert len(grid.wait(ids, until=5.0)) == 1
    assert grid.now() == 5.0
    assert grid.wait(ids, until=3.0) == []
    assert grid.now() == 5.0, "a deadline in the past does not turn the clock back"


def test_wait_keeps_replies_for_those_who_ask_later() -> None:
    grid = grid_of(Device(seconds_per_round=1.0), Device(seconds_per_round=2.0))
    fast, slow = grid.push_messages([train(1), train(2)])
    assert grid.wait([slow])[0].metadata.src_node_id == 2
    assert grid.now() == 2.0
    assert grid.wait([fast])[0].metadata.src_node_id == 1
    assert grid.now() == 2.0
    assert grid.wait([fast, slow]) == []


def test_wait_returns_when_a_device_comes_or_goes_but_pull_does_not() -> None:
    devices = Device(seconds_per_round=5.0), Device(online=((0.0, 3.0),))
    grid = grid_of(*devices)
    ids = list(grid.push_messages([train(1)]))
    assert grid.wait(ids) == []
    assert grid.now() == 3.0
    assert grid.get_node_ids() == [1]
    grid = grid_of(*devices)
    ids = list(grid.push_messages([train(1)]))
    assert len(list(grid.pull_messages(ids))) == 1
    assert grid.now() == 5.0


def test_pull_returns_all_that_have_arrived_else_the_next() -> None:
    grid = grid_of(*[Device(seconds_per_round=float(seconds)) for seconds in (1, 2, 3)])
    ids = list(grid.push_messages([train(1), train(2), train(3)]))
    assert grid.wait([], until=2.5) == []
    assert [r.metadata.src_node_id for r in grid.pull_messages(ids)] == [1, 2]
    assert grid.now() == 2.5
    assert [r.metadata.src_node_id for r in grid.pull_messages(ids)] == [3]
    assert grid.now() == 3.0
    assert list(grid.pull_messages(ids)) == []


def test_send_and_receive_waits_for_the_last_one() -> None:
    grid = grid_of(Device(seconds_per_round=4.0), Device(seconds_per_round=1.0))
    replies = grid.send_and_receive([train(1), train(2)])
    assert [reply.metadata.src_node_id for reply in replies] == [2, 1]
    assert grid.now() == 4.0


def test_send_and_receive_gives_up_at_its_timeout() -> None:
    grid = grid_of(Device(seconds_per_round=4.0), Device(seconds_per_round=1.0))
    assert grid.wait([], until=10.0) == []
    replies = grid.send_and_receive([train(1), train(2)], timeout=3.0)
    assert [reply.metadata.src_node_id for reply in replies] == [2]
    assert grid.now() == 13.0


@pytest.mark.parametrize("until", [None, float("inf")])
def test_waiting_when_nothing_can_ever_happen_returns_at_once(until: float | None) -> None:
    grid = grid_of(Device())
    assert grid.wait([], until) == []
    assert grid.wait(["unknown"], until) == []
    assert list(grid.pull_messages(["unknown"])) == []
    assert list(grid.send_and_receive([])) == []
    assert grid.now() == 0.0


def test_pulling_what_cannot_come_ends_although_devices_come_and_go_for_ever() -> None:
    grid = grid_of(Device(mean_online=1.0, mean_offline=1.0))
    assert list(grid.pull_messages(["unknown"])) == []


# Devices that come and go.


def test_devices_join_and_leave_at_set_times() -> None:
    grid = grid_of(Device(online=((0, 10), (30, 40))), Device(online=((20, float("inf")),)))
    seen = [(grid.now(), grid.get_node_ids())]
    while grid.wait([]) == [] and grid.now() > seen[-1][0]:
        seen.append((grid.now(), grid.get_node_ids()))
    assert seen == [(0, [1]), (10, []), (20, [2]), (30, [2, 1]), (40, [2])]


def test_a_device_that_leaves_as_another_replies_has_left_by_then() -> None:
    # The end of the second period is scheduled after the task whose reply arrives at the same time.
    grid = grid_of(Device(seconds_per_round=20.0), Device(online=((0, 10), (15, 20))))
    ids = list(grid.push_messages([train(1)]))
    while not grid.wait(ids):
        pass
    assert grid.now() == 20.0
    assert grid.get_node_ids() == [1]


def test_random_absences_have_the_means_that_were_asked_for() -> None:
    grid = grid_of(Device(mean_online=30.0, mean_offline=10.0))
    online = 0.0
    for _ in range(4000):
        before, was_online = grid.now(), bool(grid.get_node_ids())
        grid.wait([])
        online += (grid.now() - before) * was_online
    assert online / grid.now() == pytest.approx(0.75, abs=0.02)


# Lost tasks: Flower's error reply, when the time to live ends.


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(drop=1.0), "lost on the way"),
        (Device(seconds_per_round=5.0, online=((0.0, 4.0),)), "went offline"),
        (Device(online=((50.0, 60.0),)), "is offline"),
        (Device(seconds_per_round=20.5), "longer than its time to live"),
    ],
)
def test_a_lost_task_is_answered_by_an_error_when_its_time_to_live_ends(
    device: Device, reason: str
) -> None:
    grid = grid_of(device)
    (reply,) = grid.send_and_receive([train(1, ttl=20.0)])
    assert grid.now() == 20.0
    assert reply.has_error()
    is_away = reason.endswith("offline")
    assert reply.error.code == (NODE_UNAVAILABLE if is_away else REPLY_MESSAGE_UNAVAILABLE)
    assert reason in reply.error.reason
    assert reply.metadata.src_node_id == 1


def test_a_device_back_in_time_does_not_find_its_old_task() -> None:
    grid = grid_of(Device(seconds_per_round=5.0, online=((0, 4), (6, 100))))
    lost = list(grid.push_messages([train(1, ttl=30.0)]))
    assert [grid.wait([]), grid.wait([])] == [[], []]
    assert arrival(grid, train(1)) == 11.0
    (reply,) = grid.pull_messages(lost)
    assert reply.has_error()
    assert grid.now() == 30.0


def test_a_device_that_goes_offline_twice_loses_its_task_once() -> None:
    grid = grid_of(Device(seconds_per_round=5.0, online=((0, 4), (6, 8))))
    (reply,) = grid.send_and_receive([train(1, ttl=5.0)])
    assert "went offline" in reply.error.reason
    assert [grid.wait([]), grid.wait([])] == [[], []]
    assert (grid.now(), grid.get_node_ids()) == (8.0, [])


def test_a_message_to_an_unknown_node_is_refused_at_once() -> None:
    grid = grid_of(Device())
    (reply,) = grid.send_and_receive([train(99)])
    assert reply.error.code == NODE_UNAVAILABLE
    assert grid.now() == 0.0


def test_a_lost_task_is_never_worked_on() -> None:
    app = ClientApp()

    @app.train()
    def never(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    grid = grid_of(Device(drop=1.0), Device(online=((0.0, 0.5),)), app=app)
    assert all(reply.has_error() for reply in grid.send_and_receive([train(1), train(2)]))


# Errors in a ClientApp.


def test_an_exception_in_the_client_app_is_an_error_reply_in_its_time() -> None:
    app = ClientApp()

    @app.train()
    def fail(message: Message, context: Context) -> Message:
        raise RuntimeError("no such file: x.npz")

    grid = grid_of(Device(seconds_per_round=3.0), app=app)
    (reply,) = grid.send_and_receive([train(1)])
    assert grid.now() == 3.0
    assert reply.error.code == CLIENT_APP_RAISED_EXCEPTION
    assert reply.error.reason.splitlines()[0] == "RuntimeError: no such file: x.npz"


@pytest.mark.parametrize("kind", ["nothing", "foreign"])
def test_an_answer_that_is_no_reply_is_an_error_reply(kind: str) -> None:
    app = ClientApp()

    @app.train()
    def odd(message: Message, context: Context) -> Message | None:
        return None if kind == "nothing" else Message(RecordDict(), 5, "train")

    (reply,) = grid_of(Device(), app=app).send_and_receive([train(1)])
    assert reply.error.code == CLIENT_APP_RAISED_EXCEPTION


def test_what_one_client_writes_into_its_message_does_not_reach_the_others() -> None:
    app = ClientApp()

    @app.train()
    def vandal(message: Message, context: Context) -> Message:
        config = message.content["config"]
        reply = RecordDict({"metrics": MetricRecord({"lr": config["lr"]})})
        config["lr"] = 0.0
        del message.content["arrays"]["w"]
        return Message(reply, reply_to=message)

    arrays = ArrayRecord(dict(HUNDRED_BYTES))
    shared = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.5})})
    grid = grid_of(Device(), Device(), app=app)
    replies = grid.send_and_receive([Message(shared, node, "train") for node in (1, 2)])
    assert [reply.content["metrics"]["lr"] for reply in replies] == [0.5, 0.5]
    assert list(arrays) == ["w"]


# Properties under churn, losses and jitter.

DEVICES = st.lists(
    st.builds(
        Device,
        seconds_per_round=st.floats(0.0, 5.0),
        bandwidth_down=st.sampled_from([0.0, 40.0]),
        jitter=st.floats(0.0, 1.0),
        drop=st.sampled_from([0.0, 0.3, 1.0]),
        mean_online=st.just(4.0),
        mean_offline=st.just(2.0),
    )
    | st.builds(Device, online=st.sampled_from([(), ((0, 3),), ((2, 6), (6, 9)), ((5, 8),)])),
    min_size=1,
    max_size=5,
)
PLANS = st.lists(
    st.tuples(
        st.integers(1, 6),  # a node, which may not exist
        st.sampled_from([train, evaluate, query]),
        st.floats(0.5, 30.0),  # time to live
        st.floats(0.0, 3.0),  # pause before the next message
    ),
    min_size=1,
    max_size=25,
)
Happening = tuple[float, int, str, bool]


def play(devices: list[Device], plan: list, seed: int) -> tuple[list[Happening], Mapping]:
    """Send messages over time, and take in replies as they arrive; then wait for the rest."""
    grid = grid_of(*devices, seed=seed)
    open_ids: dict[str, tuple[float, float]] = {}
    sent: dict[str, tuple[float, float]] = {}
    seen: list[Happening] = []

    def take(replies: list[Message]) -> None:
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            del open_ids[message_id]  # a KeyError here: a duplicate or unrequested reply
            seen.append((grid.now(), reply.metadata.src_node_id, message_id, reply.has_error()))

    for node, make, ttl, pause in plan:
        for message_id in grid.push_messages([make(node, ttl=ttl)]):
            open_ids[message_id] = sent[message_id] = (grid.now(), ttl)
        until = grid.now() + pause
        while grid.now() < until:
            take(grid.wait(open_ids, until))
    while open_ids:
        take(grid.wait(open_ids))
    return seen, sent


@settings(max_examples=60)
@given(devices=DEVICES, plan=PLANS, seed=st.integers(0, 5))
def test_everything_is_answered_once_in_order_of_time(
    devices: list[Device], plan: list, seed: int
) -> None:
    seen, sent = play(devices, plan, seed)
    times = [time for time, *_ in seen]
    assert times == sorted(times), "the clock never runs backwards"
    assert sorted(message_id for _, _, message_id, _ in seen) == sorted(sent)
    for time, _, message_id, is_lost in seen:
        sent_at, ttl = sent[message_id]
        assert sent_at <= time <= sent_at + ttl
        # An error arrives when the time to live ends, or at once for an unknown node.
        assert not is_lost or time in (sent_at, sent_at + ttl)


@settings(max_examples=30)
@given(devices=DEVICES, plan=PLANS, seed=st.integers(0, 5))
def test_the_same_seed_is_the_same_run(devices: list[Device], plan: list, seed: int) -> None:
    assert play(devices, plan, seed)[0] == play(devices, plan, seed)[0]


def test_local_steps_cost_the_share_of_an_epoch_that_they_are() -> None:
    # 10 examples at 0.1 s each: 4 mini-batches of 5 are two passes, whatever local-epochs is.
    device = Device(seconds_per_round=2.0, seconds_per_sample=0.1)
    settings = {"local_steps": 4, "batch_size": 5}
    assert arrival(grid_of(device), train(1, **settings)) == pytest.approx(2 + 2)


def test_numbers_that_answer_a_question_cost_no_upload() -> None:
    # 100 bytes down at 50 B/s, 2 s of work; the reply contains no model.
    device = Device(seconds_per_round=2.0, bandwidth_down=50.0, bandwidth_up=20.0)
    assert arrival(grid_of(device), train(1, kind="losses")) == pytest.approx(2 + 2)


def test_times_per_sample_follow_data_that_grow(tmp_path: Path) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text("[device]\nseconds-per-round = 1.0\nseconds-per-sample = 0.01")
    keys = {"clients": 2, "partition": "iid", "devices": str(devices), "workers": "0"}
    drift = {"drift": "incremental", "drift-at": "4 updates, 8 updates"}
    limits = {"strategy": "fedasync", "max-updates": 12, "out": str(tmp_path / "out")}
    config = RunConfig.from_mapping({**keys, **drift, **limits})
    simulate(config)
    found = {
        (update.client, update.step): update.time - update.dispatched_at
        for update in read_events(tmp_path / "out")
        if isinstance(update, events.UpdateApplied)
    }
    wanted = {
        (client, step): 1 + 0.01 * len(datasets.client_data(config, int(client[-1]), step).y_train)
        for client, step in found
    }
    assert found == pytest.approx(wanted)
    assert len({round(seconds, 6) for seconds in wanted.values()}) >= 3


def test_replies_are_pulled_by_the_name_of_flower_1_43_too() -> None:
    grid = grid_of(Device())
    sent = list(grid.push_messages([query(1)]))
    (reply,) = grid.pull_messages(reply_to_message_ids=sent)
    assert reply.metadata.reply_to_message_id == sent[0]


# The event queue: the order of events, and cancellation.


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


# Replies to tasks that are closed.


def counting_app(state: bool) -> tuple[ClientApp, list[int]]:
    """An app that records which nodes work; with `state`, clients count their answers."""
    app, worked = ClientApp(), []

    @app.train()
    @app.query()
    def answer(message: Message, context: Context) -> Message:
        worked.append(context.node_id)
        count = worked.count(context.node_id)
        if state:
            context.state["count"] = MetricRecord({"n": count})
        return Message(RecordDict({"metrics": MetricRecord({"n": count})}), reply_to=message)

    return app, worked


def test_a_forgotten_reply_never_comes_and_is_not_kept() -> None:
    grid = grid_of(*[Device(seconds_per_round=float(seconds)) for seconds in (1, 2, 3)])
    here, open_, wanted = grid.push_messages([train(1), train(2), train(3)])
    assert grid.wait([], until=1.5) == []
    grid.forget([here, open_, "unknown"])
    assert [r.metadata.src_node_id for r in grid.wait([here, open_, wanted])] == [3]
    assert list(grid.pull_messages([here, open_])) == []
    assert grid.wait([here, open_]) == []
    assert grid.now() == 3.0
    tree = grid.state_dict()
    assert tree["arrived"] == tree["pending"] == tree["queue"]["events"] == []


def test_a_forgotten_task_keeps_its_device_busy_and_is_not_worked_on() -> None:
    app, worked = counting_app(state=False)
    grid = grid_of(Device(seconds_per_round=4.0), app=app)
    (lost,) = grid.push_messages([train(1)])
    grid.forget([lost])
    assert arrival(grid, train(1)) == 8.0
    assert worked == [1]


def test_where_clients_keep_a_state_a_forgotten_task_changes_it() -> None:
    app, worked = counting_app(state=True)
    grid = grid_of(Device(seconds_per_round=4.0), Device(), app=app)
    assert arrival(grid, query(2)) == 0.0
    slow, again = grid.push_messages([train(1), train(1)])
    grid.forget([slow])
    assert list(grid.pull_messages([slow])) == []
    (reply,) = grid.pull_messages([again])
    assert (grid.now(), reply.content["metrics"]["n"]) == (8.0, 2)
    assert worked == [2, 1, 1]
    assert grid.state_dict()["arrived"] == []


def test_a_forgotten_task_is_over_when_its_device_goes_offline() -> None:
    app, worked = counting_app(state=True)
    grid = grid_of(Device(seconds_per_round=4.0, online=((0, 3), (5, 99))), Device(), app=app)
    assert arrival(grid, query(2)) == 0.0
    (slow,) = grid.push_messages([train(1)])
    grid.forget([slow])
    assert grid.wait([]) == grid.wait([]) == []
    assert arrival(grid, train(1)) == 9.0
    assert worked == [2, 1]
    assert grid.state_dict()["pending"] == []


@pytest.mark.parametrize("state", [False, True])
def test_a_saved_grid_remembers_what_was_forgotten(state: bool) -> None:
    def restored(at: float) -> list[tuple[float, int, int]]:
        app, worked = counting_app(state)
        grid = grid_of(Device(seconds_per_round=4.0, jitter=0.5), Device(), app=app)
        list(grid.pull_messages(grid.push_messages([query(2)])))
        ids = list(grid.push_messages([train(1), train(1), train(2)]))
        grid.forget(ids[:1])
        assert grid.wait([], until=at) == []
        tree = grid.state_dict()
        grid = grid_of(Device(seconds_per_round=4.0, jitter=0.5), Device(), app=app)
        grid.load_state_dict(tree)
        assert grid.keeps_messages
        replies = [reply for _ in (1, 2) for reply in grid.pull_messages(ids)]
        assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids[1:])
        return [(grid.now(), r.metadata.src_node_id, worked.count(1)) for r in replies]

    assert restored(0.0) == restored(1.0) != []


def test_replies_that_nobody_fetched_come_in_the_order_of_their_arrival() -> None:
    grid = grid_of(*[Device(seconds_per_round=float(seconds)) for seconds in (3, 1, 2, 4)])
    ids = list(grid.push_messages([train(node) for node in (1, 2, 3, 4)]))
    assert grid.wait([], until=3.5) == []
    # Three replies are available: a short list of ids
    # is looked up, for a long one they are scanned.
    assert [r.metadata.src_node_id for r in grid.wait([ids[0], ids[1]])] == [2]
    assert [r.metadata.src_node_id for r in grid.wait(ids)] == [3]
    assert [r.metadata.src_node_id for r in grid.pull_messages(ids)] == [1]


def test_waiting_looks_at_no_reply_that_it_does_not_want() -> None:
    class Wanted(list[str]):
        """Ids that count their comparisons."""

        asked = 0

        def __contains__(self, key: object) -> bool:
            self.asked += 1
            return super().__contains__(key)

    grid = grid_of(Device())
    given_up = list(grid.push_messages([query(1) for _ in range(1000)]))
    assert grid.wait([], until=1.0) == []
    wanted = Wanted(grid.push_messages([query(1)]))
    assert len(grid.wait(wanted)) == 1
    assert wanted.asked < 5
    assert len(list(grid.pull_messages(given_up))) == 1000
