"""Which replies are valid updates: checked once, where they enter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Message

from raceme.messages import (
    CHOSEN,
    CONFIG,
    NUM_EXAMPLES,
    TASK,
    TRAIN_LOSS,
    VERSION,
    InvalidModelError,
    ModelSpec,
    Vector,
)

_LONGEST_LINE = 300
"""Letters of a client's own words that are reported."""


@dataclass(frozen=True)
class Task:
    """A piece of training that a client was given.

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
        Size of the arrays that were sent.
    candidates : dict[int, int]
        Where several models were sent: their clusters in the order of their records, with their
        versions.
    """

    number: int
    client: str
    cluster: int
    version: int
    updates: int
    sent_at: float
    bytes_down: int
    candidates: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """A valid reply to a task.

    Attributes
    ----------
    task : Task
        The work that it answers: client, cluster, base version; of several models that were sent,
        cluster and version are those of the one that the client has trained.
    vector : Vector
        The client's model after training, w_i. Shape (d,).
    num_examples : int
        Training examples of the client, n_i.
    train_loss : float
        Mean loss of the local training; NaN if the client does not say.
    metrics : Mapping[str, float]
        Whatever else the client measured.
    bytes_up : int
        Size of the arrays that came back.
    """

    task: Task
    vector: Vector
    num_examples: int
    train_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0


class InvalidReplyError(ValueError):
    """A reply is not a valid update; the message says why."""


def read_update(reply: Message, task: Task, spec: ModelSpec) -> Update:
    """Check a reply to a training task and take its content out.

    Parameters
    ----------
    reply : Message
        What came back.
    task : Task
        What was asked.
    spec : ModelSpec
        What a model looks like.

    Raises
    ------
    InvalidReplyError
        An error reply; records missing; a base version or task other than the one that was sent;
        no word on which of several models was trained; no examples; arrays of other shapes; NaN
        or infinity.
    """
    if reply.has_error():
        raise InvalidReplyError(f"error {reply.error.code}: {error_line(reply)}")
    content = reply.content
    if len(content.array_records) != 1:
        raise InvalidReplyError(
            f"missing records: {len(content.array_records)} ArrayRecords, not 1"
        )
    if len(content.metric_records) != 1:
        raise InvalidReplyError(
            f"missing records: {len(content.metric_records)} MetricRecords, not 1"
        )
    stated: Mapping[str, object] = content.config_records.get(CONFIG, {})
    _check_base(stated, task)
    if task.candidates:
        task = _chosen(stated, task)
    try:
        metrics = {
            name: float(value)
            for name, value in next(iter(content.metric_records.values())).items()
            if not isinstance(value, list)
        }
    except OverflowError:
        raise InvalidReplyError("a metric is too large") from None
    examples = metrics.get(NUM_EXAMPLES, 0.0)
    if not (math.isfinite(examples) and examples >= 1):
        raise InvalidReplyError("no examples")
    arrays = next(iter(content.array_records.values()))
    try:
        vector = spec.unpack(arrays)
    except InvalidModelError as error:
        raise InvalidReplyError(str(error)) from None
    return Update(
        task=task,
        vector=vector,
        num_examples=int(examples),
        train_loss=metrics.get(TRAIN_LOSS, math.nan),
        metrics=metrics,
        bytes_up=arrays.count_bytes(),
    )


def error_line(reply: Message) -> str:
    """Return the first line of why a client could not do its work, of printable characters."""
    lines = (reply.error.reason or "").strip().splitlines()
    line = "".join(letter if letter.isprintable() else " " for letter in lines[0]) if lines else ""
    return line.strip()[:_LONGEST_LINE] or "no reason given"


def _check_base(stated: Mapping[str, object], task: Task) -> None:
    """Check what the reply says of its base.

    A ClientApp that says nothing is taken on trust: Flower's message id ties the reply to its
    task anyway.
    """
    if VERSION in stated and stated[VERSION] != task.version:
        raise InvalidReplyError(
            f"unknown base version {stated[VERSION]}: it was sent {task.version}"
        )
    if TASK in stated and stated[TASK] != task.number:
        raise InvalidReplyError(
            f"repeated or foreign task {stated[TASK]}: it was sent {task.number}"
        )


def _chosen(stated: Mapping[str, object], task: Task) -> Task:
    """Return the task with the model that the client has chosen among those that it was sent."""
    index, count = stated.get(CHOSEN), len(task.candidates)
    if not isinstance(index, int) or not 0 <= index < count:
        raise InvalidReplyError(
            f"it must state as '{CHOSEN}' which of the {count} models it has trained, got {index!r}"
        )
    cluster, version = list(task.candidates.items())[index]
    return replace(task, cluster=cluster, version=version)
