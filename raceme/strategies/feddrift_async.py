"""FedDrift-Async: FedDrift's detection, isolation and merging on every single update.

Our own: Jothimurugesan et al. (AISTATS 2023) work in rounds and judge all clients together. Here a
client whose data have moved on measures all models before it trains again, and is judged at once,
by itself: it founds a model if its least loss has grown by more than δ, otherwise it takes the best
one. Where nobody says when data change, it measures again after every few of its updates
(``ask-every``). A new model is isolated until its client has measured W times more; after every
answer models that are alike are merged. An update is mixed in at once, with a weight that falls
with staleness as FedAsync's does; one to a model that was merged meanwhile goes into the merged
one. A client that has data of several models trains them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raceme.clustering.clusters import Clusters
from raceme.clustering.concepts import Concepts
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import SCORES, Vector
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.replies import Answer, Update
from raceme.server.work import Task, Work
from raceme.strategies.concept_models import (
    ConceptParameters,
    ask,
    assign_best,
    found_each,
    merge_alike,
    scoring,
    seat,
    take_scores,
    training,
    without_classes,
)
from raceme.strategies.fedasync import FedAsyncParameters, mix_by_staleness


@dataclass(frozen=True)
class FedDriftAsyncParameters(ConceptParameters, FedAsyncParameters):
    """Hyper-parameters of FedDrift-Async."""

    ask_every: int = option(
        5, "a client's updates after which it measures again (0: when its data move on)", low=0
    )


@dataclass
class FedDriftAsyncState:
    """What FedDrift-Async knows beside its models.

    Attributes
    ----------
    concepts : Concepts
        Which data belong to which model.
    begun : dict[str, dict[int, bool]]
        Models that a client was given to train since it last began with the first.
    trained : dict[str, int]
        Updates of a client since it was last asked for scores.
    """

    concepts: Concepts = field(default_factory=Concepts)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)


class FedDriftAsync(Method):
    """FedDrift's models for concepts on every single update (FedDrift-Async, our own)."""

    parameters_type = FedDriftAsyncParameters
    state_type = FedDriftAsyncState
    parameters: FedDriftAsyncParameters
    state: FedDriftAsyncState

    def initialize(self, vector: Vector) -> None:
        """Begin with one model; those of single clients are copies of it."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = FedDriftAsyncState()

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have."""
        return without_classes(self.parameters)

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({SCORES} if self.parameters.ask_every else ())

    def add_client(self, client: Client) -> None:
        """Take a client in; at the start it is given a model, later it is asked for scores."""
        super().add_client(client)
        seat(self, self.state.concepts, client.client_id, self.parameters)

    def work_for(self, client: str) -> Work:
        """Ask a client with new data for scores; let others train the next of their models."""
        concepts = self.state.concepts
        if self._is_to_measure(client):
            return scoring(self, concepts, client, self.parameters)
        return training(self, concepts, client, self._next_model(client), self.parameters)

    def _is_to_measure(self, client: str) -> bool:
        """Return whether a client measures before it trains: never twice without training."""
        step, trained = self.step_of(client) or 0, self.state.trained.get(client, -1)
        if step not in self.state.concepts.assigned.get(client, {}):
            return trained != 0
        return 0 < self.parameters.ask_every <= trained

    def _next_model(self, client: str) -> int | None:
        """Return the first model that has data of a client and whose turn it is."""
        begun, now = self.state.begun.get(client, {}), self.step_of(client) or 0
        own = list(self.state.concepts.by_model(client, now, self.parameters.memory))
        return next((model for model in own if model not in begun), own[0] if own else None)

    def on_dispatch(self, task: Task) -> None:
        """Note who is asked, and who trains what."""
        state = self.state
        if task.kind == SCORES:
            state.trained[task.client] = 0
            ask(state.concepts, task, self.parameters)
            return
        begun = state.begun.setdefault(task.client, {})
        if task.cluster in begun:
            begun.clear()
        begun[task.cluster] = True

    def on_answer(self, answer: Answer) -> None:
        """Assign the client's data; found a model if they have drifted, and merge what is alike."""
        client, concepts = answer.task.client, self.state.concepts
        take_scores(self, concepts, answer, self.parameters)
        if self.clusters.is_placed(client):
            own = self.clusters.main(client)
            concepts.age([own] if own in concepts.isolated else [])
        settled = [model for model in self.models if model not in concepts.isolated]
        drifted = assign_best(self, concepts, {client: answer.task.step}, self.parameters)
        found_each(self, concepts, drifted, self.parameters)
        merge_alike(self, concepts, settled, self.parameters)

    def on_close(self, task: Task) -> None:
        """Count a client's updates, and those that were lost."""
        state = self.state
        if task.kind == SCORES:
            state.concepts.asked.pop(task.client, None)
        else:
            state.trained[task.client] = state.trained.get(task.client, 0) + 1

    def on_update(self, update: Update) -> Applied:
        """Mix an update into the model that it was trained from, or what that was merged into."""
        task = update.task
        cluster = self.state.concepts.heir(task.cluster)
        if cluster not in self.models:
            return Applied(self.clusters.main(task.client), staleness=0, weight=0.0)
        model = self.models[cluster]
        staleness = model.version - task.version
        if cluster != task.cluster:
            staleness = self.progress.updates - task.updates
        return mix_by_staleness(model, update, cluster, staleness, self.parameters)
