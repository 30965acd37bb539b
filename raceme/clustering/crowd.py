"""Clients of a fleet too large to compare pair by pair: their latest models, short.

Some clients, drawn at random, stand for all: only they are compared with one another. Of every
client the latest model is kept as a sketch, and a client goes where those go, of the ones that
stand for all, that its own sketch is nearest to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from raceme.protocol.messages import Vector

_NEIGHBOURS = 10
"""Nearest sketches that decide together."""


@dataclass
class Crowd:
    """Latest models of clients, as sketches. Arrays have room for more clients than there are, n.

    Attributes
    ----------
    clients : list[str]
        Client ids in order of arrival; length n.
    sketches : NDArray[np.float32]
        Distances between rows are, nearly, those between models. Shape (capacity, c).
    """

    clients: list[str] = field(default_factory=list)
    sketches: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        self._rows = {client: row for row, client in enumerate(self.clients)}

    def __contains__(self, client: str) -> bool:
        return client in self._rows

    def note(self, client: str, sketch: Vector) -> None:
        """Keep a client's latest model."""
        row = self._rows.get(client)
        if row is None:
            row = self._rows[client] = len(self.clients)
            self.clients.append(client)
            if row == len(self.sketches):
                more = np.zeros((max(16, row // 2), len(sketch)), np.float32)
                self.sketches = np.concatenate([self.sketches, more]) if row else more
        self.sketches[row] = sketch

    def of(self, clients: Iterable[str]) -> NDArray[np.float32]:
        """Return the sketches of clients. Shape (m, c)."""
        return self.sketches[[self._rows[client] for client in clients]]

    def nearest(
        self, sketches: NDArray[np.float32], known: Sequence[str], labels: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return for each sketch the label that most of its nearest neighbours have.

        Parameters
        ----------
        sketches : NDArray[np.float32]
            Shape (m, c).
        known : Sequence[str]
            Clients in question as neighbours, at least one.
        labels : Sequence[int]
            Theirs.
        """
        vote = KNeighborsClassifier(min(_NEIGHBOURS, len(known)), algorithm="brute")
        vote.fit(self.of(known), np.asarray(labels))
        return np.asarray(vote.predict(sketches), np.int64)
