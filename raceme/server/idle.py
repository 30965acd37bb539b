"""Who may be given work now: clients that are online, have no task and need no rest."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raceme.server.fleet import Client


class Idle:
    """The clients that are online and without a task, in the order in which they got free.

    Parameters
    ----------
    names : dict[str, bool]
        Their ids, in that order; changed in place, so that it may be part of a state.
    clients : Mapping[str, Client]
        All clients.
    """

    def __init__(self, names: dict[str, bool], clients: Mapping[str, Client]) -> None:
        self._names, self._clients = names, clients

    def __contains__(self, client: str) -> bool:
        return client in self._names

    def add(self, client: str) -> None:
        """Note that a client has nothing to do."""
        self._names[client] = True

    def remove(self, client: str) -> None:
        """Forget a client that has work, or went offline."""
        self._names.pop(client, None)

    def ready(self, now: float) -> list[Client]:
        """Return those that need no rest."""
        clients = (self._clients[name] for name in self._names)
        return [client for client in clients if client.ready_at <= now]

    def next_ready(self, now: float) -> float:
        """Return when the next resting client may be given work; infinity if none rests."""
        times = (self._clients[name].ready_at for name in self._names)
        return min((time for time in times if time > now), default=math.inf)
