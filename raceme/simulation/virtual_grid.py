"""A Flower Grid on virtual time: messages between the event queue, the devices and the executor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from raceme import compat
from raceme.compat import Run
from raceme.protocol.messages import COMPUTE_SCALE, CONFIG, KIND, TRAIN, TRAINING, passes
from raceme.simulation.device_model import DeviceModel, Workload
from raceme.simulation.devices import Device
from raceme.simulation.event_queue import EventQueue
from raceme.simulation.executor import Executor, InProcess
from raceme.simulation.grid_state import (
    message_from_tree,
    message_to_tree,
    records_from_tree,
    records_to_tree,
    reply_from_tree,
    reply_to_tree,
)

Value = str | int | float | bool


@dataclass(frozen=True)
class Node:
    """One simulated SuperNode.

    Attributes
    ----------
    node_id : int
        Flower's id of the node.
    device : Device
        How fast it is, and when it is online.
    config : Mapping[str, Value]
        Flower's node config, e.g. ``{"partition-id": 3, "num-partitions": 40}``.
    examples : int
        Training examples, for devices whose speed is per sample.
    """

    node_id: int
    device: Device
    config: Mapping[str, Value] = field(default_factory=dict)
    examples: int = 0


# At equal times, online changes precede replies: whatever is sent at that moment then meets the
# fleet as it is afterwards.
_SWITCH, _REPLY = 0, 1


@dataclass(eq=False)
class _Client:
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


@dataclass
class _Pending:
    """A message without a reply yet.

    Attributes
    ----------
    client : _Client or None
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
    """

    message: Message
    client: _Client | None
    expires: float
    due: float
    lost: str | None = None
    event: int = -1
    is_wanted: bool = True


class VirtualGrid(Grid):
    """Simulates devices behind Flower's own Grid interface, on a clock of its own.

    A training message is answered after the time that its device needs for download, computation
    and upload; a device works on one at a time. Queries and evaluation cost no virtual time. The
    clock moves only inside `wait`, `pull_messages` and `send_and_receive`, to the next arrival.
    A task that gets lost (dropped, or its device went offline) is answered by Flower's error reply
    when its time to live ends. The seed alone decides what happens.

    Time is kept by an :class:`EventQueue`, a :class:`DeviceModel` says how long work takes, and an
    :class:`Executor` does it; the grid itself only moves messages.

    Parameters
    ----------
    client_app : ClientApp
        Answers the messages.
    nodes : Sequence[Node]
        The fleet.
    run_config : Mapping[str, Value]
        Flower's run config, handed to the ClientApp.
    seed : int
        Decides jitter, lost tasks and random absences.
    executor : Executor, optional
        Where the work is done; in this process if not given.
    """

    is_virtual = True
    free_evaluation = True
    keeps_messages = False

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Node],
        run_config: Mapping[str, Value] | None = None,
        seed: int = 0,
        executor: Executor | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self._run = compat.empty_run()
        self._executor = executor or InProcess(client_app)
        self._queue = EventQueue()
        self._pushed = 0
        self._pending: dict[str, _Pending] = {}
        # Replies that nobody has fetched, with their place in the order of arrival.
        self._arrived: dict[str, tuple[int, Message]] = {}
        self._arrivals = 0
        self._clients: dict[int, _Client] = {}
        self._online: dict[int, None] = {}
        for node in nodes:
            self._clients[node.node_id] = _Client(
                device=DeviceModel(
                    node.device, node.examples, np.random.SeedSequence([seed, node.node_id])
                ),
                context=Context(
                    run_id=self._run.run_id,
                    node_id=node.node_id,
                    node_config=dict(node.config),
                    state=RecordDict(),
                    run_config=dict(run_config or {}),
                ),
            )
            if node.device.starts_online():
                self._online[node.node_id] = None
            self._schedule_switch(node.node_id)
        compat.identify_process(self._run.run_id)

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._queue.now

    def wait(self, message_ids: Collection[str], until: float | None = None) -> list[Message]:
        """Move the clock to the next reply among `message_ids`, and return it.

        Returns nothing if `until` comes first, or if a device comes or goes first (the clock is
        then at that moment), or if nothing will ever happen again (the clock stays).
        """
        return self._advance(message_ids, until, stop_on_switch=True)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop the replies to messages, also those still to come: nobody will ask for them.

        The devices are not told: they stay busy for as long as they would have been. If clients
        keep a state (any of them does by now) the work is still done, for what it changes there;
        otherwise it is skipped.
        """
        coming = []
        for message_id in message_ids:
            self._arrived.pop(message_id, None)
            if message_id in self._pending:
                coming.append(message_id)
        keep_state = coming and any(client.context.state for client in self._clients.values())
        for message_id in coming:
            if keep_state and self._pending[message_id].lost is None:
                self._pending[message_id].is_wanted = False
            else:
                self._drop(message_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; each starts its way to its node at the present time."""
        message_ids = []
        for message in messages:
            message_id = f"{self._pushed:08d}"
            self._pushed += 1
            message.content = _copy(message.content)
            compat.set_message_id(message, message_id)
            self._dispatch(message_id, message)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; if none is, move the clock to the next one."""
        wanted = set(message_ids)
        ready = [self._arrived.pop(key)[1] for key in self._ready(wanted)]
        return ready or self._advance(wanted, None, stop_on_switch=False)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and move the clock until all are answered, or by `timeout` seconds."""
        open_ids = dict.fromkeys(self.push_messages(messages))
        deadline = None if timeout is None else self.now() + timeout
        replies: list[Message] = []
        while open_ids:
            arrived = self._advance(open_ids, deadline, stop_on_switch=False)
            if not arrived:
                break
            replies.extend(arrived)
            for reply in arrived:
                del open_ids[reply.metadata.reply_to_message_id]
        return replies

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        return list(self._online)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
        compat.identify_process(run.run_id)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def close(self) -> None:
        """Release the executor."""
        self._executor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides how the simulation continues: a tree of plain values and arrays.

        Work in progress is not in it. Its messages are: it is done again, with the same result.
        """
        return {
            "queue": self._queue.state_dict(),
            "pushed": self._pushed,
            "pending": [
                {
                    "message": message_to_tree(pending.message),
                    "expires": pending.expires,
                    "due": pending.due,
                    "lost": pending.lost,
                    "event": pending.event,
                    "wanted": pending.is_wanted,
                }
                for pending in self._pending.values()
            ],
            "arrived": [reply_to_tree(reply) for _, reply in self._arrived.values()],
            "online": list(self._online),
            "clients": {
                str(node_id): {
                    "device": client.device.state_dict(),
                    "state": records_to_tree(client.context.state),
                }
                for node_id, client in self._clients.items()
            },
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on a new grid of the same fleet and seed."""
        self._queue.load_state_dict(tree["queue"])
        self._pushed = tree["pushed"]
        self._online = dict.fromkeys(tree["online"])
        for name, known in tree["clients"].items():
            client = self._clients[int(name)]
            client.device.load_state_dict(known["device"])
            client.context.state = records_from_tree(known["state"])
        for reply in tree["arrived"]:
            self._keep(reply["id"], reply_from_tree(reply))
        for saved in tree["pending"]:
            message = message_from_tree(saved["message"])
            pending = _Pending(
                message,
                self._clients.get(message.metadata.dst_node_id),
                expires=saved["expires"],
                due=saved["due"],
                lost=saved["lost"],
                event=saved["event"],
                is_wanted=saved["wanted"],
            )
            self._pending[message.metadata.message_id] = pending
            if pending.lost is None:
                self._work_on(message.metadata.message_id, pending)
        self.keeps_messages = True

    def _dispatch(self, message_id: str, message: Message) -> None:
        """Decide when a message will be answered, and hand its work to the executor."""
        now, metadata = self._queue.now, message.metadata
        node_id, expires = metadata.dst_node_id, now + metadata.ttl
        client = self._clients.get(node_id)
        pending = self._pending[message_id] = _Pending(message, client, expires, due=now)
        if client is None:
            pending.lost = f"there is no node {node_id}"
        elif node_id not in self._online:
            pending.lost, pending.due = "the device is offline", expires
        elif metadata.message_type.split(".")[0] == MessageType.TRAIN:
            pending.due, pending.lost = client.device.begin(
                workload_of(message, client.device.examples), now, expires
            )
        if pending.lost is None:
            self._work_on(message_id, pending)
        pending.event = self._queue.schedule(pending.due, _REPLY, message_id)

    def _work_on(self, message_id: str, pending: _Pending) -> None:
        """Hand the work of a message to the executor."""
        assert pending.client is not None, "a message to nobody is lost"
        pending.client.at_work[message_id] = None
        self._executor.submit(pending.message, pending.client.context, pending.due)

    def _advance(
        self, message_ids: Collection[str], until: float | None, stop_on_switch: bool
    ) -> list[Message]:
        """Process events in order of time up to the first reply that is wanted."""
        for message_id in self._ready(message_ids):
            return [self._arrived.pop(message_id)[1]]
        queue, deadline = self._queue, math.inf if until is None else until
        # Devices that come and go at random do so for ever: without this check, waiting for a
        # reply that cannot come would never end.
        hopeless = not stop_on_switch and not any(self._is_coming(key) for key in message_ids)
        while queue and not hopeless and queue.next_time() <= deadline:
            kind, key = queue.pop()
            if kind == _SWITCH:
                assert isinstance(key, int)
                self._switch(key)
                if stop_on_switch:
                    return []
                continue
            assert isinstance(key, str)
            reply = self._reply(key)
            if reply is None:
                continue
            if key in message_ids:
                return [reply]
            self._keep(key, reply)
        if deadline < math.inf:
            queue.advance(deadline)
        return []

    def _is_coming(self, message_id: str) -> bool:
        """Return whether there will be a reply to a message."""
        pending = self._pending.get(message_id)
        return pending is not None and pending.is_wanted

    def _ready(self, message_ids: Collection[str]) -> list[str]:
        """Return which of some messages have replies, in the order in which those arrived."""
        arrived = self._arrived
        if not arrived:
            return []
        # Whichever are fewer are gone through: many are wanted as a rule, and few lie unfetched.
        if len(arrived) <= len(message_ids):
            return [key for key in arrived if key in message_ids]
        found = [key for key in message_ids if key in arrived]
        return sorted(found, key=lambda key: arrived[key][0])

    def _keep(self, message_id: str, reply: Message) -> None:
        """Keep a reply until somebody asks for it."""
        self._arrived[message_id] = (self._arrivals, reply)
        self._arrivals += 1

    def _reply(self, message_id: str) -> Message | None:
        """Produce the reply of a message whose time has come; None if nobody wants it."""
        pending = self._pending.pop(message_id)
        client = pending.client
        if pending.lost is not None:
            code = compat.NODE_UNAVAILABLE if client is None else compat.REPLY_MESSAGE_UNAVAILABLE
            return compat.error_reply(pending.message, code, pending.lost)
        assert client is not None, "a message to nobody is lost"
        del client.at_work[message_id]
        reply = self._executor.result(message_id)
        return reply if pending.is_wanted else None

    def _drop(self, message_id: str) -> None:
        """Let a message have no reply, and its work not be done."""
        pending = self._pending.pop(message_id)
        self._queue.cancel(pending.event)
        if pending.lost is None:
            assert pending.client is not None, "a message to nobody is lost"
            del pending.client.at_work[message_id]
            self._executor.cancel(message_id)

    def _switch(self, node_id: int) -> None:
        """Let a device come online, or go offline with all that it was working on."""
        if node_id in self._online:
            del self._online[node_id]
            self._lose_work(self._clients[node_id])
        else:
            self._online[node_id] = None
        self._schedule_switch(node_id)

    def _lose_work(self, client: _Client) -> None:
        """Let what a device was working on be answered by errors, when its time to live ends."""
        client.device.stop()
        for message_id in list(client.at_work):
            pending = self._pending[message_id]
            if not pending.is_wanted:
                self._drop(message_id)
                continue
            self._executor.cancel(message_id)
            pending.lost = "the device went offline"
            if pending.due < pending.expires:
                self._queue.cancel(pending.event)
                pending.due = pending.expires
                pending.event = self._queue.schedule(pending.due, _REPLY, message_id)
        client.at_work.clear()

    def _schedule_switch(self, node_id: int) -> None:
        time = self._clients[node_id].device.next_switch()
        if time is not None:
            self._queue.schedule(time, _SWITCH, node_id)


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
    )


def _copy(content: RecordDict) -> RecordDict:
    """Copy records, not the arrays in them, as sending does: messages may share their content.

    Without it what a client writes into its message would show in the others', and what the
    server writes later would show in work that is not done yet.
    """
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = record.copy()
    return copied
