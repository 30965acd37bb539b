"""Features: what a run has besides its method, such as bounds on updates or a report of batteries.

A feature has options, which are keys of the run, a server half and, if clients take part, a client
half. Every request and every update of a run passes the server halves of its features in the order
of :data:`raceme.core.registry.FEATURES`, those of users last; every training message and its reply
pass the client halves, the first of which is the outermost. A device with local differential
privacy leaves out the client halves of users. What a feature measures are events with
a :class:`~raceme.core.events.MeasureSchema`, as those of methods.

:class:`raceme.core.chain.Chain` runs the server halves, :func:`raceme.client_app.features` the
client halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from flwr.app import RecordDict
    from numpy.typing import NDArray

    from raceme.core.clusters import Clusters
    from raceme.core.config import RunConfig
    from raceme.core.events import Event, MeasureSchema
    from raceme.core.messages import ModelSpec, Vector
    from raceme.core.requests import InFlight, Outcome, Request, Update


@dataclass(frozen=True)
class NoOptions:
    """Options of a feature without any."""


@dataclass
class NoState:
    """State of a feature without any."""


@dataclass(frozen=True)
class Refusal:
    """An update is refused: the method does not receive it, and the client backs off.

    Attributes
    ----------
    reason : str
        Reason in words without numbers.
    """

    reason: str


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


class FeatureContext(Protocol):
    """A run as its features see it."""

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of a model's arrays."""

    @property
    def clusters(self) -> Clusters:
        """Models, and assignment of clients."""

    @property
    def has_one_model(self) -> bool:
        """Whether the method always has one model for all clients."""

    @property
    def probe(self) -> Probe | None:
        """Measures models on the server's own data, if any."""

    @property
    def online(self) -> int:
        """Number of clients online."""

    @property
    def updates(self) -> int:
        """Number of updates applied in the run."""

    @property
    def trained_steps(self) -> Mapping[str, int]:
        """Step of the data of each client's last update; empty if models do not travel."""

    def now(self) -> float:
        """Return the time on the grid's clock in seconds."""

    def examples(self, client: str) -> int:
        """Return the plausible number of examples of a client, for weighting."""

    def compared(self, vector: Vector) -> Vector:
        """Return the comparable part of a model: its weights without running statistics."""

    def base(self, update: Update) -> Vector:
        """Return the model that a client started from, with `keeps_bases`. Shape (d,)."""

    def report(self, event: Event) -> None:
        """Report an event."""

    def measure(self, schema: MeasureSchema, **values: Any) -> None:
        """Report values of a measure, by column."""

    def exclude(self, client: str) -> None:
        """Let a client count as offline for the method, so that no other waits for it.

        It keeps its cluster, and is still asked and tested.
        """

    def readmit(self, client: str) -> None:
        """Let an excluded client count as online again."""


class Feature:
    """Base class of features; every hook passes its argument on unchanged.

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
    state : dataclass
        State of the run, an instance of `state_type`; part of checkpoints.
    """

    options_type: ClassVar[type[Any]] = NoOptions
    state_type: ClassVar[type[Any]] = NoState
    client: ClassVar[str] = ""
    keeps_bases: ClassVar[bool] = False
    upload_size: ClassVar[float] = 1.0
    settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Any = None, config: RunConfig | None = None) -> None:
        self.options = self.options_type() if options is None else options
        self.config = config
        self.state: Any = self.state_type()

    @property
    def is_on(self) -> bool:
        """Whether the options switch the feature on."""
        return True

    def restored(self, spec: ModelSpec) -> None:
        """Check a loaded state; a ValueError refuses the checkpoint."""

    def holds(self, client: str, context: FeatureContext) -> bool:
        """Return whether an idle client gets no work yet, while others work."""
        return False

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Return the request to send in place of a method's."""
        return request

    def on_reply(self, content: RecordDict) -> RecordDict:
        """Return the content of a reply to training as it is read, before any check.

        An :class:`~raceme.core.messages.InvalidReplyError` refuses it.
        """
        return content

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal:
        """Return the update that the method receives in place of a valid one, or refuse it."""
        return update

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Handle updates that the method aggregated together, with their outcomes."""

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Handle the end of a task, successful or not."""
