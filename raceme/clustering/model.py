"""A model on the server: it owns its numbers and its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raceme.protocol.messages import Vector

_BLOCK = 1 << 16
"""Elements that are mixed at a time: as much as stays in a core's cache between the operations."""


class NonFiniteModelError(ValueError):
    """A change would leave NaN or infinity in a model; the model is as it was before."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model on the server. Only its own verbs change it, and each change is a new version.

    Attributes
    ----------
    vector : Vector
        The weights, flat; read-only. A new model takes the array that it is made from over.
        Shape (d,).
    version : int
        Number of changes since the start, its ancestors' included.
    """

    vector: Vector
    version: int = 0

    def __post_init__(self) -> None:
        own = np.require(self.vector, np.float32, ["W", "C"])
        shown = own.view()
        shown.flags.writeable = False
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "vector", shown)

    @property
    def _numbers(self) -> Vector:
        own: Vector = self.__dict__["_own"]
        return own

    def _next(self) -> None:
        object.__setattr__(self, "version", self.version + 1)

    def copy(self) -> Model:
        """Return a model of its own with the same numbers and version."""
        return Model(self.vector.copy(), self.version)

    def mix(self, w_i: Vector, alpha: float, where: np.ndarray | None = None) -> None:
        """Mix an update in: w ← α w_i + (1 − α) w.

        Written as w + α (w_i − w), block by block, so that memory is gone through once and no
        temporary array of the model's size is needed. A share of at most 1 keeps numbers of the
        size that :meth:`raceme.protocol.messages.ModelSpec.unpack` lets in at that size.

        Parameters
        ----------
        w_i : Vector
            The client's model. Shape (d,).
        alpha : float
            Its share α in the new model, in [0, 1].
        where : NDArray[np.bool_], optional
            Weights that are mixed; the others stay. Shape (d,).

        Raises
        ------
        ValueError
            α is no share.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"the share of an update must be between 0 and 1, got {alpha:g}")
        w, share = self._numbers, np.float32(alpha)
        step = np.empty(min(_BLOCK, len(w)), np.float32)
        for start in range(0, len(w), _BLOCK):
            block = w[start : start + _BLOCK]
            change = step[: len(block)]
            np.subtract(w_i[start : start + _BLOCK], block, out=change)
            change *= share
            if where is not None:
                change *= where[start : start + _BLOCK]
            block += change
        self._next()

    def move(self, step: Vector) -> None:
        """Take a step: w ← w + step.

        Raises
        ------
        NonFiniteModelError
            The result would not be finite.
        """
        self.replace(self.vector + step)

    def replace(self, vector: Vector) -> None:
        """Take other weights: w ← vector.

        Raises
        ------
        NonFiniteModelError
            They are not finite.
        """
        _check_finite(vector)
        self._numbers[...] = vector
        self._next()

    def average(self, vectors: Sequence[Vector], weights: Sequence[float]) -> None:
        """Become the weighted mean of clients' models."""
        shares = np.asarray(weights, np.float64) / sum(weights)
        self.replace(np.asarray(shares @ np.stack(vectors)))

    def copy_from(self, w_i: Vector, where: np.ndarray) -> None:
        """Take some numbers over as they are: counters, of which a mean has no meaning.

        It belongs to the change that was made last, and is no version of its own.
        """
        self._numbers[where] = w_i[where]


def _check_finite(vector: np.ndarray) -> None:
    # NaN and infinity survive in the squared norm; a finite vector can overflow it.
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = vector.astype(np.float32, copy=False)
        if not np.isfinite(np.dot(numbers, numbers)) and not np.isfinite(numbers).all():
            raise NonFiniteModelError("the model would hold NaN or infinity")
