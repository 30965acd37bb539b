"""Content of Flower messages, and conversion of models to flat vectors and back.

Names of records and keys are those of Flower's own strategies (``arrays``, ``config``,
``num-examples``), so that Raceme's strategies work with any Flower ClientApp that returns arrays,
and Raceme's ClientApp with Flower's strategies.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from raceme.core.errors import LONGEST_LINE, printable, quoted
from raceme.core.events import grouped
from raceme.flower.messages import array, array_record

if TYPE_CHECKING:
    from flwr.app import Message

# -----------------------------------------------------------------------------
# Clients' statements: typed, bounded and made printable before any other use.
#
# Devices are untrusted. Their statements appear in logs, terminals, the store and pages, which they
# must not control (escape sequences, text that runs backwards, forged lines), fill (megabytes of
# text) or upset (numbers whose sums overflow). Words and numbers of replies are therefore read by
# the functions of this module only. Texts that a SuperLink sends to a device go through
# :func:`~raceme.core.errors.printable`, too.
# -----------------------------------------------------------------------------


LONGEST_NAME = 128
"""Maximum characters of a name of a client or metric."""
_LONGEST_UNIT = 32
_MOST_METRICS = 1000
_MOST_ELEMENTS = 10_000_000
"""Maximum size of an array that the server keeps per client, e.g. a sketch of its data."""
LARGEST = float.fromhex("0x1.fffffep+127")
"""Largest valid number of a client, the largest float32: sums, means and squares of very many such
numbers stay finite in float64."""


class InvalidReplyError(ValueError):
    """An invalid reply, with a short printable reason.

    Parameters
    ----------
    reason : str
        Reason, possibly with the client's words.
    is_away : bool
        Whether the client left with the task, which is no failure.
    """

    def __init__(self, reason: str, is_away: bool = False) -> None:
        super().__init__(printable(reason))
        self.is_away = is_away


_RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*?)(?:'>)?")
"""Flower's notation of a ClientApp's exception, truncated if long."""


def category(message: Message) -> str:
    """Return a message's type without the name of the action: train, evaluate or query."""
    return message.metadata.message_type.partition(".")[0]


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Colours of a terminal."""


def error_line(reply: Message) -> str:
    """Return the first line of a client's error; on Ray the last line, which has the cause."""
    reason = reply.error.reason or ""
    if "RayTaskError" in reason[:LONGEST_LINE]:
        text = _ESCAPES.sub("", reason[-10 * LONGEST_LINE :]).strip().removesuffix("'>")
        return printable(text.strip().splitlines()[-1])
    lines = reason[: 10 * LONGEST_LINE].strip().splitlines()
    if not lines:
        return "no reason given"
    raised = _RAISED.fullmatch(lines[0])
    return printable(f"{raised[1]}: {raised[2]}" if raised else lines[0]) or "no reason given"


def name_of(stated: object) -> str | None:
    """Return a client's stated name: 1 to 128 printable characters; else None."""
    if not isinstance(stated, str | int):
        return None
    name = stated if isinstance(stated, str) else printable(stated, 2 * LONGEST_NAME)
    return name if name.isprintable() and 1 <= len(name) <= LONGEST_NAME else None


def reason_of(message: Message) -> str:
    """Return the reason in a message of type `REFUSED`, by which the server refuses a node."""
    stated = message.content.get(CONFIG) if message.has_content() else None
    return printable(stated[REASON]) if stated and REASON in stated else "no reason given"


def functions_in(message: Message) -> list[str]:
    """Return the users' functions, ``module:function``, that a message has a client import."""
    record = message.content.get(CONFIG) if message.has_content() else None
    if not isinstance(record, ConfigRecord):
        return []
    named = (record.get(KIND), record.get(COMPLETED_BY))
    return [name for name in named if isinstance(name, str) and ":" in name]


def unit_of(stated: object) -> str | None:
    """Return a client's stated unit of an error, if any.

    Raises
    ------
    InvalidReplyError
        The unit is no short printable text.
    """
    if stated is None:
        return None
    if not isinstance(stated, str) or len(stated) > _LONGEST_UNIT or not stated.isprintable():
        raise InvalidReplyError(f"its unit is {quoted(stated)}")
    return stated


def metrics_of(record: Mapping[str, object]) -> dict[str, float]:
    """Return a client's numbers by name, without lists.

    NaN and infinity are valid: diverging training has such losses.

    Raises
    ------
    InvalidReplyError
        The numbers are too many or too large, or a name is invalid.
    """
    if len(record) > _MOST_METRICS:
        raise InvalidReplyError(f"it states {len(record)} metrics: {_MOST_METRICS} at most")
    metrics = {}
    for name, value in record.items():
        if not isinstance(value, list):
            if not name.isprintable() or len(name) > LONGEST_NAME:
                raise InvalidReplyError(f"a metric is called {quoted(name)}")
            metrics[name] = number_of(name, value)
    return metrics


def number_of(name: str, stated: object) -> float:
    """Return a client's number by name.

    Raises
    ------
    InvalidReplyError
        It is no number, finite but larger than `LARGEST`, or minus infinity, whose sum with
        infinity is undefined.
    """
    if not isinstance(stated, int | float):
        raise InvalidReplyError(f"a metric is no number: {quoted(name)}")
    # Compared before the conversion: an integer may be too large for a float.
    if -LARGEST <= stated <= LARGEST or stated == math.inf:
        return float(stated)
    if isinstance(stated, float) and math.isnan(stated):
        return stated
    raise InvalidReplyError(f"a metric is too large: {quoted(name)}")


def array_of(
    numbers: Mapping[str, NDArray[Any]],
    name: str,
    shape: Sequence[int | None],
    low: float = -LARGEST,
    high: float = LARGEST,
    most: int = _MOST_ELEMENTS,
) -> NDArray[np.float64]:
    """Return a client's array of numbers by name.

    Parameters
    ----------
    numbers : Mapping[str, NDArray]
        The finite arrays of a client's reply, by name.
    name : str
        Name of the wanted array.
    shape : Sequence of int or None
        Required shape; None for any length of at least 1.
    low, high : float
        Bounds of every number.
    most : int
        Largest permitted number of elements.

    Raises
    ------
    InvalidReplyError
        It is missing, has another shape or type, or a number is out of bounds.
    """
    values = numbers.get(name)
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    if values is None or values.dtype.kind not in "fiu":
        raise InvalidReplyError(f"it must state '{name}', numbers of shape ({wanted})")
    fits = len(values.shape) == len(shape) and all(
        size >= 1 and wished in (None, size)
        for size, wished in zip(values.shape, shape, strict=True)
    )
    if not fits or values.size > most:
        raise InvalidReplyError(f"its '{name}' has shape {values.shape}, not ({wanted})")
    if not low <= float(values.min()) <= float(values.max()) <= high:
        raise InvalidReplyError(f"its '{name}' is not within {low:g} and {high:g}")
    return np.asarray(values, np.float64)


# -----------------------------------------------------------------------------
# Content of Flower messages, and conversion of models to flat vectors and back.
# -----------------------------------------------------------------------------


Vector = NDArray[np.float32]
"""A flat model: shape (d,), float32."""

Number = TypeVar("Number", bound=np.generic)

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
NUMBERS = "numbers"
"""Record of named arrays that a client measured per sample or class."""

KIND = "kind"
"""A message's request to a client. By default given by the message's Flower type."""
TRAIN = "train"
TRAIN_BEST = "train-best"
"""Kind of work: train the model with the least loss on the training samples, among several."""
TRAIN_SKETCH = "train-sketch"
"""Kind of work: train as a probe, and return only a noisy sketch of the model's direction."""
LOSSES = "losses"
"""The loss of every sample under each of several models: kind of work, and its answer, float32,
shape (models, samples)."""
SCORES = "scores"
"""Mean loss and accuracy of several models on the training samples of several steps: kind of work,
answered by two float32 arrays, shape (models, steps)."""
ACCURACIES = "accuracies"
"""Name of the second array, besides ``losses``."""
TEST_STEPS = "test-steps"
"""Test models on the test samples of several steps: kind of work, answered by `ACCURACIES`, one
float64 per test, NaN for steps without data."""
TESTED_STEPS = "tested-steps"
"""The step of each test."""
TESTED_MODELS = "tested-models"
"""Index of the received model that each test uses."""
UNTRAINED = "untrained"
"""Whether the last test is of the untrained model, without a client's personal parts."""
USE = "use"
"""Write a model to the file of the device's application; without a model, report the file."""
USES = "uses"
"""Whether the device has such a file, and its content:"""
USED_RUN, USED_CLUSTER, USED_VERSION = "used-run", "used-cluster", "used-version"
MODEL_FILE = "model-file"
"""The path of the file, in a device's own configuration."""
LABEL_COUNTS = "label-counts"
"""Training samples per class: kind of work, and its answer, int64, shape (classes,)."""
NEAREST_DIRECTION = "nearest-direction"
"""Train the received model briefly and return the nearest direction of the change as the metric
`CHOSEN`: kind of work."""
DIRECTIONS = "directions"
"""Record of these directions: float32 arrays named "0", "1", … of the model's weights."""
TRAIN_SPLIT = "train-split"
"""Train the received layers below the client's own last ones (FedPer, FedRep): the kind of work."""
HEAD_LAYERS = "head-layers"
"""Number of the network's last layers that stay on the client."""
HEAD_EPOCHS = "head-epochs"
"""Epochs of training only these layers, before those of the others."""
TRAIN_BESIDE = "train-beside"
"""Train the received model, and the client's own with a pull towards it (Ditto): the kind of
work."""
TRAIN_INTERPOLATED = "train-interpolated"
"""Train the received model, and the client's own that is interpolated with it (APFL): the kind of
work."""
OWN_SHARE = "own-share"
"""Share of the client's own model in the interpolation at the start."""
ADAPTIVE = "adaptive"
"""Whether the client moves this share along its gradient."""
TRAIN_OWN = "train-own"
"""Train the client's own model, which it keeps, pulled towards the received one (FedSoft): the kind
of work."""
TRAIN_MIXED = "train-mixed"
"""Train the mixture of several models that fits the training samples (FedSoft-Async): the kind of
work."""
SHARES = "shares"
"""Share of each of several models in a mixture: the numbers that answer such work, and the record
with the client's last answer. Float64, shape (models,), sum 1."""
EVALUATE = "evaluate"
DESCRIBE = "describe"
"""The client's id and the size of its data: the greeting of every client."""
REFUSED = "query.refused"
"""Type of the message that tells a node the reason why it gets no work."""
REASON = "reason"
"""Why, in words."""
ON = "on"
"""Samples for losses: ``"train"`` (the default), ``"test"`` or ``"validation"``."""
VALIDATION_SHARE = "validation-share"
"""Share of a client's training samples kept for validation."""
DEFAULT_VALIDATION_SHARE = 0.2
"""This share in a run that needs validation samples and states none."""

COMPLETED_BY = "completed-by"
"""Name of the completion of a received model before a test; see `COMPLETIONS`."""

TASK = "task"
"""Number of a task, unique in a run; echoed by its reply."""
VERSION = "version"
"""Version of the sent model; echoed by the reply."""
STEP = "step"
"""Step of the client's data for the work, from 0."""
STEPS = "steps"
"""Distinct steps whose training samples a client uses together, instead of its step's."""
CLIENT_ID = "client-id"
LABELS = "labels"
"""A client's labels, as a text: ``room=kitchen,floor=1``."""
NUM_EXAMPLES = "num-examples"
NUM_TEST_EXAMPLES = "num-test-examples"
ALL_EXAMPLES = "all-examples"
"""Final number of a client's training examples, if released step by step."""
GROUP = "group"
TRAIN_LOSS = "train-loss"
UNIT = "unit"
"""Unit of the mean absolute error that a client measured instead of an accuracy."""
LOSS = "loss"
BACKDOOR_SUCCESS = "backdoor-success"
"""Asks simulated clients for the share of their triggered test samples that the model classifies as
the attacker's target. Honest clients with such samples answer."""
SCORED = "scored"
"""Asks a client to test its upload and the model returned for its last upload, and to state its
sample passes."""
FORMER_STEP = "former-step"
"""Step of the data of the client's last upload, if any."""
ACCURACY_BEFORE = "accuracy-before"
"""Accuracy of an uploaded model on the test data of its step."""
ACCURACY_AFTER = "accuracy-after"
"""Accuracy of the received model on the test data of the former step, which measures the model that
the client received in return for its last upload."""
SAMPLE_PASSES = "sample-passes"
"""Passes of single samples through the network that an answer took: forward 1, backward 2."""
MIXTURE = "mixture"
"""Share of each distribution in a client's samples, where they are a mixture; for reports only."""
BATCH_SIZE = "batch-size"
LOCAL_EPOCHS = "local-epochs"
LOCAL_STEPS = "local-steps"
"""Mini-batches to train for, instead of passes over the samples."""
HALF = "half"
"""0 or 1: train on every other sample, from the first or from the second, classes balanced."""
SKETCH = "sketch"
"""Setting of training for which the server needs a sketch of the change only, which the client may
make: the size of the sketch. Also the name of the sketch in the reply."""
SKETCH_NOISE = "sketch-noise"
"""Setting: standard deviation of the noise on each number of a sketch, whose length is 1."""
PROXIMAL_MU = "proximal-mu"
LR_SCALE = "lr-scale"
"""Share of the learning rate that is left."""
DROPOUT = "dropout"
"""Share of the inputs of linear layers that a step leaves out."""
COMPUTE_SCALE = "compute-scale"
"""Share of a full local round's computation that a task asks for; only the simulator reads it."""
TASK_SHARE = "task-share"
"""A task's mini-batches as a share of an ordinary task's. The simulator charges this share of the
time that a device needs for a task of any size, besides the time per sample."""
BYTES_UP = "bytes-up"
"""Size of the answer to work other than training, if not small; only the simulator reads it."""
REPORT_TIMING = "report-timing"
"""Asks a client to state when it began its work and when it was done; never on virtual time."""
STARTED_AT = "started-at"
FINISHED_AT = "finished-at"
"""Seconds since 1970 on the clock of the client's machine."""
INVITATION = "invitation"
"""Setting of an invitation: the client may begin the work when it chooses; by default at once."""
ROUND = "server-round"
"""Flower's own number of a round, in the messages of round-based strategies."""


ANCHOR = "anchor"
"""Record with the model towards which the proximal term pulls, if it is not the received one."""
MASK = "mask"
"""Record with an array of 0 and 1 per model array: the weights that a client trains."""
CHOSEN = "chosen"
"""Index of the model that a client trained among several, in a reply."""


class _TrainingKinds(Container[object]):
    """Kinds of work answered by a trained model, recognised by name."""

    def __contains__(self, kind: object) -> bool:
        return str(kind).rpartition(":")[2].startswith(("train", "learn"))


TRAINING = _TrainingKinds()
"""Kinds of work answered by a trained model: names that begin with ``train``, or ``learn``."""

_STYPE = "numpy.ndarray"
LARGEST_SQUARE = 1e30
"""Squared length of a model above which it is refused. Working networks are far below it, and sums,
differences and distances of very many clients stay finite in float32."""


def kept_for_validation(examples: int, share: float) -> int:
    """Return the number of a client's validation samples, at least one."""
    return min(max(1, round(share * examples)), examples - 1)


def numbered(name: str, index: int) -> str:
    """Return the name of one of several records: ``memory-2``."""
    return f"{name}-{index}"


def candidate(index: int) -> str:
    """Return the name of the record of a candidate model: ``arrays-2``."""
    return numbered(ARRAYS, index)


_MOST = 2**53
"""Upper bound of counts: larger integers are not exact as floats."""


def count_of(stated: object) -> int | None:
    """Return a client's stated count or group number; else None."""
    if isinstance(stated, int | float) and 0 <= stated < _MOST:
        return int(stated)
    return None


class InvalidModelError(InvalidReplyError):
    """An ArrayRecord does not hold a usable model; the message says why."""


class Role(Enum):
    """The role of an array of a model.

    TRAINABLE
        Weights: mixed and compared.
    STATISTICS
        Running mean and variance of a normalisation layer: mixed like weights, never compared.
    COUNTER
        A number of batches or the like: copied from the latest update, never mixed.
    """

    TRAINABLE = "trainable"
    STATISTICS = "statistics"
    COUNTER = "counter"

    @classmethod
    def of(cls, name: str, dtype: str) -> Role:
        """Return an array's role by its torch name and dtype."""
        last = name.rpartition(".")[2]
        if last == "num_batches_tracked" or np.dtype(dtype).kind != "f":
            return cls.COUNTER
        return cls.STATISTICS if last in ("running_mean", "running_var") else cls.TRAINABLE


def layers_of(arrays: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of arrays by the layer that they belong to, in order."""
    return grouped((name.rpartition(".")[0], name) for name in arrays)


@dataclass(frozen=True)
class ModelSpec:
    """Names, shapes and dtypes of a model's arrays, in the order of its flat vector.

    Attributes
    ----------
    names : tuple[str, ...]
        Names of the arrays, the keys of the ArrayRecord.
    shapes : tuple[tuple[int, ...], ...]
        Shape of each array, in the order of `names`.
    dtypes : tuple[str, ...]
        Data type of each array on the wire; the flat vector is always float32.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> ModelSpec:
        """Return the specification of a record."""
        arrays = list(record.values())
        return cls(
            names=tuple(record.keys()),
            shapes=tuple(tuple(array.shape) for array in arrays),
            dtypes=tuple(array.dtype for array in arrays),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each array."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Number of parameters, d."""
        return sum(self.sizes)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the arrays' data on the wire, headers not counted."""
        return sum(n * np.dtype(t).itemsize for n, t in zip(self.sizes, self.dtypes, strict=True))

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Role of each array."""
        return tuple(Role.of(*array) for array in zip(self.names, self.dtypes, strict=True))

    @property
    def outputs(self) -> int:
        """Number of outputs, from the last weights: that of the classes, or 1 for a regression."""
        arrays = zip(self.shapes, self.roles, strict=True)
        *_, last = [shape for shape, role in arrays if role is Role.TRAINABLE] or [()]
        return next(iter(last), 1)

    @property
    def layers(self) -> dict[str, list[str]]:
        """Names of the weights of each layer, in order."""
        roles = zip(self.names, self.roles, strict=True)
        return layers_of(name for name, role in roles if role is Role.TRAINABLE)

    @cached_property
    def trainable(self) -> NDArray[np.bool_] | None:
        """Mask of the weights in the flat vector, shape (d,); None if all are."""
        mask = self._elements(Role.TRAINABLE)
        return None if mask.all() else mask

    @cached_property
    def counters(self) -> NDArray[np.bool_] | None:
        """Mask of the counters in the flat vector, shape (d,); None without any."""
        mask = self._elements(Role.COUNTER)
        return mask if mask.any() else None

    def _elements(self, role: Role) -> NDArray[np.bool_]:
        of_role = np.array([array is role for array in self.roles], np.bool_)
        mask = np.repeat(of_role, np.array(self.sizes, np.intp))
        # Shared, so read-only.
        mask.flags.writeable = False
        return mask

    def compared(self, vector: NDArray[Number]) -> NDArray[Number]:
        """Return the weights of a model, for comparison, decay, sketches and bounds.

        Running statistics and counters, whose size is unrelated to the direction of training, are
        left out.

        Parameters
        ----------
        vector : NDArray
            Shape (..., d).

        Returns
        -------
        NDArray
            Shape (..., weights): `vector` itself if all of it are weights, else a copy.
        """
        return vector if self.trainable is None else vector[..., self.trainable]

    def copy_counters(self, source: Vector, target: Vector) -> None:
        """Copy the counters of one flat model to another, after mixing the two."""
        if self.counters is not None:
            target[self.counters] = source[self.counters]

    def views(self, vector: NDArray[Number]) -> dict[str, NDArray[Number]]:
        """Return the arrays as views into a flat vector, by name."""
        views: dict[str, NDArray[Number]] = {}
        start = 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            views[name] = vector[start : start + size].reshape(shape)
            start += size
        return views

    @cached_property
    def _places(self) -> dict[str, _Place]:
        """Place of each array in the flat vector, by name."""
        ends = accumulate(self.sizes)
        arrays = zip(self.names, self.shapes, self.dtypes, self.sizes, ends, strict=True)
        return {
            name: _Place.of(name, slice(end - size, end), shape, np.dtype(dtype))
            for name, shape, dtype, size, end in arrays
        }

    def pack(self, vector: Vector) -> ArrayRecord:
        """Convert a flat vector to an ArrayRecord, copying once."""
        return array_record({name: place.pack(vector) for name, place in self._places.items()})

    def pack_mask(self, mask: NDArray[np.bool_]) -> ArrayRecord:
        """Convert a flat mask to a record of bytes 0 and 1."""
        views = self.views(mask.astype(np.uint8))
        return array_record({name: to_array(values) for name, values in views.items()})

    def unpack(self, record: ArrayRecord) -> Vector:
        """Convert an ArrayRecord to a flat vector, copying once.

        Raises
        ------
        InvalidModelError
            Arrays are missing, have other shapes or types, hold NaN or infinity, or numbers so
            large that arithmetic with several models could overflow.
        """
        arrays = dict(record.items())
        if arrays.keys() != self._places.keys():
            found = ", ".join(map(quoted, islice(arrays, 5))) or "none"
            raise InvalidModelError(
                f"wrong arrays: expected {len(self.names)}, got {len(arrays)}: {found}"
            )
        vector = np.empty(self.size, np.float32)
        # Numbers too large for float32 become infinite. NaN and infinity survive in the squared
        # norm: one pass, no temporary array.
        with np.errstate(over="ignore", invalid="ignore"):
            for name, place in self._places.items():
                vector[place.where] = place.unpack(arrays[name])
            squared_norm = np.dot(vector, vector)
        if not squared_norm <= LARGEST_SQUARE:
            if not np.isfinite(vector).all():
                raise InvalidModelError("not finite: the model holds NaN or infinity")
            length = float(np.linalg.norm(vector.astype(np.float64)))
            raise InvalidModelError(f"too large: the model's length is {length:.1e}")
        return vector


class _Place(NamedTuple):
    """An array's place in the flat vector, and its serialised form.

    `length` is that of its bytes, header included.
    """

    name: str
    where: slice
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    header: bytes
    length: int

    @classmethod
    def of(
        cls, name: str, where: slice, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> _Place:
        header = _header(dtype.str, shape)
        length = len(header) + (where.stop - where.start) * dtype.itemsize
        return cls(name, where, shape, dtype, header, length)

    def pack(self, vector: NDArray[np.generic]) -> Array:
        """Serialise its part of a flat vector; see :func:`to_array`."""
        values = vector[self.where].astype(self.dtype, copy=False)
        return array(_name(self.dtype), self.shape, _STYPE, b"".join((self.header, values.data)))

    def unpack(self, array: Array) -> NDArray[np.generic]:
        """Return the numbers of an array in one row; see :func:`from_array`.

        Raises
        ------
        InvalidModelError
            It is unreadable, or has another shape or kind of numbers.
        """
        data, kinds = array.data, "b" if self.dtype.kind == "b" else "fiu"
        # Headers are parsed only if they differ from the expected ones: parsing is slower than the
        # copy.
        is_expected = len(data) == self.length and data[: len(self.header)] == self.header
        if is_expected and self.dtype.kind in kinds:
            return np.frombuffer(data, self.dtype, offset=len(self.header))
        values = from_array(array)
        if values.shape != self.shape:
            raise InvalidModelError(
                f"wrong shape of '{self.name}': {values.shape}, not {self.shape}"
            )
        if values.dtype.kind not in kinds:
            raise InvalidModelError(f"wrong type of '{self.name}': {values.dtype}")
        return values.reshape(-1)


def to_array(values: NDArray[np.generic]) -> Array:
    """Serialise an array as Flower does (the .npy format), copying its data once."""
    if not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    data = b"".join((_header(values.dtype.str, values.shape), values.data))
    return array(_name(values.dtype), tuple(values.shape), _STYPE, data)


def from_array(array: Array) -> NDArray[np.generic]:
    """Read an array without copying its data; the result is read-only.

    Raises
    ------
    InvalidModelError
        The bytes are not a plain array in .npy format.
    """
    data = array.data
    length = 10 + int.from_bytes(data[8:10], "little")
    try:
        shape, fortran, dtype = _parse_header(data[:length])
        values = np.frombuffer(data, dtype, count=prod(shape), offset=length)
        return values.reshape(shape, order="F" if fortran else "C")
    # numpy parses the header as Python source: malicious bytes can raise almost anything.
    except Exception as error:
        raise InvalidModelError(f"unreadable array: {printable(error)}") from None


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[np.generic]) -> str:
    """Return the cached name of a dtype, ``"float32"``."""
    return str(dtype)


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header of a C-ordered array."""
    buffer = io.BytesIO()
    description = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Read shape, order and type from a .npy header of version 1.0, numpy's own choice."""
    stream = io.BytesIO(header)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("not in .npy format 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject:
        raise ValueError("objects are not accepted")
    return shape, fortran, dtype


# -----------------------------------------------------------------------------
# The amount of work that a message asks for.
# -----------------------------------------------------------------------------


def passes(settings: Mapping[str, object], examples: int) -> float:
    """Return a training message's number of passes over the client's samples.

    Parameters
    ----------
    settings : Mapping
        Settings of the training message: ``local-epochs``, ``local-steps``, ``batch-size``.
    examples : int
        Number of the client's training samples.
    """
    steps, epochs = settings.get(LOCAL_STEPS, 0), settings.get(LOCAL_EPOCHS, 1)
    if isinstance(steps, int) and steps > 0:
        return steps * _batch_size(settings, examples) / max(1, examples)
    return float(epochs) if isinstance(epochs, int | float) else 1.0


def mini_batches(settings: Mapping[str, object], examples: int) -> float:
    """Return the number of mini-batches of :func:`passes`, partial ones included."""
    return passes(settings, examples) * examples / _batch_size(settings, examples)


def _batch_size(settings: Mapping[str, object], examples: int) -> int:
    """Return the size of a mini-batch, at most the number of samples."""
    size = settings.get(BATCH_SIZE, 1)
    return min(size, max(1, examples)) if isinstance(size, int) else 1


PASSES_OF_TRAINING = 3
"""A step costs a forward pass, and a backward pass of twice the cost (inputs and weights)."""


def forward_cost(settings: Mapping[str, object], examples: int, models: int = 1) -> float:
    """Return the cost of one forward pass of all samples, as a `COMPUTE_SCALE`.

    Parameters
    ----------
    settings : Mapping
        Settings of the run's training, to which the cost is relative.
    examples : int
        Number of the client's training samples.
    models : int
        Number of models.
    """
    return models / (PASSES_OF_TRAINING * passes(settings, examples))


def short_task(settings: Mapping[str, object], examples: int, steps: int) -> dict[str, int | float]:
    """Return the additional settings of a task with a number of mini-batches.

    Parameters
    ----------
    settings : Mapping
        The run's settings of local training.
    examples : int
        Number of the client's training samples.
    steps : int
        Number of mini-batches, at least 1, possibly more than an ordinary task's.
    """
    share = passes({**settings, LOCAL_STEPS: steps}, examples) / passes(settings, examples)
    return {LOCAL_STEPS: steps, TASK_SHARE: share}


# -----------------------------------------------------------------------------
# The stated computing time of work.
# -----------------------------------------------------------------------------


CPU_SECONDS = "cpu-seconds"
"""CPU seconds of the work, summed over threads."""

MOST_SECONDS = 1e8
"""Three years, longer than any work."""


def cpu_seconds_of(metrics: Mapping[str, object]) -> float | None:
    """Return the CPU seconds in a device's metrics; None if it does not state them.

    Raises
    ------
    InvalidReplyError
        They are no number, NaN, below 0, or impossibly many.
    """
    if CPU_SECONDS not in metrics:
        return None
    seconds = number_of(CPU_SECONDS, metrics[CPU_SECONDS])
    # NaN fails both comparisons.
    if not 0 <= seconds <= MOST_SECONDS:
        raise InvalidReplyError(
            f"it states {seconds:g} {CPU_SECONDS}: expected 0 to {MOST_SECONDS:g}"
        )
    return seconds
