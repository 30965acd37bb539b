"""Features: additions to a run that any method may have, e.g. bounds on updates.

A feature has options, which are keys of the run, a server half and, if clients take part, a client
half. Every request and every update of a run passes the server halves of its features in the order
of :data:`raceme.core.registry.FEATURES`, those of users last; every training message and its reply
pass the client halves, the first of which is the outermost. A device with local differential
privacy leaves out the client halves of users. A feature reports its measures as events with a
:class:`~raceme.core.events.MeasureSchema`, as methods do.

:class:`raceme.core.chain.Chain` runs the server halves, :func:`raceme.client_app.features` the
client halves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from raceme.core.events import Measured
from raceme.core.state import NoState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from flwr.app import ConfigRecord, Context, RecordDict
    from numpy.typing import NDArray

    from raceme.core.config import RunConfig
    from raceme.core.events import MeasureSchema, Observer
    from raceme.core.messages import ModelSpec, Vector
    from raceme.core.progress import Evaluation, Steps
    from raceme.core.requests import Answer, InFlight, Outcome, Request, Update
    from raceme.core.strategy import Method, Needs


@dataclass(frozen=True)
class NoOptions:
    """Options of a feature without any."""


@dataclass(frozen=True)
class Refusal:
    """An update is refused: the method does not receive it, and the client backs off.

    Attributes
    ----------
    reason : str
        Reason in words without numbers.
    client : str
        The client of a held update; see :meth:`Feature.pending`.
    """

    reason: str
    client: str = ""


@dataclass(frozen=True)
class Held:
    """An update is held: its task stays open until the feature releases or refuses it.

    Attributes
    ----------
    reason : str
        The event that the update waits for, as the end of "all clients wait for ...".
    """

    reason: str


@dataclass(frozen=True)
class StepTests:
    """Tests of the models of one moment by clients, on their data of any steps.

    Attributes
    ----------
    steps : Mapping[str, Sequence[int]]
        Steps to test on, by client.
    present : Mapping[str, int]
        Step of each client's data whose personal parts complete a received model.
    untrained : bool
        Whether clients also test the untrained model, on the last of their steps.
    """

    steps: Mapping[str, Sequence[int]]
    present: Mapping[str, int]
    untrained: bool = False


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


class FeatureContext:
    """A run as its features see it.

    Attributes
    ----------
    spec : ModelSpec
        Names and shapes of a model's arrays.
    clusters : Clusters
        Models, and assignment of clients.
    probe : Probe, optional
        Measures models on the server's own data.
    drift : StepSchedule, optional
        When clients' data change; None if they never do.
    has_one_model, has_sums, exchanges : bool
        Whether the method always has one model for all clients, whether updates enter it as sums
        only, and whether models travel.
    has_weights : bool
        Whether sums of updates with weights are enough for the method; see `weight`.
    is_simulated : bool
        Whether the run is on virtual time, and reproducible from its seed.
    trained_steps : Mapping[str, int]
        Step of the data of each client's last update.
    now : Callable
        Returns the time on the grid's clock in seconds.
    step_of : Callable
        Returns the current step of a client's data; for an empty name, the common step.
    examples : Callable
        Returns the plausible number of examples of a client, for weighting.
    compared : Callable
        Returns the comparable part of a model: its weights without running statistics.
    base : Callable
        Returns the model that a client's update started from, with `keeps_bases`. Shape (d,).
    weight : Callable
        Returns the weight of an update in the sum that the method now makes, for methods that
        declare `Needs.sum_weight`.
    report : Observer
        Reports an event.
    """

    def __init__(self, method: Method, steps: Steps, report: Observer, is_simulated: bool) -> None:
        self._method, self._progress, self.report = method, method.progress, report
        self.spec, self.clusters, self.probe = method.spec, method.clusters, method.probe
        self.now, self.compared, self.base = method.now, method.compared, method.base_of
        self.examples = method.progress.fleet.plausible_examples
        self.weight = method.weight_of
        self.has_one_model, self.exchanges = method.needs.one_model, method.needs.exchange
        self.has_sums, self.is_simulated = method.needs.sums, is_simulated
        self.has_weights = method.needs.sum_weight is not None
        self.drift, self.step_of = steps.schedule, steps.current
        self.trained_steps: Mapping[str, int] = method.progress.trained_steps

    @property
    def clients(self) -> list[str]:
        """The clients online."""
        return [client.client_id for client in self._progress.fleet.online()]

    def is_online(self, client: str) -> bool:
        """Return whether a client is online, also if a feature excludes it."""
        known = self._progress.fleet.clients.get(client)
        return known is not None and known.node_id is not None

    @property
    def online(self) -> int:
        """Number of clients online."""
        return len(self._progress.fleet.by_node)

    @property
    def updates(self) -> int:
        """Number of updates applied in the run."""
        return self._progress.updates

    @property
    def at_work(self) -> Collection[InFlight]:
        """Open requests, without those whose updates are held."""
        return self._progress.in_flight.values()

    @property
    def together(self) -> bool:
        """Whether updates wait for all clients at work, as in rounds."""
        return self._method.scheduling.together

    def measure(self, schema: MeasureSchema, **values: Any) -> None:
        """Report values of a measure, by column."""
        self.report(Measured(self.now(), self.updates, schema, values))

    def exclude(self, client: str) -> None:
        """Let a client count as offline for the method, so that no other client waits for it.

        It keeps its cluster, and still receives work and tests.
        """
        self._method.on_leave(client)

    def readmit(self, client: str) -> None:
        """Let an excluded client count as online again."""
        self._method.on_join(self._progress.fleet.clients[client])


class Feature:
    """Base class of features. By default, hooks return their argument unchanged.

    Parameters
    ----------
    options : dataclass, optional
        Options of the run, an instance of `options_type`.
    config : RunConfig, optional
        Configuration of the run.

    Attributes
    ----------
    options_type, state_type : type
        Dataclasses of the options, and of what a checkpoint needs.
    switch : str
        Attribute of the option that switches the feature on; empty if it is always on.
    client : str
        Client half, as ``"module:function"``; empty if clients take no part. The function is called
        as ``function(message, context, call_next, options)`` and returns the reply to the message:
        a Flower mod, with the feature's options.
    keeps_bases : bool
        Whether the models that clients train from are kept; see `FeatureContext.base`.
    upload_size : float
        Size of trained models on their way to the server, as a share; simulated networks use it.
    settings : frozenset[str]
        Settings that `on_request` adds to requests.
    holds_for_good : bool
        Whether clients that `holds` names get no work even if no other client has any.
    state : dataclass
        State of the run, an instance of `state_type`; part of checkpoints.
    """

    options_type: ClassVar[type[Any]] = NoOptions
    state_type: ClassVar[type[Any]] = NoState
    switch: ClassVar[str] = ""
    client: ClassVar[str] = ""
    keeps_bases: ClassVar[bool] = False
    upload_size: ClassVar[float] = 1.0
    settings: ClassVar[frozenset[str]] = frozenset()
    holds_for_good: ClassVar[bool] = False

    def __init__(self, options: Any = None, config: RunConfig | None = None) -> None:
        self.options = self.options_type() if options is None else options
        self.config = config
        self.state: Any = self.state_type()

    @property
    def is_on(self) -> bool:
        """Whether the options switch the feature on."""
        return not self.switch or bool(getattr(self.options, self.switch))

    def resolved(self, needs: Needs) -> Mapping[str, Any]:
        """Return values for the options that are ``auto``, by attribute."""
        return {}

    def check(self, needs: Needs) -> None:
        """Raise UserError if the feature does not fit the configuration or the method."""

    def check_model(self, spec: ModelSpec) -> None:
        """Raise UserError if the feature does not fit the model."""

    def cost(self, settings: ConfigRecord, context: Context, examples: int) -> float:
        """Return the additional work of a training message, in passes over a client's samples.

        Simulated devices are charged for it.
        """
        return 0.0

    def on_start(self, training: dict[str, Any], tests: dict[str, Any]) -> None:
        """Change the settings of all training messages of a run, and add some to its tests."""

    def restored(self, spec: ModelSpec) -> None:
        """Raise ValueError if a loaded state is invalid."""

    def observer(self, folder: Path, resumed_at: float | None) -> Observer | None:
        """Return an observer of events, which may write files into the run's folder; or None."""
        return None

    def holds(self, client: str, context: FeatureContext) -> bool:
        """Return whether to withhold work from an idle client while others work."""
        return False

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Return the request to send instead of the method's."""
        return request

    def on_sent(self, task: InFlight, context: FeatureContext) -> None:
        """Handle a task that was sent to a client."""

    def on_reply(self, content: RecordDict, context: FeatureContext) -> RecordDict:
        """Decode the content of a training reply, before any check.

        An :class:`~raceme.core.messages.InvalidReplyError` refuses it.
        """
        return content

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal | Held:
        """Return the update that the method receives, or refuse or hold it."""
        return update

    def pending(self, context: FeatureContext) -> Iterable[Request | Update | Refusal]:
        """Return the next steps for held updates; called after every step of the loop.

        A `Request` asks the client of a held update for more, by a kind of work that the client
        half answers; it replaces an open one. An `Update` is released to the next feature and the
        method. A `Refusal` names its client.
        """
        return ()

    def on_answer(self, answer: Answer, context: FeatureContext) -> None:
        """Handle the answer to a request of `pending`.

        Raising :class:`~raceme.core.messages.InvalidReplyError` refuses the update. A missing
        answer has the same effect.
        """

    def wake_at(self, context: FeatureContext) -> float:
        """Return the next time at which `pending` changes without an answer; infinity for none."""
        return math.inf

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Handle updates that the method aggregated together, with their outcomes."""

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Handle the end of a task, successful or not."""

    def ends(self, context: FeatureContext) -> str:
        """Return a reason to end the run now, or an empty text; called after each update."""
        return ""

    def tests(self, context: FeatureContext, is_end: bool) -> StepTests | None:
        """Return tests to begin now, if any; called after each update, and at the end."""
        return None

    def on_tested(self, tests: Evaluation, context: FeatureContext) -> None:
        """Handle the scores of tests that are over."""
