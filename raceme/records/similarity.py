"""How alike the clients are, kept with the run: ``similarity.npz``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raceme.config.errors import UserError
from raceme.datasets.archive import read_arrays
from raceme.records.files import atomic_write

FILE_NAME = "similarity.npz"
MOST_CLIENTS = 1000
"""Of larger fleets so many clients are kept, evenly spread: the file has at most 4 MB."""


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
        Number of all clients that the strategy knew.
    """

    clients: tuple[str, ...]
    matrix: NDArray[np.float32]
    of: int

    @classmethod
    def thinned(
        cls, clients: list[str], matrix: NDArray[np.floating], most: int = MOST_CLIENTS
    ) -> Self:
        """Keep `most` clients at the most, evenly spread over the given order."""
        chosen = np.arange(len(clients))
        if len(clients) > most:
            chosen = np.linspace(0, len(clients) - 1, most).round().astype(int)
        kept = np.asarray(matrix[np.ix_(chosen, chosen)], np.float32)
        return cls(tuple(clients[index] for index in chosen), kept, len(clients))

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, atomically; the same one gives the same bytes."""
        with atomic_write(folder / FILE_NAME) as path, path.open("wb") as file:
            np.savez_compressed(
                file,
                clients=np.array(self.clients, np.str_),
                similarity=self.matrix,
                of=np.int64(self.of),
            )


def read_similarity(folder: Path) -> Similarity | None:
    """Read what :meth:`Similarity.save` has written; None if there is no such file.

    Raises
    ------
    UserError
        The file is damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        stored = read_arrays(path, ("clients", "similarity", "of"))
        clients, matrix, of = stored["clients"], stored["similarity"], stored["of"]
        n = len(clients)
        if clients.dtype.kind != "U" or matrix.shape != (n, n) or matrix.dtype.kind != "f":
            raise ValueError("its arrays do not fit each other")
        return Similarity(tuple(clients.tolist()), np.asarray(matrix, np.float32), int(of))
    # numpy raises whatever it comes across first in a file that is not its own.
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}.") from None
