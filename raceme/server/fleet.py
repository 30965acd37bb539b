"""Who the clients are: greeted once, known by the id that they state, wherever they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from raceme.compat import CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION
from raceme.protocol.messages import CLIENT_ID, CONFIG, GROUP, NUM_EXAMPLES, count_of
from raceme.server.replies import error_line

_NO_QUERY = "No query function registered"
"""What Flower's ClientApp says when it has no handler for queries."""
_FINAL = frozenset({CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION})
"""Errors that a second greeting would meet again."""
_LONGEST_ID = 128
_LIMIT = 2**53
"""Counts from here on are not exact as float numbers, and no client's."""


@dataclass
class Client:
    """A client as the server knows it.

    Attributes
    ----------
    client_id : str
        The stable id that it states, which survives a restart of its device.
    num_examples : int
        Training examples, n_i.
    group : int or None
        True group of its data where known; for reports only, no strategy looks at it.
    node_id : int or None
        Flower's id of the node where it is now; None while it is offline.
    failures : int
        Replies in a row that were unusable.
    ready_at : float
        Not given work before this time.
    """

    client_id: str
    num_examples: int
    group: int | None = None
    node_id: int | None = None
    failures: int = 0
    ready_at: float = 0.0


@dataclass
class Fleet:
    """The clients that have been greeted, and the nodes that have not answered yet.

    Attributes
    ----------
    clients : dict[str, Client]
        Every client ever greeted, in order of greeting.
    by_node : dict[int, str]
        Client on each node that is online.
    greeted : dict[int, str]
        Nodes with an open greeting, to the id of the message.
    refused : dict[int, str]
        Nodes that state the id of a client that is online elsewhere.
    """

    clients: dict[str, Client] = field(default_factory=dict)
    by_node: dict[int, str] = field(default_factory=dict)
    greeted: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def disconnect(self) -> list[str]:
        """Forget all nodes; return the clients that were online."""
        left = list(self.by_node.values())
        for client in left:
            self.clients[client].node_id = None
        self.by_node, self.greeted, self.refused = {}, {}, {}
        return left

    def changes(self, online: Iterable[int]) -> tuple[list[int], list[str]]:
        """Compare with the nodes that are online now.

        Parameters
        ----------
        online : Iterable[int]
            Node ids.

        Returns
        -------
        tuple[list[int], list[str]]
            Nodes to greet, and clients that have left, which are marked so.
        """
        present = set(online)
        left = [client for node, client in self.by_node.items() if node not in present]
        for client in left:
            node = self.clients[client].node_id
            self.clients[client].node_id = None
            if node is not None:
                del self.by_node[node]
        self.greeted = {node: key for node, key in self.greeted.items() if node in present}
        freed = set(left)
        # A refused node is asked again once the client that it claims to be has left.
        self.refused = {
            node: client
            for node, client in self.refused.items()
            if node in present and client not in freed
        }
        known = self.by_node.keys() | self.greeted.keys() | self.refused.keys()
        return [node for node in online if node not in known], left

    def introduce(self, node_id: int, reply: Message) -> tuple[Client, bool] | str:
        """Register the client that answered a greeting.

        Returns
        -------
        tuple[Client, bool] or str
            The client and whether it was known before; or why it is refused.
        """
        self.greeted.pop(node_id, None)
        stated: Mapping[str, object] = {}
        measured: Mapping[str, object] = {}
        if not reply.has_error():
            stated = reply.content.config_records.get(CONFIG, {})
            measured = next(iter(reply.content.metric_records.values()), {})
        elif _NO_QUERY in (reply.error.reason or ""):
            # Any Flower ClientApp can take part; one that answers no queries is its node.
            measured = {NUM_EXAMPLES: 1}
        else:
            if reply.error.code in _FINAL:
                self.refused[node_id] = ""
            return f"node {node_id} did not answer its greeting: {error_line(reply)}"
        client_id = str(stated.get(CLIENT_ID, f"node-{node_id}"))
        if not client_id.isprintable() or not 1 <= len(client_id) <= _LONGEST_ID:
            # It goes into terminals, logs and reports, which what a device sends must not steer.
            self.refused[node_id] = ""
            return (
                f"node {node_id} states an id that is not 1 to {_LONGEST_ID} printable characters"
            )
        examples = measured.get(NUM_EXAMPLES, 0)
        if not isinstance(examples, int | float) or not 1 <= examples < _LIMIT:
            self.refused[node_id] = client_id
            return f"'{client_id}' has no examples to train on"
        group = measured.get(GROUP, -1)
        client = self.clients.get(client_id)
        if client is not None and client.node_id is not None:
            self.refused[node_id] = client_id
            return f"'{client_id}' is already online as node {client.node_id}"
        returned = client is not None
        if client is None:
            client = Client(client_id, int(examples), count_of(group))
            self.clients[client_id] = client
        client.num_examples, client.node_id = int(examples), node_id
        client.failures, client.ready_at = 0, 0.0
        self.by_node[node_id] = client_id
        return client, returned

    def online(self) -> list[Client]:
        """Return the clients that are online, in order of greeting."""
        return [client for client in self.clients.values() if client.node_id is not None]
