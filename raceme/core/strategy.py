"""Methods as Flower strategies: hooks, state, and the start of the loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from inspect import Signature, cleandoc
from logging import getLogger
from numbers import Real
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, Weights
from raceme.core.drop_in import start as run_in_flower_app
from raceme.core.errors import UserError, check_known
from raceme.core.events import grouped
from raceme.core.feature import Probe
from raceme.core.identities import Identities
from raceme.core.loop import Loop
from raceme.core.messages import (
    DEFAULT_VALIDATION_SHARE,
    TRAINING,
    VALIDATION_SHARE,
    ModelSpec,
    Vector,
)
from raceme.core.options import convert, documented, present_names, signature_of
from raceme.core.progress import Plan, Progress, StopCheck, never_stop
from raceme.core.requests import (
    Answer,
    Bases,
    InFlight,
    Outcome,
    Outcomes,
    Request,
    Update,
    Value,
)
from raceme.core.scheduling import (
    EveryIdle,
    FlowerArguments,
    InRounds,
    RoundsParameters,
    Scheduler,
    SelectionContext,
)
from raceme.core.state import NoState, check_storable, from_tree, stored, to_tree

log = getLogger("raceme")


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
    features : Mapping[str, Any]
        Values of options of features that are left to the method (``auto``), by key.
    pretrained : bool
        Whether `initialize` uses the server's pre-trained models, if any.
    bases : bool
        Whether the models that clients start from are kept; see `Update.base`.
    latencies : bool
        Whether in-flight requests state the mean time of their work, if the grid knows it; see
        :class:`~raceme.core.requests.InFlight`.
    one_model : bool
        Whether all clients always share one model. Features can then observe longer before they
        judge, whereas clusters form by first updates.
    sums : bool
        Whether updates enter this model as sums only: each version is the one before, plus Σ α_i
        Δ_i with the outcomes' weights α_i, plus terms that depend on published versions alone.
    exchange : bool
        Whether models travel; otherwise no traffic is reported.
    sum_weight : Callable, optional
        For methods that need sums of updates only, as in secure aggregation: returns the weight of
        an update from its staleness and examples. None if the method needs single updates.
    sketches : bool
        Whether some requests need only a sketch of the change (`SKETCH`), and the method uses
        nothing else of a single client's model.
    test_settings : Mapping[str, Value]
        Additional settings of test messages, e.g. another kind of work.
    """

    kinds: frozenset[str] = frozenset()
    settings: frozenset[str] | None = frozenset()
    classes: str = ""
    validation: bool = False
    features: Mapping[str, Any] = field(default_factory=dict)
    pretrained: bool = False
    bases: bool = False
    latencies: bool = False
    one_model: bool = False
    sums: bool = False
    exchange: bool = True
    sum_weight: Callable[[Update], float] | None = None
    sketches: bool = False
    test_settings: Mapping[str, Value] = field(default_factory=dict)


def _shown(method: type[Any], parameters_type: type[Any], doc: str) -> tuple[Signature, str]:
    """Return the signature and the docstring of a method with its hyper-parameters."""
    made = signature_of(method.__init__, parameters_type, FlowerArguments)
    doc = cleandoc(doc)
    if not doc or "Parameters\n---" in doc or not is_dataclass(parameters_type):
        return made, doc
    module = sys.modules.get(method.__module__)
    _, _, source = (getattr(module, "__doc__", None) or "").partition("\n\n")
    return made, documented(doc, source.strip(), parameters_type, FlowerArguments)


# -----------------------------------------------------------------------------
# Arguments of a method: hyper-parameters, and those of Flower's own strategies.
# -----------------------------------------------------------------------------


_FORMER = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
}
"""Former names of arguments in Flower."""
_TO_START = {
    "evaluate_fn": "evaluate_fn=...",
    "initial_parameters": "initial_arrays=...",
    "on_fit_config_fn": "train_config=...",
    "on_evaluate_config_fn": "evaluate_config=...",
    "num_rounds": "num_rounds=...",
    "max_updates": "max_updates=...",
    "timeout": "timeout=...",
}
"""Arguments of `start` instead of a strategy's constructor."""


def divide_arguments(
    method: str, parameters_type: type[Any], parameters: Any, arguments: Mapping[str, Any]
) -> tuple[Any, FlowerArguments]:
    """Divide arguments into a method's hyper-parameters and Flower's arguments.

    Parameters
    ----------
    method : str
        Name of the method, for error messages.
    parameters_type : type
        The dataclass of its hyper-parameters.
    parameters : dataclass or None
        Hyper-parameters given as an object.
    arguments : Mapping[str, Any]
        All keyword arguments.

    Raises
    ------
    UserError
        An argument is unknown, has the wrong type or range, or does not apply to the method.
    """
    if parameters is not None and not is_dataclass(parameters):
        raise UserError(
            f"{method} takes its arguments by keyword: {method}(fraction_train={parameters!r})."
        )
    own = {item.name: item for item in fields(parameters_type)}
    flower = {item.name: item for item in fields(FlowerArguments)}
    arguments = present_names(arguments, own)
    known = [*own, *flower, "seed"]
    for name in arguments:
        if name not in known and name in _FORMER:
            raise UserError(f"{name} is called {_FORMER[name]} in Flower's present strategies.")
        if name not in known and name in _TO_START:
            raise UserError(
                f"{name} is no argument of {method}: give it to its start({_TO_START[name]})."
            )
        check_known(f"argument of {method}", name, known)
    given = {name: convert(name, arguments[name], own[name]) for name in arguments if name in own}
    told = FlowerArguments(
        **{
            name: _checked(name, arguments[name], flower[name])
            for name in arguments
            if name in flower
        }
    )
    parameters = parameters_type() if parameters is None else parameters
    if "fraction" in own and "fraction_train" in arguments:
        if "fraction" in given and given["fraction"] != told.fraction_train:
            raise UserError("fraction and fraction_train are the same: give one of them.")
        given["fraction"] = told.fraction_train
    elif "fraction" in own:
        fraction = given.get("fraction", getattr(parameters, "fraction", 1.0))
        told = replace(told, fraction_train=fraction)
    return (replace(parameters, **given) if given else parameters), told


def _check_share(method: Method) -> None:
    """Raise UserError for a share of clients if the method chooses them itself."""
    chooses = method.scheduling.rounds is not None and not hasattr(method.parameters, "fraction")
    if chooses and method.arguments.fraction_train < 1:
        name = type(method).__name__
        own = ", ".join(item.name for item in fields(method.parameters))
        raise UserError(
            f"fraction_train has no effect on {name}, which chooses the participants itself: leave "
            f"it out; {name}'s own arguments are {own}."
        )


def _checked(name: str, value: Any, item: Field[Any]) -> Any:
    """Return an argument of Flower's strategies in its type.

    Raises
    ------
    UserError
        The type or range is wrong.
    """
    if item.default is None:
        if value is not None and not callable(value):
            raise UserError(f"{name} must be a function or None, got {value!r}.")
        return value
    if value == "" and item.default:
        raise UserError(f"{name} must be text, got ''.")
    return convert(name, value, item)


# -----------------------------------------------------------------------------
# The base class of all methods.
# -----------------------------------------------------------------------------


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
        Models, metrics and clusters of clients, filled in during the run.
    bases : Bases
        Models that clients train from, if the method or a feature needs them.
    features : Chain
        Features of the run, which change or refuse updates before the method receives them.
    train_config : ConfigRecord
        The run's settings for local training.
    feature_settings : dict[str, Any]
        Settings of features in messages by which clients test or use models.
    initial : ArrayRecord
        The model before any training.
    step_of : Callable
        Returns the current step of a client's data; None without drift. Set by the loop.
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
        if not is_dataclass(cls.parameters_type):
            raise UserError(f"{cls.__name__}.parameters_type must be a @dataclass(frozen=True).")
        cls.__signature__, cls.__doc__ = _shown(cls, cls.parameters_type, cls.__doc__ or "")

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        check_storable(self.state_type, self.state_type.__name__)
        self.parameters, self.arguments = divide_arguments(
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
        self._constant: tuple[Vector, ArrayRecord] | None = None
        self.features = Chain()
        self.train_config = ConfigRecord()
        self.feature_settings: dict[str, Any] = {}
        self.report: events.Observer = events.ignore
        self.step_of: Callable[[str], int | None] = lambda client: None
        self.scheduling: Scheduler = self.scheduler()
        _check_share(self)
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
        """Set up `clusters` and `state` from the initial model, whose array may be kept."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = self.state_type()

    def restored(self) -> None:
        """Derive caches from a new or loaded state."""

    def on_update(self, update: Update) -> Outcome:
        """Apply one valid update."""
        raise UserError(
            f"{type(self).__name__} defines neither on_update() nor aggregate(): define one."
        )

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Apply the updates that the scheduler releases together.

        Returns
        -------
        dict[int, Outcome]
            The outcome of each update, by `update.number`.
        """
        # The loop has set staleness and base; an update may have changed a later one's model.
        return {
            update.number: self.on_update(self.received(update) if index else update)
            for index, update in enumerate(updates)
        }

    def request_for(self, client: str) -> Request:
        """Return the request to a selected client: training, by default."""
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        """Handle the answer to work other than training.

        Raises
        ------
        UserError
            The method does not handle answers. Without this error the run would never end.
        """
        raise UserError(
            f"{type(self).__name__} has no on_answer(), and '{answer.task.kind}' is not training: "
            "the name of a kind that trains, or of its function, begins with 'train'."
        )

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
    def has_distributions(self) -> bool:
        """Whether cluster k corresponds to the k-th distribution of the server's samples."""
        return False

    @property
    def served(self) -> Mapping[int, Model]:
        """The models that clients use and test, by cluster; by default the trained ones."""
        return self.models

    def serving(self, client: str, step: int) -> Weights:
        """Return the clusters that serve a client on its data of a step, with weights.

        Overridden by methods that remember the models of former tasks; used by tests on all steps
        (``eval-tasks``).
        """
        return self.placement(client)

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

    def similarity(self) -> tuple[list[str], np.ndarray] | None:
        """Return clients and the matrix of their similarities (NaN: unknown), if any.

        The result of the state's method `likeness`, if it has one.
        """
        likeness: Callable[[], tuple[list[str], np.ndarray]] | None
        likeness = getattr(self.state, "likeness", None)
        return None if likeness is None else likeness()

    def requests(self, context: SelectionContext) -> Iterable[Request]:
        """Return the current requests to clients: queries before a round, or work."""
        asked = self.scheduling.queries(context)
        if asked is not None:
            return asked
        requests = [self.request_for(one.client_id) for one in self.scheduling.choose(context)]
        for request in requests:
            if not isinstance(request, Request):
                raise UserError(
                    f"{type(self).__name__}.request_for() must return a Request, got "
                    f"{type(request).__name__}."
                )
        return requests

    def record_of(self, vector: Vector) -> ArrayRecord:
        """Return a constant model as a cached record.

        Without the cache each client at work would hold a copy.
        """
        if self._constant is None or self._constant[0] is not vector:
            self._constant = vector, self.spec.pack(vector)
        return self._constant[1]

    # Checks before a run: each raises UserError if the hyper-parameters do not fit.

    def check(self, clients: int) -> None:
        """Check the hyper-parameters against the number of clients."""

    def check_samples(self, samples: int) -> None:
        """Check the number of validation samples of the client with the fewest."""

    def check_model(self, spec: ModelSpec) -> None:
        """Check the model."""

    def check_server(self, proxies: int, pretrains: bool) -> None:
        """Check that the server has the samples that the method needs.

        Parameters
        ----------
        proxies : int
            Number of its proxy sets.
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
            Number of rounds. For a method without rounds, a round is one update per participating
            client.
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
        return run_in_flower_app(
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
        plan = plan or Plan()
        self.planned_updates = max_updates or plan.planned_updates
        self.probe, self.starts = probe, starts
        self._spec, self.initial = ModelSpec.of(initial_arrays), initial_arrays
        self.result = RunResult()
        training: dict[str, Any] = {**(train_config or {})}
        share = training.get(VALIDATION_SHARE, DEFAULT_VALIDATION_SHARE)
        self.feature_settings = {}
        for feature in self.features:
            feature.on_start(training, self.feature_settings)
        if self.needs.validation:
            training[VALIDATION_SHARE] = share
        self.train_config = ConfigRecord(training)
        tests = {**(evaluate_config or {}), **self.needs.test_settings, **self.feature_settings}
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
        """Return the complete state of the run as a tree of plain values and arrays.

        Raises
        ------
        UserError
            The state of a user's method has values of other types than annotated.
        """
        name, is_own = type(self).__name__, type(self).__module__.startswith("raceme.")
        return {
            "method": name,
            "clusters": to_tree(self.clusters),
            "bases": to_tree(self.bases),
            "state": stored(self.state, self.state_type, name, verified=not is_own),
            "dispatch": self.scheduling.state_dict(),
            "features": self.features.state_dict(),
            "progress": to_tree(self.progress),
            "rng": to_tree(self.rng.bit_generator.state),
            "time": self.now(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned; `run` then resumes from it.

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
        self.features.load_state_dict(tree["features"])
        self.progress = from_tree(Progress, tree["progress"])
        self.rng.bit_generator.state = tree["rng"]
        time_before = float(tree["time"])
        self._now, self._loaded = lambda: time_before, True
        self.restored()

    def _check_loaded(self, others: Iterable[Vector] = ()) -> None:
        """Raise ValueError if a loaded vector, or another, is not as long as the run's models."""
        size = self.spec.size
        for what, vectors in (
            ("model of the state", others),
            ("model", (model.vector for model in self.models.values())),
            ("model that a client has", self.bases.vectors.values()),
        ):
            for vector in vectors:
                if vector.shape != (size,):
                    raise ValueError(f"a {what} of shape {vector.shape}, not ({size},)")
        for feature in self.features:
            feature.restored(self.spec)

    def _work_in_rounds(self, *_given: Any, **_named: Any) -> NoReturn:
        """Raise UserError: only a wrapping strategy calls this, and would train no client."""
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
        self.features.sent(task)
        self.on_sent(task)

    def _keeps_base_of(self, task: InFlight) -> bool:
        return self.needs.bases or (self.features.keeps_bases and task.kind in TRAINING)

    def base_of(self, update: Update) -> Vector:
        """Return the model that a client started from, while kept. Shape (d,)."""
        return self.bases.of(update.task)

    def weight_of(self, update: Update) -> float:
        """Return the weight that an update now has in the method's sum; see `Needs.sum_weight`."""
        assert self.needs.sum_weight is not None, "only called for methods that declare sum_weight"
        return self.needs.sum_weight(self.received(update))

    def received(self, update: Update) -> Update:
        """Return an update with its current staleness, age and base.

        The staleness is the number of changes of the model that the client trained. After a split,
        or a merge that kept the model, changes of the succeeding cluster count. If the client moved
        to another cluster, or its model is gone, all updates applied since it received the model
        count.

        Raises
        ------
        UserError
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
            raise UserError(
                f"{type(self).__name__}: an update for cluster {home} has a staleness of "
                f"{staleness}: its model is of version {clusters.models[home].version}, and "
                f"{task.client} was sent version {task.version}. Change a cluster's model with "
                "mix, move, replace or average, which count versions."
            )
        bases = self.bases if self._keeps_base_of(task) else None
        return replace(update, staleness=staleness, age=age, bases=bases)

    def applied(self, updates: Sequence[Update]) -> Sequence[Outcome]:
        """Let the method aggregate updates, and return the outcome of each.

        Raises
        ------
        UserError
            An outcome is missing, or has an invalid cluster, staleness or weight.
        """
        method = type(self).__name__
        found = self.aggregate([self.received(update) for update in updates])
        if not isinstance(found, Mapping) or found.keys() != {update.number for update in updates}:
            raise UserError(
                f"{method}.aggregate() must return a dictionary with an Outcome for each "
                "update.number."
            )
        outcomes = [found[update.number] for update in updates]
        for outcome in outcomes:
            if not isinstance(outcome, Outcome):
                raise UserError(
                    f"{method} must return an Outcome for each update, got "
                    f"{type(outcome).__name__}."
                )
            # The cluster may have been split, merged or retired meanwhile.
            if outcome.cluster not in range(self.clusters.next_id):
                raise UserError(
                    f"{method} returned {outcome}: there is no such cluster, only "
                    f"{list(self.models)}."
                )
            for name, value in (("staleness", outcome.staleness), ("weight", outcome.weight)):
                if not isinstance(value, Real) or not 0 <= value < math.inf:
                    raise UserError(
                        f"{method} returned {outcome}: its {name} must be a finite number that is "
                        "not negative."
                    )
        return outcomes

    def close_task(self, task: InFlight) -> None:
        """Inform the method of the end of a task, and release its base models."""
        self.on_closed(task)
        self.features.closed(task)
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


def average_by_cluster(
    clusters: Clusters,
    updates: Sequence[Update],
    by_examples: bool = True,
    home: Callable[[Update], int] | None = None,
) -> Outcomes:
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
    totals: dict[int, float] = {}
    for cluster, own in grouped((k, index) for index, k in enumerate(homes)).items():
        totals[cluster] = sum(weights[index] for index in own)
        vectors = [updates[index].vector for index in own]
        clusters.models[cluster].average(vectors, [weights[index] for index in own])
    return {
        update.number: Outcome(cluster, staleness=0, weight=weight / totals[cluster])
        for update, cluster, weight in zip(updates, homes, weights, strict=True)
    }
