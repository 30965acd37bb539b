"""Clients that decide when they train: request times by hand, and triggers by loss."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clustered import plain
from fleets import MODEL, grid_of, pulled_app
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from policies import Bench, run, updates_of
from requesting import Asks, asking, drifting_app

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.messages import LOSSES
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Request
from raceme.core.schedulers import OnRequest, RequestParameters
from raceme.datasets.drift import Schedule
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import FedAsync, Plan


def every(seconds: float) -> Callable[[Client, float, np.random.Generator], float]:
    return lambda client, now, rng: now + seconds * (1 + int(client.client_id[1:]))


# Request times.


def test_a_client_is_given_work_when_it_asks() -> None:
    bench = Bench(OnRequest(next_request=every(2.0)), 2)
    assert bench.policy.wake_at() == math.inf
    assert bench.work(0.0) == []
    assert bench.policy.wake_at() == 2.0
    assert bench.work(2.0) == ["c0"]
    assert bench.policy.wake_at() == 4.0
    assert bench.answer("c0", 3.0) == ["c0"]
    assert bench.work(3.0) == []
    # c1 requests at 4 s, c0 at 3 + 2 s.
    assert bench.work(4.0) == ["c1"]
    assert bench.policy.wake_at() == 5.0
    bench.leave("c0", 4.5)
    assert bench.policy.wake_at() == math.inf


def test_requests_on_virtual_time() -> None:
    # c0 requests 2 s, c1 4 s after it becomes idle; training takes 1 s.
    seen = run(Asks(OnRequest(next_request=every(2.0))), [Device()] * 2, updates=4)
    assert updates_of(seen) == [
        (2.0, "c0", 3.0),
        (4.0, "c1", 5.0),
        (5.0, "c0", 6.0),
        (8.0, "c0", 9.0),
    ]


def test_a_request_that_must_wait_its_turn_does_not_stop_the_clock() -> None:
    # Both request at 2 s and 4 s, training takes 5 s, and only one may train at a time.
    asks = Asks(OnRequest(next_request=every(2.0)))
    seen = run(asks, [Device(seconds_per_round=5.0)] * 2, updates=2, concurrency=1)
    assert updates_of(seen) == [(2.0, "c0", 7.0), (7.0, "c1", 12.0)]


def test_poisson_waits_are_exponential_with_the_mean_that_was_said() -> None:
    seen = run(Asks(asking("poisson", 4.0)), [Device()] * 5, updates=600)
    done: dict[str, float] = {}
    waits = []
    for sent_at, client, back_at in updates_of(seen):
        waits.append(sent_at - done.get(client, 0.0))
        done[client] = back_at
    # The mean of 600 waits is within 4 of its standard deviations, 4 s / sqrt(600); of an
    # exponential time a share of 1/e is longer than the mean.
    assert np.mean(waits) == pytest.approx(4.0, abs=4 * 4.0 / math.sqrt(600))
    assert np.mean(np.array(waits) > 4.0) == pytest.approx(math.exp(-1), abs=0.08)


def test_fixed_times_are_a_period_apart_and_not_the_same_for_all() -> None:
    seen = run(Asks(asking("fixed", 10.0)), [Device()] * 20, updates=100)
    times: dict[str, list[float]] = {}
    for sent_at, client, _ in updates_of(seen):
        times.setdefault(client, []).append(sent_at)
    phases = [asked[0] for asked in times.values()]
    assert all(0 <= phase < 10 for phase in phases)
    assert len(set(phases)) == 20
    assert min(phases) < 2.5
    assert max(phases) > 7.5
    for asked in times.values():
        assert np.diff(asked) == pytest.approx([10.0] * (len(asked) - 1))


def test_fixed_times_at_which_a_client_is_busy_pass() -> None:
    bench = Bench(asking("fixed", 10.0), 1)
    bench.policy.state.phases["c0"] = 3.0
    assert bench.work(0.0) == []
    assert bench.policy.wake_at() == 3.0
    assert bench.work(3.0) == ["c0"]
    # It answers at once, at 3 s: the next time is 13 s. Then it is busy at 23 s and 33 s.
    bench.answer("c0", 3.0)
    assert bench.work(3.0) == []
    assert bench.policy.wake_at() == 13.0
    assert bench.work(13.0) == ["c0"]
    bench.answer("c0", 35.0)
    assert bench.work(35.0) == []
    assert bench.policy.wake_at() == 43.0


def test_fixed_times_stay_those_of_a_client_that_was_away() -> None:
    bench = Bench(asking("fixed", 10.0), 1)
    bench.policy.state.phases["c0"] = 3.0
    bench.work(0.0)
    bench.leave("c0", 1.0)
    bench.fleet.clients["c0"].node_id = 7
    bench.idle.add("c0")
    bench.work(2.0)
    assert bench.policy.wake_at() == 3.0


def test_other_work_leaves_a_request_as_it_is() -> None:
    bench = Bench(asking("fixed", 10.0), 1)
    bench.policy.state.phases["c0"] = 3.0
    bench.work(0.0)
    counts = InFlight(5, "c0", 0, 0, 0, sent_at=1.0, bytes_down=0, kind="label-counts")
    bench.policy.sent(counts, 1.0)
    assert bench.policy.wake_at() == 3.0


# Triggers by loss.


def evaluate(bench: Bench, now: float, *losses: float, step: int = 0) -> bool:
    """Let c0 report its loss, which must be due now; return whether it will train."""
    assert bench.policy.evaluates_loss("c0")
    assert [c.client_id for c in bench.policy.choose(bench.selection_context(now))] == ["c0"]
    task = InFlight(bench.number, "c0", 0, 0, 0, now, 0, kind=LOSSES, step=step)
    bench.number += 1
    bench.policy.sent(task, now)
    answer = Answer(task, len(losses), numbers={LOSSES: np.array([losses], np.float32)})
    assert bench.policy.take_loss(answer)
    bench.policy.lost(task, now)
    return not bench.policy.evaluates_loss("c0")


def trained(loss: float = 1.0, **options: float) -> Bench:
    """Return a bench whose c0 measures at 3, 13, 23 … s; it has trained and answered at 1 s."""
    bench = Bench(asking("loss", 10.0, **options), 1)
    bench.policy.state.phases["c0"] = 3.0
    assert not bench.policy.evaluates_loss("c0")
    assert bench.work(0.0) == ["c0"]
    bench.answer("c0", 1.0, train_loss=loss)
    return bench


def test_a_client_trains_first_and_then_measures_at_once_and_at_its_times() -> None:
    bench = trained()
    assert not evaluate(bench, 1.0, 0.5, 1.5)
    assert bench.policy.state.known == {"c0": 1.0}
    assert bench.policy.choose(bench.selection_context(1.0)) == []
    assert bench.policy.wake_at() == 3.0


@pytest.mark.parametrize(("loss", "rises"), [(1.0, False), (1.125, False), (1.126, True)])
def test_a_client_trains_when_its_loss_is_above_the_known_one_by_more_than_the_share(
    loss: float, rises: bool
) -> None:
    bench = trained(loss_rise=0.125)
    evaluate(bench, 1.0, 1.0)
    assert evaluate(bench, 3.0, loss) is rises
    assert bench.work(3.0) == (["c0"] if rises else [])
    if rises:
        # After training the client has a new model, whose loss is unknown.
        bench.answer("c0", 4.0)
        assert bench.policy.state.known == {}
        assert bench.policy.evaluates_loss("c0")


def test_a_loss_that_rises_slowly_is_compared_with_the_lowest() -> None:
    bench = trained()
    evaluate(bench, 1.0, 2.0)
    assert not evaluate(bench, 3.0, 1.0)
    assert not evaluate(bench, 13.0, 1.0625)
    assert evaluate(bench, 23.0, 1.125)


def test_data_that_changed_before_the_first_measurement_are_compared_with_the_training() -> None:
    assert evaluate(trained(loss=1.0), 1.0, 1.5, step=1)
    assert not evaluate(trained(loss=1.0), 1.0, 1.5, step=0)
    assert not evaluate(trained(loss=1.4), 1.0, 1.5, step=1)
    # A client that does not report its training loss:
    # the first measured loss becomes the reference.
    silent = trained(loss=math.nan)
    assert not evaluate(silent, 1.0, 1.5, step=1)
    assert evaluate(silent, 3.0, 1.8, step=1)


@pytest.mark.parametrize(
    "numbers",
    [{}, {LOSSES: np.ones((2, 3))}, {LOSSES: np.ones(3)}, {LOSSES: np.ones((1, 0))}],
)
def test_an_invalid_loss_is_refused_and_requested_again(
    numbers: dict[str, np.ndarray],
) -> None:
    bench = trained()
    bench.work(1.0, kind=LOSSES)
    task = bench.tasks["c0"]
    with pytest.raises(InvalidReplyError, match="no losses of the model that it holds"):
        bench.policy.take_loss(Answer(task, 3, numbers=numbers))
    bench.policy.lost(task, 2.0)
    bench.idle.add("c0")
    assert bench.policy.evaluates_loss("c0")
    assert bench.work(2.0, kind=LOSSES) == ["c0"]


def test_the_scheduler_ignores_answers_to_other_work() -> None:
    bench = trained()
    other = InFlight(99, "c0", 0, 0, 0, 1.0, 0, kind=LOSSES)
    losses = {LOSSES: np.full((1, 2), 9.0)}
    assert not bench.policy.take_loss(Answer(other, 2, numbers=losses))
    bench.work(1.0, kind=LOSSES)
    assert not bench.policy.take_loss(Answer(other, 2, numbers=losses))
    assert bench.policy.state.known == {}


def test_on_virtual_time_clients_train_only_after_their_data_have_changed() -> None:
    # Data change at 25 s and 45 s; only the second change raises the loss by more than a tenth.
    strategy = Asks(asking("loss", 10.0))
    seen: list[events.Event] = []
    plan = Plan(eval_every=1000, drift=Schedule("seconds", (25.0, 45.0)), max_time=80.0)
    grid = grid_of(drifting_app([1.0, 1.05, 1.2]), [Device()] * 3)
    strategy.run(grid, MODEL, 0, plan=plan, observe=seen.append)
    updates = updates_of(seen)
    assert [(sent, client) for sent, client, _ in updates[:3]] == [
        (0.0, "c0"),
        (0.0, "c1"),
        (0.0, "c2"),
    ]
    # Each trains at its first measurement after 45 s, which takes no time here, and never again.
    phases = strategy.scheduling.state.phases
    second = {client: sent for sent, client, _ in updates[3:]}
    assert len(updates) == 6
    for client, phase in phases.items():
        ticks = [phase + 10 * number for number in range(20)]
        assert second[client] == next(tick for tick in ticks if tick >= 45.0)
    assert set(strategy.scheduling.state.steps.values()) == {2}


# Requests that come too soon.


def test_a_client_that_asks_too_soon_waits_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("raceme"), "propagate", True)
    policy = OnRequest(RequestParameters(least_seconds=5.0), next_request=every(0.1))
    bench = Bench(policy, 1)
    bench.work(0.0)
    assert bench.work(0.1) == ["c0"]
    bench.answer("c0", 1.0)
    for upload in (1.0, 7.0, 13.0):
        # It requests 0.1 s after its upload, and may train 5 s after it.
        assert bench.work(upload) == []
        assert bench.work(upload + 4.9) == []
        assert policy.wake_at() == upload + 5.0
        assert bench.work(upload + 5.0) == ["c0"]
        bench.answer("c0", upload + 6.0)
    assert policy.state.early == {"c0": 3}
    # A record may be handled twice, by handlers that other tests have added.
    assert [r.getMessage() for r in dict.fromkeys(caplog.records)] == [
        "c0 would upload less than 5 s after its last upload: it has to wait "
        "(least-seconds; logged once per client)"
    ]


def test_a_patient_client_does_not_wait() -> None:
    bench = Bench(OnRequest(RequestParameters(least_seconds=5.0), next_request=every(5.0)), 1)
    bench.work(0.0)
    assert bench.work(5.0) == ["c0"]
    bench.answer("c0", 6.0)
    bench.work(6.0)
    assert bench.work(11.0) == ["c0"]
    assert bench.policy.state.early == {}


def test_measurements_are_no_uploads_but_training_waits() -> None:
    bench = trained(least_seconds=20.0)
    evaluate(bench, 1.0, 1.0)
    assert evaluate(bench, 3.0, 2.0)
    assert bench.work(3.0) == []
    assert bench.policy.wake_at() == 21.0
    assert bench.work(21.0) == ["c0"]


# Devices that decide themselves.


def test_devices_are_invited_at_once_to_train_and_to_nothing_else() -> None:
    bench = Bench(asking("device"), 2)
    assert bench.work(0.0) == ["c0", "c1"]
    assert bench.policy.settings(Request("c0")) == {"invitation": True}
    assert bench.policy.settings(Request("c0", "train-best")) == {"invitation": True}
    assert bench.policy.settings(Request("c0", LOSSES)) == {}
    assert bench.policy.invited("c0")
    for mode in ("poisson", "fixed", "loss"):
        assert asking(mode).settings(Request("c0")) == {}
        assert not asking(mode).invited("c0")


def test_a_device_that_comes_back_too_soon_is_refused_and_invited_later() -> None:
    bench = Bench(asking("device", least_seconds=5.0), 1)
    bench.work(0.0)
    assert bench.answer("c0", 1.0) == ["c0"]
    assert bench.work(1.0) == ["c0"]
    too_soon = r"it came 2\.5 s after its last upload: two uploads must be at least 5 s apart"
    with pytest.raises(InvalidReplyError, match=too_soon):
        bench.answer("c0", 3.5)
    bench.idle.add("c0")
    assert bench.policy.state.early == {"c0": 1}
    assert bench.work(3.5) == []
    assert bench.work(6.0) == ["c0"]
    # The device's request is fulfilled.
    assert bench.policy.settings(Request("c0")) == {}
    assert not bench.policy.invited("c0")
    assert bench.answer("c0", 6.0) == ["c0"]
    assert bench.policy.settings(Request("c0")) == {"invitation": True}
    # The next invitation is sent when it may upload again.
    assert bench.work(6.0) == []
    assert bench.policy.wake_at() == 11.0


def test_the_message_says_that_it_is_an_invitation() -> None:
    said: list[object] = []

    def note(reply: Message, partition: int) -> Message:
        return reply

    app, inner = ClientApp(), pulled_app(change=note)
    app.query()(inner)
    app.evaluate()(inner)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        said.append(message.content["config"].get("invitation"))
        return inner(message, context)

    for mode in ("device", "fixed"):
        strategy = Asks(asking(mode))
        strategy.run(grid_of(app, [Device()]), MODEL, 2, plan=Plan(eval_every=1000))
    assert said == [True, True, None, None]


# Resumption.


def whole(strategy: FedAsync, grid: VirtualGrid) -> dict[str, Any]:
    return copy.deepcopy({"strategy": strategy.state_dict(), "grid": grid.state_dict()})


@pytest.mark.parametrize("requests", ["poisson", "fixed", "loss", "device"])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(requests: str) -> None:
    plan = Plan(eval_every=1000, drift=Schedule("seconds", every=2.0))
    rise = [1.2**step for step in range(400)]

    def fleet() -> VirtualGrid:
        devices = [
            Device(seconds_per_round=1.0 + index, jitter=0.3, mean_online=30.0, mean_offline=3.0)
            for index in range(4)
        ]
        return grid_of(drifting_app(rise), devices)

    def method(seed: int) -> Asks:
        return Asks(asking(requests, 3.0, least_seconds=4.0), seed)

    strategy, grid, seen, saved = method(1), fleet(), [], []

    def save() -> str:
        if strategy.progress.updates in (5, 20) and len(saved) < strategy.progress.updates // 5:
            saved.append((len(seen), whole(strategy, grid)))
        return ""

    strategy.run(grid, MODEL, 40, 60.0, plan=plan, observe=seen.append, stop_check=save)
    assert len(saved) > 1
    assert strategy.scheduling.state.early
    for before, state in saved:
        again, restored, new_grid = [], method(99), fleet()
        restored.load_state_dict(state["strategy"])
        new_grid.load_state_dict(state["grid"])
        restored.run(new_grid, MODEL, 40, 60.0, plan=plan, observe=again.append)
        assert again == seen[before:]
        assert plain(restored.state_dict()) == plain(strategy.state_dict())
