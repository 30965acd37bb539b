"""What clients' first steps from one common model say of who is like whom.

A probe is the direction in which a client takes the initial model w0 in a few mini-batches. Two
probes of the same client differ by chance alone: by the samples that they met. So every client has
two halves, the means of its odd and of its even probes, and only the half of one client is ever
compared with the *other* half of another: chance cancels out, and what a client agrees with itself
says how much of its directions is not chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.messages import BATCH_SIZE, COMPUTE_SCALE, LOCAL_STEPS, Vector, passes

HALVES = 2
_FEWEST_STEPS = 2
LEAST_RELIABILITY = 0.1
"""Agreement of a client with itself below which its probes say nothing."""


class Sketcher:
    """Shortens directions so that their cosines stay what they are, nearly.

    A count sketch (Charikar et al. 2002): every weight is added, with a random sign, to one of
    `size` numbers. A cosine is off by about 1/√size. What is not longer than twice that stays as
    it is.

    Parameters
    ----------
    size : int
        Numbers of a sketch; 0 for none.
    seed : int
        Decides signs and places.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._size, self._seed = size, seed
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        self._signs: NDArray[np.float32] = np.empty(0, np.float32)

    def direction(self, delta: Vector) -> Vector:
        """Return the direction of a change at unit length, shortened; zeros of no change.

        Parameters
        ----------
        delta : Vector
            The change. Shape (d,).

        Returns
        -------
        Vector
            Shape (size,), or (d,) where that is not much longer.
        """
        short = delta
        if self._size and len(delta) > 2 * self._size:
            if len(self._places) != len(delta):
                rng = np.random.default_rng(np.random.SeedSequence([self._seed, 0x5CE7C4]))
                self._places = rng.integers(self._size, size=len(delta))
                self._signs = rng.choice(np.array([-1.0, 1.0], np.float32), size=len(delta))
            signed = self._signs * delta
            sums = np.bincount(self._places, weights=signed, minlength=self._size)
            short = sums.astype(np.float32)
        length = float(np.linalg.norm(short))
        return np.asarray(short / length if length else np.zeros_like(short), np.float32)


@dataclass
class Probes:
    """The probes of all clients. Arrays have room for more clients than there are, n.

    Attributes
    ----------
    clients : list[str]
        Client ids; the position of a client is its index i. Length n.
    counts : NDArray[np.int64]
        Probes of each client that count.
    sums : NDArray[np.float32]
        Sums of the odd and of the even probes' directions. Shape (capacity, 2, size).
    agreement : NDArray[np.float32]
        M_ij = ½ (a_i·b_j + b_i·a_j), of the halves a and b at unit length; known between clients
        with two probes. Shape (capacity, capacity).
    """

    clients: list[str] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sums: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, HALVES, 0), np.float32))
    agreement: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        # Derived, row by row, from the sums.
        self._index = {client: index for index, client in enumerate(self.clients)}
        self._units = np.stack([_unit_rows(self.sums[:, half]) for half in range(HALVES)])

    # Questions.

    def count(self, client: str) -> int:
        """Return how many probes of a client count."""
        index = self._index.get(client)
        return 0 if index is None else int(self.counts[index])

    def is_known(self, client: str) -> bool:
        """Return whether a client has both halves."""
        return self.count(client) >= HALVES

    def is_clear(self, client: str) -> bool:
        """Return whether a client agrees with itself, so that it can be compared with others."""
        return self.is_known(client) and self.reliability(client) >= LEAST_RELIABILITY

    def clear(self) -> list[str]:
        """Return all clients that are clear, in the order in which they were first probed."""
        n = len(self.clients)
        agrees = self.agreement.diagonal()[:n] >= LEAST_RELIABILITY
        return [self.clients[i] for i in np.flatnonzero(agrees & (self.counts[:n] >= HALVES))]

    def reliability(self, client: str) -> float:
        """Return M_ii: the cosine of a client's two halves."""
        index = self._index[client]
        return float(self.agreement[index, index])

    def likeness(self, client: str, direction: Vector) -> float:
        """Return how far a new direction is the one that a client had: 1 if it is, but for chance.

        Its cosine to the mean of the halves, over what that is expected to be if nothing has
        changed: with halves of reliability r, √((1 + r) / 2) · √r.
        """
        index = self._index[client]
        reliability = max(self.reliability(client), LEAST_RELIABILITY)
        mean = self._units[:, index].sum(axis=0)
        length = float(np.linalg.norm(mean))
        if not length:
            return 1.0
        expected = reliability / np.sqrt((1.0 + reliability) / 2.0)
        return float(mean @ direction) / length / float(expected)

    def distances(self, clients: list[str]) -> NDArray[np.float64]:
        """Return 1 − M_ij / √(M_ii M_jj): 0 of clients alike but for chance, 1 of unrelated ones.

        Parameters
        ----------
        clients : list[str]
            Clear ones.

        Returns
        -------
        NDArray[np.float64]
            Symmetric, within [0, 2], zero on the diagonal. Shape (m, m).
        """
        rows = self.rows(clients)
        inner = self.agreement[np.ix_(rows, rows)].astype(np.float64)
        root = np.sqrt(np.maximum(inner.diagonal(), LEAST_RELIABILITY))
        distances = 1.0 - np.clip(inner / np.outer(root, root), -1.0, 1.0)
        np.fill_diagonal(distances, 0.0)
        return np.asarray(distances)

    def distances_from(self, client: str, others: list[str]) -> NDArray[np.float64]:
        """Return the distances of one client from others; see :meth:`distances`.

        A client with a single probe is taken to agree with itself as the median of the others does.

        Parameters
        ----------
        client : str
            One with a probe at least.
        others : list[str]
            Clear ones, at least one.
        """
        own, rows = self._index[client], self.rows(others)
        selves = np.maximum(self.agreement.diagonal()[rows], LEAST_RELIABILITY).astype(np.float64)
        if self.is_known(client):
            inner = self.agreement[own, rows].astype(np.float64)
            itself = max(self.reliability(client), LEAST_RELIABILITY)
        else:
            inner = self._units[:, rows].mean(axis=0) @ self._units[0, own]
            itself = float(np.median(selves))
        return np.asarray(1.0 - np.clip(inner / np.sqrt(selves * itself), -1.0, 1.0))

    def rows(self, clients: list[str]) -> NDArray[np.intp]:
        """Return the indices of clients."""
        return np.array([self._index[client] for client in clients], np.intp)

    # Verbs.

    def add(self, client: str, direction: Vector) -> None:
        """Add a probe to the half of its client that has fewer.

        Parameters
        ----------
        client : str
            Whose.
        direction : Vector
            At unit length. Shape (size,).
        """
        if client not in self._index:
            self._add_client(client, len(direction))
        i, n = self._index[client], len(self.clients)
        half = int(self.counts[i]) % HALVES
        self.sums[i, half] += direction
        self.counts[i] += 1
        self._units[half, i] = _unit_rows(self.sums[i, half][None, :])[0]
        if self.counts[i] >= HALVES:
            odd, even = self._units[0], self._units[1]
            row = (even[:n] @ odd[i] + odd[:n] @ even[i]) / np.float32(2.0)
            self.agreement[i, :n] = self.agreement[:n, i] = row

    def forget(self, client: str) -> None:
        """Take the probes of a client back: its data have changed."""
        i = self._index[client]
        self.counts[i] = 0
        self.sums[i] = 0.0
        self._units[:, i] = 0.0
        self.agreement[i, :] = self.agreement[:, i] = 0.0

    def _add_client(self, client: str, size: int) -> None:
        index = len(self.clients)
        self.clients.append(client)
        self._index[client] = index
        if index == len(self.counts):
            more = max(16, index)
            self.counts = np.pad(self.counts, (0, more))
            empty = np.zeros((more, HALVES, size), np.float32)
            sums = self.sums if index else np.empty((0, HALVES, size), np.float32)
            self.sums = np.concatenate([sums, empty])
            self.agreement = np.pad(self.agreement, (0, more))
            self._units = np.stack([_unit_rows(self.sums[:, half]) for half in range(HALVES)])


def settings_of_probe(
    settings: Mapping[str, object], examples: int, most: int
) -> dict[str, int | float]:
    """Return what a probe's message says beyond the run's settings.

    A tenth of an ordinary task's mini-batches, two at least; and what share of such a task's
    computation that is, which the simulator charges.

    Parameters
    ----------
    settings : Mapping
        The run's settings of local training.
    examples : int
        Number of the client's training samples.
    most : int
        Mini-batches at most; 0 for a whole task.
    """
    if not most:
        return {}
    size = settings.get(BATCH_SIZE, 1)
    whole = passes(settings, examples)
    batches = whole * examples / (size if isinstance(size, int) else 1)
    steps = min(most, max(_FEWEST_STEPS, round(batches / 10)))
    short = passes({**settings, LOCAL_STEPS: steps}, examples)
    return {LOCAL_STEPS: steps, COMPUTE_SCALE: min(1.0, short / whole)}


def _unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, np.float32(1.0)), np.float32)
