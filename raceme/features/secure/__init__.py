"""Buffered secure aggregation: the server learns weighted sums of updates, and no single one.

Members of a cluster whose updates are ready form a *cohort*, at any time, and masks that cancel out
in the sum hide each update (Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning", CCS 2017). So asynchronous methods that buffer updates stay asynchronous: other
cohorts train meanwhile. The stages of a cohort:

1. ``keys``: with the message that its update is ready, a member sends two public keys.
2. ``shares``: each member splits the seed of its own mask and its first private key into shares,
   one for each other member, encrypted for it.
3. ``masked``: each member sends its weighted and quantised update, plus its own mask, plus or minus
   a mask that it has in common with each other member.
4. ``unmask``: the members send their shares of the own masks of those that have answered, and of
   the private keys of those that have not, whose common masks remain in the sum.

:mod:`raceme.features.secure.protocol` has the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass

from raceme.core.options import SECONDS, option

COHORT = "secure-sum"
"""Numbers of an update that was part of a sum: number of the sum, largest share of a member in the
mean, and the most that rounding adds to the length of this member's change."""


@dataclass(frozen=True)
class Options:
    """Switches secure aggregation on, and bounds its cohorts."""

    secure: bool = option(False, "the server learns sums of updates only (secure aggregation)")
    secure_least: int = option(5, "secure: members of a cohort at least", low=3)
    secure_most: int = option(
        32, "secure: members at most, as unmasking takes the cube of their number", low=3, high=1000
    )
    secure_seconds: float = option(
        120.0, "secure: longest wait for an answer in each stage", unit=SECONDS, above=0
    )
    secure_range: float = option(
        8.0, "secure: largest change of a weight that is not cut off", above=0
    )
