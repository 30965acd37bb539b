"""Who the clients are: greeted once, known by the id that they state, wherever they run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import getLogger

from flwr.app import Message

from raceme.compat import CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION
from raceme.protocol.messages import CLIENT_ID, CONFIG, GROUP, NUM_EXAMPLES, count_of
from raceme.protocol.stated import error_line, name_of
from raceme.server.identity import ForeignIdError, Identities
from raceme.server.sizes import MOST_EXAMPLES, largest_believed

log = getLogger("raceme")

_NO_QUERY = "No query function registered"
"""What Flower's ClientApp says when it has no handler for queries."""
_FINAL = frozenset({CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION})
"""Errors that a second greeting would meet again."""


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
    sizes : dict[str, int]
        Training examples that each client has stated last: in its greeting or with an update.
    """

    clients: dict[str, Client] = field(default_factory=dict)
    by_node: dict[int, str] = field(default_factory=dict)
    greeted: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Derived from the sizes, and told only once: no state.
        self._ordered = sorted(self.sizes.values())
        self._capped: set[str] = set()
        self._greetings = {message_id: node for node, message_id in self.greeted.items()}

    def greet(self, node_id: int, message_id: str) -> None:
        """Note that a node was greeted."""
        self.greeted[node_id] = message_id
        self._greetings[message_id] = node_id

    def greeted_by(self, message_id: str) -> int | None:
        """Return the node whose greeting is open under this id, if there is one."""
        return self._greetings.get(message_id)

    def open_greetings(self) -> Collection[str]:
        """Return the ids of the greetings without an answer."""
        return self._greetings.keys()

    def heard(self, client: str, examples: int) -> None:
        """Note how many examples a client says it has."""
        before = self.sizes.get(client)
        if before == examples:
            return
        if before is not None:
            del self._ordered[bisect_left(self._ordered, before)]
        self.sizes[client] = examples
        insort(self._ordered, examples)

    def counted(self, client: str, stated: int | None = None) -> int:
        """Return how many examples of a client count where clients are weighed by them.

        Parameters
        ----------
        client : str
            Who.
        stated : int, optional
            What it states; by default what it stated in its greeting.

        Returns
        -------
        int
            The same, or :func:`raceme.server.sizes.largest_believed` if that is less.
        """
        stated = self.clients[client].num_examples if stated is None else stated
        limit = self.most_counted()
        if stated > limit and client not in self._capped:
            self._capped.add(client)
            log.warning(
                "%s states %d examples, far more than the others: it counts like one with %d",
                client,
                stated,
                limit,
            )
        return min(stated, limit)

    def most_counted(self) -> int:
        """Return the number of examples beyond which no client counts more."""
        return largest_believed(self._ordered) if self._ordered else MOST_EXAMPLES

    def disconnect(self) -> list[str]:
        """Forget all nodes; return the clients that were online."""
        left = list(self.by_node.values())
        for client in left:
            self.clients[client].node_id = None
        self.by_node, self.greeted, self.refused = {}, {}, {}
        self._greetings = {}
        return left

    def changes(
        self, online: Iterable[int], ask_again: bool = False
    ) -> tuple[list[int], list[str]]:
        """Compare with the nodes that are online now.

        Parameters
        ----------
        online : Iterable[int]
            Node ids.
        ask_again : bool
            Greet nodes too that were refused.

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
        gone = [node for node in self.greeted if node not in present]
        for node in gone:
            self._close_greeting(node)
        freed = set(left)
        # A refused node is asked again once the client that it claims to be has left.
        self.refused = {
            node: client
            for node, client in self.refused.items()
            if node in present and client not in freed and not ask_again
        }
        known = self.by_node.keys() | self.greeted.keys() | self.refused.keys()
        return [node for node in online if node not in known], left

    def introduce(
        self, node_id: int, reply: Message, identities: Identities | None = None
    ) -> tuple[Client, bool] | str:
        """Register the client that answered a greeting.

        Returns
        -------
        tuple[Client, bool] or str
            The client and whether it was known before; or why it is refused.

        Raises
        ------
        ForeignIdError
            It is not who it says.
        """
        self._close_greeting(node_id)
        stated: Mapping[str, object] = {}
        measured: Mapping[str, object] = {}
        if not reply.has_error():
            stated = reply.content.config_records.get(CONFIG, {})
            measured = next(iter(reply.content.metric_records.values()), {})
        elif _NO_QUERY not in (reply.error.reason or ""):
            if reply.error.code in _FINAL:
                self.refused[node_id] = ""
            return f"node {node_id} did not answer its greeting: {error_line(reply)}"
        # Any Flower ClientApp can take part: one that answers no queries is its node, and how many
        # examples it has comes with its first update. Until then it stands for no size of a client.
        client_id = name_of(stated.get(CLIENT_ID, f"node-{node_id}"))
        if client_id is None:
            self.refused[node_id] = ""
            return f"node {node_id} states an id that is not 1 to 128 printable characters"
        if identities is not None:
            try:
                identities.check(node_id, client_id)
            except ForeignIdError:
                # It does not wait for the client that it claims to be.
                self.refused[node_id] = ""
                raise
        examples = count_of(measured.get(NUM_EXAMPLES, 1))
        if not examples:
            self.refused[node_id] = client_id
            return f"'{client_id}' has no examples to train on"
        group = measured.get(GROUP, -1)
        client = self.clients.get(client_id)
        if client is not None and client.node_id is not None:
            self.refused[node_id] = client_id
            return f"'{client_id}' is already online as node {client.node_id}"
        returned = client is not None
        if client is None:
            client = Client(client_id, examples, count_of(group))
            self.clients[client_id] = client
        client.num_examples, client.node_id = examples, node_id
        if NUM_EXAMPLES in measured:
            self.heard(client_id, examples)
        client.failures, client.ready_at = 0, 0.0
        self.by_node[node_id] = client_id
        return client, returned

    def _close_greeting(self, node_id: int) -> None:
        message_id = self.greeted.pop(node_id, None)
        if message_id is not None:
            del self._greetings[message_id]

    def online(self) -> list[Client]:
        """Return the clients that are online, in order of greeting."""
        return [client for client in self.clients.values() if client.node_id is not None]
