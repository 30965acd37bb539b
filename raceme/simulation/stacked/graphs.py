"""Steps that are recorded once and replayed: CUDA graphs, or the functions themselves.

A step of a small network takes a GPU less time than Python takes to start its operations. A CUDA
graph starts all of them at once. A recorded step reads and writes fixed memory, and its shapes do
not change: numbers of clients are rounded up to a few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("raceme")

Step = Callable[[], None]
"""Reads and writes tensors that stay where they are."""

_WARM_UPS = 3
_EIGHTH = 8
"""Above so many, numbers of clients are rounded up by at most a quarter."""


class Recorder(Protocol):
    """Makes replays of steps."""

    def rows(self, count: int) -> int:
        """Return for how many clients to record a step that `count` of them take."""
        ...

    def record(self, step: Step, changed: Sequence[Tensor]) -> Step:
        """Return a replay of a step.

        Parameters
        ----------
        step : Callable
            The step.
        changed : Sequence[Tensor]
            The tensors that it changes, which are left as they are.
        """
        ...


class Eager:
    """Replays a step by calling it."""

    def rows(self, count: int) -> int:
        """Return `count`."""
        return count

    def record(self, step: Step, changed: Sequence[Tensor]) -> Step:
        """Return the step."""
        return step


class CudaGraphs:
    """Records a network's steps as CUDA graphs, unless one cannot be recorded."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._is_on = True

    def rows(self, count: int) -> int:
        """Return the next one of 1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on."""
        return rounded_up(count) if self._is_on else count

    def record(self, step: Step, changed: Sequence[Tensor]) -> Step:
        """Return the replay of a graph."""
        if not self._is_on:
            return step
        kept = [values.clone() for values in changed]
        try:
            return self._captured(step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._is_on = False
            reason = str(error).strip().partition("\n")[0]
            log.warning("Steps are not recorded as CUDA graphs and take longer: %s", reason)
            return step
        finally:
            for values, former in zip(changed, kept, strict=True):
                values.copy_(former)

    def _captured(self, step: Step) -> Step:
        # Libraries allocate what they need at the first calls, which a graph must not contain.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        # All graphs run one after another, and share their memory.
        self._pool = self._pool or graph.pool()
        return graph.replay


def rounded_up(count: int) -> int:
    """Return the next power of two; above 8 also 5/4, 6/4 or 7/4 of one."""
    if count <= _EIGHTH:
        return 1 << (count - 1).bit_length()
    quarter = (1 << (count - 1).bit_length()) // 8
    return -(-count // quarter) * quarter
