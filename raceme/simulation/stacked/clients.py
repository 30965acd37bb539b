"""The concurrent work of many clients, whose computations are collected and done together.

Each client's work runs in a thread of its own, one thread at a time. It is suspended when it needs
to train, test or differentiate a model; once all work is suspended, computations of one kind are
done together. So every kind of work can be stacked, whatever else it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from raceme.core.training_settings import TrainingSettings
from raceme.simulation.stacked.training import (
    Call,
    Differentiated,
    Differentiation,
    Stack,
    StackedModel,
    StackedResult,
    Test,
    Training,
)
from raceme.training.local import ENGINE, Term
from raceme.training.models import Network, Samples

Result = TypeVar("Result")


class NotStackedError(BaseException):
    """Ends work whose network cannot be stacked; ``except Exception`` does not catch it."""


class CancelledError(BaseException):
    """Ends work that is no longer needed."""


# -----------------------------------------------------------------------------
# Work that can be suspended.
# -----------------------------------------------------------------------------


class Suspendable(Generic[Result]):
    """Work that waits for the results of calls.

    Parameters
    ----------
    work : Callable
        The work, called with this object, for :meth:`ask`.
    threads : ThreadPoolExecutor
        Pool of threads, with at least one thread per work.

    Attributes
    ----------
    call : Call or None
        The call that the work waits for; None once it is done.
    result : object
        Result of the work.
    """

    def __init__(
        self, work: Callable[[Suspendable[Result]], Result], threads: ThreadPoolExecutor
    ) -> None:
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[Call | None, BaseException | None]] = SimpleQueue()
        self.call: Call | None = None
        self.result: Result | None = None

        def run() -> None:
            try:
                self.result = work(self)
            except BaseException as error:
                self._outbox.put((None, error))
            else:
                self._outbox.put((None, None))

        threads.submit(run)
        self._wait()

    def ask(self, call: Call) -> Any:
        """Suspend the work until a call has a result, and return the result."""
        self._outbox.put((call, None))
        result = self._inbox.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def resume(self, result: object) -> None:
        """Continue with the result of the call, or raise an error in the work, up to the next call.

        Raises
        ------
        BaseException
            Any exception of the work.
        """
        self._inbox.put(result)
        self._wait()

    def cancel(self) -> None:
        """End suspended work."""
        if self.call is not None:
            try:
                self.resume(CancelledError())
            except CancelledError:
                self.call = None

    def _wait(self) -> None:
        self.call, error = self._outbox.get()
        if error is not None:
            raise error


# -----------------------------------------------------------------------------
# One client's engine.
# -----------------------------------------------------------------------------


class ClientEngine:
    """Suspends a client's work at its computations; see :class:`raceme.training.local.Engine`.

    Parameters
    ----------
    work : Suspendable
        The client's work.
    stack : Stack
        Determines which networks can be stacked.
    alone_elsewhere : bool
        Whether to end the work by :class:`NotStackedError` if its network cannot be stacked.
    """

    def __init__(self, work: Suspendable[Any], stack: Stack, alone_elsewhere: bool) -> None:
        self._work, self._stack, self._elsewhere = work, stack, alone_elsewhere

    def __enter__(self) -> ClientEngine:
        """Set the engine of this thread."""
        self._token = ENGINE.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the engine of this thread."""
        ENGINE.reset(self._token)

    def train(
        self,
        network: Network,
        samples: Samples,
        settings: TrainingSettings,
        rng: np.random.Generator,
        terms: Sequence[Term],
        weights: Tensor | None,
    ) -> float | None:
        """Train; return the mean loss."""
        if not self._is_stacked(network, samples.shaped(samples.x[:1])):
            return None
        call = Training.of(network, samples, settings, rng, terms, weights)
        if call is None:
            return None
        trained: StackedResult = self._ask(network, call)
        trained.model.load(network)
        return trained.loss

    def measure(self, network: Network, samples: Samples) -> tuple[Tensor, Tensor] | None:
        """Return loss and score of each sample in a test, both of shape (n,)."""
        if not self._is_stacked(network, samples.shaped(samples.x[:1])):
            return None
        call = Test(network, StackedModel.of(network), samples)
        measured: tuple[Tensor, Tensor] = self._ask(network, call)
        call.model.load(network)
        return measured

    def differentiate(
        self, network: Network, x: Tensor, y: Tensor, weights: Tensor | None
    ) -> Tensor | None:
        """Compute the gradient of a mini-batch; return its mean loss."""
        if not self._is_stacked(network, x[:1]):
            return None
        mode, random = network.module.training, torch.get_rng_state()
        call = Differentiation(network, StackedModel.of(network), x, y, weights, mode, random)
        done: Differentiated = self._ask(network, call)
        done.model.load(network)
        network.gradient.copy_(done.gradient)
        torch.set_rng_state(done.random)
        return done.loss

    def _is_stacked(self, network: Network, x: Tensor) -> bool:
        if not len(x):
            return False
        if self._stack.network(network, x) is not None:
            return True
        if self._elsewhere:
            raise NotStackedError
        return False

    def _ask(self, network: Network, call: Call) -> Any:
        mode = network.module.training
        result = self._work.ask(call)
        if network.module.training != mode:
            network.module.train(mode)
        return result
