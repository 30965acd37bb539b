"""A grid between the loop and ClientApps that know nothing of Raceme.

The loop speaks as it does with Raceme's own ClientApp; here its messages become those of Flower's
own strategies, and replies under any names become what the loop reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from raceme import compat
from raceme.compat.own_grid import OwnGrid
from raceme.config.errors import UserError
from raceme.protocol import messages as names
from raceme.protocol.messages import InvalidModelError
from raceme.protocol.timeline import Timeline
from raceme.server.drop_in.arguments import FlowerArguments
from raceme.server.drop_in.kinds import NOT_REGISTERED
from raceme.server.drop_in.names import Names
from raceme.server.drop_in.reading import Scores, read_training
from raceme.server.drop_in.rounds import Rounds
from raceme.server.drop_in.tally import Tally
from raceme.server.drop_in.wire import Wire
from raceme.server.replies import InvalidReplyError


class FlowerGrid(OwnGrid):
    """Speaks Flower's own words with ClientApps, whatever grid they are on.

    Parameters
    ----------
    grid : Grid
        Where the clients are.
    clock : Timeline
        Its clock.
    arguments : FlowerArguments
        Names of records and of the weight.
    wire : Wire
        Translates models.
    tally : Tally
        Is told what clients measure.
    rounds : Rounds
        Know the number of the round that messages state.
    heard : Callable
        Is told a client's number of examples, with each reply.
    greets : bool
        Whether clients are asked who they are: their ClientApp does Raceme's kinds of work.
    """

    def __init__(
        self,
        grid: Grid,
        clock: Timeline,
        arguments: FlowerArguments,
        wire: Wire,
        tally: Tally,
        rounds: Rounds,
        *,
        greets: bool,
        heard: Callable[[str, int], None],
    ) -> None:
        self._grid, self._clock, self._arguments = grid, clock, arguments
        self._wire, self._tally, self._rounds = wire, tally, rounds
        self._greets, self._heard = greets, heard
        self.names = Names()
        self.scores = Scores(arguments)
        self.tests = True
        self._answers: dict[str, Message] = {}
        self._sent_to: dict[str, str] = {}
        self._count = 0

    # A clock.

    @property
    def is_virtual(self) -> bool:
        """Whether seconds are not those of the wall clock."""
        return self._clock.is_virtual

    @property
    def free_evaluation(self) -> bool:
        """Whether an evaluation costs no time."""
        return self._clock.free_evaluation

    @property
    def keeps_messages(self) -> bool:
        """False: a run of this kind is not brought back."""
        return False

    def now(self) -> float:
        """Return the time in seconds."""
        return self._clock.now()

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Wait for the next replies, those to greetings first."""
        if known := [self._answers.pop(key) for key in message_ids if key in self._answers]:
            return known
        return self._received(self._clock.wait(message_ids, until))

    def forget(self, message_ids: Iterable[str]) -> None:
        """Give up on replies."""
        given_up = list(message_ids)
        for key in given_up:
            self._sent_to.pop(key, None)
        self._clock.forget(given_up)

    # A grid.

    def set_run(self, run: compat.Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run that messages belong to."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected.

        One that turned out to be another client is left out once, so that it is greeted anew.
        """
        online = list(self._grid.get_node_ids())
        moved, self.names.moved = self.names.moved, set()
        return [node for node in online if node not in moved]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages as Flower's own strategies would; a greeting is answered here."""
        pushed: list[str] = []
        for message in messages:
            if message.metadata.message_type == MessageType.QUERY and not message.content:
                if not self._greets:
                    pushed.append(self._introduced(message))
                    continue
                pushed.extend(self._grid.push_messages([message]))
                continue
            client = self.names.of(message.metadata.dst_node_id)
            for key in self._grid.push_messages([self._translated(message)]):
                self._sent_to[key] = client
                pushed.append(key)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        wanted = list(message_ids)
        known = [self._answers.pop(key) for key in wanted if key in self._answers]
        return known + self._received(self._grid.pull_messages(wanted))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        translated = [self._translated(message) for message in messages]
        return self._received(self._grid.send_and_receive(translated, timeout=timeout))

    # On the way out.

    def _introduced(self, greeting: Message) -> str:
        """Answer a greeting for a client that could not."""
        self._count += 1
        key = f"greeting-{self._count}"
        compat.set_message_id(greeting, key)
        node = greeting.metadata.dst_node_id
        told = RecordDict()
        told[names.CONFIG] = ConfigRecord({names.CLIENT_ID: self.names.of(node)})
        self._answers[key] = Message(told, reply_to=greeting)
        return key

    def _translated(self, message: Message) -> Message:
        """Let a message say what those of Flower's own strategies say."""
        content = RecordDict()
        settings: dict[str, Any] = {}
        for name, record in message.content.items():
            if isinstance(record, ConfigRecord):
                settings = dict(record)
            elif name == names.ARRAYS and isinstance(record, ArrayRecord):
                content[self._arguments.arrayrecord_key] = self._wire.sent(record)
            elif self._greets:
                content[name] = record
        if not self._greets:
            settings.pop(names.TASK, None)
            settings.pop(names.VERSION, None)
        settings.setdefault(names.ROUND, self._rounds.over + 1)
        content[self._arguments.configrecord_key] = ConfigRecord(settings)
        message.content = content
        return message

    # On the way in.

    def _received(self, replies: Iterable[Message]) -> list[Message]:
        return [self._read(reply) for reply in replies]

    def _read(self, reply: Message) -> Message:
        """Let a reply say what the loop reads; one that is of no use becomes an error."""
        metadata = reply.metadata
        client = self._sent_to.pop(metadata.reply_to_message_id, None)
        category = metadata.message_type.partition(".")[0]
        if reply.has_error():
            self._check_error(reply, category)
            return reply
        try:
            if not self._greets:
                self._check_identity(metadata.src_node_id, client, reply.content)
            if category == MessageType.EVALUATE:
                self._tally.answered(reply.content)
                content = self.scores.read(reply.content)
            elif category == MessageType.TRAIN and (self._greets is False or _is_model(reply)):
                content = read_training(reply.content, self._arguments, self._wire, self._greets)
                name = client or self.names.of(metadata.src_node_id)
                self._tally.returned(name, reply.content)
                if not self._greets:
                    metrics = content.metric_records[names.METRICS]
                    self._heard(name, int(metrics[names.NUM_EXAMPLES]))  # type: ignore[arg-type]
            else:
                return reply
        except (InvalidReplyError, InvalidModelError) as error:
            return compat.refused(reply, str(error))
        reply.content = content
        return reply

    def _check_identity(self, node: int, client: str | None, content: RecordDict) -> None:
        """Raise InvalidReplyError if a reply comes from another client than it was asked of."""
        if client is not None and client != self.names.of(node):
            raise InvalidReplyError("it was asked of a node that turned out to be another client")
        if reason := self.names.hear(node, content, self._grid.get_node_ids):
            raise InvalidReplyError(reason)

    def _check_error(self, reply: Message, category: str) -> None:
        """Notice that the user's ClientApp has no function for a type of message.

        Raises
        ------
        UserError
            It has none for training.
        """
        if f"No {category} {NOT_REGISTERED}" not in (reply.error.reason or ""):
            return
        if category == MessageType.TRAIN:
            raise UserError(
                "The ClientApp cannot train: write a function and register it with @app.train()."
            )
        self.tests = False


def _is_model(reply: Message) -> bool:
    """Return whether a reply of an app that does Raceme's kinds of work brings a model."""
    records = reply.content.array_records
    return any(name != names.NUMBERS for name in records)
