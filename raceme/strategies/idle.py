"""Who may be given work now: clients that are online, have no task and need no rest."""

from __future__ import annotations

import math

import numpy as np

from raceme.strategies.fleet import Client


class Idle:
    """The clients that are online and without a task, in the order in which they got free."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def add(self, client: Client) -> None:
        """Note that a client has nothing to do."""
        self._clients[client.client_id] = client

    def remove(self, client_id: str) -> None:
        """Forget a client that went offline."""
        self._clients.pop(client_id, None)

    def clear(self) -> None:
        """Forget everybody."""
        self._clients.clear()

    def names(self) -> list[str]:
        """Return their ids, in the order in which they got free."""
        return list(self._clients)

    def take(self, now: float, limit: int | None, rng: np.random.Generator) -> list[Client]:
        """Take out the clients that get work now.

        Parameters
        ----------
        now : float
            The time; who rests longer stays.
        limit : int or None
            Give work to so many at most, drawn at random; None stands for all.
        rng : numpy.random.Generator
            Draws them.
        """
        ready = [client for client in self._clients.values() if client.ready_at <= now]
        if limit is not None:
            ready = [ready[index] for index in rng.permutation(len(ready))[: max(0, limit)]]
        for client in ready:
            del self._clients[client.client_id]
        return ready

    def next_ready(self, now: float) -> float:
        """Return when the next resting client may be given work; infinity if none rests."""
        times = (client.ready_at for client in self._clients.values())
        return min((time for time in times if time > now), default=math.inf)
