"""Flower's link state and object store in this process, as a grid and a Fleet API both use them.

What Flower's own lacks for that: it says when a reply is there as a whole, and when nodes come and
go; it finds the messages of a node without looking at all others; and messages to Raceme's own
devices stay whole.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any, cast

from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, Status
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.task_pb2 import TaskStatus
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_object as inflatable
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink.federation import NoOpFederationManager

from raceme.flower import messages
from raceme.flower.app import App
from raceme.flower.fleet_protocol import LARGEST, LARGEST_CALL

# -----------------------------------------------------------------------------
# The message cache: messages with their content, as long as they may be asked for.
# -----------------------------------------------------------------------------


MOST_BYTES = 64 * 1024 * 1024
"""Bytes of arrays that are kept of messages that were handed out already."""


class MessageCache:
    """Whole messages by their ids.

    A message that was handed out is kept in case that it gets lost on its way: the latest of them,
    up to so many bytes. Of the others nothing is known any more but that they were sent.

    Parameters
    ----------
    most_bytes : int
        Bytes of arrays that are kept of messages that were handed out.
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
        """Return a message that waits or is on its way; None if there is none."""
        return self._waiting.get(message_id) or self._handed_out.get(message_id, (None, 0))[0]

    def hand_out(self, message_id: str) -> Message | None:
        """Return a message that is on its way from now on."""
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
        """Forget a message, and free the room that it takes."""
        self._waiting.pop(message_id, None)
        _, size = self._handed_out.pop(message_id, (None, 0))
        self._bytes -= size


# -----------------------------------------------------------------------------
# Clock skew: a wall clock that is set while a server runs.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme.serve")

_LEAST_SECONDS = 10.0
"""What clocks are corrected by without a jump comes in smaller steps."""


class ClockSkew:
    """Compares the wall clock, by which Flower tells which nodes are online, with a steady one.

    Parameters
    ----------
    wall, steady : Callable
        The clocks, in seconds; replaceable for tests.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._between = wall() - steady()

    def seconds(self) -> float:
        """Return by how much the wall clock has jumped since it was asked last; 0 if it has not."""
        between = self._wall() - self._steady()
        jump = between - self._between
        if abs(jump) < _LEAST_SECONDS:
            return 0.0
        self._between = between
        log.warning(
            "The clock has been set %s by %.0f s, or the host has slept: no node goes offline, "
            "and no message expires for that. Devices with a clock of their own that differs by "
            "more than 5 minutes are refused",
            "forward" if jump > 0 else "back",
            abs(jump),
        )
        return jump


# -----------------------------------------------------------------------------
# The link state: nodes, messages and replies.
# -----------------------------------------------------------------------------


RECONNECT_SECONDS = 90.0
"""How long a node that was online may take to find a server that has been started again."""
LIVE_SECONDS = 14.0
"""One of Raceme's devices that is silent for so long is offline: it sends a heartbeat every 5 s."""
_WORK_SECONDS = 60.0
"""Silence of a device until what it works on is lost: the network may come back sooner."""
_ISO_TIME = "%Y-%m-%dT%H:%M:%S+00:00"
_LOOK_SECONDS = 1.0
"""How often it is looked for messages whose replies will never come."""
_MOST_ABSENT = 1000
"""Nodes that registered themselves and never came online: any stranger can make more."""

Encoded = list[bytes]
"""A whole message: its head, the tree of its objects, then the objects; or, of a reply that came
whole, nothing, the id of the message that it answers, and itself."""


class LinkState(InMemoryLinkState):
    """Nodes, messages and replies of one run, which can be saved and restored.

    Parameters
    ----------
    app : App
        What the run's devices run.

    Attributes
    ----------
    run_id : int
        Id of the one run that is served.
    on_work : Callable
        Called with a node for which there is a message.
    on_news : Callable
        Called when a reply is there, or a node has come or gone.
    on_reply : Callable
        Called with a whole reply before its sender is told that it has arrived.
    key_changes : deque
        Devices whose keys were registered, revoked or rotated, and which of it: taken out by the
        grid.
    reconnect : float
        Seconds that nodes which were online count as such after :meth:`load_state_dict`.
    largest : int
        Bytes of a reply; larger ones are refused.
    renewed : set[int]
        Nodes that have begun anew without having been offline.
    """

    reconnect = RECONNECT_SECONDS
    largest = LARGEST_CALL

    def __init__(self, app: App) -> None:
        super().__init__(NoOpFederationManager(), InMemoryObjectStore())
        self.on_work: Callable[[int], None] = _ignore
        self.on_news: Callable[[], None] = _ignore
        self.on_reply: Callable[[str, Callable[[], Encoded]], None] = _ignore
        self._undelivered: dict[int, deque[str]] = {}
        self._handed_out: dict[int, str] = {}
        # Objects that are still to come of replies that have been announced.
        self._missing: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, set[str]] = {}
        self._arrived: dict[str, str] = {}
        self.renewed: set[int] = set()
        # The process that each node is: its version and a random name; empty of SuperNodes.
        self._sessions: dict[int, str] = {}
        # Raceme's own devices: their nodes, messages to them, and replies as they came.
        self._greeted: set[int] = set()
        self._direct: set[int] = set()
        self._cache = MessageCache()
        self._bodies: dict[str, bytes] = {}
        self._lost: dict[str, None] = {}
        self._looked_at = 0.0
        self._skew = ClockSkew()
        self._registered: dict[bytes, str] | None = None
        self.key_changes: deque[tuple[str, str]] = deque()
        digest = hashlib.sha256(app.bundle).hexdigest()
        self.store_fab(Fab(digest, app.bundle, {}))
        self.run_id = self.create_run(
            app.name,
            app.version,
            digest,
            dict(app.run_config),
            NOOP_FEDERATION_ID,
            None,
            flwr_aid=NOOP_FLWR_AID,
            primary_task_type=TaskType.SERVER_APP,
        )
        # Claiming the task, as Flower's own server apps do, would begin a lease on it.
        task = self.task_store[cast(int, self.run_ids[self.run_id].run.primary_task_id)]
        task.status.CopyFrom(TaskStatus(status=Status.RUNNING, sub_status="", details=""))
        messages.identify_process(self.run_id)

    # What a grid does.

    def push(self, message: Message) -> str | None:
        """Send a message to its node; return its id, or nothing if the node is not there."""
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
        self.on_work(node)
        return stored

    def _push_whole(self, message: Message) -> str | None:
        # As hard to guess as a hash: a node that names it may answer it.
        message_id = secrets.token_hex(32)
        messages.set_message_id(message, message_id)
        if self.store_message_ins(remove_content_from_message(message)) is None:
            return None
        self._cache.put(message_id, messages.copied(message))
        return message_id

    def _push_objects(self, message: Message) -> str | None:
        with inflatable.no_object_id_recompute():
            message_id = str(message.object_id)
            messages.set_message_id(message, message_id)
            head = remove_content_from_message(message)
            session = self.start_session(self.run_id)
            tree = inflatable.get_object_tree(message)
            stored, missing = self.store_message_and_object_tree(head, tree, session)
            if not stored:
                return None
            objects = inflatable.get_all_nested_objects(message)
            # Their ids have just been computed from them.
            store = cast(InMemoryObjectStore, self.object_store)
            store.verify = False
            for object_id in missing:
                # A reply that is on its way may have announced the same object: it completes it.
                self.store_object(self.run_id, session, object_id, objects[object_id].deflate())
            store.verify = True
        return message_id

    def take(self, message_ids: Collection[str], most: int | None = None) -> list[Message]:
        """Return the replies that are there to some messages, in order of arrival, and drop both.

        A message whose reply will never come is answered with an error.

        Parameters
        ----------
        message_ids : Collection[str]
            Ids of the messages whose replies are wanted.
        most : int, optional
            Replies that are returned at most, the first that have come; errors come on top.
        """
        with self.lock:
            unknown = self._look_for_lost(message_ids)
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
        """Drop messages and whatever there is of their replies."""
        with self.lock:
            for message_id in message_ids:
                self._lost.pop(message_id, None)
                self._arrived.pop(message_id, None)
                self._cache.drop(message_id)
                self._bodies.pop(message_id, None)
                reply_id = self.message_ins_id_to_message_res_id.get(message_id, "")
                self._forget_missing(reply_id)
                self.delete_messages({message_id})
                self.object_store.delete(message_id)
                self.object_store.delete(reply_id)

    def _forget_missing(self, reply_id: str) -> None:
        """Wait for no more objects of a reply."""
        self._sizes.pop(reply_id, None)
        for object_id in self._missing.pop(reply_id, ()):
            waiting = self._waiting.get(object_id, set())
            waiting.discard(reply_id)
            if not waiting:
                self._waiting.pop(object_id, None)

    def online(self) -> list[int]:
        """Return the nodes that are online, in the order in which they first came."""
        with self.lock:
            present = self.get_nodes(self.run_id)
            return [node for node in self.nodes if node in present]

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[Message]:
        """Hand out the next message of a node."""
        with self.lock:
            queue = self._undelivered.get(node_id, deque())
            while queue:
                message_id = queue.popleft()
                message = self.message_ins_store.get(message_id)
                if message and not self._is_answered(message_id) and message_id not in self._lost:
                    message.metadata.delivered_at = time.strftime(_ISO_TIME, time.gmtime())
                    self._handed_out[node_id] = message_id
                    return [message]
            self._undelivered.pop(node_id, None)
            return []

    def _is_answered(self, message_id: str) -> bool:
        return message_id in self._arrived or message_id in self.message_ins_id_to_message_res_id

    # What Raceme's devices do.

    def greet(self, node_id: int) -> None:
        """Note that a node that is about to come online is one of Raceme's devices."""
        with self.lock:
            self._greeted.add(node_id)

    def next_for(self, node_id: int, have: str) -> tuple[Message, ObjectTree | None] | None:
        """Hand out the next message of one of Raceme's devices; the last one again if it got lost.

        Parameters
        ----------
        have : str
            The last message that has arrived there.

        Returns
        -------
        tuple or None
            The whole message, or its head and the tree of its objects.
        """
        with self.lock:
            self._direct.add(node_id)
            if self._handed_out.get(node_id, have) != have:
                self._take_back(self._handed_out.pop(node_id))
            while found := self.get_message_ins(node_id, 1):
                message_id = found[0].metadata.message_id
                whole = self._cache.hand_out(message_id)
                if whole is not None:
                    return whole, None
                if message_id in self.object_store:
                    return found[0], self.object_store.get_object_tree(message_id)
                self._lose(message_id)
            return None

    def _take_back(self, message_id: str) -> None:
        """Let a message be handed out again, or note that it is lost with its content."""
        message = self.message_ins_store.get(message_id)
        if message is None or self._is_answered(message_id):
            return
        if message_id in self._cache or message_id in self.object_store:
            message.metadata.delivered_at = ""
            queue = self._undelivered.setdefault(message.metadata.dst_node_id, deque())
            queue.appendleft(message_id)
        else:
            self._lose(message_id)

    def _lose(self, message_id: str) -> None:
        self._lost[message_id] = None
        self.on_news()

    def accept(self, node_id: int, asked: str, body: bytes) -> bool:
        """Take a whole reply of one of Raceme's devices.

        Returns
        -------
        bool
            Whether it is that node's to answer. A reply that is not wanted any more is dropped.
        """
        with self.lock:
            message = self.message_ins_store.get(asked)
            if message is None or self._is_answered(asked):
                return True
            if message.metadata.dst_node_id != node_id:
                return False
            self.on_reply(asked, lambda: [b"", asked.encode(), body])
            self._bodies[asked] = body
            self._cache.drop(asked)
            self._lost.pop(asked, None)
            self._arrived[asked] = ""
        self.on_news()
        return True

    # What all nodes do, beyond what Flower's state does then.

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Take the head of a message or reply, and note what of a reply is still to come."""
        with self.lock:
            asked = message.metadata.reply_to_message_id
            known = self.message_ins_id_to_message_res_id.get(asked, message.metadata.message_id)
            if asked in self._bodies or known != message.metadata.message_id:
                # A second reply to the same message.
                return False, []
            stored, missing = super().store_message_and_object_tree(
                message, object_tree, session_id
            )
            if stored and asked and asked not in self._arrived:
                reply_id = message.metadata.message_id
                self._missing[reply_id] = set(missing)
                for object_id in missing:
                    self._waiting.setdefault(object_id, set()).add(reply_id)
                self._note(reply_id)
            return stored, missing

    def store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        """Take an object, unless its reply is too large; the last one of a reply completes it."""
        # Always this lock first, then those of Flower's own.
        with self.lock:
            for reply_id in self._waiting.get(object_id, ()):
                size = self._sizes[reply_id] = self._sizes.get(reply_id, 0) + len(object_content)
                if size > self.largest:
                    return False
            stored = super().store_object(run_id, session_id, object_id, object_content)
            if stored:
                for reply_id in self._waiting.pop(object_id, ()):
                    self._missing.get(reply_id, set()).discard(object_id)
                    self._note(reply_id)
            return stored

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        """Hand out an object."""
        with self.lock:
            return super().get_object(run_id, object_id)

    def _check_stored_messages(self, message_ids: set[str], run_id: int | None = None) -> None:
        """Leave messages whose time is up where they are: they are answered with an error."""

    def _check_and_tag_offline_nodes(self, node_ids: list[int] | None = None) -> None:
        """Mark nodes offline that are silent for too long; a clock that is set does not count."""
        with self.lock:
            jump = self._skew.seconds()
            if jump:
                for node in self.nodes.values():
                    if node.HasField("online_until"):
                        node.online_until += jump
                for message in self.message_ins_store.values():
                    # Later is no harm; a reply's time to live must not be longer than what is left.
                    message.metadata.ttl += max(jump, 0.0)
            super()._check_and_tag_offline_nodes(node_ids)

    def _on_push_session_expired(self, message_object_ids: set[str]) -> None:
        """Drop replies of which the rest has not come."""
        super()._on_push_session_expired(message_object_ids)
        for reply_id in message_object_ids:
            self._forget_missing(reply_id)

    def is_current(self, node_id: int, session: str) -> bool:
        """Return whether a session is that of the process that has last become this node."""
        # After a restart of the server, the first to call is.
        return self._sessions.setdefault(node_id, session) == session

    def version_of(self, node_id: int) -> str:
        """Return the version of Raceme on a node; empty if it is not known, or a SuperNode."""
        return self._sessions.get(node_id, "").rpartition("/")[0]

    def activate_node(self, node_id: int, heartbeat_interval: float, session: str = "") -> bool:
        """Let a node come online. What it had been given before is lost: it starts anew.

        One of Raceme's devices takes the place of a process with its key that counts as online:
        it may have been killed. That process, if it is not, is no longer this node.
        """
        with self.lock:
            node = self.nodes.get(node_id)
            if node is not None and node.status == NodeStatus.ONLINE and session:
                node.status = NodeStatus.OFFLINE
                self.renewed.add(node_id)
            if not super().activate_node(node_id, heartbeat_interval):
                return False
            self._sessions[node_id] = session
            self._live(node_id)
            was_direct = node_id in self._direct
            self._direct.discard(node_id)
            if node_id in self._greeted:
                self._direct.add(node_id)
            self._greeted.discard(node_id)
            self._handed_out.pop(node_id, None)
            # A SuperNode cannot read what waits for one of Raceme's devices with the same key.
            all_lost = was_direct and node_id not in self._direct
            for message_id, message in self.message_ins_store.items():
                if message.metadata.dst_node_id != node_id or message_id in self._arrived:
                    continue
                if message.metadata.delivered_at or all_lost:
                    self._lost[message_id] = None
        self.on_news()
        return True

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Take a heartbeat."""
        with self.lock:
            done = super().acknowledge_node_heartbeat(node_id, heartbeat_interval)
            self._live(node_id)
        return done

    def _live(self, node_id: int) -> None:
        """Let one of Raceme's devices count as online as long as its heartbeats promise."""
        node = self.nodes.get(node_id)
        if node is not None and self._sessions.get(node_id):
            node.online_until = time.time() + LIVE_SECONDS

    def make_room(self) -> None:
        """Forget the oldest of many nodes that were registered and never came online."""
        with self.lock:
            absent = [key for key, node in self.nodes.items() if not node.HasField("online_until")]
            if len(absent) >= _MOST_ABSENT:
                self.delete_node(NOOP_FLWR_AID, absent[0])

    def deactivate_node(self, node_id: int) -> bool:
        """Let a node go offline."""
        with self.lock:
            done = super().deactivate_node(node_id)
            if done:
                # It does not come back with what it has.
                self.nodes[node_id].online_until = 0.0
        self._looked_at = 0.0
        self.on_news()
        return done

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """Forget a node; a device without a registered key is a new one each time it joins."""
        with self.lock:
            node = self.nodes.get(node_id)
            if node is not None and not node.HasField("online_until"):
                # It has never been online, which Flower's own code does not expect here.
                node.online_until = 0.0
            super().delete_node(owner_aid, node_id)
            self.node_public_key_to_node_id.pop(self.nodes.pop(node_id).public_key, None)
            self._handed_out.pop(node_id, None)
            self._undelivered.pop(node_id, None)
            self._greeted.discard(node_id)
            self._direct.discard(node_id)
            self._sessions.pop(node_id, None)
            self.renewed.discard(node_id)
            self.owner_to_node_ids[owner_aid].discard(node_id)
        self._looked_at = 0.0
        self.on_news()

    # Replies.

    def _note(self, reply_id: str) -> None:
        """Note that a reply is there, if nothing of it is missing any more."""
        if self._missing.get(reply_id):
            return
        self._forget_missing(reply_id)
        reply = self.message_res_store.get(reply_id)
        if reply is None:
            return
        asked = reply.metadata.reply_to_message_id
        self.on_reply(asked, lambda: self._encoded(reply))
        self._lost.pop(asked, None)
        self._arrived[asked] = reply_id
        self.on_news()

    def _encoded(self, message: Message) -> Encoded:
        tree, contents = self._objects(message.metadata.message_id)
        return [head_of(message), tree.SerializeToString(), *contents.values()]

    def _objects(self, message_id: str) -> tuple[ObjectTree, dict[str, bytes]]:
        """Return the tree of the objects of a message; their contents by id, children first."""
        tree = self.object_store.get_object_tree(message_id)
        ids = dict.fromkeys(node.object_id for node in inflatable.iterate_object_tree(tree))
        return tree, {key: self.object_store.get(key) or b"" for key in ids}

    def _inflated(self, message_id: str) -> Message:
        """Return the reply to a message with its content."""
        reply_id = self._arrived[message_id]
        sender = self.message_ins_store[message_id].metadata.dst_node_id
        reason = "the reply is not what was announced"
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
        # A device may send anything.
        except Exception as error:
            reason = f"the reply cannot be read: {type(error).__name__}"
        return self._error(message_id, messages.REPLY_MESSAGE_UNAVAILABLE, reason)

    def _look_for_lost(self, message_ids: Collection[str]) -> list[str]:
        """Note which messages will never be answered: their node has left, or time is up.

        Returns
        -------
        list[str]
            Those of the given messages that are not known.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOK_SECONDS:
            return []
        self._looked_at = now
        # Marks those that are silent for too long.
        online, wall = self.get_nodes(self.run_id), time.time()
        for message_id, message in list(self.message_ins_store.items()):
            metadata = message.metadata
            is_over = metadata.created_at + metadata.ttl <= wall
            if is_over and message_id not in message_ids:
                self.forget([message_id])
            elif message_id not in self._arrived and (
                is_over or self._has_left(metadata.dst_node_id, online, wall)
            ):
                self._lost[message_id] = None
        return [key for key in message_ids if key not in self.message_ins_store]

    def _has_left(self, node_id: int, online: Collection[int], wall: float) -> bool:
        """Return whether a node will not answer what it was given any more."""
        node = self.nodes.get(node_id)
        if node is None or node_id in online:
            return node is None
        silent = _WORK_SECONDS - LIVE_SECONDS if self._sessions.get(node_id) else 0.0
        return bool(node.online_until + silent <= wall)

    def _error(self, message_id: str, code: int, reason: str) -> Message:
        return messages.error_reply(self.message_ins_store[message_id], code, reason)

    # Checkpoints and figures.

    def admit(self, keys: Mapping[bytes, str]) -> None:
        """Let the nodes with these public keys in, and no others: they are the registered ones.

        Parameters
        ----------
        keys : Mapping[bytes, str]
            The keys (PEM), to the names of their devices.
        """
        with self.lock:
            if self._registered is not None:
                self._compare(self._registered, keys)
            self._registered = dict(keys)
            for key in keys:
                if self.get_node_id_by_public_key(key) is None:
                    self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
            for key, node in list(self.node_public_key_to_node_id.items()):
                if key not in keys:
                    self.delete_node(NOOP_FLWR_AID, node)

    def _compare(self, before: Mapping[bytes, str], now: Mapping[bytes, str]) -> None:
        """Say which devices have other keys than before, and remember it for the run."""
        lost = {device for key, device in before.items() if now.get(key) != device}
        gained = {device for key, device in now.items() if before.get(key) != device}
        for device in sorted(lost | gained):
            change = "registered" if device not in lost else "revoked"
            change = "rotated" if device in lost & gained else change
            log.info("Key of %s: %s", device, change, extra={"fields": {"device": device}})
            self.key_changes.append((device, change))

    def counts(self) -> dict[str, int]:
        """Return how many messages wait for their node, are with it, and are answered."""
        with self.lock:
            heads = list(self.message_ins_store.items())
            sent = sum(bool(head.metadata.delivered_at) for _, head in heads)
            answered = sum(self._is_answered(key) for key, _ in heads)
        return {"waiting": len(heads) - sent, "at-work": sent - answered, "answered": answered}

    def state_dict(self) -> dict[str, Any]:
        """Return all that has to survive a restart: a tree of plain values and bytes.

        Of messages that their nodes have fetched only the heads are left.
        """
        with self.lock:
            run = self.run_ids[self.run_id].run
            return {
                "run": self.run_id,
                "series": run.series_id,
                "nodes": [node.SerializeToString() for node in self.nodes.values()],
                "direct": sorted(self._direct),
                "messages": [self._message_tree(key) for key in self.message_ins_store],
                "replies": [self._encoded_reply(key) for key in self._arrived],
            }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in a new state."""
        with self.lock:
            record = self.run_ids.pop(self.run_id)
            record.run.run_id, record.run.series_id = tree["run"], tree["series"]
            self.task_store[cast(int, record.run.primary_task_id)].run_id = tree["run"]
            self.run_id = tree["run"]
            self.run_ids[self.run_id] = record
            messages.identify_process(self.run_id)
            for known in (self.nodes, self.node_public_key_to_node_id, self.owner_to_node_ids):
                known.clear()
            for data in tree["nodes"]:
                self._restore_node(NodeInfo.FromString(data))
            self._direct = set(tree["direct"])
            for saved in tree["messages"]:
                self._restore_message(saved)
            for parcel in tree["replies"]:
                self.receive(parcel)

    def receive(self, parcel: Encoded) -> bool:
        """Take a whole reply, as if its node had just sent it; return whether it is wanted."""
        with self.lock:
            if not parcel[0]:
                asked = parcel[1].decode()
                message = self.message_ins_store.get(asked)
                if message is None or self._is_answered(asked):
                    return False
                return self.accept(message.metadata.dst_node_id, asked, parcel[2])
            head = message_from_proto(ProtoMessage.FromString(parcel[0]))
            tree = ObjectTree.FromString(parcel[1])
            session = self.start_session(self.run_id)
            stored, missing = self.store_message_and_object_tree(head, tree, session)
            contents = {inflatable.get_object_id(content): content for content in parcel[2:]}
            for object_id in missing:
                self.store_object(self.run_id, session, object_id, contents[object_id])
        return stored

    def _message_tree(self, message_id: str) -> dict[str, Any]:
        message = self.message_ins_store[message_id]
        # The objects go when the node confirms that it has them.
        whole = message_id in self.object_store
        content = None if message.metadata.delivered_at else self._cache.get(message_id)
        return {
            "delivered": message.metadata.delivered_at,
            "whole": whole,
            "body": b"" if content is None else messages.encode(content),
            "parcel": self._encoded(message) if whole else [head_of(message)],
        }

    def _restore_node(self, node: NodeInfo) -> None:
        if node.status == NodeStatus.ONLINE:
            node.online_until = time.time() + self.reconnect
        self.nodes[node.node_id] = node
        self.node_public_key_to_node_id[node.public_key] = node.node_id
        self.owner_to_node_ids.setdefault(node.owner_aid, set()).add(node.node_id)

    def _restore_message(self, saved: Mapping[str, Any]) -> None:
        parcel = saved["parcel"]
        message = message_from_proto(ProtoMessage.FromString(parcel[0]))
        message_id, node = message.metadata.message_id, message.metadata.dst_node_id
        message.metadata.delivered_at = saved["delivered"]
        self.message_ins_store[message_id] = message
        if saved["body"]:
            self._cache.put(message_id, messages.decode(saved["body"]))
        if saved["whole"]:
            tree = ObjectTree.FromString(parcel[1])
            self.object_store.preregister(self.run_id, tree)
            for content in parcel[2:]:
                self.object_store.put(inflatable.get_object_id(content), content)
        if saved["delivered"]:
            self._handed_out[node] = message_id
        else:
            self._undelivered.setdefault(node, deque()).append(message_id)

    def _encoded_reply(self, asked: str) -> Encoded:
        if asked in self._bodies:
            return [b"", asked.encode(), self._bodies[asked]]
        return self._encoded(self.message_res_store[self._arrived[asked]])


def _unavailable(message_id: str) -> Message:
    asked = Message(RecordDict(), 1, "query")
    messages.set_message_id(asked, message_id)
    return messages.error_reply(asked, messages.MESSAGE_UNAVAILABLE, "the message has expired")


def _ignore(*_arguments: object) -> None:
    """Do nothing."""


def head_of(message: Message) -> bytes:
    """Return a message without its content, as it travels."""
    return bytes(message_to_proto(message).SerializeToString())
