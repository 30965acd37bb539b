"""Tests on the data of every step so far: times, clients and models."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from runs import ONES, devices, half, of

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.clusters import Clusters, Model, Weights
from raceme.core.evaluation import read_scores
from raceme.core.events import TaskScore, TasksTested
from raceme.core.messages import Vector
from raceme.core.requests import Outcome, Update
from raceme.datasets.drift import Schedule, Unit
from raceme.features.task_tests.server import TaskTests
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import FedAsync, FedAvg, Method, Plan


def reported(
    seen: Sequence[events.Event],
) -> list[tuple[float, int, int, dict[str, list[int]]]]:
    """Return time, updates, step, and the steps on which each client was tested."""
    return [
        (
            e.time,
            e.updates,
            e.step,
            {client: list(scores) for client, scores in e.per_client.items()},
        )
        for e in of(TasksTested, list(seen))
    ]


def chain_with_tests() -> Chain:
    return Chain({"task-tests": TaskTests()})


def started(
    method: Method,
    grid: VirtualGrid,
    updates: int,
    schedule: Schedule | None,
    is_on: bool = True,
    **plan: object,
) -> list[events.Event]:
    seen: list[events.Event] = []
    chosen = Plan(**{"drift": schedule, **plan})  # type: ignore[arg-type]
    if is_on and not list(method.features):
        method.features = chain_with_tests()
    method.run(grid, MODEL, updates, plan=chosen, observe=seen.append)
    return seen


def test_all_test_when_a_step_is_over_and_at_the_end() -> None:
    grid = grid_of(pulled_app([8 * ONES, 8 * ONES]), devices(1.0, 2.5))
    seen = started(half(), grid, 7, Schedule("updates", (2, 4)))
    both = {client: [0, 1] for client in ("c0", "c1")}
    assert reported(seen) == [
        (2.0, 2, 0, both),
        (3.0, 4, 1, {client: [0, 1, 2] for client in both}),
        # No client will train on the step that begins at the end of the run.
        (5.0, 7, 2, {client: [0, 1, 2] for client in both}),
    ]


def test_the_models_are_those_before_anybody_trains_on_the_next_step() -> None:
    # One client at 8: the model is 2 after the first update, and then 3.5, 4.625 and 5.46875.
    seen = started(
        half(), grid_of(pulled_app([8 * ONES]), devices(1.0)), 4, Schedule("updates", (2,))
    )
    first, last = of(TasksTested, seen)
    after, before = 1 / (1 + 4.5 * math.sqrt(8)), 1 / (1 + 8 * math.sqrt(8))
    assert first.per_client["c0"] == {
        0: TaskScore(0, pytest.approx(after)),
        1: TaskScore(0, pytest.approx(after / 2), pytest.approx(before / 2)),
    }
    assert (first.clusters, first.asked) == (1, 1)
    final = 1 / (1 + 2.53125 * math.sqrt(8))
    assert last.per_client["c0"] == {
        0: (0, pytest.approx(final), None),
        1: (0, pytest.approx(final / 2), None),
    }


@pytest.mark.parametrize(
    ("schedule", "moments"),
    [
        (Schedule("seconds", (1.5, 3.0)), [(1.5, 0), (3.0, 1), (4.0, 2)]),
        (Schedule("updates", (2.0,)), [(2.0, 0), (4.0, 1)]),
        (Schedule("rounds", (2.0,)), [(2.0, 0), (4.0, 1)]),
        # The last step begins when the run ends, so that no client has trained on it.
        (Schedule("rounds", (2.0, 4.0)), [(2.0, 0), (4.0, 1)]),
        (Schedule("uploads", (1.0, 3.0)), [(1.0, 0), (3.0, 1), (4.0, 2)]),
    ],
)
def test_whatever_moves_the_data(schedule: Schedule, moments: list[tuple[float, int]]) -> None:
    seen = started(FedAvg(), grid_of(pulled_app([ONES]), devices(1.0)), 4, schedule)
    assert [(e.time, e.step) for e in of(TasksTested, seen)] == moments


def test_a_client_with_steps_of_its_own_tests_at_the_end_of_each() -> None:
    grid = grid_of(pulled_app([ONES, ONES]), devices(1.0, 2.5))
    seen = started(half(), grid, 6, Schedule("uploads", every=2.0))
    # c0 uploads at 1, 2, 3 and 4 s, c1 at 2.5 and 5 s.
    # At the end neither has trained on its current step.
    assert reported(seen) == [
        (2.0, 2, 0, {"c0": [0, 1]}),
        (4.0, 5, 1, {"c0": [0, 1, 2]}),
        (5.0, 6, 0, {"c1": [0, 1]}),
    ]


def test_at_the_end_those_test_who_have_trained_on_their_step() -> None:
    grid = grid_of(pulled_app([ONES, ONES]), devices(1.0, 2.5))
    # The last update ends c0's second step; c1 is in its first one, with one upload at 2.5 s.
    seen = started(half(), grid, 5, Schedule("uploads", every=2.0))
    assert reported(seen) == [
        (2.0, 2, 0, {"c0": [0, 1]}),
        (4.0, 5, 1, {"c0": [0, 1, 2]}),
        (4.0, 5, 0, {"c1": [0]}),
    ]


def test_steps_that_end_at_the_same_time_are_reported_together() -> None:
    grid = grid_of(pulled_app([ONES]), devices(4.0))
    seen = started(half(), grid, 3, Schedule("updates", (1.0, 1.5, 2.0)))
    # The second update moves the data by two steps: no client has trained on step 2.
    assert [(e.updates, e.step) for e in of(TasksTested, seen)] == [(1, 0), (2, 1), (3, 3)]


@pytest.mark.parametrize("method", [half, FedAvg])
@pytest.mark.parametrize(
    "schedule", [Schedule(unit, every=3) for unit in ("seconds", "updates", "uploads")]
)
def test_the_run_is_the_same_but_for_the_tests(method: type[Method], schedule: Schedule) -> None:
    fleet = [Device(1.0, jitter=0.3), Device(2.5, jitter=0.3), Device(1.5)]
    targets = [8 * ONES, -8 * ONES, ONES]
    plain, more = (
        started(method(), grid_of(pulled_app(targets), fleet), 20, schedule, wanted)
        for wanted in (False, True)
    )
    assert of(TasksTested, plain) == []
    assert len(of(TasksTested, more)) >= 3
    assert [event for event in more if not isinstance(event, TasksTested)] == plain


@pytest.mark.parametrize("unit", ["seconds", "updates", "uploads"])
def test_a_resumed_run_tests_what_the_uninterrupted_one_would(unit: Unit) -> None:
    def fleet() -> VirtualGrid:
        return grid_of(pulled_app([8 * ONES, -8 * ONES]), [Device(1.0, jitter=0.3), Device(1.5)])

    plan = Plan(eval_every=5, drift=Schedule(unit, every=3))
    strategy, grid, seen = half(), fleet(), []
    strategy.features = chain_with_tests()
    saved: list[tuple[int, dict[str, Any], dict[str, Any]]] = []

    def save() -> str:
        states = strategy.state_dict(), grid.state_dict()
        saved.append((len(seen), *copy.deepcopy(states)))
        return ""

    strategy.run(grid, MODEL, 12, plan=plan, observe=seen.append, stop_check=save)
    for before, state, grid_state in saved:
        restored, again, new_grid = half(), [], fleet()
        restored.features = chain_with_tests()
        restored.load_state_dict(state)
        new_grid.load_state_dict(grid_state)
        restored.run(new_grid, MODEL, 12, plan=plan, observe=again.append)
        assert again == seen[before:]
    assert len(of(TasksTested, seen)) >= 3


def test_without_drift_nothing_is_tested() -> None:
    seen = started(half(), grid_of(pulled_app(), devices(1.0)), 3, None)
    assert of(TasksTested, seen) == []


class Remembering(FedAsync):
    """FedAsync with a cluster of ones, which serves clients their past mixture for step 0."""

    def initialize(self, vector: Vector) -> None:
        super().initialize(vector)
        self.clusters = Clusters({0: Model(vector), 1: Model(ONES)})

    def serving(self, client: str, step: int) -> Weights:
        return {1: 0.75, 0: 0.25} if step == 0 else {0: 1.0}

    def on_update(self, update: Update) -> Outcome:
        return Outcome(0, 0, 0.0)


def asked_of(app: ClientApp, asked: list[RecordDict], broken: bool = False) -> ClientApp:
    """Let an app record its test requests, and fail if it is broken."""
    noting = ClientApp()

    @noting.query()
    def query(message: Message, context: Context) -> Message:
        return app(message, context)

    @noting.train()
    def train(message: Message, context: Context) -> Message:
        return app(message, context)

    @noting.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if message.content["config"].get("kind") == "test-steps":
            asked.append(message.content)
            if broken and context.node_config["partition-id"] == 1:
                raise OSError("the data of step 0 are gone")
        return app(message, context)

    return noting


def test_each_model_travels_once_and_the_method_says_which_serves_which_step() -> None:
    asked: list[RecordDict] = []
    grid = grid_of(asked_of(pulled_app([0 * ONES]), asked), devices(1.0))
    seen = started(Remembering(), grid, 3, Schedule("updates", (1, 2)))
    assert [list(content["config"]["tested-steps"]) for content in asked] == [
        [0, 1, 1],
        [0, 1, 2, 2],
        [0, 1, 2],
    ]
    assert [list(content["config"]["tested-models"]) for content in asked] == [
        [0, 1, 2],
        [0, 1, 1, 2],
        [0, 1, 1],
    ]
    # At the end there is no untrained model to test.
    assert [content["config"]["untrained"] for content in asked] == [True, True, False]
    assert [sorted(content.array_records) for content in asked] == [
        *[["arrays-0", "arrays-1", "arrays-2"]] * 2,
        ["arrays-0", "arrays-1"],
    ]
    scores = of(TasksTested, seen)[1].per_client["c0"]
    # 0.75 · 1 + 0.25 · 0 in each of eight numbers, mostly cluster 1; cluster 0 is at the target.
    assert scores[0] == (1, pytest.approx(1 / (1 + 0.75 * math.sqrt(8))), None)
    assert (scores[1], scores[2]) == ((0, 0.5, None), (0, 0.25, 0.25))


def test_a_client_that_fails_is_left_out_and_the_run_goes_on() -> None:
    app = asked_of(pulled_app([ONES, ONES]), [], broken=True)
    seen = started(half(), grid_of(app, devices(1.0, 1.5)), 6, Schedule("updates", (2,)))
    assert [(list(e.per_client), e.asked) for e in of(TasksTested, seen)] == [(["c0"], 2)] * 2
    assert of(events.UpdateRejected, seen) == []
    assert seen[-1].updates == 6


def test_if_nobody_can_test_there_is_no_report() -> None:
    app = asked_of(pulled_app([ONES, ONES]), [], broken=True)
    grid = grid_of(app, devices(1.0), partitions=[1])
    assert of(TasksTested, started(half(), grid, 3, Schedule("updates", (2,)))) == []


# Tests that take time.


def costly(grid: VirtualGrid) -> VirtualGrid:
    """Send tests as messages that take time, as on devices."""
    grid.free_evaluation = False
    return grid


def test_idle_devices_test_the_current_models() -> None:
    # Targets 8 and −8; c0 needs 1 s, c1 3 s. Step 0 ends at 2 s with the model 3.5, which c0 tests
    # at once; c1 is free at 3 s, when the model has moved on.
    grid = costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 3.0)))
    seen = started(half(), grid, 6, Schedule("updates", (2,)), eval_every=100)
    first, last = of(TasksTested, seen)
    assert (first.time, first.updates, first.step, first.asked) == (2.0, 2, 0, 2)
    model = of(events.Evaluated, seen)[0]
    assert model.updates == 0
    near, far = (first.per_client[client][0].accuracy for client in ("c0", "c1"))
    assert (near, far) == (
        pytest.approx(1 / (1 + 4.5 * math.sqrt(8))),
        pytest.approx(1 / (1 + 11.5 * math.sqrt(8))),
    )
    third = next(e for e in of(events.UpdateApplied, seen) if e.client == "c1")
    assert seen.index(first) > seen.index(third)
    assert (last.step, last.updates) == (1, 6)
    assert set(last.per_client) == {"c0", "c1"}


def test_the_next_step_ends_tests_that_a_slow_device_has_not_answered() -> None:
    grid = costly(grid_of(pulled_app([ONES, ONES]), devices(1.0, 50.0)))
    seen = started(half(), grid, 6, Schedule("updates", (2, 4)), eval_every=100)
    found = [(e.updates, e.step, sorted(e.per_client), e.asked) for e in of(TasksTested, seen)]
    # The end of the run waits for c1, as it does for evaluations.
    assert found[:2] == [(2, 0, ["c0"], 2), (4, 1, ["c0", "c1"], 2)]
    assert found[2] == (6, 2, ["c0", "c1"], 2)


def test_tests_go_on_when_their_run_is_resumed_with_its_messages() -> None:
    def made() -> VirtualGrid:
        return costly(grid_of(pulled_app([8 * ONES, -8 * ONES]), devices(1.0, 5.0)))

    # Step 0 ends at 2 s; c1 is at work until 5 s.
    schedule, grid, first = Schedule("updates", (2,)), made(), half()
    plan = Plan(drift=schedule, eval_every=100)
    first.features = chain_with_tests()
    first.run(grid, MODEL, 8, plan=plan, stop_check=lambda: "now" if grid.now() >= 3.0 else "")
    assert list(first.progress.feature_tests["task-tests"].waiting) == ["c1"]
    second, resumed = half(), made()
    second.features = chain_with_tests()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(grid.state_dict())
    seen = started(second, resumed, 8, schedule, eval_every=100)
    report = of(TasksTested, seen)[0]
    assert (report.updates, report.step, sorted(report.per_client)) == (2, 0, ["c0", "c1"])


def test_tests_and_an_evaluation_may_be_under_way_together() -> None:
    grid = costly(grid_of(pulled_app([ONES, ONES]), devices(1.0, 3.0)))
    seen = started(half(), grid, 8, Schedule("updates", (2,)), eval_every=2)
    assert [(e.updates, e.answered) for e in of(events.Evaluated, seen)][:2] == [(0, 2), (2, 2)]
    assert [(e.updates, len(e.per_client)) for e in of(TasksTested, seen)] == [(2, 2), (8, 2)]
    assert len(of(events.UpdateApplied, seen)) == 8


def test_who_leaves_is_not_waited_for() -> None:
    leaver = Device(seconds_per_round=10.0, online=((0.0, 2.5),))
    grid = costly(grid_of(pulled_app([ONES, ONES]), [Device(), leaver]))
    seen = started(half(), grid, 8, Schedule("updates", (2,)), eval_every=100)
    assert [(e.updates, sorted(e.per_client), e.asked) for e in of(TasksTested, seen)] == [
        (2, ["c0"], 2),
        (8, ["c0"], 1),
    ]


# The clients' answers.


def answer(values: object, **told: str) -> Message:
    request = Message(RecordDict(), 7, "evaluate")
    request.metadata.__dict__["_message_id"] = "1"
    numbers = ArrayRecord({"accuracies": Array(np.asarray(values))})
    return Message(RecordDict({"numbers": numbers, "config": ConfigRecord(told)}), reply_to=request)


def test_what_is_no_accuracy_is_missing() -> None:
    unit, scores = read_scores(answer([0.5, math.nan, -0.1, 1.5, math.inf, 1.0]), 6)
    assert unit is None
    assert np.array_equal(scores, [0.5, *[math.nan] * 4, 1.0], equal_nan=True)


def test_an_error_may_be_any_number_of_at_least_0() -> None:
    unit, scores = read_scores(answer([25.5, math.inf, -1.0], unit="m"), 3)
    assert unit == "m"
    assert np.array_equal(scores, [25.5, math.inf, math.nan], equal_nan=True)


@pytest.mark.parametrize("values", [[0.5, 0.5], [[0.5] * 3], [1, 1, 1], ["a", "b", "c"]])
def test_other_numbers_than_were_asked_for_are_no_answer(values: object) -> None:
    assert read_scores(answer(values), 3)[1] == []


def test_an_error_or_a_reply_without_numbers_is_no_answer() -> None:
    request = Message(RecordDict(), 7, "evaluate")
    assert read_scores(Message(Error(0, "no"), reply_to=request), 1) == (None, [])
    assert read_scores(Message(RecordDict(), reply_to=request), 1) == (None, [])
