"""FedDrift: a model for each concept that clients' data come to follow, as concepts come and go.

Jothimurugesan et al., "Federated Learning under Distributed Concept Drift", AISTATS 2023. Whenever
clients have new data, each measures every model on them. A client whose least loss has grown by
more than δ since it was last asked has drifted; others take the model of least loss. Every drifted
client founds a model of its own, a copy of its best one, which nobody else may join for W steps;
models that are alike are merged then (hierarchically, complete linkage). FedDrift-Eager founds one
model for all that have drifted together, and merges nothing. Model m is trained on all data that
were ever assigned to it, of whichever client and step, by federated averaging: a client that has
had data of several concepts trains several models.

No data leave a client: the server sees losses (or accuracies, as in the authors' code) of models.
A client in a simulation has its data of former steps, since these are a function of the step; a
device keeps what it can: ``memory`` says how many steps are used, all in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raceme.clustering.clusters import Clusters
from raceme.clustering.concepts import Concepts
from raceme.clustering.model import Model
from raceme.config.options import option
from raceme.protocol.messages import SCORES, Vector
from raceme.server.dispatch import Dispatch, InRounds, Moment, RoundsParameters
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method, Variant, average_by_cluster
from raceme.server.replies import Answer, InvalidReplyError, Update
from raceme.server.work import Task, Work
from raceme.strategies.concept_models import (
    ConceptParameters,
    ask,
    assign_best,
    found_each,
    found_together,
    merge_alike,
    scoring,
    seat,
    take_scores,
    training,
    without_classes,
)

_ASKING_SECONDS = 120.0
"""How long a round waits for scores: real devices may be slow to answer, or gone."""


@dataclass(frozen=True)
class FedDriftParameters(ConceptParameters, RoundsParameters):
    """Hyper-parameters of FedDrift."""

    founding: str = option(
        "each",
        "new models: each drifted client founds one, or all that drift together (Eager)",
        among=("each", "together"),
    )
    ask_every: int = option(
        0, "rounds after which a client measures again, data moved on or not (0: only then)", low=0
    )


@dataclass(frozen=True)
class FedDriftEagerParameters(FedDriftParameters):
    """Hyper-parameters of FedDrift-Eager."""

    founding: str = option(
        "together", "new models: one for all that drift together", among=("together",)
    )


@dataclass
class FedDriftState:
    """What FedDrift knows beside its models.

    Attributes
    ----------
    concepts : Concepts
        Which data belong to which model.
    answered : dict[str, int]
        Clients that have measured, and at which step of their data.
    latest : int
        The latest step at which data were assigned.
    begun : dict[str, dict[int, bool]]
        Models that a client was given to train in this round.
    trained : dict[str, int]
        Rounds in which a client has trained since it last measured.
    """

    concepts: Concepts = field(default_factory=Concepts)
    answered: dict[str, int] = field(default_factory=dict)
    latest: int = 0
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)


class FedDrift(Method):
    """A model for each concept of data that drift: detection, isolation, merging (FedDrift)."""

    parameters_type = FedDriftParameters
    state_type = FedDriftState
    parameters: FedDriftParameters
    state: FedDriftState
    dispatch: InRounds

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have."""
        return without_classes(self.parameters)

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({SCORES} if self.parameters.ask_every else ())

    def policy(self) -> Dispatch:
        """Work in rounds; who has data of several models trains one after the other."""
        return InRounds(
            self.parameters.fraction,
            picking=self.parameters.picking,
            again=lambda client: self._next_model(client) is not None,
        )

    def initialize(self, vector: Vector) -> None:
        """Begin with one model; those of single clients are copies of it."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = FedDriftState()

    def add_client(self, client: Client) -> None:
        """Take a client in; at the start it is given a model, later it is asked for scores."""
        super().add_client(client)
        seat(self, self.state.concepts, client.client_id, self.parameters)

    # Before a round: who is to measure?

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Let clients with new data measure all models first; then let participants train."""
        asked = self.dispatch.ask_first(moment, self._is_to_measure, patience=_ASKING_SECONDS)
        if asked is not None:
            return [scoring(self, self.state.concepts, c, self.parameters) for c in asked]
        if self.state.answered and not (self.dispatch.state.running or moment.greeting):
            self._judge()
        return super().next_work(moment)

    def _is_to_measure(self, client: str) -> bool:
        """Return whether a client has new data, or has trained long enough (``ask-every``)."""
        if (self.step_of(client) or 0) not in self.state.concepts.assigned.get(client, {}):
            return True
        return 0 < self.parameters.ask_every <= self.state.trained.get(client, 0)

    def on_dispatch(self, task: Task) -> None:
        """Note who is asked, and who trains what."""
        state = self.state
        if task.kind == SCORES:
            state.trained[task.client] = 0
            ask(state.concepts, task, self.parameters)
        else:
            state.begun.setdefault(task.client, {})[task.cluster] = True

    def on_answer(self, answer: Answer) -> None:
        """Take scores in; they are acted on together.

        Raises
        ------
        InvalidReplyError
            They are no scores, or come after the round has begun without them.
        """
        if answer.task.client not in self.dispatch.state.asking.awaited:
            raise InvalidReplyError("it came after the round had begun")
        take_scores(self, self.state.concepts, answer, self.parameters)
        self.state.answered[answer.task.client] = answer.task.step

    def on_close(self, task: Task) -> None:
        """Forget what was asked for."""
        if task.kind == SCORES:
            self.state.concepts.asked.pop(task.client, None)

    def _judge(self) -> None:
        """Assign the data of those who have answered; found models, and merge what is alike."""
        state, concepts = self.state, self.state.concepts
        latest = max(state.answered.values())
        if latest > state.latest:
            concepts.age(list(concepts.isolated))
            state.latest = latest
        settled = [model for model in self.models if model not in concepts.isolated]
        drifted = assign_best(self, concepts, state.answered, self.parameters)
        if self.parameters.founding == "together":
            found_together(self, concepts, drifted, self.parameters)
        else:
            found_each(self, concepts, drifted, self.parameters)
            merge_alike(self, concepts, settled, self.parameters)
        # Models change until clients measure again.
        state.answered, concepts.losses = {}, {}

    # A round.

    def work_for(self, client: str) -> Work:
        """Let a client train the next of the models that have data of it."""
        model = self._next_model(client)
        return training(self, self.state.concepts, client, model, self.parameters)

    def _next_model(self, client: str) -> int | None:
        """Return the first model that has data of a client and that it has not begun."""
        begun, now = self.state.begun.get(client, {}), self.step_of(client) or 0
        own = self.state.concepts.by_model(client, now, self.parameters.memory)
        return next((model for model in own if model not in begun), None)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Average what was trained from each model, weighted by the numbers of samples."""
        self.state.begun = {}
        for client in {update.task.client for update in updates}:
            self.state.trained[client] = self.state.trained.get(client, 0) + 1
        return average_by_cluster(self.clusters, updates, home=lambda update: update.task.cluster)


FedDriftEager = Variant(
    FedDrift, FedDriftEagerParameters, "FedDrift without merging: one new model (FedDrift-Eager)."
)
