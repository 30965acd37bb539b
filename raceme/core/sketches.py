"""Short sketches of the directions of updates, made by servers or by clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import unit_rows
from raceme.core.messages import Vector

SIZE = 1024
"""Size of a sketch."""


class Sketcher:
    """Shortens directions, which nearly keeps their cosines.

    A count sketch (Charikar et al. 2002): every weight is added, with a random sign, to one of
    1,024 numbers. The error of a cosine is about 1/32. Models of up to 2,048 weights are kept
    whole.

    Parameters
    ----------
    size : int
        Length of a sketch, by default 1,024; models of up to twice as many weights are kept whole.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        self._signs: NDArray[np.float32] = np.empty(0, np.float32)

    def direction(self, delta: Vector) -> Vector:
        """Return the sketch of a change's direction, at unit length; zeros if nothing changed.

        Parameters
        ----------
        delta : Vector
            Change of the model's weights. Shape (d,).

        Returns
        -------
        Vector
            Shape (size,), or (d,) for a small model.
        """
        short = delta
        if len(delta) > 2 * self.size:
            if len(self._places) != len(delta):
                rng = np.random.default_rng(np.random.SeedSequence([0, 0x5CE7C4]))
                self._places = rng.integers(self.size, size=len(delta))
                self._signs = rng.choice(np.array([-1.0, 1.0], np.float32), size=len(delta))
            sums = np.bincount(self._places, weights=self._signs * delta, minlength=self.size)
            short = sums.astype(np.float32)
        return np.asarray(unit_rows(short[None, :])[0])

    def length(self, weights: int) -> int:
        """Return the length of the sketch of a model with that many weights."""
        return self.size if weights > 2 * self.size else weights
