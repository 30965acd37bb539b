"""What a run's protection has done: its table in a run store, and its numbers in the summary."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import fmean
from typing import Any

from raceme.protocol.events import Evaluated, Event, UpdateApplied
from raceme.protocol.measure import ACCURACY
from raceme.protocol.verdicts import UpdateJudged, Verdict
from raceme.records.store_rows import Numbered, Rows, columns_of, number_of
from raceme.records.summary import time_to_target

SCHEMA = """
CREATE TABLE verdicts (
    event INTEGER PRIMARY KEY, time REAL NOT NULL, client TEXT NOT NULL, verdict TEXT NOT NULL,
    measured REAL, bound REAL, reason TEXT NOT NULL, cluster INTEGER);
"""

TABLES = {"verdicts": (8, "event")}
"""Number of columns and key of each table."""


def _write(rows: Rows, number: int, event: UpdateJudged) -> None:
    measured, bound = float(event.measured), float(event.bound)
    who, why = (event.client, event.verdict.value), (measured, bound, event.reason)
    rows["verdicts"].append((number, float(event.time), *who, *why, event.cluster))


WRITERS: dict[type[Any], Callable[[Rows, int, Any], None]] = {UpdateJudged: _write}
"""How an event of each type becomes rows."""


def _read(connection: sqlite3.Connection) -> Numbered:
    if not columns_of(connection, "verdicts"):
        # Formats before 7 have no such table.
        return
    query = "SELECT event, time, client, verdict, measured, bound, reason, cluster FROM verdicts"
    for number, time, client, verdict, measured, bound, reason, cluster in connection.execute(
        query
    ):
        numbers = number_of(measured), number_of(bound)
        yield number, UpdateJudged(time, client, Verdict(verdict), *numbers, reason, cluster)


READERS: tuple[Callable[[sqlite3.Connection], Numbered], ...] = (_read,)
"""What reads these tables, each in any order."""


class ProtectionSummary:
    """How often which client's updates were accepted, scaled and refused: an observer of a run.

    Parameters
    ----------
    attackers : Collection[str]
        Clients that attack, where that is known: those that are left out of the honest accuracy.
    """

    def __init__(self, attackers: Collection[str] = ()) -> None:
        self.attackers = frozenset(attackers)
        self._counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
        self._excluded: dict[str, bool] = {}
        self._last: float | None = None
        self._measure = ACCURACY
        self._honest: list[Evaluated] = []

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, UpdateApplied):
            self._counts[event.client][Verdict.ACCEPTED] += 1
        elif isinstance(event, UpdateJudged):
            self._judged(event)
        elif isinstance(event, Evaluated):
            self._evaluated(event)

    def _evaluated(self, event: Evaluated) -> None:
        scores = [
            score for name, (_, score, _) in event.per_client.items() if name not in self.attackers
        ]
        self._last, self._measure = fmean(scores) if scores else None, event.measure
        if self.attackers and event.counts and scores:
            found = Evaluated(event.time, event.updates, fmean(scores), math.nan, event.clusters)
            self._honest.append(replace(found, measure=event.measure))

    def _judged(self, event: UpdateJudged) -> None:
        counts = self._counts[event.client]
        if event.verdict is Verdict.SCALED:
            # It is reported as applied, too.
            counts[Verdict.SCALED] += 1
            counts[Verdict.ACCEPTED] -= 1
        elif event.verdict.keeps_out:
            counts[Verdict.REFUSED] += 1
        if event.verdict is Verdict.EXCLUDED:
            self._excluded[event.client] = True
        elif event.verdict is Verdict.READMITTED:
            self._excluded.pop(event.client, None)

    @property
    def _has_judged(self) -> bool:
        return any(
            counts[Verdict.SCALED] or counts[Verdict.REFUSED] for counts in self._counts.values()
        )

    def result(self, target: float | None = None) -> dict[str, Any]:
        """Return what the summary of a run has of it; nothing where nobody attacked or was judged.

        ``protection`` has the counts by client, ``excluded_clients`` who was excluded at the end,
        ``attackers`` who attacked, ``honest_accuracy`` the mean accuracy of all others at the last
        evaluation, and ``honest_time_to_target`` when it first was as good as the target.
        """
        found: dict[str, Any] = {}
        if self._has_judged:
            kinds = (Verdict.ACCEPTED, Verdict.SCALED, Verdict.REFUSED)
            found["protection"] = {
                client: {kind.value: counts[kind] for kind in kinds}
                for client, counts in sorted(self._counts.items())
            }
            found["excluded_clients"] = sorted(self._excluded)
        if self.attackers and self._last is not None:
            found["attackers"] = sorted(self.attackers)
            found[f"honest_{self._measure.name}"] = self._last
            found["honest_time_to_target"] = time_to_target(self._honest, target)
        return found
