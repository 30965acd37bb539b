"""Features that hold updates back, query clients, and release or reject the updates later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from raceme.client_app import client_app
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.events import AnswerTaken, Event, RunEnded, UpdateApplied, UpdateRejected
from raceme.core.feature import Feature, FeatureContext, Held, Refusal
from raceme.core.requests import Answer, Request, Update
from raceme.runs.experiment import build_grid, build_strategy, plan, resolve, training_settings
from raceme.simulation import VirtualGrid
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
    assert len(asked) >= len(applied) + len(refused)


def test_a_simulation_ends_if_all_clients_wait_for_ever() -> None:
    events, _ = run(clients=1, updates=20)
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.reason == "all clients wait for a second update"
