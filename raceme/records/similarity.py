"""Similarities of clients, stored with the run: ``similarity.npz``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raceme.core.errors import UserError
from raceme.core.files import atomic_write
from raceme.datasets.source import read_arrays
from raceme.records.folder import SIMILARITY

MOST_CLIENTS = 1000
"""Maximum number of stored clients, evenly spread: at most 4 MB."""


@dataclass(frozen=True)
class Similarity:
    """Similarities of clients, or of some clients of a large fleet.

    Attributes
    ----------
    clients : tuple of str
        Their ids, in the order of the matrix.
    matrix : ndarray of float32
        NaN where not known. Shape (n, n).
    of : int
        Number of all clients known to the strategy.
    """

    clients: tuple[str, ...]
    matrix: NDArray[np.float32]
    of: int

    @classmethod
    def thinned(
        cls, clients: list[str], matrix: NDArray[np.floating], most: int = MOST_CLIENTS
    ) -> Self:
        """Keep at most `most` clients, evenly spread over the given order."""
        chosen = evenly_spread(len(clients), most)
        kept = np.asarray(matrix[np.ix_(chosen, chosen)], np.float32)
        return cls(tuple(clients[index] for index in chosen), kept, len(clients))

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, atomically and reproducibly."""
        with atomic_write(folder / SIMILARITY) as path, path.open("wb") as file:
            np.savez_compressed(
                file,
                clients=np.array(self.clients, np.str_),
                similarity=self.matrix,
                of=np.int64(self.of),
            )


def evenly_spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of `count` indices, evenly spread, first and last included."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def read_similarity(folder: Path) -> Similarity | None:
    """Read the file of :meth:`Similarity.save`; None if missing.

    Raises
    ------
    UserError
        The file is damaged.
    """
    path = folder / SIMILARITY
    if not path.is_file():
        return None
    try:
        stored = read_arrays(path, ("clients", "similarity", "of"))
        clients, matrix, of = stored["clients"], stored["similarity"], stored["of"]
        n = len(clients)
        if clients.dtype.kind != "U" or matrix.shape != (n, n) or matrix.dtype.kind != "f":
            raise ValueError("its arrays do not fit each other")
        return Similarity(tuple(clients.tolist()), np.asarray(matrix, np.float32), int(of))
    # numpy raises various exceptions for foreign files.
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}.") from None
