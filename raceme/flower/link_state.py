"""The state of the served fleet: its nodes, messages to them, replies, and the app bundle.

A grid and the Fleet API share it in one process. It notifies of complete replies, and of nodes that
join or leave. Messages to Raceme's own devices are stored complete; those to SuperNodes are trees
of objects. The rules for nodes, messages and replies are those of Flower's SuperLink.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from flwr.app import Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.proto.transport_pb2 import Scalar
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from raceme.flower import messages
from raceme.flower.fleet_protocol import (
    HEARTBEAT_MIN_INTERVAL,
    HEARTBEAT_PATIENCE,
    LARGEST,
    LARGEST_CALL,
)
from raceme.flower.objects import (
    ObjectStore,
    UploadSessions,
    check_object,
    check_tree,
    ids_of,
    object_id,
)

if TYPE_CHECKING:
    from raceme.flower.app import App, Value

# -----------------------------------------------------------------------------
# The message cache: messages with their content, as long as they may be requested.
# -----------------------------------------------------------------------------


MOST_BYTES = 64 * 1024 * 1024
"""Maximum size of the arrays of handed-out messages that are kept."""


class MessageCache:
    """Complete messages by their ids.

    Handed-out messages are kept in case they get lost in transit: the latest ones, up to a number
    of bytes. Earlier ones are dropped.

    Parameters
    ----------
    most_bytes : int
        Maximum size of the arrays of handed-out messages that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._waiting: dict[str, Message] = {}
        self._handed_out: dict[str, tuple[Message, int]] = {}
        self._bytes = 0

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._waiting or message_id in self._handed_out

    def put(self, message_id: str, message: Message) -> None:
        """Keep a message until it is handed out."""
        self._waiting[message_id] = message

    def get(self, message_id: str) -> Message | None:
        """Return a message that waits or is in transit; None if it is not here."""
        return self._waiting.get(message_id) or self._handed_out.get(message_id, (None, 0))[0]

    def hand_out(self, message_id: str) -> Message | None:
        """Return a message, and mark it as handed out."""
        found = self._waiting.pop(message_id, None)
        if found is None:
            return self.get(message_id)
        size = messages.size_of(found)
        self._handed_out[message_id] = found, size
        self._bytes += size
        while self._bytes > self._most:
            self.drop(next(iter(self._handed_out)))
        return found

    def drop(self, message_id: str) -> None:
        """Forget a message, and free its memory."""
        self._waiting.pop(message_id, None)
        _, size = self._handed_out.pop(message_id, (None, 0))
        self._bytes -= size


# -----------------------------------------------------------------------------
# Clock skew: jumps of the wall clock while a server runs.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_LEAST_SECONDS = 10.0
"""Smallest difference that counts as a jump; ordinary corrections have smaller steps."""


class ClockSkew:
    """Compares the wall clock, which determines the nodes that are online, with a steady one.

    Parameters
    ----------
    wall, steady : Callable
        The clocks, in seconds; replaceable for tests.
    """

    def __init__(
        self,
        wall: Callable[[], float] = lambda: time.time(),
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._between = wall() - steady()

    def seconds(self) -> float:
        """Return the jump of the wall clock since the last call; 0 without one."""
        between = self._wall() - self._steady()
        jump = between - self._between
        if abs(jump) < _LEAST_SECONDS:
            return 0.0
        self._between = between
        log.warning(
            "The clock has been set %s by %.0f s, or the host has slept: no node goes offline and "
            "no message expires because of that. Devices whose clocks differ by more than 5 "
            "minutes are refused",
            "forward" if jump > 0 else "back",
            abs(jump),
        )
        return jump


# -----------------------------------------------------------------------------
# The link state: nodes, messages and replies.
# -----------------------------------------------------------------------------


RECONNECT_SECONDS = 90.0
"""Time within which a node that was online must find a restarted server."""
LIVE_SECONDS = 14.0
"""Silence after which one of Raceme's devices is offline; it sends a heartbeat every 5 s."""
_WORK_SECONDS = 60.0
"""Silence of a device after which its work is lost; the network may return earlier."""
_ISO_TIME = "%Y-%m-%dT%H:%M:%S+00:00"
_EARLIEST = 1740700800.0
"""Earliest valid time of a message: the end of February 2025, when Flower introduced such messages.
An earlier time comes from a clock that is not set (flwr.server.utils.validator)."""
_TTL_TOLERANCE = 0.1
"""Seconds by which a reply's time to live may exceed the rest of its message's
(flwr.common.constant: MESSAGE_TTL_TOLERANCE)."""
_RUNNING = "running"
_LOOK_SECONDS = 1.0
"""Seconds between two searches for messages that will never be answered."""
_MOST_ABSENT = 1000
"""Maximum number of nodes that registered themselves and never came online, as any process can."""

Encoded = list[bytes]
"""A message as byte strings: its head, the tree of its objects, then the objects. For a reply that
came complete: an empty string, the id of the answered message, and the reply."""


@dataclass
class FleetNode:
    """A known node, identified by its key.

    Attributes
    ----------
    node_id : int
        Random number of 64 bits.
    public_key : bytes
        Its public key (PEM).
    is_online : bool
        Whether it was online at the last check.
    online_until : float or None
        Wall clock time until which its last heartbeat counts; None if it has never been online.
    """

    node_id: int
    public_key: bytes
    is_online: bool = False
    online_until: float | None = None


class FleetObserver:
    """Observer of the served fleet, called in the thread that causes a change."""

    def on_work(self, node_id: int) -> None:
        """Called when there is a message for a node."""

    def on_news(self) -> None:
        """Called when a reply is complete, or a node has joined or left."""

    def on_reply(self, message_id: str, encoded: Callable[[], Encoded]) -> None:
        """Called with a complete reply before its arrival is confirmed to the sender.

        Parameters
        ----------
        message_id : str
            The answered message.
        encoded : Callable
            Returns the reply in the form that :meth:`LinkState.receive` accepts.
        """


class LinkState:
    """Nodes, messages and replies of one run, which can be saved and restored.

    Parameters
    ----------
    app : App
        The app of the run's devices.

    Attributes
    ----------
    run_id : int
        Id of the served run.
    nodes : dict[int, FleetNode]
        Nodes by their ids, in the order of registration.
    heads : dict[str, Message]
        Messages by their ids, without their content, until they are forgotten.
    reply_heads : dict[str, Message]
        Announced replies by their own ids, without their content.
    objects : ObjectStore
        Contents of messages and replies that are sent as objects.
    observers : list[FleetObserver]
        Observers of messages, replies and nodes.
    key_changes : deque
        Devices whose keys were registered, revoked or rotated, with the kind of change; emptied by
        the grid.
    reconnect : float
        Seconds after :meth:`load_state_dict` for which nodes that were online count as online.
    largest : int
        Maximum size of a reply in bytes; larger ones are refused.
    renewed : set[int]
        Nodes that started again without having been offline.
    """

    reconnect = RECONNECT_SECONDS
    largest = LARGEST_CALL

    def __init__(self, app: App) -> None:
        self.lock = threading.RLock()
        self.observers: list[FleetObserver] = []
        self.nodes: dict[int, FleetNode] = {}
        self._ids: dict[bytes, int] = {}
        self.heads: dict[str, Message] = {}
        self.reply_heads: dict[str, Message] = {}
        # Ids of announced replies, by message.
        self._reply_ids: dict[str, str] = {}
        self.objects = ObjectStore()
        self._uploads = UploadSessions()
        self._undelivered: dict[int, deque[str]] = {}
        self._handed_out: dict[int, str] = {}
        # Missing objects of announced replies.
        self._missing: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, set[str]] = {}
        self._arrived: dict[str, str] = {}
        self.renewed: set[int] = set()
        # Process of each node: its version and a random name; empty for SuperNodes.
        self._sessions: dict[int, str] = {}
        # Device ids of the nodes' processes, and of processes that have greeted since.
        self._devices: dict[int, str] = {}
        self._introduced: dict[int, tuple[str, str]] = {}
        # Raceme's own devices: their nodes, the messages to them, and their replies as received.
        self._greeted: set[int] = set()
        self._direct: set[int] = set()
        self._cache = MessageCache()
        self._bodies: dict[str, bytes] = {}
        self._lost: dict[str, None] = {}
        self._checked_at = 0.0
        self._skew = ClockSkew()
        self._registered: dict[bytes, str] | None = None
        self.key_changes: deque[tuple[str, str]] = deque()
        self._app, self._bundle_hash = app, hashlib.sha256(app.bundle).hexdigest()
        self._began = datetime.now(UTC).isoformat()
        self._task = _random_id()
        self.run_id = _random_id()
        messages.identify_process(self.run_id)

    # Information about the run for nodes and apps.

    def run_record(self) -> Run:
        """Return the description of the run for SuperNodes, in the words of a SuperLink."""
        app = self._app
        return Run(
            run_id=self.run_id,
            fab_id=app.name,
            fab_version=app.version,
            fab_hash=self._bundle_hash,
            override_config={key: _scalar(value) for key, value in app.run_config.items()},
            pending_at=self._began,
            status=RunStatus(status=_RUNNING),
            flwr_aid="<id:none>",
            federation="@none/default",
            primary_task_type="flwr-serverapp",
            primary_task_id=self._task,
            # A series has one run.
            series_id=self.run_id,
        )

    @property
    def run(self) -> messages.Run:
        """The run, as stated by a grid."""
        app, run = self._app, messages.empty_run(self.run_id)
        run.fab_id, run.fab_version, run.fab_hash = app.name, app.version, self._bundle_hash
        run.override_config = dict(app.run_config)
        run.pending_at, run.status.status = self._began, _RUNNING
        return run

    def bundle(self, digest: str) -> Fab | None:
        """Return the app bundle with a hash; None for another hash."""
        if digest != self._bundle_hash:
            return None
        return Fab(hash_str=digest, content=self._app.bundle)

    # Operations of a grid.

    def push(self, message: Message) -> str | None:
        """Send a message to its node; return its id, or an empty text if the node is offline."""
        node = message.metadata.dst_node_id
        with self.lock:
            if node not in self._direct:
                stored = self._push_objects(message)
            elif messages.size_of(message) <= LARGEST:
                stored = self._push_whole(message)
            else:
                stored = self._push_objects(messages.joined(message))
            if stored is None:
                return None
            self._undelivered.setdefault(node, deque()).append(stored)
        for observer in self.observers:
            observer.on_work(node)
        return stored

    def _push_whole(self, message: Message) -> str | None:
        # As hard to guess as a hash, since a node that states the id may answer the message.
        message_id = secrets.token_hex(32)
        messages.set_message_id(message, message_id)
        if not self._keep_head(messages.without_content(message)):
            return None
        self._cache.put(message_id, messages.copied(message))
        return message_id

    def _push_objects(self, message: Message) -> str | None:
        with no_object_id_recompute():
            message_id = str(message.object_id)
            messages.set_message_id(message, message_id)
            if not self._keep_head(messages.without_content(message)):
                return None
            missing = self.objects.announce(get_object_tree(message))
            objects = get_all_nested_objects(message)
            for key in missing:
                # A reply in transit may have announced the same object, and may thereby be
                # complete.
                self._take_object(key, objects[key].deflate())
        return message_id

    def _keep_head(self, head: Message) -> bool:
        """Store a message without its content; return whether it can be sent."""
        stated = head.metadata
        node = self.nodes.get(stated.dst_node_id)
        if not _is_valid(head) or stated.run_id != self.run_id or stated.reply_to_message_id:
            return False
        if stated.src_node_id != messages.SERVER_NODE_ID:
            return False
        # The node is or was online.
        if node is None or node.online_until is None:
            return False
        self.heads.setdefault(stated.message_id, head)
        return True

    def take(self, message_ids: Collection[str], most: int | None = None) -> list[Message]:
        """Return the present replies to some messages, in order of arrival, and drop both.

        A message that will never be answered gets an error reply.

        Parameters
        ----------
        message_ids : Collection[str]
            Ids of the messages whose replies are wanted.
        most : int, optional
            Maximum number of replies, the earliest first; error replies are not counted.
        """
        with self.lock:
            unknown = self._find_lost(message_ids)
            ready = list(islice((key for key in self._arrived if key in message_ids), most))
            replies = [self._inflated(key) for key in ready]
            gone = [key for key in self._lost if key in message_ids]
            replies += [
                self._error(key, messages.NODE_UNAVAILABLE, "the node went offline") for key in gone
            ]
            replies += [_unavailable(key) for key in unknown]
            self.forget([*ready, *gone])
        return replies

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop messages and their replies, complete or not."""
        with self.lock:
            for message_id in message_ids:
                self._lost.pop(message_id, None)
                self._arrived.pop(message_id, None)
                self._cache.drop(message_id)
                self._bodies.pop(message_id, None)
                reply_id = self._reply_ids.get(message_id, "")
                self._forget_missing(reply_id)
                self._uploads.end(reply_id)
                self._drop_heads(message_id)
                self.objects.delete(message_id)
                self.objects.delete(reply_id)

    def _drop_heads(self, message_id: str) -> None:
        """Drop the heads of a message and of its reply."""
        self.heads.pop(message_id, None)
        self.reply_heads.pop(self._reply_ids.pop(message_id, ""), None)

    def _forget_missing(self, reply_id: str) -> None:
        """Stop waiting for objects of a reply."""
        self._sizes.pop(reply_id, None)
        for key in self._missing.pop(reply_id, ()):
            waiting = self._waiting.get(key, set())
            waiting.discard(reply_id)
            if not waiting:
                self._waiting.pop(key, None)

    def online(self) -> list[int]:
        """Return the online nodes, in the order of registration."""
        return [node.node_id for node in self.online_nodes()]

    def online_nodes(self) -> list[FleetNode]:
        """Return the nodes that are online, with their keys."""
        with self.lock:
            self._mark_offline(self.nodes.values())
            return [node for node in self.nodes.values() if node.is_online]

    def next_head(self, node_id: int) -> Message | None:
        """Return the next message of a node, without its content, as handed out."""
        with self.lock:
            queue = self._undelivered.get(node_id, deque())
            while queue:
                message_id = queue.popleft()
                message = self.heads.get(message_id)
                if message and not self._is_answered(message_id) and message_id not in self._lost:
                    message.metadata.delivered_at = time.strftime(_ISO_TIME, time.gmtime())
                    self._handed_out[node_id] = message_id
                    return message
            self._undelivered.pop(node_id, None)
            return None

    def next_announced(self, node_id: int) -> tuple[Message, ObjectTree] | None:
        """Return the next message of a SuperNode: its head, and the tree of its objects."""
        with self.lock:
            head = self.next_head(node_id)
            if head is None:
                return None
            message_id = head.metadata.message_id
            if message_id in self.objects:
                return head, self.objects.tree(message_id)
            self._drop_heads(message_id)
            return None

    def _is_answered(self, message_id: str) -> bool:
        return message_id in self._arrived or message_id in self._reply_ids

    # Operations of Raceme's devices.

    def greet(self, node_id: int) -> None:
        """Record that a node that will come online is one of Raceme's devices."""
        with self.lock:
            self._greeted.add(node_id)

    def next_for(self, node_id: int, have: str) -> tuple[Message, ObjectTree | None] | None:
        """Return the next message of one of Raceme's devices, or a lost one again.

        Parameters
        ----------
        have : str
            Id of the last message that arrived at the device.

        Returns
        -------
        tuple or None
            The complete message, or its head and the tree of its objects.
        """
        with self.lock:
            self._direct.add(node_id)
            if self._handed_out.get(node_id, have) != have:
                self._requeue(self._handed_out.pop(node_id))
            while head := self.next_head(node_id):
                message_id = head.metadata.message_id
                whole = self._cache.hand_out(message_id)
                if whole is not None:
                    return whole, None
                if message_id in self.objects:
                    return head, self.objects.tree(message_id)
                self._note_lost(message_id)
            return None

    def _requeue(self, message_id: str) -> None:
        """Make a message available again, or record that it is lost with its content."""
        message = self.heads.get(message_id)
        if message is None or self._is_answered(message_id):
            return
        if message_id in self._cache or message_id in self.objects:
            message.metadata.delivered_at = ""
            queue = self._undelivered.setdefault(message.metadata.dst_node_id, deque())
            queue.appendleft(message_id)
        else:
            self._note_lost(message_id)

    def _note_lost(self, message_id: str) -> None:
        self._lost[message_id] = None
        self._notify()

    def accept(self, node_id: int, asked: str, body: bytes) -> bool:
        """Accept a complete reply of one of Raceme's devices.

        Returns
        -------
        bool
            Whether the node may answer the message. A reply that is not awaited any more is
            dropped.
        """
        with self.lock:
            message = self.heads.get(asked)
            if message is None or self._is_answered(asked):
                return True
            if message.metadata.dst_node_id != node_id:
                return False
            self._notify_of_reply(asked, lambda: [b"", asked.encode(), body])
            self._bodies[asked] = body
            self._cache.drop(asked)
            self._lost.pop(asked, None)
            self._arrived[asked] = ""
        self._notify()
        return True

    # Operations of all nodes.

    def announce(self, reply: Message, tree: ObjectTree) -> tuple[str, list[str]]:
        """Accept the head of a reply, and record its missing objects.

        Returns
        -------
        tuple[str, list[str]]
            Id of the session in which objects are pushed, and the ids of the missing objects; none
            if the reply is not wanted.

        Raises
        ------
        ValueError
            The tree is invalid.
        """
        check_tree(tree)
        asked, reply_id = reply.metadata.reply_to_message_id, reply.metadata.message_id
        if tree.object_id != reply_id:
            raise ValueError("a reply has the id of its object")
        with self.lock:
            if not self._is_wanted(reply):
                return self._uploads.begin("", ()), []
            self.reply_heads.setdefault(reply_id, reply)
            self._reply_ids[asked] = reply_id
            missing = self.objects.announce(tree)
            if asked not in self._arrived:
                self._missing[reply_id] = set(missing)
                for key in missing:
                    self._waiting.setdefault(key, set()).add(reply_id)
                self._note(reply_id)
            return self._uploads.begin(reply_id, missing), missing

    def _is_wanted(self, reply: Message) -> bool:
        """Return whether a reply is the first valid one, in time, to a message of this run."""
        stated = reply.metadata
        asked = self.heads.get(stated.reply_to_message_id)
        if asked is None or not _is_valid(reply) or stated.run_id != self.run_id:
            return False
        sender, server = asked.metadata.dst_node_id, messages.SERVER_NODE_ID
        if (stated.src_node_id, stated.dst_node_id) != (sender, server):
            return False
        left = asked.metadata.created_at + asked.metadata.ttl - stated.created_at
        if stated.ttl - left > _TTL_TOLERANCE:
            return False
        # The same reply may be announced again, but not for another message, nor another reply for
        # this one.
        same = self.reply_heads.get(stated.message_id, reply)
        if same.metadata.reply_to_message_id != stated.reply_to_message_id:
            return False
        known = self._reply_ids.get(stated.reply_to_message_id, stated.message_id)
        return stated.reply_to_message_id not in self._bodies and known == stated.message_id

    def put_object(self, session: str, key: str, content: bytes) -> bool:
        """Accept an object, unless its reply is too large; the last one completes the reply."""
        with self.lock:
            for reply_id in self._waiting.get(key, ()):
                size = self._sizes[reply_id] = self._sizes.get(reply_id, 0) + len(content)
                if size > self.largest:
                    return False
            pushed = self._uploads.expecting_reply(session, key)
            if pushed is None:
                return False
            if self._uploads.is_over(pushed):
                self._give_up(pushed)
                return False
            try:
                if object_id(content) != key:
                    raise ValueError("its hash is another one")
                check_object(content)
            except ValueError as error:
                log.debug("An object of a reply is refused: %s", error)
                return False
            self._uploads.record_push(pushed, key)
            self._take_object(key, content)
            return True

    def _take_object(self, key: str, content: bytes) -> None:
        """Store an object, and record the replies that it completes."""
        self.objects.put(key, content)
        for reply_id in self._waiting.pop(key, ()):
            self._missing.get(reply_id, set()).discard(key)
            self._note(reply_id)

    def get_object(self, key: str) -> bytes | None:
        """Return an object: empty if it has not arrived yet, None if it never will."""
        with self.lock:
            content = self.objects.get(key)
            if content == b"":
                for reply_id in self._uploads.overdue(key):
                    self._give_up(reply_id)
                content = self.objects.get(key)
            return content

    def confirm(self, message_id: str) -> None:
        """Drop the objects of a message, which its node has received."""
        with self.lock:
            self.objects.delete(message_id)

    def _give_up(self, reply_id: str) -> None:
        """Drop an incomplete reply; another one may still arrive."""
        self._uploads.end(reply_id)
        if reply_id not in self._missing:
            return
        self._forget_missing(reply_id)
        self.objects.delete(reply_id)
        reply = self.reply_heads.pop(reply_id, None)
        if reply is not None:
            self._reply_ids.pop(reply.metadata.reply_to_message_id, None)

    def _mark_offline(self, nodes: Iterable[FleetNode]) -> None:
        """Mark nodes offline that are silent for too long; jumps of the clock do not count."""
        jump = self._skew.seconds()
        if jump:
            for node in self.nodes.values():
                if node.online_until is not None:
                    node.online_until += jump
            for message in self.heads.values():
                # Extended times are harmless, but a reply's time to live must not exceed the rest
                # of its message's.
                message.metadata.ttl += max(jump, 0.0)
        now = time.time()
        for node in nodes:
            if node.is_online and cast(float, node.online_until) <= now:
                node.is_online = False

    def node_of(self, public_key: bytes) -> int | None:
        """Return the node that has a key; None if there is none."""
        return self._ids.get(public_key)

    def is_current(self, node_id: int, session: str) -> bool:
        """Return whether a session belongs to the process that became this node last."""
        # After a restart of the server it is the first process that calls.
        return self._sessions.setdefault(node_id, session) == session

    def introduce(self, node_id: int, session: str, device: str) -> None:
        """Record the device id of a process that will become a node."""
        self._introduced[node_id] = session, device

    def device_on(self, node_id: int) -> str:
        """Return the device id of an online node; empty if unknown."""
        with self.lock:
            node = self.nodes.get(node_id)
            self._mark_offline([] if node is None else [node])
            is_online = node is not None and node.is_online
        return self._devices.get(node_id, "") if is_online else ""

    def version_of(self, node_id: int) -> str:
        """Return the version of Raceme on a node; empty if unknown, and for SuperNodes."""
        return self._sessions.get(node_id, "").rpartition("/")[0]

    def register(self, public_key: bytes) -> int:
        """Register a node, which is not online yet; return its id.

        Raises
        ------
        ValueError
            Another node has this key.
        """
        with self.lock:
            if public_key in self._ids:
                raise ValueError("Public key already in use")
            node_id = _random_id()
            self.nodes[node_id] = FleetNode(node_id, public_key)
            self._ids[public_key] = node_id
            return node_id

    def activate(self, node_id: int, heartbeat_interval: float, session: str = "") -> bool:
        """Let a node come online. Messages handed out to it before are lost, as it starts again.

        One of Raceme's devices replaces a process with the same key that counts as online, since
        that may have been killed. If it still runs, it is no longer this node.
        """
        with self.lock:
            node = self.nodes.get(node_id)
            if node is None:
                return False
            if node.is_online and session:
                node.is_online = False
                self.renewed.add(node_id)
            self._mark_offline([node])
            if node.is_online:
                return False
            self._sessions[node_id] = session
            introduced, device = self._introduced.pop(node_id, ("", ""))
            self._devices[node_id] = device if introduced == session else ""
            self._note_heartbeat(node, heartbeat_interval)
            was_direct = node_id in self._direct
            self._direct.discard(node_id)
            if node_id in self._greeted:
                self._direct.add(node_id)
            self._greeted.discard(node_id)
            self._handed_out.pop(node_id, None)
            # A SuperNode cannot read messages for one of Raceme's devices with the same key.
            all_lost = was_direct and node_id not in self._direct
            for message_id, message in self.heads.items():
                if message.metadata.dst_node_id != node_id or message_id in self._arrived:
                    continue
                if message.metadata.delivered_at or all_lost:
                    self._lost[message_id] = None
        self._notify()
        return True

    def beat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Process a heartbeat, which brings an offline node back; return whether it is known."""
        with self.lock:
            node = self.nodes.get(node_id)
            if node is None:
                return False
            self._note_heartbeat(node, heartbeat_interval)
            return True

    def _note_heartbeat(self, node: FleetNode, interval: float) -> None:
        """Extend the time for which a node counts as online; it is shorter for Raceme's devices."""
        is_near = bool(self._sessions.get(node.node_id)) and interval <= HEARTBEAT_MIN_INTERVAL
        seconds = LIVE_SECONDS if is_near else HEARTBEAT_PATIENCE * interval
        node.is_online, node.online_until = True, time.time() + seconds

    def make_room(self) -> None:
        """Forget the oldest nodes that never came online, if there are too many."""
        with self.lock:
            absent = [key for key, node in self.nodes.items() if node.online_until is None]
            if len(absent) >= _MOST_ABSENT:
                self.unregister(absent[0])

    def deactivate(self, node_id: int) -> bool:
        """Take a node offline."""
        with self.lock:
            node = self.nodes.get(node_id)
            if node is not None:
                self._mark_offline([node])
            if node is None or not node.is_online:
                return False
            # A node that returns has lost the messages that it received.
            node.is_online, node.online_until = False, 0.0
        self._checked_at = 0.0
        self._notify()
        return True

    def unregister(self, node_id: int) -> None:
        """Forget a node; a device without a registered key is a new node each time it joins."""
        with self.lock:
            node = self.nodes.pop(node_id)
            self._ids.pop(node.public_key, None)
            self._handed_out.pop(node_id, None)
            self._undelivered.pop(node_id, None)
            self._greeted.discard(node_id)
            self._direct.discard(node_id)
            self._sessions.pop(node_id, None)
            self._devices.pop(node_id, None)
            self._introduced.pop(node_id, None)
            self.renewed.discard(node_id)
        self._checked_at = 0.0
        self._notify()

    def _notify(self) -> None:
        for observer in self.observers:
            observer.on_news()

    def _notify_of_reply(self, message_id: str, encoded: Callable[[], Encoded]) -> None:
        for observer in self.observers:
            observer.on_reply(message_id, encoded)

    # Replies.

    def _note(self, reply_id: str) -> None:
        """Record that a reply is complete, if no object is missing any more."""
        if self._missing.get(reply_id):
            return
        self._forget_missing(reply_id)
        reply = self.reply_heads.get(reply_id)
        if reply is None:
            return
        asked = reply.metadata.reply_to_message_id
        self._notify_of_reply(asked, lambda: self._encoded(reply))
        self._lost.pop(asked, None)
        self._arrived[asked] = reply_id
        self._notify()

    def _encoded(self, message: Message) -> Encoded:
        tree, contents = self._objects(message.metadata.message_id)
        return [head_of(message), tree.SerializeToString(), *contents.values()]

    def _objects(self, message_id: str) -> tuple[ObjectTree, dict[str, bytes]]:
        """Return the tree of the objects of a message; their contents by id, children first."""
        tree = self.objects.tree(message_id)
        return tree, {key: self.objects.get(key) or b"" for key in ids_of(tree)}

    def _inflated(self, message_id: str) -> Message:
        """Return the reply to a message with its content."""
        reply_id = self._arrived[message_id]
        sender = self.heads[message_id].metadata.dst_node_id
        reason = "the reply differs from its announcement"
        try:
            if message_id in self._bodies:
                reply = messages.decode(self._bodies[message_id])
            else:
                _, contents = self._objects(reply_id)
                found = inflate_object_from_contents(reply_id, contents)
                reply = messages.parted(cast(Message, found))
            stated = reply.metadata
            if (stated.reply_to_message_id, stated.src_node_id) == (message_id, sender):
                messages.set_message_id(reply, reply_id)
                return reply
        # A device may send any bytes.
        except Exception as error:
            reason = f"the reply cannot be read: {type(error).__name__}"
        return self._error(message_id, messages.REPLY_MESSAGE_UNAVAILABLE, reason)

    def _find_lost(self, message_ids: Collection[str]) -> list[str]:
        """Record messages that will never be answered: their node has left, or they have expired.

        Returns
        -------
        list[str]
            The given messages that are unknown.
        """
        now = time.monotonic()
        if now < self._checked_at + _LOOK_SECONDS:
            return []
        self._checked_at = now
        # This marks nodes offline that are silent for too long.
        online, wall = set(self.online()), time.time()
        for message_id, message in list(self.heads.items()):
            metadata = message.metadata
            is_over = metadata.created_at + metadata.ttl <= wall
            if is_over and message_id not in message_ids:
                self.forget([message_id])
            elif message_id not in self._arrived and (
                is_over or self._has_left(metadata.dst_node_id, online, wall)
            ):
                self._lost[message_id] = None
        return [key for key in message_ids if key not in self.heads]

    def _has_left(self, node_id: int, online: Collection[int], wall: float) -> bool:
        """Return whether a node will not answer the messages that it received any more."""
        node = self.nodes.get(node_id)
        if node is None or node_id in online:
            return node is None
        silent = _WORK_SECONDS - LIVE_SECONDS if self._sessions.get(node_id) else 0.0
        return (node.online_until or 0.0) + silent <= wall

    def _error(self, message_id: str, code: int, reason: str) -> Message:
        return messages.error_reply(self.heads[message_id], code, reason)

    # Checkpoints and counts.

    def admit(self, keys: Mapping[bytes, str]) -> None:
        """Admit exactly the nodes with these public keys, the registered ones.

        Parameters
        ----------
        keys : Mapping[bytes, str]
            Device of each key (PEM).
        """
        with self.lock:
            if self._registered is not None:
                self._compare(self._registered, keys)
            self._registered = dict(keys)
            for key in keys:
                if key not in self._ids:
                    self.register(key)
            for key, node in list(self._ids.items()):
                if key not in keys:
                    self.unregister(node)

    def _compare(self, before: Mapping[bytes, str], now: Mapping[bytes, str]) -> None:
        """Log devices whose keys changed, and record the changes for the run."""
        lost = {device for key, device in before.items() if now.get(key) != device}
        gained = {device for key, device in now.items() if before.get(key) != device}
        for device in sorted(lost | gained):
            change = "registered" if device not in lost else "revoked"
            change = "rotated" if device in lost & gained else change
            log.info("Key of %s: %s", device, change, extra={"fields": {"device": device}})
            self.key_changes.append((device, change))

    def counts(self) -> dict[str, int]:
        """Return the numbers of messages that wait, are with their node, and are answered."""
        with self.lock:
            heads = list(self.heads.items())
            sent = sum(bool(head.metadata.delivered_at) for _, head in heads)
            answered = sum(self._is_answered(key) for key, _ in heads)
        return {"waiting": len(heads) - sent, "at-work": sent - answered, "answered": answered}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as a tree of plain values and bytes.

        It has only the heads of messages that their nodes have fetched.
        """
        with self.lock:
            return {
                "run": self.run_id,
                "nodes": [asdict(node) for node in self.nodes.values()],
                "direct": sorted(self._direct),
                "messages": [self._message_tree(key) for key in self.heads],
                "replies": [self._encoded_reply(key) for key in self._arrived],
            }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in a new state."""
        with self.lock:
            self.run_id = tree["run"]
            messages.identify_process(self.run_id)
            self.nodes, self._ids = {}, {}
            for saved in tree["nodes"]:
                self._restore_node(FleetNode(**saved))
            self._direct = set(tree["direct"])
            for saved in tree["messages"]:
                self._restore_message(saved)
            for parcel in tree["replies"]:
                self.receive(parcel)

    def receive(self, parcel: Encoded) -> bool:
        """Accept a complete reply as if its node had just sent it; return whether it is wanted."""
        with self.lock:
            if not parcel[0]:
                asked = parcel[1].decode()
                message = self.heads.get(asked)
                if message is None or self._is_answered(asked):
                    return False
                return self.accept(message.metadata.dst_node_id, asked, parcel[2])
            head = message_from_proto(ProtoMessage.FromString(parcel[0]))
            tree = ObjectTree.FromString(parcel[1])
            if not self._is_wanted(head):
                return False
            session, missing = self.announce(head, tree)
            contents = {object_id(content): content for content in parcel[2:]}
            for key in missing:
                self.put_object(session, key, contents[key])
        return True

    def _message_tree(self, message_id: str) -> dict[str, Any]:
        message = self.heads[message_id]
        # The objects are dropped when the node confirms their arrival.
        whole = message_id in self.objects
        content = None if message.metadata.delivered_at else self._cache.get(message_id)
        return {
            "delivered": message.metadata.delivered_at,
            "whole": whole,
            "body": b"" if content is None else messages.encode(content),
            "parcel": self._encoded(message) if whole else [head_of(message)],
        }

    def _restore_node(self, node: FleetNode) -> None:
        if node.is_online:
            node.online_until = time.time() + self.reconnect
        self.nodes[node.node_id] = node
        self._ids[node.public_key] = node.node_id

    def _restore_message(self, saved: Mapping[str, Any]) -> None:
        parcel = saved["parcel"]
        message = message_from_proto(ProtoMessage.FromString(parcel[0]))
        message_id, node = message.metadata.message_id, message.metadata.dst_node_id
        message.metadata.delivered_at = saved["delivered"]
        self.heads[message_id] = message
        if saved["body"]:
            self._cache.put(message_id, messages.decode(saved["body"]))
        if saved["whole"]:
            tree = ObjectTree.FromString(parcel[1])
            self.objects.announce(tree)
            for content in parcel[2:]:
                self.objects.put(object_id(content), content)
        if saved["delivered"]:
            self._handed_out[node] = message_id
        else:
            self._undelivered.setdefault(node, deque()).append(message_id)

    def _encoded_reply(self, asked: str) -> Encoded:
        if asked in self._bodies:
            return [b"", asked.encode(), self._bodies[asked]]
        return self._encoded(self.reply_heads[self._arrived[asked]])


def saved_message(saved: Mapping[str, Any]) -> Message | None:
    """Return a message of a saved state with its content; None if the state has its head only."""
    if saved["body"]:
        return messages.decode(saved["body"])
    head, *objects = saved["parcel"]
    if not saved["whole"]:
        return None
    message_id = message_from_proto(ProtoMessage.FromString(head)).metadata.message_id
    contents = {object_id(content): content for content in objects[1:]}
    return messages.parted(cast(Message, inflate_object_from_contents(message_id, contents)))


def _unavailable(message_id: str) -> Message:
    asked = Message(RecordDict(), 1, "query")
    messages.set_message_id(asked, message_id)
    return messages.error_reply(asked, messages.MESSAGE_UNAVAILABLE, "the message has expired")


def _random_id() -> int:
    """Return a random number of 64 bits, except 0 (none) and 1 (the server)."""
    return 2 + secrets.randbelow(2**64 - 2)


def _scalar(value: Value) -> Scalar:
    if isinstance(value, bool):
        return Scalar(bool=value)
    if isinstance(value, int):
        return Scalar(sint64=value)
    return Scalar(double=value) if isinstance(value, float) else Scalar(string=value)


def _is_valid(message: Message) -> bool:
    """Return whether a message or a reply has all required fields, and has not expired."""
    stated = message.metadata
    return (
        bool(stated.message_id and stated.message_type)
        and not stated.delivered_at
        and stated.ttl > 0
        and stated.created_at >= _EARLIEST
        and stated.created_at + stated.ttl > time.time()
        and message.has_content() != message.has_error()
    )


def head_of(message: Message) -> bytes:
    """Return a message without its content, in its protobuf form."""
    return bytes(message_to_proto(message).SerializeToString())
