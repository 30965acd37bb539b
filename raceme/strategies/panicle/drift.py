"""The drift detector: what clients' updates have been like, and when many of them change at once.

An update that is suddenly longer than its client's usual ones says that the client's data may have
changed; a probe tells. When that has come true for several clients within a short time, the others'
data have probably changed too, and waiting for each one's next long update would take as long as
the slowest device needs for a whole task.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass

# -----------------------------------------------------------------------------
# Medians of numbers of which one changes at a time: kept in order, not sorted anew.
# -----------------------------------------------------------------------------


class RunningMedians:
    """A positive number of each client, in order within its cluster."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float]] = {}
        self._ordered: dict[int, list[float]] = {}

    def put(self, client: str, cluster: int | None, length: float) -> None:
        """Set a client's number in a cluster; with no cluster, or 0, it has none."""
        before = self._of.pop(client, None)
        if before is not None:
            ordered = self._ordered[before[0]]
            del ordered[bisect_left(ordered, before[1])]
        if cluster is not None and length > 0.0:
            self._of[client] = cluster, length
            insort(self._ordered.setdefault(cluster, []), length)

    def median_of_others(self, client: str, cluster: int, fewest: int) -> float:
        """Return the median in a cluster without a client's own; 0 of fewer than `fewest`."""
        ordered = self._ordered.get(cluster, [])
        home, length = self._of.get(client, (None, 0.0))
        own = bisect_left(ordered, length) if home == cluster else len(ordered)
        count = len(ordered) - (home == cluster)
        if count < fewest:
            return 0.0

        def at(place: int) -> float:
            return ordered[place if place < own else place + 1]

        half = count // 2
        return at(half) if count % 2 else (at(half - 1) + at(half)) / 2


# -----------------------------------------------------------------------------
# The drift detector: what clients' updates have been like, and when many of them change at once.
# -----------------------------------------------------------------------------


_LONG = 1.5
"""Medians of the others' updates below which no update is suddenly long."""
_KEPT = 0.7
"""Share of the typical length of a client's changes that its next one leaves."""
_MANY = 8
"""An eighth of the clients whose data have changed speaks for all."""
_FEWEST_CHANGES = 2
_SOON = 2
"""Updates per client within which changes count as one event."""
FEWEST_LENGTHS = 3
"""Other clients whose updates tell how long one may be."""
_FEWEST_SETTLED = 8
"""Clients that are looked at before all of the fleet have answered."""
PATIENCE = 3
"""Probes in a row without an answer after which a client is given ordinary work."""


@dataclass
class DriftDetector:
    """What a client's updates have been like.

    Attributes
    ----------
    length : float
        Typical ‖Δ_i‖; 0 before its first update in this cluster.
    growth : float
        Growth that is sudden; more after a false alarm.
    since : int
        Its updates since its last probe.
    every : int
        Its updates after which it is probed again.
    asked : int
        Probes in a row that it has not answered.
    suspected : bool
        Whether a probe is to tell if its data have changed.
    called : bool
        Whether it is to be probed because many others' data have changed.
    probed : int
        Updates of the run at its last probe.
    trained : bool
        Whether its latest model is that of a whole task, not of a probe.
    """

    length: float = 0.0
    growth: float = 0.0
    since: int = 0
    every: int = 0
    asked: int = 0
    suspected: bool = False
    called: bool = False
    probed: int = 0
    trained: bool = False

    def is_sudden(self, length: float, typical: float) -> bool:
        """Return whether an update is suddenly long.

        Parameters
        ----------
        length : float
            Its length.
        typical : float
            That of the others' updates; 0 if it is not known.
        """
        return self.length > 0.0 and length > max(self.growth * self.length, _LONG * typical)

    @property
    def is_silent(self) -> bool:
        """Whether so many probes in a row were sent that nobody waits for an answer any more."""
        return self.asked >= PATIENCE

    def learn(self, length: float) -> None:
        """Take the length of one more update in."""
        self.length = _KEPT * self.length + (1 - _KEPT) * length if self.length else length


class SettledClients:
    """Who is there, and of them who is settled, counted as they change; derived, no state.

    Attributes
    ----------
    there, settled : set[str]
        Clients online that are waited for, and those of them whose place is known.
    lengths : Lengths
        Typical lengths of their updates.
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.settled: set[str] = set()
        self.lengths = RunningMedians()

    def note(self, client: str, is_there: bool, is_settled: bool) -> None:
        """Count a client as it is now."""
        (self.there.add if is_there else self.there.discard)(client)
        (self.settled.add if is_there and is_settled else self.settled.discard)(client)

    def are_enough(self, is_late: bool) -> bool:
        """Return whether the place of enough clients is known: of all, or of half and eight.

        Parameters
        ----------
        is_late : bool
            Whether nobody is waited for any more: two are enough.
        """
        settled, there = len(self.settled), len(self.there)
        if settled < 2:
            return False
        are_many = settled >= _FEWEST_SETTLED and 2 * settled >= there
        return is_late or settled == there or are_many


def call_others(
    detectors: Mapping[str, DriftDetector], changes: dict[str, int], now: int, clients: int
) -> None:
    """Have all others probed, if the data of many have changed within a short time.

    Parameters
    ----------
    detectors : Mapping[str, Habit]
        Of each client; those that are to be probed are marked.
    changes : dict[str, int]
        When each client's data were last found to have changed, in updates of the run. What is
        long past is removed.
    now : int
        Updates of the run.
    clients : int
        Clients that are compared.
    """
    for client in [c for c, then in changes.items() if not _is_recent(then, now, clients)]:
        del changes[client]
    # Once for each event: those that come after it were called with the others.
    if len(changes) == max(_FEWEST_CHANGES, math.ceil(clients / _MANY)):
        first = min(changes.values())
        for detector in detectors.values():
            detector.called |= detector.probed < first


def are_changing(changes: Mapping[str, int], now: int, clients: int) -> bool:
    """Return whether a client's data were found to have changed within two updates per client.

    Parameters
    ----------
    changes : Mapping[str, int]
        When each client's data were last found to have changed, in updates of the run.
    now : int
        Updates of the run.
    clients : int
        Clients that are compared.
    """
    return any(_is_recent(then, now, clients) for then in changes.values())


def _is_recent(then: int, now: int, clients: int) -> bool:
    return then >= now - _SOON * clients
