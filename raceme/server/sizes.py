"""How many examples a client is believed to have: what it says, within proportion."""

from __future__ import annotations

from collections.abc import Sequence

MOST_EXAMPLES = 2**53
"""Nobody has more: whole numbers from here on are not exact as float numbers."""
_TIMES_MEDIAN = 10.0
_STRETCH = 5.0
"""Honest sizes may be so many times as far above the median as the quartiles are away from it, on a
logarithmic scale. With the factor of ten, of log-normal sizes whose logarithms have a standard
deviation of 2, as skewed as any that are published, one in 200,000 is beyond."""


def largest_believed(ordered: Sequence[int]) -> int:
    """Return the largest number of examples that counts.

    Ten times the median, and more where sizes are spread: the median is multiplied by the larger
    one of median / lower quartile and upper quartile / median, to the power of 5, as well. Who
    claims too much moves none of the three by much, as long as those who do are few.

    Parameters
    ----------
    ordered : Sequence[int]
        What the clients state, in ascending order; one at least.
    """
    count = len(ordered)
    # The upper quartile is rounded down: of a few clients it must not be the largest.
    places = count // 4, count // 2, 3 * (count - 1) // 4
    lower, median, upper = (max(1, ordered[place]) for place in places)
    spread = max(median / lower, upper / median)
    return int(min(MOST_EXAMPLES, _TIMES_MEDIAN * median * min(spread, 1e6) ** _STRETCH))
