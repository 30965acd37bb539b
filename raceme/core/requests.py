"""Requests to clients, in-flight requests, and checked replies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.clusters import Model, Weights, blended
from raceme.core.errors import quoted
from raceme.core.messages import LARGEST, ModelSpec, Vector
from raceme.core.messages import InvalidReplyError as InvalidReplyError
from raceme.core.options import key_of
from raceme.core.state import TRANSIENT
from raceme.core.training_settings import TrainingSettings
from raceme.flower.messages import NODE_UNAVAILABLE, VectorStore, records_of, size_of

Value = str | int | float | bool | list[int]

SETTINGS = frozenset(
    {
        *(key_of(item.name) for item in fields(TrainingSettings)),
        names.COMPUTE_SCALE,
        names.INVITATION,
        names.KIND,
        names.HALF,
        names.LR_SCALE,
        names.ON,
        names.REPORT_TIMING,
        names.ROUND,
        names.SKETCH,
        names.STEP,
        names.STEPS,
        names.TASK,
        names.TASK_SHARE,
        names.VALIDATION_SHARE,
        names.VERSION,
    }
)
"""Settings of requests of any method; further ones are declared by a method in
:attr:`raceme.core.strategy.Needs.settings`."""


@dataclass(frozen=True)
class Request:
    """A method's request to a client.

    Attributes
    ----------
    kind : str
        Kind of work: a name in the ClientApp's registry of kinds, e.g. ``"train"``.
    models : tuple[int, ...] or None
        Clusters whose models are sent, in order. None: the model that serves the client, for
        several clusters their weighted mean; empty: no model.
    arrays : Mapping[str, ArrayRecord]
        Further arrays to send, by the name of their record.
    settings : Mapping[str, Value]
        Settings in addition to the run's.
    phase : str
        Phase of the method, for traffic accounting; by default the kind of work.
    is_held : bool
        Whether the client already has the content, which is sent only so that clients need no
        memory and counts as 0 bytes.
    """

    client: str
    kind: str = names.TRAIN
    models: tuple[int, ...] | None = None
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    phase: str = ""
    is_held: bool = False

    @property
    def own_models(self) -> list[ArrayRecord]:
        """The models among `arrays`, for work without clusters."""
        if self.models != ():
            return []
        numbered = itertools.takewhile(
            self.arrays.__contains__, map(names.candidate, itertools.count())
        )
        found = [names.ARRAYS] if names.ARRAYS in self.arrays else numbered
        return [self.arrays[name] for name in found]


@dataclass(frozen=True)
class InFlight:
    """An in-flight request, kept until its reply.

    Attributes
    ----------
    number : int
        Unique number in a run, from 0.
    client : str
        The client.
    cluster : int
        The cluster whose model was sent; if several were, the client's choice once it is known.
    version : int
        Version of that model when it was sent.
    updates : int
        Number of applied updates in the run at sending.
    sent_at : float
        Time of sending in seconds.
    bytes_down : int
        Size of the sent arrays; 0 if the client had them.
    candidates : dict[int, int]
        Clusters of named models in the order of their records, with versions.
    kind : str
        Kind of work, as in :class:`Request`.
    step : int
        Step of the client's data for the work.
    phase : str
        Phase of the method.
    expected : float, optional
        Mean time of the work on the client's device in seconds, if needed (`Needs.latencies`) and
        known, as in simulations.
    """

    number: int
    client: str
    cluster: int
    version: int
    updates: int
    sent_at: float
    bytes_down: int
    candidates: dict[int, int] = field(default_factory=dict)
    kind: str = names.TRAIN
    step: int = 0
    phase: str = ""
    expected: float | None = None

    @property
    def reply(self) -> str:
        """Name of its reply: ``"update"`` for training, else ``"answer"``."""
        return "update" if self.kind in names.TRAINING else "answer"


# -----------------------------------------------------------------------------
# Base models of clients, for computing their changes.
# -----------------------------------------------------------------------------


@dataclass
class Bases:
    """Past models from which clients still train, one copy per version.

    Attributes
    ----------
    vectors : MutableMapping[str, Vector]
        The models by version name: ``<cluster>/<version>``, or ``task <number>`` for a model made
        for a single task, such as a weighted mean of clusters or a model in the request; further
        ones are ``task <number>/1`` and so on.
    users : dict[str, int]
        Number of open tasks per model.
    """

    vectors: MutableMapping[str, Vector] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # In a file, since one model per working client would exceed memory in a large fleet.
        self.vectors = VectorStore(self.vectors)

    def open(
        self,
        task: InFlight,
        models: Mapping[int, Model],
        weights: Weights,
        sent: Sequence[Vector] = (),
    ) -> None:
        """Keep the models that a client may start from until its task ends.

        Parameters
        ----------
        models : Mapping[int, Model]
            All cluster models, by cluster id.
        weights : Mapping[int, float]
            Clusters that serve the client.
        sent : Sequence[Vector]
            Models in the request that replace theirs.
        """
        if sent:
            for name, vector in zip(_own_names(task), sent, strict=False):
                self.hold(name, vector)
        elif task.kind == names.TRAIN_BEST:
            for cluster, version in task.candidates.items():
                self.hold(f"{cluster}/{version}", models[cluster].vector)
        elif len(weights) == 1 or task.candidates:
            self.hold(f"{task.cluster}/{task.version}", models[task.cluster].vector)
        else:
            self.hold(f"task {task.number}", blended(models, weights))

    def of(self, task: InFlight) -> Vector:
        """Return the model that a client started from. Shape (d,)."""
        own = self.own(task)
        return own[0] if own else self.vectors[f"{task.cluster}/{task.version}"]

    def own(self, task: InFlight) -> list[Vector]:
        """Return the models made for a single task, each of shape (d,)."""
        return [self.vectors[name] for name in self._held_for(task)]

    def _held_for(self, task: InFlight) -> list[str]:
        return list(itertools.takewhile(self.vectors.__contains__, _own_names(task)))

    def close(self, task: InFlight) -> None:
        """Close a task; drop models without users."""
        kept = self._held_for(task)
        if not kept and task.kind == names.TRAIN_BEST:
            kept = [f"{cluster}/{version}" for cluster, version in task.candidates.items()]
        for name in kept or [f"{task.cluster}/{task.version}"]:
            self.release(name)

    def hold(self, name: str, vector: Vector) -> None:
        """Keep a model under a name, with a reference count."""
        if name not in self.vectors:
            self.vectors[name] = vector.copy()
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> None:
        """Decrease a model's reference count; drop it at 0."""
        if name in self.users:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name], self.vectors[name]


def _own_names(task: InFlight) -> Iterator[str]:
    own = f"task {task.number}"
    return itertools.chain([own], (f"{own}/{index}" for index in itertools.count(1)))


# -----------------------------------------------------------------------------
# Validation of replies, once at their entry.
# -----------------------------------------------------------------------------


_MOST_DISTRIBUTIONS = 1000
"""Maximum number of distributions of a mixture."""
_ROUNDING = 1e-6
_MOST_NUMBERS = 50_000_000
"""Maximum size of an additional array in a reply."""
_MOST_ARRAYS = 1000
"""Maximum number of additional arrays in a reply."""


@dataclass(frozen=True)
class Answer:
    """A valid reply to work of any kind.

    Attributes
    ----------
    task : InFlight
        The answered request.
    num_examples : int
        Training examples of the client, n_i; 0 if not stated.
    metrics : Mapping[str, float]
        Metrics of the client, by name.
    numbers : Mapping[str, NDArray]
        Named arrays besides a model: losses per model and sample, label counts.
    bytes_up : int
        Size of the returned arrays.
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
        """Return an array; see :func:`raceme.core.messages.array_of`.

        Raises
        ------
        InvalidReplyError
            It is missing or invalid.
        """
        return names.array_of(self.numbers, name, shape, low, high, most)


@dataclass(frozen=True)
class Update:
    """A valid reply to a training task.

    Attributes
    ----------
    task : InFlight
        The answered request: client, cluster and base version. If several models were sent, cluster
        and version are those of the trained one.
    vector : Vector
        The client's model after training, w_i. Shape (d,).
    num_examples : int
        Training examples of the client, n_i.
    train_loss : float
        Mean loss of the local training; NaN if not stated.
    metrics : dict[str, float]
        Further metrics of the client.
    bytes_up : int
        Size of the returned arrays.
    numbers : dict[str, NDArray]
        Named arrays besides the model.
    arrived_at : float
        Time of arrival on the grid's clock.
    mixture : tuple[float, ...]
        Share of each distribution in the client's samples, if stated; for reports only.
    cpu_seconds : float, optional
        CPU seconds of the work, if stated; for reports only.
    staleness : int
        τ: changes of the client's cluster model since the client received it. Set by the loop at
        aggregation; see :meth:`raceme.core.strategy.Method.received`.
    age : int
        Updates applied in the whole run since then.
    bases : Bases, optional
        Store of `base`; not part of checkpoints.
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
    cpu_seconds: float | None = None
    staleness: int = 0
    age: int = 0
    bases: Bases | None = field(default=None, repr=False, compare=False, metadata=TRANSIENT)

    @property
    def number(self) -> int:
        """The number of the request."""
        return self.task.number

    @property
    def base(self) -> Vector:
        """The model from which the client started, for methods that keep bases. Shape (d,)."""
        if self.bases is None:
            raise ValueError("base models are not kept: the method must declare Needs(bases=True)")
        return self.bases.of(self.task)

    @property
    def delta(self) -> Vector:
        """Δ_i: the client's change, w_i minus its base. Shape (d,)."""
        return np.asarray(self.vector - self.base)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an update.

    Attributes
    ----------
    cluster : int
        The cluster whose model it changed.
    staleness : int
        τ: changes of that model since the client received its own.
    weight : float
        α: share of the client's model in the new one.
    """

    cluster: int
    staleness: int
    weight: float


Outcomes = dict[int, Outcome]
"""Outcomes of updates, by the numbers of their requests."""


Reading = Callable[[RecordDict], RecordDict]
"""Decodes the content of a training reply."""


def read_reply(
    reply: Message,
    task: InFlight,
    spec: ModelSpec,
    now: float = 0.0,
    reading: Reading = lambda content: content,
) -> Update | Answer:
    """Check a reply of any kind and extract its content.

    Parameters
    ----------
    task : InFlight
        The answered in-flight request.
    spec : ModelSpec
        Names and shapes of a model's arrays.
    now : float
        Time of arrival on the grid's clock, in seconds.
    reading : Callable
        Decodes the content of a training reply.

    Raises
    ------
    InvalidReplyError
        As in :func:`read_update`, or the reply is of another kind.
    """
    if task.kind in names.TRAINING:
        return read_update(reply, task, spec, now, reading)
    _, measured = _checked(reply, task)
    metrics = names.metrics_of(measured)
    arrays = records_of(reply.content, ArrayRecord)
    numbers = _numbers(arrays.get(names.NUMBERS))
    if len(arrays) != (names.NUMBERS in arrays):
        raise InvalidReplyError(
            f"it brings arrays that work of kind '{task.kind}' was not asked for"
        )
    examples = names.count_of(metrics.get(names.NUM_EXAMPLES, 0.0))
    if examples is None:
        raise InvalidReplyError("no examples")
    return Answer(task, examples, metrics, numbers, size_of(reply))


def read_update(
    reply: Message,
    task: InFlight,
    spec: ModelSpec,
    now: float = 0.0,
    reading: Reading = lambda content: content,
) -> Update:
    """Check a reply to a training task and extract its content.

    Raises
    ------
    InvalidReplyError
        An error reply; missing records; another base version, task, kind or step; no choice among
        several models; no examples; an impossible cost; arrays of other shapes; NaN, infinity, or
        too large numbers.
    """
    stated, measured = _checked(reply, task)
    metrics = names.metrics_of(measured)
    records = records_of(reading(reply.content), ArrayRecord)
    numbers = records.pop(names.NUMBERS, None)
    if len(records) != 1:
        raise InvalidReplyError(f"missing records: {len(records)} ArrayRecords, not 1")
    if task.kind == names.TRAIN_BEST:
        task = _chosen(stated, task)
    examples = names.count_of(metrics.get(names.NUM_EXAMPLES))
    if not examples:
        raise InvalidReplyError("no examples")
    arrays = records.get(names.ARRAYS) or next(iter(records.values()))
    return Update(
        task=task,
        vector=spec.unpack(arrays),
        num_examples=examples,
        train_loss=metrics.get(names.TRAIN_LOSS, math.nan),
        metrics=metrics,
        bytes_up=size_of(reply),
        numbers=_numbers(numbers),
        arrived_at=now,
        mixture=_mixture(measured.get(names.MIXTURE)),
        cpu_seconds=names.cpu_seconds_of(metrics),
    )


def _checked(reply: Message, task: InFlight) -> tuple[Mapping[str, object], MetricRecord]:
    """Return settings and metrics of a matching reply."""
    if reply.has_error():
        is_away = reply.error.code == NODE_UNAVAILABLE
        raise InvalidReplyError(f"error {reply.error.code}: {names.error_line(reply)}", is_away)
    content = reply.content
    metrics = list(records_of(content, MetricRecord).values())
    if len(metrics) != 1:
        raise InvalidReplyError(f"missing records: {len(metrics)} MetricRecords, not 1")
    stated = dict(records_of(content, ConfigRecord).get(names.CONFIG, ConfigRecord()).items())
    _check_echo(stated, task)
    return stated, metrics[0]


def _check_echo(stated: Mapping[str, object], task: InFlight) -> None:
    """Check the task echoed in a reply.

    The echo may be missing: Flower's message id ties the reply to its task anyway.
    """
    if names.VERSION in stated and stated[names.VERSION] != task.version:
        raise InvalidReplyError(
            f"unknown base version {quoted(stated[names.VERSION])}: it was sent {task.version}"
        )
    if names.TASK in stated and stated[names.TASK] != task.number:
        raise InvalidReplyError(
            f"repeated or foreign task {quoted(stated[names.TASK])}: it was sent {task.number}"
        )
    if stated.get(names.KIND, task.kind) != task.kind:
        raise InvalidReplyError(
            f"it answers work of kind {quoted(stated[names.KIND])}: it was asked for '{task.kind}'"
        )
    if stated.get(names.STEP, task.step) != task.step:
        raise InvalidReplyError(
            f"it is about step {quoted(stated[names.STEP])} of its data, not step {task.step}"
        )


def _chosen(stated: Mapping[str, object], task: InFlight) -> InFlight:
    """Return the task, with the client's choice among the sent models filled in."""
    index, count = stated.get(names.CHOSEN), len(task.candidates)
    if not isinstance(index, int) or not 0 <= index < count:
        raise InvalidReplyError(
            f"it must state as '{names.CHOSEN}' which of the {count} models it has trained, "
            f"got {quoted(index)}"
        )
    cluster, version = list(task.candidates.items())[index]
    return replace(task, cluster=cluster, version=version)


def _mixture(stated: object) -> tuple[float, ...]:
    """Return the shares that a client states; empty if invalid."""
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
        values = names.from_array(array)
        if values.dtype.kind not in "fiu" or values.size > _MOST_NUMBERS:
            raise InvalidReplyError(f"unusable numbers {quoted(name)}: {values.dtype}")
        # NaN fails both comparisons. Sums of accepted numbers are finite in float64.
        if values.size and not -LARGEST <= float(values.min()) <= float(values.max()) <= LARGEST:
            if np.isfinite(values).all():
                raise InvalidReplyError(f"too large: {quoted(name)}")
            raise InvalidReplyError(f"not finite: {quoted(name)} holds NaN or infinity")
        numbers[name] = values
    return numbers
