"""The nodes of a simulated fleet, with their devices."""

from __future__ import annotations

from collections.abc import Sequence

from raceme.simulation.devices import fleet
from raceme.simulation.trace import PREFIX, traced_fleet
from raceme.simulation.virtual_grid import Node

_FIRST_NODE_ID = 1000


def nodes_of(profile: str, examples: Sequence[int], seed: int) -> list[Node]:
    """Make one node per client, with its device.

    Parameters
    ----------
    profile : str
        Device profile: a built-in one's name, a TOML file, or ``trace:FOLDER`` of a run.
    examples : Sequence[int]
        Training examples of each client.
    seed : int
        Decides which devices are the slow ones.

    Raises
    ------
    UserError
        Unknown profile, unusable trace.
    """
    names: list[str] = []
    if profile.startswith(PREFIX):
        devices, names = traced_fleet(profile.removeprefix(PREFIX), len(examples))
    else:
        devices = fleet(profile, len(examples), seed)
    return [
        Node(
            node_id=_FIRST_NODE_ID + index,
            device=device,
            config={
                "partition-id": index,
                "num-partitions": len(examples),
                **({"device-id": names[index]} if names else {}),
            },
            examples=count,
        )
        for index, (device, count) in enumerate(zip(devices, examples, strict=True))
    ]
