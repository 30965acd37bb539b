"""Similarities of clients, averaged over the times when they could be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _no_means() -> NDArray[np.float32]:
    return np.empty((0, 0), np.float32)


def _no_counts() -> NDArray[np.int64]:
    return np.empty((0, 0), np.int64)


@dataclass
class MeanSimilarity:
    """A running mean for every pair of clients.

    Attributes
    ----------
    position : dict[str, int]
        Row of each client.
    mean : NDArray[np.float32]
        Symmetric, diagonal 1; 0 for a pair that has never been compared. Shape (n, n).
    count : NDArray[np.int64]
        How often each pair has been compared. Shape (n, n).
    """

    position: dict[str, int] = field(default_factory=dict)
    mean: NDArray[np.float32] = field(default_factory=_no_means)
    count: NDArray[np.int64] = field(default_factory=_no_counts)

    def add(self, client: str) -> None:
        """Make room for a client that is new."""
        if client not in self.position:
            self.position[client] = len(self.position)
            self.mean = np.pad(self.mean, (0, 1))
            self.count = np.pad(self.count, (0, 1))
            self.mean[-1, -1] = self.count[-1, -1] = 1

    def take(
        self, first: Sequence[str], second: Sequence[str], values: NDArray[np.floating]
    ) -> None:
        """Take new similarities into the means.

        Parameters
        ----------
        first, second : Sequence[str]
            Clients; either the same twice, or such that no pair is among them twice.
        values : NDArray[np.floating]
            Shape (len(first), len(second)).
        """
        rows, columns = self._rows(first), self._rows(second)
        block = np.ix_(rows, columns)
        self.count[block] += 1
        self.mean[block] += (values - self.mean[block]) / self.count[block]
        self.count[np.ix_(columns, rows)] = self.count[block].T
        self.mean[np.ix_(columns, rows)] = self.mean[block].T
        np.fill_diagonal(self.mean, 1.0)

    def among(self, clients: Sequence[str]) -> NDArray[np.float32]:
        """Return the means between some clients, NaN where they have never been compared."""
        block = np.ix_(self._rows(clients), self._rows(clients))
        return np.where(self.count[block] > 0, self.mean[block], np.float32(np.nan))

    def to_group(self, client: str, group: Sequence[str]) -> float | None:
        """Return the mean over those of a group that the client has been compared with, if any."""
        row, others = self.position[client], self._rows([name for name in group if name != client])
        known = others[self.count[row, others] > 0]
        return float(self.mean[row, known].mean()) if len(known) else None

    def _rows(self, clients: Sequence[str]) -> NDArray[np.intp]:
        return np.array([self.position[client] for client in clients], np.intp)
