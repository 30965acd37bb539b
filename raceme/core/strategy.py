"""Methods as Flower strategies: hooks, state, and the start of the loop."""

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
from raceme.core.clients import Client, Identities, Idle
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
"""Default validation share of clients, if the method needs validation samples."""

StopCheck = Callable[[], str]
"""Called between two steps, when the state is consistent and can be saved. A non-empty return value
ends the run and is the reason."""


def never_stop() -> str:
    """Return the empty text: the run continues to its limit."""
    return ""


class Probe(Protocol):
    """Returns the losses of models on the server's own samples.

    Methods receive it as a function, independent of how losses are computed.

    Attributes
    ----------
    sets : int
        Number of proxy sets.
    """

    @property
    def sets(self) -> int:
        """Number of proxy sets."""

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Measure models.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Index of the proxy set; a method may have one per cluster.

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
        Metrics of each cluster's model by the server's evaluation function, by round or number of
        updates.
    client_clusters : dict[str, dict[int, float]]
        Client id to its clusters, with weights.
    """

    clusters: dict[int, ArrayRecord] = field(default_factory=dict)
    evaluate_metrics_clusters: dict[int, dict[int, MetricRecord]] = field(default_factory=dict)
    client_clusters: dict[str, dict[int, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return Flower's representation, with several clusters if any."""
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
        Kinds of work besides training and testing a model.
    settings : frozenset[str], optional
        Settings of requests besides :data:`raceme.core.requests.SETTINGS`; None allows any.
    classes : str
        Work that needs classes, for the error message of a regression; empty if none.
    validation : bool
        Whether clients compare models on validation samples.
    own_model : bool
        Whether runs have ``own-model`` unless it is off.
    pretrained : bool
        Whether `initialize` uses the server's pre-trained models, if any.
    bases : bool
        Whether the models that clients start from are kept; see `Update.base`.
    latencies : bool
        Whether in-flight requests state the mean time of their work, if the grid knows it; see
        :class:`~raceme.core.requests.InFlight`.
    mixture : Callable, optional
        Returns the mixture of several models that a client trained, shape (d,), from its update and
        the models of the request.
    one_model : bool
        Whether all clients always share one model. A protection can then observe longer, whereas
        clusters form by first updates, including poisoned ones.
    exchange : bool
        Whether models travel; otherwise no traffic is reported.
    by_distribution : Callable
        Returns whether cluster k corresponds to the k-th distribution of the server's samples.
    test_settings : Mapping[str, Value]
        Additional settings of test messages, e.g. another kind of work.
    fits_clients, fits_validation, fits_server : Callable
        Raise UserError if the hyper-parameters do not fit the number of clients, if a client has
        too few validation samples, or if the server lacks proxy sets.
    """

    kinds: frozenset[str] = frozenset()
    settings: frozenset[str] | None = frozenset()
    classes: str = ""
    validation: bool = False
    own_model: bool = False
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
    """The models that clients use and test, if different from those that they train.

    Attributes
    ----------
    models : Mapping[int, Model], optional
        The models in use, by cluster; by default the trained ones.
    own : Callable
        Returns, of given clients, those with personal models and their models, shape (d,).
    on_step : Callable
        Returns the clusters that serve a client on its data of a step, with weights, for methods
        that remember the models of former tasks. Empty for the current clusters.
    """

    models: Mapping[int, Model] | None = None
    own: Callable[[Collection[str]], Iterable[tuple[str, Vector]]] = lambda clients: ()
    on_step: Callable[[str, int], Weights] = lambda client, step: {}


@runtime_checkable
class KnowsLikeness(Protocol):
    """A state with similarities of clients."""

    def likeness(self) -> tuple[list[str], np.ndarray]:
        """Return clients and the matrix of their similarities; NaN if unknown."""


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
        There is no such argument, or it does not apply to the method.

    Attributes
    ----------
    parameters : dataclass
        Hyper-parameters of the method, an instance of `parameters_type`.
    clusters : Clusters
        Models, and assignment of clients.
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
    own_settings : dict[str, str | float]
        Settings of messages that let clients use mixtures with models of their own, if they do.
    initial : ArrayRecord
        The model before any training.
    step_of : Callable
        Returns the current step of a client's data; None without drift. Set by the loop.
    embedding : ClientEmbedding, optional
        Client positions for the map; present if an observer of the run sets it.
    planned_updates : int
        Expected client updates of the run, for schedules that depend on its length.
    probe : Probe or None
        Measures models on the server's own data, if any.
    starts : Sequence[Vector]
        The server's pre-trained models for `initialize`, one per distribution.
    report : Observer
        Receives the method's own measures (`Measured`); set by the loop. Reports during an
        aggregation follow its updates.
    """

    parameters_type: ClassVar[type[Any]] = NoState
    state_type: ClassVar[type[Any]] = NoState
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the hyper-parameters in the signature and in the help of the method."""
        super().__init_subclass__(**arguments)
        cls.__signature__, cls.__doc__ = _shown(cls, cls.parameters_type, cls.__doc__ or "")

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        # Imported late: these modules need the type of a method.
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
        self.own_settings: dict[str, str | float] = {}
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
        """Requirements of the method; see :class:`Needs`."""
        return Needs()

    def initialize(self, vector: Vector) -> None:
        """Set up `clusters` and `state` from the initial model, which may be kept."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = self.state_type()

    def restored(self) -> None:
        """Derive caches from a new or loaded state."""

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
        # An update may be for a model changed by the previous one.
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
        """The models that clients use, if not their clusters'; see :class:`InUse`."""
        return InUse()

    # Queries for methods.

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of a model's arrays; known from the start of a run on."""
        assert self._spec is not None, "start() sets the specification"
        return self._spec

    def now(self) -> float:
        """Return the time on the grid's clock in seconds; before the start, the state's."""
        return self._now()

    def __str__(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    @property
    def trainable(self) -> NDArray[np.bool_] | None:
        """Mask of the trainable weights of a model, shape (d,); None if all are."""
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
        """Return the given clients with personal models, and these models, shape (d,)."""
        return self.in_use.own(clients)

    def serving(self, client: str, step: int) -> Weights:
        """Return the clusters that serve a client on its data of a step, with weights.

        Tests on all steps (``eval-tasks``) use it for every step so far and the next one.
        """
        return self.in_use.on_step(client, step) or self.placement(client)

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and the matrix of their similarities (NaN: unknown), if any."""
        return self.state.likeness() if isinstance(self.state, KnowsLikeness) else None

    def requests(self, moment: SelectionContext) -> Iterable[Request]:
        """Return the current requests to clients: queries before a round, or work."""
        asked = self.scheduling.queries(moment)
        if asked is not None:
            return asked
        return [self.request_for(client.client_id) for client in self.scheduling.choose(moment)]

    def record_of(self, vector: Vector) -> ArrayRecord:
        """Return a constant model as a cached record.

        Otherwise each client at work would hold a copy.
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
            They do not fit.
        """
        self.needs.fits_clients(clients)

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Check that the server has the samples that the method needs.

        Parameters
        ----------
        proxies : int
            How many proxy sets it has.
        pretrains : bool
            Whether it pre-trains models for the clusters.

        Raises
        ------
        UserError
            Samples are missing, or the method does not use pre-trained models.
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
        """Run in a user's own Flower app, as a replacement of one of Flower's strategies.

        The ClientApp needs no change: messages and replies are those of Flower's own strategies,
        and clients are identified by their nodes, or by a ``client-id`` in a ConfigRecord of their
        replies.

        Parameters
        ----------
        grid : Grid
            Grid of the ServerApp, or any other.
        initial_arrays : ArrayRecord
            Initial model, which defines names and shapes of all models.
        num_rounds : int
            Number of rounds. For a method without rounds, a round is as many updates as clients
            participate.
        timeout : float
            Seconds after which an unanswered message is lost.
        train_config, evaluate_config : ConfigRecord, optional
            Settings of every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called before the first and after each round, once per cluster, with the number of the
            round and the arrays of the cluster's model. Its results are averaged over the clusters'
            clients.
        should_stop : Callable, optional
            Called after each round and the evaluation of its models, with the number of the round
            and the result so far; the run ends if it returns true (as in Flower 1.43).
        **further
            Other fields of :class:`~raceme.core.drop_in.FlowerRun`: ``max_updates`` ends the run
            after a number of updates instead of rounds, ``max_time`` at a time; ``observe``
            receives all events; ``greet=True`` greets clients, as Raceme's own ClientApp expects.

        Returns
        -------
        RunResult
            Models, metrics by round, and the clusters of each client.

        Raises
        ------
        UserError
            The run cannot start, the ClientApp does not support the method, or no client returned a
            usable reply.
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
        """Run with Raceme's own ClientApp or a compatible one.

        Ends at a limit, without clients, or on interruption. A strategy that ran before, or with a
        loaded state, resumes: all clients are greeted again and open tasks dropped, unless the grid
        was restored to the same time and continues seamlessly.

        Parameters
        ----------
        grid : Grid
            A Flower grid, real or virtual.
        initial_arrays : ArrayRecord
            Initial model, which defines names and shapes of all models.
        max_updates : int
            Client updates to apply; 0: only the plan's limit. A round-based method completes its
            current round.
        timeout : float
            Seconds after which an unanswered task is lost, and after which a run without any
            client ends.
        train_config, evaluate_config : ConfigRecord, optional
            Settings of every training and every evaluation message.
        evaluate_fn : Callable, optional
            Called at every evaluation, once per cluster, with the number of updates and the arrays
            of the cluster's model. Its results are averaged over the clusters' clients.
        plan : Plan, optional
            Further limits, evaluation schedule, concurrency, drift.
        observe : Observer
            Receives all events.
        stop_check : StopCheck
            Called between two steps, when `state_dict` is consistent. A non-empty return value ends
            the run.
        probe : Probe, optional
            Measures models on the server's data.
        starts : Sequence[Vector]
            The server's pre-trained models, one per distribution.
        identities : Identities, optional
            Verifies the ids that clients state; by default they are trusted.

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
        self.train_config = ConfigRecord({**(train_config or {})})
        stated = self.train_config.get(VALIDATION_SHARE)
        share = stated if isinstance(stated, int | float) else DEFAULT_VALIDATION_SHARE
        self.own_settings = {}
        if self.train_config.pop(OWN_MODEL, False) and share:
            self.train_config[OWN_MODEL] = share
            self.own_settings = {COMPLETED_BY: OWN_MIXTURE, OWN_MODEL: share}
        if self.needs.validation:
            self.train_config[VALIDATION_SHARE] = share
        elif self.own_settings:
            # All samples train the model that is uploaded.
            self.train_config.pop(VALIDATION_SHARE, None)
        tests = {**(evaluate_config or {}), **self.needs.test_settings, **self.own_settings}
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
        """Return the complete state of the run as a tree of plain values and arrays."""
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
        """Raise UserError: a wrapping strategy calls it, which would train no client."""
        name = type(self).__name__
        raise UserError(
            f"{name} acts on each update when it arrives: a strategy that works in rounds cannot "
            f"be put around it. Call {name}'s own start(); for differential privacy take client "
            "mods, such as LocalDpMod."
        )

    # Flower's four hooks of a round, unused: the loop processes each reply on arrival.
    configure_train = aggregate_train = _work_in_rounds
    configure_evaluate = aggregate_evaluate = _work_in_rounds

    # Work of the loop for every method.

    def open_task(self, task: InFlight, work: Request | None = None) -> None:
        """Keep the needed base models of a task, and inform the method."""
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
        """Return the model that a client started from, while kept. Shape (d,)."""
        brought, mixture = self.bases.own(update.task), self.needs.mixture
        return mixture(update, brought) if mixture and brought else self.bases.of(update.task)

    def received(self, update: Update) -> Update:
        """Return an update with its current staleness, age and base.

        The staleness counts the changes of the model that the client trained, including those of a
        cluster that continues its cluster after a split, or after a merge that kept its model. If
        the client moved to another cluster, or its model is gone, all updates applied since it
        received the model count.

        Raises
        ------
        ValueError
            The staleness would be negative: a method replaced a trained model by one of an earlier
            version.
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
        """Let the method aggregate updates, and return the outcome of each.

        Raises
        ------
        ValueError
            An outcome has an invalid staleness or weight.
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
        """Inform the method of the end of a task, and release its base models."""
        self.on_closed(task)
        if self.embedding is not None:
            self.embedding.close(task.number)
        if self._keeps_base_of(task):
            self.bases.close(task)


Made = TypeVar("Made", bound=Method)


@dataclass(frozen=True)
class Variant(Generic[Made]):
    """A named variant of a method with other defaults; calling it makes the method.

    Attributes
    ----------
    method : type
        Class of the underlying method.
    parameters_type : type
        Its parameters, with the variant's defaults.
    summary : str
        One-line description.
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
"""Measure of the key ``discrepancy``: one event per aggregation."""


def discrepancy(
    method: Method, updates: Sequence[Update], outcomes: Sequence[Outcome]
) -> dict[str, float]:
    """Return Discrepancy(t) = 1/|S_t| Σ_{i ∈ S_t} ‖w_i − w_t‖, eq (3) of FlexCFL's paper.

    As in the authors' code, w_t is the model after the round, of the client's group. Empty if no
    update was used.

    Parameters
    ----------
    method : Method
        The method with the aggregated models.
    updates, outcomes : Sequence
        The updates and their outcomes; those with weight 0 are left out.
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
    """Replace each cluster's model by the mean of the models trained for it.

    Parameters
    ----------
    clusters : Clusters
        Clusters, whose models are replaced in place.
    updates : Sequence[Update]
        Updates of some of the clients.
    by_examples : bool
        Weight models by their clients' examples, else equally.
    home : Callable, optional
        Returns the cluster of an update; by default its client's.
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


# -----------------------------------------------------------------------------
# Constraints on clusters by the labels of clients: never across, and always together.
# -----------------------------------------------------------------------------


@dataclass
class Member:
    """A client under constraints.

    Attributes
    ----------
    part : int
        Index of its part.
    name : str
        Its name for the part: its id, or the name of its group.
    online : bool
        Whether it takes part now.
    listed : bool
        Whether an event has named its clusters.
    """

    part: int
    name: str
    online: bool = False
    listed: bool = False


@dataclass
class Sent:
    """A task from sending until its update is applied or given up.

    Attributes
    ----------
    part, name
        Part and name of its client.
    client : str
        Id of the client.
    updates, own_updates : int
        Applied updates at sending: of the run, and of the part.
    """

    part: int
    name: str
    client: str
    updates: int
    own_updates: int


@dataclass
class ConstrainedState:
    """State of a constrained method, besides that of its parts.

    Attributes
    ----------
    values : list[str]
        Value of the label of each part.
    members : dict[str, Member]
        Clients by id.
    clusters : list[tuple[int, int]]
        Part of each cluster, and its id there, by its id in the run.
    tasks : dict[int, Sent]
        Open tasks by number.
    measured : dict[str, dict[str, Any]]
        Last values of measures per cluster.
    woken : int
        The part that was woken last.
    """

    values: list[str] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)
    clusters: list[tuple[int, int]] = field(default_factory=list)
    tasks: dict[int, Sent] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    woken: int = 0


class ConstrainedMethod(Method):
    """Any method under constraints: clusters never span values of a label, or never divide them.

    `never_across`: every value has a *part*, an instance of the method with its own clients,
    clusters, rounds and state. No model of a part can reach another one. `together`: the clients of
    a value are one client to the method, for which one of them works at a time, the one that has
    been idle longest; so they have one placement.

    Clients without the label form one more part, and no group. A client whose label changes moves
    when it joins again.

    Parameters
    ----------
    make : Callable
        Makes an instance of the method; each has the same hyper-parameters and seed.
    never_across, together : str
        Names of labels; empty for none.

    Attributes
    ----------
    parts : list[Method]
        The instances. A value's part begins when its first client joins, and the first value to
        join has the first one.
    """

    state_type = ConstrainedState
    state: ConstrainedState

    def __init__(
        self, make: Callable[[], Method], never_across: str = "", together: str = ""
    ) -> None:
        self._make, self._never_across, self._together = make, never_across, together
        self.parts = [make()]
        super().__init__()
        first = self.parts[0]
        self.parameters, self.arguments, self.rng = first.parameters, first.arguments, first.rng
        self.clusters: _ClustersOfParts = _ClustersOfParts(self)
        self._ids: dict[tuple[int, int], int] = {}
        self._groups: dict[tuple[int, str], list[str]] = {}
        self._closed: Sent | None = None

    def scheduler(self) -> Scheduler:
        """Return the schedulers of all parts."""
        return _SchedulersOfParts(self)

    @property
    def needs(self) -> Needs:
        """Requirements of the method; each part has models of its own."""
        needs = self.parts[0].needs
        if not self._never_across:
            return needs
        return replace(needs, one_model=False, by_distribution=lambda: False)

    def check(self, clients: int) -> None:
        """Check the hyper-parameters against the number of clients."""
        self.parts[0].check(clients)

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Check that the server has the samples that the method needs."""
        self.parts[0].check_server(proxies, pretrains)

    def __str__(self) -> str:
        """Return the name of the parts' class."""
        return str(self.parts[0])

    def summary(self) -> None:
        """Log the hyper-parameters and the constraints."""
        self.parts[0].summary()
        if self._never_across:
            log.info("Clusters never span two values of the label %s", self._never_across)
        if self._together:
            log.info("Clients with the same label %s are always together", self._together)

    # Parts.

    def initialize(self, vector: Vector) -> None:
        """Begin the first part, which the first value to join will have."""
        self.state = ConstrainedState()
        self._begin(vector)

    def restored(self) -> None:
        """Derive groups, ids and views from the state."""
        self._ids = {own: cluster for cluster, own in enumerate(self.state.clusters)}
        self._groups = {}
        clients = self.progress.fleet.clients
        for client, member in self.state.members.items():
            self._groups.setdefault((member.part, member.name), []).append(client)
            if member.name == client:
                self.parts[member.part].progress.fleet.clients[client] = clients[client]
        self.clusters.refresh()

    def _check_loaded(self) -> None:
        super()._check_loaded()
        for index, part in enumerate(self.parts):
            self._connect(part)
            part._check_loaded()
            self._listen(index, part)

    def _begin(self, vector: Vector) -> list[int]:
        """Initialize the last part; return its clusters."""
        index, part = len(self.parts) - 1, self.parts[-1]
        self._connect(part)
        part.initialize(vector)
        part.restored()
        self._listen(index, part)
        return [self._add_cluster(index, cluster) for cluster in part.models]

    def _connect(self, part: Method) -> None:
        """Give a part what a run gives a method."""
        part._spec, part.initial, part._now = self._spec, self.initial, self.now
        part.train_config, part.planned_updates = self.train_config, self.planned_updates
        part.probe, part.starts = self.probe, self.starts
        # It gets updates that the protection has judged, and keeps what that compares them with.
        part.protection = Guard() if self.protection.is_on else NoProtection()
        if not self._never_across:
            part.result = self.result

    def _listen(self, index: int, part: Method) -> None:
        part.clusters.report_to(lambda change: self._changed(index, change))
        part.report = lambda event: self._reported(index, event)
        part.step_of = lambda name: self.step_of(self._worker(index, name))

    def _part_of(self, value: str) -> int:
        """Return the part of a value; begin it if it is new."""
        values = self.state.values
        if value in values:
            return values.index(value)
        values.append(value)
        if len(values) > 1:
            part = self._make()
            own = np.random.default_rng(self.rng.integers(2**63, size=4))
            part.rng.bit_generator.state = own.bit_generator.state
            self.parts.append(part)
            made = tuple(self._begin(self.spec.unpack(self.initial)))
            self.clusters.refresh()
            if made:
                self.clusters.tell(
                    events.ClustersChanged(0.0, 0, events.ClusterChange.FOUND, {}, (), made)
                )
        return len(values) - 1

    # Clients.

    def home(self, client: str) -> tuple[Method, Member]:
        """Return the part of a client, and what is known of it."""
        member = self.state.members.get(client) or Member(0, client)
        return self.parts[member.part], member

    def others_online(self, client: str) -> bool:
        """Return whether another member of a client's group is online."""
        _, member = self.home(client)
        group = self._groups.get((member.part, member.name), ())
        return any(name != client and self.state.members[name].online for name in group)

    def settle(self, client: str) -> None:
        """Find the part and the group of a client that joins, by its present labels."""
        seen, members = self.progress.fleet.clients[client], self.state.members
        value = seen.label(self._never_across) if self._never_across else ""
        mates = seen.label(self._together) if self._together else ""
        # An id of a client is printable, unlike this.
        name = f"{self._together}\t{mates}" if mates else client
        index, member = self._part_of(value), members.get(client)
        if member is None or (member.part, member.name) != (index, name):
            if self._never_across and not value:
                log.warning(
                    "%s has no label %s: it shares clusters only with others that have none",
                    client,
                    self._never_across,
                )
            members[client] = Member(index, name)
            self._groups.setdefault((index, name), []).append(client)
            if member is not None:
                self._remove(client, member, seen)
        self._update(index, name)
        sizes, group = self.progress.fleet.sizes, self._groups[index, name]
        if client in sizes:
            stated = sum(sizes.get(mate, 0) for mate in group)
            self.parts[index].progress.fleet.heard(name, stated)

    def _remove(self, client: str, member: Member, seen: Client) -> None:
        """Take a client whose label has changed out of its former part or group."""
        former = self._groups[member.part, member.name]
        former.remove(client)
        if former:
            self._update(member.part, member.name)
        else:
            # To the former part it is away for good.
            part = self.parts[member.part]
            part.progress.fleet.clients[member.name] = replace(seen, node_id=None)
        if member.listed:
            move = events.ClustersChanged(0.0, 0, events.ClusterChange.MOVE, {client: {}})
            self.clusters.tell(move)

    def _update(self, index: int, name: str) -> None:
        """Bring what a part knows of a client up to date."""
        known = self.progress.fleet.clients
        group = [known[client] for client in self._groups[index, name]]
        client = group[0]
        if client.client_id != name:
            node = next((mate.node_id for mate in group if mate.node_id is not None), None)
            examples = sum(mate.num_examples for mate in group)
            client = Client(name, examples, client.group, node)
        self.parts[index].progress.fleet.clients[name] = client

    def _worker(self, index: int, name: str) -> str:
        """Return a client of a name, one that is online if there is any."""
        group, members = self._groups.get((index, name), [name]), self.state.members
        return next((mate for mate in group if mate in members and members[mate].online), group[0])

    def on_join(self, client: Client) -> None:
        """Add a client to its part, unless another one of its group is there already."""
        part, member = self.home(client.client_id)
        if not self.others_online(client.client_id):
            part.on_join(part.progress.fleet.clients[member.name])
        member.online = True
        if not member.listed and part.clusters.is_placed(member.name):
            member.listed = True
            placed = {client.client_id: self.placement(client.client_id)}
            self.clusters.tell(events.ClustersChanged(0.0, 0, events.ClusterChange.ASSIGN, placed))
        self.clusters.refresh()

    def on_leave(self, client: str) -> None:
        """Mark a client as offline in its part, if no other one of its group is online."""
        part, member = self.home(client)
        member.online = False
        if (member.part, member.name) in self._groups:
            self._update(member.part, member.name)
        if not self.others_online(client):
            part.on_leave(member.name)
        self.clusters.refresh()

    # Clusters.

    def _add_cluster(self, index: int, cluster: int) -> int:
        self._ids[index, cluster] = len(self.state.clusters)
        self.state.clusters.append((index, cluster))
        return self._ids[index, cluster]

    def of_run(self, index: int, cluster: int) -> int:
        """Return the id in the run of a part's cluster."""
        return self._ids[index, cluster]

    def _weights(self, index: int, weights: Weights) -> dict[int, float]:
        return {self._ids[index, cluster]: weight for cluster, weight in weights.items()}

    def _changed(self, index: int, change: events.ClustersChanged) -> None:
        """Report a change of a part's clusters, with ids of the run."""
        made = tuple(self._add_cluster(index, cluster) for cluster in change.made)
        memberships = {}
        for name, weights in change.memberships.items():
            for client in self._groups.get((index, name), ()):
                memberships[client] = self._weights(index, weights)
                self.state.members[client].listed = True
        gone = tuple(self._ids[index, cluster] for cluster in change.gone)
        self.clusters.refresh()
        if memberships or made or gone:
            self.clusters.tell(replace(change, memberships=memberships, made=made, gone=gone))

    def _reported(self, index: int, event: events.Event) -> None:
        """Report what a part has measured, with clients and clusters of the run."""
        if isinstance(event, events.Measured):
            schema, values = event.schema, dict(event.values)
            updates = event.updates - self.parts[index].progress.updates
            if schema.per == "cluster":
                values[schema.value] = self._measured(index, event)
            elif schema.per == "client":
                values[schema.value] = {
                    client: value
                    for name, value in event.value.items()
                    for client in self._groups.get((index, name), ())
                }
            elif isinstance(values.get("client"), str):
                values["client"] = self._worker(index, values["client"])
            event = replace(event, updates=self.progress.updates + updates, values=values)
        self.report(event)

    def _measured(self, index: int, event: events.Measured) -> dict[int, Any]:
        """Return a measure of a part's clusters, with the last one of the other parts'."""
        known = self.state.measured.setdefault(event.name, {})
        for cluster in list(known):
            if self.state.clusters[int(cluster)][0] == index:
                del known[cluster]
        for cluster, value in event.value.items():
            if event.schema.figure == "graph":
                value = [self._ids[index, other] for other in value]
            known[str(self._ids[index, cluster])] = value
        return {
            int(cluster): tuple(value) if isinstance(value, list) else value
            for cluster, value in known.items()
        }

    # Queries.

    def placement(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        part, member = self.home(client)
        return self._weights(member.part, part.placement(member.name))

    @property
    def in_use(self) -> InUse:
        """The models that clients use in all parts."""
        uses = [part.in_use for part in self.parts]
        models = None
        if any(use.models is not None for use in uses):
            models = {
                self._ids[index, cluster]: model
                for index, (part, use) in enumerate(zip(self.parts, uses, strict=True))
                for cluster, model in (part.models if use.models is None else use.models).items()
            }

        def own(clients: Collection[str]) -> Iterable[tuple[str, Vector]]:
            wanted: list[dict[str, list[str]]] = [{} for _ in uses]
            for client in clients:
                _, member = self.home(client)
                wanted[member.part].setdefault(member.name, []).append(client)
            for use, named in zip(uses, wanted, strict=True):
                for name, vector in use.own(list(named)):
                    yield from ((client, vector) for client in named[name])

        def on_step(client: str, step: int) -> Weights:
            _, member = self.home(client)
            return self._weights(member.part, uses[member.part].on_step(member.name, step))

        return InUse(models, own, on_step)

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and their similarities; those of two parts are unknown."""
        clients: list[str] = []
        blocks: list[tuple[int, np.ndarray]] = []
        for index, part in enumerate(self.parts):
            if (found := part.similarity()) is not None:
                rows = [
                    (client, row)
                    for row, name in enumerate(found[0])
                    for client in self._groups.get((index, name), ())
                ]
                places = [row for _, row in rows]
                blocks.append((len(clients), found[1][np.ix_(places, places)]))
                clients += [client for client, _ in rows]
        if not blocks:
            return None
        whole = np.full((len(clients), len(clients)), np.nan, blocks[0][1].dtype)
        for start, block in blocks:
            whole[start : start + len(block), start : start + len(block)] = block
        return clients, whole

    # Work.

    def requests(self, moment: SelectionContext) -> Iterable[Request]:
        """Return the requests of all parts to their idle clients."""
        fleet, members = moment.fleet, self.state.members
        working = {
            (member.part, member.name)
            for task in self.progress.in_flight.values()
            if (member := members[task.client]).name != task.client and member.online
        }
        idle: list[dict[str, bool]] = [{} for _ in self.parts]
        workers: dict[tuple[int, str], str] = {}
        for client in self.progress.idle:
            member = members[client]
            place = member.part, member.name
            if member.name != client:
                rests = fleet.clients[client].ready_at > moment.now
                if rests or place in working:
                    continue
            idle[member.part][member.name] = True
            workers.setdefault(place, client)
        asked = []
        for index, part in enumerate(self.parts):
            own = part.progress.fleet
            context = replace(moment, fleet=own, idle=Idle(idle[index], own.clients), rng=part.rng)
            for work in part.requests(context):
                models = work.models and tuple(self._ids[index, k] for k in work.models)
                place = index, work.client
                client = workers[place] if place in workers else self._worker(*place)
                asked.append(replace(work, client=client, models=models))
        return asked

    def work_of_part(self, work: Request) -> tuple[Method, Request]:
        """Return the part of a request, and the request with its client and clusters."""
        part, member = self.home(work.client)
        models = work.models and tuple(self.state.clusters[k][1] for k in work.models)
        return part, replace(work, client=member.name, models=models)

    def task_of_part(self, task: InFlight) -> tuple[Method, InFlight]:
        """Return the part of a task, and the task with its client, clusters and updates."""
        sent = self.state.tasks.get(task.number)
        if sent is None:
            # It was closed just now.
            assert self._closed is not None, "an open task is in the state"
            sent = self._closed
        clusters = self.state.clusters
        return self.parts[sent.part], replace(
            task,
            client=sent.name,
            cluster=clusters[task.cluster][1],
            candidates={clusters[k][1]: version for k, version in task.candidates.items()},
            updates=sent.own_updates,
        )

    def of_parts(self, update: Update) -> tuple[Method, Update]:
        """Return the part of an update, and the update of its task."""
        part, task = self.task_of_part(update.task)
        return part, replace(update, task=task)

    def of_the_run(self, update: Update) -> Update:
        """Return an update of a part with its client, clusters and updates in the run."""
        task, sent = update.task, self.state.tasks[update.task.number]
        candidates = {self._ids[sent.part, k]: v for k, v in task.candidates.items()}
        cluster = self._ids[sent.part, task.cluster]
        return replace(
            update,
            task=replace(
                task,
                client=sent.client,
                cluster=cluster,
                candidates=candidates,
                updates=sent.updates,
            ),
        )

    def open_task(self, task: InFlight, work: Request | None = None) -> None:
        """Let a task's part keep its base models."""
        part, member = self.home(task.client)
        self.state.tasks[task.number] = Sent(
            member.part, member.name, task.client, task.updates, part.progress.updates
        )
        part.open_task(self.task_of_part(task)[1], work)
        super().open_task(task, work)

    def close_task(self, task: InFlight) -> None:
        """Let a task's part release its base models."""
        part, own = self.task_of_part(task)
        part.close_task(own)
        super().close_task(task)
        if task.number in self.state.tasks:
            self._closed = self.state.tasks.pop(task.number)

    def _keeps_base_of(self, task: InFlight) -> bool:
        """Return False: parts keep them."""
        return False

    def base_of(self, update: Update) -> Vector:
        """Return the model that a client started from."""
        part, own = self.of_parts(update)
        return part.base_of(own)

    def on_answer(self, answer: Answer) -> None:
        """Hand an answer to the part that asked."""
        part, task = self.task_of_part(answer.task)
        part.on_answer(replace(answer, task=task))
        self.clusters.refresh()

    def applied(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Let the part whose scheduler has released updates aggregate them."""
        index = self.state.tasks[updates[0].task.number].part
        part, own = self.parts[index], [self.of_parts(update)[1] for update in updates]
        outcomes = part.applied(own)
        for update in own:
            part.progress.count_update(update.task.client)
        self.clusters.refresh()
        return [replace(each, cluster=self._ids[index, each.cluster]) for each in outcomes]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run and of each part."""
        return {
            "method": type(self).__name__,
            "state": to_tree(self.state),
            "parts": [part.state_dict() for part in self.parts],
            "protection": to_tree(self.protection.state),
            "progress": to_tree(self.progress),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        if tree.get("method") != type(self).__name__:
            raise ValueError(f"the state is of {tree.get('method')}, not {type(self).__name__}")
        self.state = from_tree(ConstrainedState, tree["state"])
        self.protection.state = from_tree(GuardState, tree["protection"])
        self.progress = from_tree(Progress, tree["progress"])
        self.parts = [self._make() for _ in tree["parts"]]
        for part, own in zip(self.parts, tree["parts"], strict=True):
            part.load_state_dict(own)
        self.rng = self.parts[0].rng
        time_before = float(tree["time"])
        self._now, self._loaded = lambda: time_before, True
        self.restored()


class _ClustersOfParts(Clusters):
    """The clusters of a constrained method's parts, to read, with ids of the run."""

    def __init__(self, method: ConstrainedMethod) -> None:
        super().__init__()
        self._method = method

    def refresh(self) -> None:
        """Look for the models of all parts again."""
        self.models = {
            self._method.of_run(index, cluster): model
            for index, part in enumerate(self._method.parts)
            for cluster, model in part.models.items()
        }

    def tell(self, change: events.ClustersChanged) -> None:
        """Report a change."""
        self._report(change)

    def of(self, client: str) -> Weights:
        """Return the clusters that serve a client, with weights."""
        return self._method.placement(client)

    def main(self, client: str) -> int:
        """Return the cluster with a client's largest weight."""
        part, member = self._method.home(client)
        return self._method.of_run(member.part, part.clusters.main(member.name))

    def is_placed(self, client: str) -> bool:
        """Return whether a client has a cluster."""
        part, member = self._method.home(client)
        return part.clusters.is_placed(member.name)

    def clients(self, cluster: int, online_only: bool = True) -> list[str]:
        """Return the clients of a cluster, in order of joining."""
        index, own = self._method.state.clusters[cluster]
        placed = self._method.parts[index].clusters.members
        return [
            client
            for client, member in self._method.state.members.items()
            if member.part == index
            and own in placed.get(member.name, ())
            and (member.online or not online_only)
        ]

    def size(self, cluster: int, online_only: bool = True) -> int:
        """Return the number of a cluster's clients."""
        return len(self.clients(cluster, online_only))

    def largest(self) -> int:
        """Return the largest of the parts' largest clusters, the first at ties."""
        largest = [
            self._method.of_run(index, part.clusters.largest())
            for index, part in enumerate(self._method.parts)
            if part.models
        ]
        return max(largest, key=self.size)

    def continuations(self, cluster: int) -> list[int]:
        """Return the successors of a possibly removed cluster."""
        known = self._method.state.clusters
        if not 0 <= cluster < len(known):
            return []
        index, own = known[cluster]
        found = self._method.parts[index].clusters.continuations(own)
        return [self._method.of_run(index, each) for each in found]


class _SchedulersOfParts(Scheduler):
    """The schedulers of a constrained method's parts, as one."""

    state: NoState

    def __init__(self, method: ConstrainedMethod) -> None:
        self.state, self._method = NoState(), method

    @property
    def _all(self) -> list[Scheduler]:
        return [part.scheduling for part in self._method.parts]

    def _of(self, client: str) -> tuple[Scheduler, str]:
        part, member = self._method.home(client)
        return part.scheduling, member.name

    def _released(self, updates: Sequence[Update]) -> list[Update]:
        return [self._method.of_the_run(update) for update in updates]

    @property
    def rounds(self) -> int | None:
        """Completed rounds or windows of the part that is furthest ahead."""
        counts = [each.rounds for each in self._all]
        return max((count for count in counts if count is not None), default=None)

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return no client: each part chooses its own."""
        return ()

    def settings(self, work: Request) -> Mapping[str, str | int | float | bool]:
        """Return the part's settings in the message of a work item."""
        part, own = self._method.work_of_part(work)
        return part.scheduling.settings(own)

    def sent(self, task: InFlight, now: float) -> None:
        """Record that work was sent to a client."""
        part, own = self._method.task_of_part(task)
        part.scheduling.sent(own, now)

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Accept an update; return those of its part to aggregate now."""
        part, own = self._method.of_parts(update)
        name, progress = own.task.client, part.progress
        progress.fleet.heard(name, update.num_examples)
        released = part.scheduling.accept(own, now)
        progress.trained_steps[name] = own.task.step
        return self._released(released)

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Record work without an update."""
        part, own = self._method.task_of_part(task)
        return self._released(part.scheduling.lost(own, now))

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Record that a client went offline; another one of its group may do its work."""
        part, name = self._of(client)
        others = self._method.others_online(client)
        tasks = self._method.progress.in_flight.values()
        if others and not any(task.client == client for task in tasks):
            return ()
        released = self._released(part.left(name, now))
        if others:
            part.joined(name)
        return released

    def joined(self, client: str) -> None:
        """Record that a client joined; its labels name its part and its group."""
        self._method.settle(client)
        if not self._method.others_online(client):
            part, name = self._of(client)
            part.joined(name)

    def wake_at(self) -> float:
        """Return the next wake-up time of any part."""
        return min(each.wake_at() for each in self._all)

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Wake one part that is due, in turn: the loop applies updates of one part at a time."""
        parts, state = self._all, self._method.state
        turn = [(state.woken + 1 + ahead) % len(parts) for ahead in range(len(parts))]
        due = next(index for index in turn if parts[index].wake_at() <= now)
        state.woken = due
        late, released = parts[due].wake(now)
        self.timeout_reason = parts[due].timeout_reason
        self.backs_off_when_late = parts[due].backs_off_when_late
        return late, self._released(released)

    def invited(self, client: str) -> bool:
        """Return whether a client may hold its work as an invitation."""
        part, name = self._of(client)
        return part.invited(name)

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client will never train again while its data stay at a step."""
        part, name = self._of(client)
        return part.is_quiescent(name, step)

    def hopeless(self) -> str:
        """Return why no part can progress, or an empty text."""
        reasons = [each.hopeless() for each in self._all]
        return reasons[0] if all(reasons) else ""
