"""A run's clients and clusters as tables of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from raceme.protocol.events import ClusterChange, ClustersChanged
from raceme.records.membership import home
from raceme.records.record import Client, Flags, Floats, RunRecord
from raceme.reporting.page import PageTable, number, spread_over
from raceme.reporting.style import cluster_colour

_MOST_CLIENTS = 200
"""A table of clients has at most so many of them."""
_MOST_MEMBERS = 300
"""So many ids of a cluster's members are listed."""
_MOST_CHANGES = 50
_MOST_OWN = 4
"""So many of a client's clusters are named, those with the largest weights."""
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
    weight : float
        Sum of the weights that all clients have here, those of other clusters included.
    """

    cluster: int
    colour: str
    clients: tuple[str, ...]
    further: int
    counts: tuple[int, ...]
    weight: float

    @property
    def size(self) -> int:
        """Number of all members."""
        return len(self.clients) + self.further


@dataclass(frozen=True)
class Membership:
    """Who is in which cluster at the end, against the true groups where these are known.

    Attributes
    ----------
    groups : tuple of str
        Names of the true groups.
    clusters : tuple of Members
        The first clusters.
    further : int
        Clusters beyond them.
    without : int
        Clients without a cluster.
    shared : int
        Clients of several clusters, which are listed where their weight is largest.
    """

    groups: tuple[str, ...]
    clusters: tuple[Members, ...]
    further: int
    without: int
    shared: int


def membership(record: RunRecord) -> Membership | None:
    """Return the clusters' members; None if all clients were in one cluster all the time."""
    if len({cluster for placed in record.placements for cluster in placed.weights}) < 2:
        return None
    assignment, memberships = record.assignment(), record.memberships()
    total: Counter[int] = Counter()
    for weights in memberships.values():
        total.update(weights)
    groups = record.groups
    known = sorted({group for group in groups.values() if group is not None})
    columns: list[int | None] = list(known)
    if known and any(groups.get(client) is None for client in assignment):
        columns.append(None)
    clusters = sorted(total)
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
                float(total[cluster]),
            )
        )
    names = tuple("not known" if group is None else f"group {group}" for group in columns)
    without = sum(client.client not in assignment for client in record.clients)
    shared = sum(len(weights) > 1 for weights in memberships.values())
    further = max(0, len(clusters) - _MOST_CLUSTERS)
    return Membership(names, tuple(listed), further, without, shared)


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
    heads = ("cluster", "clients", f"mean {record.measure.word}", "lowest", "highest", "updates")
    more = f", the first {_MOST_CLUSTERS} of {len(clusters)}" if len(rows) < len(clusters) else ""
    return PageTable(f"Clusters at the last evaluation{more}", heads, tuple(rows))


def changes_table(record: RunRecord) -> PageTable | None:
    """Return what was split, merged, founded and given up when; None if nothing was.

    What a run begins with is no change.
    """
    changes = [c for c in record.changes if (c.made or c.gone) and (c.gone or c.time > 0)]
    if not changes:
        return None
    rows = tuple(
        (
            number(float(change.time), 2),
            number(change.updates),
            change.change.value,
            ", ".join(map(str, change.gone)) or "–",
            _sizes(change),
            number(float(change.score)),
            number(float(change.threshold)),
        )
        for change in changes[:_MOST_CHANGES]
    )
    heads = ("time (s)", "updates", "change", "of cluster", "to (clients)", "measured", "bound")
    count = len(changes)
    shown = f"{_MOST_CHANGES} of {count}" if count > _MOST_CHANGES else str(count)
    title = f"{shown} change{'' if count == 1 else 's'} of the clusters"
    return PageTable(title, heads, rows, words=(2, 3, 4))


def _sizes(change: ClustersChanged) -> str:
    """Name the new clusters with the number of clients that came into each."""
    sizes = Counter(home(weights) for weights in change.memberships.values())
    return ", ".join(f"{cluster} ({sizes[cluster]})" for cluster in change.made) or "–"


def moves_table(record: RunRecord) -> PageTable | None:
    """Return how often clients moved, if any did on its own."""
    moved = [change for change in record.changes if change.change is ClusterChange.MOVE]
    if not moved:
        return None
    of = Counter(client for change in moved for client in change.memberships)
    rows = tuple((client, number(count)) for client, count in of.most_common(_MOST_CHANGES))
    total = sum(of.values())
    times = f"{total:,} time{'' if total == 1 else 's'}"
    more = f", the {len(rows)} most often" if len(rows) < len(of) else ""
    title = f"Clients moved, or their weights changed, {times}{more}"
    return PageTable(title, ("client", "moves"), rows)


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
        record.measure.word,
    )
    return PageTable(f"The numbers: {shown}", heads, rows)


def costs_table(record: RunRecord) -> PageTable | None:
    """Return what each device's updates cost, summed up; None if no device states it.

    Bytes are those of the arrays, as the server has counted them; seconds and energy are what
    devices state.
    """
    updates = record.updates
    if not np.isfinite(updates.cpu_seconds).any() and not np.isfinite(updates.joules).any():
        return None
    chosen = [record.clients[i].client for i in spread_over(len(record.clients), _MOST_CLIENTS)]
    rows = [_cost_row(name, record, updates.client == name) for name in chosen]
    if len(chosen) == len(record.clients) > 1:
        rows.append(_cost_row("all", record, np.ones(len(updates.client), bool)))
    heads = ("client", "updates", "CPU (s)", "energy (J)", "bytes down", "bytes up")
    more = "" if len(chosen) == len(record.clients) else f", {len(chosen)} clients of the run"
    return PageTable(f"What the updates cost{more}", heads, tuple(rows))


def _cost_row(name: str, record: RunRecord, own: Flags) -> tuple[str, ...]:
    updates = record.updates
    return (
        name,
        number(int(own.sum())),
        number(_sum(updates.cpu_seconds[own]), 1),
        number(_sum(updates.joules[own]), 1),
        number(int(updates.bytes_down[own].sum())),
        number(int(updates.bytes_up[own].sum())),
    )


def _sum(values: Floats) -> float | None:
    """Return the sum of what is known; None if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


def _client_rows(record: RunRecord, clients: Iterable[Client]) -> Iterable[tuple[str, ...]]:
    updates, found = record.updates, record.client_evaluations
    memberships = record.memberships()
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
        yield (
            client.client,
            "–" if (group := record.groups.get(client.client)) is None else str(group),
            _own_clusters(memberships.get(client.client, {})),
            number(client.num_examples),
            number(len(own)),
            number(rejected[client.client]),
            number(float(np.median(durations[own])), 2) if len(own) else "–",
            f"{min(busy, 1.0):.0%}",
            number(float(np.median(updates.staleness[own])), 1) if len(own) else "–",
            number(accuracy.get(client.client)),
        )


def _own_clusters(weights: Mapping[int, float]) -> str:
    """Name a client's clusters, of several the weights too."""
    if len(weights) < 2:
        return ", ".join(map(str, weights)) or "–"
    ranked = sorted(weights, key=lambda cluster: (-weights[cluster], cluster))
    named = [f"{cluster} ({weights[cluster]:.2f})" for cluster in ranked[:_MOST_OWN]]
    return ", ".join(named) + (", …" if len(ranked) > _MOST_OWN else "")
