"""Whether clusters are to be others than they are, by what is known of who is like whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raceme.clustering.evidence import (
    Distances,
    Labels,
    best_partition,
    least_evidence,
    silhouettes,
)
from raceme.clustering.repair import movers

_UNDECIDED = 0.15
"""Evidence so little below the level leaves it open if there are clusters."""
_SLACK = 0.1
"""Evidence below the level at which clusters are given up again."""
_GAIN = 0.1
"""What a repair must bring those who move, in silhouettes."""


@dataclass(frozen=True)
class Judgement:
    """What is to become of the clusters.

    Attributes
    ----------
    wanted : Labels or None
        The group that each client belongs to, from 0, shape (m,); None to leave all as it is.
    evidence : float
        Of these groups; of one group, what the clusters have that are given up for it.
    is_open : bool
        Whether more is to be known before anything can be said.
    """

    wanted: Labels | None
    evidence: float = 0.0
    is_open: bool = False


def judged(distances: Distances, now: Labels, level: float, most: int) -> Judgement:
    """Take the partition with the most evidence, if it is worth it for those who would move.

    If there is too little evidence of any groups, those that there are become one.

    Parameters
    ----------
    distances : Distances
        Shape (m, m).
    now : Labels
        The cluster of each client. Shape (m,).
    level : float
        Evidence that a partition into few large groups needs.
    most : int
        Groups at most.
    """
    if len(now) < 2:
        return Judgement(None)
    groups, present = np.unique(now, return_inverse=True)
    here = silhouettes(distances, present)
    best = best_partition(distances, most)
    needed = least_evidence(level, len(np.unique(best.labels)), len(now))
    if best.evidence >= needed:
        moving = movers(now, best.labels)
        gain = silhouettes(distances, best.labels)[moving] - here[moving]
        is_worth_it = moving.any() and gain.mean() >= _GAIN
        return Judgement(best.labels if is_worth_it else None, best.evidence)
    is_open, evidence = best.evidence >= needed - _UNDECIDED, float(here.mean())
    if len(groups) > 1 and evidence < least_evidence(level, len(groups), len(now)) - _SLACK:
        return Judgement(np.zeros_like(now), evidence, is_open)
    return Judgement(None, evidence, is_open)
