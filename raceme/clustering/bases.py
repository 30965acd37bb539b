"""What a client has changed: its model against the one that it started from."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field

from raceme.compat.spill import Shelf
from raceme.protocol.messages import Vector


@dataclass
class Bases:
    """Past models that clients are still training from; each version is stored once.

    Attributes
    ----------
    vectors : MutableMapping[str, Vector]
        The models, by a name of the version: ``<cluster>/<version>``.
    users : dict[str, int]
        Number of open tasks that started from each.
    """

    vectors: MutableMapping[str, Vector] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One of every client at work is too much for the memory of a large fleet.
        self.vectors = Shelf(self.vectors)

    def hold(self, name: str, vector: Vector) -> None:
        """Keep the model that a client is sent until its task is over."""
        if name not in self.vectors:
            self.vectors[name] = vector.copy()
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> None:
        """Note that a task is over; forget a model from which nobody trains any more."""
        if name in self.users:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name], self.vectors[name]
