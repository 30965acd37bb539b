"""IFCA and FeSEM: K models; each client trains the one nearest to its data or to its local model.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1
with model averaging: each participant receives all K models, takes the one with the least loss on
its training data, trains it and returns it with its index; the server averages per model.
IFCA-Async, as in CASA's paper, does the same on every update.

A client whose data change keeps its last choice until it trains again. With ``detect=label-counts``
it chooses again before the next round, among all K models: IFCA-MIG of Duan et al. (TPDS 2022,
section 5.3), with FlexCFL's criterion of a change.

FeSEM: Xie et al., "Multi-Center Federated Learning", 2020, as in the baseline of FlexCFL's paper
(Duan et al., TPDS 2022, section 5) and its authors' code: expectation maximisation over l2
distances between local models and centres, in rounds. The centres start as K different initial
models. Before a client trains, it is assigned to the centre nearest to its local model (E step);
then it trains the centre's model. The local model is the one that the client trained last, at first
the initial model w0. A centre becomes the simple mean of the models that its clients return (M
step).

All clients start with the same local model and thus at the same centre, and trained models are
nearer to this centre than to an untrained one. FeSEM therefore often uses a single model, as the
paper reports. ``start=random`` and ``start=k-means++`` are another reading: the first round trains
w0, the centres start at the models of K of its clients, and clients are assigned after training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters, Model, parts_of
from raceme.core.messages import (
    COMPUTE_SCALE,
    LABEL_COUNTS,
    LOSSES,
    SCORES,
    TRAIN,
    TRAIN_BEST,
    Vector,
)
from raceme.core.options import option
from raceme.core.requests import (
    Answer,
    InFlight,
    InvalidReplyError,
    Outcome,
    Outcomes,
    Request,
    Update,
)
from raceme.core.scheduling import InRounds, RoundsParameters, SelectionContext
from raceme.core.strategy import Method, Needs, average_by_cluster
from raceme.strategies.fedasync import MixingParameters, mix_by_staleness
from raceme.strategies.shared import (
    DEFAULT_K,
    AveragingRounds,
    LabelCounts,
    different_models,
    log_count,
)

_TOLERANCE = 0.2
"""Share of a client's samples that may come or go: FlexCFL's."""


@dataclass(frozen=True)
class _Choice:
    """Common parameters of IFCA and IFCA-Async."""

    k: int = option(DEFAULT_K, "K: number of models", low=1)
    choosing_cost: float = option(
        0.0, "cost of testing one model, as a share of a round's computation (our addition)", low=0
    )


@dataclass(frozen=True)
class IFCAParameters(_Choice, RoundsParameters):
    """Hyper-parameters of IFCA."""

    by_examples: bool = option(False, "weight models by their examples (the paper: equally)")
    detect: str = option(
        "none",
        "detection of changed data, after which a client chooses again before the next round: "
        "label-counts (IFCA-MIG of FlexCFL's paper), or none",
        among=("none", "label-counts"),
    )


@dataclass(frozen=True)
class IFCAAsyncParameters(_Choice, MixingParameters):
    """Hyper-parameters of IFCA-Async."""


class ChoosesModel(Method):
    """Shared by IFCA, in rounds, and IFCA-Async, at every update."""

    parameters: _Choice

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(kinds=frozenset({TRAIN_BEST} if self.parameters.k > 1 else ()))

    def initialize(self, vector: Vector) -> None:
        """Start from K different models."""
        self.clusters = different_models(self, vector, self.parameters.k)
        self.state = self.state_type()

    def request_for(self, client: str) -> Request:
        """Return training of the client's choice among all models.

        All models are sent; the simulator accounts for the choice if configured.
        """
        models = tuple(self.models)
        cost = self.parameters.choosing_cost * len(models)
        settings = {COMPUTE_SCALE: 1.0 + cost} if cost else {}
        return Request(client, TRAIN_BEST if len(models) > 1 else TRAIN, models, settings=settings)


class IFCA(ChoosesModel, AveragingRounds):
    """K models; each client trains the one with the lowest loss on its data, in rounds (IFCA).

    A client is tested with its last choice; before the first choice with the most frequent one,
    initially the first.
    """

    parameters_type = IFCAParameters
    state_type = LabelCounts
    parameters: IFCAParameters
    state: LabelCounts
    scheduling: InRounds

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        needs = super().needs
        if self.parameters.detect == "none":
            return needs
        kinds = needs.kinds | {LABEL_COUNTS, SCORES}
        return replace(needs, kinds=kinds, classes="count their labels unless detect=none")

    def _queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Query label counts before each round, and then the choices of changed clients."""
        if self.parameters.detect == "none":
            return None
        state = self.state
        asked = self.scheduling.ask_first(context, state.answers)
        if asked is None:
            asked = self.scheduling.ask_first(
                context, lambda client: client in state.cold and state.answers(client), every=0
            )
        if asked is None:
            return None
        return [
            self._choice_of(client)
            if client in state.cold
            else Request(client, LABEL_COUNTS, models=())
            for client in asked
        ]

    def _choice_of(self, client: str) -> Request:
        """Return a measurement of all models without training."""
        models = tuple(self.models)
        settings = {COMPUTE_SCALE: self.parameters.choosing_cost * len(models)}
        return Request(client, SCORES, models, settings=settings)

    def on_sent(self, task: InFlight) -> None:
        """Record the queried clients."""
        if task.kind in (LABEL_COUNTS, SCORES):
            self.state.ask(task.client)

    def on_answer(self, answer: Answer) -> None:
        """Process label counts, or move a client to the model with the lowest loss on its data.

        Raises
        ------
        InvalidReplyError
            It does not have one loss per model.
        """
        client, models = answer.task.client, list(answer.task.candidates)
        if answer.task.kind == LABEL_COUNTS:
            stated = self.progress.fleet.clients[client].num_examples
            self.state.take(answer, stated, _TOLERANCE)
            if not self.clusters.is_placed(client):
                self.state.settle(client)
            return
        losses = answer.numbers.get(LOSSES)
        if losses is None or losses.shape != (len(models), 1) or not np.isfinite(losses).all():
            raise InvalidReplyError(f"it must state a loss for each of {len(models)} models")
        self.clusters.assign(client, models[int(np.argmin(losses))])
        self.state.unanswered.pop(client, None)
        self.state.settle(client)

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Average the models trained from the same one."""
        for update in updates:
            self.clusters.assign(update.task.client, update.task.cluster)
            self.state.settle(update.task.client)
        return average_by_cluster(self.clusters, updates, self.parameters.by_examples)


class IFCAAsync(ChoosesModel):
    """IFCA at every arrival: staleness-weighted mixing into the model that the client chose."""

    parameters_type = IFCAAsyncParameters
    parameters: IFCAAsyncParameters

    def on_update(self, update: Update) -> Outcome:
        """Mix the update into the chosen model."""
        chosen = update.task.cluster
        self.clusters.assign(update.task.client, chosen)
        return mix_by_staleness(self, update, chosen, update.staleness)


@dataclass(frozen=True)
class FeSEMParameters(RoundsParameters):
    """Hyper-parameters of FeSEM."""

    k: int = option(DEFAULT_K, "K: number of centres", low=1)
    start: str = option(
        "models",
        "first centres: models: K different initial models (the paper); or the models of clients "
        "after a first round: random ones, or k-means++ among them (our addition)",
        among=("models", "random", "k-means++"),
    )


@dataclass
class FeSEMState:
    """State of FeSEM besides its centres, with ``start=models``.

    Attributes
    ----------
    initial : Vector
        w0: local model of a client before its training. Shape (d,).
    local : dict[str, Vector]
        w_i: the model that each client trained last. Shape (d,).
    """

    initial: Vector
    local: dict[str, Vector] = field(default_factory=dict)


class FeSEM(Method):
    """K-means over client models: each client joins the centre nearest in l2 distance (FeSEM).

    If the centres start at clients' models, cluster 0 has the initial model during the first round.
    """

    parameters_type = FeSEMParameters
    state_type = FeSEMState
    parameters: FeSEMParameters
    state: FeSEMState

    def initialize(self, vector: Vector) -> None:
        """Start from K different models, or from the initial one for the first round."""
        if self._assigns_first:
            self.clusters = different_models(self, vector, self.parameters.k)
        else:
            log_count(self, self.parameters.k, "k")
            self.clusters = Clusters({0: Model(vector)})
        self.state = FeSEMState(vector.copy())

    @property
    def _assigns_first(self) -> bool:
        """Whether a client is assigned before it trains, not after."""
        return self.parameters.start == "models"

    def request_for(self, client: str) -> Request:
        """Assign a client to the centre nearest to its local model (E), whose model it trains."""
        if self._assigns_first:
            local = self.compared(self.state.local.get(client, self.state.initial))
            self.clusters.assign(client, self._nearest(local[np.newaxis])[0])
        return Request(client)

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Update the centres (M); assign clients to the nearest ones if not done before."""
        if self._assigns_first:
            self.state.local.update({update.task.client: update.vector for update in updates})
            return average_by_cluster(self.clusters, updates, by_examples=False)
        vectors = np.stack([self.compared(update.vector) for update in updates])
        if 0 in self.models:
            self._found_centres(updates, vectors)
        else:
            for update, centre in zip(updates, self._nearest(vectors), strict=True):
                self.clusters.assign(update.task.client, centre)
        return average_by_cluster(self.clusters, updates, by_examples=False)

    def _nearest(self, vectors: NDArray[np.float32]) -> list[int]:
        """Return the cluster of the nearest centre for each model, by weights."""
        centres = np.stack([self.compared(model.vector) for model in self.models.values()])
        clusters = list(self.models)
        return [clusters[index] for index in nearest_centre(vectors, centres)]

    def _found_centres(self, updates: Sequence[Update], vectors: NDArray[np.float32]) -> None:
        """Use K clients' models as first centres; absent clients have none."""
        count = min(self.parameters.k, len(updates))
        if self.parameters.start == "random":
            chosen = self.rng.choice(len(updates), size=count, replace=False)
        else:
            from sklearn.cluster import kmeans_plusplus

            seed = int(self.rng.integers(2**31))
            chosen = kmeans_plusplus(vectors, count, random_state=seed)[1]
        labels = nearest_centre(vectors, vectors[chosen])
        # Each centre is nearest to itself, so none is empty unless models are equal.
        labels[chosen] = np.arange(count)
        # The split places only named clients; absent ones have no centre.
        self.clusters.split(0, parts_of([update.task.client for update in updates], labels))


def nearest_centre(vectors: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the index of the nearest centre in l2 distance for each model.

    Parameters
    ----------
    vectors, centres : NDArray[np.float32]
        Shapes (m, d) and (k, d).
    """
    distances = [np.linalg.norm(vectors - centre, axis=1) for centre in centres]
    return np.asarray(np.argmin(np.stack(distances), axis=0), np.int64)
