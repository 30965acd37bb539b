"""Fleets of unequal devices, as device profiles.

From the root of the repository, also in the suite ``fair.toml``::

    raceme run --devices benchmarks.unequal_fleets:slow30x20
"""

from __future__ import annotations

import numpy as np

from raceme.simulation import Device


def slow30x20(clients: int, seed: int) -> list[Device]:
    """Return a fleet in which 30 % of the devices take 20 s for a task and the others 1 s."""
    return _mixed(clients, seed, 0.3, 20.0)


def slow70x5(clients: int, seed: int) -> list[Device]:
    """Return a fleet in which 70 % of the devices take 5 s for a task and the others 1 s."""
    return _mixed(clients, seed, 0.7, 5.0)


def _mixed(clients: int, seed: int, share: float, seconds: float) -> list[Device]:
    order = np.random.default_rng([seed, 0xDE71CE]).permutation(clients)
    slow = set(order[: round(share * clients)].tolist())
    return [Device(seconds if client in slow else 1.0, jitter=0.1) for client in range(clients)]
