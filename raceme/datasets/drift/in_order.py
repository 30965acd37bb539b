"""Data that come in the order of their time, for datasets that were recorded over a long time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.datasets.drift.base import Drift, DriftOptions
from raceme.datasets.source import ClientData, Indices

_STEPS = 8
"""Steps of a run, if nothing else is asked for; what is loaded is not known where it is decided."""
_SAMPLES = 2
"""A period needs a sample to train with and one to test with."""


@dataclass(frozen=True)
class InOrderOptions(DriftOptions):
    """Options of in-order."""

    in_order_lag: int = option(
        0, "periods that the last clients are behind the first (staggered drift)", low=0
    )


class InOrder(Drift):
    """Every client meets its samples period by period, in the order in which they were recorded.

    At each step it has those of one period, for training and for testing; after the last period
    it stays there. With a lag the clients are divided, in order of their numbers, into parts of
    which each is one period behind the one before: several periods are met at a time, and the
    period is a client's true group.
    """

    options_type = InOrderOptions

    @staticmethod
    def default_schedule(config: RunConfig) -> str:
        """Return an eighth of the run for each step."""
        return f"every {max(1, config.planned_updates // _STEPS)} updates"

    def check(self) -> None:
        """Raise UserError if the samples have no order, or a client has none of a period."""
        if self.dealt.dataset.periods is None:
            raise UserError(
                f"drift in-order follows the time at which samples were recorded, and "
                f"{self.dealt.config.dataset} does not tell it: take gas-drift or beijing-air."
            )
        lag, last = self.options.in_order_lag, self._last
        if lag > last:
            raise UserError(
                f"in-order-lag {lag} is more than the data have: they have {last + 1} periods."
            )
        for client in self.dealt.present:
            counts = self._counts(client)
            if counts.min() < _SAMPLES:
                raise UserError(
                    f"drift in-order needs {_SAMPLES} samples of every period at every client, and "
                    f"client {client} has {counts.min()} of period {int(counts.argmin())}, from 0: "
                    "take fewer clients."
                )

    def data(self, client: int, step: int) -> ClientData:
        """Return the client's samples of the period that it has reached."""
        period = self.period(client, step)
        data = self.dealt.data_where(client, self._periods == period)
        return replace(data, group=period) if self.options.in_order_lag else data

    def groups(self, step: int) -> tuple[int | None, ...]:
        """Return the periods that clients have reached, if these may differ."""
        if not self.options.in_order_lag:
            return self.dealt.partition.groups
        return tuple(self.period(client, step) for client in range(self.dealt.clients))

    def period(self, client: int, step: int) -> int:
        """Return which period a client has reached at a step."""
        behind = client * (self.options.in_order_lag + 1) // self.dealt.clients
        return int(np.clip(step - behind, 0, self._last))

    def _counts(self, client: int) -> Indices:
        """Return how many samples a client has of each period, shape (periods,)."""
        own = np.concatenate(self.dealt.indices(client))
        return np.bincount(self._periods[own], minlength=self._last + 1)

    @property
    def _periods(self) -> Indices:
        periods = self.dealt.dataset.periods
        assert periods is not None, "check() has seen that there are periods"
        return periods

    @cached_property
    def _last(self) -> int:
        return int(self._periods.max())
