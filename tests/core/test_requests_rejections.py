"""Unusable replies: how they are recognised, and the back-off of their clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
import pytest
from fleets import MODEL, Change, grid_of, pulled_app, write
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ONES, devices, half, of, run

from raceme.core import events
from raceme.core.messages import ModelSpec
from raceme.core.requests import InFlight, InvalidReplyError, Outcome, Update, read_update
from raceme.core.schedulers import InWindows
from raceme.core.scheduling import Scheduler
from raceme.flower.messages import identify_process, set_message_id
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import CASA, FedAsync, FedBuff, Method, Plan, Standalone

METHODS = [CASA, FedAsync, FedBuff, Standalone]


# Reasons of rejections.


def with_arrays(values: np.ndarray | ArrayRecord) -> Change:
    def change(reply: Message, index: int) -> Message:
        reply.content["arrays"] = values if isinstance(values, ArrayRecord) else write(values)
        return reply

    return change


def without(name: str) -> Change:
    def change(reply: Message, index: int) -> Message:
        del reply.content[name]
        return reply

    return change


def stating(record: str, **values: float) -> Change:
    def change(reply: Message, index: int) -> Message:
        for name, value in values.items():
            reply.content[record][name.replace("_", "-")] = value
        return reply

    return change


def fails(reply: Message, index: int) -> Message:
    raise OSError("the disk is full")


def fails_on_a_device(reply: Message, index: int) -> Message:
    del reply.__dict__["_content"]
    raised = "<class 'torch.OutOfMemoryError'>:<'the card's memory'>"
    reply.__dict__.update(_content=None, _error=Error(2, raised))
    return reply


def fails_silently(reply: Message, index: int) -> Message:
    del reply.__dict__["_content"]
    reply.__dict__.update(_content=None, _error=Error(0, "  \n "))
    return reply


INVALID = [
    pytest.param(with_arrays(np.nan * ONES), "not finite", id="NaN"),
    pytest.param(with_arrays(np.inf * ONES), "not finite", id="infinity"),
    pytest.param(with_arrays(3.4e38 * ONES), "too large", id="largest number"),
    pytest.param(with_arrays(-3.4e38 * ONES), "too large", id="smallest number"),
    pytest.param(with_arrays(ArrayRecord({"w": Array(ONES)})), "wrong arrays", id="one array"),
    pytest.param(
        with_arrays(ArrayRecord({"w": Array(ONES), "b": Array(ONES)})), "wrong shape", id="shape"
    ),
    pytest.param(without("arrays"), "missing records: 0 ArrayRecords", id="no arrays"),
    pytest.param(without("metrics"), "missing records: 0 MetricRecords", id="no metrics"),
    pytest.param(stating("metrics", num_examples=0), "no examples", id="zero examples"),
    pytest.param(stating("metrics", num_examples=math.nan), "no examples", id="NaN examples"),
    pytest.param(stating("metrics", loss=10**400), "a metric is too large", id="huge metric"),
    pytest.param(stating("metrics", cpu_seconds=math.nan), "nan cpu-seconds", id="NaN seconds"),
    pytest.param(stating("metrics", cpu_seconds=-1.0), "-1 cpu-seconds", id="negative seconds"),
    pytest.param(stating("metrics", cpu_seconds=1e9), "1e+09 cpu-seconds", id="many seconds"),
    pytest.param(stating("config", version=77), "unknown base version 77", id="version"),
    pytest.param(stating("config", task=77), "repeated or foreign task 77", id="task"),
    pytest.param(fails, "OSError: the disk is full", id="exception"),
    pytest.param(fails_on_a_device, "error 2: OutOfMemoryError: the card's memory", id="device"),
    pytest.param(fails_silently, "error 0: no reason given", id="error without a reason"),
]


@pytest.mark.parametrize(("spoil", "reason"), INVALID)
def test_an_invalid_reply_is_reported_and_changes_nothing(spoil: Change, reason: str) -> None:
    strategy, spoiled = half(), []

    def once(reply: Message, index: int) -> Message:
        if index == 1 and not spoiled:
            spoiled.append(reply)
            return spoil(reply, index)
        return reply

    grid = grid_of(pulled_app([8 * ONES, 8 * ONES], change=once), devices(9.0, 1.0))
    seen = run(strategy, grid, num_rounds=1)
    (rejected,) = of(events.UpdateRejected, seen)
    assert (rejected.time, rejected.client, rejected.dispatched_at) == (1.0, "c1", 0.0)
    assert reason in rejected.reason
    assert "<" not in rejected.reason
    assert strategy.progress.rejected == 1
    # The client gets work again at once, and its next update is used: half way from 0 to 4.
    (update,) = of(events.UpdateApplied, seen)
    assert (update.time, update.client, update.base_version) == (2.0, "c1", 0)
    assert strategy.models[0].vector.tolist() == [2.0] * 8


@pytest.mark.parametrize("method", METHODS)
def test_no_method_lets_an_invalid_reply_into_a_model(method: type[Method]) -> None:
    strategy = method()
    grid = grid_of(pulled_app(change=with_arrays(np.nan * ONES)), devices(1.0, 2.0))
    run(strategy, grid)
    assert strategy.progress.updates == 0
    assert all(not model.vector.any() for model in strategy.models.values())


def test_a_client_backs_off_longer_after_each_invalid_reply() -> None:
    broken = pulled_app(change=lambda reply, index: fails(reply, index) if index else reply)
    seen = run(half(), grid_of(broken, devices(1.0, 1.0)), num_rounds=300)
    times = [r.time for r in of(events.UpdateRejected, seen)]
    # A task takes 1 s; the pauses are 0, 1, 3, 7, 15, 31, 60, 60, …
    assert np.diff([0.0, *times]).tolist() == [1, 1, 2, 4, 8, 16, 32, 61, 61, 61]


def test_a_valid_reply_ends_the_back_off() -> None:
    attempts: Counter[int] = Counter()

    def change(reply: Message, index: int) -> Message:
        attempts[index] += 1
        return reply if attempts[index] % 3 == 0 else fails(reply, index)

    seen = run(half(), grid_of(pulled_app(change=change), devices(1.0)), num_rounds=2)
    assert [r.time for r in of(events.UpdateRejected, seen)] == [1.0, 2.0, 5.0, 6.0]
    assert [u.time for u in of(events.UpdateApplied, seen)] == [4.0, 8.0]


def test_a_client_that_has_failed_for_weeks_does_not_end_the_run() -> None:
    strategy = half()

    def age(event: events.Event) -> None:
        if isinstance(event, events.UpdateRejected):
            strategy.progress.fleet.clients["c1"].failures = 20_000

    broken = pulled_app(change=lambda reply, index: fails(reply, index) if index else reply)
    strategy.run(grid_of(broken, devices(1.0, 1.0)), MODEL, 200, observe=age)
    assert strategy.progress.updates == 200


def test_an_error_that_all_clients_raise_ends_a_simulation_and_is_its_reason() -> None:
    seen = run(half(), grid_of(pulled_app(change=fails), devices(1.0, 1.0)))
    assert len(of(events.UpdateRejected, seen)) == 6
    assert seen[-1].reason.startswith("every client raised the same error 3 times: error 2")
    assert seen[-1].reason.endswith("OSError: the disk is full")


def test_a_run_without_valid_replies_ends_and_names_the_reason() -> None:
    def fails_in_its_own_way(reply: Message, index: int) -> Message:
        raise OSError(f"disk {index} is full")

    seen = run(half(), grid_of(pulled_app(change=fails_in_its_own_way), devices(1.0, 1.0)))
    assert seen[-1].updates == 0
    assert seen[-1].reason.startswith("the last 100 replies were unusable; the last one: c")
    assert seen[-1].reason.endswith("is full")


def test_a_lost_task_is_given_up_at_its_timeout_and_the_client_gets_work_again() -> None:
    seen = run(half(), grid_of(pulled_app(), [Device(drop=1.0)]), timeout=30.0, max_time=95.0)
    # Pauses of 0 and 1 s after the first two failures.
    assert [r.time for r in of(events.UpdateRejected, seen)] == [30.0, 60.0, 91.0]


# Replies without a task.


class Echoing(VirtualGrid):
    """A grid on which each reply arrives twice."""

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        replies = super().wait(message_ids, until)
        return [reply for reply in replies for _ in range(2)]


class Intruded(VirtualGrid):
    """A grid on which, with every reply, a node that was never greeted sends its own model."""

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        replies = super().wait(message_ids, until)
        for _ in replies[:]:
            model = RecordDict({"arrays": write(np.full(8, 99.0))})
            asked = Message(RecordDict(), 666, "train")
            set_message_id(asked, "never sent")
            replies.append(Message(model, reply_to=asked))
        return replies


class Tenacious(VirtualGrid):
    """A grid that also delivers replies to cancelled messages."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.pushed = [*getattr(self, "pushed", []), *super().push_messages(messages)]
        return self.pushed[-1:]

    def forget(self, message_ids: Iterable[str]) -> None:
        pass

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        return super().wait(self.pushed, until)


class InSpans(FedAsync):
    """FedAsync in windows of 2.5 s."""

    def scheduler(self) -> Scheduler:
        return InWindows(2.5, lambda online, rng: online)


def on_grid(kind: type[VirtualGrid], strategy: Method, seconds: float) -> list[events.Event]:
    node = Node(100, Device(seconds_per_round=seconds), {"partition-id": 0}, examples=10)
    seen: list[events.Event] = []
    targets = [np.ones(8)]
    plan = Plan(eval_every=1000, max_time=6.5)
    strategy.run(kind(pulled_app(targets), [node]), MODEL, 0, plan=plan, observe=seen.append)
    return seen


@pytest.mark.parametrize(("kind", "whose"), [(Echoing, "c0"), (Intruded, "node 666")])
def test_an_unexpected_reply_changes_nothing_and_is_counted(
    kind: type[VirtualGrid], whose: str
) -> None:
    plain, disturbed = half(), half()
    on_grid(VirtualGrid, plain, 1.0)
    seen = on_grid(kind, disturbed, 1.0)
    np.testing.assert_array_equal(disturbed.models[0].vector, plain.models[0].vector)
    assert disturbed.progress.updates == plain.progress.updates == 6
    rejected = of(events.UpdateRejected, seen)
    assert {(r.client, r.reason[:20]) for r in rejected} == {(whose, "no task waits for it")}
    assert len(rejected) == disturbed.progress.rejected >= 6
    # Such replies do not count towards the limit that ends a run.
    assert not disturbed.progress.rejected_in_a_row


def test_a_reply_to_a_task_that_was_given_up_is_ignored() -> None:
    # Windows end at 2.5 s and 5 s, and each task takes 2 s, one after the other: those sent at 2 s
    # and 2.5 s time out with their windows, and their replies arrive at 4 s and 6 s.
    seen = on_grid(Tenacious, InSpans(), 2.0)
    rejected = of(events.UpdateRejected, seen)
    assert [(r.dispatched_at, r.time, r.reason[:20]) for r in rejected] == [
        (2.0, 2.5, "its window ended fir"),
        (4.0, 4.0, "no task waits for it"),
        (2.5, 5.0, "its window ended fir"),
        (6.0, 6.0, "no task waits for it"),
    ]
    assert [u.time for u in of(events.UpdateApplied, seen)] == [2.0]


# Validation of any reply.

SPEC = ModelSpec.of(MODEL)
TASK = InFlight(3, "c0", cluster=0, version=5, updates=9, sent_at=1.0, bytes_down=0)
NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1e39, -1e300])
ARRAYS = st.builds(
    lambda values, shape, kind: Array(np.resize(np.array(values), shape).astype(kind)),
    st.lists(NUMBERS, min_size=1, max_size=8),
    st.sampled_from([(4,), (2, 2), (4, 1), (), (0,), (5,)]),
    st.sampled_from([np.float32, np.float64, np.complex64]),
)
RECORDS = st.dictionaries(st.sampled_from(["w", "b", "c"]), ARRAYS, max_size=3).map(ArrayRecord)
GOOD = st.just(MODEL)
METRICS = st.dictionaries(
    st.sampled_from(["num-examples", "train-loss", "accuracy", "other"]),
    st.integers() | st.floats() | st.lists(st.floats(), max_size=2) | st.just(10**400),
).map(MetricRecord)
ECHOES = st.dictionaries(
    st.sampled_from(["task", "version"]), st.sampled_from([3, 5, -1, 5.0, "5", b"5", [5]])
).map(ConfigRecord)


@st.composite
def contents(draw: st.DrawFn) -> RecordDict:
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {}
    for index in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        records[f"arrays-{index}"] = draw(GOOD | RECORDS)
    for index in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        records[f"metrics-{index}"] = draw(METRICS)
    if draw(st.booleans()):
        records["config"] = draw(ECHOES | METRICS)
    return RecordDict(records)


@settings(max_examples=300)
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning:test_rejections")
@given(contents())
def test_any_reply_is_a_valid_update_or_a_rejection(content: RecordDict) -> None:
    identify_process()
    reply = Message(content, 1, "train")
    try:
        update = read_update(reply, TASK, SPEC)
    except InvalidReplyError:
        return
    assert update.vector.shape == (8,)
    assert update.vector.dtype == np.float32
    assert np.isfinite(update.vector).all()
    assert update.num_examples >= 1
    stated = content.config_records.get("config", {})
    assert stated.get("version", TASK.version) == TASK.version
    assert stated.get("task", TASK.number) == TASK.number


def test_a_change_that_would_spoil_a_model_is_refused_and_what_was_placed_is_reported() -> None:
    class Spoils(FedAsync):
        """Founds a cluster, and then returns an invalid model, once."""

        def on_update(self, update: Update) -> Outcome:
            if len(self.models) == 1:
                self.clusters.found(self.models[0].copy(), ["c0"])
                self.models[0].move(np.inf * ONES)
            return super().on_update(update)

    strategy = Spoils()
    seen = run(strategy, grid_of(pulled_app([8 * ONES]), devices(1.0)), num_rounds=2)
    (rejected,) = of(events.UpdateRejected, seen)
    assert (rejected.time, rejected.reason) == (1.0, "the model would hold NaN or infinity")
    assert [u.time for u in of(events.UpdateApplied, seen)] == [2.0, 3.0]
    assert np.isfinite(strategy.models[0].vector).all()
    found = [e for e in of(events.ClustersChanged, seen) if e.made]
    assert [(e.time, e.memberships) for e in found] == [(1.0, {"c0": {1: 1.0}})]
