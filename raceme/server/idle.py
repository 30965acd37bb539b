"""Who may be given work now: clients that are online, have no task and need no rest."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from raceme.server.fleet import Client

_TRIES = 20
"""Draws for each client that chance should need, before all are looked at instead."""


class Idle:
    """The clients that are online and without a task, in the order in which they got free.

    Parameters
    ----------
    names : dict[str, bool]
        Their ids, in that order; changed in place, so that it may be part of a state.
    clients : Mapping[str, Client]
        All clients, in order of greeting; each new one is added here before the next is greeted.
    """

    def __init__(self, names: dict[str, bool], clients: Mapping[str, Client]) -> None:
        self._names, self._clients = names, clients
        # Derived from all clients, whose order is part of the state: draws are the same after a
        # resumption.
        self._all = list(clients)
        self._known = set(self._all)
        self._resting = {name for name in names if clients[name].ready_at > 0}

    def __contains__(self, client: str) -> bool:
        return client in self._names

    def add(self, client: str) -> None:
        """Note that a client has nothing to do."""
        self._names[client] = True
        if client not in self._known:
            self._known.add(client)
            self._all.append(client)
        if self._clients[client].ready_at > 0:
            self._resting.add(client)

    def remove(self, client: str) -> None:
        """Forget a client that has work, or went offline."""
        self._names.pop(client, None)
        self._resting.discard(client)

    def ready(self, now: float) -> list[Client]:
        """Return those that need no rest."""
        clients = (self._clients[name] for name in self._names)
        return [client for client in clients if client.ready_at <= now]

    def draw(self, now: float, most: int, rng: np.random.Generator) -> list[Client]:
        """Return some of those that need no rest, drawn at random, each as likely as the others.

        Few of many are found by drawing from all clients until one is idle, which takes no longer
        the more there are.

        Parameters
        ----------
        now : float
            The time in seconds.
        most : int
            How many; if there are fewer, all of them.
        rng : numpy.random.Generator
            Draws.
        """
        count, idle = len(self._all), len(self._names)
        drawn: dict[str, Client] = {}
        if 2 * most < idle and count < idle * idle:
            for _ in range(_TRIES * most * math.ceil(count / idle)):
                name = self._all[rng.integers(count)]
                if name in self._names and (client := self._clients[name]).ready_at <= now:
                    drawn[name] = client
                if len(drawn) == most:
                    return list(drawn.values())
        others = [client for client in self.ready(now) if client.client_id not in drawn]
        order = rng.permutation(len(others))[: most - len(drawn)]
        return [*drawn.values(), *(others[index] for index in order)]

    def next_ready(self, now: float) -> float:
        """Return when the next resting client may be given work; infinity if none rests."""
        self._resting = {name for name in self._resting if self._clients[name].ready_at > now}
        return min((self._clients[name].ready_at for name in self._resting), default=math.inf)
