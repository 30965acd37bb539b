"""Events as columns of JSON: what the page is told, and of which it builds any moment of a run.

A column holds one value of each of many rows, so that no name is repeated. Clients, reasons and
kinds are numbers into lists that are told once. Times are seconds on the run's own clock.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raceme.protocol.events import (
    ClaimRefused,
    ClientIdled,
    ClientJoined,
    ClientLeft,
    ClustersChanged,
    DataChanged,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)
from raceme.protocol.measure import Measure
from raceme.protocol.verdicts import UpdateJudged
from raceme.records.membership import Membership
from raceme.records.summary import RunSummary

Table = dict[str, list[Any]]
"""Column name to values, all of one length."""

WORST = 10
"""The worst tenth of the clients."""


class Columns:
    """Gathers the events of a run as columns, an observer of it.

    Parameters
    ----------
    most_scores : int
        Clients' own accuracies that are told at most, about; see
        :class:`raceme.dashboard.source.RunSource`.
    """

    def __init__(self, most_scores: int) -> None:
        self._most_scores = most_scores
        self._told_scores = 0
        self._evaluations = 0
        self._clients: dict[str, int] = {}
        self._reasons: dict[str, int] = {}
        self._summary = RunSummary()
        # A second one, for the summary's does not tell who moved.
        self._membership = Membership()
        self._tables: defaultdict[str, Table] = defaultdict(lambda: defaultdict(list))
        self._ending: dict[str, Any] | None = None
        self._numbers: tuple[int, float | None] | None = None
        self._on_devices, self._said_devices = False, False

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        self._summary.observe(event)
        if isinstance(event, UpdateApplied):
            self._add_update(event)
        elif isinstance(event, UpdateRejected):
            self._add(
                "rejections",
                time=_seconds(event.time),
                sent=_seconds(event.dispatched_at),
                client=self._number(event.client),
                reason=self._reason(event.reason),
            )
        elif isinstance(event, UpdateJudged):
            self._add(
                "verdicts",
                time=_seconds(event.time),
                client=self._number(event.client),
                verdict=event.verdict.value,
                cluster=event.cluster,
                measured=_short(event.measured),
                bound=_short(event.bound),
                reason=self._reason(event.reason),
            )
        elif isinstance(event, ClaimRefused):
            self._add(
                "claims",
                time=_seconds(event.time),
                client=self._number(event.client),
                reason=self._reason(event.reason),
            )
        elif isinstance(event, Evaluated):
            self._add_evaluation(event)
        elif isinstance(event, ClustersChanged):
            self._add_change(event)
        elif isinstance(event, ClientJoined):
            self._add_client(event)
        elif isinstance(event, ClientLeft):
            number = self._number(event.client)
            self._add("presence", time=_seconds(event.time), client=number, online=0)
        elif isinstance(event, DataChanged):
            client = -1 if event.client is None else self._number(event.client)
            self._add(
                "drifts",
                time=_seconds(event.time),
                updates=int(event.updates),
                client=client,
                step=int(event.step),
            )
        elif isinstance(event, ClientIdled):
            self._add(
                "idle",
                time=_seconds(event.time),
                client=self._number(event.client),
                seconds=_short(event.seconds),
                budget=_short(event.budget),
            )
        elif isinstance(event, RunEnded):
            self._ending = {
                "time": _seconds(event.time),
                "updates": int(event.updates),
                "reason": event.reason,
                "ending": event.ending.value,
            }
        self._look_at_numbers(event)

    @property
    def measure(self) -> Measure:
        """What the accuracies are."""
        return self._summary.measure

    @property
    def now(self) -> float:
        """Time of the latest event in seconds."""
        return _seconds(self._summary.time)

    def take(self) -> dict[str, Any]:
        """Return what has come since the last time, ready for JSON; nothing if nothing has."""
        found: dict[str, Any] = {name: dict(table) for name, table in self._tables.items()}
        self._tables.clear()
        if self._ending is not None:
            found["ended"], self._ending = self._ending, None
        if found:
            found["now"] = self.now
        if self._on_devices and not self._said_devices:
            # Only real machines tell when by their own clocks.
            self._said_devices = True
            found["clock"] = "time"
        if "evaluations" in found:
            measure = self.measure
            found["measure"] = {
                "label": measure.label,
                "title": measure.title,
                "isError": measure.is_error,
            }
        return found

    def _add(self, table: str, **values: Any) -> None:
        columns = self._tables[table]
        for name, value in values.items():
            columns[name].append(value)

    def _number(self, client: str) -> int:
        """Return the number of a client, which is told with its name if it is new."""
        if client not in self._clients:
            self._clients[client] = len(self._clients)
            self._add("clients", name=client)
        return self._clients[client]

    def _reason(self, reason: str) -> int:
        if reason not in self._reasons:
            self._reasons[reason] = len(self._reasons)
            self._add("reasons", text=reason)
        return self._reasons[reason]

    def _add_client(self, event: ClientJoined) -> None:
        number, time = self._number(event.client), _seconds(event.time)
        group = None if event.group is None else int(event.group)
        self._add("presence", time=time, client=number, online=1)
        self._add("greetings", time=time, client=number, examples=event.num_examples, group=group)

    def _add_update(self, event: UpdateApplied) -> None:
        self._on_devices = self._on_devices or event.started_at is not None
        self._add(
            "updates",
            time=_seconds(event.time),
            sent=_seconds(event.dispatched_at),
            client=self._number(event.client),
            cluster=int(event.cluster),
            staleness=int(event.staleness),
            weight=_short(event.weight),
            loss=_short(event.train_loss),
        )

    def _add_evaluation(self, event: Evaluated) -> None:
        scores = event.per_client
        clusters: defaultdict[int, list[float]] = defaultdict(list)
        for cluster, accuracy, _ in scores.values():
            clusters[int(cluster)].append(float(accuracy))
        means = sorted((k, len(found), _short(_mean(found))) for k, found in clusters.items())
        known = [float(accuracy) for _, accuracy, _ in scores.values()]
        self._add(
            "evaluations",
            time=_seconds(event.time),
            updates=int(event.updates),
            accuracy=_number(event.accuracy),
            best=_number(self._summary.best_accuracy),
            loss=_short(event.loss),
            worst=_short(worst_share(known, event.measure)),
            answered=event.answered,
            asked=int(event.asked),
            clusters=means,
            scores=self._scores({name: score[1] for name, score in scores.items()}),
        )
        for client, group in event.groups.items():
            if group != self._membership.groups.get(client):
                number = self._number(client)
                self._add("groups", time=_seconds(event.time), client=number, group=int(group))
        self._membership.observe(event)

    def _scores(self, accuracies: Mapping[str, float]) -> str | None:
        """Return the clients' accuracies as 32-bit floats in base64, in the order of numbers."""
        self._evaluations += 1
        stride = 1 + self._told_scores // max(1, self._most_scores)
        if not accuracies or (self._evaluations - 1) % stride:
            return None
        numbers = [self._number(client) for client in accuracies]
        column = np.full(len(self._clients), np.nan, "<f4")
        column[numbers] = list(accuracies.values())
        self._told_scores += len(column)
        return base64.b64encode(column.tobytes()).decode()

    def _add_change(self, event: ClustersChanged) -> None:
        placements = self._membership.observe(event)
        time = _seconds(event.time)
        self._add(
            "changes",
            time=time,
            updates=int(event.updates),
            kind=event.change.value,
            gone=list(map(int, event.gone)),
            made=list(map(int, event.made)),
            moved=len(placements),
            score=_short(event.score),
            threshold=_short(event.threshold),
        )
        for placed in placements:
            weights = dict(placed.weights)
            self._add(
                "placements",
                time=time,
                client=self._number(placed.client),
                cluster=-1 if placed.home is None else int(placed.home),
                weights={str(k): _short(w) for k, w in weights.items()}
                if len(weights) > 1
                else None,
            )

    def _look_at_numbers(self, event: Event) -> None:
        """Tell the number of clusters and their purity when they are others."""
        if not isinstance(event, ClustersChanged | ClientJoined | Evaluated):
            return
        numbers = self._summary.clusters, self._summary.purity()
        if numbers != self._numbers:
            self._numbers = numbers
            self._add(
                "numbers",
                time=_seconds(event.time),
                clusters=numbers[0],
                purity=_number(numbers[1]),
            )


def worst_share(accuracies: Iterable[float], measure: Measure, share: int = WORST) -> float:
    """Return the mean accuracy of the worst tenth of the clients, of one at least.

    Parameters
    ----------
    accuracies : Iterable[float]
        One per client, or errors; those that are NaN are left out.
    measure : Measure
        Which are the worst.
    share : int
        One in so many.

    Returns
    -------
    float
        NaN if there are none.
    """
    known = sorted(value for value in accuracies if not math.isnan(value))
    if measure.is_error:
        known.reverse()
    return _mean(known[: math.ceil(len(known) / share)])


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _seconds(time: float) -> float:
    """Return a time to the microsecond."""
    return round(float(time), 6)


def _number(value: float | None) -> float | None:
    """Return a number with all its digits; None, as JSON wants it, if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    """Return a number with six digits, enough for a plot."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
