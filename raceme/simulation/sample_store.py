"""Samples of many clients on one device, for clients that are stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from raceme.training import Samples


class SampleStore:
    """Samples of many clients on one device, one client's after another's.

    Parameters
    ----------
    device : torch.device
        Where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Samples] = {}
        self._offsets: dict[str, int] = {}
        self._shaped: Callable[[Tensor], Tensor] = torch.clone
        self._x = torch.empty(0)
        self._y = torch.empty(0)

    def hold(self, samples: Mapping[str, Samples]) -> None:
        """Hold the samples of clients, by name, besides those of other clients that are there.

        Other samples of a client, as it has after its data have changed, replace its former ones.
        """
        new = {name: own for name, own in samples.items() if self._held.get(name) is not own}
        if not new:
            return
        for name in list(new):
            held = self._held.get(name)
            if held is not None and len(held) == len(new[name]):
                self._held[name] = new.pop(name)
                self._write(name)
        if new:
            self._place({**self._held, **new})

    def _write(self, name: str) -> None:
        """Write a client's samples over its former ones, of which there were as many."""
        own, start = self._held[name], self._offsets[name]
        self._x[start : start + len(own)] = own.x
        self._y[start : start + len(own)] = own.y

    def _place(self, samples: dict[str, Samples]) -> None:
        """Put all samples one after another; what stays in its place is not sent again."""
        kept = 0
        for name, own in self._held.items():
            if samples[name] is not own:
                break
            kept += len(own)
        xs, ys = ([self._x[:kept]], [self._y[:kept]]) if kept else ([], [])
        offset, self._held = 0, samples
        for name, own in samples.items():
            self._offsets[name] = offset
            offset += len(own)
            if offset > kept:
                xs.append(own.x.to(self._device))
                ys.append(own.y.to(self._device))
            self._shaped = own.shaped
        self._x, self._y = torch.cat(xs), torch.cat(ys)

    def offset(self, client: str) -> int:
        """Return where a client's samples begin."""
        return self._offsets[client]

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples, in the shape of their indices, as a network takes them."""
        flat = indices.reshape(-1)
        x, y = self._shaped(self._x.index_select(0, flat)), self._y.index_select(0, flat)
        return x.view(*indices.shape, *x.shape[1:]), y.view(indices.shape)
