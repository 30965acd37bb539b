"""Uploads one by one: how good each was, and how well its mixture was estimated.

The measures of Li and Zhu, "Client-Driven Federated Learning": the accuracy of what a client
uploads and of what it gets in return, on the same data, and the divergence of the true mixture of
these data from the weights that the method gives the client.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import rel_entr

from raceme.protocol.events import (
    ClientJoined,
    ClientLeft,
    ClustersChanged,
    ClustersScored,
    Event,
    UpdateApplied,
)
from raceme.records.membership import Membership

FLOOR = 1e-12
"""The least share that an estimate is taken to give: a mixture that has more is infinitely far from
an estimate of nothing."""


@dataclass
class Upload:
    """An update that says how good it is, or of which mixture its data are.

    Attributes
    ----------
    seq : int
        Number of the update.
    client : str
        Whose.
    session : int
        The session that it fell into, from 1.
    before, after : float or None
        Accuracy of the uploaded model, and of the one that the client got in return, both on the
        test data of the upload. The latter is known once the client has uploaded again.
    mixture : tuple[float, ...]
        True share of each distribution in the data.
    estimate : Mapping[int, float]
        Weight of each cluster of the client once the update was applied.
    """

    seq: int
    client: str
    session: int
    before: float | None
    after: float | None
    mixture: tuple[float, ...]
    estimate: Mapping[int, float]


class Uploads:
    """Gathers the uploads of a run and counts its sessions, an observer of the run.

    A session is a stretch in which every client that is online has uploaded at least once.

    Parameters
    ----------
    membership : Membership
        Which client is in which clusters; it has to be told of an event first.

    Attributes
    ----------
    session_ends : list[int]
        Number of the update with which each session ended.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rows: list[Upload] = []
        self._latest: dict[str, Upload] = {}
        self._after: dict[str, float] = {}
        # Uploads whose estimate comes with the changes of clusters that follow them.
        self._open: list[Upload] = []
        self._changed = False
        self._identified = False
        self._online: set[str] = set()
        self._missing: set[str] = set()
        self.session_ends: list[int] = []

    def observe(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, UpdateApplied):
            if self._changed:
                self._close()
            self._observe_update(event)
            return
        if isinstance(event, ClustersChanged):
            self._changed = bool(self._open)
            return
        self._close()
        if isinstance(event, ClientJoined):
            if event.client not in self._online:
                self._missing.add(event.client)
            self._online.add(event.client)
        elif isinstance(event, ClientLeft):
            self._online.discard(event.client)
            self._missing.discard(event.client)
        elif isinstance(event, ClustersScored):
            self._identified = True

    @property
    def rows(self) -> Sequence[Upload]:
        """The uploads that say something, in their order."""
        self._close()
        return self._rows

    @property
    def accuracy_before(self) -> float | None:
        """Mean over the clients of the latest accuracy of an upload; None if none has any."""
        return _mean(row.before for row in _last_of_each(self._rows, "before"))

    @property
    def accuracy_after(self) -> float | None:
        """Mean over the clients of the latest accuracy of what they got; None if none has any."""
        return _mean(self._after.values())

    def matched(self) -> dict[int, int]:
        """Return the distribution that each cluster stands for.

        Where clusters were tested on sets of their own, cluster k is of distribution k; otherwise
        the assignment is the one with the least divergence over the run. Clusters that stand for
        none are left out.
        """
        known = self._compared()
        clusters = sorted({cluster for row in known for cluster in row.estimate})
        if self._identified or not known:
            return {cluster: cluster for cluster in clusters}
        return matching(clusters, [(row.mixture, row.estimate) for row in known])

    def unmatched(self) -> list[int]:
        """Return the distributions that no cluster stands for: there are fewer clusters.

        Nothing of a method that puts every client into a single cluster.
        """
        known = self._mixed()
        return _missing(known, self.matched()) if known else []

    def divergences(self) -> list[tuple[Upload, float]]:
        """Return KL(true ‖ estimated) of every upload of which both are known.

        Nothing of a method that puts every client into a single cluster: it estimates no mixture.
        Nothing either where distributions are `unmatched`: what an estimate gives them is unknown,
        and taking it for nothing would measure only how small nothing is taken to be.
        """
        known = self._mixed()
        of = self.matched() if known else {}
        if _missing(known, of):
            return []
        return [(row, divergence(row.mixture, shares(row.estimate, of, row))) for row in known]

    def _compared(self) -> list[Upload]:
        """Return the uploads of which both the true and the estimated mixture are known."""
        return [row for row in self.rows if row.mixture and row.estimate]

    def _mixed(self) -> list[Upload]:
        """Return them; none where every client is put into a single cluster."""
        known = self._compared()
        return known if any(len(row.estimate) > 1 for row in known) else []

    def result(self) -> dict[str, object]:
        """Return the numbers of a summary; None where there are none.

        ``mixture_divergence`` is the mean over the last third of the uploads.
        """
        found = self.divergences()
        late = [value for _, value in found[-math.ceil(len(found) / 3) :]] if found else []
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "mixture_divergence": _mean(late),
            "sessions": self._sessions(found) if self._rows else None,
        }

    def by_session(self, quantity: str) -> list[float | None]:
        """Return the mean of ``"before"`` or ``"after"`` over the clients, in each whole session.

        Of several uploads of a client the last one counts. None where fewer than nine tenths of the
        clients have the quantity, as in the last session: what was got is known later.
        """
        by_session: defaultdict[int, list[Upload]] = defaultdict(list)
        for row in self.rows:
            by_session[row.session].append(row)
        means = []
        for number in range(1, len(self.session_ends) + 1):
            rows = by_session[number]
            known = [getattr(row, quantity) for row in _last_of_each(rows, quantity)]
            enough = 10 * len(known) >= 9 * len({row.client for row in rows})
            means.append(_mean(known) if enough else None)
        return means

    def _sessions(self, divergences: Sequence[tuple[Upload, float]]) -> dict[str, object]:
        sessions = range(1, len(self.session_ends) + 1)
        return {
            "updates": list(self.session_ends),
            "accuracy_before": self.by_session("before"),
            "accuracy_after": self.by_session("after"),
            "mixture_divergence": [
                _mean(value for row, value in divergences if row.session == number)
                for number in sessions
            ],
        }

    def _observe_update(self, event: UpdateApplied) -> None:
        client, session = event.client, len(self.session_ends) + 1
        if event.accuracy_after is not None:
            self._after[client] = event.accuracy_after
            if client in self._latest:
                self._latest[client].after = event.accuracy_after
        if event.mixture or event.accuracy_before is not None:
            row = Upload(event.seq, client, session, event.accuracy_before, None, event.mixture, {})
            self._rows.append(row)
            self._latest[client] = row
            self._open.append(row)
        else:
            # What the client says of its last upload next time is about this one.
            self._latest.pop(client, None)
        self._missing.discard(client)
        if not self._missing:
            self.session_ends.append(event.seq)
            self._missing = set(self._online)

    def _close(self) -> None:
        for row in self._open:
            row.estimate = self._membership.weights.get(row.client, {})
        self._open, self._changed = [], False


def divergence(true: Sequence[float], estimate: Sequence[float]) -> float:
    """Return KL(true ‖ estimate) = Σ p log(p / q) of two mixtures, in nats.

    Parameters
    ----------
    true : Sequence[float]
        Shares p; one of 0 counts 0.
    estimate : Sequence[float]
        Shares q of the same distributions; taken to be 1e-12 at least.
    """
    return float(rel_entr(true, np.maximum(estimate, FLOOR)).sum())


def shares(estimate: Mapping[int, float], of: Mapping[int, int], row: Upload) -> list[float]:
    """Return the estimated share of each distribution of an upload.

    Parameters
    ----------
    estimate : Mapping[int, float]
        Weight of each cluster.
    of : Mapping[int, int]
        The distribution that each cluster stands for.
    row : Upload
        The upload.
    """
    found = [0.0] * len(row.mixture)
    for cluster, weight in estimate.items():
        position = of.get(cluster)
        if position is not None and position < len(found):
            found[position] += weight
    return found


def matching(
    clusters: Sequence[int], pairs: Sequence[tuple[Sequence[float], Mapping[int, float]]]
) -> dict[int, int]:
    """Return which distribution each cluster stands for, so that the divergence is least.

    The sum of KL(true ‖ estimated) is Σ_j cost[j, k(j)] plus a constant, with cost[j, k] =
    −Σ p_j log q_k over the uploads: an assignment problem.

    Parameters
    ----------
    clusters : Sequence[int]
        The clusters.
    pairs : Sequence
        True mixture and estimated weights by cluster, of each upload.

    Returns
    -------
    dict[int, int]
        Cluster to distribution, one to one; clusters that no distribution is left for are missing.
    """
    count = max(len(true) for true, _ in pairs)
    true = np.array([[*mixture, *[0.0] * (count - len(mixture))] for mixture, _ in pairs])
    weights = np.array([[estimate.get(k, 0.0) for k in clusters] for _, estimate in pairs])
    # A distribution may be left without a cluster, at the cost of an estimate of nothing.
    weights = np.hstack([weights, np.zeros((len(pairs), count))])
    cost = -true.T @ np.log(np.maximum(weights, FLOOR))
    rows, columns = linear_sum_assignment(cost)
    return {
        clusters[column]: int(row)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        if column < len(clusters)
    }


def _missing(known: Sequence[Upload], of: Mapping[int, int]) -> list[int]:
    """Return the distributions of some uploads that no cluster stands for."""
    count = max((len(row.mixture) for row in known), default=0)
    return sorted(set(range(count)) - set(of.values()))


def _last_of_each(rows: Iterable[Upload], quantity: str) -> Iterable[Upload]:
    """Return the last upload of each client that has a quantity."""
    return {row.client: row for row in rows if getattr(row, quantity) is not None}.values()


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
