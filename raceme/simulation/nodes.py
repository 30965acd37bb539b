"""The nodes of a simulated fleet, with their devices."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.serverapp import Grid

from raceme.records.trace import Communication
from raceme.simulation.devices import fleet
from raceme.simulation.trace import PREFIX, traced_fleet
from raceme.simulation.virtual_grid import Node, VirtualGrid

_FIRST_NODE_ID = 1000


def communication_of(grid: Grid) -> Communication | None:
    """Return how long transfers take in a simulated fleet; None for any other grid.

    The function takes a client's id, and the bytes down and up; it returns seconds.
    """
    if not isinstance(grid, VirtualGrid):
        return None
    devices = {
        str(node.config.get("device-id", f"client-{node.config['partition-id']}")): node.device
        for node in grid.nodes
    }

    def communication(client: str, bytes_down: int, bytes_up: int) -> float:
        return devices[client].communication(bytes_down, bytes_up) if client in devices else 0.0

    return communication


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
