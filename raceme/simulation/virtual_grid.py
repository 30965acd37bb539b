"""A Flower Grid on virtual time: connects event queue, devices and executor."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from raceme.core.options import Value
from raceme.core.timeline import Exchange, ExchangeObserver, Switched
from raceme.flower import messages as flower
from raceme.flower.grid import PatientGrid
from raceme.simulation.devices import (
    AWAY,
    IS_OFFLINE,
    PREFIX,
    WENT_OFFLINE,
    CostFunction,
    Device,
    DeviceModel,
    bytes_of,
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
# An event queue on virtual time, independent of what is simulated.
# -----------------------------------------------------------------------------


class EventQueue:
    """A clock and its pending events in order of time.

    Events are plain values, not callbacks, so that the queue can be saved. Equal times are ordered
    by priority (the lower number first), then by the order of scheduling, so that the order is
    deterministic.

    Attributes
    ----------
    now : float
        Time in seconds of the last popped event or :meth:`advance`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # Heap of (time, priority, number, key). Cancelled events stay until they come first, which
        # is faster than searching the heap.
        self._heap: list[tuple[float, int, int, str | int]] = []
        self._cancelled: set[int] = set()
        self._scheduled = 0

    def schedule(self, time: float, priority: int, key: str | int) -> int:
        """Schedule an event.

        Parameters
        ----------
        time : float
            Time of the event in seconds.
        priority : int
            Order among events of the same time.
        key : str or int
            Identifies the event; :meth:`pop` returns it.

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
        """Cancel a pending event: it neither happens nor moves the clock."""
        self._cancelled.add(number)

    def __len__(self) -> int:
        """Return the number of pending events."""
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
        """Move the clock to the next event, and return its priority and key.

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
        """Move the clock forward to a time."""
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
# The virtual grid's state of clients and pending messages.
# -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class NodeState:
    """The grid's state of a node.

    Attributes
    ----------
    device : DeviceModel
        Duration of its work, and its availability.
    context : Context
        Flower's context, with the ClientApp's state.
    at_work : dict[str, None]
        Ids of its messages in the executor, in order of sending.
    """

    device: DeviceModel
    context: Context
    at_work: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Pending:
    """A message without a reply so far.

    Attributes
    ----------
    client : NodeState or None
        Receiving node; None if there is no such node.
    expires : float
        End of its time to live.
    due : float
        Virtual time of the reply, in seconds.
    lost : str or None
        Reason of an error reply, else None.
    event : int
        Number of the event of its reply.
    is_wanted : bool
        Whether the reply is wanted.
    sent, begun, ended : float
        Time of sending, and start and end of its work; for observers of the grid.
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
"""Fields of a pending message in a checkpoint."""


def exchange_of(pending: Pending, answered: float, reply: Message | None) -> Exchange:
    """Return the exchange record of a message."""
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


def saved_messages(tree: Mapping[str, Any]) -> Iterator[Message]:
    """Return the open messages in the saved state of a grid, whose work a resumed run repeats."""
    return map(_saved_message, tree["pending"])


def _saved_message(saved: Tree) -> Message:
    head = saved["message"]
    return message_of(head, unpack(Packed(**head["content"])))


def _reply_tree(reply: Message) -> Tree:
    """Convert a reply to plain values, with the metadata of its request."""
    metadata, failed = reply.metadata, reply.has_error()
    return {
        **head_of(reply),
        "id": metadata.reply_to_message_id,
        "node": metadata.src_node_id,
        "error": [reply.error.code, reply.error.reason] if failed else None,
        "content": None if failed else pack(reply.content)._asdict(),
    }


def _reply_from(tree: Tree) -> Message:
    """Restore a reply."""
    asked = message_of(tree, RecordDict())
    if tree["error"] is not None:
        return Message(Error(*tree["error"]), reply_to=asked, ttl=tree["ttl"])
    return Message(unpack(Packed(**tree["content"])), reply_to=asked, ttl=tree["ttl"])


# -----------------------------------------------------------------------------
# A Flower Grid on virtual time: connects event queue, devices and executor.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """One simulated SuperNode.

    Attributes
    ----------
    node_id : int
        Flower's id of the node.
    device : Device
        Speed and availability.
    config : Mapping[str, Value]
        Flower's node config, e.g. ``{"partition-id": 3, "num-partitions": 40}``.
    examples : int
        Training examples, for devices with times per sample.
    """

    node_id: int
    device: Device
    config: Mapping[str, Value] = field(default_factory=dict)
    examples: int = 0

    @property
    def client_id(self) -> str:
        """Stable id of the client: the trace's, or else ``client-`` and its number."""
        return str(self.config.get("device-id", f"client-{self.config['partition-id']}"))


# At equal times, online changes precede replies, so that messages sent then meet the changed fleet.
_SWITCH, _REPLY = 0, 1


class VirtualGrid(PatientGrid):
    """Simulates devices behind Flower's Grid interface on virtual time.

    A training message takes its device's time for download, computation and upload; a device works
    on one message at a time. Queries and evaluation take no virtual time unless `cost` states one.
    The clock moves only inside `wait`, `pull_messages` and `send_and_receive`, to the next arrival,
    and inside `pass_time`. A lost task (dropped, or its device went offline) is answered by
    Flower's error reply at the end of its time to live, or when the device's absence is noticed.
    The seed alone determines all events.

    An :class:`EventQueue` keeps the time, a :class:`DeviceModel` gives the duration of work, and an
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
        Seed of jitter, lost tasks and random absences.
    executor : Executor, optional
        Executor of the work; by default in this process.
    cost : CostFunction
        Work that each message costs a device: bytes, passes, samples.
    observe : ExchangeObserver, optional
        Receives every completed exchange and every online change.
    notice : float
        Seconds until a device's absence is noticed: its pending work is then answered by errors,
        unless its time to live ended before.
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
        cost: CostFunction = training_cost,
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
        # Replies not fetched so far, with their order of arrival.
        self._arrived: dict[str, tuple[int, Message]] = {}
        self._arrivals = 0
        self._seed, self._run_config = seed, dict(run_config or {})
        self._by_id = {node.node_id: node for node in self.nodes}
        # Nodes that have worked, have a state or switch; all others are in their initial state.
        self._clients: dict[int, NodeState] = {}
        self._online: dict[int, None] = {}
        for node in self.nodes:
            if node.device.starts_online():
                self._online[node.node_id] = None
            if node.device.comes_and_goes:
                self._schedule_switch(node.node_id)
        flower.identify_process(self._run.run_id)

    def _client(self, node_id: int) -> NodeState:
        """Return the state of a node, created on first use."""
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
        """Move the clock to the next reply among `message_ids` and return it.

        Returns nothing if `until` or an online change comes first (the clock then shows that time),
        or if no event is left (the clock stays).
        """
        return self._advance(message_ids, until, stop_on_switch=True)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop the present and future replies to messages.

        The devices are not informed and stay busy. If any client keeps a state, the work is still
        done for its effect on the state; otherwise it is skipped.
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
        """Send messages to their nodes at the current time."""
        message_ids = []
        for message in messages:
            message_id = f"{self._pushed:08d}"
            self._pushed += 1
            message.content = flower.copy_of(message.content)
            flower.set_message_id(message, message_id)
            self._dispatch(message_id, message)
            message_ids.append(message_id)
        return message_ids

    def _pull(self, message_ids: Collection[str]) -> Iterable[Message]:
        """Return the replies present; if there are none, move the clock to the next one."""
        wanted = set(message_ids)
        ready = [self._arrived.pop(key)[1] for key in self._ready(wanted)]
        return ready or self._advance(wanted, None, stop_on_switch=False)

    def _more(self, message_ids: Collection[str], deadline: float | None) -> list[Message] | None:
        return self._advance(message_ids, deadline, stop_on_switch=False) or None

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online now."""
        return list(self._online)

    def arrivals_ahead(self) -> Mapping[int, bool]:
        """Map offline nodes that will come online to whether they were online before."""
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
        """Advance the clock; replies that arrive meanwhile are kept."""
        queue, end = self._queue, self._queue.now + seconds
        while queue and queue.next_time() <= end:
            self._process(*queue.pop())
        queue.advance(end)

    def unanswered(self) -> list[Exchange]:
        """Return the exchanges without a reply so far."""
        return [exchange_of(pending, math.inf, None) for pending in self._pending.values()]

    def set_run(self, run: flower.Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
        flower.identify_process(run.run_id)

    @property
    def run(self) -> flower.Run:
        """The run that messages belong to."""
        return self._run

    @property
    def mean_batch(self) -> float | None:
        """Mean number of clients whose training was computed at once; None one by one."""
        mean: float | None = getattr(self._executor, "mean_batch", None)
        return mean

    def close(self) -> None:
        """Close the executor, which ends its workers."""
        self._executor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the simulation as a tree of plain values and arrays.

        Work in progress is saved as its messages and repeated, with the same result.
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
            message = _saved_message(saved)
            progress = {name: saved[name] for name in _SAVED}
            pending = Pending(message, self._client_of(message), **progress)
            self._pending[message.metadata.message_id] = pending
            if pending.lost is None:
                self._work_on(message.metadata.message_id, pending)
        self.keeps_messages = True

    def _dispatch(self, message_id: str, message: Message) -> None:
        """Schedule a message's reply, and hand its work to the executor."""
        now, metadata = self._queue.now, message.metadata
        node_id, expires = metadata.dst_node_id, now + metadata.ttl
        client = self._client_of(message)
        pending = self._pending[message_id] = Pending(
            message, client, expires, due=now, sent=now, begun=now, ended=now
        )
        if self._observe is not None:
            # Measured now, because a client may modify its message.
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
        """Process events in order of time up to the first wanted reply."""
        for message_id in self._ready(message_ids):
            return [self._arrived.pop(message_id)[1]]
        queue, deadline = self._queue, math.inf if until is None else until
        # Random churn never ends: without this check, waiting for an impossible reply would not
        # either.
        hopeless = not stop_on_switch and not any(self._is_coming(key) for key in message_ids)
        while queue and not hopeless and queue.next_time() <= deadline:
            kind, key = queue.pop()
            self._process(kind, key)
            if kind == _SWITCH and stop_on_switch:
                return []
            if key in self._arrived and key in message_ids:
                return [self._arrived.pop(key)[1]]
        if deadline < math.inf:
            queue.advance(deadline)
        return []

    def _process(self, kind: int, key: str | int) -> None:
        """Process an event; keep its reply."""
        if kind == _SWITCH:
            assert isinstance(key, int)
            self._switch(key)
            return
        assert isinstance(key, str)
        reply = self._reply(key)
        if reply is not None:
            self._keep(key, reply)

    def _is_coming(self, message_id: str) -> bool:
        """Return whether a reply to a message is coming."""
        pending = self._pending.get(message_id)
        return pending is not None and pending.is_wanted

    def _ready(self, message_ids: Collection[str]) -> list[str]:
        """Return the messages that have replies, in order of arrival."""
        arrived = self._arrived
        if not arrived:
            return []
        # Iterate over the smaller set: usually many are wanted and few unfetched.
        if len(arrived) <= len(message_ids):
            return [key for key in arrived if key in message_ids]
        found = [key for key in message_ids if key in arrived]
        return sorted(found, key=lambda key: arrived[key][0])

    def _keep(self, message_id: str, reply: Message) -> None:
        """Keep a reply until it is fetched."""
        self._arrived[message_id] = (self._arrivals, reply)
        self._arrivals += 1

    def _reply(self, message_id: str) -> Message | None:
        """Produce the reply of a due message; None if it is not wanted."""
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
                # The client only answered a query, so its state is still the initial one.
                del self._clients[client.context.node_id]
        if self._observe is not None:
            self._observe(exchange_of(pending, self._queue.now, reply))
        return reply if pending.is_wanted else None

    def _drop(self, message_id: str) -> None:
        """Drop a message without a reply, and cancel its work."""
        pending = self._pending.pop(message_id)
        self._queue.cancel(pending.event)
        if pending.lost is None:
            assert pending.client is not None, "a message to no node is lost"
            del pending.client.at_work[message_id]
            self._executor.cancel(message_id)
        if self._observe is not None:
            self._observe(exchange_of(pending, math.inf, None))

    def _switch(self, node_id: int) -> None:
        """Switch a device online, or offline with the loss of its work."""
        if node_id in self._online:
            del self._online[node_id]
            self._lose_work(self._client(node_id))
        else:
            self._online[node_id] = None
        if self._observe is not None:
            self._observe(Switched(node_id, self._queue.now, node_id in self._online))
        self._schedule_switch(node_id)

    def _lose_work(self, client: NodeState) -> None:
        """Answer a device's work by errors when its absence is noticed."""
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


def nodes_of(
    profile: str, examples: Sequence[int], seed: int, names: Sequence[str] = ()
) -> list[Node]:
    """Make one node per client, with its device.

    Parameters
    ----------
    profile : str
        Device profile: a built-in one's name, a TOML file, or ``trace:FOLDER`` of a run.
    examples : Sequence[int]
        Training examples of each client.
    seed : int
        Seed of the choice of stragglers.
    names : Sequence[str]
        Names of the clients, by default ``client-`` and their numbers.

    Raises
    ------
    UserError
        Unknown profile, unusable trace.
    """
    if profile.startswith(PREFIX):
        devices, names = traced_fleet(profile.removeprefix(PREFIX), len(examples), names)
    else:
        devices = fleet(profile, len(examples), seed)
    nodes = []
    for index, (device, count) in enumerate(zip(devices, examples, strict=True)):
        config: dict[str, Value] = {"partition-id": index, "num-partitions": len(examples)}
        if names:
            config["device-id"] = names[index]
        nodes.append(Node(_FIRST_NODE_ID + index, device, config, count))
    return nodes
