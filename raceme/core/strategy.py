"""A method as a Flower strategy: what it says, its state, and the loop that it starts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import Signature, cleandoc
from logging import getLogger
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from raceme.core import events
from raceme.core.clients import Client, Identities
from raceme.core.clusters import Clusters, Model, Weights
from raceme.core.errors import UserError
from raceme.core.messages import (
    COMPLETED_BY,
    OWN_MIXTURE,
    OWN_MODEL,
    TRAINING,
    VALIDATION_SHARE,
    ModelSpec,
    Vector,
)
from raceme.core.options import documented, signature_of
from raceme.core.progress import Plan, Progress
from raceme.core.protection import Guard, GuardState, NoProtection
from raceme.core.requests import (
    Answer,
    Bases,
    ClientEmbedding,
    InFlight,
    Outcome,
    Request,
    Update,
    Value,
)
from raceme.core.scheduling import (
    EveryIdle,
    FlowerArguments,
    InRounds,
    NoState,
    RoundsParameters,
    Scheduler,
    SelectionContext,
    from_tree,
    to_tree,
)

log = getLogger("raceme")

DEFAULT_VALIDATION_SHARE = 0.2
"""What clients keep to compare models on, if the run needs that and sets no share."""

StopCheck = Callable[[], str]
"""Called between two steps, when the state is whole and can be saved. What it returns, unless it
is empty, ends the run: it is the reason."""


def never_stop() -> str:
    """Return the empty text, by which a run goes on to its limit."""
    return ""


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


@dataclass(frozen=True)
class Needs:
    """Requirements of a method, checked before a run.

    Attributes
    ----------
    kinds : frozenset[str]
        Kinds of work that clients are asked for, beyond training and testing a model.
    settings : frozenset[str], optional
        The settings of requests beyond :data:`raceme.core.requests.SETTINGS`; None allows any.
    classes : str
        Work that needs classes, named for the error of a regression; empty if there is none.
    validation : bool
        Whether clients compare models on samples that they neither train on nor are tested on.
    pretrained : bool
        Whether `initialize` starts from the server's pre-trained models, where there are some.
    bases : bool
        Whether the models that clients train from are kept meanwhile: see `Update.base`.
    latencies : bool
        Whether requests in flight state the mean time of their work, where the grid knows it: see
        :class:`~raceme.core.requests.InFlight`.
    mixture : Callable, optional
        Returns which mixture of several models a client has trained, shape (d,), given its update
        and the models that the request brought.
    one_model : bool
        Whether all clients share one model for good: a protection can then take its time, while
        clusters form by the first updates, poisoned ones included.
    exchange : bool
        Whether models really travel; without it no traffic is reported.
    by_distribution : Callable
        Returns whether cluster k is of the k-th distribution, of which the server may have samples.
    test_settings : Mapping[str, Value]
        What the messages that test models say beyond the run's own settings, e.g. another kind.
    fits_clients, fits_validation, fits_server : Callable
        Raise UserError if the hyper-parameters do not fit so many clients; if the fewest samples
        that a client keeps to compare models on are too few; if the server has not the proxy sets
        that are needed.
    """

    kinds: frozenset[str] = frozenset()
    settings: frozenset[str] | None = frozenset()
    classes: str = ""
    validation: bool = False
    pretrained: bool = False
    bases: bool = False
    latencies: bool = False
    mixture: Callable[[Update, Sequence[Vector]], Vector] | None = None
    one_model: bool = False
    exchange: bool = True
    by_distribution: Callable[[], bool] = lambda: False
    test_settings: Mapping[str, Value] = field(default_factory=dict)
    fits_clients: Callable[[int], None] = lambda count: None
    fits_validation: Callable[[int], None] = lambda count: None
    fits_server: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class InUse:
    """The models that clients use and are tested with, where these are not those that they train.

    Attributes
    ----------
    models : Mapping[int, Model], optional
        The models in use, by cluster; by default those that are trained.
    own : Callable
        Returns those of some clients that use a model of their own, and that model, shape (d,).
    on_step : Callable
        Returns the clusters that serve a client on its data of a step, with weights: of a method
        that remembers which model a former task belongs to. Empty for those that serve it now.
    """

    models: Mapping[int, Model] | None = None
    own: Callable[[Collection[str]], Iterable[tuple[str, Vector]]] = lambda clients: ()
    on_step: Callable[[str, int], Weights] = lambda client, step: {}


@runtime_checkable
class KnowsLikeness(Protocol):
    """A state that knows how alike clients are."""

    def likeness(self) -> tuple[list[str], np.ndarray]:
        """Return clients and the matrix of their similarities; NaN where it is not known."""


def _shown(method: type[Any], parameters_type: type[Any], doc: str) -> tuple[Signature, str]:
    """Return the signature and the docstring of a method with its hyper-parameters."""
    made = signature_of(method.__init__, parameters_type, FlowerArguments)
    doc = cleandoc(doc)
    if not doc or "Parameters\n---" in doc or not is_dataclass(parameters_type):
        return made, doc
    module = sys.modules.get(method.__module__)
    _, _, source = (getattr(module, "__doc__", None) or "").partition("\n\n")
    return made, documented(doc, source.strip(), parameters_type, FlowerArguments)


class Method(Strategy):
    """Base class of all methods: a Flower strategy with hooks for the asynchronous loop.

    A subclass defines the effect of an update (`on_update`), or of several together (`aggregate`).
    By default there is one model for all clients, and every idle client trains.

    Parameters
    ----------
    parameters : dataclass, optional
        Hyper-parameters; by default the class's `parameters_type`, made without arguments.
    seed : int
        Seed of the method's random generator.
    **arguments
        Single hyper-parameters, and the arguments that Flower's own strategies take
        (:class:`~raceme.core.scheduling.FlowerArguments`): ``fraction_train=0.5``.

    Raises
    ------
    UserError
        There is no such argument, or it means nothing to the method.

    Attributes
    ----------
    parameters : dataclass
        Hyper-parameters of the method, an instance of `parameters_type`.
    clusters : Clusters
        The models, and which of them serve each client.
    state : dataclass
        Further state of the method: an object of its `state_type`.
    scheduling : Scheduler
        Decides which clients work when; made by `scheduler`.
    rng : numpy.random.Generator
        Random generator of the method.
    progress : Progress
        Counters of the run so far: updates, fleet, open tasks.
    result : RunResult
        Models, metrics and clusters of clients, filled in as the run goes on.
    bases : Bases
        Models that clients are training from, if the method or its protection keeps them.
    protection : Guard
        Checks updates before the method receives them.
    train_config : ConfigRecord
        The run's settings for local training.
    initial : ArrayRecord
        The model before any training.
    step_of : Callable
        Returns the step of a client's data now; None where data never change. The loop sets
        it.
    embedding : ClientEmbedding, optional
        Positions of the clients for the map; kept if an observer of the run sets it.
    planned_updates : int
        Expected client updates of the run, for schedules that depend on its length.
    probe : Probe or None
        Measures models on the server's own data, if there are any.
    starts : Sequence[Vector]
        Models that the server has pre-trained, for `initialize`: one for each distribution.
    report : Observer
        Called by the method with what only it can know, a `Measured`; the loop sets it. What
        is reported while updates are acted on comes after them.
    """

    parameters_type: ClassVar[type[Any]] = NoState
    state_type: ClassVar[type[Any]] = NoState
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the hyper-parameters in the signature and in the help of the method."""
        super().__init_subclass__(**arguments)
        cls.__signature__, cls.__doc__ = _shown(cls, cls.parameters_type, cls.__doc__ or "")

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        # These modules need the type of a method.
        from raceme.core.drop_in import check_share, divided

        self.parameters, self.arguments = divided(
            type(self).__name__, self.parameters_type, parameters, arguments
        )
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 0x57A7E9]))
        self.progress = Progress()
        self.clusters = Clusters()
        self.state: Any = None
        self.planned_updates = 0
        self.probe: Probe | None = None
        self.starts: Sequence[Vector] = ()
        self.result = RunResult()
        self.bases = Bases()
        self.embedding: ClientEmbedding | None = None
        self._constant: tuple[Vector, ArrayRecord] | None = None
        self.protection: Guard = NoProtection()
        self.train_config = ConfigRecord()
        self.report: events.Observer = events.ignore
        self.step_of: Callable[[str], int | None] = lambda client: None
        self.scheduling: Scheduler = self.scheduler()
        check_share(self, self.arguments)
        self._spec: ModelSpec | None = None
        self._now: Callable[[], float] = lambda: 0.0
        self._loaded = False

    # Hooks: what a method may override.

    def scheduler(self) -> Scheduler:
        """Return the scheduler: `InRounds` for `RoundsParameters`, otherwise `EveryIdle`."""
        if isinstance(self.parameters, RoundsParameters):
            return InRounds(self.parameters.fraction, sampling=self.parameters.sampling)
        return EveryIdle()

    @property
    def needs(self) -> Needs:
        """What a run of the method has to have: see :class:`Needs`."""
        return Needs()

    def initialize(self, vector: Vector) -> None:
        """Set `clusters` and `state` up from the initial model, which may be kept."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = self.state_type()

    def restored(self) -> None:
        """Derive caches from a state that was just set up or loaded."""

    def on_update(self, update: Update) -> Outcome:
        """Apply one valid update."""
        raise TypeError(f"{type(self).__name__} defines neither on_update() nor aggregate()")

    def aggregate(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Apply the updates that the scheduler releases together.

        Returns
        -------
        Sequence[Outcome]
            One outcome per update, in the same order.
        """
        # The second may be for a model that the first has changed.
        return [self.on_update(self.received(update)) for update in updates]

    def request_for(self, client: str) -> Request:
        """Return the request to a selected client: training, by default."""
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        """Handle the answer to work other than training."""

    def on_join(self, client: Client) -> None:
        """Handle a client that joins, for the first time or again."""
        self.clusters.join(client.client_id)

    def on_leave(self, client: str) -> None:
        """Handle a client that goes offline; it keeps its cluster."""
        self.clusters.leave(client)

    def on_sent(self, task: InFlight) -> None:
        """Handle a task that was sent to a client."""

    def on_closed(self, task: InFlight) -> None:
        """Handle the end of a task, successful or not."""

    @property
    def in_use(self) -> InUse:
        """What clients use, if it is not their cluster's model: see :class:`InUse`."""
        return InUse()

    # What a method can ask.

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of a model's arrays; known from the start of a run on."""
        assert self._spec is not None, "start() sets the specification"
        return self._spec

    def now(self) -> float:
        """Return the time on the grid's clock in seconds; before the start that of the state."""
        return self._now()

    @property
    def trainable(self) -> NDArray[np.bool_] | None:
        """Which numbers of a model are weights, shape (d,); None if all are."""
        return None if self._spec is None else self._spec.trainable

    def compared(self, vector: Vector) -> Vector:
        """Return the comparable part of a model: its weights without running statistics."""
        return vector if self._spec is None else self._spec.compared(vector)

    @property
    def models(self) -> Mapping[int, Model]:
        """The current model of each cluster, by cluster id."""
        return self.clusters.models

    def placement(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self.clusters.of(client)

    @property
    def served(self) -> Mapping[int, Model]:
        """The models that clients use and test, by cluster."""
        models = self.in_use.models
        return self.models if models is None else models

    def used(self, clients: Collection[str]) -> Iterable[tuple[str, Vector]]:
        """Return the given clients that use a model of their own, with it. Shape (d,)."""
        return self.in_use.own(clients)

    def serving(self, client: str, step: int) -> Weights:
        """Return the clusters that serve a client on its data of a step, with weights.

        The tests on all steps (``eval-tasks``) ask for every step so far, and for the next one.
        """
        return self.in_use.on_step(client, step) or self.placement(client)

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and the matrix of their similarities (NaN: unknown), if there is one."""
        return self.state.likeness() if isinstance(self.state, KnowsLikeness) else None

    def requests(self, moment: SelectionContext) -> Iterable[Request]:
        """Return what is asked of which clients now: queries before a round, or their work."""
        asked = self.scheduling.queries(moment)
        if asked is not None:
            return asked
        return [self.request_for(client.client_id) for client in self.scheduling.choose(moment)]

    def record_of(self, vector: Vector) -> ArrayRecord:
        """Return a model that does not change as a record, which is made once.

        Packed anew for each client, a hundred thousand at work would hold as many copies.
        """
        if self._constant is None or self._constant[0] is not vector:
            self._constant = vector, self.spec.pack(vector)
        return self._constant[1]

    # Before a run.

    def check(self, clients: int) -> None:
        """Check the hyper-parameters against the number of clients, before a run.

        Raises
        ------
        UserError
            They do not.
        """
        self.needs.fits_clients(clients)

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Check that the server has the samples that the method needs.

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
        if pretrains and not self.needs.pretrained:
            raise UserError(
                f"pretrain: {type(self).__name__} does not start from pre-trained models: leave it "
                "out."
            )
        self.needs.fits_server(proxies)

    # Running.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, RunResult], bool] | None = None,
        **further: Any,
    ) -> RunResult:
        """Run in a user's own Flower app, in the place of one of Flower's strategies.

        The ClientApp need know nothing of Raceme: messages and replies are those of Flower's own
        strategies, clients are known by their nodes, or by the ``client-id`` that a ConfigRecord of
        their replies states.

        Parameters
        ----------
        grid : Grid
            The grid that Flower hands to the ServerApp, or any other.
        initial_arrays : ArrayRecord
            The initial model; its names and shapes are those of every model of the run.
        num_rounds : int
            Rounds. Of a method that works in none, a round is as many updates as clients take part.
        timeout : float
            Seconds after which an unanswered message is lost.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called before the first and after each round, once per cluster, with the number of the
            round and the arrays of the cluster's model. What it returns is averaged over the
            clusters' clients.
        should_stop : Callable, optional
            Called after each round and the evaluation of its models, with the number of the round
            and the result so far; the run ends if it returns true (as in Flower 1.43).
        **further
            Other fields of :class:`~raceme.core.drop_in.FlowerRun`: ``max_updates`` ends the
            run after so many updates instead of rounds, ``max_time`` at this time at the latest;
            ``observe`` is called with everything that happens; ``greet=True`` greets
            clients, as Raceme's own ClientApp expects.

        Returns
        -------
        RunResult
            Models, metrics by round, and the clusters of each client.

        Raises
        ------
        UserError
            The run cannot begin; the ClientApp cannot do what the method asks for; no client has
            returned anything of use.
        """
        from raceme.core.drop_in import start as drop_in

        return drop_in(
            self,
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            should_stop=should_stop,
            **further,
        )

    def run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        max_updates: int = 500,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        plan: Plan | None = None,
        observe: events.Observer = events.ignore,
        stop_check: StopCheck = never_stop,
        probe: Probe | None = None,
        starts: Sequence[Vector] = (),
        identities: Identities | None = None,
    ) -> RunResult:
        """Run with Raceme's own ClientApp, or one that answers as it does.

        Until a limit is reached, no client is left, or the user interrupts. A strategy that has run
        before, or was given a state, resumes: all clients are greeted again, and tasks that were
        open then are given up; unless the grid was brought back to its own state of that moment,
        and continues as if nothing had happened.

        Parameters
        ----------
        grid : Grid
            Grid of Flower's interface: a real fleet's, or a virtual one.
        initial_arrays : ArrayRecord
            The initial model; its names and shapes are those of every model of the run.
        max_updates : int
            Client updates to apply; 0: no limit but the plan's. A round-based method completes the
            round in which the limit falls.
        timeout : float
            Seconds after which an unanswered task is lost, and after which a run without any
            client ends.
        train_config, evaluate_config : ConfigRecord, optional
            Sent along with every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called at every evaluation, once per cluster, with the number of updates and the
            arrays of the cluster's model. What it returns is averaged over the clusters' clients.
        plan : Plan, optional
            Further limits, evaluation schedule, concurrency, drift.
        observe : Observer
            Receives all events.
        stop_check : StopCheck
            Called between two steps, when `state_dict` is whole. What it returns, unless it is
            empty, ends the run.
        probe : Probe, optional
            Measures models on data that the server has.
        starts : Sequence[Vector]
            Models that the server has pre-trained, one for each distribution.
        identities : Identities, optional
            Checks the ids that clients state; by default they are believed.

        Returns
        -------
        RunResult
            Models, evaluations by number of updates, and the clusters of each client.
        """
        from raceme.core.loop import Loop

        plan = plan or Plan()
        self.planned_updates = max_updates or plan.planned_updates
        self.probe, self.starts = probe, starts
        self._spec, self.initial = ModelSpec.of(initial_arrays), initial_arrays
        self.result = RunResult()
        self.train_config = train_config or ConfigRecord()
        have_own_model = bool(self.train_config.get(OWN_MODEL))
        if (self.needs.validation or have_own_model) and VALIDATION_SHARE not in self.train_config:
            self.train_config[VALIDATION_SHARE] = DEFAULT_VALIDATION_SHARE
        tests = {**(evaluate_config or {}), **self.needs.test_settings}
        if have_own_model:
            share = self.train_config[VALIDATION_SHARE]
            tests |= {COMPLETED_BY: OWN_MIXTURE, VALIDATION_SHARE: share}
        loop = Loop(
            self,
            grid,
            plan,
            observe,
            stop_check,
            timeout=timeout,
            evaluate_config=ConfigRecord(tests),
            evaluate_fn=evaluate_fn,
            identities=identities,
        )
        self._now = loop.now
        if self.state is None:
            self.initialize(self.spec.unpack(initial_arrays))
            self.restored()
        if self._loaded:
            self._check_loaded()
        nothing_missed, self._loaded = self._loaded and loop.keeps_messages, False
        self.summary()
        loop.run(max_updates, nothing_missed)
        ended_at = loop.now()
        self._now = lambda: ended_at
        return self.result

    def summary(self) -> None:
        """Log the hyper-parameters."""
        log.info("%s with %s", type(self).__name__, self.parameters)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the run continues: a tree of plain values and arrays."""
        return {
            "method": type(self).__name__,
            "clusters": to_tree(self.clusters),
            "bases": to_tree(self.bases),
            "state": to_tree(self.state),
            "dispatch": self.scheduling.state_dict(),
            "protection": to_tree(self.protection.state),
            "progress": to_tree(self.progress),
            "rng": to_tree(self.rng.bit_generator.state),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; `start` then resumes from there.

        Raises
        ------
        ValueError
            The state is another method's.
        """
        if tree.get("method") != type(self).__name__:
            raise ValueError(f"the state is of {tree.get('method')}, not {type(self).__name__}")
        self.clusters = from_tree(Clusters, tree["clusters"])
        self.bases = from_tree(Bases, tree["bases"])
        self.state = from_tree(self.state_type, tree["state"])
        self.scheduling.load_state_dict(tree["dispatch"])
        self.protection.state = from_tree(GuardState, tree["protection"])
        self.progress = from_tree(Progress, tree["progress"])
        self.rng.bit_generator.state = tree["rng"]
        time_before = float(tree["time"])
        self._now, self._loaded = lambda: time_before, True
        self.restored()

    def _check_loaded(self) -> None:
        """Raise ValueError if a loaded vector has another length than the run's models."""
        size = self.spec.size
        weights = len(self.compared(np.empty(size, np.float32)))
        for what, vectors, length in (
            ("model", (model.vector for model in self.models.values()), size),
            ("model that a client has", self.bases.vectors.values(), size),
            ("remembered update", self.protection.state.directions.values(), weights),
        ):
            for vector in vectors:
                if vector.shape != (length,):
                    raise ValueError(f"a {what} of shape {vector.shape}, not ({length},)")

    def _work_in_rounds(self, *_given: Any, **_named: Any) -> NoReturn:
        """Raise UserError: a strategy around this one asks, which would train no client."""
        name = type(self).__name__
        raise UserError(
            f"{name} acts on each update when it arrives: a strategy that works in rounds cannot "
            f"be put around it. Call {name}'s own start(); for differential privacy take client "
            "mods, such as LocalDpMod."
        )

    # Flower's four questions of a round. The loop takes each reply when it arrives instead.
    configure_train = aggregate_train = _work_in_rounds
    configure_evaluate = aggregate_evaluate = _work_in_rounds

    # What the loop does for every method.

    def open_task(self, task: InFlight, work: Request | None = None) -> None:
        """Keep what is needed of the models that travel, and tell the method of the task."""
        if self._keeps_base_of(task):
            brought = [self.spec.unpack(record) for record in work.own_models] if work else []
            self.bases.open(task, self.models, self.placement(task.client), brought)
        embedding = self.embedding
        if embedding is not None and task.kind in TRAINING and embedding.wants(task.client):
            sent = dict.fromkeys(task.candidates, 1.0) or self.placement(task.client)
            embedding.send(task.number, self.models, sent, bool(task.candidates))
        self.on_sent(task)

    def _keeps_base_of(self, task: InFlight) -> bool:
        return self.needs.bases or (self.protection.is_on and task.kind in TRAINING)

    def base_of(self, update: Update) -> Vector:
        """Return the model that a client started from, as long as that is kept. Shape (d,)."""
        brought, mixture = self.bases.own(update.task), self.needs.mixture
        return mixture(update, brought) if mixture and brought else self.bases.of(update.task)

    def received(self, update: Update) -> Update:
        """Return an update with its staleness, its age and its base, as they are now.

        The staleness counts the changes of the model that the client trained. If its cluster was
        split meanwhile, or merged into one that kept its model, the changes of the cluster that
        continues it count too. Where the client was moved to another cluster, or its model is no
        more, versions say nothing: all updates count that were applied since it received its model.

        Raises
        ------
        ValueError
            The staleness would be negative: a method has put a model of an earlier version in the
            place of one that a client has trained.
        """
        task, clusters = update.task, self.clusters
        age = self.progress.updates - task.updates
        living = clusters.continuations(task.cluster)
        home = clusters.main(task.client)
        if task.candidates or not clusters.is_placed(task.client):
            home = living[0] if living and home not in living else home
        staleness = age
        if home in living:
            staleness = clusters.models[home].version - task.version
        if staleness < 0:
            raise ValueError(
                f"{type(self).__name__}: an update for cluster {home} has a staleness of "
                f"{staleness}: its model is of version {clusters.models[home].version}, and "
                f"{task.client} was sent version {task.version}"
            )
        bases = self.bases if self._keeps_base_of(task) else None
        return replace(update, staleness=staleness, age=age, bases=bases)

    def applied(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Let the method act on updates together, and return what it did with each.

        Raises
        ------
        ValueError
            An outcome states a staleness or a weight that cannot be.
        """
        outcomes = self.aggregate([self.received(update) for update in updates])
        for outcome in outcomes:
            for name, value in (("staleness", outcome.staleness), ("weight", outcome.weight)):
                if not 0 <= value < math.inf:
                    raise ValueError(
                        f"{type(self).__name__}: an update for cluster {outcome.cluster} has a "
                        f"{name} of {value}: it must be finite, and not negative"
                    )
        return outcomes

    def close_task(self, task: InFlight) -> None:
        """Tell the method that a task is over, and forget what was kept for it."""
        self.on_closed(task)
        if self.embedding is not None:
            self.embedding.close(task.number)
        if self._keeps_base_of(task):
            self.bases.close(task)


Made = TypeVar("Made", bound=Method)


@dataclass(frozen=True)
class Variant(Generic[Made]):
    """A method under a name of its own, with other defaults. Calling it makes the method.

    Attributes
    ----------
    method : type
        Class of the method that it is a variant of.
    parameters_type : type
        Its parameters, with the variant's defaults.
    summary : str
        One line that says what it is.
    """

    method: type[Made]
    parameters_type: type[Any]
    summary: str

    def __post_init__(self) -> None:
        shown = _shown(self.method, self.parameters_type, self.summary)
        for name, value in zip(("__signature__", "__doc__"), shown, strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> Made:
        """Make the method, with the variant's defaults unless parameters are given."""
        parameters = self.parameters_type() if parameters is None else parameters
        return self.method(parameters, seed, **arguments)


DISCREPANCY = events.MeasureSchema(
    "discrepancy",
    "distance of clients' models from that of their cluster",
    ("clients", "discrepancy"),
    summary="mean",
)
"""Of a run with the key ``discrepancy``: one event for the updates that are acted on together."""


def discrepancy(
    method: Method, updates: Sequence[Update], outcomes: Sequence[Outcome]
) -> dict[str, float]:
    """Return Discrepancy(t) = 1/|S_t| Σ_{i ∈ S_t} ‖w_i − w_t‖, eq (3) of FlexCFL's paper.

    As in the authors' code w_t is the model after the round, that of the client's group if there
    are several. Empty if no update was used.

    Parameters
    ----------
    method : Method
        The method, with the models after it has acted on the updates.
    updates, outcomes : Sequence
        The updates, and what the method did with each; one of weight 0 is left out.
    """
    distances = [
        float(np.linalg.norm(method.compared(update.vector - model.vector)))
        for update, outcome in zip(updates, outcomes, strict=True)
        if outcome.weight and (model := method.models.get(outcome.cluster)) is not None
    ]
    count = len(distances)
    return {"clients": count, "discrepancy": sum(distances) / count} if count else {}


def average_by_cluster(
    clusters: Clusters,
    updates: Sequence[Update],
    by_examples: bool = True,
    home: Callable[[Update], int] | None = None,
) -> list[Outcome]:
    """Replace the model of each cluster by the mean of the models that were trained for it.

    Parameters
    ----------
    clusters : Clusters
        The models, which are replaced in place, and the clients of each.
    updates : Sequence[Update]
        What came back from some of them.
    by_examples : bool
        Weigh models by their clients' examples; else all alike.
    home : Callable, optional
        Returns the cluster that an update is for; by default its client's.
    """
    homes = [home(u) if home else clusters.main(u.task.client) for u in updates]
    weights = [float(update.num_examples) if by_examples else 1.0 for update in updates]
    together: dict[int, list[int]] = {}
    for index, cluster in enumerate(homes):
        together.setdefault(cluster, []).append(index)
    totals: dict[int, float] = {}
    for cluster, own in together.items():
        totals[cluster] = sum(weights[index] for index in own)
        vectors = [updates[index].vector for index in own]
        clusters.models[cluster].average(vectors, [weights[index] for index in own])
    return [
        Outcome(cluster, staleness=0, weight=weight / totals[cluster])
        for cluster, weight in zip(homes, weights, strict=True)
    ]
