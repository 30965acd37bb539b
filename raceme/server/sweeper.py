"""Asking clients for a test each: when one is next free, before it trains again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from logging import getLogger
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from raceme.protocol.events import UpdateRejected
from raceme.protocol.stated import StatementError
from raceme.protocol.timeline import Timeline, push
from raceme.server.idle import Idle
from raceme.server.interface import Questions

log = getLogger("raceme")

_BYTES = 1 << 28
"""Models under way at a time where all are asked at once, should each client have its own."""
_LAST_SECONDS = 60.0
"""How long the last tests of a run wait for clients that are still busy."""


class OpenTests(Protocol):
    """Tests under way.

    Attributes
    ----------
    waiting : dict[str, int]
        Clients that have not been asked yet.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    """

    waiting: dict[str, int]
    open: dict[str, str]


class Sweeper(ABC):
    """Asks every client of a sweep once, and takes the answers.

    Parameters
    ----------
    method : Questions
        Whose models are tested.
    grid : Grid
        Where the clients are.
    clock : Timeline
        The grid's.
    ttl : float
        Time to live of the messages, in seconds.
    """

    def __init__(self, method: Questions, grid: Grid, clock: Timeline, ttl: float) -> None:
        self._method, self._grid, self._clock, self._ttl = method, grid, clock, ttl
        self._progress = method.progress

    @property
    @abstractmethod
    def sweep(self) -> OpenTests | None:
        """The tests under way; None if there are none."""

    def _prepare(self, clients: Collection[str]) -> None:  # noqa: B027
        """Make ready what the messages to some clients are made of, as it is at this moment."""

    @abstractmethod
    def _message(self, client: str) -> Message:
        """Make the message that asks a client, who is online."""

    @abstractmethod
    def _score(self, client: str, reply: Message) -> None:
        """Take a client's answer, if it is one.

        Raises
        ------
        StatementError
            It states what cannot be.
        """

    def open_ids(self) -> Collection[str]:
        """Return the ids of messages without an answer."""
        return () if self.sweep is None else self.sweep.open.keys()

    def ask(self, idle: Idle) -> None:
        """Ask the clients that have time and have not been asked yet."""
        if self.sweep is None:
            return
        for client in list(self.sweep.waiting):
            if client in idle:
                if self._push(client):
                    idle.remove(client)
            elif self._method.dispatch.invited(client):
                self._push(client)

    def take(self, message_id: str, reply: Message, idle: Idle) -> None:
        """Take the answer to a message that is open, and let its client be idle."""
        progress = self._progress
        assert self.sweep is not None, "a message was asked about"
        client = self.sweep.open.pop(message_id)
        # One that holds an invitation has answered meanwhile, and holds it still.
        works = any(task.client == client for task in progress.in_flight.values())
        if not works and progress.fleet.clients[client].node_id is not None:
            idle.add(client)
        self._take_score(client, reply)

    def drop(self, client: str) -> None:
        """Wait no more for a client that is gone."""
        if self.sweep is not None:
            self.sweep.waiting.pop(client, None)
            kept = {key: name for key, name in self.sweep.open.items() if name != client}
            self.sweep.open = kept

    def _ask_at_once(self) -> None:
        """Ask everyone, where that costs no time: as many at a time as there is memory for."""
        assert self.sweep is not None, "tests are under way"
        by_node, waiting = self._progress.fleet.by_node, list(self.sweep.waiting)
        self.sweep.waiting = {}
        count = max(1, _BYTES // max(1, self._method.spec.num_bytes))
        for start in range(0, len(waiting), count):
            asked = waiting[start : start + count]
            self._prepare(asked)
            for reply in self._grid.send_and_receive([self._message(name) for name in asked]):
                client = by_node.get(reply.metadata.src_node_id)
                if client is not None:
                    self._take_score(client, reply)

    def _wait(self) -> None:
        """Ask everyone who is left, busy or not, and wait a while."""
        sweep, until = self.sweep, self._clock.now() + min(_LAST_SECONDS, self._ttl)
        assert sweep is not None, "tests are under way"
        for client in list(sweep.waiting):
            self._push(client)
        while sweep.open and self._clock.now() < until:
            for reply in self._clock.wait(sweep.open.keys(), until):
                self._take_score(sweep.open.pop(reply.metadata.reply_to_message_id), reply)
        sweep.open = {}

    def _take_score(self, client: str, reply: Message) -> None:
        """Take a client's answer; count and report one that states what cannot be."""
        try:
            self._score(client, reply)
        except StatementError as error:
            self._progress.rejected += 1
            log.warning("The test of %s was rejected: %s", client, error)
            now = self._clock.now()
            self._method.report(UpdateRejected(now, client, str(error), now))

    def _push(self, client: str) -> bool:
        """Ask one client; return whether the grid took the message."""
        assert self.sweep is not None, "tests are under way"
        del self.sweep.waiting[client]
        message_id = push(self._grid, self._clock, self._message(client))
        if message_id:
            self.sweep.open[message_id] = client
        return message_id is not None
