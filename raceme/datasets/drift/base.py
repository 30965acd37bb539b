"""What a drift generator is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.dealt import Dealt
from raceme.datasets.drift.schedule import Schedule
from raceme.datasets.source import ClientData, generator

State = TypeVar("State")
_KEPT = 4
"""States kept by an :class:`Evolution`: tasks in flight are of few different steps."""


@dataclass(frozen=True)
class DriftOptions:
    """What every drift reads."""

    drift_at: str | None = option(
        None, "when the data change: '60s, 120s', '500 updates', 'every round', …"
    )
    drift_seed: int | None = option(None, "seed of the drift (auto: that of the run)", low=0)


class Drift:
    """How clients' data change from step to step. A generator is a subclass.

    What it gives is a pure function of the data as dealt out, its options, its seed, the client
    and the step, so that any process on any machine makes the same.

    Parameters
    ----------
    dealt : Dealt
        All clients' data as they were dealt out.
    options : Any
        An instance of :attr:`options_type`.

    Attributes
    ----------
    options_type : type or None
        The frozen dataclass of the drift's own options.
    needs_others : bool
        Whether one client's data come to depend on those of others. A device that has only its
        own data cannot take part then.
    """

    options_type: type[DriftOptions] | None = DriftOptions
    needs_others = False

    def __init__(self, dealt: Dealt, options: Any) -> None:
        self.dealt = dealt
        self.options = options

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return when the step moves if ``drift-at`` is left open; the clients are known."""
        return f"{max(1, config.planned_updates // 2)} updates"

    @staticmethod
    def check_schedule(config: RunConfig, schedule: Schedule) -> None:
        """Find out whether data can change at the moments that were asked for.

        Raises
        ------
        UserError
            They cannot.
        """

    def check(self) -> None:
        """Find out whether the data can change so.

        Raises
        ------
        UserError
            They cannot; it says why and what to take instead.
        """

    def needs_labels(self) -> None:
        """Raise UserError if the labels are quantities, for a drift that is of classes."""
        if self.dealt.dataset.target is not None:
            config = self.dealt.config
            raise UserError(
                f"drift {config.drift} is of classes, and the labels of {config.dataset} are "
                "quantities: take swap-all, noise, incremental or in-order."
            )

    def data(self, client: int, step: int) -> ClientData:
        """Return a client's data at a step."""
        return self.dealt.data(client)

    def fewest(self, client: int) -> int:
        """Return the fewest training samples of a client at any step, for a check before a run.

        By default those of the first: a drift whose steps differ in size knows better.
        """
        return len(self.data(client, 0).y_train)

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the true group of every client at a step."""
        return self.dealt.partition.groups

    def rng(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Return the generator of random numbers for one purpose and client."""
        own = self.options.drift_seed
        seed = self.dealt.config.seed if own is None else own
        return generator(seed, f"drift: {purpose}", client)


class NoDrift(Drift):
    """Data that stay as they are."""

    options_type = None


class Evolution(Generic[State]):
    """States that follow from one another, of which few are kept.

    Parameters
    ----------
    start : State
        The state of step 0.
    advance : Callable
        Returns the state of a step, given the one before it and the step's number. It leaves the
        one before as it was.
    """

    def __init__(self, start: State, advance: Callable[[State, int], State]) -> None:
        self._start = start
        self._advance = advance
        self._kept: OrderedDict[int, State] = OrderedDict()

    def at(self, step: int) -> State:
        """Return the state of a step."""
        earlier = max((kept for kept in self._kept if kept <= step), default=0)
        state = self._kept[earlier] if earlier else self._start
        for number in range(earlier + 1, step + 1):
            state = self._advance(state, number)
        self._kept[step] = state
        self._kept.move_to_end(step)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return state
