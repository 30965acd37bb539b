"""Features that hold updates back, query clients, and release or reject the updates later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from fleets import MODEL, grid_of, pulled_app
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from runs import devices

from raceme.client_app import client_app
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.events import AnswerTaken, Event, RunEnded, UpdateApplied, UpdateRejected
from raceme.core.feature import Feature, FeatureContext, Held, Refusal
from raceme.core.requests import Answer, Request, Update
from raceme.runs.experiment import build_grid, build_strategy, plan, resolve, training_settings
from raceme.simulation import Device, VirtualGrid
from raceme.simulation.devices import Workload
from raceme.strategies import FedAsync, FedAvg, Plan
from raceme.training.models import initial_arrays

CONFIRM = "confirm"


@dataclass
class PairsState:
    waiting: dict[str, Update] = field(default_factory=dict)
    confirmed: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


class Pairs(Feature):
    """Releases updates in pairs, after both clients have confirmed them."""

    state_type = PairsState
    state: PairsState

    def on_update(self, update: Update, context: FeatureContext) -> Held:
        self.state.waiting[update.task.client] = update
        return Held("a second update")

    def pending(self, context: FeatureContext) -> Iterable[Request | Update | Refusal]:
        state = self.state
        found: list[Request | Update | Refusal] = []
        if len(state.waiting) >= 2 and not state.asked:
            state.asked = list(state.waiting)[:2]
            found += [Request(client, CONFIRM, (), {}, {"number": 3}) for client in state.asked]
        if state.asked and set(state.confirmed) >= set(state.asked):
            for client in state.asked:
                update, said = state.waiting.pop(client), state.confirmed.pop(client)
                found.append(update if said == 3 else Refusal("it is not confirmed", client))
            state.asked = []
        return found

    def on_answer(self, answer: Answer, context: FeatureContext) -> None:
        self.state.confirmed[answer.task.client] = answer.metrics["said"]


def app() -> ClientApp:
    """Return an app in which client-1 does not confirm."""
    honest, made = client_app(), ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        asked = message.content["config"]
        if asked.get("kind") != CONFIRM:
            return honest(message, context)
        said = 0 if context.node_config["partition-id"] == 1 else asked["number"]
        metrics = MetricRecord({"said": said})
        told = ConfigRecord({"kind": CONFIRM, "task": asked["task"]})
        return Message(RecordDict({"metrics": metrics, "config": told}), reply_to=message)

    made.query()(honest)
    made.evaluate()(honest)
    return made


def run(clients: int, updates: int) -> tuple[list[Event], np.ndarray]:
    keys = {"strategy": "fedasync", "dataset": "digits", "model": "mclr", "workers": "0"}
    config = resolve(RunConfig.from_mapping({**keys, "clients": clients, "max-updates": updates}))
    method, events = build_strategy(config), list[Event]()
    method.features = Chain({"pairs": Pairs()})
    grid = VirtualGrid(app(), build_grid(config).nodes, config.to_mapping(), config.seed)
    method.run(
        grid,
        initial_arrays(config),
        updates,
        train_config=training_settings(config),
        plan=plan(config),
        observe=events.append,
    )
    return events, method.models[0].vector


def test_updates_are_released_and_refused_after_further_requests() -> None:
    events, _ = run(clients=6, updates=20)
    applied = [event for event in events if isinstance(event, UpdateApplied)]
    refused = [event for event in events if isinstance(event, UpdateRejected)]
    assert {event.client for event in refused} == {"client-1"}
    assert {event.reason for event in refused} == {"it is not confirmed"}
    assert "client-1" not in {event.client for event in applied}
    asked = [event for event in events if isinstance(event, AnswerTaken)]
    assert {event.kind for event in asked} == {CONFIRM}
    # The requests carry no models.
    assert {event.bytes_down for event in asked} == {0}
    assert len(asked) >= len(applied) + len(refused)
    # The last answer releases the last update, and the limit is checked before other replies.
    assert events[-1].time == asked[-1].time


def test_a_simulation_ends_if_all_clients_wait_for_ever() -> None:
    events, _ = run(clients=1, updates=20)
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.reason == "all clients wait for a second update"


@dataclass
class ConfirmsState:
    unasked: list[str] = field(default_factory=list)


class Confirms(Feature):
    """Holds every update until its client answers another request."""

    state_type = ConfirmsState
    state: ConfirmsState

    def on_update(self, update: Update, context: FeatureContext) -> Held:
        self.state.unasked.append(update.task.client)
        return Held("an answer")

    def pending(self, context: FeatureContext) -> Iterable[Request]:
        asked, self.state.unasked = self.state.unasked, []
        return [Request(client, CONFIRM, ()) for client in asked]


def slow_to_confirm(device: Device, seconds: float) -> tuple[FedAsync, list[UpdateRejected]]:
    """Run a client that needs some time for the second request of an update, of at most 20 s."""

    def cost(message: Message, context: Context, examples: int) -> Workload | None:
        kind = message.content.config_records.get("config", {}).get("kind")
        is_training = message.metadata.message_type == MessageType.TRAIN
        return Workload(scale=seconds if kind == CONFIRM else 1.0) if is_training else None

    method, seen = FedAsync(), list[Event]()
    method.features = Chain({"confirms": Confirms()})
    grid = grid_of(pulled_app(), [device], cost=cost)
    method.run(grid, MODEL, timeout=20.0, plan=Plan(max_time=30.0), observe=seen.append)
    return method, [event for event in seen if isinstance(event, UpdateRejected)]


def test_a_further_request_expires_like_every_other() -> None:
    method, refused = slow_to_confirm(Device(), 100.0)
    assert [event.time for event in refused] == [21.0]
    assert method.progress.fleet.clients["c0"].failures == 1


def test_a_client_that_goes_offline_during_a_further_request_does_not_back_off_longer() -> None:
    method, refused = slow_to_confirm(Device(online=((0.0, 5.0), (25.0, 99.0))), 10.0)
    assert len(refused) == 1
    assert method.progress.fleet.clients["c0"].failures == 0


class HoldsOne(Feature):
    """Holds the updates of c0 until their round is over."""

    def on_update(self, update: Update, context: FeatureContext) -> Update | Held:
        return Held("nothing") if update.task.client == "c0" else update


def test_a_client_whose_held_update_misses_its_round_does_not_back_off() -> None:
    method, seen = FedAvg(), list[Event]()
    method.features = Chain({"one": HoldsOne()})
    method.run(grid_of(pulled_app(), devices(1.0, 1.0)), MODEL, 6, observe=seen.append)
    refused = [event for event in seen if isinstance(event, UpdateRejected)]
    assert {event.client for event in refused} == {"c0"}
    assert len(refused) > 1
    assert method.progress.fleet.clients["c0"].failures == 0


class Stubborn(Feature):
    """Wants to be called at a time that never moves."""

    def wake_at(self, context: FeatureContext) -> float:
        return 1.0


def test_a_time_of_a_feature_that_never_moves_does_not_stop_the_clock() -> None:
    method, seen = FedAsync(), list[Event]()
    method.features = Chain({"stubborn": Stubborn()})
    method.run(grid_of(pulled_app(), devices(1.0)), MODEL, 3, observe=seen.append)
    assert seen[-1].time == 3.0
