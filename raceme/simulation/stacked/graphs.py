"""Steps that are recorded once and replayed: CUDA graphs, or the functions themselves.

For a small network, a GPU needs less time for a step than Python needs to start its operations. A
CUDA graph starts all of them at once. A recorded step reads and writes fixed memory with fixed
shapes, so numbers of clients are rounded up to a few values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("raceme")

Step = Callable[[], None]
"""A step, which reads and writes tensors at fixed addresses."""

_WARM_UPS = 3
_EIGHTH = 8
"""Number of clients above which rounding adds at most a quarter."""


class Recorder(Protocol):
    """Makes replays of steps."""

    def rows(self, count: int) -> int:
        """Return the number of clients for which to record a step of `count` clients."""
        ...

    def record(self, step: Step, changed: Sequence[Tensor]) -> Step:
        """Return a replay of a step.

        Parameters
        ----------
        step : Callable
            The step.
        changed : Sequence[Tensor]
            The tensors that the step changes; recording restores them.
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
        # Libraries allocate memory at their first calls, which must not be part of a graph.
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
