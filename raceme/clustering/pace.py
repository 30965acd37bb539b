"""How far one update moves a cluster's model."""

from __future__ import annotations

import numpy as np

from raceme.clustering.decay import cluster_decay
from raceme.protocol.messages import Vector

_UNDER_WAY = 7.5
"""Largest product of share, members and what is carried that was seen to be steady."""


def share_of(members: int, rounds: float, alpha0: float, ease: float) -> float:
    """Return the share α of an update: CASA's at first, that of one of the members in the end.

    ``max(1 / m, min(1, α0 / log2(m + 3)) / (1 + rounds / ease))``: a young cluster moves fast, and
    one that has learnt for long is a mean over all its members.

    Parameters
    ----------
    members : int
        m, at least 1.
    rounds : float
        Updates per member that the cluster has learnt from.
    alpha0 : float
        α0 of :func:`raceme.clustering.decay.cluster_decay`.
    ease : float
        Rounds after which the first share has halved.
    """
    first = min(1.0, cluster_decay(members, 1.0, alpha0))
    return max(1.0 / max(1, members), first / (1.0 + rounds / ease))


def freshness(staleness: int, members: int, power: float) -> float:
    """Return by what an update's share is less because it is stale: ``max(1, s / m) ** -power``.

    Of members that are equally fast each is overtaken by the m - 1 others: that is no staleness
    yet. Who takes five times as long is overtaken five times by all, and its model, mixed in with
    a whole share, would take the others back to where they were then.

    Parameters
    ----------
    staleness : int
        s: updates since the client was given its model, by all whose updates are counted.
    members : int
        m: how many these are.
    power : float
        0: staleness does not matter.
    """
    return float(max(1.0, staleness / max(1, members)) ** -power)


def calibration(alpha: float, members: int) -> float:
    """Return how much of a client's former change is taken back: 1 where α is one member's share.

    With a larger share the model moves on so far before a member reports again that its former
    change says less: 1 / (α m).
    """
    return min(1.0, 1.0 / (alpha * max(1, members)))


def carried(alpha: float, members: int, most: float) -> float:
    """Return how much of what the model has moved meanwhile is added to a member's model.

    0 mixes models in, which takes the model back towards where the member started; 1 adds changes,
    which overshoots where many members are under way at a time: at most 7.5 / (α m).

    Parameters
    ----------
    alpha : float
        α: the update's share.
    members : int
        m: members of its cluster, all of whom may be under way.
    most : float
        Share at most.
    """
    return min(most, _UNDER_WAY / (alpha * max(1, members)))


def cut(vector: Vector, delta: Vector, length: float, bound: float) -> Vector:
    """Return a client's model with its change cut to a length, if that is longer. Shape (d,).

    Parameters
    ----------
    vector, delta : Vector
        z, and z − w₀. Shape (d,).
    length : float
        ‖z − w₀‖, of its weights.
    bound : float
        Length at most; 0: any.
    """
    if not 0.0 < bound < length:
        return vector
    return np.asarray(vector - np.float32(1.0 - bound / length) * delta)
