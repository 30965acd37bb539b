"""How much of windows of time clients spent waiting for others, in a few numbers."""

from __future__ import annotations

from raceme.protocol.events import ClientIdled

LONG = {"idle_over_30_percent": 0.3, "idle_over_50_percent": 0.5}
"""Keys of a summary, to the share of a window beyond which a client has waited long."""


class IdleShares:
    """The share of a window that clients waited, an observer of the run.

    A sample is one client in one window.
    """

    def __init__(self) -> None:
        self._count, self._sum = 0, 0.0
        self._long = dict.fromkeys(LONG, 0)

    def observe(self, event: ClientIdled) -> None:
        """Count one client in one window."""
        share = float(event.share)
        self._count += 1
        self._sum += share
        for key, bound in LONG.items():
            self._long[key] += share > bound

    def result(self) -> dict[str, float | None]:
        """Return the mean share, and how often it was long; None of a run without windows."""
        if not self._count:
            return {"idle_share_mean": None, **dict.fromkeys(LONG)}
        often = {key: count / self._count for key, count in self._long.items()}
        return {"idle_share_mean": self._sum / self._count, **often}
