"""A client's samples as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raceme.datasets.source import Labels

_GATHERED = 64
"""Mini-batches whose samples are gathered at once: less work per step, and bounded memory."""


class Samples:
    """Inputs and labels as tensors.

    Parameters
    ----------
    x : NDArray[np.float32]
        Inputs, shape (n, ...).
    y : Labels
        Labels, shape (n,): classes, or quantities.
    channels_last : bool
        Keep inputs of shape (n, channels, height, width) in the order of memory that
        convolutions work on fastest.
    accelerator : str
        Where they are kept: where their network computes.
    """

    def __init__(
        self,
        x: NDArray[np.float32],
        y: Labels,
        channels_last: bool = False,
        accelerator: str = "cpu",
    ) -> None:
        self._channels_last = channels_last and x.ndim == 4
        # Kept as (n, height, width, channels): what is cut out of that is "channels last", which
        # selecting from a tensor that merely has such strides would lose. numpy rather than torch
        # brings it into this order, because with a single channel torch takes it to be so already
        # and keeps strides that its kernels do not recognise.
        values = np.array(np.moveaxis(x, 1, -1), order="C") if self._channels_last else x
        self.x = torch.from_numpy(np.ascontiguousarray(values)).to(accelerator)
        self.y = torch.from_numpy(np.ascontiguousarray(y)).to(accelerator)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """Return the samples of several parts, at least one, in their order. Copies."""
        if len(parts) == 1:
            return parts[0]
        whole = cls.__new__(cls)
        whole._channels_last = parts[0]._channels_last
        whole.x = torch.cat([part.x for part in parts])
        whole.y = torch.cat([part.y for part in parts])
        return whole

    def divided(self, count: int, rng: np.random.Generator) -> tuple[Samples, Samples]:
        """Return all but `count` samples, in their order, and those, drawn at random. Copies."""
        taken = np.zeros(len(self), bool)
        taken[rng.choice(len(self), count, replace=False)] = True
        return self._where(~taken), self._where(taken)

    def with_labels(self, y: Labels) -> Samples:
        """Return the same inputs, not copied, with other labels, shape (n,)."""
        other = Samples.__new__(Samples)
        other._channels_last, other.x = self._channels_last, self.x
        other.y = torch.from_numpy(np.ascontiguousarray(y)).to(self.y.device)
        return other

    def _where(self, wanted: NDArray[np.bool_]) -> Samples:
        part = Samples.__new__(Samples)
        part._channels_last = self._channels_last
        positions = torch.from_numpy(np.flatnonzero(wanted)).to(self.y.device)
        part.x, part.y = self.x.index_select(0, positions), self.y.index_select(0, positions)
        return part

    def __len__(self) -> int:
        return len(self.y)

    def mini_batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples at `order`, `size` at a time."""
        for block in torch.split(order, size * _GATHERED):
            x, y = self.shaped(self.x.index_select(0, block)), self.y.index_select(0, block)
            yield from zip(torch.split(x, size), torch.split(y, size), strict=True)

    def slices(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples in order, `size` at a time, without copying."""
        return zip(torch.split(self.shaped(self.x), size), torch.split(self.y, size), strict=True)

    def shaped(self, x: Tensor) -> Tensor:
        """Return inputs cut out of :attr:`x` as a network takes them."""
        return x.permute(0, 3, 1, 2) if self._channels_last else x
