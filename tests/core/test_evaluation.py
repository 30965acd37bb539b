"""Evaluations that take time: all clients test the same models, each when it is idle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from types import MappingProxyType

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp import ClientApp
from runs import ONES, devices, half, of, run

from raceme.core import evaluation, events
from raceme.core.evaluation import score_from
from raceme.core.events import Ending, Evaluated
from raceme.core.progress import ClientScore, weighted_accuracy
from raceme.core.schedulers import OnRequest, RequestParameters
from raceme.core.scheduling import Scheduler
from raceme.core.strategy import Method, Needs
from raceme.simulation import Device, Node, VirtualGrid
from raceme.simulation.devices import Workload, training_cost
from raceme.strategies import FedAsync, FedAvg, Plan


def costly(grid: VirtualGrid) -> VirtualGrid:
    """Send evaluations as messages that take time, as on devices."""
    grid.free_evaluation = False
    return grid


def accuracy(*distances: float) -> float:
    """Return the mean accuracy of clients with these distances to their targets in each number."""
    return float(np.mean([1 / (1 + abs(d) * np.sqrt(8)) for d in distances]))


def test_all_clients_test_the_same_models_each_when_it_is_next_idle() -> None:
    # Targets 8 and −8; c0 needs 1 s, c1 3 s. The model is 2 at 1 s and 3.5 at 2 s; at 3 s c1's
    # −4 makes it −0.25, and then c0's (3.5 + 8) / 2 = 5.75 makes it 2.75.
    grid = costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.0)))
    seen = run(half(), grid, num_rounds=4, eval_every=1)
    first, second, last = of(Evaluated, seen)
    assert (first.time, first.updates, first.accuracy) == (0.0, 0, pytest.approx(accuracy(8, 8)))
    # c1 is free at 3 s, and tests the model of 1 s.
    assert (second.time, second.updates) == (1.0, 1)
    assert second.accuracy == pytest.approx(accuracy(6, 10))
    assert (second.answered, second.asked, second.counts) == (2, 2, True)
    assert [(u.time, u.client) for u in of(events.UpdateApplied, seen)] == [
        (1.0, "c0"),
        (2.0, "c0"),
        (3.0, "c1"),
        (3.0, "c0"),
    ]
    # The evaluation that begins when that one is over is the run's last.
    assert (last.updates, last.accuracy) == (4, pytest.approx(accuracy(2.75 - 8, 2.75 + 8)))
    index = [seen.index(event) for event in (second, last)]
    assert seen.index(of(events.UpdateApplied, seen)[1]) < index[0] < index[1]


@pytest.mark.parametrize("concurrency", [0, 1])
@pytest.mark.parametrize("method", [half, FedAvg])
def test_a_client_whose_test_outlasts_the_interval_trains_before_its_next_test(
    method: Callable[[], Method], concurrency: int
) -> None:
    # A test on c1 takes 10 s, in which c0 makes ten updates: an evaluation is due when it ends.
    def cost(message: Message, context: Context, examples: int) -> Workload | None:
        work = training_cost(message, context, examples)
        slow = context.node_id == 101 and message.metadata.message_type == MessageType.EVALUATE
        return Workload(scale=10.0) if slow else work

    grid = grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 1.0), cost=cost)
    seen = run(method(), costly(grid), num_rounds=60, eval_every=2, concurrency=concurrency)
    trained = Counter(update.client for update in of(events.UpdateApplied, seen))
    assert min(trained["c0"], trained["c1"]) >= 4
    # Every evaluation has answers of both clients.
    assert [report.answered for report in of(Evaluated, seen)[:4]] == [2, 2, 2, 2]


@pytest.mark.parametrize("asked", [True, False])
def test_the_success_of_a_backdoor_is_the_mean_of_those_who_state_it(asked: bool) -> None:
    pulled, stated = pulled_app([ONES] * 3), {0: 0.25, 1: 1.0}

    def app(message: Message, context: Context) -> Message:
        reply, number = pulled(message, context), int(context.node_config["partition-id"])
        if message.metadata.message_type == MessageType.EVALUATE and number in stated:
            reply.content.metric_records["metrics"]["backdoor-success"] = stated[number]
        return reply

    seen: list[events.Event] = []
    settings = ConfigRecord({"backdoor-success": True} if asked else {})
    grid, plan = grid_of(app, devices(1.0, 1.0, 1.0)), Plan(eval_every=3)
    half().run(grid, MODEL, 6, evaluate_config=settings, plan=plan, observe=seen.append)
    # Over all clients, and over those of the only cluster.
    moments = [
        (each.time, each.updates, success)
        for each in of(Evaluated, seen)
        for success in (0.625, {0: 0.625})
    ]
    found = [(each.time, each.updates, each.value) for each in of(events.Measured, seen)]
    assert len(moments) > 2
    assert found == (moments if asked else [])


def test_where_testing_is_free_no_more_models_are_under_way_than_there_is_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tested(byte_count: int) -> tuple[list[int], list[float]]:
        monkeypatch.setattr(evaluation, "_BYTES", byte_count)
        grid, asked = grid_of(pulled_app([i * ONES for i in range(5)]), devices(*[1.0] * 5)), []
        send = grid.send_and_receive

        def count(messages: list[Message]) -> Iterable[Message]:
            if messages and messages[0].metadata.message_type == MessageType.EVALUATE:
                asked.append(len(messages))
            return send(messages)

        monkeypatch.setattr(grid, "send_and_receive", count)
        seen = run(half(), grid, num_rounds=5, eval_every=5)
        return asked, [event.accuracy for event in of(Evaluated, seen)]

    # A model of eight numbers is 32 bytes: two of them at a time, or one if there is no room.
    (pairs, accuracies), (single, same), (whole, as_well) = map(tested, (70, 1, 1000))
    assert pairs == [2, 2, 1] * 2
    assert single == [1] * 10
    assert whole == [5, 5]
    assert accuracies == same == as_well


def test_an_evaluation_goes_on_when_its_run_is_resumed_with_its_messages() -> None:
    def made() -> VirtualGrid:
        return costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.5)))

    grid, first = made(), half()
    # c0 has been tested at 2 s, between two trainings; c1 is at work until 3.5 s.
    plan = Plan(eval_every=1)
    first.run(grid, MODEL, 4, plan=plan, stop_check=lambda: "now" if grid.now() >= 3.0 else "")
    assert first.progress.evaluation is not None
    assert list(first.progress.evaluation.waiting) == ["c1"]
    state, kept = first.state_dict(), grid.state_dict()
    second, resumed = half(), made()
    second.load_state_dict(state)
    resumed.load_state_dict(kept)
    assert resumed.keeps_messages
    seen = run(second, resumed, num_rounds=4, eval_every=1)
    report = of(Evaluated, seen)[0]
    assert (report.updates, report.answered, report.asked) == (1, 2, 2)
    assert seen[-1].ending is Ending.LIMIT
    assert second.progress.updates == 4


class Inviting(FedAsync):
    """FedAsync whose clients decide when they train."""

    def scheduler(self) -> Scheduler:
        return OnRequest(RequestParameters("device"))


def test_an_invited_client_is_tested_and_keeps_its_invitation() -> None:
    # c1 is busy until 20 s: an evaluation that waited for it would delay the reports until then.
    grid = costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 20.0)))
    seen = run(Inviting(), grid, num_rounds=45, eval_every=2)
    reports, updates = of(Evaluated, seen), of(events.UpdateApplied, seen)
    assert [(r.time, r.updates, r.answered) for r in reports[:4]] == [
        (0.0, 0, 2),
        (2.0, 2, 2),
        (4.0, 4, 2),
        (6.0, 6, 2),
    ]
    # It gets no other work before its training ends.
    assert [(u.dispatched_at, u.time) for u in updates if u.client == "c1"] == [
        (0.0, 20.0),
        (20.0, 40.0),
    ]
    told = [seen.index(report) < seen.index(updates[report.updates]) for report in reports[:4]]
    assert all(told)


def test_a_target_does_not_count_before_enough_have_answered() -> None:
    # c0 is near its target from the first update on; c1, which is far from its own, leaves at
    # 2.5 s before it could be asked. The next evaluation is of c0 alone, when it is free at 3 s.
    leaver = Device(seconds_per_round=10.0, online=((0.0, 2.5),))
    grid = costly(grid_of(pulled_app([2 * ONES, -8 * ONES]), [Device(), leaver]))
    seen = run(half(), grid, num_rounds=50, eval_every=1, target_accuracy=0.15)
    _, alone, second = of(Evaluated, seen)[:3]
    assert alone.accuracy == pytest.approx(accuracy(1.5))
    assert alone.accuracy > 0.15
    assert (alone.time, alone.answered, alone.asked, alone.counts) == (1.0, 1, 2, False)
    assert (second.time, second.answered, second.asked, second.counts) == (2.5, 1, 1, True)
    assert (seen[-1].time, seen[-1].ending) == (3.0, Ending.TARGET)


@pytest.mark.parametrize(("answered", "asked", "counts"), [(9, 10, True), (8, 9, False)])
def test_a_target_counts_once_nine_tenths_of_the_clients_have_answered(
    answered: int, asked: int, counts: bool
) -> None:
    scores = {f"c{index}": (0, 1.0, 0.0) for index in range(answered)}
    report = Evaluated(0.0, 0, 1.0, 0.0, 1, scores, asked)
    assert report.counts is counts
    assert Plan(target_accuracy=0.9).is_reached(report) is counts


def test_the_weighted_accuracy_counts_test_examples() -> None:
    # (0.9 · 30 + 0.5 · 10) / 40 = 0.8, where the mean over the clients is 0.7.
    scores = [ClientScore(0, 0.9, 0.1, examples=30), ClientScore(1, 0.5, 0.1, examples=10)]
    assert weighted_accuracy(scores) == pytest.approx(0.8)
    assert math.isnan(weighted_accuracy([*scores, ClientScore(1, 0.5, 0.1)]))


@pytest.mark.parametrize(
    ("stated", "examples"),
    [
        (12, 12),
        (12.0, 12),
        (0, 0),
        (-3, 0),
        (math.nan, 0),
        (math.inf, 0),
        (1e300, 0),
        ([3, 4], 0),
        (None, 0),
    ],
)
def test_an_invalid_number_of_test_examples_is_ignored(stated: object, examples: int) -> None:
    score = score_from({"accuracy": 0.5, "num-examples": stated}, 0)
    assert score is not None
    assert (score.accuracy, score.examples) == (0.5, examples)


def test_a_run_reports_both_means() -> None:
    # Clients at targets 0 and 8 of eight ones, with 5 and 15 test examples: 1 and 1/(1 + 8 √8).
    app, far = pulled_app([0 * ONES, 8 * ONES], test_examples=[5, 15]), accuracy(8)
    seen = run(half(), grid_of(app, devices(1.0, 3.0)), num_rounds=1, eval_every=100)
    first = of(Evaluated, seen)[0]
    assert first.accuracy == pytest.approx((1 + far) / 2)
    assert first.weighted_accuracy == pytest.approx((5 + 15 * far) / 20)


class Refusing(VirtualGrid):
    """A grid that refuses evaluation messages for one node."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        taken = [
            message
            for message in messages
            if (message.metadata.message_type, message.metadata.dst_node_id)
            != (MessageType.EVALUATE, 101)
        ]
        return super().push_messages(taken)


def test_a_client_whose_evaluation_cannot_be_sent_trains_nevertheless() -> None:
    nodes = [
        Node(100 + index, Device(), {"partition-id": index, "num-partitions": 2})
        for index in range(2)
    ]
    seen = run(half(), costly(Refusing(pulled_app(), nodes)), num_rounds=8, eval_every=2)
    assert [(e.updates, e.answered, e.asked) for e in of(Evaluated, seen)] == [
        (updates, 1, 2) for updates in (0, 2, 4, 6, 8)
    ]
    assert len([u for u in of(events.UpdateApplied, seen) if u.client == "c1"]) == 4


def test_rounds_are_evaluated_by_the_same_rule() -> None:
    seen: list[events.Event] = []
    grid = costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.0)))
    FedAvg().run(grid, MODEL, 4, plan=Plan(eval_every=2), observe=seen.append)
    found = [(e.time, e.updates, e.answered, e.asked) for e in of(Evaluated, seen)]
    assert found == [(0.0, 0, 2, 2), (3.0, 2, 2, 2), (6.0, 4, 2, 2)]
    assert [u.time for u in of(events.UpdateApplied, seen)] == [1.0, 3.0, 4.0, 6.0]


def test_a_stopped_run_does_not_wait_for_evaluations() -> None:
    seen: list[events.Event] = []
    grid = costly(grid_of(pulled_app(), devices(1.0)))
    half().run(
        grid,
        MODEL,
        observe=seen.append,
        plan=Plan(eval_every=100),
        stop_check=lambda: "asked to stop" if grid.now() >= 2.0 else "",
    )
    assert [e.updates for e in of(Evaluated, seen)] == [0]
    assert seen[-1].ending is Ending.INTERRUPTED


class Batching(VirtualGrid):
    """A grid that returns simultaneous replies together, as a SuperLink may."""

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        replies, awaited = super().wait(message_ids, until), set(message_ids)
        found = replies
        while found:
            awaited -= {reply.metadata.reply_to_message_id for reply in found}
            found = super().wait(awaited, self.now())
            replies += found
        return replies


def test_tests_that_come_with_the_last_update_count() -> None:
    # A task or a test takes c0 1 s and c1 2 s. Both test first. c0 trains until 2 s and until 3 s;
    # then it tests until 4 s, when c1's update, the last one, comes too.
    def cost(message: Message, context: Context, examples: int) -> Workload | None:
        is_greeting = message.metadata.message_type == MessageType.QUERY
        return None if is_greeting else Workload()

    nodes = grid_of(pulled_app(), devices(1.0, 2.0)).nodes
    grid = costly(Batching(pulled_app(), nodes, cost=cost))
    seen = run(half(), grid, num_rounds=3, eval_every=2)
    updates = [(u.time, u.client) for u in of(events.UpdateApplied, seen)]
    assert updates == [(2.0, "c0"), (3.0, "c0"), (4.0, "c1")]
    # c1 is asked at the end of the run, and tests the models of 3 s and then those of 4 s.
    assert [(e.updates, e.answered) for e in of(Evaluated, seen)] == [(0, 2), (2, 2), (3, 2)]
    assert grid.now() == 8.0


class Peculiar(FedAsync):
    """A method whose clients test with their own kind of work."""

    needs = Needs(test_settings=MappingProxyType({"kind": "peculiar"}))


@pytest.mark.parametrize(("method", "kind"), [(FedAsync, None), (Peculiar, "peculiar")])
def test_a_method_says_how_its_models_are_tested(method: type[FedAsync], kind: str | None) -> None:
    inner, app, told = pulled_app(), ClientApp(), []

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        told.append(dict(message.content["config"]))
        return inner(message, context)

    app.query()(inner)
    app.train()(inner)
    config = ConfigRecord({"thorough": True})
    method().run(grid_of(app, devices(1.0)), MODEL, 2, evaluate_config=config)
    assert told
    wanted = {"thorough": True} | ({} if kind is None else {"kind": kind})
    assert all(settings == wanted for settings in told)
