"""What the messages of anybody's app cost devices, and where that has to be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Context, Message, MessageType, RecordDict

from raceme.config.errors import UserError
from raceme.protocol.messages import CONFIG, KIND
from raceme.simulation.device_model import Workload
from raceme.simulation.executor import Executor
from raceme.simulation.transfer import Packed, pack, unpack
from raceme.simulation.workload import bytes_of, category, copy_of, training_cost

NUM_EXAMPLES = ("num-examples", "num_examples")
"""What Flower's apps call the number of examples in the metrics of a reply."""
LOCAL_EPOCHS = ("local-epochs", "local_epochs")
"""What they call the number of passes over them in the run config or in a message's."""


@dataclass
class _Known:
    """What a client's replies have told.

    Attributes
    ----------
    examples : int or None
        Its number of training examples; None if no reply states it.
    bytes_up : dict[str, int]
        Size of its last reply, by type of message.
    """

    examples: int | None = None
    bytes_up: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Early:
    """A reply that was made before it is due, on a copy of the client's state."""

    before: Packed
    reply: Message
    state: RecordDict


class Learned:
    """An executor that learns from replies what work costs, and says so of messages.

    A training message takes what the device's profile says, with the transfers of what is sent and
    of a reply as large as the client's last one (of the first: as large as what was sent). Where
    the time depends on the number of examples, that is what the client's last reply stated; its
    first task is done at once, for what it tells, and answered when its time is over.

    Parameters
    ----------
    executor : Executor
        Does the work.
    per_sample : dict[int, bool]
        For each node, whether its device's time depends on the number of examples.
    examples : int or None
        That number, if it is not to be learned.
    evaluation_share : float or None
        What an evaluation computes, as a share of a training task; None if it takes no time at all.
    """

    def __init__(
        self,
        executor: Executor,
        per_sample: dict[int, bool],
        examples: int | None = None,
        evaluation_share: float | None = None,
    ) -> None:
        self._executor = executor
        self._per_sample = per_sample
        self._examples = examples
        self._evaluation_share = evaluation_share
        self._known: dict[int, _Known] = {}
        self._early: dict[str, _Early] = {}
        self._open: dict[str, tuple[Message, Context, float]] = {}

    def cost(self, message: Message, context: Context, examples: int) -> Workload | None:
        """Return what a message costs the device of the client that it is sent to.

        Raises
        ------
        UserError
            That depends on the number of examples, and the client's reply does not state it.
        """
        kind = category(message)
        share = {MessageType.TRAIN: 1.0, MessageType.EVALUATE: self._evaluation_share}.get(kind)
        if share is None:
            return None
        node = message.metadata.dst_node_id
        known = self._known.setdefault(node, _Known())
        if self._per_sample[node] and self._examples is None and known.examples is None:
            self._do_early(message, context)
            if known.examples is None:
                return self._without_examples(message)
        count = self._examples if self._examples is not None else known.examples or 0
        if KIND in message.content.config_records.get(CONFIG, ()):
            # It is a method of Raceme's that asks, and says what that costs.
            own = training_cost(message, context, count)
            return None if own is None else own._replace(examples=count)
        size = bytes_of(message.content)
        return Workload(
            epochs=_epochs(message, context),
            bytes_down=size,
            bytes_up=known.bytes_up.get(kind, size if kind == MessageType.TRAIN else 0),
            scale=share,
            examples=count,
        )

    def submit(self, message: Message, context: Context, due: float) -> None:
        """Take on the work of a message, unless it is done already."""
        message_id = message.metadata.message_id
        self._open[message_id] = message, context, due
        if message_id not in self._early:
            self._executor.submit(message, context, due)

    def result(self, message_id: str) -> Message:
        """Return the reply, and learn from it."""
        message, context, due = self._open.pop(message_id)
        early = self._early.pop(message_id, None)
        if early is None:
            reply = self._executor.result(message_id)
        elif early.before == pack(context.state):
            context.state, reply = early.state, early.reply
        else:
            # Another message has changed the client's state meanwhile.
            self._executor.submit(message, context, due)
            reply = self._executor.result(message_id)
        self._learn(message, reply)
        return reply

    def cancel(self, message_id: str) -> None:
        """Drop a message, and what was made of it."""
        self._open.pop(message_id, None)
        if self._early.pop(message_id, None) is None:
            self._executor.cancel(message_id)

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()

    def _do_early(self, message: Message, context: Context) -> None:
        """Do the work of a message before its time, on a copy of its client's state."""
        before = pack(context.state)
        copy = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=context.node_config,
            state=unpack(before),
            run_config=context.run_config,
        )
        message_id, content = message.metadata.message_id, copy_of(message.content)
        self._executor.submit(message, copy, 0.0)
        reply = self._executor.result(message_id)
        # The client may have changed what it was sent, and may have to do it again.
        message.content = content
        self._early[message_id] = _Early(before, reply, copy.state)
        self._learn(message, reply)

    def _learn(self, message: Message, reply: Message) -> None:
        """Note what a reply tells of its client."""
        if reply.has_error():
            return
        known = self._known.setdefault(message.metadata.dst_node_id, _Known())
        kind = category(message)
        known.bytes_up[kind] = bytes_of(reply.content)
        if kind == MessageType.TRAIN:
            stated = _stated_examples(reply.content)
            known.examples = known.examples if stated is None else stated

    def _without_examples(self, message: Message) -> Workload | None:
        """Return what a task costs that was to tell the number of examples, and has not."""
        reply = self._early[message.metadata.message_id].reply
        if reply.has_error():
            # It takes no longer than its transfers and what is fixed.
            return Workload(1.0, bytes_of(message.content), 0, 1.0, examples=0)
        raise UserError(
            "The device profile has times per sample, and the ClientApp's replies do not state "
            f"'{NUM_EXAMPLES[0]}' in their metrics: say how many there are with --examples N."
        )


def _epochs(message: Message, context: Context) -> float:
    """Return the passes over a client's samples that a task takes, where that can be known."""
    settings: list[Mapping[str, object]] = [*message.content.config_records.values()]
    for values in (*settings, context.run_config):
        for name in LOCAL_EPOCHS:
            value = values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return float(value)
    return 1.0


def _stated_examples(content: RecordDict) -> int | None:
    """Return the number of examples that a reply states."""
    for record in content.metric_records.values():
        for name in NUM_EXAMPLES:
            value = record.get(name)
            if isinstance(value, int | float) and value >= 0:
                return int(value)
    return None
