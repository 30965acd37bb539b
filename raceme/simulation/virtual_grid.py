"""A Flower Grid on virtual time: messages between the event queue, the devices and the executor."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from raceme.core.options import Value
from raceme.core.timeline import Exchange, ExchangeObserver, Switched
from raceme.flower import messages as flower
from raceme.flower.grid import PatientGrid
from raceme.records.record import Communication
from raceme.simulation.devices import (
    AWAY,
    IS_OFFLINE,
    PREFIX,
    WENT_OFFLINE,
    Cost,
    Device,
    DeviceModel,
    bytes_of,
    copy_of,
    fleet,
    traced_fleet,
    training_cost,
)
from raceme.simulation.executor import (
    Executor,
    InProcess,
    Packed,
    head_of,
    message_of,
    pack,
    unpack,
)

# -----------------------------------------------------------------------------
# An event queue on virtual time. It knows nothing of what is simulated.
# -----------------------------------------------------------------------------


class EventQueue:
    """A clock, and the events to come in order of time.

    Events are plain values, not callbacks, so that the queue can be saved. Equal times are ordered
    by priority (the lower number first), then by the order of scheduling: one order of calls has
    one order of events.

    Attributes
    ----------
    now : float
        The time in seconds: that of the last event popped, or of the last :meth:`advance`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # Heap of (time, priority, number, key). A cancelled event stays in it until it is the
        # first one: to search the heap for it would take longer.
        self._heap: list[tuple[float, int, int, str | int]] = []
        self._cancelled: set[int] = set()
        self._scheduled = 0

    def schedule(self, time: float, priority: int, key: str | int) -> int:
        """Schedule an event.

        Parameters
        ----------
        time : float
            When it happens, in seconds.
        priority : int
            Its place among events of the same time.
        key : str or int
            What the event is about; :meth:`pop` returns it.

        Returns
        -------
        int
            The event's number, for :meth:`cancel`.
        """
        number = self._scheduled
        self._scheduled += 1
        heapq.heappush(self._heap, (time, priority, number, key))
        return number

    def cancel(self, number: int) -> None:
        """Cancel an event that has not happened yet: it neither happens nor moves the clock."""
        self._cancelled.add(number)

    def __len__(self) -> int:
        """Return the number of events to come."""
        return len(self._heap) - len(self._cancelled)

    def next_time(self) -> float:
        """Return the time of the next event.

        Raises
        ------
        IndexError
            There is none.
        """
        while self._heap[0][2] in self._cancelled:
            self._cancelled.remove(heapq.heappop(self._heap)[2])
        return self._heap[0][0]

    def pop(self) -> tuple[int, str | int]:
        """Move the clock to the next event, and return its priority and its key.

        Raises
        ------
        IndexError
            There is none.
        """
        self.next_time()
        time, priority, _, key = heapq.heappop(self._heap)
        self.advance(time)
        return priority, key

    def advance(self, time: float) -> None:
        """Move the clock to a time, never back."""
        self.now = max(self.now, time)

    def state_dict(self) -> dict[str, Any]:
        """Return clock and events as a tree of plain values."""
        return {
            "now": self.now,
            "scheduled": self._scheduled,
            "events": [event for event in self._heap if event[2] not in self._cancelled],
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.now, self._scheduled = tree["now"], tree["scheduled"]
        self._heap = [(time, priority, n, key) for time, priority, n, key in tree["events"]]
        heapq.heapify(self._heap)
        self._cancelled = set()


# -----------------------------------------------------------------------------
# What the virtual grid keeps of its clients, and of messages without a reply yet.
# -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class NodeState:
    """A node as the grid keeps it.

    Attributes
    ----------
    device : DeviceModel
        How long its work takes, and when it is online.
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
    client : NodeState or None
        Node that it was sent to; None if there is no such node.
    expires : float
        When its time to live ends.
    due : float
        Virtual time of the reply, in seconds.
    lost : str or None
        Why it is answered by an error; None if it is not.
    event : int
        Number of the event of its reply.
    is_wanted : bool
        False if the reply will not be asked for.
    sent, begun, ended : float
        When it was sent, and when its device is at work for it; for observers of the grid.
    bytes_down : int
        Bytes of the message; for observers of the grid.
    """

    message: Message
    client: NodeState | None
    expires: float
    due: float
    lost: str | None = None
    event: int = -1
    is_wanted: bool = True
    sent: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    bytes_down: int = 0


_SAVED = ("expires", "due", "lost", "event", "is_wanted")
"""What a checkpoint keeps of a pending message besides the message itself."""


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


# -----------------------------------------------------------------------------
# Messages and records as trees of plain values, for checkpoints of a virtual grid.
# -----------------------------------------------------------------------------


Tree = dict[str, Any]


def _reply_tree(reply: Message) -> Tree:
    """Take a reply apart; the head is that of the message that it answers."""
    metadata, failed = reply.metadata, reply.has_error()
    return {
        **head_of(reply),
        "id": metadata.reply_to_message_id,
        "node": metadata.src_node_id,
        "error": [reply.error.code, reply.error.reason] if failed else None,
        "content": None if failed else pack(reply.content)._asdict(),
    }


def _reply_from(tree: Tree) -> Message:
    """Put a reply together again."""
    asked = message_of(tree, RecordDict())
    if tree["error"] is not None:
        return Message(Error(*tree["error"]), reply_to=asked, ttl=tree["ttl"])
    return Message(unpack(Packed(**tree["content"])), reply_to=asked, ttl=tree["ttl"])


# -----------------------------------------------------------------------------
# A Flower Grid on virtual time: messages between the event queue, the devices and the executor.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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

    @property
    def client_id(self) -> str:
        """Stable id of the client: the one of a trace, or else ``client-`` and its number."""
        return str(self.config.get("device-id", f"client-{self.config['partition-id']}"))


# At equal times, online changes precede replies: whatever is sent at that moment then meets the
# fleet as it is afterwards.
_SWITCH, _REPLY = 0, 1


class VirtualGrid(PatientGrid):
    """Simulates devices behind Flower's own Grid interface, on a clock of its own.

    A training message is answered after the time that its device needs for download, computation
    and upload; a device works on one at a time. Queries and evaluation cost no virtual time, unless
    `cost` says otherwise. The clock moves only inside `wait`, `pull_messages` and
    `send_and_receive`, to the next arrival, and inside `pass_time`.
    A task that gets lost (dropped, or its device went offline) is answered by Flower's error reply
    when its time to live ends, or when the device is missed. The seed alone decides what happens.

    Time is kept by an :class:`EventQueue`, a :class:`DeviceModel` says how long work takes, and an
    :class:`Executor` does it; the grid itself only moves messages.

    Parameters
    ----------
    client_app : ClientApp
        ClientApp that answers the messages of every node.
    nodes : Sequence[Node]
        All nodes of the fleet, with their devices.
    run_config : Mapping[str, Value]
        Flower's run config, handed to the ClientApp.
    seed : int
        Decides jitter, lost tasks and random absences.
    executor : Executor, optional
        Where the work is done; in this process if not given.
    cost : Cost
        Work that each message costs a device: bytes, passes, samples.
    observe : ExchangeObserver, optional
        Told of every message that is over, and of devices that come and go.
    notice : float
        Seconds after which a device that went offline is missed: what it was working on is then
        answered by errors, if its time to live has not ended before.
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
        cost: Cost = training_cost,
        observe: ExchangeObserver | None = None,
        notice: float = math.inf,
    ) -> None:
        self.nodes = tuple(nodes)
        self._cost, self._observe, self._notice = cost, observe, notice
        self._run = flower.empty_run()
        self._first_run_id = self._run.run_id
        self._executor = executor or InProcess(client_app)
        self._queue = EventQueue()
        self._pushed = 0
        self._pending: dict[str, Pending] = {}
        # Replies that have not been fetched, with their place in the order of arrival.
        self._arrived: dict[str, tuple[int, Message]] = {}
        self._arrivals = 0
        self._seed, self._run_config = seed, dict(run_config or {})
        self._by_id = {node.node_id: node for node in self.nodes}
        # Those that have worked or have a state, or come and go: the others are as they were made.
        self._clients: dict[int, NodeState] = {}
        self._online: dict[int, None] = {}
        for node in self.nodes:
            if node.device.starts_online():
                self._online[node.node_id] = None
            if node.device.comes_and_goes:
                self._schedule_switch(node.node_id)
        flower.identify_process(self._run.run_id)

    def _client(self, node_id: int) -> NodeState:
        """Return what is kept of a node, from the first time on that it is asked for."""
        client = self._clients.get(node_id)
        if client is None:
            node = self._by_id[node_id]
            context = Context(
                run_id=self._first_run_id,
                node_id=node_id,
                node_config=dict(node.config),
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
            device = DeviceModel(node.device, node.examples, (self._seed, node_id))
            client = self._clients[node_id] = NodeState(device, context)
        return client

    def _client_of(self, message: Message) -> NodeState | None:
        """Return the client that a message is for, if there is such a node."""
        node_id = message.metadata.dst_node_id
        return self._client(node_id) if node_id in self._by_id else None

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
        """Drop the replies to messages, also those still to come: they will not be asked for.

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
            message.content = copy_of(message.content)
            flower.set_message_id(message, message_id)
            self._dispatch(message_id, message)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; if none is, move the clock to the next one."""
        wanted = set(message_ids)
        ready = [self._arrived.pop(key)[1] for key in self._ready(wanted)]
        return ready or self._advance(wanted, None, stop_on_switch=False)

    def _more(self, message_ids: Collection[str], deadline: float | None) -> list[Message] | None:
        return self._advance(message_ids, deadline, stop_on_switch=False) or None

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        return list(self._online)

    def arrivals_ahead(self) -> Mapping[int, bool]:
        """Return the nodes that are offline and will come, to whether they have been there."""
        return {
            node.node_id: node.device.was_online(self.now())
            for node in self.nodes
            if node.node_id not in self._online and node.device.comes_after(self.now())
        }

    def expected_seconds(self, message: Message) -> float | None:
        """Return the mean time of a message's work on its node; None if there is no such node."""
        client = self._client_of(message)
        if client is None:
            return None
        load = self._cost(message, client.context, client.device.examples)
        return 0.0 if load is None else client.device.mean_duration(load)

    def pass_time(self, seconds: float) -> None:
        """Move the clock on by some seconds; replies that arrive meanwhile wait to be asked for."""
        queue, end = self._queue, self._queue.now + seconds
        while queue and queue.next_time() <= end:
            self._happen(*queue.pop())
        queue.advance(end)

    def unanswered(self) -> list[Exchange]:
        """Return what is known of the messages that have no reply yet."""
        return [exchange_of(pending, math.inf, None) for pending in self._pending.values()]

    def set_run(self, run: flower.Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
        flower.identify_process(run.run_id)

    @property
    def run(self) -> flower.Run:
        """The run that messages belong to."""
        return self._run

    def close(self) -> None:
        """Close the executor, which ends its workers."""
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
                    "message": {
                        **head_of(pending.message),
                        "content": pack(pending.message.content)._asdict(),
                    },
                    **{name: getattr(pending, name) for name in _SAVED},
                }
                for pending in self._pending.values()
            ],
            "arrived": [_reply_tree(reply) for _, reply in self._arrived.values()],
            "online": list(self._online),
            "clients": {
                str(node_id): {
                    "device": client.device.state_dict(),
                    "state": pack(client.context.state)._asdict(),
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
            client = self._client(int(name))
            client.device.load_state_dict(known["device"])
            client.context.state = unpack(Packed(**known["state"]))
        for reply in tree["arrived"]:
            self._keep(reply["id"], _reply_from(reply))
        for saved in tree["pending"]:
            head = saved["message"]
            message = message_of(head, unpack(Packed(**head["content"])))
            progress = {name: saved[name] for name in _SAVED}
            pending = Pending(message, self._client_of(message), **progress)
            self._pending[message.metadata.message_id] = pending
            if pending.lost is None:
                self._work_on(message.metadata.message_id, pending)
        self.keeps_messages = True

    def _dispatch(self, message_id: str, message: Message) -> None:
        """Decide when a message will be answered, and hand its work to the executor."""
        now, metadata = self._queue.now, message.metadata
        node_id, expires = metadata.dst_node_id, now + metadata.ttl
        client = self._client_of(message)
        pending = self._pending[message_id] = Pending(
            message, client, expires, due=now, sent=now, begun=now, ended=now
        )
        if self._observe is not None:
            # Now: a client may change what it was sent.
            pending.bytes_down = bytes_of(message.content)
        if client is None:
            pending.lost = f"there is no node {node_id}"
        elif node_id not in self._online:
            pending.lost, pending.due = IS_OFFLINE, min(expires, now + self._notice)
        else:
            device = client.device
            load = self._cost(message, client.context, device.examples)
            if load is not None:
                pending.begun = max(now, device.busy_until)
                pending.due, pending.lost = device.begin(load, now, expires)
                pending.ended = device.busy_until
        if pending.lost is None:
            self._work_on(message_id, pending)
        pending.event = self._queue.schedule(pending.due, _REPLY, message_id)

    def _work_on(self, message_id: str, pending: Pending) -> None:
        """Hand the work of a message to the executor."""
        assert pending.client is not None, "a message to no node is lost"
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
            self._happen(kind, key)
            if kind == _SWITCH and stop_on_switch:
                return []
            if key in self._arrived and key in message_ids:
                return [self._arrived.pop(key)[1]]
        if deadline < math.inf:
            queue.advance(deadline)
        return []

    def _happen(self, kind: int, key: str | int) -> None:
        """Let an event happen; a reply waits to be asked for."""
        if kind == _SWITCH:
            assert isinstance(key, int)
            self._switch(key)
            return
        assert isinstance(key, str)
        reply = self._reply(key)
        if reply is not None:
            self._keep(key, reply)

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
        """Keep a reply until it is asked for."""
        self._arrived[message_id] = (self._arrivals, reply)
        self._arrivals += 1

    def _reply(self, message_id: str) -> Message | None:
        """Produce the reply of a message whose time has come; None if it is not wanted."""
        pending = self._pending.pop(message_id)
        client = pending.client
        if pending.lost is not None:
            is_away = client is None or pending.lost in AWAY
            code = flower.NODE_UNAVAILABLE if is_away else flower.REPLY_MESSAGE_UNAVAILABLE
            reply = flower.error_reply(pending.message, code, pending.lost)
        else:
            assert client is not None, "a message to no node is lost"
            del client.at_work[message_id]
            reply = self._executor.result(message_id)
            if client.device.is_new and not client.at_work and not client.context.state:
                # It has only been asked something: it would be made again as it is.
                del self._clients[client.context.node_id]
        if self._observe is not None:
            self._observe(exchange_of(pending, self._queue.now, reply))
        return reply if pending.is_wanted else None

    def _drop(self, message_id: str) -> None:
        """Let a message have no reply, and its work not be done."""
        pending = self._pending.pop(message_id)
        self._queue.cancel(pending.event)
        if pending.lost is None:
            assert pending.client is not None, "a message to no node is lost"
            del pending.client.at_work[message_id]
            self._executor.cancel(message_id)
        if self._observe is not None:
            self._observe(exchange_of(pending, math.inf, None))

    def _switch(self, node_id: int) -> None:
        """Let a device come online, or go offline with all that it was working on."""
        if node_id in self._online:
            del self._online[node_id]
            self._lose_work(self._client(node_id))
        else:
            self._online[node_id] = None
        if self._observe is not None:
            self._observe(Switched(node_id, self._queue.now, node_id in self._online))
        self._schedule_switch(node_id)

    def _lose_work(self, client: NodeState) -> None:
        """Let what a device was working on be answered by errors, when it is missed."""
        client.device.stop()
        for message_id in list(client.at_work):
            pending = self._pending[message_id]
            pending.begun = min(pending.begun, self._queue.now)
            pending.ended = min(pending.ended, self._queue.now)
            if not pending.is_wanted:
                self._drop(message_id)
                continue
            self._executor.cancel(message_id)
            pending.lost = WENT_OFFLINE
            noticed = min(pending.expires, self._queue.now + self._notice)
            if pending.due != noticed:
                self._queue.cancel(pending.event)
                pending.due = noticed
                pending.event = self._queue.schedule(pending.due, _REPLY, message_id)
        client.at_work.clear()

    def _schedule_switch(self, node_id: int) -> None:
        time = self._client(node_id).device.next_switch()
        if time is not None:
            self._queue.schedule(time, _SWITCH, node_id)


# -----------------------------------------------------------------------------
# The nodes of a simulated fleet, with their devices.
# -----------------------------------------------------------------------------


_FIRST_NODE_ID = 1000


def communication_of(grid: Grid) -> Communication | None:
    """Return how long transfers take in a simulated fleet; None for any other grid.

    The function takes a client's id, and the bytes down and up; it returns seconds.
    """
    if not isinstance(grid, VirtualGrid):
        return None
    devices = {node.client_id: node.device for node in grid.nodes}

    def communication(client: str, bytes_down: int, bytes_up: int) -> float:
        return devices[client].communication(bytes_down, bytes_up) if client in devices else 0.0

    return communication


def nodes_of(profile: str, examples: Sequence[int], seed: int) -> list[Node]:
    """Make one node per client, with its device.

    Parameters
    ----------
    profile : str
        Device profile: a built-in one's name, a TOML file, or ``trace:FOLDER`` of a run.
    examples : Sequence[int]
        Training examples of each client.
    seed : int
        Decides which devices are the slow ones.

    Raises
    ------
    UserError
        Unknown profile, unusable trace.
    """
    names: list[str] = []
    if profile.startswith(PREFIX):
        devices, names = traced_fleet(profile.removeprefix(PREFIX), len(examples))
    else:
        devices = fleet(profile, len(examples), seed)
    nodes = []
    for index, (device, count) in enumerate(zip(devices, examples, strict=True)):
        config: dict[str, Value] = {"partition-id": index, "num-partitions": len(examples)}
        if names:
            config["device-id"] = names[index]
        nodes.append(Node(_FIRST_NODE_ID + index, device, config, count))
    return nodes
