"""What the loop asks a method: the interface, with the answers of the simplest method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Bases, Clusters, Model, Weights, blended
from raceme.core.errors import UserError
from raceme.core.events import Observer
from raceme.core.messages import TRAIN_BEST, TRAINING, ModelSpec, Vector
from raceme.core.progress import Progress
from raceme.core.protection import Guard
from raceme.core.requests import Answer, Task, Update, Value, Work
from raceme.core.scheduling import Dispatch, EveryIdle, Moment, NoState

# -----------------------------------------------------------------------------
# Models measured on data that the server has: proxy sets.
# -----------------------------------------------------------------------------


class Probe(Protocol):
    """Returns the losses of models on the server's own samples.

    How a loss is computed is not the method's concern: it is given this function.

    Attributes
    ----------
    sets : int
        How many proxy sets there are.
    """

    @property
    def sets(self) -> int:
        """How many proxy sets there are."""
        ...

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Measure models.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Which proxy set, from 0: a method may have one per cluster.

        Returns
        -------
        NDArray[np.float32]
            Loss of each sample under each model, shape (models, samples).
        """
        ...


# -----------------------------------------------------------------------------
# Where clients pull the models, kept small: for a map of the clients while a run goes on.
#
# A model is kept as a sketch of 128 numbers: each of its weights is added, with a sign that was
# drawn once for all, to one of them (the count sketch of Charikar, Chen and Farach-Colton 2002).
# Sketches are linear, and inner products come out of them nearly. Of very large models only some
# weights are read, evenly spread, so that a sketch takes no longer.
# -----------------------------------------------------------------------------


SIZE = 128
_MOST_WEIGHTS = 1 << 17
"""Weights that are read of a model at most: a sketch takes less than a tenth of a millisecond."""
_MOST_CLIENTS = 10_000
"""Clients that are kept: 5 MB."""
_SHARE = 0.3
"""Share of a client's latest update in the mean of its updates."""
_TURNS = 4
_SIGNS_SEED = 0x6D6170


class Sketch:
    """Makes sketches of models of one shape.

    Parameters
    ----------
    length : int
        Numbers of a model, d.
    weights : NDArray[np.bool_], optional
        Which of its numbers are weights; statistics and counters are left out. Shape (d,).
    """

    def __init__(self, length: int, weights: NDArray[np.bool_] | None = None) -> None:
        self._rows = length // SIZE
        self._stride = max(1, -(-length // _MOST_WEIGHTS))
        # Its own generator, always the same: it takes nothing from the run's chance.
        signs = np.random.default_rng(_SIGNS_SEED).choice(np.array([-1, 1], np.float32), length)
        if weights is not None:
            signs *= weights
        self._signs = self._read(signs).copy()
        self._last = signs[self._rows * SIZE :].copy()

    def __call__(self, vector: Vector) -> Vector:
        """Return the sketch of a model. Shape (SIZE,)."""
        found: Vector = (self._read(vector) * self._signs).sum(axis=0)
        found[: len(self._last)] += vector[self._rows * SIZE :] * self._last
        return found

    def _read(self, vector: Vector) -> Vector:
        return vector[: self._rows * SIZE].reshape(-1, SIZE)[:: self._stride]


class Pulls:
    """The mean change that each client makes to the models that it is given, as sketches.

    Of a client that is new the first update is taken; after that, one update after every fourth
    look, for each client in its turn. So neither fast devices nor many evaluations cost much.

    Parameters
    ----------
    sketch : Sketch
        Makes sketches of this run's models.
    """

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._versions: dict[int, tuple[int, Vector]] = {}
        self._bases: dict[int, Mapping[int, Vector] | Vector] = {}
        self._pulls: dict[str, Vector] = {}
        self._numbers: dict[str, int] = {}
        self._taken: set[str] = set()
        self._looks = 0

    def wants(self, client: str) -> bool:
        """Return whether an update of a client would be taken."""
        number = self._numbers.get(client)
        is_its_turn = number is None or (number + self._looks) % _TURNS == 0
        return is_its_turn and client not in self._taken

    def send(self, task: int, models: Mapping[int, Model], weights: Weights, chooses: bool) -> None:
        """Keep what a client starts from.

        Parameters
        ----------
        task : int
            Number of the task.
        models : Mapping[int, Model]
            The models by cluster.
        weights : Mapping[int, float]
            Those that are sent, with their shares in what the client starts from.
        chooses : bool
            Whether the client starts from one of them that it chooses.
        """
        if chooses:
            self._bases[task] = {cluster: self._of(cluster, models) for cluster in weights}
        else:
            self._bases[task] = self._mixed(models, weights)

    def awaits(self, task: int) -> bool:
        """Return whether it is kept what a task started from."""
        return task in self._bases

    def take(self, task: int, client: str, cluster: int, vector: Vector) -> None:
        """Take in the model of a client; `cluster` is the one that it has chosen of several."""
        base = self._bases.get(task)
        if base is None or not self.wants(client):
            return
        if isinstance(base, Mapping):
            base = base.get(cluster)
        if base is None or (client not in self._pulls and len(self._pulls) >= _MOST_CLIENTS):
            return
        self._taken.add(client)
        self._numbers.setdefault(client, len(self._numbers))
        pull = self._sketch(vector) - base
        before = self._pulls.get(client, pull)
        self._pulls[client] = before + np.float32(_SHARE) * (pull - before)

    def close(self, task: int) -> None:
        """Forget what a task started from."""
        self._bases.pop(task, None)

    def seen_from_the_mean(
        self, models: Mapping[int, Model], placement: Callable[[str], Weights]
    ) -> tuple[list[str], NDArray[np.float32]]:
        """Return the clients, and where their models lie as seen from the mean of all.

        A client's model is that of its clusters now, and its mean change on top.

        Parameters
        ----------
        models : Mapping[int, Model]
            The models by cluster.
        placement : Callable
            Returns the clusters that serve a client, with weights.

        Returns
        -------
        tuple[list[str], NDArray[np.float32]]
            Client ids, and sketches. Shape (n, SIZE).
        """
        self._taken.clear()
        self._looks += 1
        for cluster in [cluster for cluster in self._versions if cluster not in models]:
            del self._versions[cluster]
        clients = list(self._pulls)
        if not clients:
            return clients, np.empty((0, SIZE), np.float32)
        served = np.stack([self._mixed(models, placement(client)) for client in clients])
        pulls = np.stack(list(self._pulls.values()))
        return clients, np.asarray(served - served.mean(axis=0) + pulls, np.float32)

    def _of(self, cluster: int, models: Mapping[int, Model]) -> Vector:
        """Return the sketch of a cluster's model, made once for each version."""
        version, sketch = self._versions.get(cluster, (-1, None))
        model = models[cluster]
        if sketch is None or version != model.version:
            sketch = self._sketch(model.vector)
            self._versions[cluster] = model.version, sketch
        return sketch

    def _mixed(self, models: Mapping[int, Model], weights: Weights) -> Vector:
        if len(weights) == 1:
            return self._of(next(iter(weights)), models)
        parts = [np.float32(share) * self._of(k, models) for k, share in weights.items()]
        return np.asarray(sum(parts[1:], start=parts[0]))


# -----------------------------------------------------------------------------
# What the loop asks a method: the interface, with the answers of the simplest method.
# -----------------------------------------------------------------------------


StopCheck = Callable[[], str]
"""Called between two steps, when the state is whole and can be saved. What it returns, unless it
is empty, ends the run: it is the reason."""


def never_stop() -> str:
    """Never stop."""
    return ""


@dataclass(frozen=True)
class Applied:
    """What a method did with an update.

    Attributes
    ----------
    cluster : int
        The cluster whose model it went into.
    staleness : int
        τ: changes of that model since the client received its own.
    weight : float
        α: share of the client's model in the new one.
    """

    cluster: int
    staleness: int
    weight: float


@dataclass
class RunResult(Result):
    """Flower's result, with all clusters.

    Attributes
    ----------
    arrays : ArrayRecord
        The model of the largest cluster; with one cluster, the model.
    clusters : dict[int, ArrayRecord]
        The model of every cluster.
    evaluate_metrics_clusters : dict[int, dict[int, MetricRecord]]
        What the server's own function has measured of each cluster's model, by round, or by number
        of updates.
    client_clusters : dict[str, dict[int, float]]
        Client id to its clusters, with weights.
    """

    clusters: dict[int, ArrayRecord] = field(default_factory=dict)
    evaluate_metrics_clusters: dict[int, dict[int, MetricRecord]] = field(default_factory=dict)
    client_clusters: dict[str, dict[int, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return Flower's representation, with the clusters if there are several."""
        whole = super().__repr__()
        if len(self.clusters) < 2:
            return whole
        clients = {
            cluster: sum(cluster in weights for weights in self.client_clusters.values())
            for cluster in self.clusters
        }
        listed = ", ".join(f"{cluster} ({count})" for cluster, count in clients.items())
        return f"{whole}\nClusters (clients): {listed}\n"


class Questions(ABC):
    """What a method says, and what the loop may look at.

    A method says what becomes of an update (`on_update`), or of several together (`aggregate`).
    All else may be left as it is: one model for all, every idle client trains.

    Attributes
    ----------
    parameters : dataclass
        Its hyper-parameters.
    clusters : Clusters
        The models, and which of them serve each client.
    state : dataclass
        What the method knows beside them: an object of its `state_type`.
    dispatch : Dispatch
        Who works when; what `policy` returned.
    rng : numpy.random.Generator
        Draws whatever is left to chance.
    progress : Progress
        What has happened so far.
    result : RunResult
        What the run leaves.
    bases : Bases
        Models that clients are training from, if the method or its protection keeps them.
    protection : Guard
        What clients' updates have to pass before the method sees them.
    train_config : ConfigRecord
        The run's settings for local training.
    initial : ArrayRecord
        The model before any training.
    step_of : Callable
        Returns the step of a client's data now; None where nobody says when data change. The loop
        sets it.
    pulls : Pulls, optional
        Where clients pull the models, for a map of them; kept if whoever starts the run sets it.
    report : Observer
        Called by the method with what only it can know, a `Measured`; the loop sets it. What
        is reported while updates are acted on comes after them.
    """

    state_type: ClassVar[type[Any]] = NoState
    keeps_bases: ClassVar[bool] = False
    """Whether the models that clients train from are kept until they are back; see `delta`."""
    one_model: ClassVar[bool] = False
    """Whether all clients share one model for good: a protection can then take its time, while
    clusters form by the first updates, poisoned ones included."""
    uses_starts: ClassVar[bool] = False
    """Whether `initialize` starts from the server's pre-trained models, where there are some."""
    validates: ClassVar[bool] = False
    """Whether clients compare models on samples that they neither train on nor are tested on."""
    test_settings: ClassVar[Mapping[str, Value]] = MappingProxyType({})
    """What the messages that test models say beyond the run's own settings, e.g. another kind."""
    exchanges: ClassVar[bool] = True
    """Whether models really travel; without it no traffic is reported."""

    parameters: Any
    clusters: Clusters
    state: Any
    dispatch: Dispatch
    rng: np.random.Generator
    progress: Progress
    result: RunResult
    bases: Bases
    protection: Guard
    pulls: Pulls | None = None
    _constant: tuple[Vector, ArrayRecord] | None = None
    train_config: ConfigRecord
    initial: ArrayRecord
    report: Observer
    step_of: Callable[[str], int | None]

    def policy(self) -> Dispatch:
        """Return who works when; by default everybody all the time."""
        return EveryIdle()

    def check(self, clients: int) -> None:  # noqa: B027
        """Find out whether the hyper-parameters fit so many clients, before a run.

        Raises
        ------
        UserError
            They do not.
        """

    def check_validation(self, samples: int) -> None:  # noqa: B027
        """Find out whether clients have samples enough to compare models on, before a simulation.

        Parameters
        ----------
        samples : int
            The fewest that a client keeps.

        Raises
        ------
        UserError
            They are too few.
        """

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Find out whether the server's own samples are those that the method needs.

        Parameters
        ----------
        proxies : int
            How many proxy sets it has.
        pretrains : bool
            Whether it trains models for the clusters to start from.

        Raises
        ------
        UserError
            They are not; or the method does not start from such models.
        """
        if pretrains and not self.uses_starts:
            raise UserError(
                f"pretrain: {type(self).__name__} does not start from pre-trained models: leave it "
                "out."
            )

    def initialize(self, vector: Vector) -> None:
        """Set `clusters` and `state` up from the initial model, which may be kept."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = self.state_type()

    def restored(self) -> None:  # noqa: B027
        """Derive from a state that was just set up or loaded what makes it quick to work with."""

    def on_update(self, update: Update) -> Applied:
        """Do what the method does with one valid update."""
        raise TypeError(f"{type(self).__name__} defines neither on_update() nor aggregate()")

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Applied]:
        """Do what the method does with the updates that its policy releases together.

        Returns
        -------
        Sequence[Applied]
            What became of each of them, in the same order.
        """
        return [self.on_update(update) for update in updates]

    def next_work(self, moment: Moment) -> Iterable[Work]:
        """Return what is asked of whom now."""
        return [self.work_for(client.client_id) for client in self.dispatch.choose(moment)]

    def work_for(self, client: str) -> Work:
        """Return the work of a client that the policy has chosen: training, by default."""
        return Work(client)

    def on_answer(self, answer: Answer) -> None:  # noqa: B027
        """Take in the answer to work that was not training."""

    def wake_at(self) -> float:
        """Return when the method wants to be woken; infinity for never."""
        return math.inf

    def on_wake(self) -> None:  # noqa: B027
        """Do what is due at the time that `wake_at` has named."""

    def placement(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self.clusters.of(client)

    def serving(self, client: str, step: int) -> Weights:
        """Return the clusters that serve a client on its data of a step, with weights.

        A method that remembers which model a former task of a client belongs to says so here; by
        default, as in all others, it is what serves the client now. The tests on all steps
        (``eval-tasks``) ask for every step so far, and for the next one, which no method knows yet.
        """
        return self.placement(client)

    def add_client(self, client: Client) -> None:
        """Take in a client that was greeted, for the first time or again."""
        self.clusters.join(client.client_id)

    def count_examples(self, client: Client) -> None:  # noqa: B027
        """Note a client's number of examples, which came not with its greeting but with a reply."""

    def remove_client(self, client: str) -> None:
        """Note that a client went offline; it keeps its cluster."""
        self.clusters.leave(client)

    def on_dispatch(self, task: Task) -> None:  # noqa: B027
        """Note that a client is given a task."""

    def on_close(self, task: Task) -> None:  # noqa: B027
        """Note that a task is over, whatever came of it."""

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and the matrix of their similarities (NaN: unknown), if there is one."""
        return None

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset()

    @property
    def needs_classes(self) -> str:
        """What clients are asked for that a regression does not have; empty if there is nothing."""
        return ""

    @property
    def by_distribution(self) -> bool:
        """Whether cluster k is of the k-th distribution, of which the server may have samples."""
        return False

    @property
    def models(self) -> Mapping[int, Model]:
        """The models by cluster."""
        return self.clusters.models

    @property
    def served(self) -> Mapping[int, Model]:
        """The models that clients use and test, by cluster: by default those that they train."""
        return self.models

    def used(self, clients: Collection[str]) -> Iterable[tuple[str, Vector]]:
        """Return those of some clients that use a model of their own, and that model, shape (d,).

        All others use what serves them: by default everybody.
        """
        return ()

    def open_task(self, task: Task) -> None:
        """Keep what is needed of the models that travel, and tell the method of the task."""
        if self._keeps_base_of(task):
            for name, vector in self._bases_of(task).items():
                self.bases.hold(name, vector)
        pulls = self.pulls
        if pulls is not None and task.kind in TRAINING and pulls.wants(task.client):
            sent = dict.fromkeys(task.candidates, 1.0) or self.placement(task.client)
            pulls.send(task.number, self.models, sent, bool(task.candidates))
        self.on_dispatch(task)

    def _keeps_base_of(self, task: Task) -> bool:
        return self.keeps_bases or (self.protection.is_on and task.kind in TRAINING)

    def _bases_of(self, task: Task) -> Mapping[str, Vector]:
        """Return the models that a task may start from, by the names that they are kept under."""
        if task.kind == TRAIN_BEST:
            return {
                f"{cluster}/{version}": self.models[cluster].vector
                for cluster, version in task.candidates.items()
            }
        weights = self.placement(task.client)
        whole = len(weights) == 1 or bool(task.candidates)
        models = self.models
        vector = models[task.cluster].vector if whole else blended(models, weights)
        return {base_name(task, whole): vector}

    def note_pull(self, update: Update) -> None:
        """Note where a valid update pulls its model, if somebody wants to know."""
        task = update.task
        if self.pulls is not None and self.pulls.awaits(task.number):
            self.pulls.take(task.number, task.client, task.cluster, update.vector)

    def close_task(self, task: Task) -> None:
        """Tell the method that a task is over, and forget what was kept for it."""
        self.on_close(task)
        if self.pulls is not None:
            self.pulls.close(task.number)
        if not self._keeps_base_of(task):
            return
        if task.kind == TRAIN_BEST:
            for cluster, version in task.candidates.items():
                self.bases.release(f"{cluster}/{version}")
        elif base_name(task, False) in self.bases.vectors:
            self.bases.release(base_name(task, False))
        else:
            self.bases.release(base_name(task, True))

    def delta(self, update: Update) -> Vector:
        """Return Δ_i = w_i − the model from which client i started; for a method that keeps bases.

        Shape (d,).
        """
        return np.asarray(update.vector - self.base_of(update))

    def base_of(self, update: Update) -> Vector:
        """Return the model from which client i started; for a method that keeps bases. Shape (d,).

        Of a client that has mixed several models itself, the mixture that served it when it was
        asked: another client may have been sent the same version of one of them.
        """
        vectors = self.bases.vectors
        own = base_name(update.task, False)
        return vectors[own] if own in vectors else vectors[base_name(update.task, True)]

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Names and shapes of a model's arrays; known from the start of a run on."""

    def record_of(self, vector: Vector) -> ArrayRecord:
        """Return a model that nobody changes as a record, which is made once.

        Packed anew for each client, a hundred thousand at work would hold as many copies.
        """
        if self._constant is None or self._constant[0] is not vector:
            self._constant = vector, self.spec.pack(vector)
        return self._constant[1]


def base_name(task: Task, whole: bool) -> str:
    """Name the model that a task started from: a cluster's version, or a client's own mixture."""
    return f"{task.cluster}/{task.version}" if whole else f"task {task.number}"
