"""Run stores of the formats 1 and 2, read as if their runs had reported what runs report now.

These formats knew splits, and clients that were put into a cluster on their own, but not where
the others were: that followed from their updates and evaluations. It is worked out here, so that
everybody else reads memberships only. In format 1 updates had no times of the device's work.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from raceme.protocol.events import (
    ClientJoined,
    ClusterChange,
    ClustersChanged,
    Ending,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
)
from raceme.records.store_rows import number_of
from raceme.records.store_tables import (
    read_clients,
    read_evaluations,
    read_rejections,
    read_updates,
)

FORMATS = (1, 2)


@dataclass(frozen=True)
class _Split:
    """A cluster was replaced by several."""

    time: float
    updates: int
    parent: int
    children: Mapping[int, Sequence[str]]
    gap: float
    threshold: float


@dataclass(frozen=True)
class _Assigned:
    """A client was put into a cluster on its own."""

    time: float
    client: str
    cluster: int


def read_old_events(connection: sqlite3.Connection) -> list[Event]:
    """Read the events of a store of an old format, with the placements that they imply."""
    readers = (
        read_clients,
        read_updates,
        read_rejections,
        read_evaluations,
        _read_assigned,
        _read_splits,
        _read_endings,
    )
    numbered = [pair for read in readers for pair in read(connection)]
    happened = [event for _, event in sorted(numbered, key=itemgetter(0))]
    return _with_first_placements(happened)


def _read_assigned(connection: sqlite3.Connection) -> Iterator[tuple[int, _Assigned]]:
    query = "SELECT event, time, client, cluster FROM client_events WHERE kind = 'assigned'"
    for number, *values in connection.execute(query):
        yield number, _Assigned(*values)


def _read_splits(connection: sqlite3.Connection) -> Iterator[tuple[int, _Split]]:
    members: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
    query = "SELECT event, child, client FROM split_members ORDER BY rowid"
    for number, child, client in connection.execute(query):
        members[number].setdefault(child, []).extend([] if client is None else [client])
    query = "SELECT event, time, updates, parent, gap, threshold FROM splits"
    for number, time, updates, parent, gap, threshold in connection.execute(query):
        measured = number_of(gap), number_of(threshold)
        yield number, _Split(time, updates, parent, members[number], *measured)


def _read_endings(connection: sqlite3.Connection) -> Iterator[tuple[int, RunEnded]]:
    query = "SELECT event, time, updates, reason FROM endings"
    for number, time, updates, reason in connection.execute(query):
        yield number, RunEnded(time, updates, reason, _ending(reason))


def _ending(reason: str) -> Ending:
    """Return the kind of end, which these formats told in words only."""
    for start, ending in (
        ("interrupted", Ending.INTERRUPTED),
        ("all clients are gone", Ending.NO_CLIENTS),
        ("the last ", Ending.USELESS_REPLIES),
        ("the target accuracy ", Ending.TARGET),
    ):
        if reason.startswith(start):
            return ending
    return Ending.LIMIT


@dataclass
class _Converter:
    """Follows the clusters' members through the events of an old store.

    An update or an evaluation of a model that has since been split says nothing about where its
    client is now.
    """

    clusters: dict[str, int] = field(default_factory=dict)
    split: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    updates: int = 0

    def convert(self, event: Any) -> list[Event]:
        """Return what would be reported now: the event, and placements that it implies."""
        if isinstance(event, UpdateApplied):
            self.updates = event.seq
            known = self.clusters.get(event.client) == event.cluster or event.cluster in self.split
            return [event] if known else [event, self._place(event, event.client, event.cluster)]
        if isinstance(event, _Split):
            return self._convert_split(event)
        if isinstance(event, _Assigned):
            known = self.clusters.get(event.client) == event.cluster
            return [] if known else [self._place(event, event.client, event.cluster)]
        if isinstance(event, Evaluated):
            found = [
                self._place(event, client, cluster)
                for client, (cluster, _, _) in event.per_client.items()
                if client not in self.clusters and cluster not in self.split
            ]
            return [*found, event]
        return [event]

    def _convert_split(self, event: _Split) -> list[Event]:
        members = {client: k for k, clients in event.children.items() for client in clients}
        # A member that never sent an update shows only now that it was in the parent.
        found: list[Event] = [
            self._place(event, client, event.parent)
            for client in members
            if client not in self.clusters
        ]
        self.clusters.update(members)
        # A method may have kept the parent's id for one of the children.
        made = tuple(child for child in event.children if child != event.parent)
        gone = (event.parent,) if len(made) == len(event.children) else ()
        self.split.update(gone)
        self.split.difference_update(made)
        self.made.update(made)
        change = ClustersChanged(
            event.time,
            event.updates,
            ClusterChange.SPLIT,
            {client: {cluster: 1.0} for client, cluster in members.items()},
            gone,
            made,
            event.gap,
            event.threshold,
        )
        return [*found, change]

    def _place(self, event: Any, client: str, cluster: int) -> ClustersChanged:
        change = ClusterChange.MOVE if client in self.clusters else ClusterChange.ASSIGN
        self.clusters[client] = cluster
        return ClustersChanged(event.time, self.updates, change, {client: {cluster: 1.0}})


def _with_first_placements(happened: Sequence[Any]) -> list[Event]:
    """Convert events; a client that starts in a cluster of the beginning is there on joining.

    What implies that, e.g. its first update, came later.
    """
    converter = _Converter()
    converted: list[tuple[bool, Event]] = [
        (isinstance(event, _Assigned), new)
        for event in happened
        for new in converter.convert(event)
    ]
    first: dict[str, ClustersChanged] = {}
    events: list[Event] = []
    joined = {event.client for event in happened if isinstance(event, ClientJoined)}
    for stated, event in converted:
        if isinstance(event, ClustersChanged) and event.change is ClusterChange.ASSIGN:
            ((client, weights),) = event.memberships.items()
            if not stated and client in joined and not converter.made.intersection(weights):
                first[client] = event
                continue
        events.append(event)
    placed: list[Event] = []
    updates = 0
    for event in events:
        placed.append(event)
        if isinstance(event, UpdateApplied):
            updates = event.seq
        elif isinstance(event, ClientJoined) and event.client in first:
            found = first.pop(event.client)
            placed.append(replace(found, time=event.time, updates=updates))
    return placed
