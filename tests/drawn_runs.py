"""Events of all kinds of runs, for tests of plots."""

from __future__ import annotations

import math

import numpy as np

from raceme.core.events import (
    ClientJoined,
    ClientLeft,
    ClusterChange,
    ClustersChanged,
    DataChanged,
    Evaluated,
    Event,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)


def joined(groups: dict[str, int | None]) -> list[Event]:
    """Return the events of clients that join the only cluster."""
    return [
        event
        for client, group in groups.items()
        for event in (ClientJoined(0.0, client, 0, 10, group), assigned(0.0, {client: 0}))
    ]


def changed(
    change: ClusterChange,
    time: float,
    clusters: dict[str, int],
    gone: tuple[int, ...] = (),
    made: tuple[int, ...] = (),
) -> ClustersChanged:
    memberships = {client: {cluster: 1.0} for client, cluster in clusters.items()}
    return ClustersChanged(time, int(time), change, memberships, gone, made)


def assigned(time: float, clusters: dict[str, int]) -> ClustersChanged:
    return changed(ClusterChange.ASSIGN, time, clusters)


def moved(time: float, clusters: dict[str, int]) -> ClustersChanged:
    return changed(ClusterChange.MOVE, time, clusters)


def split(time: float, parent: int, children: dict[int, tuple[str, ...]]) -> ClustersChanged:
    clusters = {client: child for child, clients in children.items() for client in clients}
    return changed(ClusterChange.SPLIT, time, clusters, (parent,), tuple(children))


def updates(clients: str, cluster: int, first: int) -> list[Event]:
    """Return updates of the clients in turn, one per second; faster clients come first."""
    return [
        UpdateApplied(
            seq,
            float(seq),
            client,
            cluster,
            seq - 1,
            0,
            0.5,
            max(0.0, seq - 1.0 - clients.index(client)),
            1.0,
            100,
            100,
        )
        for seq, client in enumerate(clients, first)
    ]


def evaluated(time: float, accuracy: dict[str, tuple[int, float]]) -> Evaluated:
    values = [value for _, value in accuracy.values()]
    return Evaluated(
        time,
        int(time),
        float(np.mean(values)),
        1.0,
        len({cluster for cluster, _ in accuracy.values()}),
        {client: (cluster, value, 1.0) for client, (cluster, value) in accuracy.items()},
    )


def normal(groups: dict[str, int | None] | None = None) -> list[Event]:
    return [
        *joined(groups or {"a": 0, "b": 0, "c": 1, "d": 1}),
        *updates("abcd", 0, 1),
        evaluated(4.0, {"a": (0, 0.2), "b": (0, 0.4), "c": (0, 0.6), "d": (0, 0.8)}),
        split(4.0, 0, {1: ("a", "b"), 2: ("c", "d")}),
        *updates("ab", 1, 5),
        *updates("cd", 2, 7),
        evaluated(8.0, {"a": (1, 0.7), "b": (1, 0.9), "c": (2, 0.8), "d": (2, 1.0)}),
        RunEnded(8.0, 8, "reached max-updates"),
    ]


RUNS: dict[str, list[Event]] = {
    "split": normal(),
    "nothing": [],
    "no updates": [*joined({"a": 0, "b": 1}), RunEnded(0.0, 0, "no client replied")],
    "evaluated before any update": [*joined({"a": 0}), evaluated(0.0, {"a": (0, 0.1)})],
    "one client": [
        *joined({"a": 0}),
        *updates("aa", 0, 1),
        evaluated(2.0, {"a": (0, 0.5)}),
        RunEnded(2.0, 2, "reached max-updates"),
    ],
    "no groups": normal(dict.fromkeys("abcd")),
    "some groups": normal({"a": 0, "b": None, "c": 1, "d": None}),
    "rejected": [
        *normal(),
        UpdateRejected(8.5, "a", "not finite", 7.0),
        UpdateRejected(9.0, "stranger", "not a client", 8.0),
    ],
    "only rejected": [*joined({"a": 0}), UpdateRejected(3.0, "a", "not finite", 0.0)],
    "leaver and newcomer": [
        *normal(),
        ClientLeft(8.5, "a"),
        ClientJoined(9.0, "e", 0, 5, 1),
        assigned(9.0, {"e": 2}),
        *updates("e", 2, 10),
        ClientJoined(11.0, "a", 0, 10, 0, returned=True),
        moved(11.0, {"a": 1}),
        RunEnded(12.0, 9, "reached max-updates"),
    ],
    "joined and never in a cluster": [*normal(), ClientJoined(9.0, "e", 0, 5, None)],
    "merge, found, retire": [
        *normal(),
        changed(ClusterChange.FOUND, 9.0, {"b": 3}, made=(3,)),
        changed(ClusterChange.FOUND, 9.5, {}, made=(5,)),
        changed(ClusterChange.MERGE, 10.0, dict.fromkeys("abcd", 4), (1, 2, 3), (4,)),
        changed(ClusterChange.RETIRE, 11.0, {}, gone=(5,)),
        evaluated(12.0, dict.fromkeys("abcd", (4, 0.5))),
        RunEnded(12.0, 12, "reached max-updates"),
    ],
    "several clusters each": [
        *normal(),
        ClustersChanged(
            9.0, 8, ClusterChange.MOVE, {"a": {1: 0.75, 2: 0.25}, "b": {1: 0.5, 2: 0.5}}
        ),
        ClustersChanged(10.0, 8, ClusterChange.MOVE, {"a": {2: 1.0}}),
        RunEnded(12.0, 12, "reached max-updates"),
    ],
    "a cluster given up with its members": [
        *normal(),
        changed(ClusterChange.RETIRE, 9.0, {}, (2,)),
    ],
    "drift": [
        *normal(),
        DataChanged(8.5, 8, None, 1),
        DataChanged(11.0, 8, "a", 1),
        DataChanged(11.0, 8, "b", 2),
        evaluated(12.0, dict.fromkeys("abcd", (1, 0.5))),
        RunEnded(12.0, 8, "reached max-updates"),
    ],
    "drift at every update": [
        *normal(),
        *(DataChanged(8.0 + index / 100, 8, "a", index) for index in range(1, 100)),
    ],
    "diverged": [*normal(), Evaluated(9.0, 8, math.nan, math.nan, 2, {"a": (1, math.nan, 1.0)})],
    "evaluations without clients": [*updates("ab", 0, 1), Evaluated(2.0, 2, 0.5, 1.0, 1)],
    "many clusters": [
        *joined({f"c{i}": i for i in range(20)}),
        split(1.0, 0, {i + 1: (f"c{i}",) for i in range(20)}),
        evaluated(2.0, {f"c{i}": (i + 1, i / 20) for i in range(20)}),
    ],
    "split at once": [
        *joined({"a": 0, "b": 1}),
        split(0.0, 0, {1: ("a",), 2: ("b",)}),
        *updates("a", 1, 1),
    ],
}
