"""Clients, identified by stable ids independent of their nodes."""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from raceme.core import messages as names
from raceme.core.errors import UserError, about, check_known, printable
from raceme.core.events import ClaimRefused
from raceme.core.files import ReadingError, file_stamp, parse_toml, read_text
from raceme.core.messages import count_of, error_line, name_of
from raceme.flower.messages import CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION

# -----------------------------------------------------------------------------
# Identities: verification of clients' ids by their keys.
# -----------------------------------------------------------------------------


log = logging.getLogger("raceme")

ON_TRUST = (
    "Devices' ids are taken on trust: any node that may connect can claim any of them, unless "
    "device-keys=FILE, which `raceme certs` writes, binds ids to keys (docs/server.md)"
)
"""What a server on real devices says without a list of keys."""
_EXPECTED = (
    "expected lines such as 'ecdsa-sha2-nistp384 AAAA… kitchen', a public key and the id of its "
    "device, as `raceme certs` writes them"
)


class ForeignIdError(Exception):
    """A node states an id that does not belong to its key; the message names the right one.

    Attributes
    ----------
    client_id : str
        The id that the node claims.
    """

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id

    def report(self, time: float, node_id: int) -> ClaimRefused:
        """Log the refusal and return its event."""
        log.warning("A client is refused: %s", self, extra=about(self.client_id))
        return ClaimRefused(time, node_id, self.client_id, str(self))


class Identities(Protocol):
    """Verifies the ids that nodes state."""

    def check(self, node_id: int, client_id: str) -> None:
        """Verify a node's stated id.

        Parameters
        ----------
        node_id : int
            An online node.
        client_id : str
            The id that it states.

        Raises
        ------
        ForeignIdError
            The id belongs to another client.
        """

    def renewed(self) -> bool:
        """Return whether to greet refused nodes again."""


class NodeInfo(Protocol):
    """The needed part of Flower's node information."""

    node_id: int
    public_key: bytes


class Nodes(Protocol):
    """A grid that knows its nodes' keys."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online."""


class BoundToKeys:
    """Binds keys to ids by a file.

    Flower's SuperLink exchanges messages with a node only by calls signed with the node's private
    key, registered or not, and passes the public key to the server app. A device's statements do
    not matter, so nothing can be replayed.

    A changed file is read again at the next check of the fleet.

    Parameters
    ----------
    path : Path
        File of public keys with ids; see :func:`read_device_keys`.
    nodes : Nodes
        Grid with the public keys of online nodes.

    Raises
    ------
    UserError
        The file is unreadable or invalid.
    """

    def __init__(self, path: Path, nodes: Nodes) -> None:
        self._path, self._nodes = path, nodes
        self._file = _WatchedFile(path, read_device_keys, "keys")
        self._keys: dict[int, bytes | None] = {}
        self._missed = False

    def check(self, node_id: int, client_id: str) -> None:
        """Compare the id with the one bound to the node's key.

        A node without an id is admitted by its number if its key is in the file.
        """
        if node_id not in self._keys:
            # A node's key never changes.
            self._keys = {
                node.node_id: _der(serialization.load_pem_public_key, node.public_key)
                for node in self._nodes.get_nodes()
            }
        if node_id not in self._keys:
            # Its key is unknown because it just went offline; check again later.
            self._missed = True
            raise ForeignIdError(client_id, f"node {node_id} was gone before its key was known")
        key = self._keys[node_id]
        holder = None if key is None else self._file.content.get(key)
        if holder is None:
            raise ForeignIdError(
                client_id,
                f"node {node_id} says it is '{client_id}', but its key is none of those in "
                f"{self._path.name}",
            )
        if client_id not in (holder, f"node-{node_id}"):
            raise ForeignIdError(
                client_id,
                f"node {node_id} says it is '{client_id}', but its key is that of '{holder}'",
            )

    def renewed(self) -> bool:
        """Read a changed file again; return whether it changed, or a node was missed."""
        missed, self._missed = self._missed, False
        return self._file.renewed() or missed


class KeyHolders:
    """Returns the id that a file binds to a public key (PEM), or an empty text.

    A changed file is read again at the next call.

    Parameters
    ----------
    path : Path
        File of public keys with ids; see :func:`read_device_keys`.
    """

    def __init__(self, path: Path) -> None:
        self._file = _WatchedFile(path, read_device_keys, "keys")

    def __call__(self, public_key: bytes) -> str:
        """Return the id of a key."""
        self._file.renewed()
        key = _der(serialization.load_pem_public_key, public_key)
        return "" if key is None else self._file.content.get(key, "")


def read_device_keys(path: Path) -> dict[bytes, str]:
    """Read the ids of keys.

    Parameters
    ----------
    path : Path
        One line per key in OpenSSH's format: type, key, device id. A device may have several keys.
        Empty lines and lines that begin with ``#`` are ignored.

    Returns
    -------
    dict[bytes, str]
        Key, in DER format, to id.

    Raises
    ------
    UserError
        The file is unreadable or empty, a line is invalid, or a key has two ids.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"device-keys: {path} cannot be read: {reason}.") from None
    ids: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        kind, encoded, name = (*line.split(maxsplit=2), "", "")[:3]
        key = _der(serialization.load_ssh_public_key, f"{kind} {encoded}".encode())
        if key is None or not name.strip().isprintable() or not name.strip():
            raise UserError(f"device-keys: line {number} of {path} is not a key: {_EXPECTED}.")
        if ids.setdefault(key, name.strip()) != name.strip():
            raise UserError(
                f"device-keys: line {number} of {path} gives the key of '{ids[key]}' to "
                f"'{name.strip()}' too: each device needs one of its own."
            )
    if not ids:
        raise UserError(f"device-keys: there is no key in {path}: {_EXPECTED}.")
    return ids


def _der(load: Callable[[bytes], object], text: bytes) -> bytes | None:
    """Return an elliptic-curve key in DER format; None for a simulated node without a key."""
    try:
        key = load(text)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return None
    der, info = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(der, info)


_Content = TypeVar("_Content")


class _WatchedFile(Generic[_Content]):
    """A file that is read again when it has changed.

    While a changed file cannot be read, as in the middle of a write, what was read before counts.
    """

    def __init__(self, path: Path, read: Callable[[Path], _Content], what: str) -> None:
        self._path, self._read, self._what = path, read, what
        self._stamp, self.content = file_stamp(path), read(path)

    def renewed(self) -> bool:
        """Read the file again if it has changed; return whether its content is new."""
        stamp = file_stamp(self._path)
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.content = self._read(self._path)
        except UserError as error:
            log.warning("%s The %s known so far count.", error, self._what)
            return False
        return True


# -----------------------------------------------------------------------------
# Labels of clients, such as their rooms, and a condition that decides which of them take part.
# -----------------------------------------------------------------------------


_LABEL = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,31})=([^,=|]{1,64})")
_MOST_LABELS = 16
_LABELS_EXPECTED = "expected NAME=VALUE, e.g. room=kitchen,floor=1"


def parse_labels(text: str) -> dict[str, str]:
    """Return the labels of a text such as ``room=kitchen,floor=1``.

    Raises
    ------
    ValueError
        It is something else, or has more than 16.
    """
    found = [_LABEL.fullmatch(part.strip()) for part in text.split(",")] if text.strip() else []
    labels = {match[1]: match[2].strip() for match in found if match}
    if len(labels) != len(found) or len(found) > _MOST_LABELS or not text.isprintable():
        raise ValueError(f"{printable(text, 80)!r} is not a list of labels: {_LABELS_EXPECTED}")
    return labels


def _text_of(value: object) -> str:
    if isinstance(value, str | int):
        return str(value)
    raise ValueError(f"{printable(value, 40)} is not a text")


def read_labels(path: Path) -> dict[str, dict[str, str]]:
    """Read the labels of devices: a TOML table of texts for each.

    Raises
    ------
    UserError
        It cannot be read, or holds something else.
    """
    listed = {}
    try:
        for client, own in parse_toml(read_text(path)).items():
            if not isinstance(own, dict):
                raise ValueError(f"{printable(client, 40)} is not a table")
            text = ",".join(f"{name}={_text_of(value)}" for name, value in own.items())
            listed[client] = parse_labels(text)
    except (ReadingError, ValueError) as error:
        raise UserError(
            f"labels: {path} cannot be read: {error}. It has a table for each device, [kitchen], "
            "with its labels: room = 'kitchen'."
        ) from None
    return listed


class Labels:
    """Labels of clients: those that they state, and those of a file, which count more.

    Parameters
    ----------
    path : Path, optional
        File of labels by client; see :func:`read_labels`. It is read again when it has changed.
    where : str
        Condition of clients that take part: ``room=kitchen|garden,floor=1``; empty for none. The
        label ``id`` is the client's id, and in a simulation ``group`` the true group of its data.

    Raises
    ------
    UserError
        The file cannot be read, or the condition is none.
    """

    def __init__(self, path: Path | None = None, where: str = "") -> None:
        self.where = where
        self._file = None if path is None else _WatchedFile(path, read_labels, "labels")
        self._wanted: dict[str, list[str]] = {}
        for part in where.split(",") if where.strip() else ():
            name, _, values = part.strip().partition("=")
            if name in self._wanted:
                raise UserError(
                    f"where: {name} stands twice in {where!r}: join its values, {name}=A|B."
                )
            self._wanted[name] = [value.strip() for value in values.split("|")]
            if not all(_LABEL.fullmatch(f"{name}={value}") for value in self._wanted[name]):
                raise UserError(
                    f"where: {where!r} is not a condition: expected NAME=VALUE, e.g. room=kitchen, "
                    "or room=kitchen|garden,floor=1."
                )

    def check_ids(self, clients: Collection[str]) -> None:
        """Raise a :class:`UserError` for an id in the condition that no simulated client has."""
        for wanted in self._wanted.get("id", ()):
            check_known("client in where", wanted, clients)

    def of(self, client_id: str, stated: object) -> dict[str, str]:
        """Return the labels of a client, given what it states."""
        labels: dict[str, str] = {}
        try:
            labels = parse_labels(stated) if isinstance(stated, str) else {}
        except ValueError as error:
            text = "The labels of %s are ignored: %s"
            log.warning(text, client_id, error, extra=about(client_id))
        if self._file is None:
            return labels
        self._file.renewed()
        return labels | self._file.content.get(client_id, {})

    def admit(self, client: Client) -> bool:
        """Return whether a client takes part."""
        return all(client.label(name) in values for name, values in self._wanted.items())


# -----------------------------------------------------------------------------
# Plausible numbers of examples of clients.
# -----------------------------------------------------------------------------


MOST_EXAMPLES = 2**53
"""Maximum number of examples: larger integers are not exact as floats."""
_TIMES_MEDIAN = 10.0
_STRETCH = 5.0
"""Multiple of the quartiles' logarithmic distance from the median that honest sizes may have. Of
log-normal sizes with standard deviation 2, as skewed as any published, one in 200,000 exceeds it,
given the factor of ten."""


def largest_believed(ordered: Sequence[int]) -> int:
    """Return the largest plausible number of examples.

    Ten times the median, times the larger of median / lower quartile and upper quartile / median to
    the power of 5, for spread sizes. A few excessive claims hardly affect the quartiles.

    Parameters
    ----------
    ordered : Sequence[int]
        Stated numbers in ascending order, at least one.
    """
    count = len(ordered)
    # The upper quartile is rounded down, so that it is not the maximum of few clients.
    places = count // 4, count // 2, 3 * (count - 1) // 4
    lower, median, upper = (max(1, ordered[place]) for place in places)
    spread = max(median / lower, upper / median)
    return int(min(MOST_EXAMPLES, _TIMES_MEDIAN * median * min(spread, 1e6) ** _STRETCH))


# -----------------------------------------------------------------------------
# The clients of a run, online or not.
# -----------------------------------------------------------------------------


_NO_QUERY = "No query function registered"
"""Flower's error for a ClientApp without a query handler."""
_FINAL = frozenset({CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION})
"""Errors that a second greeting would repeat."""


@dataclass
class Client:
    """The server's view of a client.

    Attributes
    ----------
    client_id : str
        Stable id, which survives a restart of the device.
    num_examples : int
        Number of training examples, n_i in the papers.
    group : int or None
        True group of its data, if known; for reports only.
    node_id : int or None
        Flower's id of its current node; None while offline.
    failures : int
        Number of consecutive failures.
    ready_at : float
        Not given work before this time.
    labels : dict[str, str]
        Its labels, such as its room.
    """

    client_id: str
    num_examples: int
    group: int | None = None
    node_id: int | None = None
    failures: int = 0
    ready_at: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """Return a label: ``id`` is the client's own, ``group``, if not given, the true group."""
        if name == "id":
            return self.client_id
        group = "" if self.group is None or name != "group" else str(self.group)
        return self.labels.get(name, group)


@dataclass
class Fleet:
    """All known clients, and nodes with open greetings.

    Attributes
    ----------
    clients : dict[str, Client]
        All clients, in order of greeting.
    by_node : dict[int, str]
        Client of each online node.
    greeted : dict[int, str]
        Nodes with an open greeting, to the id of the message.
    refused : dict[int, str]
        Nodes that state the id of a client that is online elsewhere.
    sizes : dict[str, int]
        Training examples that each client stated last, in its greeting or with an update.
    """

    clients: dict[str, Client] = field(default_factory=dict)
    by_node: dict[int, str] = field(default_factory=dict)
    greeted: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Derived or transient: not part of the state.
        self._ordered = sorted(self.sizes.values())
        self._capped: set[str] = set()
        self.open_greetings = {message_id: node for node, message_id in self.greeted.items()}
        """Nodes of open greetings, by message id."""

    def greet(self, node_id: int, message_id: str) -> None:
        """Record a greeting of a node."""
        self.greeted[node_id] = message_id
        self.open_greetings[message_id] = node_id

    def record_examples(self, client: str, examples: int) -> None:
        """Record a client's stated number of examples."""
        before = self.sizes.get(client)
        if before == examples:
            return
        if before is not None:
            del self._ordered[bisect_left(self._ordered, before)]
        self.sizes[client] = examples
        insort(self._ordered, examples)

    def counted(self, client: str, stated: int | None = None) -> int:
        """Return the plausible number of examples of a client, for weighting.

        Parameters
        ----------
        stated : int, optional
            Stated number; by default that of its last update, before the first of its greeting.

        Returns
        -------
        int
            The stated number, at most :func:`raceme.core.clients.largest_believed`.
        """
        if stated is None:
            stated = self.sizes.get(client, self.clients[client].num_examples)
        limit = self.most_counted()
        if stated > limit and client not in self._capped:
            self._capped.add(client)
            log.warning(
                "%s states %d examples, far more than the others: it counts like one with %d",
                client,
                stated,
                limit,
                extra=about(client),
            )
        return min(stated, limit)

    def most_counted(self) -> int:
        """Return the largest plausible number of examples."""
        return largest_believed(self._ordered) if self._ordered else MOST_EXAMPLES

    def labels(self, client: str) -> Mapping[str, str]:
        """Return the labels of a client; none of one that is not known."""
        return self.clients[client].labels if client in self.clients else {}

    def disconnect(self) -> list[str]:
        """Drop all nodes; return the clients that were online."""
        left = list(self.by_node.values())
        for client in left:
            self.clients[client].node_id = None
        self.by_node, self.greeted, self.refused = {}, {}, {}
        self.open_greetings = {}
        return left

    def changes(
        self, online: Iterable[int], ask_again: bool = False
    ) -> tuple[list[int], list[str]]:
        """Update the fleet by the online nodes.

        Parameters
        ----------
        online : Iterable[int]
            Ids of the online nodes.
        ask_again : bool
            Whether to greet refused nodes again.

        Returns
        -------
        tuple[list[int], list[str]]
            Nodes to greet, and clients that left.
        """
        present = set(online)
        left = [client for node, client in self.by_node.items() if node not in present]
        for client in left:
            node = self.clients[client].node_id
            self.clients[client].node_id = None
            if node is not None:
                del self.by_node[node]
        gone = [node for node in self.greeted if node not in present]
        for node in gone:
            self._close_greeting(node)
        freed = set(left)
        # A refused node is greeted again once the client of its id has left.
        self.refused = {
            node: client
            for node, client in self.refused.items()
            if node in present and client not in freed and not ask_again
        }
        known = self.by_node.keys() | self.greeted.keys() | self.refused.keys()
        return [node for node in online if node not in known], left

    def introduce(
        self,
        node_id: int,
        reply: Message,
        identities: Identities | None = None,
        labels: Labels | None = None,
    ) -> tuple[Client, bool] | str | None:
        """Register the client that answered a greeting.

        Returns
        -------
        tuple[Client, bool], str or None
            The client and whether it was known before; or why it is refused; None if it does not
            take part, by its labels.

        Raises
        ------
        ForeignIdError
            The id belongs to another key.
        """
        self._close_greeting(node_id)
        stated: Mapping[str, object] = {}
        measured: Mapping[str, object] = {}
        if not reply.has_error():
            stated = reply.content.config_records.get(names.CONFIG, {})
            measured = next(iter(reply.content.metric_records.values()), {})
        elif _NO_QUERY not in (reply.error.reason or ""):
            if reply.error.code in _FINAL:
                self.refused[node_id] = ""
            reason = f"node {node_id} did not answer its greeting: {error_line(reply)}"
            return printable(reason)
        # Any Flower ClientApp is supported: without queries, the node is the client, and its number
        # of examples comes with its first update.
        client_id = name_of(stated.get(names.CLIENT_ID, f"node-{node_id}"))
        if client_id is None:
            self.refused[node_id] = ""
            return f"node {node_id} states an id that is not 1 to 128 printable characters"
        if identities is not None:
            try:
                identities.check(node_id, client_id)
            except ForeignIdError:
                # It is refused without waiting for the client of its id.
                self.refused[node_id] = ""
                raise
        examples = count_of(measured.get(names.NUM_EXAMPLES, 1))
        if not examples:
            self.refused[node_id] = client_id
            return f"'{client_id}' has no examples to train on"
        group = measured.get(names.GROUP, -1)
        client = self.clients.get(client_id)
        if client is not None and client.node_id is not None:
            self.refused[node_id] = client_id
            return f"'{client_id}' is already online as node {client.node_id}"
        returned = client is not None
        client = client or Client(client_id, examples, count_of(group))
        if labels is not None:
            client.labels = labels.of(client_id, stated.get(names.LABELS))
            if not labels.admit(client):
                self.refused[node_id] = ""
                text = "%s takes no part: it is not %s"
                log.info(text, client_id, labels.where, extra=about(client_id))
                return None
        self.clients[client_id] = client
        client.num_examples, client.node_id = examples, node_id
        if names.NUM_EXAMPLES in measured:
            self.record_examples(client_id, examples)
        self.by_node[node_id] = client_id
        return client, returned

    def _close_greeting(self, node_id: int) -> None:
        message_id = self.greeted.pop(node_id, None)
        if message_id is not None:
            del self.open_greetings[message_id]

    def online(self) -> list[Client]:
        """Return the clients that are online, in order of greeting."""
        return [client for client in self.clients.values() if client.node_id is not None]


# -----------------------------------------------------------------------------
# Idle clients: online, without a task or back-off.
# -----------------------------------------------------------------------------


_TRIES = 20
"""Expected draws per client above which all clients are scanned instead."""


class Idle:
    """The online clients without a task, in the order in which they became idle.

    Parameters
    ----------
    names : dict[str, bool]
        Their ids in order; changed in place, as part of a state.
    clients : Mapping[str, Client]
        All clients in order of greeting; new ones are added before the next greeting.
    holds : Callable, optional
        Returns whether a client, given by its id, gets no work yet.
    """

    def __init__(
        self,
        names: dict[str, bool],
        clients: Mapping[str, Client],
        holds: Callable[[str], bool] | None = None,
    ) -> None:
        self._names, self._clients, self.holds = names, clients, holds
        # Derived from all clients in order, so that draws are the same after a resumption.
        self._all = list(clients)
        self._known = set(self._all)
        self._resting = {name for name in names if clients[name].ready_at > 0}

    def __contains__(self, client: str) -> bool:
        return client in self._names

    def add(self, client: str) -> None:
        """Mark a client as idle."""
        self._names[client] = True
        if client not in self._known:
            self._known.add(client)
            self._all.append(client)
        if self._clients[client].ready_at > 0:
            self._resting.add(client)

    def remove(self, client: str) -> None:
        """Remove a client that has work or went offline."""
        self._names.pop(client, None)
        self._resting.discard(client)

    def ready(self, now: float) -> list[Client]:
        """Return the clients without a back-off that are not held."""
        clients = (self._clients[name] for name in self._names)
        rested = [client for client in clients if client.ready_at <= now]
        if self.holds is None:
            return rested
        return [client for client in rested if not self.holds(client.client_id)]

    def draw(self, now: float, most: int, rng: np.random.Generator) -> list[Client]:
        """Return a uniform random sample of the clients that :meth:`ready` returns.

        Small samples are drawn from all clients by rejection, in time independent of their number.

        Parameters
        ----------
        now : float
            Time in seconds, which ends back-offs.
        most : int
            Size of the sample; all if fewer.
        """
        count, idle = len(self._all), len(self._names)
        drawn: dict[str, Client] = {}
        if 2 * most < idle and count < idle * idle:
            for _ in range(_TRIES * most * math.ceil(count / idle)):
                name = self._all[rng.integers(count)]
                if name in drawn or name not in self._names:
                    continue
                client = self._clients[name]
                if client.ready_at <= now and not (self.holds and self.holds(name)):
                    drawn[name] = client
                if len(drawn) == most:
                    return list(drawn.values())
        others = [client for client in self.ready(now) if client.client_id not in drawn]
        order = rng.permutation(len(others))[: most - len(drawn)]
        return [*drawn.values(), *(others[index] for index in order)]

    def next_ready(self, now: float) -> float:
        """Return the end of the next back-off; infinity without any."""
        self._resting = {name for name in self._resting if self._clients[name].ready_at > now}
        return min((self._clients[name].ready_at for name in self._resting), default=math.inf)
