"""A run's clients and clusters as tables of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from raceme.reporting.page import PageTable, number, spread_over
from raceme.reporting.record import Client, RunRecord
from raceme.reporting.style import cluster_colour

_MOST_CLIENTS = 200
"""A table of clients has at most so many of them."""
_MOST_MEMBERS = 300
"""So many ids of a cluster's members are listed."""
_MOST_SPLITS = 50
_MOST_CLUSTERS = 50


@dataclass(frozen=True)
class Members:
    """A cluster's members at the end of a run.

    Attributes
    ----------
    cluster : int
        Its number.
    colour : str
        Its colour in the plots.
    clients : tuple of str
        The first ids.
    further : int
        Members beyond them.
    counts : tuple of int
        Members of each true group, in the order of :attr:`Membership.groups`.
    """

    cluster: int
    colour: str
    clients: tuple[str, ...]
    further: int
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of all members."""
        return len(self.clients) + self.further


@dataclass(frozen=True)
class Membership:
    """Who is in which cluster at the end, against the true groups where these are known."""

    groups: tuple[str, ...]
    clusters: tuple[Members, ...]
    further: int
    without: int


def membership(record: RunRecord) -> Membership | None:
    """Return the clusters' members; None if all clients were in one cluster all the time."""
    assignment = record.assignment()
    if len({move.cluster for move in record.moves}) < 2:
        return None
    groups = record.groups
    known = sorted({group for group in groups.values() if group is not None})
    columns: list[int | None] = list(known)
    if known and any(groups.get(client) is None for client in assignment):
        columns.append(None)
    clusters = sorted(set(assignment.values()))
    listed = []
    for cluster in clusters[:_MOST_CLUSTERS]:
        clients = [client for client, place in assignment.items() if place == cluster]
        counts = Counter(groups.get(client) for client in clients)
        listed.append(
            Members(
                cluster,
                cluster_colour(cluster),
                tuple(clients[:_MOST_MEMBERS]),
                max(0, len(clients) - _MOST_MEMBERS),
                tuple(counts[group] for group in columns),
            )
        )
    names = tuple("not known" if group is None else f"group {group}" for group in columns)
    without = sum(client.client not in assignment for client in record.clients)
    return Membership(names, tuple(listed), max(0, len(clusters) - _MOST_CLUSTERS), without)


def clusters_table(record: RunRecord) -> PageTable | None:
    """Return the last accuracy of each cluster; None if there is no evaluation of several."""
    last = len(record.evaluations.time) - 1
    found = record.client_evaluations
    own = found.evaluation == last
    clusters = np.unique(found.cluster[own])
    if len(clusters) < 2:
        return None
    updates = Counter(record.updates.cluster.tolist())
    rows = []
    for cluster in clusters[:_MOST_CLUSTERS]:
        accuracy = found.accuracy[own & (found.cluster == cluster)]
        rows.append(
            (
                f"cluster {cluster}",
                number(len(accuracy)),
                number(float(accuracy.mean())),
                number(float(accuracy.min())),
                number(float(accuracy.max())),
                number(updates[int(cluster)]),
            )
        )
    heads = ("cluster", "clients", "mean accuracy", "lowest", "highest", "updates")
    more = f", the first {_MOST_CLUSTERS} of {len(clusters)}" if len(rows) < len(clusters) else ""
    return PageTable(f"Clusters at the last evaluation{more}", heads, tuple(rows))


def splits_table(record: RunRecord) -> PageTable | None:
    """Return what was split when; None if nothing was."""
    if not record.splits:
        return None
    rows = tuple(
        (
            number(float(split.time), 2),
            number(split.updates),
            str(split.parent),
            ", ".join(f"{child} ({len(names)})" for child, names in split.children.items()),
            number(float(split.gap)),
            number(float(split.threshold)),
        )
        for split in record.splits[:_MOST_SPLITS]
    )
    heads = ("time (s)", "updates", "cluster", "became (clients)", "measured", "bound")
    count = len(record.splits)
    shown = f"{_MOST_SPLITS} of {count}" if count > _MOST_SPLITS else str(count)
    return PageTable(f"{shown} split{'' if count == 1 else 's'}", heads, rows, words=(3,))


def clients_table(record: RunRecord) -> PageTable:
    """Return what each client did; of a large fleet, clients spread over the order of joining."""
    chosen = [record.clients[i] for i in spread_over(len(record.clients), _MOST_CLIENTS)]
    rows = tuple(_client_rows(record, chosen))
    total = len(record.clients)
    shown = f"{len(rows)} of {total:,} clients" if len(rows) < total else f"{total} clients"
    heads = (
        "client",
        "group",
        "cluster",
        "examples",
        "updates",
        "rejected",
        "median task (s)",
        "at work",
        "median staleness",
        "accuracy",
    )
    return PageTable(f"The numbers: {shown}", heads, rows)


def _client_rows(record: RunRecord, clients: Iterable[Client]) -> Iterable[tuple[str, ...]]:
    updates, found = record.updates, record.client_evaluations
    assignment = record.assignment()
    rejected = Counter(record.rejections.client.tolist())
    last = found.evaluation == len(record.evaluations.time) - 1
    pairs = zip(found.client[last].tolist(), found.accuracy[last].tolist(), strict=True)
    accuracy = dict(pairs)
    durations = updates.time - updates.dispatched_at
    # One pass over the updates, however many clients there are.
    order = np.argsort(updates.client, kind="stable")
    names = updates.client[order]
    for client in clients:
        low, high = (np.searchsorted(names, client.client, side) for side in ("left", "right"))
        own = order[low:high]
        online = sum((record.end if end is None else end) - start for start, end in client.online)
        busy = float(durations[own].sum()) / online if online > 0 else 0.0
        cluster = assignment.get(client.client)
        yield (
            client.client,
            "–" if client.group is None else str(client.group),
            "–" if cluster is None else str(cluster),
            number(client.num_examples),
            number(len(own)),
            number(rejected[client.client]),
            number(float(np.median(durations[own])), 2) if len(own) else "–",
            f"{min(busy, 1.0):.0%}",
            number(float(np.median(updates.staleness[own])), 1) if len(own) else "–",
            number(accuracy.get(client.client)),
        )


def compares(strategy: str) -> bool:
    """Return whether a strategy compares its clients; also if it is not known."""
    from raceme.strategies import STRATEGIES
    from raceme.server.interface import Questions

    return strategy not in STRATEGIES or STRATEGIES[strategy].similarity is not Questions.similarity
