"""Changes of clusters in words, for progress lines."""

from __future__ import annotations

from collections import Counter

from raceme.protocol.events import ClusterChange, ClustersChanged
from raceme.records.membership import home


def is_news(event: ClustersChanged) -> bool:
    """Return whether a change of clusters is told: what a run begins with, and moves, are not."""
    if event.change in (ClusterChange.SPLIT, ClusterChange.MERGE):
        return True
    return event.change in (ClusterChange.FOUND, ClusterChange.RETIRE) and event.updates > 0


def change_line(event: ClustersChanged) -> str:
    """Describe a change of clusters in one line: with clients, where they are named."""
    sizes = Counter(home(weights) for weights in event.memberships.values())
    made = ", ".join(f"{k} ({sizes[k]})" if sizes else str(k) for k in event.made)
    gone = ", ".join(map(str, event.gone))
    # "cluster 2 → clusters 3 (2), 4 (1)", "clusters 3, 4 → cluster 5 (3)", "new cluster 6".
    before = f"cluster{'' if len(event.gone) == 1 else 's'} {gone}"
    after = f"cluster{'' if len(event.made) == 1 else 's'} {made}"
    what = f"{before} → {after}" if gone and made else f"new {after}" if made else f"{before} ended"
    return f"{what} at update {event.updates}"
