"""Standalone: every client trains its own model and nothing is exchanged.

The lower reference of the papers: what a device achieves with its own data alone. Time passes as
for the other methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raceme.messages import Vector
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.fleet import Client
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update


@dataclass(frozen=True)
class StandaloneParameters:
    """There is nothing to choose."""


@dataclass
class StandaloneState:
    """One model per client.

    Attributes
    ----------
    initial : Vector
        Where every client starts. Shape (d,).
    models : dict[int, Model]
        The clients' models, by number.
    numbers : dict[str, int]
        Number of each client.
    """

    initial: Vector
    models: dict[int, Model] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


class Standalone(AsyncStrategy):
    """No federation: every client keeps its own model (the lower reference)."""

    parameters_type = StandaloneParameters
    state_type = StandaloneState
    state: StandaloneState

    def initialize(self, vector: Vector) -> None:
        """Keep the initial model for every client to come."""
        self.state = StandaloneState(vector)

    def add_client(self, client: Client) -> None:
        """Give a new client a copy of the initial model."""
        if client.client_id not in self.state.numbers:
            number = len(self.state.numbers)
            self.state.numbers[client.client_id] = number
            self.state.models[number] = Model(self.state.initial.copy())

    def on_update(self, update: Update) -> Applied:
        """Replace the client's model by what it trained."""
        number = self.state.numbers[update.task.client]
        model = self.state.models[number]
        model.vector[...] = update.vector
        model.version += 1
        return Applied(cluster=number, staleness=0, weight=1.0)

    def cluster_of(self, client: str) -> int:
        """A client is its own cluster."""
        return self.state.numbers[client]

    @property
    def models(self) -> Mapping[int, Model]:
        """The clients' models."""
        return self.state.models
