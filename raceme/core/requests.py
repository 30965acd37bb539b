"""Requests: what a client is asked to do, and what the server remembers of it until the reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from raceme.core.clusters import Model, Weights, blended
from raceme.core.errors import printable, quoted
from raceme.core.messages import (
    ARRAYS,
    BATCH_SIZE,
    CHOSEN,
    COMPUTE_SCALE,
    CONFIG,
    DROPOUT,
    FORMER_STEP,
    INVITATION,
    KIND,
    LARGEST,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    LR,
    LR_SCALE,
    MIXTURE,
    MOMENTUM,
    NOT_STATED,
    NUM_EXAMPLES,
    NUMBERS,
    ON,
    OPTIMIZER,
    PROXIMAL_MU,
    REPORT_TIMING,
    ROUND,
    SCORED,
    STEP,
    STEPS,
    TASK,
    TASK_SHARE,
    TRAIN,
    TRAIN_BEST,
    TRAIN_LOSS,
    TRAINING,
    VALIDATION_SHARE,
    VERSION,
    WEIGHT_DECAY,
    Cost,
    InvalidModelError,
    ModelSpec,
    StatementError,
    Vector,
    array_of,
    cost_of,
    count_of,
    error_line,
    from_array,
    metrics_of,
)
from raceme.flower.messages import NODE_UNAVAILABLE, Shelf

TRANSIENT = MappingProxyType({"transient": True})
"""Metadata of a dataclass's field that no state keeps."""
Value = str | int | float | bool | list[int]

SETTINGS = frozenset(
    {
        BATCH_SIZE,
        COMPUTE_SCALE,
        DROPOUT,
        FORMER_STEP,
        INVITATION,
        KIND,
        LOCAL_EPOCHS,
        LOCAL_STEPS,
        LR,
        LR_SCALE,
        MOMENTUM,
        ON,
        OPTIMIZER,
        PROXIMAL_MU,
        REPORT_TIMING,
        ROUND,
        SCORED,
        STEP,
        STEPS,
        TASK,
        TASK_SHARE,
        VALIDATION_SHARE,
        VERSION,
        WEIGHT_DECAY,
    }
)
"""What the message of a request can say whatever the method; others are declared by the method, in
:attr:`raceme.core.strategy.Needs.settings`."""


@dataclass(frozen=True)
class Request:
    """What a method asks of a client.

    Attributes
    ----------
    client : str
        Who.
    kind : str
        What: a name in the ClientApp's registry of kinds, e.g. ``"train"``.
    models : tuple[int, ...] or None
        Clusters whose models travel, in this order. None stands for the model that serves the
        client, which with several clusters is their weighted mean; an empty tuple for no model.
    arrays : Mapping[str, ArrayRecord]
        Further arrays that travel along, by the name of their record.
    settings : Mapping[str, Value]
        What the message says beyond the run's own settings.
    phase : str
        What the method does meanwhile, for the account of bytes; if empty, the kind of work.
    is_held : bool
        Whether the client has what is sent: it travels only so that clients need no memory, and
        counts as no bytes down.
    """

    client: str
    kind: str = TRAIN
    models: tuple[int, ...] | None = None
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    phase: str = ""
    is_held: bool = False


@dataclass(frozen=True)
class InFlight:
    """A request in flight: what the server remembers of it until the reply.

    Attributes
    ----------
    number : int
        Unique in a run, from 0.
    client : str
        Who has it.
    cluster : int
        Whose model was sent; of several, the one that the client has chosen, once it is known.
    version : int
        Version of that model.
    updates : int
        Updates that had been applied in the whole run by then.
    sent_at : float
        When it was sent.
    bytes_down : int
        Size of the arrays that were sent; 0 if the client had them.
    candidates : dict[int, int]
        Where the work names models: their clusters in the order of their records, with their
        versions.
    kind : str
        What was asked for.
    step : int
        Step of the client's data that it was to work on.
    phase : str
        What the method did meanwhile.
    """

    number: int
    client: str
    cluster: int
    version: int
    updates: int
    sent_at: float
    bytes_down: int
    candidates: dict[int, int] = field(default_factory=dict)
    kind: str = TRAIN
    step: int = 0
    phase: str = ""

    @property
    def reply(self) -> str:
        """What the reply to it is called: an update is of a model that was trained."""
        return "update" if self.kind in TRAINING else "answer"


# -----------------------------------------------------------------------------
# What a client has changed: its model against the one that it started from.
# -----------------------------------------------------------------------------


@dataclass
class Bases:
    """Past models that clients are still training from; each version is stored once.

    Attributes
    ----------
    vectors : MutableMapping[str, Vector]
        The models, by a name of the version: ``<cluster>/<version>``, or ``task <number>`` for the
        weighted mean that a client of several clusters was sent: another client may have been sent
        the same version of one of them.
    users : dict[str, int]
        Number of open tasks that started from each.
    """

    vectors: MutableMapping[str, Vector] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One of every client at work is too much for the memory of a large fleet.
        self.vectors = Shelf(self.vectors)

    def open(self, task: InFlight, models: Mapping[int, Model], weights: Weights) -> None:
        """Keep the models that a client may start from until its task is over.

        Parameters
        ----------
        task : InFlight
            The task.
        models : Mapping[int, Model]
            The models by cluster.
        weights : Mapping[int, float]
            The clusters that serve the client.
        """
        if task.kind == TRAIN_BEST:
            for cluster, version in task.candidates.items():
                self.hold(f"{cluster}/{version}", models[cluster].vector)
        elif len(weights) == 1 or task.candidates:
            self.hold(f"{task.cluster}/{task.version}", models[task.cluster].vector)
        else:
            self.hold(f"task {task.number}", blended(models, weights))

    def of(self, task: InFlight) -> Vector:
        """Return the model that a client has started from. Shape (d,)."""
        own = f"task {task.number}"
        return self.vectors[own if own in self.vectors else f"{task.cluster}/{task.version}"]

    def close(self, task: InFlight) -> None:
        """Note that a task is over; forget a model from which no client trains any more."""
        own = f"task {task.number}"
        if task.kind == TRAIN_BEST:
            names = [f"{cluster}/{version}" for cluster, version in task.candidates.items()]
        else:
            names = [own if own in self.vectors else f"{task.cluster}/{task.version}"]
        for name in names:
            self.release(name)

    def hold(self, name: str, vector: Vector) -> None:
        """Keep a model under a name; it may be kept several times."""
        if name not in self.vectors:
            self.vectors[name] = vector.copy()
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> None:
        """Note that a model is needed once less; forget it if it is needed no more."""
        if name in self.users:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name], self.vectors[name]


# -----------------------------------------------------------------------------
# Which replies are valid: checked once, where they enter.
# -----------------------------------------------------------------------------


_MOST_DISTRIBUTIONS = 1000
"""Distributions of which a mixture may be."""
_ROUNDING = 1e-6
_MOST_NUMBERS = 50_000_000
"""Numbers beside the model that one array of a reply may bring."""
_MOST_ARRAYS = 1000
"""Arrays beside the model that a reply may bring."""


@dataclass(frozen=True)
class Answer:
    """A valid reply to work of any kind.

    Attributes
    ----------
    task : InFlight
        The work that it answers.
    num_examples : int
        Training examples of the client, n_i; 0 if it does not say.
    metrics : Mapping[str, float]
        What the client measured.
    numbers : Mapping[str, NDArray]
        Named arrays beside a model: losses per model and sample, label counts.
    bytes_up : int
        Size of the arrays that came back.
    """

    task: InFlight
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    bytes_up: int = 0

    def array(
        self,
        name: str,
        shape: Sequence[int | None],
        low: float = -LARGEST,
        high: float = LARGEST,
        most: int = _MOST_NUMBERS,
    ) -> NDArray[np.float64]:
        """Return one of the arrays; see :func:`raceme.core.messages.array_of`.

        Raises
        ------
        InvalidReplyError
            It is missing, or not what was asked for.
        """
        try:
            return array_of(self.numbers, name, shape, low, high, most)
        except StatementError as error:
            raise InvalidReplyError(str(error)) from None


@dataclass(frozen=True)
class Update:
    """A valid reply to a training task.

    Attributes
    ----------
    task : InFlight
        The work that it answers: client, cluster, base version; of several models that were sent,
        cluster and version are those of the one that the client has trained.
    vector : Vector
        The client's model after training, w_i. Shape (d,).
    num_examples : int
        Training examples of the client, n_i.
    train_loss : float
        Mean loss of the local training; NaN if the client does not say.
    metrics : dict[str, float]
        Whatever else the client measured.
    bytes_up : int
        Size of the arrays that came back.
    numbers : dict[str, NDArray]
        Named arrays beside the model.
    arrived_at : float
        When it arrived, on the grid's clock.
    mixture : tuple[float, ...]
        Share of each distribution in the client's samples, where they are a mixture and it says
        so; for reports only.
    cost : Cost
        What the work cost the device, as far as it says so; for reports only.
    staleness : int
        τ: changes of the model of the client's cluster since the client received it. The loop sets
        it when the update is acted on: see :meth:`raceme.core.strategy.Method.received`.
    age : int
        Updates that were applied in the whole run since then, whatever their cluster.
    bases : Bases, optional
        Where `base` is kept; part of no checkpoint.
    """

    task: InFlight
    vector: Vector
    num_examples: int
    train_loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)
    arrived_at: float = 0.0
    mixture: tuple[float, ...] = ()
    cost: Cost = NOT_STATED
    staleness: int = 0
    age: int = 0
    bases: Bases | None = field(default=None, repr=False, compare=False, metadata=TRANSIENT)

    @property
    def base(self) -> Vector:
        """The model from which the client started; for a method that keeps bases. Shape (d,)."""
        if self.bases is None:
            raise ValueError("no bases are kept: the method has to say that it needs them")
        return self.bases.of(self.task)

    @property
    def delta(self) -> Vector:
        """Δ_i: what the client has changed, w_i less its base. Shape (d,)."""
        return np.asarray(self.vector - self.base)


@dataclass(frozen=True)
class Outcome:
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


class InvalidReplyError(ValueError):
    """A reply is not what was asked for; the message says why, in one short printable line.

    Parameters
    ----------
    reason : str
        Why; it may hold words of the client's own.
    is_away : bool
        The client has left with the task: that is no fault of its own.
    """

    def __init__(self, reason: str, is_away: bool = False) -> None:
        super().__init__(printable(reason))
        self.is_away = is_away


def read_reply(
    reply: Message, task: InFlight, spec: ModelSpec, now: float = 0.0
) -> Update | Answer:
    """Check a reply to a task of any kind, and take its content out.

    Parameters
    ----------
    reply : Message
        What came back.
    task : InFlight
        What was asked.
    spec : ModelSpec
        What a model looks like.
    now : float
        The time.

    Raises
    ------
    InvalidReplyError
        As for :func:`read_update`; or the reply answers another kind of work.
    """
    if task.kind in TRAINING:
        return read_update(reply, task, spec, now)
    content, _, metrics = _checked(reply, task)
    numbers = _numbers(content.array_records.get(NUMBERS))
    if len(content.array_records) != (NUMBERS in content.array_records):
        raise InvalidReplyError(
            f"it brings arrays that work of kind '{task.kind}' was not asked for"
        )
    examples = count_of(metrics.get(NUM_EXAMPLES, 0.0))
    if examples is None:
        raise InvalidReplyError("no examples")
    size = sum(record.count_bytes() for record in content.array_records.values())
    return Answer(task, examples, metrics, numbers, size)


def read_update(reply: Message, task: InFlight, spec: ModelSpec, now: float = 0.0) -> Update:
    """Check a reply to a training task and take its content out.

    Raises
    ------
    InvalidReplyError
        An error reply; records missing; a base version, task, kind or step other than the one
        that was sent; no word on which of several models was trained; no examples; a cost that
        cannot be; arrays of other shapes; NaN, infinity, or numbers with which no mean could be
        taken.
    """
    content, stated, metrics = _checked(reply, task)
    records = {name: rec for name, rec in content.array_records.items() if name != NUMBERS}
    if len(records) != 1:
        raise InvalidReplyError(f"missing records: {len(records)} ArrayRecords, not 1")
    if task.kind == TRAIN_BEST:
        task = _chosen(stated, task)
    examples = count_of(metrics.get(NUM_EXAMPLES))
    if not examples:
        raise InvalidReplyError("no examples")
    arrays = records.get(ARRAYS) or next(iter(records.values()))
    numbers = content.array_records.get(NUMBERS)
    try:
        vector = spec.unpack(arrays)
        cost = cost_of(metrics)
    except (InvalidModelError, StatementError) as error:
        raise InvalidReplyError(str(error)) from None
    return Update(
        task=task,
        vector=vector,
        num_examples=examples,
        train_loss=metrics.get(TRAIN_LOSS, math.nan),
        metrics=metrics,
        bytes_up=arrays.count_bytes() + (numbers.count_bytes() if numbers else 0),
        numbers=_numbers(numbers),
        arrived_at=now,
        mixture=_mixture(next(iter(content.metric_records.values())).get(MIXTURE)),
        cost=cost,
    )


def _checked(
    reply: Message, task: InFlight
) -> tuple[RecordDict, Mapping[str, object], dict[str, float]]:
    """Return content, settings and metrics of a reply that answers what was asked."""
    if reply.has_error():
        is_away = reply.error.code == NODE_UNAVAILABLE
        raise InvalidReplyError(f"error {reply.error.code}: {error_line(reply)}", is_away)
    content = reply.content
    if len(content.metric_records) != 1:
        raise InvalidReplyError(
            f"missing records: {len(content.metric_records)} MetricRecords, not 1"
        )
    stated: Mapping[str, object] = content.config_records.get(CONFIG, {})
    _check_echo(stated, task)
    try:
        metrics = metrics_of(next(iter(content.metric_records.values())))
    except StatementError as error:
        raise InvalidReplyError(str(error)) from None
    return content, stated, metrics


def _check_echo(stated: Mapping[str, object], task: InFlight) -> None:
    """Check what the reply says of its task.

    A ClientApp that says nothing is taken on trust: Flower's message id ties the reply to its
    task anyway.
    """
    if VERSION in stated and stated[VERSION] != task.version:
        raise InvalidReplyError(
            f"unknown base version {quoted(stated[VERSION])}: it was sent {task.version}"
        )
    if TASK in stated and stated[TASK] != task.number:
        raise InvalidReplyError(
            f"repeated or foreign task {quoted(stated[TASK])}: it was sent {task.number}"
        )
    if stated.get(KIND, task.kind) != task.kind:
        raise InvalidReplyError(
            f"it answers work of kind {quoted(stated[KIND])}: it was asked for '{task.kind}'"
        )
    if stated.get(STEP, task.step) != task.step:
        raise InvalidReplyError(
            f"it is about step {quoted(stated[STEP])} of its data, not step {task.step}"
        )


def _chosen(stated: Mapping[str, object], task: InFlight) -> InFlight:
    """Return the task with the model that the client has chosen among those that it was sent."""
    index, count = stated.get(CHOSEN), len(task.candidates)
    if not isinstance(index, int) or not 0 <= index < count:
        raise InvalidReplyError(
            f"it must state as '{CHOSEN}' which of the {count} models it has trained, "
            f"got {quoted(index)}"
        )
    cluster, version = list(task.candidates.items())[index]
    return replace(task, cluster=cluster, version=version)


def _mixture(stated: object) -> tuple[float, ...]:
    """Return the shares that a client states; nothing for anything that is no mixture."""
    if not isinstance(stated, list) or not 1 <= len(stated) <= _MOST_DISTRIBUTIONS:
        return ()
    if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in stated):
        return ()
    return tuple(map(float, stated)) if abs(math.fsum(stated) - 1) < _ROUNDING else ()


def _numbers(record: ArrayRecord | None) -> dict[str, NDArray[Any]]:
    """Read the named arrays beside a model."""
    numbers: dict[str, NDArray[Any]] = {}
    if len(record or ()) > _MOST_ARRAYS:
        raise InvalidReplyError(f"it brings {len(record or ())} arrays beside the model")
    for name, array in (record or {}).items():
        try:
            values = from_array(array)
        except InvalidModelError as error:
            raise InvalidReplyError(str(error)) from None
        if values.dtype.kind not in "fiu" or values.size > _MOST_NUMBERS:
            raise InvalidReplyError(f"unusable numbers {quoted(name)}: {values.dtype}")
        # NaN fails both comparisons. Sums of what is left are finite in float64.
        if values.size and not -LARGEST <= float(values.min()) <= float(values.max()) <= LARGEST:
            if np.isfinite(values).all():
                raise InvalidReplyError(f"too large: {quoted(name)}")
            raise InvalidReplyError(f"not finite: {quoted(name)} holds NaN or infinity")
        numbers[name] = values
    return numbers
