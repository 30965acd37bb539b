"""Clients, identified by stable ids independent of their nodes."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message

from raceme.core import messages as names
from raceme.core.errors import about, printable
from raceme.core.identities import ForeignIdError, Identities
from raceme.core.labels import Labels
from raceme.core.messages import count_of, error_line, name_of
from raceme.flower.messages import CLIENT_APP_RAISED_EXCEPTION, INVALID_APP, LOAD_APP_EXCEPTION

log = logging.getLogger("raceme")

# -----------------------------------------------------------------------------
# Plausible numbers of examples of clients.
# -----------------------------------------------------------------------------


MOST_EXAMPLES = 2**53
"""Maximum number of examples: larger integers are not exact as floats."""
_TIMES_MEDIAN = 10.0
_STRETCH = 5.0
"""How far honest sizes may be from the median, in multiples of the quartiles' logarithmic distance
from it. For log-normal sizes with standard deviation 2, as skewed as any published, one size in
200,000 exceeds this bound together with the factor of ten."""


def largest_plausible_size(ordered: Sequence[int]) -> int:
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
        End of its back-off: it gets no work before this time.
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
        """Return the value of a label.

        ``id`` is the client's id; ``group`` is the true group unless the client has such a label.
        """
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

    def plausible_examples(self, client: str, stated: int | None = None) -> int:
        """Return a client's number of examples for weighting, limited to a plausible value.

        Parameters
        ----------
        stated : int, optional
            Stated number; by default that of its last update, before the first of its greeting.

        Returns
        -------
        int
            The stated number, at most :func:`raceme.core.clients.largest_plausible_size`.
        """
        if stated is None:
            stated = self.sizes.get(client, self.clients[client].num_examples)
        limit = self.largest_plausible()
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

    def largest_plausible(self) -> int:
        """Return the largest plausible number of examples."""
        return largest_plausible_size(self._ordered) if self._ordered else MOST_EXAMPLES

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
        """Update the fleet to match the online nodes.

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
                # Without an id: the departure of that client does not cause another greeting.
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
        Returns whether to withhold work from a client, given by its id, for now.
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
        """Return the clients that may get work now: no back-off, and no feature withholds work."""
        clients = (self._clients[name] for name in self._names)
        return self.not_held(client for client in clients if client.ready_at <= now)

    def not_held(self, clients: Iterable[Client]) -> list[Client]:
        """Return those of the clients, idle or not, from which no feature withholds work."""
        if self.holds is None:
            return list(clients)
        return [client for client in clients if not self.holds(client.client_id)]

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
