"""Samples of many clients in one tensor of a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raceme.training.models import Samples

_LEAST = 1024
"""Initial capacity in samples."""


class SampleStore:
    """Samples of clients on one device, released when no client holds them.

    Parameters
    ----------
    device : torch.device
        Device that holds the samples.

    Attributes
    ----------
    moves : int
        Number of times that all samples were moved, which invalidates earlier recorded steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offsets: weakref.WeakKeyDictionary[Samples, int] = weakref.WeakKeyDictionary()
        self._free: list[tuple[int, int]] = []
        self._shaped: Callable[[Tensor], Tensor] = torch.clone
        self._x = torch.empty(0)
        self._y = torch.empty(0)
        self.moves = 0

    def hold(self, samples: Sequence[Samples]) -> None:
        """Add samples, unless they are present."""
        new = [own for own in dict.fromkeys(samples) if own not in self._offsets]
        if not new:
            return
        places = [self._place(len(own)) for own in new]
        if None in places:
            for own, place in zip(new, places, strict=True):
                if place is not None:
                    self._free.append((place, len(own)))
            self._grow(new[0], sum(map(len, new)))
            places = [self._place(len(own)) for own in new]
        x = torch.cat([own.x for own in new]).to(self._device)
        y = torch.cat([own.y for own in new]).to(self._device)
        start = 0
        for own, place in zip(new, places, strict=True):
            assert place is not None, "there is room for all"
            end = start + len(own)
            self._x[place : place + len(own)] = x[start:end]
            self._y[place : place + len(own)] = y[start:end]
            start = end
            self._offsets[own] = place
            weakref.finalize(own, self._free.append, (place, len(own))).atexit = False
        self._shaped = new[0].shaped

    def _place(self, length: int) -> int | None:
        """Allocate the first free place of a length, if any."""
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                if free > length:
                    self._free[index] = start + length, free - length
                else:
                    del self._free[index]
                return start
        return None

    def _grow(self, like: Samples, more: int) -> None:
        """Enlarge the tensor by at least `more` samples."""
        self._free[:] = _merged(self._free)
        if any(free >= more for _, free in self._free):
            return
        former = len(self._y)
        size = former + max(former, more, _LEAST)
        x, y = self._x, self._y
        self._x = torch.zeros(size, *like.x.shape[1:], dtype=like.x.dtype, device=self._device)
        self._y = torch.zeros(size, dtype=like.y.dtype, device=self._device)
        if former:
            self._x[:former], self._y[:former] = x, y
        self._free.append((former, size - former))
        self._free[:] = _merged(self._free)
        self.moves += 1

    def __len__(self) -> int:
        """Return the capacity in samples."""
        return len(self._y)

    def offset(self, samples: Samples) -> int:
        """Return the index of the first one of held samples."""
        return self._offsets[samples]

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at some indices, in the indices' shape, as inputs of a network."""
        flat = indices.reshape(-1)
        x, y = self._shaped(self._x.index_select(0, flat)), self._y.index_select(0, flat)
        return x.view(*indices.shape, *x.shape[1:]), y.view(indices.shape)


def _merged(free: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent free places."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted(free):
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((start, length))
    return merged
