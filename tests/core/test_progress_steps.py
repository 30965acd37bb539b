"""Events at given times: wake-ups of methods, and changes of clients' data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import pytest
from fleets import MODEL, grid_of, pulled_app
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from runs import ONES, devices, of, run

from raceme.core import events
from raceme.core.clusters import Model
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import ClusterChange
from raceme.core.requests import Outcome, Update
from raceme.core.schedulers import InWindows
from raceme.core.scheduling import EveryIdle, Scheduler
from raceme.datasets.drift import Schedule, Unit
from raceme.runs.experiment import build_strategy, resolve
from raceme.strategies import FedAsync, FedAvg, Plan


class InSpans(FedAsync):
    """FedAsync in windows of time in which all clients take part."""

    def scheduler(self) -> Scheduler:
        return InWindows(3.6, lambda online, rng: online)


class Alarm(EveryIdle):
    """Lets all clients work, and calls its method at given times."""

    def __init__(self, times: list[float], ring: Callable[[], None]) -> None:
        super().__init__()
        self.times, self.ring = times, ring

    def wake_at(self) -> float:
        return self.times[0] if self.times else float("inf")

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        self.ring()
        return (), ()


class Timed(FedAsync):
    """FedAsync with wake-ups at given times."""

    def __init__(self, *times: float) -> None:
        self.times, self.woken = list(times), []
        super().__init__()

    def scheduler(self) -> Scheduler:
        return Alarm(self.times, lambda: self.on_wake())

    def on_wake(self) -> None:
        self.woken.append(self.now())
        del self.times[0]


def test_a_method_is_woken_at_its_times_whatever_else_happens() -> None:
    strategy = Timed(2.5, 4.0, 11.0)
    run(strategy, grid_of(pulled_app(), devices(4.0, 30.0)), num_rounds=3)
    assert strategy.woken == [2.5, 4.0, 11.0]


def test_several_times_that_have_passed_are_caught_up_with() -> None:
    strategy = Timed(-5.0, 0.0, 1.0)
    run(strategy, grid_of(pulled_app(), devices(2.0)), num_rounds=1)
    assert strategy.woken[-1] == 1.0
    assert len(strategy.woken) == 3


def test_what_changes_at_a_wake_is_reported_with_its_time() -> None:
    class Founds(Timed):
        def on_wake(self) -> None:
            super().on_wake()
            self.clusters.found(Model(ONES), ["c0"])

        def on_update(self, update: Update) -> Outcome:
            return Outcome(self.clusters.main("c0"), 0, 0.0)

    seen = run(Founds(1.5), grid_of(pulled_app(), devices(1.0)), num_rounds=2)
    changes = of(events.ClustersChanged, seen)
    assert [(e.time, e.updates, e.change) for e in changes] == [
        (0.0, 0, ClusterChange.ASSIGN),
        (1.5, 1, ClusterChange.FOUND),
    ]


def test_a_time_that_never_moves_does_not_stop_the_clock() -> None:
    class Stubborn(FedAsync):
        def scheduler(self) -> Scheduler:
            return Alarm([0.5], lambda: None)

    seen = run(Stubborn(), grid_of(pulled_app(), devices(1.0)), num_rounds=3)
    assert seen[-1].time == 3.0


# Changing data.


def noting(app: ClientApp, steps: list[tuple[str, int | None]]) -> ClientApp:
    """Let an app note the step of each task."""
    noted = ClientApp()

    def note(kind: str, message: Message, context: Context) -> Message:
        steps.append((kind, message.content["config"].get("step")))
        return app(message, context)

    @noted.query()
    def query(message: Message, context: Context) -> Message:
        return app(message, context)

    @noted.train()
    def train(message: Message, context: Context) -> Message:
        return note("train", message, context)

    @noted.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return note("evaluate", message, context)

    return noted


def drifting(schedule: Schedule | None, updates: int, *seconds: float) -> tuple[list, list]:
    steps: list[tuple[str, int | None]] = []
    seen: list[events.Event] = []
    grid = grid_of(noting(pulled_app(), steps), devices(*seconds))
    FedAsync().run(
        grid, MODEL, updates, plan=Plan(eval_every=2, drift=schedule), observe=seen.append
    )
    return seen, steps


def changed(seen: list[events.Event]) -> list[tuple[float, int, str | None, int]]:
    return [(e.time, e.updates, e.client, e.step) for e in of(events.DataChanged, seen)]


def test_messages_have_no_step_without_drift() -> None:
    seen, steps = drifting(None, 4, 1.0)
    assert {step for _, step in steps} == {None}
    assert changed(seen) == []
    assert {u.step for u in of(events.UpdateApplied, seen)} == {0}


def test_steps_change_with_time() -> None:
    # c0 trains for 2 s each from 0, 2, 4, 6 and 8 s; the data change at 3 s and at 8 s.
    seen, steps = drifting(Schedule("seconds", (3.0, 8.0)), 5, 2.0)
    assert changed(seen) == [(3.0, 1, None, 1), (8.0, 4, None, 2)]
    assert [u.step for u in of(events.UpdateApplied, seen)] == [0, 0, 1, 1, 2]
    assert [step for kind, step in steps if kind == "train"] == [0, 0, 1, 1, 2]
    # Tested after 0, 2, 4 and, at the end, 5 updates.
    assert [step for kind, step in steps if kind == "evaluate"] == [0, 1, 2, 2]
    assert [dict(e.steps) for e in of(events.Evaluated, seen)] == [
        {},
        {"c0": 1},
        {"c0": 2},
        {"c0": 2},
    ]


def test_steps_by_updates_are_those_of_all_clients() -> None:
    # c1's task was sent before the second update.
    seen, _ = drifting(Schedule("updates", (2,)), 5, 1.0, 2.5)
    assert changed(seen) == [(2.0, 2, None, 1)]
    updates = of(events.UpdateApplied, seen)
    assert [(u.client, u.time, u.step) for u in updates] == [
        ("c0", 1.0, 0),
        ("c0", 2.0, 0),
        ("c1", 2.5, 0),
        ("c0", 3.0, 1),
        ("c0", 4.0, 1),
    ]


def test_steps_by_uploads_are_each_clients_own() -> None:
    seen, _ = drifting(Schedule("uploads", every=2.0), 6, 1.0, 2.5)
    # At the second and fourth upload of c0, and at c1's second, after which c1 is only tested.
    assert changed(seen) == [(2.0, 2, "c0", 1), (4.0, 5, "c0", 2), (5.0, 6, "c1", 1)]
    updates = of(events.UpdateApplied, seen)
    assert [(u.client, u.time, u.step) for u in updates] == [
        ("c0", 1.0, 0),
        ("c0", 2.0, 0),
        ("c1", 2.5, 0),
        ("c0", 3.0, 1),
        ("c0", 4.0, 1),
        ("c1", 5.0, 0),
    ]


def test_steps_by_rounds_move_before_the_next_round_is_handed_out() -> None:
    steps: list[tuple[str, int | None]] = []
    seen: list[events.Event] = []
    grid = grid_of(noting(pulled_app(), steps), devices(1.0, 2.0))
    plan = Plan(eval_every=2, drift=Schedule("rounds", every=1.0))
    FedAvg().run(grid, MODEL, 6, plan=plan, observe=seen.append)
    # Two clients, three rounds of 2 s: the first round and its test use the first data.
    assert steps == [
        *[("evaluate", 0)] * 2,
        *[("train", 0)] * 2,
        *[("evaluate", 0)] * 2,
        *[("train", 1)] * 2,
        *[("evaluate", 1)] * 2,
        *[("train", 2)] * 2,
        *[("evaluate", 2)] * 2,
    ]
    assert changed(seen) == [(2.0, 2, None, 1), (4.0, 4, None, 2)]
    assert [u.step for u in of(events.UpdateApplied, seen)] == [0, 0, 1, 1, 2, 2]


def test_steps_by_windows_move_when_a_window_is_over() -> None:
    seen: list[events.Event] = []
    plan = Plan(eval_every=100, drift=Schedule("rounds", (1, 2)))
    # In windows of 3.6 s updates come at 1, 2 and 3 s. The next reply, at 4 s, is too late; the
    # device then continues with replies at 5, 6 and 7 s, and at 9 and 10 s.
    method = InSpans()
    method.run(grid_of(pulled_app(), devices(1.0)), MODEL, 8, plan=plan, observe=seen.append)
    assert [u.step for u in of(events.UpdateApplied, seen)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert method.scheduling.rounds == 2


def test_a_method_without_rounds_cannot_change_data_by_them() -> None:
    with pytest.raises(UserError, match="counts rounds, and the method has none"):
        drifting(Schedule("rounds", every=1.0), 5, 2.0)
    keys = {"drift": "swap-all", "drift-at": "every round", "strategy": "fedasync"}
    with pytest.raises(UserError, match=r"counts rounds, and fedasync has none: give sec"):
        build_strategy(resolve(RunConfig.from_mapping(keys)))
    build_strategy(resolve(RunConfig.from_mapping({**keys, "strategy": "fedavg"})))


@pytest.mark.parametrize("unit", ["updates", "uploads"])
def test_a_resumed_run_does_not_report_a_step_twice(unit: Unit) -> None:
    plan, seen, again = Plan(drift=Schedule(unit, (3,))), [], []
    strategy, restored = FedAsync(), FedAsync()
    strategy.run(grid_of(pulled_app(), devices(1.0)), MODEL, 5, plan=plan, observe=seen.append)
    restored.load_state_dict(copy.deepcopy(strategy.state_dict()))
    restored.run(grid_of(pulled_app(), devices(1.0)), MODEL, 9, plan=plan, observe=again.append)
    assert [change[3] for change in changed(seen)] == [1]
    assert changed(again) == []
    assert {u.step for u in of(events.UpdateApplied, again)} == {1}


@pytest.mark.parametrize(
    ("schedule", "moments"),
    [
        (Schedule("seconds", (2.0, 3.5)), [(0.0, 0), (2.0, 1), (3.5, 2), (4.0, 2)]),
        (Schedule("updates", (2.0,)), [(0.0, 0), (2.0, 1), (4.0, 1)]),
        # A round is tested on the data that it was trained on: data change after it.
        (Schedule("rounds", (2.0,)), [(0.0, 0), (2.0, 1), (4.0, 1)]),
    ],
)
def test_changed_data_are_tested_before_they_are_trained_on(
    schedule: Schedule, moments: list[tuple[float, int]]
) -> None:
    seen = run(
        FedAvg(),
        grid_of(pulled_app([ONES]), devices(1.0)),
        num_rounds=4,
        **{"eval_every": 1000, "eval_steps": True, "drift": schedule},  # type: ignore[arg-type]
    )
    found = [(e.time, max(e.steps.values(), default=0)) for e in of(events.Evaluated, seen)]
    assert found == moments


def test_a_rounds_model_is_tested_before_the_data_of_the_next_round() -> None:
    seen = run(
        FedAvg(),
        grid_of(pulled_app([ONES]), devices(1.0)),
        num_rounds=2,
        **{"eval_every": 1, "eval_steps": True, "drift": Schedule("rounds", (1.0,))},  # type: ignore[arg-type]
    )
    tests = [(e.updates, e.steps.get("c0", 0)) for e in of(events.Evaluated, seen)]
    assert tests == [(0, 0), (1, 0), (1, 1), (2, 1)]
