"""What the virtual grid keeps of its clients, and of messages without a reply yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import Context, Message

from raceme.protocol.exchange import Exchange
from raceme.simulation.device_model import DeviceModel
from raceme.simulation.workload import bytes_of


@dataclass(eq=False, slots=True)
class Client:
    """A node as the grid keeps it.

    Attributes
    ----------
    device : DeviceModel
        Its timing.
    context : Context
        Flower's, with the state that the ClientApp keeps.
    at_work : dict[str, None]
        Ids of the messages that the executor has for it, in order of sending.
    """

    device: DeviceModel
    context: Context
    at_work: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Pending:
    """A message without a reply yet.

    Attributes
    ----------
    client : Client or None
        Whom it was sent to; None if there is no such node.
    expires : float
        When its time to live ends.
    due : float
        When it is answered.
    lost : str or None
        Why it is answered by an error; None if it is not.
    event : int
        Number of the event of its reply.
    is_wanted : bool
        False if nobody will ask for the reply.
    sent, begun, ended : float
        When it was sent, and when its device is at work for it; for who observes the grid.
    bytes_down : int
        Its size, likewise.
    """

    message: Message
    client: Client | None
    expires: float
    due: float
    lost: str | None = None
    event: int = -1
    is_wanted: bool = True
    sent: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    bytes_down: int = 0


def exchange_of(pending: Pending, answered: float, reply: Message | None) -> Exchange:
    """Say what became of a message."""
    message, failure, bytes_up = pending.message, pending.lost, 0
    if reply is not None and reply.has_error():
        failure = reply.error.reason
    elif reply is not None:
        bytes_up = bytes_of(reply.content)
    return Exchange(
        number=int(message.metadata.message_id),
        node_id=message.metadata.dst_node_id,
        kind=message.metadata.message_type,
        sent=pending.sent,
        begun=pending.begun,
        ended=pending.ended,
        answered=answered,
        failure=failure,
        bytes_down=pending.bytes_down,
        bytes_up=bytes_up,
    )
