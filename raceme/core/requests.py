"""Requests: what a client is asked to do, and what the server remembers of it until the reply."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.clusters import Model, Weights, blended
from raceme.core.errors import quoted
from raceme.core.messages import LARGEST, Cost, ModelSpec, Vector
from raceme.core.messages import InvalidReplyError as InvalidReplyError
from raceme.flower.messages import NODE_UNAVAILABLE, Shelf

TRANSIENT = MappingProxyType({"transient": True})
"""Metadata of a dataclass's field that no state keeps."""
Value = str | int | float | bool | list[int]

SETTINGS = frozenset(
    {
        names.BATCH_SIZE,
        names.COMPUTE_SCALE,
        names.DROPOUT,
        names.FORMER_STEP,
        names.INVITATION,
        names.KIND,
        names.LOCAL_EPOCHS,
        names.LOCAL_STEPS,
        names.LR,
        names.LR_SCALE,
        names.MOMENTUM,
        names.ON,
        names.OPTIMIZER,
        names.PROXIMAL_MU,
        names.REPORT_TIMING,
        names.ROUND,
        names.SCORED,
        names.STEP,
        names.STEPS,
        names.TASK,
        names.TASK_SHARE,
        names.VALIDATION_SHARE,
        names.VERSION,
        names.WEIGHT_DECAY,
    }
)
"""What the message of a request can say whatever the method; others are declared by the method, in
:attr:`raceme.core.strategy.Needs.settings`."""


@dataclass(frozen=True)
class Request:
    """What a method asks of a client.

    Attributes
    ----------
    kind : str
        Kind of work: a name in the ClientApp's registry of kinds, e.g. ``"train"``.
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
    kind: str = names.TRAIN
    models: tuple[int, ...] | None = None
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    phase: str = ""
    is_held: bool = False

    @property
    def own_models(self) -> list[ArrayRecord]:
        """The models among `arrays`, of work that names no cluster."""
        if self.models != ():
            return []
        numbered = itertools.takewhile(
            self.arrays.__contains__, map(names.candidate, itertools.count())
        )
        found = [names.ARRAYS] if names.ARRAYS in self.arrays else numbered
        return [self.arrays[name] for name in found]


@dataclass(frozen=True)
class InFlight:
    """A request in flight: what the server remembers of it until the reply.

    Attributes
    ----------
    number : int
        Unique in a run, from 0.
    client : str
        The client that has it.
    cluster : int
        The cluster whose model was sent; of several, the one that the client has chosen, once it is
        known.
    version : int
        Version of that model when it was sent.
    updates : int
        Updates that had been applied in the whole run by then.
    sent_at : float
        Time in seconds at which it was sent.
    bytes_down : int
        Size of the arrays that were sent; 0 if the client had them.
    candidates : dict[int, int]
        Where the work names models: their clusters in the order of their records, with their
        versions.
    kind : str
        Kind of work, as in :class:`Request`.
    step : int
        Step of the client's data that it was to work on.
    phase : str
        What the method did meanwhile.
    expected : float, optional
        Mean time of such work on the client's device in seconds, if the method needs it
        (`Needs.latencies`) and the grid knows it, as a simulated one does.
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
        """What the reply to it is called: an update is of a model that was trained."""
        return "update" if self.kind in names.TRAINING else "answer"


# -----------------------------------------------------------------------------
# What a client has changed: its model against the one that it started from.
# -----------------------------------------------------------------------------


@dataclass
class Bases:
    """Past models that clients are still training from; each version is stored once.

    Attributes
    ----------
    vectors : MutableMapping[str, Vector]
        The models, by a name of the version: ``<cluster>/<version>``, or ``task <number>`` for one
        that was made for a single task: the weighted mean that a client of several clusters was
        sent, or a model that the method put into the request, such as the initial one. Of several
        such models the further ones are ``task <number>/1`` and so on.
    users : dict[str, int]
        Number of open tasks that started from each.
    """

    vectors: MutableMapping[str, Vector] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One of every client at work is too much for the memory of a large fleet.
        self.vectors = Shelf(self.vectors)

    def open(
        self,
        task: InFlight,
        models: Mapping[int, Model],
        weights: Weights,
        sent: Sequence[Vector] = (),
    ) -> None:
        """Keep the models that a client may start from until its task is over.

        Parameters
        ----------
        models : Mapping[int, Model]
            All cluster models, by cluster id.
        weights : Mapping[int, float]
            The clusters that serve the client.
        sent : Sequence[Vector]
            The models that the request itself brings in place of theirs.
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
        """Return the model that a client has started from. Shape (d,)."""
        own = self.own(task)
        return own[0] if own else self.vectors[f"{task.cluster}/{task.version}"]

    def own(self, task: InFlight) -> list[Vector]:
        """Return the models that were made for a task alone, each of shape (d,)."""
        return [self.vectors[name] for name in self._held_for(task)]

    def _held_for(self, task: InFlight) -> list[str]:
        return list(itertools.takewhile(self.vectors.__contains__, _own_names(task)))

    def close(self, task: InFlight) -> None:
        """Note that a task is over; forget a model from which no client trains any more."""
        kept = self._held_for(task)
        if not kept and task.kind == names.TRAIN_BEST:
            kept = [f"{cluster}/{version}" for cluster, version in task.candidates.items()]
        for name in kept or [f"{task.cluster}/{task.version}"]:
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


def _own_names(task: InFlight) -> Iterator[str]:
    own = f"task {task.number}"
    return itertools.chain([own], (f"{own}/{index}" for index in itertools.count(1)))


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
        Single numbers that the client measured, by name.
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
        return names.array_of(self.numbers, name, shape, low, high, most)


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
    cost: Cost = names.NOT_STATED
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


def read_reply(
    reply: Message, task: InFlight, spec: ModelSpec, now: float = 0.0
) -> Update | Answer:
    """Check a reply to a task of any kind, and take its content out.

    Parameters
    ----------
    task : InFlight
        The request that it answers, as kept when it was sent.
    spec : ModelSpec
        What a model looks like.
    now : float
        Time of arrival on the grid's clock, in seconds.

    Raises
    ------
    InvalidReplyError
        As for :func:`read_update`; or the reply answers another kind of work.
    """
    if task.kind in names.TRAINING:
        return read_update(reply, task, spec, now)
    content, _, metrics = _checked(reply, task)
    numbers = _numbers(content.array_records.get(names.NUMBERS))
    if len(content.array_records) != (names.NUMBERS in content.array_records):
        raise InvalidReplyError(
            f"it brings arrays that work of kind '{task.kind}' was not asked for"
        )
    examples = names.count_of(metrics.get(names.NUM_EXAMPLES, 0.0))
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
    beside = (names.NUMBERS, names.SCALES)
    records = {name: rec for name, rec in content.array_records.items() if name not in beside}
    if len(records) != 1:
        raise InvalidReplyError(f"missing records: {len(records)} ArrayRecords, not 1")
    if task.kind == names.TRAIN_BEST:
        task = _chosen(stated, task)
    examples = names.count_of(metrics.get(names.NUM_EXAMPLES))
    if not examples:
        raise InvalidReplyError("no examples")
    arrays = records.get(names.ARRAYS) or next(iter(records.values()))
    numbers, scales = (content.array_records.get(name) for name in beside)
    return Update(
        task=task,
        vector=spec.unpack(arrays if scales is None else names.decoded(arrays, scales)),
        num_examples=examples,
        train_loss=metrics.get(names.TRAIN_LOSS, math.nan),
        metrics=metrics,
        bytes_up=sum(record.count_bytes() for record in (arrays, numbers, scales) if record),
        numbers=_numbers(numbers),
        arrived_at=now,
        mixture=_mixture(next(iter(content.metric_records.values())).get(names.MIXTURE)),
        cost=names.cost_of(metrics),
    )


def _checked(
    reply: Message, task: InFlight
) -> tuple[RecordDict, Mapping[str, object], dict[str, float]]:
    """Return content, settings and metrics of a reply that answers what was asked."""
    if reply.has_error():
        is_away = reply.error.code == NODE_UNAVAILABLE
        raise InvalidReplyError(f"error {reply.error.code}: {names.error_line(reply)}", is_away)
    content = reply.content
    if len(content.metric_records) != 1:
        raise InvalidReplyError(
            f"missing records: {len(content.metric_records)} MetricRecords, not 1"
        )
    stated: Mapping[str, object] = content.config_records.get(names.CONFIG, {})
    _check_echo(stated, task)
    return content, stated, names.metrics_of(next(iter(content.metric_records.values())))


def _check_echo(stated: Mapping[str, object], task: InFlight) -> None:
    """Check what the reply says of its task.

    A ClientApp that says nothing is taken on trust: Flower's message id ties the reply to its
    task anyway.
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
    """Return the task with the model that the client has chosen among those that it was sent."""
    index, count = stated.get(names.CHOSEN), len(task.candidates)
    if not isinstance(index, int) or not 0 <= index < count:
        raise InvalidReplyError(
            f"it must state as '{names.CHOSEN}' which of the {count} models it has trained, "
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
        values = names.from_array(array)
        if values.dtype.kind not in "fiu" or values.size > _MOST_NUMBERS:
            raise InvalidReplyError(f"unusable numbers {quoted(name)}: {values.dtype}")
        # NaN fails both comparisons. Sums of what is left are finite in float64.
        if values.size and not -LARGEST <= float(values.min()) <= float(values.max()) <= LARGEST:
            if np.isfinite(values).all():
                raise InvalidReplyError(f"too large: {quoted(name)}")
            raise InvalidReplyError(f"not finite: {quoted(name)} holds NaN or infinity")
        numbers[name] = values
    return numbers


# -----------------------------------------------------------------------------
# Client embedding: a small vector per client that says where it pulls the models.
#
# It is for a map of the clients while a run goes on. A model is kept as a sketch of 128 numbers:
# each of its weights is added, with a sign that was drawn once for all, to one of them (the count
# sketch of Charikar, Chen and Farach-Colton 2002). Sketches are linear, and inner products come out
# of them nearly. Of very large models only some weights are read, evenly spread, so that a sketch
# takes no longer.
# -----------------------------------------------------------------------------


SKETCH_SIZE = 128
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
        self._rows = length // SKETCH_SIZE
        self._stride = max(1, -(-length // _MOST_WEIGHTS))
        # Its own generator, always the same: it takes nothing from the run's chance.
        signs = np.random.default_rng(_SIGNS_SEED).choice(np.array([-1, 1], np.float32), length)
        if weights is not None:
            signs *= weights
        self._signs = self._read(signs).copy()
        self._last = signs[self._rows * SKETCH_SIZE :].copy()

    def __call__(self, vector: Vector) -> Vector:
        """Return the sketch of a model. Shape (SKETCH_SIZE,)."""
        found: Vector = (self._read(vector) * self._signs).sum(axis=0)
        found[: len(self._last)] += vector[self._rows * SKETCH_SIZE :] * self._last
        return found

    def _read(self, vector: Vector) -> Vector:
        return vector[: self._rows * SKETCH_SIZE].reshape(-1, SKETCH_SIZE)[:: self._stride]


class ClientEmbedding:
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
            Number of the request, unique in the run.
        models : Mapping[int, Model]
            All cluster models, by cluster id.
        weights : Mapping[int, float]
            Those that are sent, with their shares in what the client starts from.
        chooses : bool
            Whether the client starts from one of them that it chooses.
        """
        if chooses:
            self._bases[task] = {cluster: self._of(cluster, models) for cluster in weights}
        else:
            self._bases[task] = self._mixed(models, weights)

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
            All cluster models, by cluster id.
        placement : Callable
            Returns the clusters that serve a client, with weights.

        Returns
        -------
        tuple[list[str], NDArray[np.float32]]
            Client ids, and sketches. Shape (n, SKETCH_SIZE).
        """
        self._taken.clear()
        self._looks += 1
        for cluster in [cluster for cluster in self._versions if cluster not in models]:
            del self._versions[cluster]
        clients = list(self._pulls)
        if not clients:
            return clients, np.empty((0, SKETCH_SIZE), np.float32)
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
