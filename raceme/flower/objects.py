"""Messages as trees of objects, the form in which Flower's SuperNodes exchange them; their store.

An object is a byte string, named by its SHA-256: a head (its type, the ids of its children, the
length of its body, with spaces between), a zero byte, and the body. A message, its records and the
arrays in them are one object each.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flwr.proto.message_pb2 import ObjectTree

UPLOAD_SECONDS = 180.0
"""Longest time between two objects of a node that has announced them (flwr.supercore.constant:
OBJECT_PUSH_SESSION_TTL_SECONDS)."""
_TYPES = frozenset(
    {"Array", "ArrayChunk", "ArrayRecord", "ConfigRecord", "Message", "MetricRecord", "RecordDict"}
)
_ID = re.compile(r"[0-9a-f]{64}")


def object_id(content: bytes) -> str:
    """Return the id of an object."""
    return hashlib.sha256(content).hexdigest()


def nodes_of(tree: ObjectTree) -> Iterator[ObjectTree]:
    """Yield all nodes of a tree of objects, children before their parents."""
    for child in tree.children:
        yield from nodes_of(child)
    yield tree


def ids_of(tree: ObjectTree) -> list[str]:
    """Return the ids of all objects of a tree, each once, children before their parents."""
    return list(dict.fromkeys(node.object_id for node in nodes_of(tree)))


def check_tree(tree: ObjectTree) -> None:
    """Refuse a tree with an invalid object id.

    Raises
    ------
    ValueError
        An id is not 64 hexadecimal digits.
    """
    for found in ids_of(tree):
        if not _ID.fullmatch(found):
            raise ValueError(f"no id of an object: {found[:80]!a}")


def check_object(content: bytes) -> None:
    """Refuse bytes that are not an object of one of Flower's types.

    Raises
    ------
    ValueError
        The head or the length is wrong; the message says which.
    """
    head, divider, body = content.partition(b"\0")
    parts = head.decode("utf-8").split(" ")
    if not divider or len(parts) != 3:
        raise ValueError("an object has a head of three parts")
    kind, children, length = parts
    if kind not in _TYPES:
        raise ValueError(f"objects of type {kind[:80]!a} are not known")
    if not all(_ID.fullmatch(child) for child in children.split(",") if child):
        raise ValueError("the ids of its children are wrong")
    if int(length) != len(body):
        raise ValueError(f"its body has {len(body)} bytes, not {length[:20]}")


class ObjectStore:
    """Objects of messages and replies; a shared object is stored once.

    A message is first announced with the tree of its objects. An object is kept until all messages
    that have it are deleted. A tree is used for its own message only, since any node can announce a
    tree with wrong children of another message's object.
    """

    def __init__(self) -> None:
        self._trees: dict[str, ObjectTree] = {}
        self._uses: Counter[str] = Counter()
        self._contents: dict[str, bytes | None] = {}

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._trees

    def __len__(self) -> int:
        return len(self._contents)

    def announce(self, tree: ObjectTree) -> list[str]:
        """Register a message; return the ids of its missing objects."""
        if tree.object_id not in self._trees:
            self._trees[tree.object_id] = tree
            for key in ids_of(tree):
                self._uses[key] += 1
                self._contents.setdefault(key, None)
        ids = ids_of(self._trees[tree.object_id])
        return [key for key in ids if self._contents[key] is None]

    def put(self, key: str, content: bytes) -> None:
        """Store an announced object, unless it is present."""
        if self._contents[key] is None:
            self._contents[key] = content

    def get(self, key: str) -> bytes | None:
        """Return an object: empty if it has not arrived yet, None if it is unknown."""
        return (self._contents[key] or b"") if key in self._contents else None

    def tree(self, message_id: str) -> ObjectTree:
        """Return the tree of a message.

        Raises
        ------
        KeyError
            It was not announced.
        """
        return self._trees[message_id]

    def delete(self, message_id: str) -> None:
        """Drop a message, if present, and the objects that no other message has."""
        tree = self._trees.pop(message_id, None)
        for key in [] if tree is None else ids_of(tree):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._contents[key]


@dataclass
class _Session:
    """A session: the objects that the sender of a reply has yet to push.

    Attributes
    ----------
    reply_id : str
        The reply, whose object is the root of their tree.
    pending : set[str]
        Their ids.
    ends : float
        Time at which the sender is given up.
    """

    reply_id: str
    pending: set[str] = field(default_factory=set)
    ends: float = 0.0


class UploadSessions:
    """Sessions in which nodes push announced objects, one per reply.

    Parameters
    ----------
    clock : Callable
        Returns the time in seconds; replaceable for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._by_reply: dict[str, str] = {}

    def begin(self, reply_id: str, pending: Iterable[str]) -> str:
        """Begin the session of a reply, which replaces an earlier one; return its id."""
        self.end(reply_id)
        session = secrets.token_hex(16)
        if due := set(pending):
            ends = self._clock() + UPLOAD_SECONDS
            self._sessions[session] = _Session(reply_id, due, ends)
            self._by_reply[reply_id] = session
        return session

    def end(self, reply_id: str) -> None:
        """Expect no more objects of a reply."""
        self._sessions.pop(self._by_reply.pop(reply_id, ""), None)

    def expecting_reply(self, session: str, key: str) -> str | None:
        """Return the reply for which an object is pushed; None if the session does not expect it.

        Parameters
        ----------
        session : str
            Id of the session; older SuperNodes state none, and push in any that expects the object.
        """
        if session:
            found = self._sessions.get(session)
            return found.reply_id if found is not None and key in found.pending else None
        expecting = (each for each in self._sessions.values() if key in each.pending)
        return next((each.reply_id for each in expecting), None)

    def is_over(self, reply_id: str) -> bool:
        """Return whether too much time has passed since the last object of a reply."""
        session = self._by_reply.get(reply_id)
        return session is not None and self._sessions[session].ends <= self._clock()

    def overdue(self, key: str) -> list[str]:
        """Return the overdue replies that wait for an object."""
        waiting = [each.reply_id for each in self._sessions.values() if key in each.pending]
        return [reply_id for reply_id in waiting if self.is_over(reply_id)]

    def record_push(self, reply_id: str, key: str) -> None:
        """Record that an object of a reply was pushed, and restart the time limit."""
        session = self._sessions[self._by_reply[reply_id]]
        session.pending.discard(key)
        session.ends = self._clock() + UPLOAD_SECONDS
        if not session.pending:
            self.end(reply_id)

    def __len__(self) -> int:
        return len(self._sessions)
