"""What messages cost the devices that they are sent to."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from raceme.protocol.effort import passes
from raceme.protocol.messages import COMPUTE_SCALE, CONFIG, KIND, TASK_SHARE, TRAIN, TRAINING
from raceme.simulation.device_model import Workload

Cost = Callable[[Message, Context, int], Workload | None]
"""Says what a message costs: of the message, its client's context, and the client's number of
training examples. None stands for no time at all."""


def training_cost(message: Message, context: Context, examples: int) -> Workload | None:
    """Return what a training message costs; queries and evaluation cost nothing."""
    if category(message) != MessageType.TRAIN:
        return None
    return workload_of(message, examples)


def category(message: Message) -> str:
    """Return a message's type without the name of the action: train, evaluate or query."""
    return message.metadata.message_type.partition(".")[0]


def workload_of(message: Message, examples: int) -> Workload:
    """Return what a training message costs the device that it is sent to.

    All arrays go down. What comes back of training is one model, as large as the first one that
    went; the numbers that answer other work are small, and take no time.

    Parameters
    ----------
    message : Message
        Work that takes a device's time.
    examples : int
        Training examples of the device.
    """
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    sizes = [record.count_bytes() for record in message.content.array_records.values()]
    return Workload(
        epochs=passes(config, examples),
        bytes_down=sum(sizes),
        bytes_up=sizes[0] if sizes and config.get(KIND, TRAIN) in TRAINING else 0,
        scale=float(config.get(COMPUTE_SCALE, 1.0)),  # type: ignore[arg-type]
        share=float(config.get(TASK_SHARE, 1.0)),  # type: ignore[arg-type]
    )


def bytes_of(content: RecordDict) -> int:
    """Return the size of all records of a message."""
    return sum(record.count_bytes() for record in content.values())


def copy_of(content: RecordDict) -> RecordDict:
    """Copy records, not the arrays in them, as sending does: messages may share their content.

    Without it what a client writes into its message would show in the others', and what the
    server writes later would show in work that is not done yet.
    """
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = record.copy()
    return copied
