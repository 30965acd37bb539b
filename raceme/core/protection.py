"""Protection against poison: what of clients' updates a method gets to see.

Whatever the method, an update w_i is judged before the method sees it, by Δ_i = w_i − the model
that the client was sent, against the last updates of other clients of the same cluster. No data on
the server are needed; what is accepted goes through as it came, bit by bit.

`norm` bounds the length of Δ_i by a multiple of the median length. `filter` also compares
directions. As AsyncFilter (Kang and Li, Middleware 2024) it judges each update against the last
ones of others, wherever their staleness; unlike it, it excludes no client of a fleet that agrees,
and what decides is a client's record over many updates, not one update.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.events import Verdict
from raceme.core.messages import Vector
from raceme.core.options import option
from raceme.core.registry import PROTECTIONS

Home = Callable[[str], int | None]
"""Returns the cluster of a client; None for one that has none yet."""

FEWEST = 5
"""Other clients of which updates must be known to compare one with."""
_STRONG = 0.35
"""Cosine from which on two updates agree or disagree; of unrelated ones it is about 0."""
_KEPT = 0.9
"""Share of a client's record that is left when its next update is added."""
_FIRST_JUDGED = 3
"""Updates of a client after which its record counts."""
_MOST_HEARD = 0.9
"""Share of the clients of which an update must be known before directions are judged."""
_LONGEST_WAIT = 10
"""Updates for each client after which directions are judged all the same: some may stay silent."""
_LEAST_TYPICAL = 0.2
"""Agreement of the median client below which directions say nothing."""


@dataclass(frozen=True)
class NormOptions:
    """What the bound on lengths reads."""

    protection_factor: float = option(
        10.0, "longest update that passes, in median lengths of its cluster's recent ones", low=1
    )
    protection_beyond: str = option(
        "scale", "longer ones: scale to the median length, or refuse", among=("scale", "refuse")
    )
    protection_window: int = option(
        64, "clients whose last update others are compared with", low=FEWEST + 1
    )


@dataclass(frozen=True)
class FilterOptions(NormOptions):
    """What the filter of directions reads."""

    protection_share: float = option(
        0.4, "agreement that a client needs, as a share of the median client's", above=0, below=1
    )


@dataclass
class Record:
    """How far a client's updates agree with those of others.

    Attributes
    ----------
    total, length : float
        Sums of agreement times length and of lengths, former updates counting less and less.
    updates : int
        How many updates were compared.
    """

    total: float = 0.0
    length: float = 0.0
    updates: int = 0

    def add(self, agreement: float, length: float) -> None:
        """Add an update. A long one says more than one that hardly moves the model."""
        self.total = _KEPT * self.total + length * agreement
        self.length = _KEPT * self.length + length
        self.updates += 1

    @property
    def score(self) -> float:
        """The mean agreement, between −2 and 2."""
        return self.total / self.length if self.length else 0.0


@dataclass
class GuardState:
    """What a guard knows; it is part of a run's checkpoint.

    Attributes
    ----------
    lengths : dict[str, float]
        Length of each client's last update, the client that was heard last at the end.
    directions : dict[str, Vector]
        The same updates at length 1, where directions are compared. Shape (weights,).
    records : dict[str, Record]
        How far clients' updates agree with others'.
    excluded : dict[str, bool]
        Clients whose updates are refused because of that.
    judged : int
        How many updates have been judged by their direction, or could have been.
    """

    lengths: dict[str, float] = field(default_factory=dict)
    directions: dict[str, Vector] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    excluded: dict[str, bool] = field(default_factory=dict)
    judged: int = 0


@dataclass(frozen=True)
class Ruling:
    """What becomes of an update.

    Attributes
    ----------
    verdict : Verdict
        Whether the update is accepted, scaled or refused, or its client excluded.
    scale : float
        By how much Δ_i is multiplied; 1 leaves it as it is.
    measured, bound : float
        What was measured, and the bound that it was held against; NaN for an accepted update.
    reason : str
        Why, in words without numbers; empty for an accepted update.
    """

    verdict: Verdict = Verdict.ACCEPTED
    scale: float = 1.0
    measured: float = float("nan")
    bound: float = float("nan")
    reason: str = ""


_ACCEPTED = Ruling()
_DISAGREES = "its updates agree with those of no others"


class Guard:
    """Judges updates. A protection is a subclass.

    Parameters
    ----------
    options : Any
        Options of the protection, an instance of :attr:`options_type`.

    Attributes
    ----------
    options_type : type or None
        The frozen dataclass of the protection's options.
    is_on : bool
        Whether it judges at all: if not, nothing is kept for it.
    state : GuardState
        Lengths, directions and records of former updates; part of a checkpoint.
    """

    options_type: type[NormOptions] | None = None
    is_on = True

    def __init__(self, options: Any = None) -> None:
        kind = self.options_type
        self.options = kind() if options is None and kind is not None else options
        self.state = GuardState()

    def judge(
        self, client: str, delta: Vector, start: float, home: Home, awaited: int = 0
    ) -> Ruling:
        """Judge an update, and remember it.

        Parameters
        ----------
        client : str
            The client that sent it.
        delta : Vector
            Δ_i, its weights only. Shape (weights,).
        start : float
            Length of the model that it started from.
        home : Callable
            Returns the cluster of a client.
        awaited : int
            Clients of which most are to be heard before any client is judged by direction.
        """
        return _ACCEPTED


class NoProtection(Guard):
    """Every valid update goes to the method as it is."""

    is_on = False


class NormProtection(Guard):
    """Updates much longer than the median of their cluster are scaled to it, or refused."""

    options_type = NormOptions
    options: NormOptions

    def judge(
        self, client: str, delta: Vector, start: float, home: Home, awaited: int = 0
    ) -> Ruling:
        """Judge an update by its length alone, against those of other clients."""
        length = float(np.linalg.norm(delta))
        ruling = self._by_length(client, length, start, home)
        # What is refused is remembered too: half of the clients would have to lie for a median to.
        self._remember(client, length)
        return ruling

    def _by_length(self, client: str, length: float, start: float, home: Home) -> Ruling:
        known = self.state.lengths
        others = self._others(client, home)
        if len(others) < FEWEST:
            others = self._others(client)
        if len(others) < FEWEST:
            # Before there is anything to compare with, the model itself is the measure.
            bound = self.options.protection_factor * start
            if not 0.0 < bound < length:
                return _ACCEPTED
            reason = "a first update that is far longer than the model that it started from"
            return Ruling(Verdict.REFUSED, 0.0, length, bound, reason)
        typical = statistics.median(known[other] for other in others)
        bound = self.options.protection_factor * typical
        if not typical or length <= bound:
            return _ACCEPTED
        reason = "an update that is far longer than those of others"
        if self.options.protection_beyond == "refuse":
            return Ruling(Verdict.REFUSED, 0.0, length, bound, reason)
        return Ruling(Verdict.SCALED, typical / length, length, bound, reason)

    def _others(self, client: str, home: Home | None = None) -> list[str]:
        """Return the other clients that are remembered; with `home` those of the same cluster."""
        others = [other for other in self.state.lengths if other != client]
        if home is None or (cluster := home(client)) is None:
            return others
        return [other for other in others if home(other) == cluster]

    def _remember(self, client: str, length: float) -> None:
        state = self.state
        state.lengths.pop(client, None)
        state.lengths[client] = length
        if len(state.lengths) > self.options.protection_window:
            oldest = next(iter(state.lengths))
            del state.lengths[oldest]
            state.directions.pop(oldest, None)


class FilterProtection(NormProtection):
    """Clients whose updates point where no others do, or against them, are excluded."""

    options_type = FilterOptions
    options: FilterOptions

    def judge(
        self, client: str, delta: Vector, start: float, home: Home, awaited: int = 0
    ) -> Ruling:
        """Judge the length, and then the client's record of directions, this update's included.

        An excluded client goes on being asked and judged: if it comes to agree, it is let in again.
        """
        ruling = super().judge(client, delta, start, home, awaited)
        if ruling.verdict is Verdict.REFUSED:
            return ruling
        length = float(np.linalg.norm(delta))
        if not length:
            return ruling
        direction = np.asarray(delta / np.float32(length))
        others = [other for other in self._others(client, home) if other in self.state.directions]
        if self._waits(client, awaited):
            others = []
        if len(others) >= FEWEST:
            # An update is never heavier than what a method would get of it.
            record = self.state.records.setdefault(client, Record())
            record.add(self._agreement(direction, others), length * ruling.scale)
        self.state.directions[client] = direction
        return self._by_record(client, home) or ruling

    def _waits(self, client: str, awaited: int) -> bool:
        """Return whether those that an honest client would agree with may not be known yet."""
        state = self.state
        state.judged += 1
        known = len(state.directions.keys() | {client})
        most = _MOST_HEARD * min(awaited, self.options.protection_window)
        return known < most and state.judged <= _LONGEST_WAIT * awaited

    def _agreement(self, direction: Vector, others: list[str]) -> float:
        """Return how far an update agrees with those of others: from −2 to 2.

        The largest cosine, which is small for what no other client sends; and of the strong cosines
        c the balance Σ c |c| / Σ c²: −1 for what points against others, 1 for what all agree with.
        """
        directions = self.state.directions
        cosines = np.array([np.dot(directions[other], direction) for other in others], np.float64)
        strong = cosines[np.abs(cosines) >= _STRONG]
        balance = np.sum(strong * np.abs(strong)) / np.sum(strong**2) if len(strong) else 0.0
        return float(cosines.max() + balance)

    def _by_record(self, client: str, home: Home) -> Ruling | None:
        """Exclude the client, or let it in again; None if nothing is held against it."""
        state = self.state
        scores = self._scores(home(client), home)
        if len(scores) < FEWEST or client not in scores:
            scores = self._scores(None, home)
        was_excluded = client in state.excluded
        if len(scores) >= FEWEST and client in scores:
            typical = statistics.median(scores.values())
            bound = self.options.protection_share * typical
            if typical >= _LEAST_TYPICAL and scores[client] < bound:
                state.excluded[client] = True
                verdict = Verdict.REFUSED if was_excluded else Verdict.EXCLUDED
                return Ruling(verdict, 0.0, scores[client], bound, _DISAGREES)
            if was_excluded and typical >= _LEAST_TYPICAL:
                del state.excluded[client]
                reason = "its updates agree with those of others now"
                return Ruling(Verdict.READMITTED, 1.0, scores[client], bound, reason)
        if was_excluded:
            nan = float("nan")
            return Ruling(Verdict.REFUSED, 0.0, nan, nan, _DISAGREES)
        return None

    def _scores(self, cluster: int | None, home: Home) -> dict[str, float]:
        """Return the scores of the clients of a cluster, of those that are remembered."""
        records = self.state.records
        return {
            client: records[client].score
            for client in self.state.lengths
            if client in records
            and records[client].updates >= _FIRST_JUDGED
            and (cluster is None or home(client) == cluster)
        }


# -----------------------------------------------------------------------------
# Poison: what stands between clients' updates and a method, and attacks to try it with.
# -----------------------------------------------------------------------------


def protection_of(config: RunConfig) -> Guard:
    """Return the protection that a configuration names.

    Raises
    ------
    UserError
        There is no such protection, or an option is out of its range.
    """
    options_type = PROTECTIONS.options_type(config.protection)
    options = () if options_type is None else (config.read(options_type),)
    guard: Guard = PROTECTIONS.make(config.protection, *options)
    return guard
