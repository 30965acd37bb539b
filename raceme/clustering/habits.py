"""What clients' updates have been like, and how a cluster's are on the whole."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.clustering.lengths import Lengths


@dataclass
class Habit:
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
    doubted : bool
        Whether a probe is to tell if its data have changed.
    """

    length: float = 0.0
    growth: float = 0.0
    since: int = 0
    every: int = 0
    asked: int = 0
    doubted: bool = False


class Roll:
    """Who is there, and of them who is settled, counted as they change; derived, no state.

    Attributes
    ----------
    there, settled : set[str]
        Clients online, and those of them whose place is known.
    lengths : Lengths
        Typical lengths of their updates.
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.settled: set[str] = set()
        self.lengths = Lengths()

    def note(self, client: str, is_there: bool, is_settled: bool) -> None:
        """Count a client as it is now."""
        (self.there.add if is_there else self.there.discard)(client)
        (self.settled.add if is_there and is_settled else self.settled.discard)(client)
