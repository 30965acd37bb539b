"""Models measured on data that the server has: proxy sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.messages import Vector


class Probe(Protocol):
    """Returns the losses of models on the server's own samples.

    How a loss is computed is not the method's concern: it is given this function.

    Attributes
    ----------
    sets : int
        How many proxy sets there are.
    """

    @property
    def sets(self) -> int:
        """How many proxy sets there are."""
        ...

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Measure models.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Which proxy set, from 0: a method may have one per cluster.

        Returns
        -------
        NDArray[np.float32]
            Loss of each sample under each model, shape (models, samples).
        """
        ...
