"""A method similar to CSAFL: groups by direction and latency, and windows with a time budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raceme.core.clients import Client
from raceme.core.clusters import cosines, parts_of
from raceme.core.messages import Vector
from raceme.core.requests import Outcome, Update
from raceme.core.schedulers import InWindows
from raceme.core.scheduling import Scheduler, sample
from raceme.core.strategy import Method, Needs
from raceme.strategies.shared import partition

BUDGET, PICKED, GROUPS, STALEST, TIME_WEIGHT = 12.0, 6, 3, 4, 0.1


@dataclass
class BudgetedState:
    """Results of pre-training: each client's update and its duration."""

    deltas: dict[str, Vector] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    grouped: bool = False


class Windows(InWindows):
    """Windows with a callback at the end of the first one."""

    def __init__(self, budget: float, members: Any, first: Callable[[], None]) -> None:
        super().__init__(budget, members)
        self.first = first

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        woken = super().wake(now)
        self.first()
        return woken


class Budgeted(Method):
    """All clients pre-train in the first window; then some of them train in each, in groups."""

    state_type = BudgetedState
    needs = Needs(bases=True)
    scheduling: InWindows
    state: BudgetedState

    def scheduler(self) -> Scheduler:
        return Windows(BUDGET, self.members, first=self.form_groups)

    def members(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        return sample(online, PICKED, rng) if self.state.grouped else online

    def on_update(self, update: Update) -> Outcome:
        client, window = update.task.client, self.scheduling.state
        home = self.clusters.main(client)
        if not self.state.grouped:
            self.state.deltas[client] = update.delta
            self.state.latency[client] = update.arrived_at - update.task.sent_at
            return Outcome(home, 0, 0.0)
        staleness = update.staleness
        together = [c for c in self.clusters.clients(home) if c in window.members]
        examples = sum(self.progress.fleet.clients[c].num_examples for c in together)
        share = update.num_examples / examples if staleness <= STALEST else 0.0
        if share:
            self.models[home].mix(update.vector, share)
        return Outcome(home, staleness, share)

    def form_groups(self) -> None:
        if self.state.grouped:
            return
        clients = list(self.state.deltas)
        directions = np.stack(list(self.state.deltas.values()))
        seconds = np.array(list(self.state.latency.values()))
        z = (seconds - seconds.mean()) / (seconds.std() or 1.0)
        rows = np.column_stack([TIME_WEIGHT * z, cosines(directions, directions)])
        squares = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
        labels = partition(np.exp(-squares), GROUPS, seed=int(self.rng.integers(2**31)))
        self.clusters.split(0, parts_of(clients, labels))
        self.state.grouped = True
